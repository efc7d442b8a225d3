"""``H3BW_BenchAttention``: every attention backend on this machine, as a table, a plot and a record."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io

from ..kernels import attention
from ..kernels.measure import attention_bench, attention_report
from . import output
from .attention import AttentionOverride

MOST_ROWS = 262_144  # 362 frames of 1344x768 are about 109,000
ALL_LENGTHS = "128 to 108800"
LENGTHS = {"rows": None, ALL_LENGTHS: attention_bench.SEQUENCES}


def run(device, seq, heads=attention_bench.HEADS, backends="all", rounds=20, *, out_path):
    """:func:`attention_bench.run` with ComfyUI's cancel button, progress bar and memory management.

    The overhead that it measures is the whole of the attention node's, from ComfyUI's call to the kernel.
    """
    device = torch.device(device)
    if device.type == "cuda":
        needed = attention_bench.memory_needed(max(seq), heads, attention_bench.HEAD_DIM)
        comfy.model_management.free_memory(needed, device)
        comfy.model_management.soft_empty_cache()
    progress = comfy.utils.ProgressBar(len(seq))
    override = AttentionOverride(attention.AUTO)

    def entry(q, k, v):
        return override(None, q, k, v, q.shape[1], skip_reshape=True, skip_output_reshape=True, transformer_options={})

    return attention_bench.run(
        device,
        seq,
        heads,
        attention_bench.HEAD_DIM,
        backends,
        rounds,
        out_path=out_path,
        entry=entry,
        between=comfy.model_management.throw_exception_if_processing_interrupted,
        progress=lambda done, total: progress.update_absolute(done, total),
    )


class BenchAttention(io.ComfyNode):
    """Measure the attention backends of this pack where it runs."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_BenchAttention",
            display_name="H3 Bench Attention",
            category="H3 Blackwell/benchmarks",
            description=(
                "Times every attention backend that runs on this GPU at your length, in rotation, against the kernel "
                "that ComfyUI picks: time, TFLOP/s, error against double precision, memory, and what auto chose. A "
                "table here, a plot where matplotlib is installed, and a record with every sample in the output "
                "folder. Needs no model. On a CPU it runs one small call and says that this is no measurement."
            ),
            search_aliases=["attention", "benchmark", "speed", "sage", "flash", "sdpa", "fa4", "sol", "h3"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "lengths",
                    options=list(LENGTHS),
                    default="rows",
                    tooltip=f"rows: the one length below. {ALL_LENGTHS}: six lengths up to 362 frames, minutes.",
                ),
                io.Int.Input(
                    "rows",
                    default=38016,
                    min=1,
                    max=MOST_ROWS,
                    tooltip=(
                        "Rows of q, k and v; 38016 is 1344x768 with 124 frames. On a CPU at most "
                        f"{attention_bench.CPU_ROWS} are used."
                    ),
                ),
                io.Int.Input("heads", default=attention_bench.HEADS, min=1, max=128, tooltip="56 for MiniMax H3."),
                io.Combo.Input(
                    "backend",
                    options=["all", *attention.names()],
                    default="all",
                    tooltip="all leaves out those that run by name only. auto and ComfyUI's choice always run.",
                ),
                io.Int.Input(
                    "rounds",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Every backend runs once a round. Raised to a whole number of balanced cycles of orders.",
                ),
                io.String.Input("filename_prefix", default="h3bw/bench_attention", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second measurement."""
        return time.time_ns()

    @classmethod
    def execute(cls, lengths, rows, heads, backend, rounds, filename_prefix) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        seq = LENGTHS[lengths] or (rows,)
        found = run(comfy.model_management.get_torch_device(), seq, heads, backend, rounds, out_path=path)
        text, shown = output.with_picture(
            found.text, path, saved, lambda picture: attention_report.plot(found.lines, found.record, picture)
        )
        return io.NodeOutput(text, ui=shown)
