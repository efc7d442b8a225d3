"""What several generated graphs have in common; each function adds nodes to a ``Graph`` of make_workflows."""

from __future__ import annotations

SWITCHES = dict.fromkeys(("modulate", "swiglu", "attention_output", "elementwise"), True)


def fuse(graph, title: str | None, model, mode: str = "exact", emulate: str = "off"):
    """Fuse H3 Blocks with every switch named, so that no environment variable of the generator's server leaks in."""
    return graph.add(
        "H3BW_FuseBlocks", title, model=model, mode=mode, **SWITCHES, scale_backend="vortex", emulate=emulate
    )


def schedule(graph, model, steps: int, sampler: str = "res_multistep") -> tuple:
    """Noise, sampler and sigmas."""
    noise = graph.add("RandomNoise", noise_seed=42)
    chosen = graph.add("KSamplerSelect", sampler_name=sampler)
    return noise, chosen, graph.add("BasicScheduler", model=model, scheduler="simple", steps=steps, denoise=1.0)


def sample(graph, scheduled: tuple, model, positive, latent_image, title: str | None = None) -> tuple:
    """Guider and sampled latent, by what :func:`schedule` made."""
    noise, sampler, sigmas = scheduled
    guider = graph.add("BasicGuider", title and f"Guider {title}", model=model, conditioning=positive)
    latent = graph.add(
        "SamplerCustomAdvanced",
        title and f"Sample {title}",
        noise=noise["NOISE"],
        guider=guider["GUIDER"],
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=latent_image,
    )
    return guider, latent
