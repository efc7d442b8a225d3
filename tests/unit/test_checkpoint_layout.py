"""kernels/checkpoint/layout.py and tiny.py: encodings load alike, nothing is guessed, the tiny H3 is a real one."""

import json

import pytest
import torch
from conftest import pack_module

nvfp4 = pack_module("kernels.nvfp4")
checkpoint = pack_module("kernels.checkpoint")
layout = pack_module("kernels.checkpoint.layout")
CheckpointError = checkpoint.CheckpointError
PARTS = ("weight", "weight_scale", "weight_scale_2")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def lognormal_rows(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=g) * torch.exp(0.5 * torch.randn(rows, 1, generator=g))


def comfy_layers(weights: dict[str, torch.Tensor], marker: bool = True) -> dict[str, torch.Tensor]:
    out = {}
    for name, weight in weights.items():
        out |= checkpoint.nvfp4_tensors(name, weight)
        if not marker:
            del out[f"{name}.comfy_quant"]
    return out


def modelopt_layers(weights: dict[str, torch.Tensor], padded: bool = False) -> dict[str, torch.Tensor]:
    """The same quantisation as ModelOpt stores it, by hand: low nibble first, scales [N, K/16] row-major, no marker."""
    out = {}
    for name, weight in weights.items():
        q = nvfp4.quantize(weight)
        rows, blocks = weight.shape[0], weight.shape[1] // 16
        codes4 = nvfp4.unpack(q.codes)[:rows]
        out[f"{name}.weight"] = codes4[:, 0::2] | (codes4[:, 1::2] << 4)
        scales = nvfp4.unswizzle(q.block_scale, rows, blocks)
        if padded:
            whole = torch.zeros(q.block_scale.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
            whole[:rows, :blocks] = scales
            scales = whole
        out[f"{name}.weight_scale"] = scales
        out[f"{name}.weight_scale_2"] = q.decode_scale
    return out


def same_dict(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def marker(text: str | bytes) -> torch.Tensor:
    return torch.tensor(list(text.encode() if isinstance(text, str) else text), dtype=torch.uint8)


def code_of(state_dict, metadata=None, declared="auto") -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.normalise(state_dict, metadata, declared, "some/where/model.safetensors")
    assert caught.value.file == "model.safetensors"
    return caught.value.code


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(256, 128), (130, 80), (17, 16), (768, 256)])
def test_modelopt_becomes_comfy(shape, padded):
    """Ragged rows too: the codes are padded to 16 rows, the scales to 128x4."""
    weights = {"a.fc1": lognormal_rows(*shape)}
    got, info = checkpoint.normalise(modelopt_layers(weights, padded), declared="modelopt")
    want = comfy_layers(weights)
    assert same_dict(got, want)
    assert (info["layout"], info["layout_from"]) == ("modelopt", "declared")
    q = nvfp4.NVFP4(got["a.fc1.weight"], got["a.fc1.weight_scale"], got["a.fc1.weight_scale_2"], shape)
    assert torch.equal(nvfp4.dequantize(q), nvfp4.dequantize(nvfp4.quantize(weights["a.fc1"])))


def test_input_of_normalise_is_left_alone():
    given_dict = modelopt_layers({"a.fc1": lognormal_rows(256, 128)})
    before = {name: tensor.clone() for name, tensor in given_dict.items()}
    checkpoint.normalise(given_dict, declared="modelopt")
    assert same_dict(given_dict, before)


