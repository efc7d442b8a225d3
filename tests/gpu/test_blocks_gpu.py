"""Whole H3 blocks of real width on a GPU: stock against patched, three segments and more, equal latents."""

import pytest
import torch
from conftest import pack_module
from h3_sampling import equal, finite, fuse, run_of, sample, selftest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]


@pytest.fixture(scope="module")
def real_width(tmp_path_factory):
    """One refiner and two DiT blocks of H3's own width with random weights, NVFP4, through the loader.

    Sampled once before anything is compared. On an H200 (ComfyUI 0.30.0, torch 2.11.0) the first sampling of a process
    differed from all later ones in stock alone: one element of 143,360 in the first attention of the text refiner.
    """
    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    tensors, metadata = tiny.tiny_h3(hidden=5376, heads=56, head_dim=128, ffn=14336, blocks=2, refiner_blocks=1)
    path = tmp_path_factory.mktemp("h3") / "real_width.safetensors"
    writer.write(str(path), tensors, metadata)
    model = pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)
    _, positive, latent = selftest(reference="all", width=256, height=256)
    sample(model, positive, latent, steps=1)
    return model


@pytest.mark.parametrize("between", ["nothing", "certification"])
def test_stock_repeats_itself(real_width, between):
    """Were this to fail, no comparison below would mean anything.

    Certification leaves memory full of other bytes behind, which shows an operation that reads what it never wrote.
    """
    _, positive, latent = selftest(reference="all", width=256, height=256)
    expected = sample(real_width, positive, latent, steps=2)
    if between == "certification":
        certify = pack_module("kernels.certify")
        certify.clear()
        certify.ensure(real_width.load_device)
    assert equal(sample(real_width, positive, latent, steps=2), expected)


@pytest.mark.parametrize("emulate", ["off", "bf16", "w4a4"])
def test_blocks_of_real_width(real_width, emulate):
    """off is what a user gets; w4a4 runs the NVFP4 producers against kitchen's quantiser, bf16 the bf16 ops only."""
    _, positive, latent = selftest(reference="all", width=256, height=256)
    stock = fuse(real_width, mode="off", emulate=emulate) if emulate == "w4a4" else real_width
    expected = sample(stock, positive, latent, steps=2)
    assert finite(expected)
    patched = fuse(real_width, emulate=emulate)
    assert equal(sample(patched, positive, latent, steps=2), expected)
    run = run_of(patched)
    assert set(run.fused) == {0, 1} and not run.fallbacks
    if emulate == "w4a4":
        assert not run.bf16_inputs
