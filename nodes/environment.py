"""A node that says what of this pack runs on this machine, and why the rest does not."""

from __future__ import annotations

import time

import torch
from comfy_api.latest import io, ui

from .. import install
from ..kernels import attention, certify, discover


class Environment(io.ComfyNode):
    """``install.py``'s report, and the attention backends and fused kernels of every device, as text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="H3BW_Environment",
            display_name="H3 Environment",
            category="H3 Blackwell/diagnostics",
            description="Versions, GPUs, which packages load and which attention backends run here, with the reason "
            "for each that does not. Installs and changes nothing.",
            inputs=[],
            outputs=[
                io.String.Output(
                    display_name="report",
                    tooltip="The report as text. Paths are cut down to file names, so it can be posted as it is.",
                )
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls) -> int:
        """Make every run look new: what is installed can change between two runs of one graph."""
        return time.time_ns()

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Probe and return the report."""
        report = describe()
        return io.NodeOutput(report, ui=ui.PreviewText(report))


def describe() -> str:
    """Return the report: ``install.text``, and for each device its attention backends and its fused kernels."""
    lines = [install.text(install.probe())]
    for device in ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]:
        lines.append(f"Attention on {device}")
        for name, exact, reason in attention.list_backends(device):
            kind = "exact" if exact else "approximate"
            lines.append(f"  {name} ({kind}): {'runs' if reason is None else reason}")
        lines.append(f"Fused kernels on {device}")
        for entry in certify.status(device):
            state = entry["state"].replace("_", " ")
            said = f"{state}: {entry['reason']}" if entry["reason"] else f"{state} against {entry['oracle']}"
            lines.append(f"  {entry['op']} {entry['implementation']}: {said}")
    return discover.without_paths("\n".join(lines))
