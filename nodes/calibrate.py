"""``H3BW_Calibrate`` and ``H3BW_SaveCalibration``: static activation scales from a sampling run, into a new file.

The first node watches the inputs of the four linears of every block while the model is sampled; the second, run after
the sampler, takes a scale for each and writes a copy of the model's file with ``input_scale`` in it. With that file the
producers of Fuse H3 Blocks quantise in a single pass (mode static).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil

import comfy.model_management
import torch
from comfy_api.latest import io

from ..kernels import calibrate, checkpoint
from ..kernels.checkpoint import layout as file_layout
from . import adapt, attach, output, run

SETTINGS = "Calibrate"
LONGEST_NAME = 120
REPORT = "h3bw/calibration"


class WatchForward:
    """``linear.forward`` that notes its input first. It counts as another patch, so that the linear gets bf16."""

    def __init__(self, forward, statistics: calibrate.Statistics):
        self.forward = forward
        self.statistics = statistics

    def __call__(self, x, *args, **kwargs):
        self.statistics.watch(x)
        return self.forward(x, *args, **kwargs)


class Watcher:
    """The statistics of one model's linears: an entry of ``attach.KEY``, filled by every run anew."""

    def __init__(self):
        self.statistics: dict[str, calibrate.Statistics] = {}

    def begin(self, patcher) -> None:
        """Make the buffers on the model's device."""
        names = watched(adapt.h3_model(patcher))
        self.statistics = {
            name: calibrate.Statistics(linear.in_features, patcher.load_device) for name, linear in names.items()
        }

    def end(self) -> None:
        """Take them off the device again."""
        for statistics in self.statistics.values():
            statistics.to("cpu")

    def replacements(self, dit: torch.nn.Module, record: run.Run | None) -> list:
        """See :class:`attach.Attachment`."""

        def maker(statistics):
            return lambda forward: WatchForward(forward, statistics)

        linears = watched(dit)
        return [(linears[name], maker(found)) for name, found in self.statistics.items() if name in linears]


