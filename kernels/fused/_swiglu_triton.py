"""Triton kernels of SwiGLU and of plain rows: bf16 out, or NVFP4 with a dynamic or static scale.

Dynamic: one pass for the largest magnitude, one that quantises; both read the input. Tiles of rows x words, so that a
warp reads whole 128-byte lines of gate and of up.
"""

import torch
import triton
import triton.language as tl

from . import _launch
from ._launch import Tile
from ._words_triton import (
    ASM,
    NO_FUSION,
    amax_bits,
    decode_scale_of,
    high,
    low,
    mul2,
    pair,
    quantise,
    store_codes,
    store_scales,
)

LOG2E = tl.constexpr(1.4426950408889634)


# Found on one H200 (research/records).
AMAX = Tile(rows=4, words=256, warps=2)
QUANTISE = Tile(rows=4, words=128, warps=1)
ELEMENTWISE = Tile(rows=1, words=1024, warps=4)


@triton.jit
def silu(x, ASM: tl.constexpr):
    """fp32 x / (1 + exp(-x)) with approximate exp2 and reciprocal.

    Rounded to bf16 it equals torch's silu for every bf16 x: all 65,536 are compared when the kernel is certified. The
    reciprocal keeps subnormal results, which gates from -89 to -87 need.
    """
    denominator = 1.0 + tl.exp2(x * -LOG2E)
    if ASM:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / denominator
    return x * inverse


@triton.jit
def _load(
    x_ptr, x_stride, head_stride, rows, column, inside,
    HALF: tl.constexpr, HEAD: tl.constexpr, SWIGLU: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile of result words: silu(gate) * up of ``[gate | up]``, or rows whose heads lie `head_stride` words apart."""
    row = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    if SWIGLU:
        gate = tl.load(row + column[None, :], mask=inside, other=0)
        up = tl.load(row + HALF + column[None, :], mask=inside, other=0)
        return mul2(pair(silu(low(gate), ASM), silu(high(gate), ASM), ASM), up, ASM)
    else:
        at = (column // HEAD).to(tl.int64) * head_stride + column % HEAD
        return tl.load(row + at[None, :], mask=inside, other=0)


@triton.jit
def amax_tiles(
    x_ptr, x_stride, head_stride, amax_ptr, M,
    HALF: tl.constexpr, HEAD: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the result by atomic maximum over its bf16 bits."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    inside = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (column < HALF)[None, :]
    h = _load(x_ptr, x_stride, head_stride, rows, column, inside, HALF, HEAD, SWIGLU, ASM)
    largest = tl.max(amax_bits(h, 1, ASM), axis=0)
    # Most programs find that the maximum so far is theirs to leave alone; the atomic is for the few others.
    if largest > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def quantise_tiles(
    x_ptr, x_stride, head_stride, amax_ptr, decode_ptr, codes_ptr, scales_ptr, M,
    HALF: tl.constexpr, HEAD: tl.constexpr, SWIGLU: tl.constexpr, STATIC: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Tiles of the result to codes and swizzled scales."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    inside = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (column < HALF)[None, :]
    if STATIC:
        g = tl.load(decode_ptr)
    else:
        g = decode_scale_of(tl.load(amax_ptr))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(decode_ptr, g)
    h = _load(x_ptr, x_stride, head_stride, rows, column, inside, HALF, HEAD, SWIGLU, ASM)
    codes, bits = quantise(h, g, ASM, FP4, R, W)
    store_codes(codes_ptr, rows, column, codes, M, HALF, EVEN)
    block = tl.program_id(1) * (W // 8) + tl.arange(0, W // 8)
    store_scales(scales_ptr, rows, block, bits, M, HALF // 8)


@triton.jit
def swiglu_tiles(
    x_ptr, x_stride, out_ptr, M,
    HALF: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``bf16(bf16(silu(gate)) * up)``."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    inside = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (column < HALF)[None, :]
    h = _load(x_ptr, x_stride, 0, rows, column, inside, HALF, HALF, True, ASM)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * HALF + column[None, :], h, mask=inside)


# ---------------------------------------------------------------- launches


def _to_nvfp4(source, row_stride, head_stride, head_words, rows, columns, decode_scale, swiglu):
    """Launch the one or two passes over int32 words; ``columns`` counts elements of the result."""
    device, half = source.device, columns // 2
    static = decode_scale is not None
    amax = torch.zeros(1, dtype=torch.int32, device=device)
    if not static:
        grid = (triton.cdiv(rows, AMAX.rows), triton.cdiv(half, AMAX.words))
        amax_tiles[grid](
            source, row_stride, head_stride, amax, rows, HALF=half, HEAD=head_words, SWIGLU=swiglu,
            EVEN=half % AMAX.words == 0, R=AMAX.rows, W=AMAX.words, ASM=ASM, num_warps=AMAX.warps, **NO_FUSION,
        )  # fmt: skip
    codes, scales, decode_scale = _launch.outputs(rows, columns, decode_scale, device)
    tile = QUANTISE
    grid = (triton.cdiv(triton.cdiv(rows, 128) * 128, tile.rows), triton.cdiv(half, tile.words))
    quantise_tiles[grid](
        source, row_stride, head_stride, amax, decode_scale, codes, scales, rows, HALF=half, HEAD=head_words,
        SWIGLU=swiglu, STATIC=static, EVEN=half % tile.words == 0, R=tile.rows, W=tile.words, ASM=ASM,
        FP4=ASM and _launch.fp4_of(device), num_warps=tile.warps, **NO_FUSION,
    )  # fmt: skip
    return _launch.result(codes, scales, decode_scale, (rows, columns))


def swiglu_nvfp4(gate_up, decode_scale):
    """The ``triton`` implementation of ``swiglu_nvfp4``."""
    source = _launch.words(gate_up)
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    with _launch.on(gate_up.device):
        return _to_nvfp4(source, source.stride(0), 0, columns // 2, rows, columns, decode_scale, swiglu=True)


def rows_nvfp4(x, decode_scale):
    """The ``triton`` implementation of ``rows_nvfp4``: ``[S, K]`` or ``[H, S, D]`` read where it lies."""
    if x.dim() == 3 and (x.stride(-1) != 1 or x.shape[-1] % 2 or any(step % 2 for step in x.stride()[:-1])):
        x = x.transpose(0, 1).reshape(x.shape[1], -1)
    with _launch.on(x.device):
        if x.dim() == 2:
            source = _launch.words(x)
            return _to_nvfp4(source, source.stride(0), 0, x.shape[1] // 2, *x.shape, decode_scale, swiglu=False)
        heads, rows, head_dim = x.shape
        source = x.view(torch.int32)
        return _to_nvfp4(  # fmt: skip
            source,
            source.stride(1),
            source.stride(0),
            head_dim // 2,
            rows,
            heads * head_dim,
            decode_scale,
            swiglu=False,
        )


def swiglu(gate_up):
    """The ``triton`` implementation of ``swiglu``."""
    source = _launch.words(gate_up)
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    half, tile = columns // 2, ELEMENTWISE
    with _launch.on(gate_up.device):
        swiglu_tiles[(triton.cdiv(rows, tile.rows), triton.cdiv(half, tile.words))](
            source, source.stride(0), out.view(torch.int32), rows,
            HALF=half, EVEN=half % tile.words == 0, R=tile.rows, W=tile.words, ASM=ASM,
            num_warps=tile.warps, **NO_FUSION,
        )  # fmt: skip
    return out
