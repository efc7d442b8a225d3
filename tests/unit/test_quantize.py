"""quantize_file: what becomes of every tensor, whatever the source's form; the scales' error; whole or nothing."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

nvfp4 = pack_module("kernels.nvfp4")
checkpoint = pack_module("kernels.checkpoint")
error_plot = pack_module("kernels.checkpoint.error_plot")
quantising = pack_module("kernels.checkpoint.quantize")
scales = pack_module("kernels.checkpoint.scales")
CheckpointError = checkpoint.CheckpointError
CPU = torch.device("cpu")
TARGETS = [f"blocks.{i}.{kind}" for i in range(3) for kind in quantising.LINEARS]
FP8 = torch.float8_e4m3fn


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture
def convert(tmp_path):
    """``convert(tensors, metadata, **options) -> (tensors of the new file, report)``."""

    def run(tensors, metadata=None, **options):
        src, dst = tmp_path / "source.safetensors", tmp_path / "new.safetensors"
        checkpoint.write(src, tensors, metadata, overwrite=True)
        dst.unlink(missing_ok=True)
        report = checkpoint.quantize_file(src, dst, device="cpu", **options)
        assert sorted(os.listdir(tmp_path)) == ["new.safetensors", "source.safetensors"]
        json.dumps(report, allow_nan=False)
        return checkpoint.load(dst)[0], report

    return run


def layer(tensors, name) -> "nvfp4.NVFP4":
    codes = tensors[f"{name}.weight"]
    shape = (codes.shape[0], codes.shape[1] * 2)
    return nvfp4.NVFP4(codes, tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_scale_2"], shape)


# ---------------------------------------------------------------- scales

WEIGHTS = {
    "gaussian": torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)),
    "gaussian, bf16": (torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16(),
}
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(2)
    WEIGHTS["laplacian"] = torch.distributions.Laplace(0.0, 1.0).sample((512, 1024))
    for degrees in (3.0, 5.0):
        WEIGHTS[f"Student's t, {degrees:.0f}"] = torch.distributions.StudentT(degrees).sample((512, 1024))


@pytest.mark.parametrize("what", WEIGHTS)
def test_adaptive_leaves_at_least_5_percent_less_error(what):
    weight = WEIGHTS[what]
    errors = {}
    for choice in scales.CHOICES:
        q, errors[choice] = scales.quantize(scales.Weight(weight, None, CPU), choice)
        exact = weight.to(torch.float64)
        measured = float((nvfp4.dequantize(q).to(torch.float64) - exact).norm() / exact.norm())
        assert errors[choice] == pytest.approx(measured, rel=1e-5)
    assert errors["adaptive"] < 0.95 * errors["amax"]


@pytest.mark.parametrize("shape", [(16, 16), (1, 80), (130, 80), (1000, 48), (257, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_comfyuis_own_quantisation(shape, dtype, monkeypatch):
    """In pieces too: a piece is whole tiles of scales."""
    monkeypatch.setitem(scales._PIECE_ELEMENTS, "cpu", 1)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = weight.clone()
    q, _ = scales.quantize(scales.Weight(weight, None, CPU), "amax")
    want = nvfp4.quantize(weight)
    assert same_bits(q.codes, want.codes) and same_bits(q.block_scale, want.block_scale)
    assert same_bits(q.decode_scale, want.decode_scale) and q.shape == want.shape
    assert same_bits(weight, kept), "the source tensor must not be written to"


@pytest.mark.parametrize("shape", [(16, 16), (130, 80), (300, 256)])
def test_adaptive_is_no_worse_in_any_block(shape, monkeypatch):
    weight = torch.distributions.StudentT(3.0).sample(shape) if shape[0] == 300 else torch.randn(shape)
    q, _ = scales.quantize(scales.Weight(weight, None, CPU), "adaptive")
    monkeypatch.setitem(scales._PIECE_ELEMENTS, "cpu", 1)
    pieces, _ = scales.quantize(scales.Weight(weight, None, CPU), "adaptive")
    assert same_bits(q.codes, pieces.codes) and same_bits(q.block_scale, pieces.block_scale)
    plain = nvfp4.quantize(weight, q.decode_scale)

    def block_errors(found):
        return (nvfp4.dequantize(found) - weight).square().view(shape[0], -1, 16).sum(-1)

    assert bool((block_errors(q) <= block_errors(plain) * (1 + 1e-4)).all())
    assert bool((block_errors(q) < 0.99 * block_errors(plain)).any())
    raw = q.block_scale.view(torch.uint8)
    assert int(raw.max()) < 0x7F
    largest = nvfp4.unswizzle(q.block_scale, shape[0], shape[1] // 16).to(torch.float32).amax()
    assert largest <= 448 and float(q.decode_scale) == pytest.approx(float(weight.abs().max()) / 1536)


def test_adaptive_of_zeros_and_outliers():
    zeros, error = scales.quantize(scales.Weight(torch.zeros(32, 32), None, CPU))
    assert error == 0 and not zeros.codes.any() and not zeros.block_scale.view(torch.uint8).any()
    assert float(zeros.decode_scale) == 0
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    weight[3, 5], weight[7] = 1e4, 0.0
    q, _ = scales.quantize(scales.Weight(weight, None, CPU))
    out = nvfp4.dequantize(q)
    assert out.isfinite().all() and not out[7].any()
    assert float(out[3, 5]) == pytest.approx(1e4, rel=0.07)


@pytest.mark.parametrize("choice", scales.CHOICES)
@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_the_error_of_very_large_and_very_small_weights(choice, size):
    """Their squares are no fp32 numbers: NaN, which JSON refuses when the file is written, or a false 0."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    _, error = scales.quantize(scales.Weight(weight * size, None, CPU), choice)
    _, usual = scales.quantize(scales.Weight(weight, None, CPU), choice)
    assert error == pytest.approx(usual, rel=0.2) and 0.05 < usual < 0.12


