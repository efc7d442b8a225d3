"""Seconds per step that the roofline predicts for GPUs nobody here could time, in a table that a record replaces.

    seconds = GEMM flops / (peak * SHARE) + attention flops / (bf16 peak * its share) + bytes / (bandwidth * SHARE)

**A prediction is not a measurement.** What goes in is of unequal worth:

* peaks and bandwidths: the vendors' dense figures, entered by hand. 1,792 GB/s of the 5090 and the PRO 6000, and 4,000
  sparse FP4 TOPS of the latter (half of it dense), agree with public reports; the sheets themselves were not at hand;
* ``SHARE``: an assumption for GEMMs and chains alike, near what H200 GEMMs reached; no chain was fitted to it;
* attention's shares: as :class:`Device` says; they are guesses for every GPU but the H200 and GB10;
* bytes: the dynamic chains' are counted or measured ones of the format's notes, those of gates, attention rows and the
  bf16 chains are counted from the operations, never measured.

The H200's row agrees with its measured step because the attention shares, most of it, come from that very run: that
checks the sum, not the prediction. A finished record of kind ``step`` takes the place of the prediction for its GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HIDDEN, INNER, FFN, HEADS, HEAD_DIM, BLOCKS = 5376, 7168, 14336, 56, 128, 50
SHARE = 0.7
# Bytes of one block per row: today's unfused chain, and what the fused producers move (ATen's norm kept).
MODULATE_BYTES = {"stock": 20.6, "pack": 8.6}  # per element of the stream, twice a block
SWIGLU_BYTES = {"stock": 18.6, "pack": 8.56}  # per element of the MLP's inner width
ROWS_BYTES = {"stock": 8.6, "pack": 4.56}  # per element of the attention output
GATE_BYTES = 6.0  # per element of the stream, twice a block, on both sides
BF16_MODULATE = {"stock": 14.0, "pack": 8.0}  # without FP4: bf16 rows come out
BF16_SWIGLU = {"stock": 10.0, "pack": 6.0}


@dataclass(frozen=True)
class Device:
    """A GPU by its vendor's figures: dense TFLOP/s with fp32 accumulation, GB/s.

    Attributes:
        fp4: None where it has no FP4 multiply; the linears are then dequantised and run in bf16.
        attention: share of the bf16 peak that ComfyUI's default attention and the pack's exact choice reach.
        why: where the shares come from.
    """

    name: str
    match: str
    bandwidth: float
    bf16: float
    fp4: float | None
    attention: tuple[float, float]
    why: str


DEVICES = (
    Device("GB10 (DGX Spark)", "GB10", 273, 125, 500, (0.69, 0.69), "SDPA as published for it: 153 ms, 24 heads"),
    Device("RTX 5090", "RTX 5090", 1792, 209.5, 1676, (0.69, 0.69), "as GB10"),
    Device("RTX PRO 6000", "RTX PRO 6000", 1792, 251.9, 2015, (0.69, 0.69), "as GB10"),
    Device("B200", "B200", 8000, 2250, 9000, (0.33, 0.63), "as measured on an H200: flash 0.33, cuDNN 0.63"),
    Device("H200", "H200", 4800, 989, None, (0.33, 0.67), "measured there: flash 0.33, fa4 0.67"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    device: str
    variant: str
    seconds: float
    share: float
    label: str


def gemm_flops(rows: int, blocks: int = BLOCKS) -> float:
    """Of the four linears of every block."""
    return 2.0 * rows * blocks * (3 * INNER * HIDDEN + HIDDEN * INNER + 2 * FFN * HIDDEN + HIDDEN * FFN)


def attention_flops(rows: int, blocks: int = BLOCKS) -> float:
    """Of full attention: ``4 * heads * rows^2 * head_dim`` a block."""
    return 4.0 * HEADS * HEAD_DIM * rows * rows * blocks


def chain_bytes(rows: int, side: str, fp4: bool, blocks: int = BLOCKS) -> float:
    """Bytes that run between the GEMMs of every block."""
    if fp4:
        between = 2 * HIDDEN * MODULATE_BYTES[side] + FFN * SWIGLU_BYTES[side] + INNER * ROWS_BYTES[side]
    else:
        between = 2 * HIDDEN * BF16_MODULATE[side] + FFN * BF16_SWIGLU[side]
    return rows * blocks * (between + 2 * HIDDEN * GATE_BYTES)


def seconds(device: Device, rows: int, side: str) -> float:
    """Predicted seconds of a step; ``side`` is ``stock`` or ``pack`` (exact defaults)."""
    peak = device.fp4 or device.bf16
    attention = device.attention[side == "pack"]
    return (
        gemm_flops(rows) / (peak * SHARE * 1e12)
        + attention_flops(rows) / (device.bf16 * attention * 1e12)
        + chain_bytes(rows, side, device.fp4 is not None) / (device.bandwidth * SHARE * 1e9)
    )


def measured(record: dict, rows: int) -> tuple[str, dict[str, float]] | None:
    """``(GPU, {variant: seconds})`` of a finished step record at a number of rows, or None."""
    gpus = record["hardware"]["gpus"]
    if record["kind"] != "step" or record["status"] != "finished" or not gpus:
        return None
    found = {
        case["variant"]: case["summary"]["median"] / 1000
        for case in record["cases"]
        if case["shape"][0] == rows and case["shape"][1] == HIDDEN and case["variant"] in ("stock", "pack")
    }
    return (gpus[0]["name"], found) if len(found) == 2 else None


def table(rows: int, records: Iterable[dict] = ()) -> list[Row]:
    """Predictions for every device, each replaced by the last of the records that was made on it.

    Args:
        rows: of the packed sequence.
        records: step records; those of other sizes, other GPUs or a CPU are left out.
    """
    own: dict[str, tuple[dict[str, float], str]] = {}
    for record in records:
        found = measured(record, rows)
        if found is not None:
            named = next((device.name for device in DEVICES if device.match in found[0]), found[0])
            own[named] = (found[1], record["run_id"])
    out: list[Row] = []
    for device in DEVICES:
        if device.name in own:
            continue
        both = {side: seconds(device, rows, side) for side in ("stock", "pack")}
        label = f"prediction; attention {device.why}"
        out += [Row(device.name, side, both[side], both[side] / both["stock"], label) for side in both]
    for name, (both, run_id) in own.items():
        label = f"measured, run {run_id}"
        out += [Row(name, side, both[side], both[side] / both["stock"], label) for side in ("stock", "pack")]
    return out


def as_lines(found: Sequence[Row], rows: int) -> list[str]:
    """The table as lines of text."""
    out = [f"{rows:,} rows, seconds per step; a prediction is no measurement and a record of yours takes its place:"]
    wide = max((len(row.device) for row in found), default=0)
    out += [
        f"  {row.device.ljust(wide)}  {row.variant:5}  {row.seconds:8.2f}  {row.share:5.2f} of stock  {row.label}"
        for row in found
    ]
    return out
