"""The loader node: equal to ComfyUI's own, layouts declared and checked, bad files refused before anything happens."""

import gc
import itertools
import struct

import pytest
import torch
from conftest import pack_module
from h3_sampling import equal, finite, fuse, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


@pytest.fixture
def tiny_file(pack):
    """A function that puts a tiny H3 into models/diffusion_models, edited, and returns its name."""
    import folder_paths

    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    folder = folder_paths.get_folder_paths("diffusion_models")[0]
    import os

    os.makedirs(folder, exist_ok=True)
    written = []

    def put(name, edit=None, metadata=None, **options):
        tensors, default = tiny.tiny_h3(**options)
        if edit is not None:
            tensors = edit(tensors)
        path = os.path.join(folder, name)
        writer.write(path, tensors, default if metadata is None else metadata, overwrite=True)
        written.append(path)
        folder_paths.filename_list_cache.clear()
        return name

    yield put
    for path in written:
        os.unlink(path)


def load(name, direct=False, layout="auto"):
    return pack_module("nodes.load").LoadNVFP4.execute(name, direct, layout).result[0]


def result(model):
    _, positive, latent = selftest()
    return sample(model, positive, latent, steps=2)


def same_weights(ours, theirs) -> bool:
    """Bit equality of all parameters and buffers, quantised ones by their codes and scales.

    Sampled results are no measure here: on a CPU the bits of an fp32 product depend on where in memory a weight lies.
    """
    a, b = (model.model.diffusion_model.state_dict() for model in (ours, theirs))
    assert a.keys() == b.keys() and len(a) > 60
    return all(a[key].dtype == b[key].dtype and torch.equal(raw(a[key]), raw(b[key])) for key in a)


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stock(name):
    """ComfyUI's own loader."""
    import nodes

    return nodes.UNETLoader().load_unet(name, "default")[0]


@pytest.mark.parametrize("adaln", ["pruned", "full"])
def test_the_model_is_the_one_that_comfyui_loads(tiny_file, adaln):
    name = tiny_file(f"h3bw_{adaln}.safetensors", adaln=adaln)
    expected = stock(name)
    assert finite(result(expected))
    for direct in (False, True):
        model = load(name, direct)
        assert same_weights(model, expected) and finite(result(model))


def prefixed(tensors):
    return {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}


def unmarked(tensors):
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(".comfy_quant")}


def nul_marked(tensors):
    return {key: torch.zeros_like(t) if key.endswith(".comfy_quant") else t for key, t in tensors.items()}


def byte_scales(tensors):
    return {key: t.view(torch.uint8) if key.endswith(".weight_scale") else t for key, t in tensors.items()}


def in_metadata(tensors):
    import json

    layers = {key.removesuffix(".comfy_quant"): {"format": "nvfp4"} for key in tensors if key.endswith(".comfy_quant")}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


@pytest.mark.parametrize("edit", [prefixed, unmarked, nul_marked, byte_scales])
def test_every_encoding_loads_alike(tiny_file, edit):
    expected = load(tiny_file("h3bw_plain.safetensors"))
    assert same_weights(load(tiny_file("h3bw_edited.safetensors", edit)), expected)


@pytest.mark.parametrize("prefix", [False, True])
def test_file_level_metadata(tiny_file, prefix):
    tensors, _ = pack_module("kernels.checkpoint.tiny").tiny_h3()
    metadata = in_metadata(tensors)
    expected = load(tiny_file("h3bw_plain.safetensors"))

    def edit(tensors):
        return prefixed(unmarked(tensors)) if prefix else unmarked(tensors)

    assert same_weights(load(tiny_file("h3bw_meta.safetensors", edit, metadata)), expected)


