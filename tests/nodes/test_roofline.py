"""The roofline on a CPU: every GEMM and producer has a floor, checked numbers, and a record that validates."""

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.usefixtures("pack")


def bench(tmp_path, **changes):
    module = pack_module("kernels.measure.gemm_roofline")
    return module.run("cpu", **{"rows": 17, "out_path": tmp_path / "roofline.json", **changes})


def test_a_whole_run_on_the_cpu(tmp_path):
    report = bench(tmp_path, rows=100_000)
    record = pack_module("kernels.measure").read(tmp_path / "roofline.json")
    producers = pack_module("kernels.measure.producers")
    assert record == report.record and record["kind"] == "kernel" and record["status"] == "finished"
    assert "CPU, not a measurement" in report.text
    wanted = {"qkv_proj", "out_proj", "fc1", "fc2", *(group.name for group in producers.groups_of()[0])}
    assert {line.group for line in report.lines} == wanted
    assert {line.variant for line in report.lines if line.tflops is not None} == {"bf16", "dequantised"}
    assert all(line.floor_ms > 0 and line.share == pytest.approx(line.floor_ms / line.ms) for line in report.lines)
    assert all(line.bound == "bytes" for line in report.lines if line.tflops is None)
    assert {gate["result"] for gate in record["gates"]} == {"passed"} and len(record["gates"]) == 4
    assert any(entry["reason"] == "cpu has no FP4 matrix multiply" for entry in record["dispatch"]["fallbacks"])
    shape = next(case["shape"] for case in record["cases"] if case["group"] == "fc1")
    assert shape == [producers.CPU_ROWS, 1024, 256]


def test_floors():
    module, producers = pack_module("kernels.measure.gemm_roofline"), pack_module("kernels.measure.producers")
    shapes = module.shapes(producers.PRESETS[producers.H3_COLUMNS])
    assert shapes == {"qkv_proj": (21504, 5376), "out_proj": (5376, 7168), "fc1": (28672, 5376), "fc2": (5376, 14336)}
    x, w, y = 38016 * 5376, 21504 * 5376, 38016 * 21504
    assert module.bytes_of("bf16", 38016, 21504, 5376) == 2 * (x + w + y)
    assert module.bytes_of("dequantised", 38016, 21504, 5376) == 2 * x + 9 * w // 16 + 2 * y
    assert module.bytes_of("fp4", 38016, 21504, 5376) == 9 * (x + w) // 16 + 2 * y


def test_a_wrong_product_fails_its_gate(tmp_path, monkeypatch):
    module = pack_module("kernels.measure.gemm_roofline")
    real = module.dequantiser()
    monkeypatch.setattr(module, "dequantiser", lambda: lambda q: real(q) * 1.1)
    report = bench(tmp_path)
    assert {gate["result"] for gate in report.record["gates"]} == {"failed"}
    assert "FAILED: qkv_proj / dequantised" in report.text


def test_what_does_not_run_has_its_reason(tmp_path, monkeypatch):
    module = pack_module("kernels.measure.gemm_roofline")
    monkeypatch.setattr(module, "dequantiser", lambda: None)
    report = bench(tmp_path)
    assert {line.variant for line in report.lines} == {"bf16", "auto"}
    assert "dequantised: it is not installed" in report.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    assert module.fp4_reason(torch.device("cuda", 0)).startswith("GPU X has no FP4 matrix multiply")


@pytest.mark.parametrize("changes", [{"rows": 0}, {"rounds": 0}, {"columns": "large"}, {"rows": 1.5}])
def test_bad_input(changes, tmp_path):
    producers = pack_module("kernels.measure.producers")
    with pytest.raises(producers.BenchError, match="rows and rounds must be whole numbers"):
        bench(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_another_device(tmp_path):
    module, producers = pack_module("kernels.measure.gemm_roofline"), pack_module("kernels.measure.producers")
    with pytest.raises(producers.BenchError, match="choose cuda or cpu"):
        module.run("meta", out_path=tmp_path / "a.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would time the real widths; see tests/gpu")
def test_the_node():
    module = pack_module("nodes.roofline")
    out = module.Roofline.execute(rows=17, columns="small", rounds=1, filename_prefix="h3bw/roofline")
    assert out.result[0] == out.ui["text"][0] and "bound by" in out.result[0]
    assert module.Roofline.fingerprint_inputs() != module.Roofline.fingerprint_inputs()