@pytest.mark.parametrize("shape", [(256, 256), (768, 256), (1024, 256), (256, 512), (4096, 1024)])
@pytest.mark.parametrize("structure", ["rows", "columns", "both"])
def test_a_wrong_declaration_is_refused(shape, structure):
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=g)
    if structure != "columns":
        weight *= torch.exp(0.5 * torch.randn(shape[0], 1, generator=g))
    if structure != "rows":
        weight *= torch.exp(0.5 * torch.randn(shape[1] // 16, generator=g)).repeat_interleave(16)
    weights = {"a.fc1": weight}
    comfy, modelopt = comfy_layers(weights, marker=False), modelopt_layers(weights, padded=True)
    for declared in ("auto", "comfy"):
        with pytest.raises(CheckpointError, match="choose layout modelopt") as caught:
            checkpoint.normalise(modelopt, declared=declared)
        assert (caught.value.code, caught.value.tensor) == ("layout_implausible", "a.fc1")
    with pytest.raises(CheckpointError, match="choose layout comfy"):
        checkpoint.normalise(comfy, declared="modelopt")
    assert checkpoint.normalise(comfy)[1]["layout_from"] == "evidence"
    assert checkpoint.normalise(comfy, declared="comfy")[1]["layout_from"] == "declared"
    checkpoint.normalise(modelopt, declared="modelopt")


@pytest.mark.parametrize("seed", range(5))
def test_weights_without_structure_carry_no_evidence(seed):
    """Nothing can be seen in independent weights: the declaration is trusted, and auto says that it assumes."""
    weights = {"a.fc1": torch.randn(768, 256, generator=torch.Generator().manual_seed(seed))}
    comfy, modelopt = comfy_layers(weights, marker=False), modelopt_layers(weights, padded=True)
    assert checkpoint.normalise(comfy)[1]["layout_from"] == "assumption"
    for declared in ("comfy", "modelopt"):
        checkpoint.normalise(comfy, declared=declared)
        checkpoint.normalise(modelopt, declared=declared)


def test_constant_weights_carry_no_evidence():
    _, info = checkpoint.normalise(comfy_layers({"a.fc1": torch.ones(256, 256)}, marker=False))
    assert info["layout_from"] == "assumption"
    _, info = checkpoint.normalise(comfy_layers({"a.fc1": torch.zeros(256, 256)}, marker=False))
    assert info["layout_from"] == "assumption"


def test_a_marker_contradicts_modelopt():
    layers = comfy_layers({"a.fc1": torch.ones(16, 16)})
    assert code_of(layers, declared="modelopt") == "layout_contradiction"
    del layers["a.fc1.comfy_quant"]
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a.fc1": {"format": "nvfp4"}}})}
    assert code_of(layers, metadata, declared="modelopt") == "layout_contradiction"
    with pytest.raises(ValueError, match="auto, comfy, modelopt"):
        checkpoint.normalise(layers, declared="linear")


def test_a_marker_over_row_major_scales_is_refused():
    layers = modelopt_layers({"a.fc1": lognormal_rows(256, 256)}, padded=True)
    layers["a.fc1.comfy_quant"] = marker('{"format": "nvfp4"}')
    assert code_of(layers) == "layout_implausible"


@pytest.fixture(scope="module")
def tiny():
    """The tiny H3 and its normal form."""
    return checkpoint.tiny_h3()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("encoding", ["marker", "metadata", "metadata, other prefix", "all-NUL markers", "none"])
def test_case_24_encodings_load_alike(tmp_path, tiny, encoding, prefix):
    want, metadata = tiny
    layers = [name[: -len(".comfy_quant")] for name in want if name.endswith(".comfy_quant")]
    assert len(layers) == 12
    content = {prefix + name: tensor for name, tensor in want.items()}
    metadata = dict(metadata)
    if prefix:
        content["vae.something"] = torch.zeros(2)
    if encoding != "marker":
        for layer in layers:
            key = f"{prefix}{layer}.comfy_quant"
            if encoding == "all-NUL markers":
                content[key] = torch.zeros_like(content[key])
            else:
                del content[key]
    if encoding.startswith("metadata"):
        other = "" if prefix else "model.diffusion_model."
        named = other if "other" in encoding else prefix
        conf = {"layers": {named + layer: {"format": "nvfp4"} for layer in layers} | {"gone": {"format": "nvfp4"}}}
        metadata["_quantization_metadata"] = json.dumps(conf)
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, content, metadata)

    got, info = checkpoint.normalise(*checkpoint.load(path), file=str(path))
    assert same_dict(got, want)
    assert info["prefix"] == prefix
    assert info["dropped"] == (["vae.something"] if prefix else [])
    assert info["layout"] == "comfy"
    assert info["layout_from"] == ("marker" if encoding[0] == "m" else "evidence")
    assert info["ignored_metadata"] == (["gone"] if encoding[0:4] == "meta" else [])
    assert "_quantization_metadata" not in info["metadata"]
    assert set(info["layers"]) == set(layers)

    report = checkpoint.inspect(path)
    assert report["is_h3"]
    assert report["prefix"] == prefix
    assert (report["blocks"], report["refiner_blocks"], report["adaln"]) == (3, 2, "pruned")
    assert report["formats"]["attn.qkv_proj"] == {"nvfp4": 3}
    assert report["formats"]["adaln_proj.linear"] == {"F32": 3}
    source = {"m": "marker", "a": "inferred", "n": "inferred"}[encoding[0]]
    assert report["format_sources"] == {"metadata" if encoding.startswith("meta") else source: 12}
    assert report["static_scales"] == 0
    assert report["bytes"] == path.stat().st_size
    json.dumps(report)


def test_inspect_of_full_unquantised_and_static(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors, metadata = checkpoint.tiny_h3("full", quantise=False)
    checkpoint.write(path, tensors, metadata)
    report = checkpoint.inspect(path)
    assert report["adaln"] == "full"
    assert report["formats"]["mlp.fc1"] == {"BF16": 3}
    assert report["format_sources"] == {}
    layer = comfy_layers({"blocks.0.mlp.fc1": lognormal_rows(32, 32)}) | {
        "blocks.0.mlp.fc1.input_scale": torch.tensor(0.1)
    }
    checkpoint.write(path, layer, overwrite=True)
    report = checkpoint.inspect(path)
    assert report["static_scales"] == 1
    assert not report["is_h3"]
    assert report["adaln"] is None


def test_case_25_uint8_scales_are_viewed():
    layers = comfy_layers({"a.fc1": lognormal_rows(128, 64)})
    want = layers["a.fc1.weight_scale"]
    layers["a.fc1.weight_scale"] = want.view(torch.uint8)
    got, _ = checkpoint.normalise(layers)
    assert same_bits(got["a.fc1.weight_scale"], want)
    assert got["a.fc1.weight_scale"].data_ptr() == want.data_ptr()


BAD_LAYERS = [
    ({"weight": None}, "scale_without_weight"),
    ({"weight_scale": None}, "weight_without_scale"),
    ({"weight_scale_2": None}, "weight_without_scale"),
    ({"weight_scale": None, "weight_scale_2": None}, "weight_without_scale"),
    ({"weight_scale": None, "weight_scale_2": None, "comfy_quant": None}, "weight_without_scale"),
    ({"weight": torch.zeros(128, 64)}, "bad_weight"),
    ({"weight": torch.zeros(128, 32, dtype=torch.uint8)[:, :31]}, "bad_weight"),
    ({"weight": torch.zeros(120, 32, dtype=torch.uint8)}, "bad_weight"),
    ({"weight": torch.zeros(128, 64), "comfy_quant": None}, "scale_without_format"),
    ({"weight_scale": torch.zeros(128, 4)}, "bad_scale"),
    ({"weight_scale": torch.zeros(128, 8, dtype=torch.uint8)}, "bad_scale"),
    ({"weight_scale": torch.full((128, 4), 0x7F, dtype=torch.uint8)}, "bad_scale"),
    ({"weight_scale": torch.full((128, 4), 0xFF, dtype=torch.uint8)}, "bad_scale"),
    ({"weight_scale": torch.full((128, 4), 0x80, dtype=torch.uint8)}, "bad_scale"),
    ({"weight_scale": torch.full((128, 4), 0xB8, dtype=torch.uint8)}, "bad_scale"),
    ({"weight_scale_2": torch.tensor(float("nan"))}, "bad_scale"),
    ({"weight_scale_2": torch.tensor(float("inf"))}, "bad_scale"),
    ({"weight_scale_2": torch.tensor(-1.0)}, "bad_scale"),
    ({"weight_scale_2": torch.tensor(0.0)}, "bad_scale"),
    ({"weight_scale_2": torch.ones(2)}, "bad_scale"),
    ({"weight_scale_2": torch.tensor(1)}, "bad_scale"),
    ({"input_scale": torch.tensor(0.0)}, "bad_scale"),
    ({"input_scale": torch.tensor(float("nan"))}, "bad_scale"),
    ({"comfy_quant": marker("{")}, "bad_marker"),
    ({"comfy_quant": marker(b"\xff\xfe")}, "bad_marker"),
    ({"comfy_quant": marker("[" * 60_000)}, "bad_marker"),
    ({"comfy_quant": marker("[1]")}, "bad_marker"),
    ({"comfy_quant": marker('{"format": "nvfp5"}')}, "unknown_format"),
    ({"comfy_quant": marker('{"format": ["nvfp4"]}')}, "unknown_format"),
    ({"comfy_quant": marker("{}")}, "unknown_format"),
    ({"comfy_quant": torch.zeros(50_000_000, dtype=torch.uint8)}, "bad_marker"),
    ({"comfy_quant": torch.zeros(19)}, "bad_marker"),
]


@pytest.mark.parametrize(("change", "code"), BAD_LAYERS)
def test_bad_layer_has_its_code_and_names_the_layer(change, code):
    layers = comfy_layers({"blocks.7.mlp.fc1": lognormal_rows(128, 64)})
    for part, tensor in change.items():
        layers[f"blocks.7.mlp.fc1.{part}"] = tensor
    layers = {name: tensor for name, tensor in layers.items() if tensor is not None}
    with pytest.raises(CheckpointError, match="blocks.7.mlp.fc1") as caught:
        checkpoint.normalise(layers)
    assert caught.value.code == code


@pytest.mark.parametrize(("change", "code"), BAD_LAYERS)
def test_bad_layer_is_refused_in_the_file_before_anything_is_allocated(tmp_path, monkeypatch, change, code):
    """Scale bytes and scalars too: `verify` looks at them where they lie."""
    layers = comfy_layers({"blocks.7.mlp.fc1": lognormal_rows(128, 64)})
    for part, tensor in change.items():
        layers[f"blocks.7.mlp.fc1.{part}"] = tensor
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {name: tensor.contiguous() for name, tensor in layers.items() if tensor is not None})
    for maker in ("empty", "zeros", "tensor", "frombuffer"):
        monkeypatch.setattr(torch, maker, None)
    with pytest.raises(CheckpointError, match="blocks.7.mlp.fc1") as caught:
        checkpoint.verify(str(path), checkpoint.read_header(path))
    assert (caught.value.code, caught.value.file) == (code, "model.safetensors")


def test_verify_takes_a_good_file_and_says_its_layers(tmp_path, tiny, monkeypatch):
    inspection = pack_module("kernels.checkpoint.inspection")
    monkeypatch.setattr(inspection, "_BUFFER_BYTES", 1000)
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, *tiny)
    calls = []
    layers = checkpoint.verify(str(path), checkpoint.read_header(path), progress=lambda *call: calls.append(call))
    assert len(layers) == 12 and {layer.source for layer in layers.values()} == {"marker"}
    scales = sum(tensor.numel() for name, tensor in tiny[0].items() if name.endswith(".weight_scale"))
    assert calls[-1] == (scales, scales) and max(b[0] - a[0] for a, b in zip(calls, calls[1:], strict=False)) <= 1000
    zeros = comfy_layers({"a.fc1": torch.zeros(16, 16)})
    checkpoint.write(path, zeros, overwrite=True)
    checkpoint.verify(str(path), checkpoint.read_header(path))


