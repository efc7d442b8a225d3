"""LoRAs beside the linears: their strength survives four bits, and nothing of them stays behind."""

import logging

import pytest
import torch
from conftest import pack_module
from h3_lora import core_keys, factors, linears_of, side_branch, stock_lora, write_lora
from h3_sampling import equal, finite, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")
RANK = 8


@pytest.fixture
def tiny():
    return selftest()


@pytest.fixture
def name(tiny):
    return write_lora("tiny.safetensors", core_keys(factors(tiny[0])))


def attached(model):
    """The model's side branches, attached as during a sampling run."""
    attach = pack_module("nodes.attach")
    return attach.attached(model.model.diffusion_model, model.model_options["transformer_options"])


def state_of(model):
    """Everything that a patch could leave on the modules: instance attributes, hooks, and the weights' bytes."""
    bits = pack_module("nodes.report").bits
    dit = model.model.diffusion_model
    extra = [
        (path, sorted(vars(module).keys() - {"_forward_hooks"}), len(module._forward_hooks))
        for path, module in dit.named_modules()
    ]
    weights = {}
    for key, value in dit.state_dict().items():
        weights[key] = bits(value.detach().cpu().contiguous()).clone()
    return extra, weights


def same_state(before, after):
    return before[0] == after[0] and all(torch.equal(before[1][key], value) for key, value in after[1].items())


# ---------------------------------------------------------------- it computes what it says


def dense_reference(model, made, scale):
    """A linear's output with the LoRA, in fp64 from the linear's own bf16 output."""
    dit = model.model.diffusion_model
    generator = torch.Generator().manual_seed(7)
    for path, (down, up) in made.items():
        linear = dit.get_submodule(path)
        x = torch.randn(5, linear.in_features, generator=generator).bfloat16()
        with torch.inference_mode():
            y = linear(x)
        delta = scale * (x.double() @ down.bfloat16().double().t()) @ up.bfloat16().double().t()
        yield linear, x, y, delta


@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_every_linear_gets_its_branch(tiny, strength):
    """Blocks, refiner, conditioning, AdaLN and heads: any linear a trainer may have touched."""
    model, _, _ = tiny
    made = factors(model, names=list(linears_of(model)))
    name = write_lora("all.safetensors", core_keys(made))
    patched = side_branch(model, name, strength)
    cases = list(dense_reference(model, made, strength))
    assert len(cases) == len(linears_of(model)) > 20
    with torch.inference_mode(), attached(patched):
        for linear, x, y, delta in cases:
            found = linear(x.to(y.dtype))
            error = (found.double() - (y.double() + delta)).abs().max()
            assert error <= 2**-7 * (y.double() + delta).abs().max(), linear
            assert found.dtype == y.dtype and found.shape == y.shape
            # fp32 islands keep their dtype, and 3-D inputs their shape
            assert linear(x[None].to(y.dtype)).shape == (1, *y.shape)


def test_split_and_swapped_keys_give_the_same_model(tiny):
    """diffusers' names, converted by hand here, sample to the same latents as ComfyUI's names."""
    model, positive, latent = tiny
    made = factors(model)
    native = write_lora("native.safetensors", core_keys(made))
    tensors = {}
    for path, (down, up) in made.items():
        head = path.replace("blocks.", "transformer.transformer_blocks.")
        parts = {head.replace("attn.out_proj", "attn.to_out.0").replace("mlp.fc2", "ff.net.2"): up}
        if path.endswith("qkv_proj"):
            parts = {head.replace("qkv_proj", f"to_{n}"): u for n, u in zip("qkv", up.chunk(3), strict=True)}
        elif path.endswith("fc1"):
            parts = {head.replace("mlp.fc1", "ff.net.0.proj"): torch.cat(up.chunk(2)[::-1])}
        for key, rows in parts.items():
            tensors[f"{key}.lora_A.default.weight"] = down.bfloat16()
            tensors[f"{key}.lora_B.default.weight"] = rows.bfloat16()
    other = write_lora("diffusers.safetensors", tensors)
    expected = sample(side_branch(model, native), positive, latent)
    found = sample(side_branch(model, other), positive, latent)
    video, reference = (r[0]["samples"].unbind()[0] for r in (found, expected))
    assert not equal(sample(model, positive, latent), expected)
    # A narrower GEMM may add in another order, so not to the bit: far closer than the LoRA's own effect.
    plain = sample(model, positive, latent)[0]["samples"].unbind()[0]
    assert (video - reference).norm() < 0.05 * (plain - reference).norm()