def as_modelopt(tensors):
    """The same layers as ModelOpt writes them: low nibble first, row-major scales, no marker."""
    nvfp4 = pack_module("kernels.nvfp4")
    out = {}
    for key, tensor in unmarked(tensors).items():
        if f"{key}_scale_2" in tensors:
            tensor = (tensor << 4) | (tensor >> 4)
        elif key.endswith(".weight_scale"):
            codes = tensors[key.removesuffix("_scale")]
            tensor = nvfp4.unswizzle(tensor, codes.shape[0], codes.shape[1] // 8)
        out[key] = tensor
    return out


def test_modelopt_layout_is_converted_when_declared_and_caught_when_not(tiny_file):
    error = pack_module("kernels.checkpoint").CheckpointError
    expected = load(tiny_file("h3bw_plain.safetensors"))
    other = tiny_file("h3bw_modelopt.safetensors", as_modelopt)
    assert same_weights(load(other, layout="modelopt"), expected)
    for layout in ("comfy", "auto"):
        with pytest.raises(error, match="choose layout modelopt"):
            load(other, layout=layout)
    with pytest.raises(error, match="choose auto or comfy"):
        load("h3bw_plain.safetensors", layout="modelopt")


def test_another_models_file_is_refused_by_name(tiny_file):
    name = tiny_file("h3bw_other.safetensors", lambda t: {"double_blocks.0.img_attn.qkv.weight": torch.zeros(8, 8)})
    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError, match="not a MiniMax H3") as caught:
        load(name)
    assert caught.value.code == "not_h3" and caught.value.file == name


@pytest.mark.parametrize("direct", [False, True])
def test_a_damaged_file_is_refused_and_the_model_in_use_stays(tiny_file, direct):
    import folder_paths

    good = load(tiny_file("h3bw_plain.safetensors"))
    expected = result(good)
    bad = tiny_file("h3bw_cut.safetensors")
    path = folder_paths.get_full_path("diffusion_models", bad)
    with open(path, "rb") as source:
        whole = source.read()
    header = struct.unpack("<Q", whole[:8])[0]
    for content in (b"", whole[:7], whole[: 8 + header // 2], whole[: len(whole) // 2], whole + b"x"):
        with open(path, "wb") as out:
            out.write(content)
        with pytest.raises(pack_module("kernels.checkpoint").CheckpointError) as caught:
            load(bad, direct)
        assert bad in str(caught.value) and "/" not in str(caught.value)
    assert equal(result(good), expected)


def test_a_missing_scale_names_its_layer_at_load(tiny_file):
    def edit(tensors):
        return {key: t for key, t in tensors.items() if key != "blocks.1.mlp.fc1.weight_scale"}

    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError, match=r"blocks\.1\.mlp\.fc1"):
        load(tiny_file("h3bw_missing.safetensors", edit))


def test_cancel_stops_a_direct_load_and_progress_moves(tiny_file, monkeypatch):
    import comfy.model_management
    import comfy.utils

    name = tiny_file("h3bw_plain.safetensors")
    seen = []

    class Bar:
        def __init__(self, total):
            assert total == 100

        def update_absolute(self, value, total):
            seen.append(value)
            if value >= 50 and cancel:
                comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
    cancel = False
    load(name, direct=True)
    assert seen[0] == 0 and seen[-1] == 100 and all(0 <= b - a <= 2 for a, b in itertools.pairwise(seen))
    seen.clear()
    cancel = True
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        load(name, direct=True)
    assert 50 <= seen[-1] <= 52
    comfy.model_management.interrupt_current_processing(False)


def test_fp16_is_refused_with_the_reason(pack):
    module = pack_module("nodes.load")
    with pytest.raises(ValueError, match=r"f\.safetensors: .*float16.*65,504.*without --fp16-unet"):
        module.refuse_fp16(torch.float16, "f.safetensors")
    module.refuse_fp16(torch.bfloat16, "f.safetensors")


def test_fp16_is_refused_by_the_loader(tiny_file, monkeypatch):
    import comfy.model_base

    name = tiny_file("h3bw_plain.safetensors")
    monkeypatch.setattr(comfy.model_base.BaseModel, "get_dtype_inference", lambda self: torch.float16)
    with pytest.raises(ValueError, match="would run H3 in float16"):
        load(name)


def test_an_old_cuda_build_is_named(pack, monkeypatch, caplog):
    module = pack_module("nodes.load")
    for version, warned in (("12.8", True), ("13.0", False), (None, False)):
        caplog.clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        module.warn_slow_fp4(12, native=True)
        assert ("slower than bf16" in caplog.text) is warned
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    caplog.clear()
    module.warn_slow_fp4(0, native=True)
    module.warn_slow_fp4(0, native=False)
    assert not caplog.text


def test_a_device_without_fp4_is_named_in_one_line(tiny_file, caplog):
    load(tiny_file("h3bw_plain.safetensors"))
    lines = [record.getMessage() for record in caplog.records if record.name == "h3bw"]
    assert lines == [
        "H3 Blackwell: this device has no FP4 matrix multiply; 12 NVFP4 layers are dequantised for every multiply "
        "(right, but slow)"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (1, 3, 64)])
