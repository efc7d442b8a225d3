"""``H3BW_Warmup``: one short sampling, so that the first real run finds everything compiled, certified and loaded."""

from __future__ import annotations

import time

from comfy_api.latest import io

from ..kernels import certify
from . import adapt, attention, load, readiness, report, run, sampling, selftest

NAME = "Warmup"  # of the recorder that a model without one gets for this run


class WarmupError(RuntimeError):
    """The warm-up ran, and what came out is not fit to go on with."""


def warm(model, width: int, height: int, frames: int, steps: int) -> str:
    """Sample noise once with a MODEL, note what ran, and return it as text.

    Args:
        model: MODEL of an H3, with the patches that the real runs have.
        width, height: pixels, multiples of 32.
        frames: at 24 fps, raised to H3's grid.
        steps: of the sampler.

    Raises:
        ValueError: a canvas off the grid; nothing has run then.
        WarmupError: a block's output or the latent is not finite.
    """
    dit = adapt.h3_model(model)
    selftest.check_canvas(width, height)
    length = selftest.snap_frames(frames)
    lines = []
    if length != frames:
        lines.append(f"length {frames} is not on H3's grid of 17k + 5 frames; using {length}")
        run.log.info("H3 Blackwell: %s", lines[0])
    device = model.load_device
    with readiness.warming(model, {"width": width, "height": height, "frames": length, "steps": steps}):
        started = time.perf_counter()
        certify.ensure(device)
        # Without a node of ours there is nothing that notes what ran; the clone shares the model and its weights.
        sampled = model
        if run.find(model) is None:
            sampled = model.clone()
            run.attach(sampled, NAME, {})
        positive, latent = sampling.prompt(model, "T2VA", width, height, length)
        out = sampling.sample(sampled, positive, latent, steps)
        seconds = time.perf_counter() - started
        record = run.find(sampled)
        reason = report.finite_rung(out, record)["reason"]
        if reason is not None:
            raise WarmupError(f"the warm-up's output is not finite: {reason}")
        found = record.as_dict()
        nvfp4 = load.native("nvfp4", device) if has_nvfp4(dit) else None
        readiness.finish(seconds, readiness.what_ran(found), nvfp4)
    lines.append(f"warmed up in {seconds:.2f} s: {width}x{height}, {length} frames, {steps} steps, on {device}")
    return "\n".join([*lines, *told(found, nvfp4, device)])


def has_nvfp4(dit) -> bool:
    """Whether a linear of a block is NVFP4."""
    return any(
        getattr(block.get_submodule(name).weight, "_layout_cls", None) == adapt.NVFP4_LAYOUT
        for block in dit.blocks
        for name in adapt.LINEARS
    )


def told(record: dict, nvfp4: str | None, device) -> list[str]:
    """What ran, certification and how NVFP4 is multiplied, as lines for a person."""
    lines = [record["headline"], *attention.lines(record)]
    if "AttentionBackend" not in record["settings"]:
        lines.append(f"attention: ComfyUI's choice, {readiness.what_ran(record)['attention']['comfyui']}")
    if nvfp4 is not None:
        lines.append(f"NVFP4 here: {nvfp4}")
    if not certify.needs(device):
        return [*lines, f"certification: not needed on {device}"]
    certified, refused = certify.tally(device)
    lines.append(f"certification on {device}: {certified} certified, {len(refused)} refused")
    lines += [f"{entry['op']} does not run as {entry['implementation']}: {entry['reason']}" for entry in refused]
    return lines


class Warmup(io.ComfyNode):
    """Warm a model up before real work."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_Warmup",
            display_name="H3 Warm-up",
            category="H3 Blackwell/diagnostics",
            description=(
                "Samples a few steps of noise at a small size, so that kernels are compiled and certified, attention "
                "is chosen and the weights are loaded before the first real run. Hands the model on unchanged and says "
                "what ran. While that model stays loaded, GET /h3bw/ready answers 200; the node runs again only when "
                "it does not."
            ),
            search_aliases=["warm up", "ready", "deployment", "compile", "health", "h3"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax H3 with the patches of the real runs: put this node last."),
                io.Int.Input("width", default=320, min=32, max=2048, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", default=192, min=32, max=2048, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input(
                    "frames",
                    default=22,
                    min=1,
                    max=362,
                    tooltip="Frames at 24 fps, raised to the next length that H3 knows (17k + 5).",
                ),
                io.Int.Input(
                    "steps",
                    default=2,
                    min=1,
                    max=50,
                    tooltip="Sampling steps. With an attention backend whose first steps are dense, at least 2.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The model that came in, the very same."),
                io.String.Output(display_name="report", tooltip="What ran, as shown on the node."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Cached for as long as the warm-up holds; after an unload the node runs again."""
        return readiness.fingerprint()

    @classmethod
    def execute(cls, model, width, height, frames, steps) -> io.NodeOutput:
        text = warm(model, width, height, frames, steps)
        return io.NodeOutput(model, text, ui={"text": (text,)})