@pytest.mark.parametrize("emulate", ["bf16", "w4a4"])
@pytest.mark.parametrize("count", [1, 2])
def test_fused_blocks_equal_unfused_ones_to_the_bit(tiny, emulate, count):
    model, positive, latent = tiny
    for index in range(count):
        made = factors(model, rank=4 + index, seed=index)
        model = side_branch(model, write_lora(f"stack{index}.safetensors", core_keys(made)), 0.7)
    unfused = fuse(model, mode="off", emulate=emulate)
    expected = sample(unfused, positive, latent)
    assert finite(expected)
    patched = fuse(model, emulate=emulate)
    assert equal(sample(patched, positive, latent), expected)
    run = run_of(patched)
    assert dict(run.fused) == {0: 3, 1: 3, 2: 3} and bool(run.bf16_inputs) == (emulate == "bf16")
    source = "rows of the producer" if emulate == "w4a4" else "its own input"
    assert dict(run.side) == {source: 3 * 3 * 4}  # blocks, steps, linears
    assert f"LoRA side branches x {3 * 3 * 4}" in run.headline()


@pytest.mark.parametrize(
    ("ranks", "inside"),
    [((16,), True), ((16, 32), True), ((8, 8), True), ((16, 4), False), ((20,), False), ((48, 32), False)],
)
def test_the_update_of_fc1_inside_swiglu(tiny, ranks, inside, monkeypatch):
    """Where a tensor core divides the rank, gate_up never holds the update; the latents are the same."""
    model, positive, latent = tiny
    for index, rank in enumerate(ranks):
        made = factors(model, rank=rank, seed=index)
        model = side_branch(model, write_lora(f"inside{rank}.safetensors", core_keys(made)), 0.7 + index)
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    fused = pack_module("kernels.fused")
    real, calls = fused.swiglu_side, []

    def spy(gate_up, hidden, low_rank, alpha, **options):
        calls.append(hidden.shape[1])
        return real(gate_up, hidden, low_rank, alpha, **options)

    monkeypatch.setattr(fused, "swiglu_side", spy)
    patched = fuse(model, emulate="w4a4")
    assert equal(sample(patched, positive, latent), expected)
    assert calls == ([sum(ranks)] * 9 if inside else [])
    assert dict(run_of(patched).side) == {"rows of the producer": 36}


def test_the_update_of_split_gate_and_up_stays_outside_swiglu(tiny, monkeypatch):
    model, positive, latent = tiny
    made = factors(model, rank=16)
    tensors = core_keys(made)
    for index in range(3):
        name = f"diffusion_model.blocks.{index}.mlp.fc1"
        down, up = tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
        for part, rows in zip(("gate_proj", "up_proj"), up.chunk(2), strict=True):
            tensors[f"{name.replace('fc1', part)}.lora_A.weight"] = down
            tensors[f"{name.replace('fc1', part)}.lora_B.weight"] = rows
    model = side_branch(model, write_lora("halves.safetensors", tensors))
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    monkeypatch.delattr(pack_module("kernels.fused"), "swiglu_side")
    assert equal(sample(fuse(model, emulate="w4a4"), positive, latent), expected)


@pytest.mark.parametrize("off", [{"modulate": False}, {"swiglu": False}, {"attention_output": False}])
def test_a_site_that_is_switched_off(tiny, name, off):
    model, positive, latent = tiny
    model = side_branch(model, name)
    expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    assert equal(sample(fuse(model, emulate="w4a4", **off), positive, latent), expected)