def watched(dit: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The NVFP4 linears of the blocks, by name."""
    return {
        f"blocks.{index}.{name}": block.get_submodule(name)
        for index, block in enumerate(dit.blocks)
        for name in adapt.LINEARS
        if getattr(block.get_submodule(name).weight, "_layout_cls", None) == adapt.NVFP4_LAYOUT
    }


class Calibrate(io.ComfyNode):
    """Watch the activations of a sampling run."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_Calibrate",
            display_name="Calibrate H3 Activations",
            category="H3 Blackwell/checkpoints",
            description=(
                "Watches the inputs of the four NVFP4 linears of every MiniMax H3 block while the model is sampled. "
                "Save H3 Calibration, after the sampler, turns them into static activation scales."
            ),
            search_aliases=["calibration", "input_scale", "static", "nvfp4", "h3", "activation scale"],
            inputs=[io.Model.Input("model", tooltip="An H3 with NVFP4 layers, as it will be used (LoRA included).")],
            outputs=[
                io.Model.Output(tooltip="The same model, watched; same results, slower, some 350 MB more memory.")
            ],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        linears = watched(adapt.h3_model(model))
        if not linears:
            raise ValueError(
                "no linear in the blocks of this model is NVFP4, so there is nothing to calibrate; load an NVFP4 file"
            )
        patched = model.clone()
        run.attach(patched, SETTINGS, {"linears": len(linears)})
        others = [entry for entry in attach.entries(model) if not isinstance(entry, Watcher)]
        attach.install(patched, [*others, Watcher()])
        return io.NodeOutput(patched)


def watcher_of(model) -> Watcher:
    """The statistics that a MODEL carries; ValueError without any, or before it was sampled."""
    found = [entry for entry in attach.entries(model) if isinstance(entry, Watcher)]
    if not found:
        raise ValueError("this model was not watched; connect the output of Calibrate H3 Activations, or one after it")
    if not any(statistics.calls for statistics in found[0].statistics.values()):
        raise ValueError("this model was not sampled yet; connect the latent that was sampled with it")
    return found[0]


def source_file(model) -> str:
    """The safetensors file that a MODEL was loaded from."""
    init = model.cached_patcher_init
    path = init[1][0] if init and init[1] else None
    if not isinstance(path, str) or not os.path.isfile(path):
        raise ValueError(
            "this model does not say which file it comes from; load it with Load MiniMax H3 (NVFP4) or Load Diffusion "
            "Model"
        )
    return path


def target_file(filename: str) -> str:
    """``output/diffusion_models/<filename>.safetensors``, where loaders find it; ValueError for a bad name."""
    name = filename.removesuffix(".safetensors")
    if not output.plain_name(name, LONGEST_NAME):
        raise ValueError(
            f"filename must be a plain name of 1 to {LONGEST_NAME} characters ({output.LONGEST_STEM} bytes), without "
            f"folders, is {filename[:LONGEST_NAME]!r}"
        )
    return os.path.join(output.folder("diffusion_models"), f"{name}.safetensors")


def summary(choices: dict[str, calibrate.Choice]) -> dict[str, dict]:
    """Per kind of linear: ranges, the worst clipping rate, mean errors, and the layer that loses most."""
    out = {}
    for kind in adapt.LINEARS:
        of_kind = {name: choice for name, choice in choices.items() if name.endswith(kind)}
        if not of_kind:
            continue
        known = {
            name: choice
            for name, choice in of_kind.items()
            if choice.static_db is not None and math.isfinite(choice.static_db) and math.isfinite(choice.dynamic_db)
        }
        loss = {name: choice.dynamic_db - choice.static_db for name, choice in known.items()}
        worst = max(loss, key=loss.get) if loss else None
        out[kind] = {
            "layers": len(of_kind),
            "amax_least": min(choice.least_amax for choice in of_kind.values()),
            "amax": max(choice.amax for choice in of_kind.values()),
            "values_counted": sum(choice.values for choice in of_kind.values()),
            "clipped_most": max(choice.clipped for choice in of_kind.values()),
            "dynamic_db": sum(c.dynamic_db for c in known.values()) / len(known) if known else None,
            "static_db": sum(c.static_db for c in known.values()) / len(known) if known else None,
            "worst": worst,
            "worst_loss_db": loss[worst] if worst else None,
        }
    return out


def as_text(file: str, calls: int, kinds: dict[str, dict], unseen: int = 0) -> str:
    """The report for a person."""
    lines = [f"{file}: static activation scales from {calls} calls of each linear"]
    for kind, found in kinds.items():
        line = (
            f"{kind} x {found['layers']}: maxima {found['amax_least']:.3g} to {found['amax']:.3g}; at most "
            f"{100 * found['clipped_most']:.4f} % of a layer's values clip"
        )
        if found["worst"]:
            line += (
                f"; signal to error {found['dynamic_db']:.2f} dB dynamic, {found['static_db']:.2f} dB static "
                f"(most lost: {found['worst_loss_db']:.2f} dB in {found['worst']})"
            )
        lines.append(line)
    if unseen:
        lines.append(f"{unseen} calls had no float tensor on the watched device (codes, or another GPU): not counted")
    lines.append("Load the new file and set Fuse H3 Blocks to mode static: its producers then read x once.")
    return "\n".join(lines)


class SaveCalibration(io.ComfyNode):
    """Write the scales into a copy of the model's file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_SaveCalibration",
            display_name="Save H3 Calibration",
            category="H3 Blackwell/checkpoints",
            description=(
                "Writes a copy of a model's file with a static activation scale (input_scale) in every NVFP4 linear of "
                "its blocks, from a sampling run that Calibrate H3 Activations watched. Says how many values clip and "
                "what the error is, against dynamic scales on the same run."
            ),
            search_aliases=["calibration", "input_scale", "static", "nvfp4", "h3", "save", "checkpoint"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The watched model that was sampled."),
                io.Latent.Input("latent", tooltip="The latent sampled with it, so that this runs after the sampler."),
                io.String.Input(
                    "filename",
                    default="minimax_h3_nvfp4_static",
                    tooltip="Name of the new file in output/diffusion_models; an existing one is not overwritten.",
                ),
                io.Float.Input(
                    "headroom",
                    default=1.25,
                    min=1.0,
                    max=16.0,
                    step=0.05,
                    tooltip="Factor above the largest value seen, for other prompts; costs almost no precision.",
                ),
                io.Float.Input(
                    "clip_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    advanced=True,
                    tooltip="Share of the values that may lie above the chosen maximum; 0 takes the true maximum.",
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The text shown on the node.")],
        )

    @classmethod
    def execute(cls, model, latent, filename, headroom=1.25, clip_percent=0.0) -> io.NodeOutput:
        if not (math.isfinite(headroom) and math.isfinite(clip_percent)):
            raise ValueError(f"headroom and clip_percent must be finite numbers, are {headroom} and {clip_percent}")
        source, target = source_file(model), target_file(filename)
        if os.path.lexists(target):
            raise ValueError(f"{os.path.basename(target)} exists already; choose another name")
        statistics = watcher_of(model).statistics
        output.place(REPORT, "json")  # a place that cannot be used must not be found after the work
        device = comfy.model_management.get_torch_device()
        choices = {}
        for name, found in statistics.items():
            comfy.model_management.throw_exception_if_processing_interrupted()
            try:
                choices[name] = calibrate.choose(found.to(device), clip_percent / 100, headroom, name)
            finally:
                found.to("cpu")
        write_scales(source, target, {name: choice.input_scale for name, choice in choices.items()})
        kinds = summary(choices)
        unseen = sum(found.unseen for found in statistics.values())
        text = as_text(os.path.basename(target), max(choice.calls for choice in choices.values()), kinds, unseen)
        report = {
            "schema": "h3bw-calibration/1",
            "source": os.path.basename(source),
            "file": os.path.basename(target),
            "headroom": headroom,
            "clip_percent": clip_percent,
            "unseen_calls": unseen,
            "kinds": kinds,
            "layers": {name: dataclasses.asdict(choice) for name, choice in choices.items()},
        }
        path, saved = output.place(REPORT, "json")
        with output.writing(path) as temporary, open(temporary, "x", encoding="utf-8") as out:
            json.dump(finite(report), out, indent=2, allow_nan=False)
        return io.NodeOutput(text, ui={"text": (text,), "h3bw_calibration": [saved]})


def finite(value):
    """The same data with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_scales(source: str, target: str, scales: dict[str, float]) -> None:
    """Copy a checkpoint with ``input_scale`` added to (or replaced in) some of its layers.

    The source is mapped, not loaded: one tensor after the other goes from file to file.

    Raises:
        CheckpointError: the source is damaged, or the target exists or cannot be written.
        ValueError: there is no room for it.
    """
    needed, free = os.path.getsize(source), shutil.disk_usage(os.path.dirname(target)).free
    if free < needed:
        raise ValueError(
            f"{os.path.basename(target)} needs {needed / 2**30:.1f} GiB in the output folder, "
            f"{free / 2**30:.1f} are free"
        )
    tensors, metadata = checkpoint.load(source, "cpu", direct=False)
    prefix = file_layout.prefix_of(tensors) or ""
    for name, scale in scales.items():
        tensors[f"{prefix}{name}.input_scale"] = torch.tensor(scale, dtype=torch.float32)
    checkpoint.write(target, tensors, metadata)
