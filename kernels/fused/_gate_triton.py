"""Triton kernel of the gated residual: ``x[a:b] += gate[row] * y[a:b]`` for all segments in one launch."""

import triton
import triton.language as tl

from . import _launch
from ._launch import Tile
from ._modulate_triton import table_of
from ._words_triton import ASM, NO_FUSION, high, low, pair

TILE = Tile(rows=2, words=512, warps=4)  # found on one H200 (research/records)


@triton.jit
def _gated(x, gate, y, ASM: tl.constexpr):
    """bf16(x + gate * y): the product of two bf16 is exact in fp32, so the sum rounds once, then to bf16."""
    return pair(
        low(x) + low(gate) * low(y),
        high(x) + high(gate) * high(y),
        ASM,
    )


@triton.jit
def gate_tiles(
    x_ptr, x_stride, y_ptr, y_stride, gate_ptr, index_ptr, M, T,
    HALF: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of R rows x W words, in place. Rows with index T lie outside every segment and are not written."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    index = tl.load(index_ptr + rows, mask=rows < M, other=-1)
    gated = (index >= 0) & (index < T)
    inside = gated[:, None] if EVEN else gated[:, None] & (column < HALF)[None, :]
    at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + column[None, :]
    x = tl.load(at, mask=inside, other=0)
    y = tl.load(y_ptr + rows.to(tl.int64)[:, None] * y_stride + column[None, :], mask=inside, other=0)
    least = tl.min(tl.where(index < 0, 2147483647, index), axis=0)
    if least == tl.max(index, axis=0):
        gate = tl.load(gate_ptr + least.to(tl.int64) * HALF + column, mask=column < HALF, other=0)
        tl.store(at, _gated(x, gate[None, :], y, ASM), mask=inside)
    else:
        base = tl.maximum(index, 0).to(tl.int64)[:, None] * HALF
        gates = tl.load(gate_ptr + base + column[None, :], mask=inside, other=0)
        tl.store(at, _gated(x, gates, y, ASM), mask=inside)


def gate_residual_(x, gate, y, segments):
    """The ``triton`` implementation of ``gate_residual_``; x must be writable as words (see `accepts`)."""
    rows, columns = x.shape
    half = columns // 2
    with _launch.on(x.device):
        _, gates, index, _ = table_of(x, gate, gate, segments)
        source, out = _launch.words(y), _launch.words(x)
        gate_tiles[(triton.cdiv(rows, TILE.rows), triton.cdiv(half, TILE.words))](
            out, out.stride(0), source, source.stride(0), gates, index, rows, gate.shape[0],
            HALF=half, EVEN=half % TILE.words == 0, R=TILE.rows, W=TILE.words, ASM=ASM,
            num_warps=TILE.warps, **NO_FUSION,
        )  # fmt: skip
    return x