def test_unknown_choice(tmp_path):
    with pytest.raises(ValueError, match="adaptive, amax"):
        scales.quantize(scales.Weight(torch.ones(16, 16), None, CPU), "best")
    with pytest.raises(ValueError, match="adaptive, amax"):
        checkpoint.quantize_file(tmp_path / "a", tmp_path / "b", scale="best")


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("adaln", ["pruned", "full"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_bf16_file_becomes_the_quantised_one(convert, adaln, prefix):
    """With amax: byte for byte what the tiny H3 quantised from its own weights is."""
    plain, metadata = checkpoint.tiny_h3(adaln, quantise=False)
    want, _ = checkpoint.tiny_h3(adaln)
    source = {prefix + name: tensor for name, tensor in plain.items()}
    if prefix:
        source["vae.something"] = torch.zeros(3)
    got, report = convert(source, metadata, scale="amax")
    assert got.keys() == want.keys()
    assert all(same_bits(got[name], want[name]) for name in want)
    assert [entry["name"] for entry in report["layers"]] == sorted(TARGETS)
    assert report["dropped"] == (["vae.something"] if prefix else [])
    assert report["copied"] == len(plain) - 12 and report["kept"] == []
    assert all(0.08 < entry["relative_error"] < 0.11 for entry in report["layers"])


def test_fp32_and_metadata(convert, tmp_path):
    plain, metadata = checkpoint.tiny_h3(quantise=False)
    plain["blocks.0.mlp.fc1.weight"] = plain["blocks.0.mlp.fc1.weight"].float()
    got, report = convert(plain, {**metadata, "_quantization_metadata": '{"layers": {}}'}, scale="amax")
    want = nvfp4.quantize(plain["blocks.0.mlp.fc1.weight"])
    assert same_bits(got["blocks.0.mlp.fc1.weight"], want.codes)
    written = checkpoint.read_header(tmp_path / "new.safetensors").metadata
    assert "_quantization_metadata" not in written and written["model"] == metadata["model"]
    assert written["h3bw_quantised_from"] == "source.safetensors"
    assert {entry["dtype"] for entry in report["layers"]} == {"F32", "BF16"}


def fp8_source(form: str, per_row: bool = False):
    """``(tensors, metadata, {layer: what its weights are worth})``; the refiner's linears are fp8 too."""
    plain, metadata = checkpoint.tiny_h3(quantise=False)
    refiner = [f"token_refiner.blocks.{i}.{kind}" for i in range(2) for kind in quantising.LINEARS]
    worth, conf = {}, {}
    for name in (*TARGETS, *refiner):
        weight = plain.pop(f"{name}.weight").float()
        scale = weight.abs().amax(1, keepdim=True) / 448 if per_row else weight.abs().max() / 448
        stored = (weight / (1 if form == "plain" else scale)).to(FP8)
        plain[f"{name}.weight"] = stored
        worth[name] = stored.float() if form == "plain" else stored.float() * scale
        if form == "old":
            plain[f"{name}.scale_weight"] = scale
            plain[f"{name}.scale_input"] = torch.tensor(1.0)
        elif form != "plain":
            plain[f"{name}.weight_scale"] = scale
        conf[name] = {"format": "float8_e4m3fn"}
        if form == "marker":
            plain[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(conf[name]).encode()), dtype=torch.uint8)
    if form == "old":
        plain["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    if form == "metadata":
        metadata["_quantization_metadata"] = json.dumps({"layers": conf})
    return plain, metadata, worth, refiner


@pytest.mark.parametrize(
    ("form", "per_row"),
    [("marker", False), ("metadata", False), ("old", False), ("none", False), ("plain", False), ("marker", True)],
)
def test_fp8_is_multiplied_by_its_scale_first(convert, form, per_row):
    source, metadata, worth, refiner = fp8_source(form, per_row)
    got, report = convert(source, metadata, scale="amax")
    for name in TARGETS:
        assert torch.equal(got[f"{name}.weight"], nvfp4.quantize(worth[name]).codes), name
        error = float((nvfp4.dequantize(layer(got, name)) - worth[name]).norm() / worth[name].norm())
        assert error == pytest.approx(
            next(e["relative_error"] for e in report["layers"] if e["name"] == name), rel=1e-4
        )
        assert f"{name}.input_scale" not in got and f"{name}.scale_weight" not in got
    for name in refiner:
        assert same_bits(got[f"{name}.weight"], source[f"{name}.weight"])
        if form != "plain":
            conf = json.loads(bytes(got[f"{name}.comfy_quant"].tolist()))
            assert conf == {"format": "float8_e4m3fn"} | ({"full_precision_matrix_mult": True} if form == "old" else {})
            stored = "scale_weight" if form == "old" else "weight_scale"
            assert same_bits(got[f"{name}.weight_scale"], source[f"{name}.{stored}"])
    assert "scaled_fp8" not in got
    checkpoint.normalise(got)


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["blocks.0"], [name for name in TARGETS if name.startswith("blocks.0.")]),
        (["mlp.fc2"], [name for name in TARGETS if name.endswith("fc2")]),
        (
            ["blocks.1.attn.*", "blocks.2.mlp.fc1"],
            ["blocks.1.attn.out_proj", "blocks.1.attn.qkv_proj", "blocks.2.mlp.fc1"],
        ),
    ],
)
def test_keep_layers(convert, patterns, kept):
    plain, metadata = checkpoint.tiny_h3(quantise=False)
    got, report = convert(plain, metadata, keep_layers=patterns)
    assert report["kept"] == sorted(kept)
    for name in TARGETS:
        assert (f"{name}.comfy_quant" in got) is (name not in kept)
        if name in kept:
            assert same_bits(got[f"{name}.weight"], plain[f"{name}.weight"])


