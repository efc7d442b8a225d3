"""The patched model gives the bytes of the stock one: every step, every kind of conditioning, both AdaLN forms."""

import inspect

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, equal, finite, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")

CASES = {
    "t2va": {},
    "fl2va": {"keyframes": True},
    "ref_image": {"reference": "image"},
    "ref_video_audio": {"reference": "video_audio"},
    "ref_audio": {"reference": "audio"},
    "ref_all": {"reference": "all"},
}


@pytest.mark.parametrize("adaln", ["pruned", "full"])
@pytest.mark.parametrize("case", CASES)
def test_bf16_ops_equal_the_untouched_model(adaln, case):
    model, positive, latent = selftest(adaln=adaln, **CASES[case])
    stock = sample(model, positive, latent)
    assert finite(stock)
    patched = fuse(model, emulate="bf16")
    assert equal(sample(patched, positive, latent), stock)
    run = run_of(patched)
    assert run.state == "finished" and run.steps == 3 and not run.fallbacks
    assert dict(run.fused) == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("adaln", ["pruned", "full"])
@pytest.mark.parametrize("case", CASES)
def test_nvfp4_producers_equal_the_unfused_quantiser(adaln, case):
    """W4A4 on both sides: stock's block code and kitchen's quantiser against the fused block and ours."""
    model, positive, latent = selftest(adaln=adaln, **CASES[case])
    unfused = fuse(model, mode="off", emulate="w4a4")
    fused = fuse(model, mode="exact", emulate="w4a4")
    expected = sample(unfused, positive, latent)
    assert finite(expected)
    assert equal(sample(fused, positive, latent), expected)
    run = run_of(fused)
    assert dict(run.fused) == {0: 3, 1: 3, 2: 3} and not run.bf16_inputs
    # The emulation is really on: 4-bit activations move the result away from the untouched model's.
    assert not equal(expected, sample(model, positive, latent))


def test_noise_masks_with_a_row_per_token(pack):
    """ComfyUI from 0.33 on modulates masked tokens by a LongTensor of rows."""
    import comfy.ldm.minimax.model as h3
    import comfy.nested_tensor

    if "denoise_mask" not in inspect.signature(h3.MiniMaxH3Model._forward).parameters:
        pytest.skip("this ComfyUI's H3 takes no noise mask")
    model, positive, latent = selftest()
    video, audio = latent["samples"].unbind()
    generator = torch.Generator().manual_seed(3)
    mask = comfy.nested_tensor.NestedTensor(
        (torch.rand(video.shape, generator=generator).round(decimals=1), torch.rand(audio.shape, generator=generator))
    )
    rows = []
    patched = fuse(model, emulate="bf16")
    fused_forward = pack_module("nodes.adapt").fused_forward

    def spy(block, x, t_emb, segments, *rest):
        rows.extend(row for _, _, row in segments)
        return fused_forward(block, x, t_emb, segments, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module("nodes.adapt"), "fused_forward", spy)
        ours = sample(patched, positive, latent, noise_mask=mask)
    assert any(isinstance(row, torch.Tensor) and row.dtype == torch.long for row in rows)
    assert equal(ours, sample(model, positive, latent, noise_mask=mask))
    unfused, fused = fuse(model, mode="off", emulate="w4a4"), fuse(model, emulate="w4a4")
    expected = sample(unfused, positive, latent, noise_mask=mask)
    assert equal(sample(fused, positive, latent, noise_mask=mask), expected)


def test_attention_backend_joins_both_sides():
    model, positive, latent = selftest()
    expected = sample(attend(model), positive, latent)
    patched = attend(fuse(model))
    assert equal(sample(patched, positive, latent), expected)
    assert dict(run_of(patched).attention) == {"sdpa": 9}


@pytest.mark.parametrize("switch", ["modulate", "swiglu", "attention_output", "elementwise"])
def test_each_switch_alone_stays_exact_and_is_reported(switch):
    model, positive, latent = selftest()
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent, steps=2)
    patched = fuse(model, emulate="w4a4", **{switch: False})
    assert equal(sample(patched, positive, latent, steps=2), expected)
    off = {linear for linear, reason in run_of(patched).bf16_inputs if reason == "switched off"}
    assert off == {
        "modulate": {"attn.qkv_proj", "mlp.fc1"},
        "swiglu": {"mlp.fc2"},
        "attention_output": {"attn.out_proj"},
        "elementwise": set(),
    }[switch]


