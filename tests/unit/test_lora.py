"""Every key form of a LoRA file gives the same weight change; what cannot be used is refused with its reason."""

import json

import pytest
import torch
from conftest import pack_module

lora = pack_module("kernels.lora")

HIDDEN, INNER, FFN, TEXT = 16, 24, 20, 12
BLOCK = {
    "attn.qkv_proj": (3 * INNER, HIDDEN),
    "attn.out_proj": (HIDDEN, INNER),
    "mlp.fc1": (2 * FFN, HIDDEN),
    "mlp.fc2": (HIDDEN, FFN),
    "adaln_proj.linear": (18 * HIDDEN, 8),
}
LINEARS = {
    "condition_proj": (HIDDEN, TEXT),
    **{f"token_refiner.blocks.0.{name}": shape for name, shape in list(BLOCK.items())[:4]},
    **{f"blocks.{index}.{name}": shape for index in range(2) for name, shape in BLOCK.items()},
    "final_layer.adaln_proj.linear": (2 * HIDDEN, 8),
    "final_layer.video_out": (96, HIDDEN),
}
RANK = 4


def factors(names=tuple(LINEARS), rank=RANK):
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(rank, LINEARS[name][1], generator=generator),
            torch.randn(LINEARS[name][0], rank, generator=generator),
        )
        for name in names
    }


def delta(branches, shape):
    """The weight change of a linear's branches, written out."""
    out = torch.zeros(shape, dtype=torch.float64)
    for branch in branches:
        out[branch.start : branch.stop] += branch.scale * branch.up.double() @ branch.down.double()
    return out


def deltas(made, scale=1.0):
    return {name: scale * up.double() @ down.double() for name, (down, up) in made.items()}


def same(reading, expected):
    assert reading.branches.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(delta(reading.branches[name], LINEARS[name]), want, rtol=1e-12, atol=1e-12)


def dotted(made, prefix="", down=".lora_A.weight", up=".lora_B.weight"):
    return {
        f"{prefix}{name}{suffix}": t for name, pair in made.items() for suffix, t in zip((down, up), pair, strict=True)
    }


