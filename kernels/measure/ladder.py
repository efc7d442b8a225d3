"""The parity ladder: rungs from single kernels to twelve steps, each with its numbers, and how they are shown.

A rung passes, fails with its numbers, or is skipped with a reason; a skipped one never counts as passed. What is
compared is decided by the caller (``nodes.ladder_rungs``); here are the numbers, the record, the table and the picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .manifest import Manifest
from .report import device_name

REPEATS, KERNELS, PROJECTIONS, BLOCKS, ALL_BLOCKS, TWO_STEPS, CHECKSUMS, PEAK = RUNGS = (
    "0 stock repeats itself",
    "1 adversarial and randomised kernels",
    "2 real projections",
    "3 complete blocks",
    "4 all blocks",
    "5 two-step trajectory",
    "6 12-step checksums",
    "7 profiler and peak memory",
)
WHAT = {
    REPEATS: "the unpatched model, sampled twice, gives the same bits (after one sampling that is thrown away)",
    KERNELS: "every fused op against its oracle, on ragged shapes and awkward values",
    PROJECTIONS: "the four linears of some blocks: our codes against ComfyUI's own quantised input, and the products",
    BLOCKS: "the first, a middle and the last block, each on the stream that stock hands to it",
    ALL_BLOCKS: "every block in turn, each on what came out of the one before it on its own side",
    TWO_STEPS: "two sampling steps: what the sampler holds and what the model predicts, at every step",
    CHECKSUMS: "twelve sampling steps: SHA-256 of the final latent",
    PEAK: "device time, launches and peak memory of one step",
}
COLOURS = {"passed": (46, 125, 80), "failed": (176, 48, 42), "skipped": (130, 130, 130)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 24  # elements that are compared in double precision at once


@dataclass
class Rung:
    """One comparison: which rung, of what, and how it ended."""

    name: str
    case: str
    result: str
    numbers: dict = field(default_factory=dict)
    reason: str | None = None


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> dict:
    """Numbers of a comparison, bit by bit; -0.0 and 0.0 differ, a NaN equals itself.

    Args:
        ours, theirs: tensors of one shape and dtype on one device.

    Returns:
        ``elements``, ``differing``, ``max_abs``, ``relative`` (norm of the difference over norm of theirs) and
        ``sqnr_db`` (None when nothing differs). A number that is not finite is None: JSON has no word for it.

    Raises:
        ValueError: another shape or dtype.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(
            f"compare: wants tensors of one kind, has {tuple(ours.shape)} {ours.dtype} and {tuple(theirs.shape)} "
            f"{theirs.dtype}"
        )
    a, b = ours.detach().contiguous().reshape(-1), theirs.detach().contiguous().reshape(-1)
    kind = _INTEGERS[a.element_size()]
    differing = int((a.view(kind) != b.view(kind)).sum())
    found = {"elements": a.numel(), "differing": differing, "max_abs": 0.0, "relative": 0.0, "sqnr_db": None}
    if not differing:
        return found
    largest, noise, signal = 0.0, 0.0, 0.0
    for start in range(0, a.numel(), _PIECE):
        part, wanted = a[start : start + _PIECE].double(), b[start : start + _PIECE].double()
        gap = part - wanted
        here = float(gap.abs().max())
        largest = here if math.isnan(here) else max(here, largest)  # a NaN stays: it is the second of max's arguments
        noise += float(gap.square().sum())
        signal += float(wanted.square().sum())
    finite = math.isfinite(largest) and math.isfinite(noise) and math.isfinite(signal)
    found["max_abs"] = largest if math.isfinite(largest) else None
    found["relative"] = math.sqrt(noise / signal) if finite and signal else None
    found["sqnr_db"] = 10 * math.log10(signal / noise) if finite and signal and noise else None
    return found


def in_words(numbers: dict) -> str:
    """``"3 of 80 elements differ, max abs 0.5, relative 1.2e-03, SQNR 58.2 dB"``."""
    if not numbers["differing"]:
        return f"{numbers['elements']:,} elements equal, bit for bit"

    def told(name: str, form: str) -> str:
        value = numbers.get(name)
        return "not finite" if value is None else format(value, form)

    return (
        f"{numbers['differing']:,} of {numbers['elements']:,} elements differ, max abs {told('max_abs', '.4g')}, "
        f"relative {told('relative', '.2e')}, SQNR {told('sqnr_db', '.1f')} dB"
    )


