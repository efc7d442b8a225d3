"""The table and the plot of the attention benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .report import control_lines, device_name

HEADINGS = (
    "rows", "variant", "kind", "ms", "IQR", "TFLOP/s", "x stock", "relative", "cosine", "worst channel", "MiB above",
    "verdict",
)  # fmt: skip
WORDS = (0, 1, 2, 11)


@dataclass(frozen=True)
class Line:
    """One variant at one length.

    ``times_stock`` is stock's median over this one's. The errors are against double precision on a slice of the call.
    ``above_bytes`` is the most memory that a call held beyond its inputs and its output, None on a CPU.
    """

    rows: int
    variant: str
    kind: str
    ms: float
    iqr_ms: float
    tflops: float
    times_stock: float
    relative: float
    cosine: float
    worst_channel: float
    above_bytes: int | None
    verdict: str


def as_text(lines: list[Line], record: dict) -> str:
    """The table and what has to be known with it."""
    packages = record["environment"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "comfy-kitchen") if packages[name])
    out = [f"{device_name(record)}; {versions}", f"timer: {record['protocol']['timer']}", "", *table(lines), ""]
    out += control_lines(record)
    reasons: dict[str, list[str]] = {}
    for entry in record["dispatch"]["fallbacks"]:
        reasons.setdefault(entry["reason"], []).append(entry["what"])
    out += [f"not run: {', '.join(what)}: {reason}" for reason, what in reasons.items()]
    failed = [gate for gate in record["gates"] if gate["result"] == "failed"]
    out += [
        f"FAILED: {gate['name']}: {gate['observed']:.6g}, wants {gate['rule']} {gate['threshold']:.6g}"
        for gate in failed
    ]
    out += record["notes"]
    out.append(f"run {record['run_id']}")
    return "\n".join(out)


def table(lines: list[Line]) -> list[str]:
    """Lines of text of equal width, headings first; the length is named once."""
    rows, last = [HEADINGS], None
    for line in lines:
        rows.append(
            (
                str(line.rows) if line.rows != last else "", line.variant, line.kind, f"{line.ms:.4f}",
                f"{line.iqr_ms:.4f}", f"{line.tflops:.1f}", f"{line.times_stock:.2f}", f"{line.relative:.2e}",
                f"{line.cosine:.6f}", f"{line.worst_channel:.2e}",
                "–" if line.above_bytes is None else f"{line.above_bytes / 2**20:.1f}", line.verdict,
            )
        )  # fmt: skip
        last = line.rows
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    return [
        "  ".join(
            cell.ljust(width) if place in WORDS else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plot(lines: list[Line], record: dict, path) -> str | None:
    """Write TFLOP/s over the length, one line a variant, as PNG.

    Returns:
        None, or why there is no picture (matplotlib is optional).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib"
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for variant in dict.fromkeys(line.variant for line in lines):
        own = [line for line in lines if line.variant == variant]
        style = "--" if own[0].kind == "approximate" else "-"
        axes.plot([line.rows for line in own], [line.tflops for line in own], style, marker="o", label=variant)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.set_ylabel("TFLOP/s of full attention (dashed: approximate)")
    axes.set_title(device_name(record))
    axes.legend()
    figure.savefig(Path(path), format="png", dpi=110)
    return None