@pytest.mark.parametrize("emulated", [False, True])
def test_one_linear_on_the_cpu(pack, dtype, shape, emulated):
    """An NVFP4 layer of 48 x 64 keeps shape and dtype and is right, emulated (W4A4) or not (W4A16)."""
    import comfy.ops

    nvfp4, writer = pack_module("kernels.nvfp4"), pack_module("kernels.checkpoint.writer")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator) * 0.1
    x = torch.randn(shape, generator=generator).to(dtype)
    operations = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.bfloat16, disabled={"nvfp4"})
    linear = operations.Linear(64, 48, bias=False, device="cpu", dtype=torch.bfloat16)
    tensors = {key.removeprefix("l."): t for key, t in writer.nvfp4_tensors("l", weight).items()}
    linear.load_state_dict(tensors, strict=False)
    dense = nvfp4.dequantize(nvfp4.quantize(weight))
    rows = x.float().reshape(-1, 64)
    if emulated:
        linear.forward = pack_module("nodes.adapt")._EmulatedForward(linear, linear.forward)
        rows = nvfp4.dequantize(nvfp4.quantize(x.reshape(-1, 64)))
    out = linear(x)
    assert out.dtype == dtype and out.shape == (*shape[:-1], 48)
    # bf16 products of 64 terms; the dequantisers round in the activations' dtype
    torch.testing.assert_close(out.float(), (rows @ dense.T).reshape(out.shape), atol=2e-2, rtol=1e-2)


def test_adaln_of_a_pruned_file_stays_fp32(tiny_file, monkeypatch):
    """A bf16 shortcut there costs 20 dB; core casts a row only when it uses it."""
    module, fused = pack_module("nodes.load"), pack_module("kernels.fused")
    import folder_paths

    name = tiny_file("h3bw_plain.safetensors")
    model = module.load_h3(folder_paths.get_full_path("diffusion_models", name), compute_dtype=torch.bfloat16)
    seen = []
    real = fused.norm_modulate

    def spy(x, weight, eps, scale, shift, segments, **options):
        seen.append((x.dtype, weight.dtype, scale.dtype, shift.dtype))
        return real(x, weight, eps, scale, shift, segments, **options)

    monkeypatch.setattr(fused, "norm_modulate", spy)
    result(fuse(model))
    assert set(seen) == {(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)}
    for block in model.model.diffusion_model.blocks:
        assert block.adaln_proj.linear.weight.dtype == torch.float32


def test_the_patcher_can_be_made_again(tiny_file):
    model = load(tiny_file("h3bw_plain.safetensors"), direct=True)
    function, arguments = model.cached_patcher_init
    again = function(*arguments, disable_dynamic=True)
    assert not again.is_dynamic() and same_weights(again, model)


def test_the_fused_block_works_on_a_loaded_file(tiny_file):
    module = pack_module("nodes.load")
    import folder_paths

    name = tiny_file("h3bw_plain.safetensors")
    path = folder_paths.get_full_path("diffusion_models", name)
    model = module.load_h3(path, compute_dtype=torch.bfloat16)
    assert equal(result(fuse(model)), result(model))


def test_direct_read_keeps_no_map_of_the_file(tiny_file):
    import pathlib
    import sys

    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc/self/maps")
    name = tiny_file("h3bw_direct.safetensors")
    model = load(name, direct=True)
    gc.collect()
    assert name not in pathlib.Path("/proc/self/maps").read_text()
    assert finite(result(model))


