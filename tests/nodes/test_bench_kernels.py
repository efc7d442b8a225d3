"""The benchmark node on a CPU: a table that says what it is, parity, and a record that validates."""

import json
import os
import sys
import types

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.usefixtures("pack")

SMALL = {"rows": 17, "columns": "small", "rounds": 2, "filename_prefix": "h3bw/bench"}


def bench(**changes):
    return pack_module("nodes.bench_kernels").BenchKernels.execute(**{"ops": "all", **SMALL, **changes})


def place_of(entry):
    import folder_paths

    return os.path.join(folder_paths.get_output_directory(), entry["subfolder"], entry["filename"])


def record_of(out):
    return pack_module("kernels.measure").read(place_of(out.ui["h3bw_record"][0]))


def test_every_op_is_benchmarked():
    """An op that is dropped into the folder gets a row, or a line that says why not."""
    producers = pack_module("kernels.measure.producers")
    groups, apart = producers.groups_of()
    assert apart == ["low_rank_add_", "swiglu_side"]  # ComfyUI has no chain that it could be compared with
    assert {group.op for group in groups} == set(pack_module("kernels.fused").OPS) - set(apart)
    assert [group.name for group in groups if group.op == "rows_nvfp4"] == ["rows_nvfp4, dynamic", "rows_nvfp4, static"]


def test_a_whole_run_on_the_cpu():
    out = bench()
    text, record = out.result[0], record_of(out)
    assert text == out.ui["text"][0]
    assert "CPU, not a measurement" in text and "host clock" in text
    assert "Triton kernels need a CUDA device, have cpu" in text
    assert record["kind"] == "kernel" and record["status"] == "finished" and record["hardware"]["gpus"] == []
    assert "not a measurement" in record["protocol"]["timer"]
    variants = {(case["group"], case["variant"]) for case in record["cases"]}
    assert {("swiglu_nvfp4, static", name) for name in ("stock", "stock (A/A)", "reference")} <= variants
    # The references equal ComfyUI's chain with comfy-kitchen's eager quantiser in every byte.
    assert {gate["result"] for gate in record["gates"]} == {"passed"} and len(record["gates"]) == 9
    sums = {entry["name"]: entry["sha256"] for entry in record["outputs"]}
    assert sums["rows_nvfp4, dynamic / stock"] == sums["rows_nvfp4, dynamic / reference"]
    assert all(case["comparison"] is None for case in record["cases"]), "a verdict needs a measurement"
    assert all(entry["count"] == 1 for entry in record["dispatch"]["fallbacks"])
    assert {entry["implementation"] for entry in record["dispatch"]["ran"]} == {
        "ComfyUI's chain", "ComfyUI's chain, comfy-kitchen eager", "reference"
    }  # fmt: skip


def test_one_op_and_few_rows():
    record = record_of(bench(ops="swiglu", rows=100_000))
    cases = [case for case in record["cases"] if case["group"] != "copy"]
    limit = pack_module("kernels.measure.producers").CPU_ROWS
    assert {case["group"] for case in cases} == {"swiglu"} and cases[0]["shape"] == [limit, 512]
    assert limit <= 512


def test_a_wrong_result_is_counted_and_fails_its_gate(monkeypatch):
    """One flipped code, one scale and the decode scale; and one flipped element of a bf16 result."""
    producers, nvfp4 = pack_module("kernels.measure.producers"), pack_module("kernels.nvfp4")
    q = nvfp4.quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    scales = q.block_scale.view(torch.uint8).clone()
    scales[0, 0] += 1
    codes = q.codes.clone()
    codes[0, 0] ^= 0x11
    wrong = nvfp4.NVFP4(codes, scales.view(torch.float8_e4m3fn), q.decode_scale * 2, q.shape)
    assert producers.difference(q, q) == (0, "equal")
    assert producers.difference(wrong, q) == (4, "2 codes, 1 scales, 1 decode scale")
    op = pack_module("kernels.fused").OPS["swiglu"]
    broken = type(op)(op.name, op.summary, lambda gate_up: op.reference(gate_up) * 2, op.bytes_moved)
    monkeypatch.setattr(pack_module("kernels.fused.swiglu"), "OP", broken)
    out = bench(ops="swiglu")
    (gate,) = record_of(out)["gates"]
    assert gate["result"] == "failed" and gate["observed"] > 0
    assert "FAILED: swiglu / reference: differing from stock" in out.result[0]


