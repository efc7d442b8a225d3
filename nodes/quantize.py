"""``H3BW_QuantizeCheckpoint``: a bf16, fp32 or fp8 H3 file to an NVFP4 file, streamed, whole or not at all."""

from __future__ import annotations

import json
import os
import time

import comfy.model_management
import comfy.utils
import folder_paths
from comfy_api.latest import io

from ..kernels import checkpoint
from ..kernels.checkpoint import error_plot, scales
from ..kernels.checkpoint import quantize as quantising
from . import output

FOLDER = "diffusion_models"
ENDING = ".safetensors"
LONGEST_NAME = 150


def target_path(name: str, source: str) -> str:
    """The file in ``output/diffusion_models`` that a name stands for.

    ComfyUI lists that folder among its diffusion models, so the loaders find the file at once.

    Args:
        name: what the user typed, with or without ``.safetensors``; empty means the source's name with ``_nvfp4``.
        source: name of the source file.

    Raises:
        ValueError: a name that is no plain file name on every system: a folder, a drive, ``..``, a device; a folder
            that cannot be made.
    """
    stem = name.strip().removesuffix(ENDING) or os.path.splitext(os.path.basename(source))[0] + "_nvfp4"
    if not output.plain_name(stem, LONGEST_NAME):
        raise ValueError(
            f"output_name must be a file name of at most {LONGEST_NAME} characters ({output.LONGEST_STEM} bytes) "
            f"without folders, not {stem[:60]!r}; the file goes into output/{FOLDER}"
        )
    return os.path.join(output.folder(FOLDER), stem + ENDING)


class QuantizeCheckpoint(io.ComfyNode):
    """Make an NVFP4 file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_QuantizeCheckpoint",
            display_name="Quantize MiniMax H3 to NVFP4",
            category="H3 Blackwell/loaders",
            description=(
                "Writes an NVFP4 version of a bf16, fp32 or fp8 MiniMax H3 file, pruned or full, that ComfyUI's own "
                "loader reads too. The four large linears of each block are quantised, everything else keeps its "
                "bytes. Tensor by tensor, so little memory is needed; the file appears when it is whole, never over "
                "another one. Shows the relative weight error of every layer."
            ),
            search_aliases=["nvfp4", "fp4", "h3", "minimax", "convert", "quantise", "checkpoint", "fp8", "bf16"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A bf16, fp16, fp32 or fp8 H3 file of the folder models/diffusion_models.",
                ),
                io.String.Input(
                    "output_name",
                    default="",
                    tooltip=(
                        "Name of the new file in output/diffusion_models, where the loaders look too. Empty: the "
                        "source's name with _nvfp4. An existing file is never replaced."
                    ),
                ),
                io.Combo.Input(
                    "scale",
                    options=list(scales.CHOICES),
                    default=scales.CHOICES[0],
                    tooltip=(
                        "How the scale of 16 weights is chosen. amax: as ComfyUI does. adaptive: the best of six, "
                        "about 8 to 14 % less error in the same format, several times slower to make."
                    ),
                ),
                io.String.Input(
                    "keep_layers",
                    default="",
                    tooltip=(
                        "Layers to leave as they are, separated by commas, for a mixed file: blocks.0, "
                        "blocks.49.mlp.fc2, mlp.fc2, blocks.4?.attn.*"
                    ),
                ),
                io.String.Input(
                    "filename_prefix",
                    default="h3bw/quantize",
                    tooltip="Where the report (JSON) and its picture go, under the output folder.",
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The summary shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: the file may have been taken away since."""
        return time.time_ns()

    @classmethod
    def execute(cls, unet_name, output_name, scale, keep_layers, filename_prefix) -> io.NodeOutput:
        source = folder_paths.get_full_path_or_raise(FOLDER, unet_name)
        target = target_path(output_name, unet_name)
        output.place(filename_prefix, "json")  # a bad prefix must not be found after the work
        device = comfy.model_management.get_torch_device()
        if device.type == "cuda":
            # one fp32 tensor and the pieces of the search for scales
            comfy.model_management.free_memory(3 << 30, device)
        bar, shown = comfy.utils.ProgressBar(100), -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            comfy.model_management.throw_exception_if_processing_interrupted()
            percent = done * 100 // max(total, 1)
            if percent > shown:
                shown = percent
                bar.update_absolute(percent, 100)

        report = checkpoint.quantize_file(
            source,
            target,
            scale=scale,
            keep_layers=[part.strip() for part in keep_layers.split(",") if part.strip()],
            device=device if device.type in ("cuda", "cpu") else "cpu",
            progress=progress,
        )
        path, saved = output.place(filename_prefix, "json")
        with output.writing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
            json.dump(report, file, indent=1, allow_nan=False)
        picture = os.path.splitext(path)[0] + ".png"
        with output.writing(picture) as temporary:
            error_plot.draw(report, temporary)
        text = quantising.summary(report)
        shown_files = {"images": [{**saved, "filename": os.path.basename(picture)}], "h3bw_report": [saved]}
        return io.NodeOutput(text, ui={"text": (text,), **shown_files})