def test_a_mixed_source_keeps_its_nvfp4_layers(convert):
    quantised, metadata = checkpoint.tiny_h3()
    plain, _ = checkpoint.tiny_h3(quantise=False)
    mixed = {name: tensor for name, tensor in quantised.items() if not name.startswith("blocks.1.mlp.fc1.")}
    mixed["blocks.1.mlp.fc1.weight"] = plain["blocks.1.mlp.fc1.weight"]
    mixed["blocks.0.mlp.fc1.input_scale"] = torch.tensor(0.5)
    got, report = convert(mixed, metadata, scale="amax")
    assert [entry["name"] for entry in report["layers"]] == ["blocks.1.mlp.fc1"]
    assert all(same_bits(got[name], tensor) for name, tensor in quantised.items())
    assert float(got["blocks.0.mlp.fc1.input_scale"]) == 0.5
    unmarked = {name: tensor for name, tensor in mixed.items() if not name.endswith(".comfy_quant")}
    with pytest.raises(CheckpointError, match="byte order"):
        convert(unmarked, metadata)


def edited(change):
    plain, _ = checkpoint.tiny_h3(quantise=False)
    change(plain)
    return plain


def with_value(value):
    def change(tensors):
        tensors["blocks.2.mlp.fc2.weight"][5, 7] = value

    return change