def test_codes_that_come_without_their_rows_are_dequantised(tiny, name):
    """Somebody else's producer: the branch still runs, and says what from."""
    import comfy.quant_ops

    model, _, _ = tiny
    patched = side_branch(model, name)
    adapt = pack_module("nodes.adapt")
    linear = model.model.diffusion_model.blocks[0].attn.out_proj
    x = torch.randn(16, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = pack_module("kernels.fused").rows_nvfp4(x)
    codes = adapt.quantized_tensor(q, x.dtype)
    assert isinstance(codes, comfy.quant_ops.QuantizedTensor)
    block = model.model.diffusion_model.blocks[0]
    with torch.inference_mode():
        with adapt.emulating_w4a4(block):
            plain = linear(codes)
        with attached(patched), adapt.emulating_w4a4(block):
            side = adapt.side_forward(linear)
            found = linear(codes)
    assert dict(side.counts) == {"dequantised codes": 1}
    made = factors(model)["blocks.0.attn.out_proj"]
    delta = (codes.dequantize().float() @ made[0].t()) @ made[1].t()
    assert torch.nn.functional.cosine_similarity((found - plain).float().flatten(), delta.flatten(), dim=0) > 0.99


# ---------------------------------------------------------------- CASES 21: what four bits do to a small LoRA


def gain_and_cosine(found, wanted):
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return float(found @ wanted / (wanted @ wanted)), float(found @ wanted / (found.norm() * wanted.norm() + 1e-30))


@pytest.fixture
def case21(tmp_path):
    """A tiny H3 whose blocks.0.attn.out_proj is randn(256, 256) * 0.02, and LoRAs at shares of its spread."""
    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    layer = "blocks.0.attn.out_proj"
    tensors, metadata = tiny.tiny_h3()
    generator = torch.Generator().manual_seed(21)
    weight = (torch.randn(256, 256, generator=generator) * 0.02).bfloat16()
    tensors.update(writer.nvfp4_tensors(layer, weight))
    path = tmp_path / "case21.safetensors"
    writer.write(str(path), tensors, metadata)
    model = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)

    def lora(share):
        down = torch.randn(RANK, 256, generator=generator)
        up = torch.randn(256, RANK, generator=generator)
        size = share * weight.float().std() / (up @ down).std()
        name = f"share{share}.safetensors"
        write_lora(name, core_keys({layer: (down, up * size)}))
        return name, (up * size).bfloat16().double() @ down.bfloat16().double()

    return model, layer, lora


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("emulated", [False, True])
def test_a_side_branch_keeps_its_gain(case21, share, emulated):
    import contextlib

    model, layer, lora = case21
    name, delta = lora(share)
    linear = model.model.diffusion_model.get_submodule(layer)
    block = model.model.diffusion_model.blocks[0]
    emulating = pack_module("nodes.adapt").emulating_w4a4 if emulated else contextlib.nullcontext
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        with emulating(block):
            before = linear(x)
        with attached(side_branch(model, name)), emulating(block):
            after = linear(x)
    gain, cosine = gain_and_cosine(after.double() - before.double(), x.double() @ delta.t())
    assert 0.95 <= gain <= 1.05 and cosine >= 0.98, (gain, cosine)


@pytest.mark.parametrize(("share", "nearest"), [(0.01, 0.01), (0.05, 0.6)])
def test_requantising_loses_it(case21, share, nearest):
    """What the side branch is for: the delta folded into the weight, which is then rounded to NVFP4 again.

    To nearest, nothing of 1 % is left (gain 0.00, at 5 % 0.45). ComfyUI's LoraLoaderModelOnly rounds stochastically:
    the gain survives on average, under noise of 15 times (at 5 % 3 times) the delta's size.
    """
    import comfy.model_management

    model, layer, lora = case21
    name, delta = lora(share)
    linear = model.model.diffusion_model.get_submodule(layer)
    before = linear.weight.dequantize().double()
    whole = (before + delta).bfloat16()
    rounded = linear.weight.requantize_from_float(whole, scale="recalculate").dequantize().double()
    gain, cosine = gain_and_cosine(rounded - before, delta)
    assert abs(gain) <= nearest and cosine < 0.6, (gain, cosine)

    patched = stock_lora(model, name)
    comfy.model_management.load_models_gpu([patched])
    found = linear.weight.dequantize().double() - before
    report = pack_module("nodes.report")
    text = report.as_text(report.build(patched))
    comfy.model_management.unload_all_models()
    _, cosine = gain_and_cosine(found, delta)
    assert cosine < 0.4 and (found - delta).norm() > 2 * delta.norm()
    if share == 0.01:
        assert cosine < 0.1 and (found - delta).norm() > 10 * delta.norm()
    assert f"a stock LoRA patches 1 NVFP4 linears, among them {layer}: requantised to NVFP4" in text
    assert torch.equal(linear.weight.dequantize().double(), before)


# ---------------------------------------------------------------- nothing stays, nothing stacks