@pytest.mark.parametrize("at", [0, 999, 1000, -1])
def test_one_bad_block_scale_anywhere_is_seen(tmp_path, at, monkeypatch):
    inspection = pack_module("kernels.checkpoint.inspection")
    monkeypatch.setattr(inspection, "_BUFFER_BYTES", 1000)
    layers = comfy_layers({"a.fc1": lognormal_rows(256, 256)})
    layers["a.fc1.weight_scale"].view(torch.uint8).view(-1)[at] = 0x7F
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, layers)
    with pytest.raises(CheckpointError, match="has 1 block scales that are NaN"):
        checkpoint.verify(str(path), checkpoint.read_header(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("value", "good"), [(0.5, True), (float("nan"), False), (-1.0, False), (0.0, False)])
def test_an_activation_scale_of_any_float_type_is_read(tmp_path, dtype, value, good):
    layers = comfy_layers({"a.fc1": lognormal_rows(16, 16)})
    layers["a.fc1.input_scale"] = torch.tensor([value], dtype=dtype)
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, layers)
    if good:
        checkpoint.verify(str(path), checkpoint.read_header(path))
        return
    with pytest.raises(CheckpointError, match="input_scale") as caught:
        checkpoint.verify(str(path), checkpoint.read_header(path))
    assert caught.value.code == "bad_scale"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_fp8_without_metadata_is_known_by_its_dtype(dtype):
    """ComfyUI alone would drop the scale; with the marker it does not."""
    layers = {"a.fc1.weight": torch.ones(16, 16).to(dtype), "a.fc1.weight_scale": torch.tensor(2.0)}
    got, info = checkpoint.normalise(layers)
    name = str(dtype).removeprefix("torch.")
    assert json.loads(bytes(got["a.fc1.comfy_quant"].tolist())) == {"format": name}
    assert info["layers"]["a.fc1"].source == "inferred" and info["layout"] is None


