"""Are block scales row-major or swizzled? What the bytes themselves say, for catching a wrong declaration.

Both arrangements of an H3 layer have the same shape, so only the values can tell. Rows of a trained weight differ in
size, and so do its columns; a scale is about (row factor) x (column factor) x noise. Read in the wrong arrangement a
row collects scales of up to 128 rows, and most of that structure is gone.
"""

import math

import torch

from .. import nvfp4

RATIO = 2.0
"""How many times better one reading must fit before it counts."""
SIGMAS = 5.0
"""... and how many standard errors the logarithm of that ratio must lie from 0."""
_MAX_ROWS = 4096


def evidence(scales: torch.Tensor, rows: int, blocks: int) -> tuple[str | None, float]:
    """Compare both readings of one layer's scales by an analysis of variance of log2(scale).

    For each reading F = (variance explained by row and column means, per degree of freedom) / (the rest, per degree of
    freedom). Columns belong in it: in the wrong reading a row stays within few columns, so that a column effect alone
    would look like a row effect. For independent, identically distributed weights both F are about 1: no evidence.

    Not checked: weights whose structure is neither rows nor columns but tiles of 128 rows by 64 elements could favour
    the wrong reading; callers look at several layers and act only when none disagrees.

    Args:
        scales: uint8 bytes of e4m3 values, not negative, in the padded shape that both arrangements share.
        rows, blocks: the logical part of it.

    Returns:
        ``("row-major" | "swizzled" | None, ratio of the two F, at least 1)``.
    """
    # a multiple of 128 rows is whole tiles, so the part is the same set of bytes in both arrangements
    rows = min(rows, _MAX_ROWS)
    scales = scales[: nvfp4.roundup(rows, nvfp4.SCALE_TILE_ROWS)]
    readings = {"row-major": scales[:rows, :blocks], "swizzled": nvfp4.unswizzle(scales, rows, blocks)}
    fits = {
        name: _additive_fit(reading.view(torch.float8_e4m3fn).to(torch.float32)) for name, reading in readings.items()
    }
    if None in fits.values():
        return None, 1.0
    better = max(fits, key=lambda name: fits[name][0])
    worse = min(fits, key=lambda name: fits[name][0])
    ratio = fits[better][0] / fits[worse][0]
    error = math.sqrt(sum(2 / model + 2 / rest for _, model, rest in fits.values()))
    return (better if ratio > RATIO and math.log(ratio) > SIGMAS * error else None), ratio


def _additive_fit(scales: torch.Tensor) -> tuple[float, int, int] | None:
    """F of the model row + column on log2 of the positive scales, and its two degrees of freedom.

    Zeros (blocks of nothing but zeros, padding) have no logarithm and are left out. With holes the means of rows and of
    columns are not orthogonal; columns are then fitted to what the rows leave, near enough for a factor of two.
    """
    used = scales > 0
    count = int(used.sum())
    model = int(used.any(1).sum()) + int(used.any(0).sum()) - 2
    rest = count - model - 1
    if model < 1 or rest < 1:
        return None
    value = torch.where(used, scales, 1.0).log2().to(torch.float64)
    value = torch.where(used, value - value.sum() / count, 0.0)
    total = float(value.square().sum())
    for dim in (1, 0):
        mean = value.sum(dim, keepdim=True) / used.sum(dim, keepdim=True).clamp(min=1)
        value = torch.where(used, value - mean, 0.0)
    residual = float(value.square().sum())
    if total <= 0:
        return None
    # a perfect fit would divide by zero; e4m3 keeps 4 bits, so nothing below its own rounding means anything
    residual = max(residual, 1e-4 * count)
    return max((total - residual) / model, 1e-12) / (residual / rest), model, rest