def test_kitchen_makes_the_codes_when_asked():
    model, positive, latent = selftest()
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent, steps=2)
    patched = fuse(model, emulate="w4a4", scale_backend="kitchen")
    assert equal(sample(patched, positive, latent, steps=2), expected)
    assert len({linear for linear, _ in run_of(patched).bf16_inputs}) == 4


@pytest.mark.parametrize("broken", ["nibbles", "one rounding less"])
def test_a_wrong_producer_is_seen(broken, monkeypatch):
    """The comparison above is able to fail. The references are broken here, so only a CPU run sees it."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels; tests/gpu breaks one of those")
    model, positive, latent = selftest()
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent, steps=2)
    nvfp4 = pack_module("kernels.nvfp4")
    if broken == "nibbles":
        real = nvfp4.quantize

        def swapped(x, decode_scale=None):
            q = real(x, decode_scale)
            codes = ((q.codes >> 4) | (q.codes << 4)).to(torch.uint8)
            return nvfp4.NVFP4(codes, q.block_scale, q.decode_scale, q.shape)

        monkeypatch.setattr(nvfp4, "quantize", swapped)
    else:
        swiglu = pack_module("kernels.fused.swiglu_nvfp4")

        def unrounded(gate_up):
            gate, up = gate_up.float().chunk(2, dim=-1)
            return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

        monkeypatch.setattr(swiglu, "bf16_reference", unrounded)
    assert not equal(sample(fuse(model, emulate="w4a4"), positive, latent, steps=2), expected)


@pytest.fixture
def calibrated(tmp_path):
    """A tiny H3 whose NVFP4 layers carry an input_scale, all but those named."""

    def build(without=()):
        tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
        tensors, metadata = tiny.tiny_h3()
        for key in list(tensors):
            layer = key.removesuffix(".weight_scale_2")
            if layer != key and not layer.endswith(tuple(without)):
                tensors[f"{layer}.input_scale"] = torch.tensor(0.003)
        path = tmp_path / f"calibrated{len(without)}.safetensors"
        writer.write(str(path), tensors, metadata)
        return pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)

    return build


def test_static_scales_of_the_file_are_used_as_stock_uses_them(calibrated):
    model = calibrated()
    _, positive, latent = selftest()
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    assert equal(sample(fuse(model, mode="exact", emulate="w4a4"), positive, latent), expected)
    assert equal(sample(fuse(model, mode="static", emulate="w4a4"), positive, latent), expected)
    dynamic, _, _ = selftest()
    assert not equal(expected, sample(fuse(dynamic, mode="off", emulate="w4a4"), positive, latent))


def test_static_mode_names_the_layer_without_a_scale(calibrated):
    with pytest.raises(ValueError, match=r"input_scale.*1 have none.*blocks\.1\.mlp\.fc1.*exact"):
        fuse(calibrated(without=["blocks.1.mlp.fc1"]), mode="static")
    # A switched-off site needs no scale.
    fuse(calibrated(without=["blocks.1.mlp.fc2", "blocks.2.mlp.fc2"]), mode="static", swiglu=False)


def test_a_layer_left_in_bf16_gets_bf16(tmp_path):
    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    whole, metadata = tiny.tiny_h3(quantise=False)
    tensors, _ = tiny.tiny_h3()
    for suffix in ("weight_scale", "weight_scale_2", "comfy_quant"):
        del tensors[f"blocks.1.mlp.fc2.{suffix}"]
    tensors["blocks.1.mlp.fc2.weight"] = whole["blocks.1.mlp.fc2.weight"]
    path = tmp_path / "mixed.safetensors"
    writer.write(str(path), tensors, metadata)
    model = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)
    _, positive, latent = selftest()
    patched = fuse(model, emulate="w4a4")
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    assert equal(sample(patched, positive, latent), expected)
    assert dict(run_of(patched).bf16_inputs) == {("mlp.fc2", "its weight is not NVFP4"): 3}
