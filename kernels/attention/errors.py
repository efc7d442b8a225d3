"""How far an attention result is from ``softmax(q k^T * scale) v`` computed in double precision.

relative       |out - ref| / |ref|, Frobenius norms
cosine         of the two as vectors
worst_channel  the largest relative error of one head's column, against the columns' mean norm
max_relative   largest absolute difference over the reference's largest value
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

SLICE_ROWS, SLICE_HEADS = 128, 4


@dataclass(frozen=True)
class Errors:
    """The four numbers; infinite, and a cosine of 0, where the result is not finite."""

    relative: float
    cosine: float
    worst_channel: float
    max_relative: float

    def as_dict(self) -> dict:
        """JSON-ready: numbers that are not finite become None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"relative error {self.relative:.2e}, cosine {self.cosine:.6f}, worst channel {self.worst_channel:.2e}"


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """``[B, H, Sq, D]`` in double precision, written out, one head at a time: memory for one ``[Sq, Sk]`` matrix.

    The inputs are read as they are; q and k that are wider than v are rounded to v's dtype first, as every backend
    computes in that.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            rows, keys = (tensor[batch, head].to(v.dtype).double() for tensor in (q, k))
            out[batch, head] = (rows @ keys.T).mul_(scale).softmax(-1) @ v[batch, head].double()
    return out


def compare(out: torch.Tensor, ref: torch.Tensor) -> Errors:
    """The errors of ``out`` ``[B, H, S, D]`` against ``ref`` of the same shape."""
    out, ref = out.double(), ref.double()
    if not bool(torch.isfinite(out).all()):
        return Errors(math.inf, 0.0, math.inf, math.inf)
    tiny = torch.finfo(torch.float64).tiny
    difference = out - ref
    norms = ref.square().sum(2).sqrt()
    channels = difference.square().sum(2).sqrt() / norms.mean().clamp(min=tiny)
    lengths = (out.norm() * ref.norm()).clamp(min=tiny)
    return Errors(
        float(difference.norm() / ref.norm().clamp(min=tiny)),
        float((out * ref).sum() / lengths),
        float(channels.max()),
        float(difference.abs().max() / ref.abs().max().clamp(min=tiny)),
    )


class Slice:
    """A few heads and query rows of a call, against all its keys: what a full-size result can be checked on."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None):
        self.heads = spread(q.shape[1], SLICE_HEADS, q.device)
        self.rows = spread(q.shape[2], SLICE_ROWS, q.device)
        heads, rows = self.heads, self.rows
        # The first batch entry stands for all of them.
        picked = q[:1, heads][:, :, rows], k[:1, heads], v[:1, heads]
        self.reference = reference(*picked, scale)

    def errors(self, out: torch.Tensor) -> Errors:
        """The errors of a full result on the slice."""
        return compare(out[:1, self.heads][:, :, self.rows], self.reference)


def spread(size: int, count: int, device: torch.device) -> torch.Tensor:
    """At most ``count`` indices from the first to the last."""
    return torch.linspace(0, size - 1, min(size, count), device=device).round().long()