@pytest.mark.parametrize(
    "prefix",
    [
        "", "diffusion_model.", "transformer.", "base_model.model.", "base_model.model.diffusion_model.",
        "base_model.model.base_model.model.", "model.diffusion_model.", "unet.base_model.model.", "net.",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("down", "up"),
    [
        (".lora_A.weight", ".lora_B.weight"),
        (".lora_A.default.weight", ".lora_B.default.weight"),
        (".lora_A.my-style_2.weight", ".lora_B.my-style_2.weight"),
        (".lora_A", ".lora_B"),
        (".lora_down.weight", ".lora_up.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ],
)
def test_native_names(prefix, down, up):
    made = factors()
    reading = lora.read(dotted(made, prefix, down, up), LINEARS)
    same(reading, deltas(made))
    assert not reading.left_out and reading.alpha == "none" and reading.ranks == (RANK,)
    assert len(reading.used) == 2 * len(LINEARS)


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_", "lycoris_", "lora_unet_diffusion_model_"])
def test_flattened_names(prefix):
    made = factors()
    flat = {name.replace(".", "_"): pair for name, pair in made.items()}
    tensors = dotted(flat, prefix, ".lora_down.weight", ".lora_up.weight")
    tensors.update({f"{prefix}{name}.alpha": torch.tensor(float(RANK)) for name in flat})
    reading = lora.read(tensors, LINEARS)
    same(reading, deltas(made))
    assert reading.alpha == "tensors" and len(reading.used) == 3 * len(LINEARS)


def as_diffusers(made):
    """The factors as diffusers' converter hands them out: q, k, v by themselves and [value; gate]."""
    out = {}
    for name, (down, up) in made.items():
        head = name.replace("token_refiner.blocks", "token_refiner.refiner_blocks")
        head = head if head != name else name.replace("blocks.", "transformer_blocks.")
        if name.endswith("qkv_proj"):
            for letter, part in zip("qkv", up.chunk(3), strict=True):
                out[head.replace("qkv_proj", f"to_{letter}")] = down, part
        elif name.endswith("fc1"):
            gate, value = up.chunk(2)
            out[head.replace("mlp.fc1", "ff.net.0.proj")] = down, torch.cat((value, gate))
        else:
            head = head.replace("attn.out_proj", "attn.to_out.0").replace("mlp.fc2", "ff.net.2")
            whole = {
                "condition_proj": "context_embedder",
                "final_layer.adaln_proj.linear": "norm_out.linear",
                "final_layer.video_out": "proj_out",
            }
            out[whole.get(head, head)] = down, up
    return out


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model.", "base_model.model.transformer."])
@pytest.mark.parametrize("infix", ["", ".default"])
def test_diffusers_names(prefix, infix):
    """Split q, k, v land on thirds of the fused rows, and the halves of fc1 change places."""
    made = factors()
    tensors = dotted(as_diffusers(made), prefix, f".lora_A{infix}.weight", f".lora_B{infix}.weight")
    same(lora.read(tensors, LINEARS), deltas(made))


def test_split_qkv_with_ranks_of_their_own_and_one_of_them_missing():
    name = "blocks.1.attn.qkv_proj"
    generator = torch.Generator().manual_seed(3)
    tensors, want = {}, torch.zeros(LINEARS[name], dtype=torch.float64)
    for index, (letter, rank) in enumerate((("q", 2), ("v", 5))):
        down, up = torch.randn(rank, HIDDEN, generator=generator), torch.randn(INNER, rank, generator=generator)
        tensors[f"transformer_blocks.1.attn.to_{letter}.lora_A.weight"] = down
        tensors[f"transformer_blocks.1.attn.to_{letter}.lora_B.weight"] = up
        start = INNER * 2 * index
        want[start : start + INNER] = up.double() @ down.double()
    reading = lora.read(tensors, LINEARS)
    same(reading, {name: want})
    assert reading.ranks == (2, 5)


def test_gate_and_up_by_themselves():
    name = "blocks.0.mlp.fc1"
    made = factors([name])
    down, up = made[name]
    tensors = dotted({"blocks.0.mlp.gate_proj": (down, up[:FFN]), "blocks.0.mlp.up_proj": (down, up[FFN:])})
    same(lora.read(tensors, LINEARS), deltas(made))


def test_alpha_absent_equal_and_different_from_the_rank():
    name = "blocks.0.mlp.fc2"
    made = factors([name])
    for alpha, scale in ((None, 1.0), (4.0, 1.0), (1.0, 0.25), (8.0, 2.0), (0.0, 0.0)):
        tensors = dotted(made)
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
        reading = lora.read(tensors, LINEARS)
        assert reading.branches[name][0].scale == scale
        same(reading, deltas(made, scale))


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_alpha": "8"},
        {"alpha": "8.0", "rank": "4"},
        {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})},
        {"adapter_config": json.dumps({"r": 4, "lora_alpha": 8})},
    ],
)
def test_alpha_from_metadata(metadata):
    """LightX2V's Turbo LoRAs of diffusers' form: rank 128, alpha 8, and alpha is in the metadata only."""
    made = factors(["blocks.0.mlp.fc2"])
    reading = lora.read(dotted(made), LINEARS, metadata)
    same(reading, deltas(made, 2.0))
    assert reading.alpha == "metadata"
    tensors = {**dotted(made), "blocks.0.mlp.fc2.alpha": torch.tensor(2.0)}
    assert lora.read(tensors, LINEARS, metadata).branches["blocks.0.mlp.fc2"][0].scale == 0.5  # the tensor wins


@pytest.mark.parametrize(
    "metadata", [{"lora_alpha": "eight"}, {"lora_alpha": "4", "alpha": "8"}, {"alpha": "nan"}, {"alpha": "1e39"}]
)
def test_an_alpha_that_is_no_one_number_is_an_error(metadata):
    with pytest.raises(lora.LoraError, match="metadata gives alpha as") as caught:
        lora.read(dotted(factors(["blocks.0.mlp.fc2"])), LINEARS, metadata, "x.safetensors")
    assert caught.value.code == "value" and str(caught.value).startswith("x.safetensors: ")