def test_strength_zero_is_the_untouched_model(tiny, name):
    model, positive, latent = tiny
    expected = sample(model, positive, latent)
    off = side_branch(model, name, 0.0)
    assert equal(sample(off, positive, latent), expected)
    assert not run_of(off).side
    report = pack_module("nodes.report")
    assert "LoRA tiny.safetensors at 0: off (strength 0)" in report.as_text(report.build(off))


def test_strengths_are_reversible_to_the_bit(tiny, name):
    model, positive, latent = tiny
    sample(model, positive, latent)  # ComfyUI notes on the modules that they are loaded
    before = state_of(model)
    first = sample(side_branch(model, name, 1.0), positive, latent)
    half = sample(side_branch(model, name, 0.5), positive, latent)
    again = sample(side_branch(model, name, 1.0), positive, latent)
    assert equal(again, first) and not equal(half, first)
    assert same_state(before, state_of(model))


def test_weights_modules_and_the_other_branch_are_untouched(tiny, name):
    model, positive, latent = tiny
    expected = sample(model, positive, latent)
    before = state_of(model)
    patched = fuse(side_branch(model, name), emulate="w4a4")
    first = sample(patched, positive, latent)
    assert same_state(before, state_of(model)) and not patched.backup and not patched.object_patches
    assert equal(sample(model, positive, latent), expected)
    assert equal(sample(patched, positive, latent), first)

    class Boom(Exception):
        pass

    def boom(step):
        raise Boom

    with pytest.raises(Boom):
        sample(patched, positive, latent, on_step=boom)
    assert same_state(before, state_of(model))
    assert equal(sample(model, positive, latent), expected)


def test_an_ab_pair_is_not_reloaded(tiny, name):
    model, _, _ = tiny
    patched = side_branch(model, name)
    assert patched.clone_has_same_weights(model) and model.clone_has_same_weights(patched)


def test_nodes_in_a_row_add_up(tiny):
    """Two LoRAs are their sum; the same file twice is the double strength."""
    model, positive, latent = tiny
    one, two = factors(model, seed=1), factors(model, rank=3, seed=2)
    a, b = write_lora("one.safetensors", core_keys(one)), write_lora("two.safetensors", core_keys(two))
    stacked = side_branch(side_branch(model, a, 1.0), b, 0.5)
    both = {
        path: (torch.cat((one[path][0], two[path][0])), torch.cat((one[path][1], 0.5 * two[path][1]), 1))
        for path in one
    }
    joined = side_branch(model, write_lora("both.safetensors", core_keys(both)))
    assert equal(sample(stacked, positive, latent), sample(joined, positive, latent))
    twice = side_branch(side_branch(model, a, 0.5), a, 0.5)
    assert run_of(twice).settings["LoraSideBranch"]["loras"][1]["file"] == "one.safetensors"
    assert all(
        len(table["h3bw_attached"]) == 1 for table in twice.model_options["transformer_options"]["wrappers"].values()
    )
    single, _ = sample(side_branch(model, a, 1.0), positive, latent)
    doubled, _ = sample(twice, positive, latent)
    plain, _ = sample(model, positive, latent)
    video = [r["samples"].unbind()[0] for r in (doubled, single, plain)]
    assert (video[0] - video[1]).norm() < 0.1 * (video[1] - video[2]).norm()


def test_a_foreign_wrapper_that_samples_twice_inside_ours(tiny, name):
    """The second preparation must not wrap the forwards again: the LoRA would count twice, in silence."""
    import comfy.patcher_extension

    model, positive, latent = tiny
    plain, expected = sample(model, positive, latent), sample(side_branch(model, name), positive, latent)
    patched = side_branch(model, name)

    def twice(executor, *args, **kwargs):
        executor(*args, **kwargs)
        return executor(*args, **kwargs)

    patched.add_wrapper(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, twice)
    out, seen = sample(patched, positive, latent)
    assert len(seen) == 2 * len(expected[1])
    assert equal((out, seen[len(expected[1]) :]), expected)
    assert equal(sample(model, positive, latent), plain)


def test_a_watcher_between_two_loras_changes_no_bit(tiny):
    model, positive, latent = tiny
    one, two = (write_lora(f"{n}.safetensors", core_keys(factors(model, rank=8 * n, seed=n))) for n in (1, 2))
    watch = pack_module("nodes.calibrate").Calibrate.execute
    patched = side_branch(watch(side_branch(model, one, 0.7)).result[0], two, -0.5)
    expected = sample(side_branch(side_branch(model, one, 0.7), two, -0.5), positive, latent)
    assert equal(sample(patched, positive, latent), expected)