def test_without_comfy_kitchen_the_reference_is_the_baseline(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    record = record_of(bench(ops="rows_nvfp4"))
    assert {case["variant"] for case in record["cases"] if case["group"] != "copy"} == {"reference", "reference (A/A)"}
    missing = [entry for entry in record["dispatch"]["fallbacks"] if entry["what"].endswith("/ stock")]
    assert len(missing) == 2 and "comfy_kitchen" in missing[0]["reason"]


def test_without_comfy_it_gives_the_same_bytes(tmp_path):
    """The plain function, with comfy-kitchen's own layout: what a machine without ComfyUI runs."""
    producers = pack_module("kernels.measure.producers")
    options = {"rows": 17, "columns": "small", "ops": ["rows_nvfp4"], "rounds": 1}
    report = producers.run("cpu", **options, out_path=tmp_path / "a.json")
    inside = record_of(bench(ops="rows_nvfp4"))
    assert report.record["outputs"] == inside["outputs"] and report.record["inputs"] == inside["inputs"]
    assert report.lines[0].variant == "stock" and report.lines[0].times_stock == 1.0


def test_a_cancel_leaves_an_aborted_record(monkeypatch):
    import comfy.model_management
    import folder_paths

    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        bench(filename_prefix="h3bw/cancelled")
    folder = os.path.join(folder_paths.get_output_directory(), "h3bw")
    (name,) = [name for name in os.listdir(folder) if name.startswith("cancelled")]
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        record = json.load(file)
    assert record["status"] == "aborted" and record["notes"][-1] == "the run ended with InterruptProcessingException"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": 0}, "whole numbers from 1, have 0"),
        ({"rounds": -1}, "have 17 and -1"),
        ({"rows": 1.5}, "have 1.5"),
        ({"columns": "large"}, "'large' asked for; choose 'H3"),
        ({"ops": "gelu"}, "gelu asked for; choose all or of gate_residual_"),
        ({"filename_prefix": "../outside"}, "leads out of the output folder"),
    ],
)
def test_bad_input(changes, text):
    with pytest.raises((ValueError, RuntimeError), match=text):
        bench(**changes)


def test_widths_and_devices_that_cannot_be(tmp_path):
    producers = pack_module("kernels.measure.producers")
    with pytest.raises(producers.BenchError, match="multiples of 16"):
        producers.run("cpu", 16, (8, 16, 16), out_path=tmp_path / "a.json")
    with pytest.raises(producers.BenchError, match="choose cuda or cpu"):
        producers.run("meta", 16, "small", out_path=tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_says_how_much(monkeypatch):
    producers = pack_module("kernels.measure.producers")
    monkeypatch.setattr(producers, "set_count", lambda one, device: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    groups, _ = producers.groups_of("swiglu")
    columns = producers.PRESETS[producers.H3_COLUMNS]
    with pytest.raises(producers.BenchError, match=r"38016 rows need about 6\.\d GiB on GPU X, 2\.0 GiB are free"):
        producers._require_memory(groups, 38016, columns, torch.device("cuda", 0))


def test_floors_are_those_of_the_op():
    """Per element of h: 2.5625 and 4.5625 bytes with the norm fused, 4 more where ATen's norm is kept."""
    producers = pack_module("kernels.measure.producers")
    columns = producers.PRESETS[producers.H3_COLUMNS]
    elements = 38016 * 5376

    def per_element(static, norm):
        group = producers.Group("norm_modulate_nvfp4", static)
        return producers.floor_bytes(group, norm, 38016, columns) / elements

    assert [per_element(True, "fused"), per_element(False, "fused")] == [2.5625, 4.5625]
    assert [per_element(True, "aten"), per_element(False, "aten")] == [6.5625, 8.5625]


def test_the_plot(tmp_path):
    """A PNG with matplotlib; without it a sentence."""
    report = pack_module("kernels.measure.report")
    line = report.Line("swiglu", "stock", 1.0, 0.1, 100.0, 0.5, 1.0, 0.5, "equal", "–")
    record = {"hardware": {"gpus": [{"name": "GPU X"}]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
        patch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
        assert "pip install matplotlib" in report.plot([line], record, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
    pytest.importorskip("matplotlib", reason="matplotlib is optional and not installed")
    assert report.plot([line, line], record, tmp_path / "b.png") is None
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_it_is_never_cached():
    node = pack_module("nodes.bench_kernels").BenchKernels
    assert node.fingerprint_inputs() != node.fingerprint_inputs()