def test_no_key_fits_shows_two_of_each_side():
    tensors = dotted({f"double_blocks.{index}.img_attn.qkv": factors()["condition_proj"] for index in range(3)})
    with pytest.raises(lora.LoraError) as caught:
        lora.read(tensors, LINEARS, file="flux.safetensors")
    text = str(caught.value)
    assert caught.value.code == "unmatched"
    assert text.startswith("flux.safetensors: none of its 6 keys fits this model (the model has no such linear)")
    for key in (*list(tensors)[:2], *list(LINEARS)[:2]):
        assert key in text
    assert list(tensors)[2] not in text


def test_what_does_not_fit_is_counted():
    made = factors(["blocks.0.mlp.fc2"])
    extra = {
        "blocks.9.mlp.fc2.lora_A.weight": torch.zeros(4, 4),
        "blocks.9.mlp.fc2.lora_B.weight": torch.zeros(4, 4),
        "blocks.0.norm1.diff": torch.zeros(4),
        "blocks.7.x.alpha": torch.tensor(1.0),
    }
    reading = lora.read({**dotted(made), **extra}, LINEARS)
    same(reading, deltas(made))
    assert reading.left_out == {
        "blocks.9.mlp.fc2.lora_A.weight": "the model has no such linear",
        "blocks.9.mlp.fc2.lora_B.weight": "the model has no such linear",
        "blocks.0.norm1.diff": "not a part of a low-rank pair",
        "blocks.7.x.alpha": "an alpha without its pair",
    }


def test_adaln_of_the_other_form_is_left_out():
    """A LoRA of the full model has adaln branches of width 2688; a pruned one's is 8."""
    name = "blocks.0.adaln_proj.linear"
    tensors = dotted({**factors(["blocks.0.mlp.fc2"]), name: (torch.zeros(4, 2688), torch.zeros(LINEARS[name][0], 4))})
    reading = lora.read(tensors, LINEARS)
    assert set(reading.branches) == {"blocks.0.mlp.fc2"}
    assert all("the other form, pruned or full" in reason for reason in reading.left_out.values())
    assert len(reading.left_out) == 2


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("blocks.0.mlp.fc2.dora_scale", "DoRA"),
        ("blocks.0.mlp.fc2.lora_magnitude_vector.default.weight", "DoRA"),
        ("blocks.0.mlp.fc2.lora_magnitude_vector", "DoRA"),
        ("blocks.0.mlp.fc2.hada_w1_a", "LoHa"),
        ("lora_unet_blocks_0_mlp_fc2.lokr_w1", "LoKr"),
        ("blocks.0.mlp.fc2.oft_blocks", "OFT"),
        ("blocks.0.mlp.fc2.a1.weight", "GLoRA"),
        ("blocks.0.mlp.fc2.lora_mid.weight", "Tucker"),
    ],
)
def test_other_adapters_are_refused_with_a_sentence(key, kind):
    tensors = {**dotted(factors(["blocks.0.mlp.fc2"])), key: torch.zeros(4)}
    with pytest.raises(lora.LoraError, match=f"{kind}.*side branch adds B.*use ComfyUI's own LoRA loader") as caught:
        lora.read(tensors, LINEARS)
    assert caught.value.code == "refused" and key in str(caught.value)


def broken(change):
    tensors = dotted(factors(["blocks.0.mlp.fc2"]))
    change(tensors)
    return tensors


