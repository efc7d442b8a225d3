"""``H3BW_BenchKernels``: the fused ops against ComfyUI's own chain on this machine, as a table, a plot and a record."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.quant_ops
import comfy.utils
import torch
from comfy_api.latest import io

from ..kernels import fused
from ..kernels.measure import producers, report
from . import output

MOST_ROWS = 262_144  # 362 frames of 1344x768 are about 109,000


def run(device, rows: int = producers.H3_ROWS, columns=producers.H3_COLUMNS, ops="all", rounds: int = 30, *, out_path):
    """:func:`producers.run` with ComfyUI's quantiser, its cancel button, its progress bar and its memory management.

    Without ComfyUI call ``producers.run``: it takes comfy-kitchen's own quantiser, which makes the same bytes.
    """
    device = torch.device(device)
    groups, _ = producers.groups_of(ops)
    if device.type == "cuda" and columns in producers.PRESETS and rows > 0:
        needed = producers.memory_needed(groups, rows, producers.PRESETS[columns], device)
        comfy.model_management.free_memory(needed, device)
        comfy.model_management.soft_empty_cache()
    progress = comfy.utils.ProgressBar(len(groups))
    layout = getattr(comfy.quant_ops, "TensorCoreNVFP4Layout", None)
    return producers.run(
        device,
        rows,
        columns,
        ops,
        rounds,
        out_path=out_path,
        quantise=None if layout is None else layout.quantize,
        between=comfy.model_management.throw_exception_if_processing_interrupted,
        progress=lambda done, total: progress.update_absolute(done, total),
    )


class BenchKernels(io.ComfyNode):
    """Measure the kernels of this pack where it runs."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_BenchKernels",
            display_name="H3 Bench Kernels",
            category="H3 Blackwell/benchmarks",
            description=(
                "Times every fused op on this GPU against ComfyUI's own chain, in rotation and with the copy bandwidth "
                "beside it, after checking that both give the same bytes. A table here, a plot where matplotlib is "
                "installed, and a record with every sample in the output folder. Needs no model. On a CPU it runs the "
                "references and says that this is no measurement."
            ),
            search_aliases=["nvfp4", "h3", "benchmark", "speed", "roofline", "kernels", "parity"],
            is_output_node=True,
            inputs=[
                io.Int.Input(
                    "rows",
                    default=producers.H3_ROWS,
                    min=1,
                    max=MOST_ROWS,
                    tooltip=(
                        "Rows of the stream; 38016 is 1344x768 with 124 frames. On a CPU at most "
                        f"{producers.CPU_ROWS} are used."
                    ),
                ),
                io.Combo.Input(
                    "columns",
                    options=list(producers.PRESETS),
                    default=producers.H3_COLUMNS,
                    tooltip="Widths of the residual stream, the MLP and the attention output.",
                ),
                io.Combo.Input(
                    "ops", options=["all", *fused.OPS], default="all", tooltip="Which fused ops are timed."
                ),
                io.Int.Input(
                    "rounds",
                    default=30,
                    min=1,
                    max=1000,
                    tooltip=(
                        "Every variant runs once a round. Raised to a whole number of balanced cycles of orders; on a "
                        "CPU one cycle is run."
                    ),
                ),
                io.String.Input("filename_prefix", default="h3bw/bench_kernels", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second measurement."""
        return time.time_ns()

    @classmethod
    def execute(cls, rows, columns, ops, rounds, filename_prefix) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        found = run(comfy.model_management.get_torch_device(), rows, columns, ops, rounds, out_path=path)
        text, shown = output.with_picture(
            found.text, path, saved, lambda picture: report.plot(found.lines, found.record, picture)
        )
        return io.NodeOutput(text, ui=shown)