def test_order_of_the_nodes_does_not_matter(tiny, name):
    model, positive, latent = tiny
    before = side_branch(fuse(model, emulate="w4a4"), name)
    after = fuse(side_branch(model, name), emulate="w4a4")
    assert equal(sample(before, positive, latent), sample(after, positive, latent))
    assert dict(run_of(before).fused) == {0: 3, 1: 3, 2: 3}


def test_a_foreign_forward_on_a_linear_is_chained(tiny, name):
    """Another pack's object patch on the linear stays in charge of it; the branch is added to what it returns."""
    model, positive, latent = tiny
    changed = model.clone()
    path = "diffusion_model.blocks.1.mlp.fc1.forward"
    real, calls, kept = model.get_model_object(path), [], []

    def foreign(x, *args, **kwargs):
        calls.append(1)
        kept.append(real(x, *args, **kwargs))
        return kept[-1]

    changed.add_object_patch(path, foreign)
    expected = sample(fuse(side_branch(model, name), mode="off"), positive, latent)
    copies = []
    patched = fuse(side_branch(changed, name))
    assert equal(sample(patched, positive, latent, on_step=lambda step: copies.append(kept[-1].clone())), expected)
    assert len(calls) == 3 and torch.equal(kept[-1], copies[-1])
    assert equal(sample(model, positive, latent), sample(fuse(model, mode="off"), positive, latent))


def test_an_unquantised_model_agrees_with_the_stock_node(tmp_path):
    """In bf16 there is nothing to round away: both ways give the same LoRA, which ties the key mapping to ComfyUI's."""
    tiny_h3, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    path = tmp_path / "bf16.safetensors"
    writer.write(str(path), *tiny_h3.tiny_h3(quantise=False))
    model = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)
    _, positive, latent = selftest()
    tensors = core_keys(factors(model, names=list(linears_of(model)), size=0.3))
    alphas = {key.replace("lora_A.weight", "alpha"): torch.tensor(2.0) for key in tensors if "lora_A" in key}
    name = write_lora("agree.safetensors", {**tensors, **alphas})
    plain = sample(model, positive, latent)[0]["samples"].unbind()
    ours = sample(side_branch(model, name, 0.8), positive, latent)[0]["samples"].unbind()
    stock = sample(stock_lora(model, name, 0.8), positive, latent)[0]["samples"].unbind()
    for a, b, without in zip(ours, stock, plain, strict=True):
        effect, apart = float((b - without).norm()), float((a - b).norm())
        assert apart < 0.1 * effect, (apart, effect)


# ---------------------------------------------------------------- memory


def test_factors_are_loaded_by_comfyui_and_freed_with_the_model(tiny, name):
    import gc
    import weakref

    import comfy.model_management

    model, positive, latent = tiny
    patched = side_branch(model, name)
    (factors_patcher,) = patched.model_patches_models()
    made = factors(model)
    assert factors_patcher.model_size() == sum(2 * (down.numel() + up.numel()) for down, up in made.values())
    assert factors_patcher.load_device == model.load_device
    assert side_branch(model, name, 0.3).model_patches_models() == [factors_patcher]  # shared, not read again
    sample(patched, positive, latent)
    loaded = [entry.model for entry in comfy.model_management.current_loaded_models]
    assert any(entry is factors_patcher for entry in loaded)
    watch = weakref.ref(factors_patcher.model)
    del patched, factors_patcher, loaded
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert watch() is None


