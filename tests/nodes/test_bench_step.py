"""The step benchmark on a CPU with the tiny model: variants, what ran, parity, and a record that says what it is."""

import json
import os

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, fuse, run_of, selftest

pytestmark = pytest.mark.usefixtures("pack")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would draw the full-size model; see tests/gpu")


@on_cpu
def test_a_whole_run_on_the_cpu(tmp_path):
    module = pack_module("nodes.bench_step")
    report = module.run(None, ((1344, 768, 124),), ("pack", "attention", "fuse"), 5, tmp_path / "step.json", rounds=9)
    record = pack_module("kernels.measure").read(tmp_path / "step.json")
    assert record == report.record and record["kind"] == "step" and record["status"] == "finished"
    assert "CPU, not a measurement" in report.text and "prediction" in report.text
    assert [line.variant for line in report.lines] == ["stock", "pack", "attention", "fuse"], "stock is added"
    assert {line.size for line in report.lines} == {"64x64x22"}
    assert {case["variant"] for case in record["cases"]} == {"stock", "stock (A/A)", "pack", "attention", "fuse"}
    assert all(case["comparison"] is None for case in record["cases"]), "a verdict needs a measurement"
    results = {gate["name"]: gate["result"] for gate in record["gates"]}
    assert results["64x64x22 / fuse: latent differs from stock's in"] == "passed"
    assert results["64x64x22 / pack: latent differs from attention's in"] == "passed"
    assert {result for name, result in results.items() if "time" in name} == {"skipped"}
    ran = {entry["what"]: entry["implementation"] for entry in record["dispatch"]["ran"]}
    assert ran["64x64x22 / pack: blocks"] == "3 of 3 fused" and ran["64x64x22 / pack: attention"] == "sdpa"
    assert ran["64x64x22 / stock"].startswith("ComfyUI's blocks, attention")
    sums = {entry["name"]: entry["sha256"] for entry in record["outputs"]}
    assert sums["64x64x22 / fuse"] == sums["64x64x22 / stock"]


@on_cpu
def test_a_wrong_block_fails_its_gate(tmp_path, monkeypatch):
    adapt, module = pack_module("nodes.adapt"), pack_module("nodes.bench_step")
    real = adapt.fused_forward
    monkeypatch.setattr(adapt, "fused_forward", lambda *arguments: real(*arguments).neg_())
    report = module.run(None, variants=("fuse",), out_path=tmp_path / "step.json")
    gates = {gate["name"]: gate for gate in report.record["gates"]}
    assert gates["64x64x22 / fuse: latent differs from stock's in"]["result"] == "failed"
    assert "failed: 64x64x22 / fuse: latent differs" in report.text


def test_stock_is_what_comfyui_runs_alone(pack):
    sides, runs = pack_module("nodes.sides"), pack_module("nodes.run")
    model, _, _ = selftest()
    marked = pack_module("nodes.attention").AttentionBackend.execute(
        fuse(model), {"backend": "auto", "allow_approximate": True, "dense_blocks": "0, 2"}
    ).result[0]  # fmt: skip
    options = sides.stock_of(marked).model_options["transformer_options"]
    assert runs.RUN not in options and "optimized_attention_override" not in options
    assert not options["patches_replace"]["dit"]
    assert runs.find_settings(marked).keys() == {"FuseBlocks", "AttentionBackend"}, "what was connected stays"


def test_the_override_below_ours_is_stocks(pack):
    sides, adapt_attention = pack_module("nodes.sides"), pack_module("nodes.adapt_attention")
    model, _, _ = selftest()
    theirs = model.clone()
    calls = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    theirs.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = calls
    bare = sides.stock_of(attend(theirs))
    assert adapt_attention.installed(bare.model_options["transformer_options"]) is calls


