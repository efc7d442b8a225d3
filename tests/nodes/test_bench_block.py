"""The block benchmark and the random model on a CPU: equality before and after, verdicts withheld, a whole record."""

import os

import pytest
import torch
from conftest import pack_module
from h3_sampling import fuse, selftest

pytestmark = pytest.mark.usefixtures("pack")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would time the real widths; see tests/gpu")


@on_cpu
def test_a_whole_run_on_the_cpu(tmp_path):
    module = pack_module("nodes.bench_block")
    report = module.run(rows=100_000, rounds=50, out_path=tmp_path / "block.json")
    record = pack_module("kernels.measure").read(tmp_path / "block.json")
    assert record == report.record and record["kind"] == "block" and record["status"] == "finished"
    assert "CPU, not a measurement" in report.text and "ms/block" in report.text
    assert [line.variant for line in report.lines] == list(module.VARIANTS)
    assert {case["variant"] for case in record["cases"]} == {*module.VARIANTS, "stock (A/A)"}
    assert all(case["comparison"] is None for case in record["cases"]), "a verdict needs a measurement"
    assert [gate["result"] for gate in record["gates"]] == ["passed"] * 4
    ran = {entry["what"]: entry["implementation"] for entry in record["dispatch"]["ran"]}
    assert ran["block 0 / stock"] == "ComfyUI's block" and ran["block 0 / fuse"] == "fused"
    assert ran["block 0 / pack"] == "fused, attention sdpa" and ran["block 0 / attention"] == "attention sdpa"
    sums = {entry["name"]: entry["sha256"] for entry in record["outputs"]}
    assert sums["block 0 / fuse"] == sums["block 0 / stock"] and sums["block 0 / pack"] == sums["block 0 / attention"]


@on_cpu
def test_a_wrong_block_fails_before_and_after(tmp_path, monkeypatch):
    adapt, module = pack_module("nodes.adapt"), pack_module("nodes.bench_block")
    real = adapt.fused_forward
    monkeypatch.setattr(adapt, "fused_forward", lambda *arguments: real(*arguments).neg_())
    report = module.run(rows=17, out_path=tmp_path / "block.json")
    assert [gate["result"] for gate in report.record["gates"]] == ["failed"] * 4
    assert "failed: fuse differs from stock, before the timing" in report.text


@on_cpu
def test_a_connected_model(tmp_path):
    """What is wired on it does not reach stock, and its other blocks are there to choose."""
    module = pack_module("nodes.bench_block")
    model, _, _ = selftest(adaln="full")
    report = module.run(rows=17, out_path=tmp_path / "block.json", model=fuse(model), block=2)
    assert report.lines[0].ran == "ComfyUI's block" and report.lines[0].size == "block 2"
    with pytest.raises(module.BenchError, match="blocks 0 to 2, 3 was asked for"):
        module.run(out_path=tmp_path / "b.json", model=model, block=3)


@pytest.mark.parametrize("changes", [{"rows": 0}, {"rounds": 0}, {"rows": 1.5}])
def test_bad_numbers(changes, tmp_path):
    module = pack_module("nodes.bench_block")
    with pytest.raises(module.BenchError, match="whole numbers from 1"):
        module.run(**{"out_path": tmp_path / "a.json", **changes})


@on_cpu
def test_the_node():
    import folder_paths

    module = pack_module("nodes.bench_block")
    out = module.BenchBlock.execute(rows=17, block=7, rounds=1, filename_prefix="h3bw/block")
    assert "ms/block" in out.result[0], "without a model the block's number is not asked"
    saved = out.ui["h3bw_record"][0]
    assert os.path.isfile(os.path.join(folder_paths.get_output_directory(), saved["subfolder"], saved["filename"]))


@on_cpu
def test_the_random_model_is_the_selftests_when_small(pack):
    random_model, tiny = pack_module("nodes.random_model"), pack_module("kernels.checkpoint.tiny")
    patcher = random_model.random_h3("cpu", blocks=2, refiner_blocks=1, seed=3, small=True)
    wanted, _ = tiny.tiny_h3(seed=3, blocks=2, refiner_blocks=1)
    dit = patcher.model.diffusion_model
    assert len(dit.blocks) == 2
    weight = dit.blocks[1].mlp.fc1.weight
    scale = wanted["blocks.1.mlp.fc1.weight_scale"]
    assert torch.equal(weight._qdata, wanted["blocks.1.mlp.fc1.weight"])
    assert torch.equal(weight._params.block_scale.view(torch.uint8), scale.view(torch.uint8))
    assert patcher.cached_patcher_init[1][1:] == (2, 1, 3, True)


def test_full_size_is_h3s(pack):
    """qkv [21504, 5376], out [5376, 7168], fc1 [28672, 5376], fc2 [5376, 14336]; 12.6 GB with what is not quantised."""
    random_model = pack_module("nodes.random_model")
    widths = random_model.H3
    inner = widths["heads"] * widths["head_dim"]
    assert (3 * inner, widths["hidden"], 2 * widths["ffn"]) == (21504, 5376, 28672)
    weights = 4 * inner * widths["hidden"] + 3 * widths["ffn"] * widths["hidden"]
    blocks = (weights * 0.5625 + 96768 * 9 * 4) * random_model.BLOCKS
    refiner = weights * 2 * random_model.REFINER_BLOCKS
    assert blocks + refiner == pytest.approx(12.6e9, rel=0.05)
