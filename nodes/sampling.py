"""Sampling as ``SamplerCustomAdvanced`` with ``BasicGuider`` does it, for nodes that sample for themselves.

No CFG, no negative, a seeded noise: what an H3 graph runs. Everything goes through ComfyUI's guider, so the model is
loaded, offloaded, cancelled and watched as in any other run.
"""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import comfy.nested_tensor
import comfy.sample
import comfy.samplers
import torch

from . import adapt, selftest

TASKS = ("T2VA", "FL2VA")


def sample(
    model, positive, latent: dict, steps: int, seed: int = 1, sampler: str = "res_multistep",
    on_step: Callable[[int, object, object], None] | None = None,
) -> dict:  # fmt: skip
    """Sample a latent.

    Args:
        model: a ``ModelPatcher`` of an H3.
        positive: conditioning.
        latent: ``{"samples": nested tensor}``; an empty one for T2VA and FL2VA.
        steps: sampling steps of the "simple" schedule; one model evaluation each for res_multistep and euler.
        seed: of the noise.
        sampler: its name in ComfyUI.
        on_step: called after each evaluation with the step, the sampler's x and the prediction x0.

    Returns:
        ``{"samples": nested tensor}``.
    """
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(positive, positive)
    guider.set_cfg(1.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    samples = latent["samples"]
    noise = comfy.sample.prepare_noise(samples, seed)

    def callback(step, x0, x, total):
        if on_step is not None:
            on_step(step, x, x0)

    out = guider.sample(
        noise, samples, comfy.samplers.sampler_object(sampler), sigmas, callback=callback, disable_pbar=True, seed=seed
    )
    return {"samples": out}


def parts(value) -> list[torch.Tensor]:
    """The streams of a nested tensor (video, audio), or the one tensor."""
    return list(value.unbind()) if getattr(value, "is_nested", False) else [value]


def text_width(model) -> int:
    """Width of the text states that the model's conditioning projection takes."""
    return int(adapt.h3_model(model).condition_proj.in_features)


def rows_of(width: int, height: int, frames: int, text: int = selftest.TEXT_TOKENS) -> int:
    """Rows of the packed sequence of a T2VA run: text, both sides of the sound, 32-pixel tokens of the video."""
    video = selftest.latent_frames(frames) * (height // selftest.PATCH) * (width // selftest.PATCH)
    return text + 2 * selftest.audio_steps(frames) + video


def prompt(model, task: str, width: int, height: int, length: int, seed: int = 0) -> tuple[list, dict]:
    """Conditioning and an empty latent made of seeded noise, in the widths that the model takes.

    Args:
        task: one of ``TASKS``; FL2VA has a first and a last frame.
        width, height: pixels, multiples of 32.
        length: frames at 24 fps, raised to H3's grid.

    Raises:
        ValueError: a canvas off the grid, or an unknown task.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, is {task!r}")
    selftest.check_canvas(width, height)
    frames = selftest.snap_frames(length)
    pictures = {}
    if task == "FL2VA":
        generator = torch.Generator().manual_seed(seed + 1)
        for name in ("first_frame", "last_frame"):
            pictures[name] = torch.rand(1, height, width, 3, generator=generator)
    positive = selftest.conditioning(width, height, frames, seed, text_dim=text_width(model), **pictures)
    device = comfy.model_management.intermediate_device()
    video = torch.zeros(1, 24, selftest.latent_frames(frames), height // 16, width // 16, device=device)
    audio = torch.zeros(1, 32, 2, selftest.audio_steps(frames), device=device)
    return positive, {"samples": comfy.nested_tensor.NestedTensor((video, audio))}