@on_cpu
def test_a_backend_by_name_and_a_wired_model(tmp_path):
    module = pack_module("nodes.bench_step")
    model, _, _ = selftest()
    wired = fuse(model)
    report = module.run(None, variants=("sdpa", "as wired"), out_path=tmp_path / "step.json", model=wired)
    assert [line.variant for line in report.lines] == ["stock", "sdpa", "as wired"]
    assert report.lines[1].ran == "3/3 fused, attention sdpa"
    assert run_of(wired).steps == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 0}, "whole numbers from 1, have 0 and 3"),
        ({"rounds": 1.5}, "have 2 and 1.5"),
        ({"variants": ()}, "whole numbers from 1"),
        ({"out_path": None}, "say where the record"),
    ],
)
def test_bad_numbers(changes, text, tmp_path):
    module = pack_module("nodes.bench_step")
    with pytest.raises(module.BenchError, match=text):
        module.run(**{"out_path": tmp_path / "a.json", **changes})
    assert list(tmp_path.iterdir()) == []


@on_cpu
def test_an_unknown_variant_and_a_cancel_leave_an_aborted_record(tmp_path):
    import comfy.model_management

    module = pack_module("nodes.bench_step")
    model, _, _ = selftest()
    with pytest.raises(module.BenchError, match="'xformers' asked for; choose of stock, pack, attention"):
        module.run(variants=("xformers",), out_path=tmp_path / "a.json", model=model)
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        module.run(out_path=tmp_path / "b.json", model=model)
    for name in ("a.json", "b.json"):
        assert json.loads((tmp_path / name).read_text("utf-8"))["status"] == "aborted"


def test_too_little_memory_says_how_much(monkeypatch):
    import comfy.model_management

    module = pack_module("nodes.bench_step")
    monkeypatch.setattr(comfy.model_management, "free_memory", lambda *given: None)
    monkeypatch.setattr(comfy.model_management, "soft_empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    with pytest.raises(module.BenchError, match=r"needs 13\.\d GiB to be drawn on GPU X, 8\.0 GiB are free; connect"):
        module.random_h3(torch.device("cuda", 0), 50, 0, False)


def test_the_bars_are_those_of_the_task(monkeypatch):
    """0.64 with fa4, 0.70 without, 0.42 for sol, at one size on one GPU; everywhere else no slower than stock."""
    module = pack_module("nodes.bench_step")
    bench = module._Bench.__new__(module._Bench)
    bench.on_cuda, bench.device = True, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for refusal, most in ((None, 0.64), ("not installed", 0.70)):
        listed = [("fa4", True, refusal)]
        monkeypatch.setattr(module.attention_kernels, "list_backends", lambda device, listed=listed: listed)
        assert bench._promised(37730, "pack") == most
    assert bench._promised(37730, "sol") == 0.42
    assert bench._promised(37730, "fuse") == bench._promised(109000, "pack") == 1.0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    assert bench._promised(37730, "pack") == 1.0


@on_cpu
def test_the_node():
    import folder_paths

    module = pack_module("nodes.bench_step")
    given = {"size": "320x192, 22 frames", "variants": "stock, pack", "also_attention": "none", "tau": 1.3, "steps": 1}
    out = module.BenchStep.execute(**given, rounds=1, filename_prefix="h3bw/step")
    assert out.result[0] == out.ui["text"][0] and "64x64x22" in out.result[0]
    saved = out.ui["h3bw_record"][0]
    path = os.path.join(folder_paths.get_output_directory(), saved["subfolder"], saved["filename"])
    assert pack_module("kernels.measure").read(path)["kind"] == "step"
    assert module.BenchStep.fingerprint_inputs() != module.BenchStep.fingerprint_inputs()


def test_rows_of_the_sizes(pack):
    """As the packed sequence counts them: 20 text tokens here, both sides of the sound, 32-pixel tokens."""
    rows_of = pack_module("nodes.sampling").rows_of
    assert rows_of(1344, 768, 124) == 20 + 2 * 207 + 37 * 24 * 42
    assert rows_of(320, 192, 22) == 20 + 2 * 37 + 7 * 6 * 10
