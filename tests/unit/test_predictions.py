"""What the roofline predicts for a step, against what was measured, and that a record takes a prediction's place."""

import pytest
from conftest import pack_module

predictions = pack_module("kernels.measure.predictions")
ROWS = 38016


def record(gpu="NVIDIA H200", rows=ROWS, stock=8570.0, pack=5450.0, **changes):
    cases = [
        {"variant": name, "shape": [rows, predictions.HIDDEN], "summary": {"median": ms}}
        for name, ms in (("stock", stock), ("pack", pack))
    ]
    gpus = [] if gpu is None else [{"name": gpu}]
    found = {"kind": "step", "status": "finished", "run_id": "20260101T000000Z-step-abc", "cases": cases}
    return {**found, "hardware": {"gpus": gpus}, **changes}


def test_the_formula_is_near_what_was_measured():
    """One H200: stock 8.57 s a step, GEMMs 1.85 of it, flash attention 6.05. The shares come from it: no forecast."""
    h200 = next(device for device in predictions.DEVICES if device.name == "H200")
    assert predictions.seconds(h200, ROWS, "stock") == pytest.approx(8.57, rel=0.05)
    assert predictions.gemm_flops(ROWS) / (h200.bf16 * predictions.SHARE * 1e12) == pytest.approx(1.85, rel=0.2)
    assert predictions.attention_flops(ROWS) / (h200.bf16 * 0.33 * 1e12) == pytest.approx(6.05, rel=0.06)


def test_gemms_alone_agree_with_the_roofline_of_the_record():
    """The four FP4 GEMMs at 32,768 rows: 3.6, 1.08, 0.90 and 0.20 s on GB10, RTX 5090, PRO 6000 and B200."""
    for device, expected in zip(predictions.DEVICES, (3.6, 1.08, 0.90, 0.20), strict=False):
        found = predictions.gemm_flops(32768) / (device.fp4 * predictions.SHARE * 1e12)
        assert found == pytest.approx(expected, rel=0.02), device.name


def test_flops_are_counted():
    widths = 3 * 7168 * 5376 + 5376 * 7168 + 28672 * 5376 + 5376 * 14336
    assert predictions.gemm_flops(1, blocks=1) == 2 * widths
    assert predictions.attention_flops(10, blocks=1) == 4 * 56 * 128 * 100
    for fp4 in (True, False):
        assert predictions.chain_bytes(7, "pack", fp4) < predictions.chain_bytes(7, "stock", fp4)


def test_a_record_takes_the_place_of_the_prediction():
    before = predictions.table(ROWS)
    assert {row.device for row in before} >= {"GB10 (DGX Spark)", "RTX 5090", "RTX PRO 6000", "B200"}
    assert all(row.label.startswith("prediction; ") for row in before)
    after = predictions.table(ROWS, [record()])
    own = [row for row in after if row.device == "H200"]
    assert [(row.variant, row.seconds) for row in own] == [("stock", 8.57), ("pack", 5.45)]
    assert all(row.label == "measured, run 20260101T000000Z-step-abc" for row in own)
    assert own[1].share == pytest.approx(5.45 / 8.57) and len(after) == len(before)
    lines = predictions.as_lines(after, ROWS)
    assert sum("measured, run" in line for line in lines) == 2 and "no measurement" in lines[0]


@pytest.mark.parametrize(
    "changes", [{"gpu": None}, {"kind": "kernel"}, {"status": "aborted"}, {"rows": 100}, {"cases": []}]
)
def test_other_records_are_left_out(changes):
    assert predictions.table(ROWS, [record(**changes)]) == predictions.table(ROWS)


def test_an_unknown_gpu_is_added():
    rows = predictions.table(ROWS, [record(gpu="GPU X", stock=2000.0, pack=1000.0)])
    assert [row.seconds for row in rows if row.device == "GPU X"] == [2.0, 1.0]
    assert len(rows) == 2 * len(predictions.DEVICES) + 2
