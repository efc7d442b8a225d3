"""LoRA side branches on a GPU: codes made from bf16 rows are the producers' own; fused blocks equal unfused ones."""

import contextlib

import pytest
import torch
from conftest import pack_module
from h3_lora import core_keys, factors, side_branch, write_lora
from h3_sampling import equal, finite, fuse, run_of, sample, selftest

pytestmark = pytest.mark.gpu

K, FFN = 5376, 14336


def random(*shape, seed=0, size=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * size).bfloat16()


def same_codes(found, expected):
    return (
        torch.equal(found.codes, expected.codes)
        and torch.equal(found.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
        and torch.equal(found.decode_scale, expected.decode_scale)
    )


@pytest.mark.parametrize("rows", [1, 17, 129, 4097, 38016])
@pytest.mark.parametrize("static", [False, True])
def test_codes_from_rows_are_the_producers_codes(rows, static):
    """What a linear with a side branch gets, against what it gets without one."""
    fused, certify = pack_module("kernels.fused"), pack_module("kernels.certify")
    certify.ensure(torch.device("cuda", 0))
    chosen = {
        op: fused.best(op, torch.device("cuda", 0)) for op in ("norm_modulate_nvfp4", "swiglu_nvfp4", "rows_nvfp4")
    }
    if any(name == "reference" for name, _ in chosen.values()):
        pytest.skip(f"not every producer runs on this GPU: {chosen}")
    norm = certify.norm_of(torch.device("cuda", 0))
    scale = torch.tensor(0.01, device="cuda") if static else None
    with torch.inference_mode():
        x, weight = random(rows, K, size=8.0), 1 + random(K, size=0.1, seed=1)
        tables = [random(3, K, size=0.3, seed=seed).float() for seed in (2, 3)]
        given = (x, weight, 1e-5, *tables, [(0, rows // 3, 1), (rows // 3, rows, 2)])
        direct = fused.norm_modulate_nvfp4(*given, decode_scale=scale, norm=norm)
        h = fused.norm_modulate(*given, norm=norm)
        assert same_codes(fused.rows_nvfp4(h, decode_scale=scale), direct)
        gate_up = random(rows, 2 * FFN, seed=4)
        direct = fused.swiglu_nvfp4(gate_up, decode_scale=scale)
        assert same_codes(fused.rows_nvfp4(fused.swiglu(gate_up), decode_scale=scale), direct)


@pytest.fixture(scope="module")
def real_width(pack, tmp_path_factory):
    """Two DiT blocks of H3's own width, NVFP4, and a LoRA for them."""
    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    tensors, metadata = tiny.tiny_h3(hidden=5376, heads=56, head_dim=128, ffn=14336, blocks=2, refiner_blocks=1)
    path = tmp_path_factory.mktemp("h3") / "real_width.safetensors"
    writer.write(str(path), tensors, metadata)
    model = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)
    return model, write_lora("real_width.safetensors", core_keys(factors(model, rank=32)))


@pytest.mark.parametrize("rank", [16, 32, 128])
def test_the_update_inside_swiglu(rank):
    """Bit for bit the update in place, then SwiGLU; against fp32 another order of additions, so a few last bits."""
    fused, certify = pack_module("kernels.fused"), pack_module("kernels.certify")
    device = torch.device("cuda", 0)
    certify.ensure(device)
    name, reasons = fused.best("swiglu_side", device)
    assert name != "reference" or "compute capability" in str(reasons), reasons  # it has to certify where Triton runs
    with torch.inference_mode():
        gate_up, hidden = random(1000, 2 * FFN, seed=5), random(1000, rank, seed=6)
        low_rank = random(2 * FFN, rank, size=0.05, seed=7)
        found = fused.swiglu_side(gate_up, hidden, low_rank, 0.3)
        updated = fused.low_rank_add_(gate_up.clone(), hidden, low_rank, 0.3, impl="triton")
        assert torch.equal(found, fused.swiglu(updated))
        expected = fused.swiglu_side(gate_up, hidden, low_rank, 0.3, impl="reference")
        library = fused.swiglu(torch.addmm(gate_up, hidden, low_rank.t(), alpha=0.3))
        print(f"rank {rank}: the library's GEMM differs in {float((library != expected).float().mean()):.2e} of values")
        differing = (found != expected).float().mean()
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    print(f"rank {rank}: {float(differing):.2e} of values differ, by at most {float(error):.2e} of the largest")
    assert float(differing) < 0.01 and float(error) < 2**-7


@pytest.mark.parametrize("width", ["tiny", "real", "real, inside SwiGLU"])
def test_fused_blocks_equal_unfused_ones(pack, width, request, monkeypatch):
    inside = width == "real, inside SwiGLU"
    if not inside:  # no rank is a multiple of this, so fc1's update is added before SwiGLU
        monkeypatch.setattr(pack_module("nodes.adapt"), "SIDE_RANK_MULTIPLE", 10**9)
    if width != "tiny":
        model, name = request.getfixturevalue("real_width")
        _, positive, latent = selftest(reference="all", width=256, height=256)
    else:
        model, positive, latent = selftest(reference="all")
        name = write_lora("gpu.safetensors", core_keys(factors(model)))
    patched = side_branch(model, name)
    expected = sample(fuse(patched, mode="off", emulate="w4a4"), positive, latent, steps=2)
    assert finite(expected)
    ours = fuse(patched, emulate="w4a4")
    found = sample(ours, positive, latent, steps=2)
    if inside:
        assert finite(found)
        plain = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent, steps=2)
        video, wanted, without = (result[0]["samples"].unbind()[0].float() for result in (found, expected, plain))
        share = float((video - wanted).norm() / (wanted - without).norm())
        print(f"fc1's update inside SwiGLU moves the latent by {share:.2e} of what the LoRA does")
        assert share < 0.1
    else:
        assert equal(found, expected)
    run = run_of(ours)
    assert not run.fallbacks and not run.bf16_inputs
    assert dict(run.side) == {"rows of the producer": 2 * 4 * len(run.fused)}
    # Without the LoRA the model is what it was.
    plain = sample(model, positive, latent, steps=2)
    assert equal(sample(side_branch(model, name, 0.0), positive, latent, steps=2), plain)
    assert not equal(sample(patched, positive, latent, steps=2), plain)


@pytest.mark.parametrize("emulated", [False, True])
def test_gain_at_one_percent(pack, emulated):
    """CASES 21 on the device: on a GPU with FP4 the linear really multiplies FP4."""
    model, _, _ = selftest()
    import comfy.model_management

    layer = "blocks.0.attn.out_proj"
    comfy.model_management.load_models_gpu([model])
    block = model.model.diffusion_model.blocks[0]
    linear = block.attn.out_proj
    spread = float(linear.weight.dequantize().float().std())
    down, up = factors(model, rank=8, names=[layer])[layer]
    up = up * (0.01 * spread / float((up @ down).std()))
    patched = side_branch(model, write_lora("gain.safetensors", core_keys({layer: (down, up)})))
    comfy.model_management.load_models_gpu([patched])
    attach = pack_module("nodes.attach")
    options = patched.model_options["transformer_options"]
    emulating = pack_module("nodes.adapt").emulating_w4a4 if emulated else contextlib.nullcontext
    x = random(4096, linear.in_features)
    with torch.inference_mode():
        with emulating(block):
            before = linear(x)
        with attach.attached(model.model.diffusion_model, options), emulating(block):
            after = linear(x)
        found = (after.double() - before.double()).flatten()
        wanted = (x.double() @ (up.bfloat16().double() @ down.bfloat16().double()).t().cuda()).flatten()
    gain = float(found @ wanted / (wanted @ wanted))
    cosine = float(found @ wanted / (found.norm() * wanted.norm()))
    assert 0.95 <= gain <= 1.05 and cosine >= 0.98, (gain, cosine)


def test_memory_of_a_branch(real_width):
    """CASES 23: beside the base and the factors, the update needs far less than one dense layer."""
    import comfy.model_management

    model, name = real_width
    patched = side_branch(model, name)
    comfy.model_management.load_models_gpu([patched])
    attach, adapt = pack_module("nodes.attach"), pack_module("nodes.adapt")
    linear = model.model.diffusion_model.blocks[0].mlp.fc1
    x = random(256, linear.in_features)
    options = patched.model_options["transformer_options"]
    with torch.inference_mode(), attach.attached(model.model.diffusion_model, options):
        side = adapt.side_forward(linear)
        y = torch.zeros(256, linear.out_features, device="cuda", dtype=torch.bfloat16)
        bare = adapt.SideForward(linear, linear.forward.forward, side.pairs, side.counts)
        bare._add(y, bare._down(x))  # load kernels and workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        bare._add(y, bare._down(x))
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
    dense = linear.out_features * linear.in_features * 2
    assert extra < dense / 4, (extra, dense)


def test_offloaded_factors_give_the_same_bits(real_width):
    """Factors that ComfyUI moved to the CPU between two runs."""
    import comfy.model_management

    model, name = real_width
    _, positive, latent = selftest()
    patched = side_branch(model, name)
    expected = sample(patched, positive, latent, steps=1)
    comfy.model_management.unload_all_models()
    assert equal(sample(patched, positive, latent, steps=1), expected)


def test_calibration_runs_on_the_device(pack, tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    module = pack_module("nodes.calibrate")
    model, positive, latent = selftest()
    watched = module.Calibrate.execute(model).result[0]
    out, _ = sample(watched, positive, latent)
    text = module.SaveCalibration.execute(watched, out, "static").result[0]
    assert "from 3 calls of each linear" in text
    path = tmp_path / "diffusion_models" / "static.safetensors"
    static = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)
    expected = sample(fuse(static, mode="off", emulate="w4a4"), positive, latent)
    assert equal(sample(fuse(static, mode="static", emulate="w4a4"), positive, latent), expected)
