"""Triton kernels of a low-rank update: in place, or of SwiGLU's input on the way. Tiles of results, small products.

Both take the product over the rank in the same steps, so that they round alike.
"""

import torch
import triton
import triton.language as tl

from . import _launch
from ._swiglu_triton import silu
from ._words_triton import ASM, NO_FUSION

# The one choice that was timed, on one H200 (research/records/h200_lora.json); others were only compiled.
TILE_ROWS, TILE_COLUMNS, WARPS = 64, 64, 8
ADD_ROWS, ADD_COLUMNS, ADD_WARPS = 64, 128, 8


@triton.jit
def _updated(y_at, hidden_row, low_rank_row, inside, rank, alpha, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """fp32 of bf16(y + alpha * hidden @ low_rank.T), a tile."""
    total = tl.zeros([R, W], tl.float32)
    depth = tl.arange(0, D)
    for start in range(0, rank, D):
        a = tl.load(hidden_row + (start + depth)[None, :])
        b = tl.load(low_rank_row + (start + depth)[None, :])
        total = tl.dot(a, tl.trans(b), total)
    y = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    return (y + alpha * total).to(tl.bfloat16).to(tl.float32)


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
    gate = _updated(y_at, hidden_row, gate_row, inside, rank, alpha, R, W, D)
    up = _updated(y_at + F, hidden_row, gate_row + F.to(tl.int64) * rank, inside, rank, alpha, R, W, D)
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
    updated = _updated(
        y_at, hidden_ptr + row * hidden_stride, low_rank_ptr + column * low_rank_stride, inside, rank, alpha, R, W, D
    )
    tl.store(y_at, updated.to(tl.bfloat16), mask=inside)


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