def test_environment_sets_the_default_of_direct_read(pack, monkeypatch):
    node = pack_module("nodes.load").LoadNVFP4
    for value, default in (("1", True), ("0", False), (None, False)):
        monkeypatch.delenv("H3_DISABLE_MMAP", raising=False)
        if value is not None:
            monkeypatch.setenv("H3_DISABLE_MMAP", value)
        widget = next(item for item in node.define_schema().inputs if item.id == "direct_read")
        assert widget.default is default


def shown(name, direct=True, layout="auto"):
    """The text under the node."""
    return pack_module("nodes.load").LoadNVFP4.execute(name, direct, layout).ui.as_dict()["text"][0]


def static(tensors):
    return tensors | {f"blocks.{i}.mlp.fc1.input_scale": torch.tensor(0.01) for i in range(3)}


def test_the_node_shows_what_the_file_holds(tiny_file):
    text = shown(tiny_file("h3bw_text.safetensors", static))
    lines = text.splitlines()
    assert lines[0].startswith(
        "h3bw_text.safetensors: MiniMax H3, pruned (AdaLN from a time table), 3 blocks and 2 refiner blocks, 0.0"
    )
    assert "  mlp.fc1: nvfp4 x3" in lines and "  adaln_proj.linear: F32 x3" in lines
    assert "activation scales: static in 3 of 12 quantised layers" in lines
    assert "NVFP4 byte order: comfy, by marker" in lines
    assert (
        "nvfp4 here: right but slow: dequantised for every multiply, because cpu has no FP4 matrix multiply "
        "(compute capability 10.0 or newer has)" in lines
    )
    assert lines[-1] == "read: directly into memory"
    assert "/" not in text and len(lines) < 14


def test_the_node_shows_a_full_unquantised_file(tiny_file):
    text = shown(tiny_file("h3bw_text.safetensors", adaln="full", quantise=False), direct=False)
    assert "full (AdaLN from the time embedder)" in text and "  mlp.fc1: BF16 x3" in text
    assert "here:" not in text and "activation scales" not in text and text.endswith("through ComfyUI's memory map")


def test_what_runs_natively_and_why_not(pack, monkeypatch):
    import comfy.model_management

    module, gpu = pack_module("nodes.load"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    for kind in ("nvfp4", "fp8"):
        monkeypatch.setattr(comfy.model_management, f"supports_{kind}_compute", lambda device=None: False)
    assert "cuda:0 with compute capability 8.6 has no FP4" in module.native("nvfp4", gpu)
    assert "cuda:0 with compute capability 8.6 has no FP8" in module.native("float8_e4m3fn", gpu)
    for kind in ("nvfp4", "fp8"):
        monkeypatch.setattr(comfy.model_management, f"supports_{kind}_compute", lambda device=None: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built for CUDA 12.8" in module.native("nvfp4", gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert module.native("nvfp4", gpu) == "natively, FP4 times FP4"
    assert module.native("float8_e4m3fn", gpu) == "natively, FP8 times FP8"
    assert module.native("mxfp8", gpu) == "as ComfyUI runs it"


@pytest.mark.parametrize("direct", [True, False])
def test_damaged_scales_are_refused_before_a_tensor_is_read(tiny_file, direct, monkeypatch):
    import comfy.utils

    def edit(tensors):
        scales = tensors["blocks.2.mlp.fc2.weight_scale"].clone()
        scales.view(torch.uint8)[3, 5] = 0xFF
        return tensors | {"blocks.2.mlp.fc2.weight_scale": scales}

    name = tiny_file("h3bw_scales.safetensors", edit)
    monkeypatch.setattr(comfy.utils, "load_torch_file", None)
    monkeypatch.setattr(pack_module("kernels.checkpoint.pieces"), "run", None)
    with pytest.raises(
        pack_module("kernels.checkpoint").CheckpointError, match=f"^{name}: blocks.2.mlp.fc2.weight_scale"
    ):
        load(name, direct)


def test_too_little_memory_reaches_the_user_with_both_numbers(tiny_file, monkeypatch):
    name = tiny_file("h3bw_plain.safetensors")
    monkeypatch.setattr(pack_module("kernels.checkpoint.memory"), "system_available", lambda: 1000)
    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError, match=r"needs .* GiB .*\(1000 bytes\)"):
        load(name, direct=True)