class Ladder:
    """Collects rungs and enters each into the record as a gate.

    Args:
        record: of kind ``parity``.
    """

    def __init__(self, record: Manifest):
        self.record = record
        self.rungs: list[Rung] = []

    def _gate(self, name: str, case: str) -> str:
        return f"{name}: {case}" if case else name

    def compared(self, name: str, case: str, numbers: dict, where: str = "", note: str | None = None) -> Rung:
        """A rung that passes when nothing differs.

        Args:
            numbers: of :func:`compare`.
            where: the first place that differs.
            note: what is to be known although it passed.
        """
        failed = numbers["differing"] > 0
        reason = f"{where}: {in_words(numbers)}" if failed and where else in_words(numbers)
        reason = f"{reason}; {note}" if note else reason
        return self.bounded(name, case, numbers["differing"], 0, numbers, reason)

    def bounded(self, name: str, case: str, observed: float, threshold: float, numbers: dict, reason: str) -> Rung:
        """A rung that passes when a number is at most another one."""
        result = self.record.add_gate(self._gate(name, case), "at_most", threshold, observed=observed, reason=reason)
        self.rungs.append(Rung(name, case, result, numbers, reason))
        return self.rungs[-1]

    def skipped(self, name: str, case: str, reason: str) -> Rung:
        """A rung that could not be climbed here."""
        self.record.add_gate(self._gate(name, case), "at_most", 0, reason=reason)
        self.rungs.append(Rung(name, case, "skipped", {}, reason))
        return self.rungs[-1]

    def failed(self) -> list[Rung]:
        """The rungs that failed."""
        return [rung for rung in self.rungs if rung.result == "failed"]


def verdict(rungs: list[Rung]) -> str:
    """``"41 passed, 0 failed, 3 skipped"``, and the first that failed."""
    counts = {result: sum(rung.result == result for rung in rungs) for result in COLOURS}
    text = ", ".join(f"{count} {result}" for result, count in counts.items())
    first = next((rung for rung in rungs if rung.result == "failed"), None)
    return text if first is None else f"{text}; the first that failed: {first.name}, {first.case}: {first.reason}"


def as_text(rungs: list[Rung], record: dict) -> str:
    """The table, rung by rung, and what has to be known with it."""
    packages = record["environment"]["packages"]
    names = ("torch", "triton", "comfy-kitchen", "comfyui")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if packages.get(name))
    gpus = record["hardware"]["gpus"]
    where = gpus[0]["name"] if gpus else record["hardware"]["cpu"]["name"]
    out = [f"{where}; {versions}", verdict(rungs)]
    for name in RUNGS:
        of_this = [rung for rung in rungs if rung.name == name]
        if of_this:
            out += ["", f"{name}: {WHAT[name]}"]
            width = max(len(rung.case) for rung in of_this)
            out += [f"  {rung.result.upper():7}  {rung.case.ljust(width)}  {rung.reason}" for rung in of_this]
    out += ["", *record["notes"], f"run {record['run_id']}"]
    return "\n".join(out)


def picture(rungs: list[Rung], record: dict, path) -> None:
    """Write the ladder as a PNG: one line a comparison, its colour the result."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    line, left, width = 22, 20, 1240
    rows = sum(1 for name in RUNGS if any(rung.name == name for rung in rungs)) + len(rungs) + 2
    image = Image.new("RGB", (width, rows * line + 2 * left), (250, 250, 248))
    draw = ImageDraw.Draw(image)

    def text(x: int, y: int, words: str, colour=(30, 30, 30), most: int = width) -> None:
        # The default bitmap font of older Pillows knows Latin-1 only.
        words = words.encode("latin-1", "replace").decode("latin-1")
        while words and draw.textlength(words, font=font) > most - x - left:
            words = words[:-4] + "..." if len(words) > 4 else ""
        draw.text((x, y), words, fill=colour, font=font)

    y = left
    text(left, y, f"Parity ladder: {device_name(record).replace('CPU, not a measurement', 'CPU')}")
    text(left, y + line, verdict(rungs))
    y += 2 * line
    for name in RUNGS:
        of_this = [rung for rung in rungs if rung.name == name]
        if of_this:
            text(left, y + 4, name)
            y += line
        for rung in of_this:
            draw.rectangle((left + 10, y + 2, left + 80, y + line - 3), fill=COLOURS[rung.result])
            text(left + 18, y + 4, rung.result, (255, 255, 255))
            text(left + 95, y + 4, rung.case, most=370)
            text(left + 340, y + 4, rung.reason or "")
            y += line
    image.save(Path(path), format="PNG")