def test_no_temporary_is_larger_than_a_layer(tiny, name):
    """CASES 23: the base and at most one layer more. No dense delta, no dequantised weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model, _, _ = tiny
    patched = side_branch(model, name)
    rows = 16
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func is not torch.ops.aten.t.default:
                sizes.append(out.numel())
            return out

    adapt = pack_module("nodes.adapt")
    with torch.inference_mode(), attached(patched):
        for block in model.model.diffusion_model.blocks:
            for path in adapt.LINEARS:
                linear = block.get_submodule(path)
                side = adapt.side_forward(linear).around(lambda x, n=linear.out_features: x.new_zeros(rows, n))
                x = torch.randn(rows, linear.in_features).bfloat16()
                sizes.clear()
                with Sizes():
                    side(x)
                assert max(sizes) <= rows * max(linear.out_features, linear.in_features)


# ---------------------------------------------------------------- messages


def test_no_match_is_an_error_and_a_part_is_a_warning(tiny, caplog):
    model, _, _ = tiny
    other = write_lora("flux.safetensors", {"double_blocks.0.x.lora_A.weight": torch.zeros(4, 4), "y": torch.zeros(2)})
    with pytest.raises(ValueError, match="none of its 2 keys fits this model.*double_blocks.0.x.*video_patch_proj"):
        side_branch(model, other)
    tensors = core_keys(factors(model))
    tensors["diffusion_model.blocks.9.mlp.fc1.lora_A.weight"] = torch.zeros(4, 256)
    tensors["text_encoders.x.diff"] = torch.zeros(4)
    name = write_lora("part.safetensors", tensors)
    with caplog.at_level(logging.WARNING, logger="h3bw"):
        patched = side_branch(model, name)
    text = (
        "part.safetensors: 24 of 26 keys used, left out among others text_encoders.x.diff (not a part of a low-rank "
        "pair), diffusion_model.blocks.9.mlp.fc1.lora_A.weight (the model has no such linear)"
    )
    assert text in caplog.text
    report = pack_module("nodes.report")
    out = sample(patched, *selftest()[1:], steps=1)
    assert text in report.as_text(report.build(patched, out[0]))


def test_a_damaged_file_names_itself(tiny):
    import folder_paths

    model, _, _ = tiny
    name = write_lora("cut.safetensors", core_keys(factors(model)))
    path = folder_paths.get_full_path_or_raise("loras", name)
    with open(path, "rb") as source:
        data = source.read()
    with open(path, "wb") as target:
        target.write(data[:-100])
    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError, match="cut.safetensors"):
        side_branch(model, name)


def test_an_int8_fc2_is_refused(tiny, name, monkeypatch):
    """ComfyUI multiplies an INT8 fc2 without calling its forward."""
    model, _, _ = tiny
    weight = model.model.diffusion_model.blocks[2].mlp.fc2.weight
    monkeypatch.setattr(weight, "_layout_cls", "TensorWiseINT8Layout")
    with pytest.raises(ValueError, match=r"tiny.safetensors: blocks\.2\.mlp\.fc2 .*INT8.*LoraLoaderModelOnly"):
        side_branch(model, name)


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_a_strength_that_is_no_number(tiny, name, strength):
    with pytest.raises(ValueError, match="strength must be a finite number"):
        side_branch(tiny[0], name, strength)


def test_a_product_that_is_no_number_is_refused_before_sampling(tiny):
    made = factors(tiny[0], names=["blocks.0.mlp.fc1"])
    tensors = {**core_keys(made), "diffusion_model.blocks.0.mlp.fc1.alpha": torch.tensor(3e38)}
    name = write_lora("large.safetensors", tensors)
    with pytest.raises(ValueError, match="large.safetensors: strength 10 times alpha / rank"):
        side_branch(tiny[0], name, 10.0)


def test_another_model_is_refused(pack, name):
    class Model:
        model = torch.nn.Linear(2, 2)

    with pytest.raises(pack_module("nodes.adapt").NotH3):
        side_branch(Model(), name)


def test_stock_lora_in_low_vram_is_named(tiny, name):
    """A weight_function during the forward: ComfyUI leaves the FP4 path for that layer."""
    model, _, _ = tiny
    patched = stock_lora(model, name)
    linear = model.model.diffusion_model.blocks[0].mlp.fc1
    lora = pack_module("nodes.lora")
    assert lora.stock_patches(model) is None
    assert set(lora.stock_patches(patched)["pending"]) >= {"blocks.0.mlp.fc1"}
    linear.weight_function = [lambda weight: weight]
    try:
        costs = lora.stock_patches(patched)
    finally:
        linear.weight_function = []
    assert costs["left_fp4"] == ["blocks.0.mlp.fc1"] and costs["patched"] == 12
    assert any("left the FP4 path" in line and "blocks.0.mlp.fc1" in line for line in lora.stock_lines(costs))


def test_a_file_that_vanished_is_told_by_its_name(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"^gone\.safetensors: cannot be read: No such file"):
        pack_module("nodes.lora").load_factors(str(tmp_path / "gone.safetensors"), tiny[0])
