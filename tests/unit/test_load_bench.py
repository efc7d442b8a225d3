"""The bench of loads: its synthetic file is an H3, its record is valid and can fail."""

import json
import math

import pytest
import torch
from conftest import pack_module

bench = pack_module("kernels.measure.load_bench")
checkpoint = pack_module("kernels.checkpoint")
validation = pack_module("kernels.measure.validation")
SMALL = {"hidden": 256, "inner": 384, "ffn": 640, "text": 64, "blocks": 2, "refiner": 1}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "synthetic.safetensors"
    bench.write_synthetic(path, SMALL)
    return path


def test_the_synthetic_file_has_the_tensors_of_an_h3(file):
    tiny, _ = checkpoint.tiny_h3(hidden=256, heads=3, ffn=640, blocks=2, refiner_blocks=1)
    found = checkpoint.read_header(file).tensors
    assert {name: info.shape for name, info in found.items()} == {name: tuple(t.shape) for name, t in tiny.items()}
    report = checkpoint.inspect(file)
    assert report["is_h3"] and report["formats"]["mlp.fc1"] == {"nvfp4": 2}
    checkpoint.verify(str(file), checkpoint.read_header(file))
    tensors, metadata = checkpoint.load(file)
    checkpoint.normalise(tensors, metadata)


def test_full_size():
    kinds = bench.synthetic_kinds()
    assert 12.5e9 < sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values()) < 12.7e9
    assert kinds["blocks.49.mlp.fc1.weight"] == (torch.uint8, (28672, 2688))
    assert kinds["blocks.49.adaln_proj.linear.weight"] == (torch.float32, (96768, 8))
    assert kinds["token_refiner.blocks.1.attn.qkv_proj.weight"] == (torch.bfloat16, (21504, 5376))
    assert sum(name.endswith(".comfy_quant") for name in kinds) == 200


def test_record_of_a_cpu_run(file, tmp_path):
    path, seen = tmp_path / "load.json", []
    bench.run("cpu", file, path, rounds=1, comfy=lambda name: seen.append(name) or {}, sweep=True)
    record = json.loads(path.read_text("utf-8"))
    assert validation.validate(record) == [] and record["status"] == "finished"
    variants = [case["variant"] for case in record["cases"]]
    assert variants == [bench.OURS, bench.LIBRARY, bench.COMFY, bench.SEQUENTIAL, bench.WHOLE]
    assert seen and set(seen) == {str(file)}
    gates = {gate["name"]: gate for gate in record["gates"]}
    assert gates["tensors that differ from safetensors"]["result"] == "passed" and len(gates) == 3
    assert "direct" in bench.as_text(record) and "GB/s" in bench.as_text(record)


def test_a_file_is_made_where_there_is_none_and_a_missing_comfyui_is_said(tmp_path):
    path = tmp_path / "new.safetensors"
    record = bench.run("cpu", path, tmp_path / "load.json", rounds=1, sizes={**SMALL, "blocks": 1})
    assert checkpoint.inspect(path)["blocks"] == 1
    assert [entry["what"] for entry in record["dispatch"]["fallbacks"]] == [bench.COMFY]


def test_wrong_bytes_fail_the_gate(file, tmp_path, monkeypatch):
    real = bench.load

    def wrong(path, device):
        tensors, metadata = real(path, device)
        tensors["blocks.0.mlp.fc1.weight"][3, 4] ^= 1
        return tensors, metadata

    monkeypatch.setattr(bench, "load", wrong)
    record = bench.run("cpu", file, tmp_path / "load.json", rounds=1)
    gate = next(gate for gate in record["gates"] if gate["name"] == "tensors that differ from safetensors")
    assert (gate["result"], gate["observed"]) == ("failed", 1)


def test_slower_than_the_faster_one_fails_on_a_gpu(tmp_path):
    manifest = pack_module("kernels.measure.manifest")
    record = manifest.Manifest(tmp_path / "r.json", "load")
    medians = {bench.OURS: 10.0, bench.LIBRARY: 20.0, bench.COMFY: 9.0}
    bench._judge(record, medians, torch.device("cuda", 0))
    (gate,) = record.data["gates"]
    assert gate["result"] == "failed" and bench.COMFY in gate["name"] and gate["observed"] == pytest.approx(0.9)
