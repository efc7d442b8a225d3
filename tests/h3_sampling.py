"""Sampling a tiny H3 through ComfyUI's own guider and sampler, for tests at node level."""

from __future__ import annotations

import torch
from conftest import pack_module

SEED = 1


def selftest(adaln="pruned", reference="none", keyframes=False, length=22, width=64, height=64, seed=0):
    """``(model, positive, latent)`` of the self-test node."""
    node = pack_module("nodes.selftest").SelfTestModel
    frames = {}
    if keyframes:
        generator = torch.Generator().manual_seed(5)
        frames = {
            "first_frame": torch.rand(1, height, width, 3, generator=generator),
            "last_frame": torch.rand(1, height, width, 3, generator=generator),
        }
    return node.execute(adaln, width, height, length, seed, reference, **frames).result


def fuse(model, mode="exact", emulate="bf16", scale_backend="vortex", **switches):
    """The model behind Fuse H3 Blocks, for the few rows of the tests on a GPU too."""
    on = {"modulate": True, "swiglu": True, "attention_output": True, "elementwise": True, **switches}
    node = pack_module("nodes.fuse").FuseBlocks
    patched = node.execute(model, mode=mode, scale_backend=scale_backend, emulate=emulate, **on).result[0]
    return pack_module("nodes.sides").of_any_rows(patched)


def attend(model, backend="auto"):
    """The model behind H3 Attention Backend."""
    return pack_module("nodes.attention").AttentionBackend.execute(model, backend).result[0]


def sample(model, positive, latent, steps=3, seed=SEED, noise_mask=None, on_step=None):
    """Sample as SamplerCustomAdvanced does with BasicGuider.

    Returns:
        ``(latent dict, [x of every step])``; the steps are the sampler's own x, flat, before each evaluation.
    """
    import comfy.nested_tensor
    import comfy.sample
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(positive, positive)
    guider.set_cfg(1.0)
    sampling = model.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    sampler = comfy.samplers.sampler_object("res_multistep")
    samples = latent["samples"]
    noise = comfy.sample.prepare_noise(samples, seed)
    seen: list[torch.Tensor] = []

    def callback(step, x0, x, total):
        parts = x.unbind() if getattr(x, "is_nested", False) else [x]
        denoised = x0.unbind() if getattr(x0, "is_nested", False) else [x0]
        seen.extend(part.clone() for part in (*parts, *denoised))
        if on_step is not None:
            on_step(step)

    out = guider.sample(
        noise, samples, sampler, sigmas, denoise_mask=noise_mask, callback=callback, disable_pbar=True, seed=seed
    )
    return {"samples": out}, seen


def equal(ours, theirs) -> bool:
    """Bit equality of two results of :func:`sample`, every step included."""
    bits = pack_module("nodes.report").bits
    a = [*ours[0]["samples"].unbind(), *ours[1]]
    b = [*theirs[0]["samples"].unbind(), *theirs[1]]
    assert len(a) == len(b) > 2
    return all(torch.equal(bits(x.contiguous()), bits(y.contiguous())) for x, y in zip(a, b, strict=True))


def finite(result) -> bool:
    """Whether every element of every step is finite and something moved."""
    tensors = [*result[0]["samples"].unbind(), *result[1]]
    return all(bool(torch.isfinite(t).all()) for t in tensors) and float(tensors[0].std()) > 0.1


def run_of(model):
    """The recorder of a patched model."""
    return pack_module("nodes.run").find(model)
