"""``H3BW_ParityLadder``: stock against patched on your own model and device, rung by rung."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io

from ..kernels import certify
from ..kernels.measure import Manifest, ladder
from . import adapt, ladder_rungs, output, run, sampling, selftest, sides
from .fuse import EMULATE
from .load import load_h3

AUTO = "auto"
WIDTH, HEIGHT, LENGTH = 320, 192, 22  # about 500 rows


@dataclass
class Report:
    """What :func:`climb` found: the rungs, the text for a person, and the record as it was written."""

    rungs: list[ladder.Rung]
    text: str
    record: dict


class ParityFailed(RuntimeError):
    """A rung failed and the node was told to stop then."""


@torch.no_grad()
def climb(
    model=None, positive=None, latent=None, *, out_path, width: int = WIDTH, height: int = HEIGHT, length: int = LENGTH,
    emulate: str = AUTO, seed: int = 0, source: dict | None = None, progress=lambda done, total: None,
) -> Report:  # fmt: skip
    """Climb the ladder and write the record; also the picture, beside it.

    Args:
        model: MODEL of an H3, with Fuse H3 Blocks (its settings are then the patched side) or without (the defaults
            are); None for the self-test's tiny one.
        positive, latent: conditioning and latent of the user; both or neither. Without, T2VA and FL2VA are made.
        out_path: the record's file, ending in ``.json``; its folder must exist.
        width, height, length: of the prompts that are made.
        emulate: of Fuse H3 Blocks, or ``auto`` (see :func:`sides.ways`).
        seed: of the prompts that are made.
        source: what the caller knows of the source, such as a commit.
        progress: called with parts done and parts in all.

    Raises:
        ValueError: one of positive and latent alone, or a canvas off the grid.
        NotH3: another model.
    """
    if (positive is None) is not (latent is None):
        raise ValueError("positive and latent belong together: connect both, or neither for prompts of random noise")
    if model is None:
        model = load_h3(selftest.selftest_file("pruned", 0), compute_dtype=torch.bfloat16)
    adapt.h3_model(model)
    device, cancel = model.load_device, comfy.model_management.throw_exception_if_processing_interrupted
    if positive is not None:
        prompts = {"as connected": (positive, latent)}
    else:
        prompts = {task: sampling.prompt(model, task, width, height, length, seed) for task in sampling.TASKS}
    ways = sides.ways(model, emulate)
    total = 1 + len(prompts) * len(ways)
    with Manifest(out_path, "parity", device=device, source=source) as record:
        record.set_protocol(seed=seed)
        record.add_input("prompts", (part for given in prompts.values() for part in tensors_of(*given)))
        for name, settings in run.find_settings(model).items():
            record.note(f"{name} as wired: {', '.join(f'{key} {value}' for key, value in settings.items())}")
        if device.type == "cpu":
            record.note("CPU: parity only; the kernels themselves do not run here, their references do")
        climbing = ladder.Ladder(record)
        certify.ensure(device)
        ladder_rungs.kernels(climbing, device, cancel)
        done = 1
        for way in ways:
            for task, (conditioning, empty) in prompts.items():
                progress(done, total)
                one(climbing, model, conditioning, empty, f"{task}, linears {LINEARS_OF[way]}", way, cancel)
                done += 1
        progress(done, total)
        climbing.rungs.sort(key=lambda rung: ladder.RUNGS.index(rung.name))
    picture = os.path.splitext(os.fspath(out_path))[0] + ".png"
    with output.writing(picture) as temporary:
        ladder.picture(climbing.rungs, record.data, temporary)
    return Report(climbing.rungs, ladder.as_text(climbing.rungs, record.data), record.data)


LINEARS_OF = {"off": "as here", "bf16": "as here, ops emulated", "w4a4": "4x4 bit, emulated"}


def one(climbing: ladder.Ladder, model, positive, latent, case: str, emulate: str, cancel) -> None:
    """Every rung of one prompt and one way to run the linears."""
    stock_side, patched = sides.pair(model, emulate)
    ladder_rungs.repeats(climbing, stock_side, positive, latent, case)
    cancel()
    reason = ladder_rungs.blocks(climbing, stock_side, patched, positive, latent, case, cancel)
    if reason is not None:
        for rung in (ladder.TWO_STEPS, ladder.CHECKSUMS, ladder.PEAK):
            climbing.skipped(rung, case, reason)
        return
    ladder_rungs.sampled(climbing, stock_side, patched, positive, latent, case, cancel)
    cancel()
    ladder_rungs.peak(climbing, stock_side, patched, positive, latent, case)
    told = run.find(patched)
    for block in sorted(told.fused):
        climbing.record.ran(f"{case}: block {block}", "fused", told.fused[block])
    for name, count in told.attention.items():
        climbing.record.ran(f"{case}: attention", name, count)
    for (block, why), _ in sorted(told.fallbacks.items()):
        climbing.record.fell_back(f"{case}: block {block}", "fused", why)


def tensors_of(positive, latent) -> list[torch.Tensor]:
    """The tensors of conditioning and latent that a record hashes."""
    return [states for states, _ in positive] + sampling.parts(latent["samples"])


class ParityLadder(io.ComfyNode):
    """Prove, or refute, on this machine that the patched model equals stock."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_ParityLadder",
            display_name="H3 Parity Ladder",
            category="H3 Blackwell/benchmarks",
            description=(
                "Compares the patched model with stock ComfyUI, bit for bit, on your model and your GPU: kernels, real "
                "projections, complete blocks, all blocks, two steps, twelve steps, peak memory. Every rung passes, "
                "fails with the first differing block and its numbers, or is skipped with the reason. A table and a "
                "picture here, a record in the output folder. Without a model it takes the self-test's."
            ),
            search_aliases=["parity", "h3", "nvfp4", "exact", "bit", "proof", "compare", "checksum"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip=(
                        "A MiniMax H3. With Fuse H3 Blocks on it, that is the patched side, and stock is the same "
                        "model without it; else Fuse H3 Blocks with its defaults is. Attention and LoRA branches are "
                        "the same on both sides."
                    ),
                ),
                io.Conditioning.Input("positive", optional=True, tooltip="Your conditioning; with a latent."),
                io.Latent.Input("latent", optional=True, tooltip="Your latent; with conditioning."),
                io.Int.Input("width", default=WIDTH, min=32, max=2048, step=32, tooltip="Of the prompts made here."),
                io.Int.Input("height", default=HEIGHT, min=32, max=2048, step=32, tooltip="Of the prompts made here."),
                io.Int.Input("length", default=LENGTH, min=1, max=362, tooltip="Frames of the prompts made here."),
                io.Combo.Input(
                    "emulate",
                    options=[AUTO, *EMULATE],
                    default=AUTO,
                    advanced=True,
                    tooltip=(
                        "How the linears run. auto: as on this device, and on one without FP4 also 4 x 4 bit emulated. "
                        "A Fuse H3 Blocks on the model decides for itself."
                    ),
                ),
                io.Combo.Input(
                    "on_difference",
                    options=["report", "fail"],
                    default="report",
                    tooltip="fail stops the run with an error when a rung failed; the record is written first.",
                ),
                io.String.Input("filename_prefix", default="h3bw/parity_ladder", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second proof."""
        return time.time_ns()

    @classmethod
    def execute(
        cls, width, height, length, emulate, on_difference, filename_prefix, model=None, positive=None, latent=None
    ) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        bar = comfy.utils.ProgressBar(1)
        found = climb(
            model, positive, latent, out_path=path, width=width, height=height, length=length, emulate=emulate,
            progress=lambda done, total: bar.update_absolute(done, total),
        )  # fmt: skip
        failed = [rung for rung in found.rungs if rung.result == "failed"]
        if failed and on_difference == "fail":
            raise ParityFailed(f"{ladder.verdict(found.rungs)} (see {saved['filename']})")
        picture = {**saved, "filename": os.path.splitext(saved["filename"])[0] + ".png"}
        return io.NodeOutput(found.text, ui={"text": (found.text,), "h3bw_record": [saved], "images": [picture]})