A, B = "blocks.0.mlp.fc2.lora_A.weight", "blocks.0.mlp.fc2.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda t: t.pop(B), "half", "has no other half"),
        (lambda t: t.pop(A), "half", "has no other half"),
        (lambda t: t.update({A: torch.zeros(5, FFN)}), "shape", "their ranks differ"),
        (lambda t: t.update({A: torch.zeros(4, FFN + 1)}), "shape", "the model's weight there"),
        (lambda t: t.update({A: torch.zeros(4)}), "shape", "is a matrix"),
        (lambda t: t.update({A: torch.zeros(0, FFN), B: torch.zeros(HIDDEN, 0)}), "shape", "is a matrix"),
        (lambda t: t.update({A: torch.zeros(4, FFN, dtype=torch.int8)}), "value", "floating point"),
        (lambda t: t[A].fill_(float("nan")), "value", "not finite"),
        (lambda t: t.update({A: torch.full((4, FFN), 3.4e38)}), "value", "not finite in bfloat16"),
        (lambda t: t.update({B: t[B].double() + 1e300}), "value", "not finite in bfloat16"),
        (lambda t: t.update({"blocks.0.mlp.fc2.alpha": torch.ones(2)}), "value", "one finite number"),
        (lambda t: t.update({"blocks.0.mlp.fc2.alpha": torch.tensor(1 + 1j)}), "value", "one finite number"),
        (lambda t: t.clear(), "empty", "holds no tensors"),
    ],
)
def test_damaged_files(change, code, text):
    with pytest.raises(lora.LoraError, match=text) as caught:
        lora.read(broken(change), LINEARS)
    assert caught.value.code == code


def test_convolutions_of_size_one_and_fp8_factors():
    made = factors(["blocks.0.mlp.fc2"])
    down, up = made["blocks.0.mlp.fc2"]
    reading = lora.read({A: down[:, :, None, None], B: up[:, :, None, None]}, LINEARS)
    same(reading, deltas(made))
    reading = lora.read({A: down.to(torch.float8_e4m3fn), B: up.to(torch.float8_e4m3fn)}, LINEARS)
    assert reading.branches["blocks.0.mlp.fc2"][0].down.dtype == torch.float8_e4m3fn


def test_a_second_name_of_the_same_factor_is_left_out_and_counted():
    """The first one counts, and no key of the file is missing from both lists."""
    made = factors(["blocks.0.mlp.fc2"])
    tensors = {**dotted(made), "blocks.0.mlp.fc2.alpha": torch.tensor(4.0)}
    tensors |= {A.replace("lora_A", "lora_down"): tensors[A] * 3, B.replace("lora_B", "lora_up"): tensors[B] * 3}
    tensors["blocks.0.mlp.fc2.lora_alpha"] = torch.tensor(8.0)
    reading = lora.read(tensors, LINEARS)
    same(reading, deltas(made, 1.0))
    assert sorted((*reading.used, *reading.left_out)) == sorted(tensors)
    assert reading.left_out[A.replace("lora_A", "lora_down")] == f"another name of {A}"


def test_what_peft_does_to_alpha():
    """rsLoRA divides by the root of the rank; alphas by layer are no single number, so nothing is guessed."""
    made = factors(["blocks.0.mlp.fc2"])
    config = {"transformer.lora_alpha": 8, "transformer.use_rslora": True, "transformer.alpha_pattern": {}}
    same(lora.read(dotted(made), LINEARS, {"lora_adapter_metadata": json.dumps(config)}), deltas(made, 4.0))
    config["transformer.alpha_pattern"] = {"mlp.fc2": 64}
    with pytest.raises(lora.LoraError, match="alpha_pattern") as caught:
        lora.read(dotted(made), LINEARS, {"lora_adapter_metadata": json.dumps(config)}, "x.safetensors")
    assert caught.value.code == "refused"


def test_two_adapters_in_one_file_add_up():
    one, two = factors(["blocks.0.mlp.fc2"]), factors(["blocks.0.mlp.fc2"], rank=2)
    tensors = dotted(one, "", ".lora_A.one.weight", ".lora_B.one.weight")
    tensors.update(dotted(two, "", ".lora_A.two.weight", ".lora_B.two.weight"))
    reading = lora.read(tensors, LINEARS)
    want = deltas(one)["blocks.0.mlp.fc2"] + deltas(two)["blocks.0.mlp.fc2"]
    same(reading, {"blocks.0.mlp.fc2": want})
