"""The table and the plot of the step benchmark and of the block benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .report import control_lines, device_name

HEADINGS = ("size", "rows", "variant", "s/step", "IQR", "of stock", "peak GiB", "verdict", "what ran")
WORDS = (0, 2, 7, 8)


@dataclass(frozen=True)
class Line:
    """One variant at one size; ``of_stock`` is its median over stock's, ``peak_bytes`` None on a CPU."""

    size: str
    rows: int
    variant: str
    seconds: float
    iqr_seconds: float
    of_stock: float
    peak_bytes: int | None
    verdict: str
    ran: str


def as_text(lines: Sequence[Line], record: dict, predictions: Sequence[str], unit: str = "s/step") -> str:
    """The table, what has to be known with it, and the predictions for other GPUs.

    ``unit`` is ``s/step`` or ``ms/block``.
    """
    packages = record["environment"]["packages"]
    names = ("torch", "triton", "comfy-kitchen", "flash-attn-4", "comfyui")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if packages.get(name))
    out = [f"{device_name(record)}; {versions}", f"timer: {record['protocol']['timer']}", "", *table(lines, unit), ""]
    out += control_lines(record)
    reasons: dict[str, list[str]] = {}
    for entry in record["dispatch"]["fallbacks"]:
        reasons.setdefault(entry["reason"], []).append(entry["what"])
    out += [f"not run: {what[0]} and {len(what) - 1} more: {reason}" for reason, what in reasons.items()]
    for gate in record["gates"]:
        if gate["result"] in ("passed", "failed"):
            rule = gate["rule"].replace("_", " ")
            out.append(
                f"{gate['result']}: {gate['name']}: {gate['observed']:.6g}, wants {rule} {gate['threshold']:.6g}"
            )
    return "\n".join([*out, *record["notes"], "", *predictions, f"run {record['run_id']}"])


def table(lines: Sequence[Line], unit: str = "s/step") -> list[str]:
    """Lines of text of equal width, headings first."""
    factor = 1000 if unit.startswith("ms") else 1
    rows = [tuple(unit if name == "s/step" else name for name in HEADINGS)]
    for line in lines:
        peak = "–" if line.peak_bytes is None else f"{line.peak_bytes / 2**30:.2f}"
        times = (f"{value * factor:.3f}" for value in (line.seconds, line.iqr_seconds))
        share = f"{line.of_stock:.3f}"
        rows.append((line.size, f"{line.rows:,}", line.variant, *times, share, peak, line.verdict, line.ran))
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    return [
        "  ".join(
            cell.ljust(width) if place in WORDS else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plot(lines: Sequence[Line], record: dict, path) -> str | None:
    """Write a bar chart of seconds per step as PNG.

    Returns:
        None, or why there is no picture (matplotlib is optional).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib"
    figure = Figure(figsize=(9, 1.6 + 0.35 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(lines))
    colours = ["#999999" if line.variant == "stock" else "#3f789e" for line in lines]
    axes.barh(places, [line.seconds for line in lines], xerr=[line.iqr_seconds / 2 for line in lines], color=colours)
    axes.set_yticks(places, [f"{line.size} / {line.variant}" for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step or a block, median; whiskers: interquartile range")
    axes.set_title(device_name(record))
    figure.savefig(Path(path), format="png", dpi=110)
    return None
