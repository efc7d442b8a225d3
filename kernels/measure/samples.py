"""What is done with samples of a time in milliseconds: orders, summaries, and a verdict on a saving.

Standard library only, and the same answer on every machine: a validator recomputes all of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CONTROL = " (A/A)"  # suffix of the second copy of the baseline
CONFIDENCE = 0.99
RESAMPLES = 1000
VERDICTS = ("accept", "reject", "inconclusive")


@dataclass(frozen=True)
class Bar:
    """What a saving has to reach, set before the run: a share of the baseline *and* milliseconds."""

    share: float
    ms: float


BARS = {"kernel": Bar(0.05, 0.010), "block": Bar(0.01, 0.050), "step": Bar(0.005, 5.0)}


def balanced_orders(names: Sequence[str]) -> list[list[str]]:
    """Orders in which every name has every place equally often and follows every other name equally often.

    A Williams design and its mirror image, ``2n`` orders for n names: ``ABC BCA CAB CBA ACB BAC`` for three. Drift of a
    clock and what the previous variant left in a cache then hit all alike.
    """
    count = len(names)
    if count == 0 or len(set(names)) != count:
        raise ValueError(f"balanced_orders: names must be distinct and at least one, have {list(names)}")
    base = [0]
    for step in range(1, count):
        base.append((step + 1) // 2 if step % 2 else count - step // 2)
    rows = [[names[(place + shift) % count] for place in base] for shift in range(count)]
    return rows + [row[::-1] for row in rows]


def quantile(values: Sequence[float], share: float) -> float:
    """The ``share`` quantile, linear between the two neighbours (as numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return quantile(values, 0.5)


def summary(values: Sequence[float]) -> dict:
    """Count, median, quartiles, interquartile range, least and largest; in the unit of the samples."""
    first, third = quantile(values, 0.25), quantile(values, 0.75)
    return {
        "count": len(values),
        "median": median(values),
        "q1": first,
        "q3": third,
        "iqr": third - first,
        "min": min(values),
        "max": max(values),
    }


def interval(differences: Sequence[float], seed: int) -> list[float]:
    """Bootstrap interval ``[low, high]`` of the median at ``CONFIDENCE``: ``RESAMPLES`` seeded resamples."""
    # randbytes and choices may change between Python versions; random() is promised not to.
    draw = random.Random(seed).random
    count = len(differences)
    medians = [median([differences[int(draw() * count)] for _ in range(count)]) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return [quantile(medians, tail), quantile(medians, 1 - tail)]


def verdict(
    baseline: Sequence[float],
    candidate: Sequence[float],
    bar: Bar,
    seed: int = 0,
    control: Sequence[float] | None = None,
) -> dict:
    """Judge the saving of a candidate, round by round against the baseline of the same round.

    Args:
        baseline, candidate: ms of each round, equally long.
        bar: what the saving must reach, in share and in ms.
        seed: of the bootstrap.
        control: ms of the second copy of the baseline. Its difference from the first must straddle zero, or nothing
            that the run says is believed.

    Returns:
        ``saving_ms`` and ``saving_share`` (medians over the rounds), their intervals, ``control_ms`` (interval of the
        A/A difference, or None), ``verdict`` and ``reason``. ``accept``: both intervals lie at or above their bars.
        ``reject``: one lies wholly below its bar. ``inconclusive``: an interval crosses its bar, or the control failed.
    """
    if len(baseline) != len(candidate) or not baseline or (control is not None and len(control) != len(baseline)):
        raise ValueError(f"verdict: wants one sample a round on each side, has {len(baseline)} and {len(candidate)}")
    saved = [a - b for a, b in zip(baseline, candidate, strict=True)]
    shares = [a / b for a, b in zip(saved, baseline, strict=True)]
    saved_interval, share_interval = interval(saved, seed), interval(shares, seed)
    control_interval = None
    if control is not None:
        control_interval = interval([a - b for a, b in zip(baseline, control, strict=True)], seed)
    if control_interval is not None and not control_interval[0] <= 0 <= control_interval[1]:
        word, reason = "inconclusive", "the two copies of the baseline differ: the run cannot be trusted"
    elif saved_interval[0] >= bar.ms and share_interval[0] >= bar.share:
        word, reason = "accept", "the whole interval lies above the bar"
    elif saved_interval[1] < bar.ms or share_interval[1] < bar.share:
        word, reason = "reject", "the whole interval lies below the bar"
    else:
        word, reason = "inconclusive", "the interval crosses the bar"
    return {
        "saving_ms": median(saved),
        "saving_share": median(shares),
        "interval_ms": saved_interval,
        "interval_share": share_interval,
        "control_ms": control_interval,
        "bar_ms": bar.ms,
        "bar_share": bar.share,
        "verdict": word,
        "reason": reason,
    }
