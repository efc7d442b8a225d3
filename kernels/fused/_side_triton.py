"""Triton kernels of a low-rank update: in place, or of SwiGLU's input on the way. Tiles of results, small products.

Both take the product over the rank in the same steps, so that they round alike.
"""

import torch
import triton
import triton.language as tl

from . import _launch
from ._swiglu_triton import silu
from ._words_triton import ASM, NO_FUSION

# Chosen by registers alone (no spills on any target), not measured on hardware.
TILE_ROWS, TILE_COLUMNS, WARPS = 128, 64, 8
ADD_ROWS, ADD_COLUMNS, ADD_WARPS = 64, 128, 8


@triton.jit
def _factor(row, start, D: tl.constexpr):
    """Columns ``start`` to ``start + D`` of a factor's rows, ``[rows, D]``."""
    return tl.load(row + (start + tl.arange(0, D))[None, :])


@triton.jit
def _updated(y, total, alpha):
    """fp32 of bf16(y + alpha * total), a tile."""
    return (y.to(tl.float32) + alpha * total).to(tl.bfloat16).to(tl.float32)


@triton.jit
def swiglu_side_tiles(
    gate_up_ptr, hidden_ptr, low_rank_ptr, z_ptr, M, F, rank, alpha,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``bf16(bf16(silu(gate')) * up')``; every pointer bf16, rows contiguous, rank a multiple of D."""
    rows = tl.program_id(1) * R + tl.arange(0, R)
    columns = tl.program_id(0) * W + tl.arange(0, W)
    inside = (rows < M)[:, None] & (columns < F)[None, :]
    # Factors outside are read from the last row inside, so that the products need no masks. The tiles of y and z keep
    # plain columns: clamped ones would hide from the compiler that they lie beside one another.
    row = rows.to(tl.int64)[:, None]
    column = tl.minimum(columns, F - 1).to(tl.int64)
    hidden_row = hidden_ptr + tl.minimum(row, M - 1) * rank
    y_at = gate_up_ptr + row * (2 * F) + columns[None, :]
    gate_row = low_rank_ptr + column[:, None] * rank
    up_row = gate_row + F.to(tl.int64) * rank
    # Read before the products, which hide the wait for it.
    gate_before = tl.load(y_at, mask=inside, other=0.0)
    up_before = tl.load(y_at + F, mask=inside, other=0.0)
    gate_total, up_total = tl.zeros([R, W], tl.float32), tl.zeros([R, W], tl.float32)
    for start in range(0, rank, D):
        a = _factor(hidden_row, start, D)
        gate_total = tl.dot(a, tl.trans(_factor(gate_row, start, D)), gate_total)
        up_total = tl.dot(a, tl.trans(_factor(up_row, start, D)), up_total)
    gate = _updated(gate_before, gate_total, alpha)
    up = _updated(up_before, up_total, alpha)
    product = silu(gate, ASM).to(tl.bfloat16).to(tl.float32) * up
    tl.store(z_ptr + row * F + columns[None, :], product.to(tl.bfloat16), mask=inside)


@triton.jit
def low_rank_add_tiles(
    y_ptr, y_stride, hidden_ptr, hidden_stride, low_rank_ptr, low_rank_stride, M, N, rank, alpha,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``y = bf16(y + alpha * hidden @ low_rank.T)``; every pointer bf16, rank a multiple of D."""
    rows = tl.program_id(1) * R + tl.arange(0, R)
    columns = tl.program_id(0) * W + tl.arange(0, W)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    row = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    column = tl.minimum(columns, N - 1).to(tl.int64)[:, None]
    y_at = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    hidden_row, low_rank_row = hidden_ptr + row * hidden_stride, low_rank_ptr + column * low_rank_stride
    before = tl.load(y_at, mask=inside, other=0.0)
    total = tl.zeros([R, W], tl.float32)
    for start in range(0, rank, D):
        total = tl.dot(_factor(hidden_row, start, D), tl.trans(_factor(low_rank_row, start, D)), total)
    tl.store(y_at, _updated(before, total, alpha).to(tl.bfloat16), mask=inside)


def low_rank_add_(y, hidden, low_rank, alpha):
    """The ``triton`` implementation of ``low_rank_add_``."""
    rows, columns = y.shape
    rank = hidden.shape[1]
    grid = (triton.cdiv(columns, ADD_COLUMNS), triton.cdiv(rows, ADD_ROWS))
    with _launch.on(y.device):
        low_rank_add_tiles[grid](
            y, y.stride(0), hidden, hidden.stride(0), low_rank, low_rank.stride(0), rows, columns, rank, float(alpha),
            R=ADD_ROWS, W=ADD_COLUMNS, D=depth_of(rank), num_warps=ADD_WARPS, **NO_FUSION,
        )  # fmt: skip
    return y


def depth_of(rank: int) -> int:
    """Columns of the factors that one step of the product takes."""
    return 32 if rank % 32 == 0 else 16


def swiglu_side(gate_up, hidden, low_rank, alpha):
    """The ``triton`` implementation of ``swiglu_side``."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    z = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    grid = (triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS))
    rank = hidden.shape[1]
    with _launch.on(gate_up.device):
        swiglu_side_tiles[grid](
            gate_up, hidden, low_rank, z, rows, columns, rank, float(alpha),
            R=TILE_ROWS, W=TILE_COLUMNS, D=depth_of(rank), ASM=ASM, num_warps=WARPS, **NO_FUSION,
        )  # fmt: skip
    return z
