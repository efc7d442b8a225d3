"""The table of a benchmark, as text and, where matplotlib is installed, as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NOT_A_MEASUREMENT = "CPU, not a measurement"


@dataclass(frozen=True)
class Line:
    """One variant of one group.

    ``times_stock`` is the baseline's median over this one's: 2 means twice as fast. ``gb_per_s`` counts the bytes that
    an ideal implementation moves, so a variant that moves more shows less.
    """

    group: str
    variant: str
    ms: float
    iqr_ms: float
    gb_per_s: float
    share_of_copy: float
    times_stock: float
    floor_ms: float
    parity: str
    verdict: str


HEADINGS = ("op", "variant", "ms", "IQR", "GB/s", "of copy", "x stock", "floor ms", "parity", "verdict")


def device_name(record: dict) -> str:
    """The GPU of a record, or the processor with the remark that it was no measurement."""
    gpus = record["hardware"]["gpus"]
    return gpus[0]["name"] if gpus else f"{record['hardware']['cpu']['name']} ({NOT_A_MEASUREMENT})"


def as_text(lines: list[Line], record: dict) -> str:
    """The table and what has to be known with it."""
    packages = record["environment"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "comfy-kitchen") if packages[name])
    copy = next(case for case in record["cases"] if case["group"] == "copy")
    out = [
        f"{device_name(record)}; {versions}",
        f"timer: {record['protocol']['timer']}; copy {copy['roofline']['gb_per_s']:.0f} GB/s",
        "",
        *table(lines),
        "",
    ]
    out += control_lines(record)
    reasons: dict[str, list[str]] = {}
    for entry in record["dispatch"]["fallbacks"]:
        reasons.setdefault(entry["reason"], []).append(entry["what"])
    out += [f"not run: {'; '.join(what)}: {reason}" for reason, what in reasons.items()]
    failed = [gate for gate in record["gates"] if gate["result"] == "failed"]
    out += [f"FAILED: {gate['name']}: {gate['observed']}, at most {gate['threshold']}" for gate in failed]
    out += record["notes"]
    out.append(f"run {record['run_id']}")
    return "\n".join(out)


def control_lines(record: dict) -> list[str]:
    """Say for which groups the two copies of the baseline did not straddle zero; nothing without verdicts."""
    controls = {case["group"]: case["comparison"]["control_ms"] for case in record["cases"] if case["comparison"]}
    bad = sorted(group for group, found in controls.items() if found and not found[0] <= 0 <= found[1])
    if bad:
        return [f"A/A: the two copies of the baseline differ in {', '.join(bad)}: no verdict there"]
    return ["A/A: the two copies of the baseline straddle zero in every group"] if controls else []


def table(lines: list[Line]) -> list[str]:
    """Lines of text of equal width, headings first; the op is named once."""
    rows, last = [HEADINGS], None
    for line in lines:
        rows.append(
            (
                line.group if line.group != last else "",
                line.variant,
                f"{line.ms:.4f}",
                f"{line.iqr_ms:.4f}",
                f"{line.gb_per_s:.1f}",
                f"{line.share_of_copy:.1%}",
                f"{line.times_stock:.2f}",
                f"{line.floor_ms:.4f}",
                line.parity,
                line.verdict,
            )
        )
        last = line.group
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    words = (0, 1, 8, 9)
    return [
        "  ".join(
            cell.ljust(width) if place in words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plot(lines: list[Line], record: dict, path) -> str | None:
    """Write a bar chart of the medians, with the copy floor of each variant, as PNG.

    Returns:
        None, or why there is no picture (matplotlib is optional).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib"
    figure = Figure(figsize=(10, 1.6 + 0.28 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(lines))
    colours = ["#999999" if line.variant == "stock" else "#3f789e" for line in lines]
    axes.barh(places, [line.ms for line in lines], xerr=[line.iqr_ms / 2 for line in lines], color=colours)
    axes.plot([line.floor_ms for line in lines], places, "|", color="#c03020", markersize=11, label="copy floor")
    axes.set_yticks(places, [f"{line.group} / {line.variant}" for line in lines])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms per call, median; whiskers: interquartile range")
    axes.set_title(device_name(record))
    axes.legend(loc="lower right")
    figure.savefig(Path(path), format="png", dpi=110)
    return None
