"""``H3BW_Roofline``: the four GEMMs of an H3 block and the producers at your rows: floor, measured, share."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io

from ..kernels.measure import gemm_roofline, producers
from . import output
from .bench_kernels import MOST_ROWS


def run(device, rows: int = producers.H3_ROWS, columns=producers.H3_COLUMNS, rounds: int = 20, *, out_path):
    """:func:`gemm_roofline.run` with ComfyUI's cancel button, its progress bar and its memory management."""
    device = torch.device(device)
    if device.type == "cuda" and columns in producers.PRESETS and rows > 0:
        widths = producers.PRESETS[columns]
        needed = producers.memory_needed(producers.groups_of()[0], rows, widths, device)
        comfy.model_management.free_memory(needed + 8 * rows * widths.inner, device)
        comfy.model_management.soft_empty_cache()
    progress = comfy.utils.ProgressBar(1)
    return gemm_roofline.run(
        device,
        rows,
        columns,
        rounds,
        out_path=out_path,
        between=comfy.model_management.throw_exception_if_processing_interrupted,
        progress=lambda done, total: progress.update_absolute(done, total),
    )


class Roofline(io.ComfyNode):
    """How near to the machine's limits the GEMMs and producers run."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_Roofline",
            display_name="H3 Roofline",
            category="H3 Blackwell/benchmarks",
            description=(
                "The four GEMMs of a MiniMax H3 block, in bf16 and in FP4 where the GPU has it, and the producers "
                "between them, at your number of rows: the floor from bytes and flops, the measured time and its "
                "share. A table here, a plot where matplotlib is installed, and a record in the output folder. Needs "
                "no model. On a CPU it runs small sizes and says that this is no measurement."
            ),
            search_aliases=["roofline", "benchmark", "speed", "gemm", "fp4", "nvfp4", "h3", "tflops", "bandwidth"],
            is_output_node=True,
            inputs=[
                io.Int.Input(
                    "rows",
                    default=producers.H3_ROWS,
                    min=1,
                    max=MOST_ROWS,
                    tooltip="Rows of the stream, the GEMMs' M; 38016 is 1344x768 with 124 frames.",
                ),
                io.Combo.Input(
                    "columns",
                    options=list(producers.PRESETS),
                    default=producers.H3_COLUMNS,
                    tooltip="Widths of the residual stream, the MLP and the attention output.",
                ),
                io.Int.Input(
                    "rounds",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Raised to a whole number of balanced cycles of orders; on a CPU one cycle is run.",
                ),
                io.String.Input("filename_prefix", default="h3bw/roofline", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second measurement."""
        return time.time_ns()

    @classmethod
    def execute(cls, rows, columns, rounds, filename_prefix) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        found = run(comfy.model_management.get_torch_device(), rows, columns, rounds, out_path=path)
        text, shown = output.with_picture(
            found.text, path, saved, lambda picture: gemm_roofline.plot(found.lines, found.record, picture)
        )
        return io.NodeOutput(text, ui=shown)
