"""Static activation scales from a watched run: ``input_scale = largest magnitude * headroom / 2688``.

A dynamic scale follows each call's own maximum, which costs a pass over the activation before it can be quantised. A
static one is a constant of the layer, and the producers quantise in a single pass. What it can cost is seen on the run
that it was taken from: values above ``2688 * scale`` clip, and the block scales (e4m3, 4 significant bits over a range
of 2^18) sit elsewhere in their range. The second hardly matters, so some headroom for other prompts is almost free.

While a model runs nothing waits for the device and nothing is allocated that stays: the buffers are made beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import nvfp4

CALLS = 1024  # calls whose own maximum is kept; later ones share the last place
ROWS = 96  # rows kept whole, for the error
ROWS_PER_CALL = 4
COUNTED_ROWS = 64  # rows of a call whose values are counted
MAGNITUDES = 1 << 15  # bit patterns of a bf16 without its sign
INFINITY = 0x7F80


class CalibrationError(ValueError):
    """Statistics that no scale can be taken from."""


class Statistics:
    """What one linear's input looked like, over all calls of a run.

    Attributes:
        amax: fp32 ``[CALLS]``, the largest magnitude of each call over all its values, NaN where one was NaN.
        histogram: int64 ``[2^15]``, how often each bf16 magnitude occurred in up to 64 evenly spaced rows of each call.
        rows: bf16 ``[ROWS, K]``, four evenly spaced rows of each call; the oldest are overwritten.
        call_of_row: the call that each of them is of, -1 for a row not filled.
        calls: calls so far.
        unseen: calls whose input was no bf16, fp16 or fp32 tensor on the buffers' device.
    """

    def __init__(self, columns: int, device: torch.device):
        self.amax = torch.zeros(CALLS, dtype=torch.float32, device=device)
        self.histogram = torch.zeros(MAGNITUDES, dtype=torch.int64, device=device)
        self.rows = torch.zeros(ROWS, columns, dtype=torch.bfloat16, device=device)
        self.call_of_row = [-1] * ROWS
        self.calls = 0
        self.unseen = 0

    def watch(self, x: torch.Tensor) -> None:
        """Note one call's input ``[..., K]``: one read of x for its maximum; some of its rows for the rest."""
        if type(x) is not torch.Tensor or x.device != self.amax.device or x.dtype not in nvfp4.DTYPES or not x.numel():
            self.unseen += 1
            return
        rows = x.detach().reshape(-1, x.shape[-1])
        low, high = torch.aminmax(rows)
        place = self.amax[min(self.calls, CALLS - 1)]
        place.copy_(torch.maximum(place, torch.maximum(-low, high)))
        counted = _spaced(rows, COUNTED_ROWS).to(torch.bfloat16)
        magnitude = (counted.view(torch.int16) & 0x7FFF).flatten().to(torch.int64)
        self.histogram.scatter_add_(0, magnitude, torch.ones_like(magnitude))
        for row in _spaced(rows, ROWS_PER_CALL):
            at = (self.calls * ROWS_PER_CALL) % ROWS
            while self.call_of_row[at] == self.calls:
                at += 1
            self.rows[at].copy_(row)
            self.call_of_row[at] = self.calls
        self.calls += 1

    def to(self, device: torch.device | str) -> Statistics:
        """Move the buffers; waits for the device they are on."""
        for name in ("amax", "histogram", "rows"):
            setattr(self, name, getattr(self, name).to(device))
        return self


def _spaced(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Up to `count` rows at even distances, a view."""
    return rows[:: max(1, -(-rows.shape[0] // count))]


@dataclass(frozen=True)
class Choice:
    """A static scale and what it costs on the run it was taken from.

    Attributes:
        input_scale: fp32, to multiply by.
        amax, least_amax: the largest and the smallest of the calls' maxima.
        calls: watched calls.
        values: values that were counted.
        clipped: share of them above ``2688 * input_scale``.
        dynamic_db, static_db: signal to error of the kept rows in NVFP4, with each call's own scale and with this one;
            None where the rows are all zero.
    """

    input_scale: float
    amax: float
    least_amax: float
    calls: int
    values: int
    clipped: float
    dynamic_db: float | None
    static_db: float | None


def choose(statistics: Statistics, clip: float = 0.0, headroom: float = 1.0, name: str = "") -> Choice:
    """Take a scale from a run.

    Args:
        statistics: of at least one call.
        clip: share of the counted values that may clip, for example 1e-5; 0 takes the maximum of all values.
        headroom: factor on top, at least 1 for none.
        name: of the linear, for errors.

    Raises:
        CalibrationError: no call was seen, or a value was not finite.
    """
    if not statistics.calls:
        raise CalibrationError(f"{name}: no input was seen; sample with the calibrating model first")
    calls = statistics.amax[: min(statistics.calls, CALLS)]
    amax, least = float(calls.max()), float(calls.min())
    if not math.isfinite(amax):
        raise CalibrationError(f"{name}: its input held Inf or NaN; the Runtime Report names the first block that did")
    largest = amax if clip <= 0 else _quantile(statistics.histogram, clip)
    scale = largest * headroom / nvfp4.RANGE or 1.0 / nvfp4.RANGE  # an input of zeros takes any scale
    scale = float(torch.tensor(scale, dtype=torch.float32))
    magnitudes = _magnitudes(statistics.histogram.device)
    counts = statistics.histogram
    values = int(counts.sum())
    above = int(counts[magnitudes > scale * nvfp4.RANGE * (1 + 2**-20)].sum())
    dynamic, static = _errors(statistics, scale)
    return Choice(scale, amax, least, statistics.calls, values, above / values, dynamic, static)


def _magnitudes(device: torch.device) -> torch.Tensor:
    """The value of each bf16 bit pattern without its sign, fp64; Inf and NaN as Inf."""
    bits = torch.arange(MAGNITUDES, device=device)
    value = bits.to(torch.int16).view(torch.bfloat16).double()
    return torch.where(bits >= INFINITY, torch.inf, value)


def _quantile(histogram: torch.Tensor, clip: float) -> float:
    """Smallest magnitude that at most `clip` of the counted values exceed."""
    above = histogram.sum() - histogram.cumsum(0)  # values greater than each magnitude
    index = int((above <= clip * float(histogram.sum())).int().argmax())
    return float(_magnitudes(histogram.device)[index])


def _errors(statistics: Statistics, scale: float) -> tuple[float | None, float | None]:
    """Signal to error in dB of the kept rows: each call's own scale, and one scale."""
    kept = [at for at, call in enumerate(statistics.call_of_row) if call >= 0]
    signal = dynamic = static = 0.0
    for call in {statistics.call_of_row[at] for at in kept}:
        rows = statistics.rows[[at for at in kept if statistics.call_of_row[at] == call]]
        own = (statistics.amax[min(call, CALLS - 1)].bfloat16() / nvfp4.RANGE).float()
        signal += float(rows.double().square().sum())
        dynamic += _squared_error(rows, own)
        static += _squared_error(rows, torch.tensor(scale))
    return _db(signal, dynamic), _db(signal, static)


def _squared_error(rows: torch.Tensor, scale: torch.Tensor) -> float:
    back = nvfp4.dequantize(nvfp4.quantize(rows, scale))
    return float((back.double() - rows.double()).square().sum())


def _db(signal: float, error: float) -> float | None:
    if signal == 0:
        return None
    return 10 * math.log10(signal / error) if error else math.inf