def as_int8(tensors):
    tensors["blocks.1.mlp.fc1.weight"] = torch.zeros(1024, 256, dtype=torch.int8)
    tensors["blocks.1.mlp.fc1.weight_scale"] = torch.ones(())
    text = b'{"format": "int8_tensorwise"}'
    tensors["blocks.1.mlp.fc1.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)


def fp8_scale(value):
    def change(tensors):
        tensors["blocks.1.mlp.fc1.weight"] = tensors["blocks.1.mlp.fc1.weight"].to(FP8)
        tensors["blocks.1.mlp.fc1.weight_scale"] = torch.as_tensor(value, dtype=torch.float32)

    return change


def with_old_scale(tensors):
    tensors["blocks.0.mlp.fc1.scale_weight"] = torch.ones(())


@pytest.mark.parametrize(
    ("change", "options", "code", "tensor"),
    [
        (with_value(float("inf")), {}, "nonfinite_weight", "blocks.2.mlp.fc2"),
        (with_value(float("nan")), {}, "nonfinite_weight", "blocks.2.mlp.fc2"),
        (as_int8, {}, "unsupported_source", "blocks.1.mlp.fc1"),
        (fp8_scale(0.0), {}, "bad_scale", "blocks.1.mlp.fc1.weight_scale"),
        (fp8_scale(float("nan")), {}, "bad_scale", "blocks.1.mlp.fc1.weight_scale"),
        (fp8_scale([1.0, 2.0, 3.0]), {}, "bad_scale", "blocks.1.mlp.fc1.weight_scale"),
        (lambda t: t.pop("audio_patch_proj.weight"), {}, "not_h3", ""),
        (lambda t: None, {"keep_layers": ["blocks"]}, "nothing_to_quantise", ""),
        (lambda t: None, {"keep_layers": ["blocks.77"]}, "bad_keep_layers", ""),
        # 10 MB of pattern would hold the queue for minutes; these would match, were they tried
        (lambda t: None, {"keep_layers": ["blocks.0"] * 1251}, "bad_keep_layers", ""),
        (lambda t: t.update({"blocks.0.mlp.fc1.weight": torch.zeros(24, 24)}), {}, "bad_weight", "blocks.0.mlp.fc1"),
        (with_old_scale, {}, "scale_without_format", "blocks.0.mlp.fc1"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(tmp_path, change, options, code, tensor):
    src = tmp_path / "source.safetensors"
    checkpoint.write(src, edited(change))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.quantize_file(src, tmp_path / "new.safetensors", device="cpu", scale="amax", **options)
    assert (caught.value.code, caught.value.tensor, caught.value.file) == (code, tensor, "source.safetensors")
    assert os.listdir(tmp_path) == ["source.safetensors"]


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_cancel_leaves_nothing_and_the_target_shows_only_whole(tmp_path, at):
    src, dst = tmp_path / "source.safetensors", tmp_path / "new.safetensors"
    checkpoint.write(src, *checkpoint.tiny_h3(quantise=False))
    seen = []

    def progress(done, total):
        assert not dst.exists()
        seen.append(done)
        if done >= at * total:
            raise Cancelled

    with pytest.raises(Cancelled):
        checkpoint.quantize_file(src, dst, device="cpu", scale="amax", progress=progress)
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert seen == sorted(seen)


def test_progress_comes_within_a_tensor_too(tmp_path, monkeypatch):
    """A cancel waits for a piece of rows, not for a tensor."""
    monkeypatch.setitem(scales._PIECE_ELEMENTS, "cpu", 1)
    src = tmp_path / "source.safetensors"
    checkpoint.write(src, *checkpoint.tiny_h3(quantise=False))
    calls = []
    checkpoint.quantize_file(
        src, tmp_path / "new.safetensors", device="cpu", scale="amax", progress=lambda *a: calls.append(a)
    )
    total = calls[0][1]
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    header = checkpoint.read_header(src)
    inside = [done for done, _ in calls if done not in {info.begin for info in header.tensors.values()}]
    # 128 rows of 256 or 512 columns are a piece: the 12 layers have 8+6+2+2 of them each block
    assert len(calls) > 2 * 3 * (6 + 2 + 8 + 2) and len(inside) > 20


def test_an_existing_file_is_never_replaced(tmp_path):
    src, dst = tmp_path / "source.safetensors", tmp_path / "new.safetensors"
    checkpoint.write(src, *checkpoint.tiny_h3(quantise=False))
    dst.write_bytes(b"mine")
    before = src.read_bytes()
    for target in (dst, src):
        with pytest.raises(CheckpointError, match="exists already"):
            checkpoint.quantize_file(src, target, device="cpu")
    assert dst.read_bytes() == b"mine" and src.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["new.safetensors", "source.safetensors"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    writer = pack_module("kernels.checkpoint.writer")
    src = tmp_path / "source.safetensors"
    checkpoint.write(src, *checkpoint.tiny_h3(quantise=False))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CheckpointError, match=r"will have \d+ bytes, the disk has 1000 free") as caught:
        checkpoint.quantize_file(src, tmp_path / "new.safetensors", device="cpu")
    assert caught.value.code == "disk_full" and os.listdir(tmp_path) == ["source.safetensors"]


IN_A_PROCESS = """
import importlib.util, sys
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("k", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["k"] = importlib.util.module_from_spec(spec); spec.loader.exec_module(sys.modules["k"])
from k import checkpoint
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
small, big, out = sys.argv[2:]
checkpoint.quantize_file(small, out + ".small", device="cpu")
before = peak()
checkpoint.quantize_file(big, out, device="cpu")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak is read from /proc")
def test_the_peak_is_four_times_the_largest_tensor(tmp_path):
    small, big = tmp_path / "small.safetensors", tmp_path / "big.safetensors"
    checkpoint.write(small, *checkpoint.tiny_h3(quantise=False, blocks=1, refiner_blocks=1))
    tensors, metadata = checkpoint.tiny_h3(quantise=False, hidden=1024, heads=8, ffn=8192, blocks=1, refiner_blocks=1)
    largest = max(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert largest == 16384 * 1024 * 2 and sum(t.numel() * t.element_size() for t in tensors.values()) > 3 * largest
    checkpoint.write(big, tensors, metadata)
    command = [
        sys.executable,
        "-c",
        IN_A_PROCESS,
        str(PACK_ROOT / "kernels"),
        *map(str, (small, big, tmp_path / "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 4 * largest


def test_module_from_the_command_line(tmp_path):
    src, dst, report = tmp_path / "source.safetensors", tmp_path / "new.safetensors", tmp_path / "report.json"
    checkpoint.write(src, *checkpoint.tiny_h3(quantise=False))
    command = [sys.executable, "-m", "kernels.checkpoint", str(src), str(dst), "--keep", "blocks.0", "--device", "cpu"]
    options = {"cwd": PACK_ROOT, "capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run([*command, "--report", str(report)], **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(report.read_text("utf-8"))
    assert "100 %" in done.stderr and "8 layers to NVFP4" in done.stdout
    assert report.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "blocks.1.mlp.fc1.comfy_quant" in checkpoint.read_header(dst).tensors
    done = subprocess.run(command, **options)
    assert done.returncode == 1 and "new.safetensors: exists already" in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr
    other = [*command[:4], str(tmp_path / "other.safetensors"), "--device", "nonsense"]
    done = subprocess.run(other, **options)
    assert done.returncode == 1 and "nonsense" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "other.safetensors").exists()


def test_the_picture_shows_every_kind(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    layers = [
        {"name": f"blocks.{i}.{kind}", "kind": kind, "relative_error": 0.05 + 0.01 * place + 0.001 * i}
        for i in range(50)
        for place, kind in enumerate(quantising.LINEARS)
    ]
    report = {"layers": layers, "target": {"name": "x.safetensors"}, "scale": "amax"}
    error_plot.draw(report, tmp_path / "p.png")
    with image_module.open(tmp_path / "p.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in error_plot.COLOURS} <= colours


def test_the_summary_reads_well(convert):
    _, report = convert(*checkpoint.tiny_h3(quantise=False), scale="amax")
    text = quantising.summary(report)
    assert re.search(r"12 layers to NVFP4, scales amax, \d+ s on cpu", text)
    assert "relative weight error: mean 0.09" in text and "mlp.fc2: 0.09" in text