def test_huge_marker_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    layers = comfy_layers({"a.fc1": lognormal_rows(128, 64)})
    layers["a.fc1.comfy_quant"] = torch.zeros(layout.MAX_MARKER_BYTES + 1, dtype=torch.uint8)
    checkpoint.write(path, layers)
    with pytest.raises(CheckpointError, match="bad_marker"):
        checkpoint.inspect(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": []}', '{"layers": {"a.fc1": 3}}', "[" * 200_000])
def test_bad_file_metadata(text):
    layers = comfy_layers({"a.fc1": lognormal_rows(128, 64)})
    assert code_of(layers, {"_quantization_metadata": text}) == "bad_metadata"


def test_marker_and_metadata_must_agree():
    layers = comfy_layers({"a.fc1": lognormal_rows(128, 64)})
    text = json.dumps({"layers": {"a.fc1": {"format": "float8_e4m3fn"}}})
    assert code_of(layers, {"_quantization_metadata": text}) == "layout_contradiction"


def test_marker_options_and_other_formats_pass():
    layers = comfy_layers({"a.fc1": lognormal_rows(128, 64)})
    conf = {"format": "nvfp4", "full_precision_matrix_mult": True}
    layers["a.fc1.comfy_quant"] = marker(json.dumps(conf) + "\0\0")
    layers["b.weight"] = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    layers["b.weight_scale"] = torch.tensor(2.0)
    layers["b.comfy_quant"] = marker('{"format": "float8_e4m3fn"}')
    layers["a.fc1.weight_scale_2"] = layers["a.fc1.weight_scale_2"].reshape(1)
    got, info = checkpoint.normalise(layers)
    assert json.loads(bytes(got["a.fc1.comfy_quant"].tolist())) == conf
    assert got["a.fc1.weight_scale_2"].shape == ()
    assert {name: layer.format for name, layer in info["layers"].items()} == {"a.fc1": "nvfp4", "b": "float8_e4m3fn"}


def test_absent_marker_of_a_plain_layer_is_removed():
    """ComfyUI would read the NULs as JSON."""
    layers = {"a.weight": torch.zeros(4, 4), "a.comfy_quant": torch.zeros(19, dtype=torch.uint8)}
    assert list(checkpoint.normalise(layers)[0]) == ["a.weight"]


def test_is_h3(tiny):
    names = list(tiny[0])
    assert checkpoint.is_h3(names)
    assert checkpoint.is_h3([f"model.diffusion_model.{name}" for name in names])
    assert not checkpoint.is_h3([name for name in names if not name.startswith("audio_patch_proj")])
    assert not checkpoint.is_h3([])


@pytest.mark.parametrize("adaln", ["pruned", "full"])
def test_tiny_h3_loads_in_comfyui_and_gives_finite_velocities(comfy, adaln):
    sd_module = pytest.importorskip("comfy.sd", reason="needs ComfyUI")
    state_dict, metadata = checkpoint.tiny_h3(adaln)
    patcher = sd_module.load_diffusion_model_state_dict(dict(state_dict), metadata=metadata)
    model = patcher.model.diffusion_model
    assert set(model.state_dict()) == set(state_dict), "missing and unexpected keys"
    linear = model.blocks[0].attn.qkv_proj
    want = nvfp4.NVFP4(*(state_dict[f"blocks.0.attn.qkv_proj.{part}"] for part in PARTS), (768, 256))
    # ComfyUI's own dequantisation, in fp32 or bf16: a wrong nibble order or swizzle is far outside one bf16 rounding
    assert torch.allclose(linear.weight.dequantize().float(), nvfp4.dequantize(want), rtol=2**-7, atol=0)
    g = torch.Generator().manual_seed(0)
    video, audio = torch.randn(1, 24, 7, 4, 4, generator=g), torch.randn(1, 32, 2, 37, generator=g)
    context = torch.randn(1, 9, 64, generator=g).to(torch.bfloat16)
    with torch.no_grad():
        out = model([video, audio], torch.tensor([500.0]), context)
        other = model([video, audio], torch.tensor([500.0]), context.flip(1))
    for velocity, changed in zip(out, other, strict=True):
        assert velocity.isfinite().all()
        assert 0.2 < float(velocity.std()) < 5
        assert not torch.equal(velocity, changed), "the conditioning must matter"


def test_tiny_h3_is_deterministic_and_has_the_dtypes_of_real_files():
    a, metadata = checkpoint.tiny_h3()
    b, _ = checkpoint.tiny_h3()
    c, _ = checkpoint.tiny_h3(seed=1)
    assert same_dict(a, b)
    assert not same_dict(a, c)
    assert all(isinstance(value, str) for value in metadata.values())
    assert a["adaln_t_table"].shape == (1025, 8)
    want = {
        "blocks.2.adaln_proj.linear.weight": torch.float32,
        "blocks.0.attn.qkv_proj.weight": torch.uint8,
        "blocks.0.norm1.weight": torch.bfloat16,
        "token_refiner.blocks.1.mlp.fc1.weight": torch.bfloat16,
        "final_layer.video_out.weight": torch.float32,
        "audio_patch_proj.bias": torch.float32,
        "rope.inv_freq": torch.float32,
    }
    assert {name: a[name].dtype for name in want} == want
    full, _ = checkpoint.tiny_h3("full")
    assert full["blocks.2.adaln_proj.linear.weight"].dtype == torch.bfloat16
    assert full["time_embedder.proj_out.weight"].dtype == torch.float32
    with pytest.raises(ValueError, match="pruned or full"):
        checkpoint.tiny_h3("half")
    with pytest.raises(ValueError, match="96"):
        checkpoint.tiny_h3(head_dim=64)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "model.model.", "net.", "model."])
def test_every_prefix_that_comfyui_strips(prefix):
    layout = pack_module("kernels.checkpoint.layout")
    names = [f"{prefix}video_patch_proj.weight", f"{prefix}audio_patch_proj.weight"]
    assert layout.prefix_of(names) == prefix and layout.is_h3(names)


def test_every_format_of_the_core_is_known(comfy):
    import comfy.quant_ops

    layout = pack_module("kernels.checkpoint.layout")
    assert set(comfy.quant_ops.QUANT_ALGOS) <= set(layout.REQUIRED_SCALES)
