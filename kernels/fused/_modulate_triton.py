"""Triton kernels of norm + modulation: bf16 out, or NVFP4 with a dynamic or static scale.

Three launches for NVFP4 with a dynamic scale, none of which waits for the host::

    prepare    modulation table -> bf16 words of 1 + scale and of shift; row index of every token; amax = 0
    measure    one program a few rows: sum of squares in ATen's order -> rstd; largest magnitude of the result
    quantise   tiles of rows x columns: x again, rstd, table -> codes and swizzled scales

`measure` reads a row twice, the second time from L1. With a static scale its second half is dropped.

ATen's order of summation (torch's vectorised RMSNorm kernel, 32 x 4 threads a row): thread i adds the squares of
elements 4i..4i+3 by fma, then of 512 + 4i.., and so on; the 32 partial sums of a warp are halved by shuffle-down, the 4
of the warps through shared memory. Written out here as 128 accumulators and seven halvings. Whether the torch in use
still does it in this order is for the certification to find out, not for this file to know.
"""

import torch
import triton
import triton.language as tl

from . import _launch
from ._launch import Tile
from ._words_triton import (
    ASM,
    NO_FUSION,
    add2,
    amax_bits,
    decode_scale_of,
    high,
    larger,
    low,
    mul2,
    pad_codes,
    pair,
    quantise,
    quantise_halves,
    store_codes,
    store_scales,
)

# Found on one H200 (research/records); what they mean is in the kernels' docstrings.
MEASURE = Tile(rows=1, words=512, warps=2)
AMAX = Tile(rows=32, words=64, warps=2)
QUANTISE = Tile(rows=32, words=32, warps=1)
MODULATE = Tile(rows=1, words=1024, warps=4)
ROW_QUANTISE = Tile(rows=1, words=512, warps=2)
ROW_MODULATE = Tile(rows=1, words=1024, warps=4)


@triton.jit
def _mark(index_ptr, position, start, stop, row):
    tl.store(index_ptr + position, tl.zeros_like(position) + row, mask=(position >= start) & (position < stop))


# A segment's borders and row are data: specialising on them would compile the kernel anew for every layout of a prompt.
@triton.jit(do_not_specialize=["T", "S", "TABLES", *(f"{letter}{at}" for at in range(8) for letter in "abr")])
def prepare(
    scale_ptr, shift_ptr, scale_stride, shift_stride, factor_ptr, offset_ptr, index_ptr, amax_ptr, T, K, S, TABLES,
    a0, b0, r0, a1, b1, r1, a2, b2, r2, a3, b3, r3, a4, b4, r4, a5, b5, r5, a6, b6, r6, a7, b7, r7,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Cast the table and write the row index of up to eight segments.

    Programs below TABLES cast: row T of the table is the identity, for tokens outside every segment. The others index.
    """
    program = tl.program_id(0)
    if program < TABLES:
        strips = tl.cdiv(K // 2, BLOCK)
        row = program // strips
        column = (program % strips) * BLOCK + tl.arange(0, BLOCK)
        inside = column < K // 2
        if row < T:
            scale_row = scale_ptr + row.to(tl.int64) * scale_stride + column * 2
            shift_row = shift_ptr + row.to(tl.int64) * shift_stride + column * 2
            even = tl.load(scale_row, mask=inside, other=0.0).to(tl.float32)
            odd = tl.load(scale_row + 1, mask=inside, other=0.0).to(tl.float32)
            rounded = pair(even, odd, ASM)  # the row is cast first, then 1 + row rounds again
            factor = pair(low(rounded) + 1.0, high(rounded) + 1.0, ASM)
            even = tl.load(shift_row, mask=inside, other=0.0).to(tl.float32)
            odd = tl.load(shift_row + 1, mask=inside, other=0.0).to(tl.float32)
            offset = pair(even, odd, ASM)
        else:
            factor = tl.full([BLOCK], 0x3F803F80, tl.int32)  # 1.0
            offset = tl.full([BLOCK], -0x7FFF8000, tl.int32)  # -0.0, which changes nothing when added
        tl.store(factor_ptr + row.to(tl.int64) * (K // 2) + column, factor, mask=inside)
        tl.store(offset_ptr + row.to(tl.int64) * (K // 2) + column, offset, mask=inside)
        if program == 0:
            tl.store(amax_ptr, 0)
    else:
        position = (program - TABLES) * BLOCK + tl.arange(0, BLOCK)
        if FIRST:
            tl.store(index_ptr + position, tl.zeros_like(position) + T, mask=position < S)
            tl.debug_barrier()
        _mark(index_ptr, position, a0, b0, r0)
        _mark(index_ptr, position, a1, b1, r1)
        _mark(index_ptr, position, a2, b2, r2)
        _mark(index_ptr, position, a3, b3, r3)
        _mark(index_ptr, position, a4, b4, r4)
        _mark(index_ptr, position, a5, b5, r5)
        _mark(index_ptr, position, a6, b6, r6)
        _mark(index_ptr, position, a7, b7, r7)


@triton.jit
def _normed(word, weight, rstd, ASM: tl.constexpr):
    """bf16(weight * (rstd * x)) of both halves."""
    return pair(low(weight) * (rstd * low(word)), high(weight) * (rstd * high(word)), ASM)


@triton.jit
def _rstd(x_row, eps, HALF: tl.constexpr, R: tl.constexpr, KEEP: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of R rows [R] in ATen's order; `x_row` int32 pointers [R] to the rows' words.

    KEEP is the cache's policy for them: "evict_last" where that pays, else "".
    """
    thread = tl.arange(0, 128)
    pair_of = tl.arange(0, 2)
    total = tl.zeros([R, 128], tl.float32)
    for start in tl.static_range(0, HALF, 256):
        word = start + thread[:, None] * 2 + pair_of[None, :]
        at = x_row[:, None, None] + word[None, :, :]
        if start + 256 <= HALF:  # noqa: SIM108 - a mask that is not needed costs
            words = tl.load(at, eviction_policy=KEEP)
        else:
            words = tl.load(at, mask=(word < HALF)[None, :, :], other=0, eviction_policy=KEEP)
        first, second = tl.split(words)
        total = tl.fma(low(first), low(first), total)
        total = tl.fma(high(first), high(first), total)
        total = tl.fma(low(second), low(second), total)
        total = tl.fma(high(second), high(second), total)
    # Lanes of a warp: i += i + 16, then 8, 4, 2, 1. Each step adds two numbers, so its own order does not matter.
    total = tl.sum(tl.reshape(total, [R, 4, 2, 16]), axis=2)
    total = tl.sum(tl.reshape(total, [R, 4, 2, 8]), axis=2)
    total = tl.sum(tl.reshape(total, [R, 4, 2, 4]), axis=2)
    total = tl.sum(tl.reshape(total, [R, 4, 2, 2]), axis=2)
    total = tl.sum(tl.reshape(total, [R, 4, 2]), axis=2)
    # The warps: i += i + 2, then 1.
    total = tl.sum(tl.reshape(total, [R, 2, 2]), axis=1)
    squares = tl.sum(total, axis=1)
    return tl.rsqrt(tl.div_rn(squares, tl.zeros_like(squares) + 2 * HALF) + eps)


@triton.jit
def _chunk(
    x_row, rstd, weight_ptr, factor_at, offset_at, start,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Modulated words [R, BLOCK] of a chunk of columns; `factor_at` and `offset_at` are pointers [1 or R, 1]."""
    column = start + tl.arange(0, BLOCK)
    if start + BLOCK <= HALF:
        word = tl.load(x_row[:, None] + column[None, :], eviction_policy=KEEP)
        weight = tl.load(weight_ptr + column)[None, :]
        factor = tl.load(factor_at + column[None, :])
        offset = tl.load(offset_at + column[None, :])
    else:
        within = (column < HALF)[None, :]
        word = tl.load(x_row[:, None] + column[None, :], mask=within, other=0, eviction_policy=KEEP)
        weight = tl.load(weight_ptr + column, mask=column < HALF, other=0)[None, :]
        factor = tl.load(factor_at + column[None, :], mask=within, other=0)
        offset = tl.load(offset_at + column[None, :], mask=within, other=0)
    return add2(mul2(_normed(word, weight, rstd[:, None], ASM), factor, ASM), offset, ASM)


@triton.jit
def _largest_of_rows(
    x_row, rstd, weight_ptr, factor_at, offset_at,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Largest magnitude [R] of each modulated row, as bf16 bits.

    The running maximum starts with data, not with zeros: with a constant zero as the first operand of
    ``max.NaN.xorsign.abs.bf16x2`` values of the first chunk were lost on an H200 (Triton 3.6). Why was not found out.
    """
    whole: tl.constexpr = HALF // BLOCK * BLOCK
    if TAIL > 0:
        tail = _chunk(x_row, rstd, weight_ptr, factor_at, offset_at, whole, HALF, TAIL, ASM, "")
        largest = amax_bits(tail, 1, ASM)
    if whole > 0:
        best = _chunk(x_row, rstd, weight_ptr, factor_at, offset_at, 0, HALF, BLOCK, ASM, "")
        for start in tl.static_range(BLOCK, whole, BLOCK):
            h = _chunk(x_row, rstd, weight_ptr, factor_at, offset_at, start, HALF, BLOCK, ASM, "")
            best = larger(best, h, ASM)
        of_whole = amax_bits(best, 1, ASM)
        largest = tl.maximum(largest, of_whole) if TAIL > 0 else of_whole
    return largest


@triton.jit
def measure(
    x_ptr, x_stride, weight_ptr, factor_ptr, offset_ptr, index_ptr, rstd_ptr, amax_ptr, M, eps,
    AMAX: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """rstd of each row, and the largest magnitude of the modulated rows by atomic maximum over their bf16 bits."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    read = tl.minimum(rows, M - 1)  # rows past the end read the last one again: no mask on any load
    x_row = x_ptr + read.to(tl.int64) * x_stride
    rstd = _rstd(x_row, eps, HALF, R, "")
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    if AMAX:
        index = tl.load(index_ptr + read)
        least = tl.min(index, axis=0)
        if least == tl.max(index, axis=0):  # the rows share a row of the table: load it once
            base = tl.full([1, 1], 0, tl.int64) + least.to(tl.int64) * HALF
            of_rows = _largest_of_rows(
                x_row, rstd, weight_ptr, factor_ptr + base, offset_ptr + base, HALF, BLOCK, TAIL, ASM
            )
        else:
            bases = index.to(tl.int64)[:, None] * HALF
            of_rows = _largest_of_rows(
                x_row, rstd, weight_ptr, factor_ptr + bases, offset_ptr + bases, HALF, BLOCK, TAIL, ASM
            )
        largest = tl.max(of_rows, axis=0)
        # Most programs find that the maximum so far is theirs to leave alone; the atomic is for the few others.
        if largest > tl.load(amax_ptr, volatile=True):
            tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def row_modulate(
    x_ptr, x_stride, weight_ptr, factor_ptr, offset_ptr, index_ptr, out_ptr, M, eps,
    HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Norm and modulation in one reading of x (the second one comes from L1), bf16 out."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    read = tl.minimum(rows, M - 1)  # rows past the end read the last one again: no mask on any load
    x_row = x_ptr + read.to(tl.int64) * x_stride
    out_row = out_ptr + rows.to(tl.int64) * HALF
    rstd = _rstd(x_row, eps, HALF, R, "evict_last")
    table = tl.load(index_ptr + read).to(tl.int64)[:, None] * HALF
    factor_at, offset_at = factor_ptr + table, offset_ptr + table
    whole: tl.constexpr = HALF // W * W
    for start in tl.static_range(0, whole, W):
        h = _chunk(x_row, rstd, weight_ptr, factor_at, offset_at, start, HALF, W, ASM, "evict_first")
        tl.store(out_row[:, None] + (start + tl.arange(0, W))[None, :], h, mask=(rows < M)[:, None])
    if TAIL > 0:
        column = whole + tl.arange(0, TAIL)
        last = _chunk(x_row, rstd, weight_ptr, factor_at, offset_at, whole, HALF, TAIL, ASM, "evict_first")
        tl.store(out_row[:, None] + column[None, :], last, mask=(rows < M)[:, None] & (column < HALF)[None, :])


@triton.jit
def _half_blocks(x_row, rstd, weight_ptr, factor_at, offset_at, column, EVEN: tl.constexpr, HALF, ASM):
    """Modulated words [R, BLOCKS, 4] at the columns [BLOCKS, 4].

    Every row asks for the weight by itself: a warp has a row to itself, and shared loads would change hands between
    warps through shared memory.
    """
    column = column[None, :, :] + tl.zeros_like(rstd).to(tl.int32)[:, None, None]
    if EVEN:
        word = tl.load(x_row[:, None, None] + column)
        weight = tl.load(weight_ptr + column)
        factor = tl.load(factor_at + column)
        offset = tl.load(offset_at + column)
    else:
        within = column < HALF
        word = tl.load(x_row[:, None, None] + column, mask=within, other=0)
        weight = tl.load(weight_ptr + column, mask=within, other=0)
        factor = tl.load(factor_at + column, mask=within, other=0)
        offset = tl.load(offset_at + column, mask=within, other=0)
    return add2(mul2(_normed(word, weight, rstd[:, None, None], ASM), factor, ASM), offset, ASM)


@triton.jit
def _quantise_chunk(
    x_row, rstd, weight_ptr, factor_at, offset_at, g, rows, codes_ptr, scales_ptr, M, start,
    HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    even: tl.constexpr = start + W <= HALF
    block = start // 8 + tl.arange(0, W // 8)
    column = block[:, None] * 8 + tl.arange(0, 4)[None, :]
    first = _half_blocks(x_row, rstd, weight_ptr, factor_at, offset_at, column, even, HALF, ASM)
    second = _half_blocks(x_row, rstd, weight_ptr, factor_at, offset_at, column + 4, even, HALF, ASM)
    codes, more_codes, bits = quantise_halves(first, second, g, ASM, FP4, R, W // 8)
    at = codes_ptr + rows.to(tl.int64)[:, None, None] * HALF + column[None, :, :]
    inside = (rows < M)[:, None, None] if even else (rows < M)[:, None, None] & (column < HALF)[None, :, :]
    tl.store(at, codes, mask=inside)
    tl.store(at + 4, more_codes, mask=inside)
    store_scales(scales_ptr, rows, block, bits, M, HALF // 8)


@triton.jit
def _quantise_rest(
    x_row, rstd, weight_ptr, factor_at, offset_at, g, rows, codes_ptr, scales_ptr, M,
    HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """The part of WIDTH words of what HALF leaves over W, if its binary digits hold it."""
    rest: tl.constexpr = (HALF % W + 31) // 32 * 32
    if WIDTH >= 32 and rest & WIDTH:
        start: tl.constexpr = HALF // W * W + rest // (2 * WIDTH) * (2 * WIDTH)
        h = _chunk(
            x_row, rstd, weight_ptr, tl.reshape(factor_at, [R, 1]), tl.reshape(offset_at, [R, 1]), start, HALF, WIDTH,
            ASM, "",
        )  # fmt: skip
        codes, bits = quantise(h, g, ASM, FP4, R, WIDTH)
        column = start + tl.arange(0, WIDTH)
        inside = (rows < M)[:, None] & (column < HALF)[None, :]
        tl.store(codes_ptr + rows.to(tl.int64)[:, None] * HALF + column[None, :], codes, mask=inside)
        store_scales(scales_ptr, rows, start // 8 + tl.arange(0, WIDTH // 8), bits, M, HALF // 8)


@triton.jit
def row_quantise(
    x_ptr, x_stride, weight_ptr, factor_ptr, offset_ptr, index_ptr, decode_ptr, codes_ptr, scales_ptr, M, eps,
    HALF: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Norm, modulation and codes by a static scale in one reading of x (the second one comes from L1)."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    read = tl.minimum(rows, M - 1)  # rows past the end read the last one again: no mask on any load
    x_row = x_ptr + read.to(tl.int64) * x_stride
    rstd = _rstd(x_row, eps, HALF, R, "")
    table = tl.load(index_ptr + read).to(tl.int64)[:, None, None] * HALF
    g = tl.load(decode_ptr)
    whole: tl.constexpr = HALF // W * W
    for start in tl.static_range(0, whole, W):
        _quantise_chunk(
            x_row, rstd, weight_ptr, factor_ptr + table, offset_ptr + table, g, rows, codes_ptr, scales_ptr, M, start,
            HALF, R, W, ASM, FP4,
        )  # fmt: skip
    # The rest of a row in powers of two, the last one at least 32 words, so that few lanes compute for nothing.
    for digit in tl.static_range(1, 6):
        _quantise_rest(
            x_row, rstd, weight_ptr, factor_ptr + table, offset_ptr + table, g, rows, codes_ptr, scales_ptr, M,
            HALF, R, W, W >> digit, ASM, FP4,
        )  # fmt: skip
    if tl.max(rows, axis=0) >= M:
        for first in range(0, HALF, W):
            pad_codes(codes_ptr, rows, first + tl.arange(0, W), M, HALF)


@triton.jit
def amax_tiles(
    x_ptr, x_stride, factor_ptr, offset_ptr, index_ptr, amax_ptr, M, K,
    R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of modulated rows that are normalised already."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    index = tl.load(index_ptr + rows, mask=rows < M, other=-1)
    inside = (rows < M)[:, None] & (column < K // 2)[None, :]
    word = tl.load(x_ptr + rows[:, None] * x_stride + column[None, :], mask=inside, other=0)
    least = tl.min(tl.where(index < 0, 2147483647, index), axis=0)
    if least == tl.max(index, axis=0):
        base = least.to(tl.int64) * (K // 2)
        factor = tl.load(factor_ptr + base + column, mask=column < K // 2, other=0)
        offset = tl.load(offset_ptr + base + column, mask=column < K // 2, other=0)
        h = add2(mul2(word, factor[None, :], ASM), offset[None, :], ASM)
        largest = tl.max(amax_bits(tl.where(inside, h, 0), 1, ASM), axis=0)
    else:
        bases = tl.maximum(index, 0).to(tl.int64)[:, None] * (K // 2)
        factors = tl.load(factor_ptr + bases + column[None, :], mask=inside, other=0)
        offsets = tl.load(offset_ptr + bases + column[None, :], mask=inside, other=0)
        h = add2(mul2(word, factors, ASM), offsets, ASM)
        largest = tl.max(amax_bits(h, 1, ASM), axis=0)
    if largest > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def _modulated(word, weight, rstd, factor, offset, NORM: tl.constexpr, ASM: tl.constexpr):
    if NORM:
        word = _normed(word, weight, rstd, ASM)
    return add2(mul2(word, factor, ASM), offset, ASM)


@triton.jit
def modulate_quantise(
    x_ptr, x_stride, weight_ptr, rstd_ptr, factor_ptr, offset_ptr, index_ptr, amax_ptr, decode_ptr,
    codes_ptr, scales_ptr, out_ptr, M, K,
    NORM: tl.constexpr, STATIC: tl.constexpr, NVFP4: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Tiles of R rows x W words: x (and rstd) -> modulated -> codes and scales, or bf16 words when NVFP4 is False."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * W + tl.arange(0, W)
    half = K // 2
    inside_rows = rows < M
    inside = inside_rows[:, None] if EVEN else inside_rows[:, None] & (column < half)[None, :]
    word = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0)
    index = tl.load(index_ptr + rows, mask=inside_rows, other=-1)
    if NORM:
        rstd = tl.load(rstd_ptr + rows, mask=inside_rows, other=0.0)[:, None]
        weight = tl.load(weight_ptr + column, mask=column < half, other=0)[None, :]
    else:
        rstd = 0.0
        weight = 0
    if NVFP4:
        if STATIC:
            g = tl.load(decode_ptr)
        else:
            g = decode_scale_of(tl.load(amax_ptr))
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(decode_ptr, g)
    least = tl.min(tl.where(index < 0, 2147483647, index), axis=0)
    if least == tl.max(index, axis=0):
        base = least.to(tl.int64) * half
        factor = tl.load(factor_ptr + base + column, mask=column < half, other=0)[None, :]
        offset = tl.load(offset_ptr + base + column, mask=column < half, other=0)[None, :]
        h = _modulated(word, weight, rstd, factor, offset, NORM, ASM)
        if NVFP4:
            _emit(h, g, rows, column, codes_ptr, scales_ptr, M, K, EVEN, R, W, ASM, FP4)
        else:
            tl.store(out_ptr + rows.to(tl.int64)[:, None] * half + column[None, :], h, mask=inside)
    else:
        bases = tl.maximum(index, 0).to(tl.int64)[:, None] * half
        factors = tl.load(factor_ptr + bases + column[None, :], mask=inside, other=0)
        offsets = tl.load(offset_ptr + bases + column[None, :], mask=inside, other=0)
        h = _modulated(word, weight, rstd, factors, offsets, NORM, ASM)
        if NVFP4:
            _emit(h, g, rows, column, codes_ptr, scales_ptr, M, K, EVEN, R, W, ASM, FP4)
        else:
            tl.store(out_ptr + rows.to(tl.int64)[:, None] * half + column[None, :], h, mask=inside)


@triton.jit
def _emit(
    h, g, rows, column, codes_ptr, scales_ptr, M, K,
    EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    codes, bits = quantise(h, g, ASM, FP4, R, W)
    store_codes(codes_ptr, rows, column, codes, M, K // 2, EVEN)
    block = tl.program_id(1) * (W // 8) + tl.arange(0, W // 8)
    store_scales(scales_ptr, rows, block, bits, M, K // 16)


# ---------------------------------------------------------------- launches


def tail_of(half: int, block: int) -> int:
    """Words of the last chunk of a row that `block` does not divide: a power of two.

    At least 32, which are the four FP4 blocks of a scale tile: padding blocks are written with the chunk.
    """
    rest = half % block
    return max(32, triton.next_power_of_2(rest)) if rest else 0


def table_of(x, scale, shift, segments, columns_per_program=1024):
    """Run `prepare`: bf16 words of the table, the row index of every token, and a zeroed maximum."""
    rows, columns = x.shape
    half = columns // 2
    table_rows = scale.shape[0]
    buffers = torch.empty(2, table_rows + 1, half, dtype=torch.int32, device=x.device)
    index = torch.empty(rows, dtype=torch.int32, device=x.device)
    amax = torch.empty(1, dtype=torch.int32, device=x.device)
    scale, shift = (t if t.stride(-1) == 1 else t.contiguous() for t in (scale, shift))
    groups, per_token = _launch.segment_groups(segments)
    casts = (table_rows + 1) * triton.cdiv(half, columns_per_program)
    marks = triton.cdiv(rows, columns_per_program)
    for number, group in enumerate(groups):
        group = [value % table_rows if at % 3 == 2 else value for at, value in enumerate(group)]
        tables = casts if number == 0 else 0
        prepare[(tables + marks,)](
            scale, shift, scale.stride(0), shift.stride(0), buffers[0], buffers[1], index, amax,
            table_rows, columns, rows, tables, *group,
            FIRST=number == 0, BLOCK=columns_per_program, ASM=ASM, num_warps=4, **NO_FUSION,
        )  # fmt: skip
    for start, stop, row in per_token:
        index[start:stop].copy_(row.expand(stop - start))
    return buffers[0], buffers[1], index, amax


def nvfp4_rows(x, weight, eps, scale, shift, segments, decode_scale, norm):
    """The ``triton`` implementation of ``norm_modulate_nvfp4``."""
    with _launch.on(x.device):
        return _run(x, weight, eps, scale, shift, segments, decode_scale, norm, to_nvfp4=True)


def bf16_rows(x, weight, eps, scale, shift, segments, norm):
    """The ``triton`` implementation of ``norm_modulate``."""
    with _launch.on(x.device):
        return _run(x, weight, eps, scale, shift, segments, None, norm, to_nvfp4=False)


def _run(x, weight, eps, scale, shift, segments, decode_scale, norm, to_nvfp4):
    rows, columns = x.shape
    half = columns // 2
    factor, offset, index, amax = table_of(x, scale, shift, segments)
    static = decode_scale is not None
    fused_norm = norm == "fused"
    if not fused_norm:
        x = torch.nn.functional.rms_norm(x, (columns,), weight, eps)
    source, weight = _launch.words(x), _launch.words(weight[None])[0]
    stride = source.stride(0)
    rstd = torch.empty(rows if fused_norm else 1, dtype=torch.float32, device=x.device)
    if fused_norm and not to_nvfp4:
        out, tile = torch.empty_like(x, memory_format=torch.contiguous_format), ROW_MODULATE
        row_modulate[(triton.cdiv(rows, tile.rows),)](
            source, stride, weight, factor, offset, index, _launch.words(out), rows, eps,
            HALF=half, R=tile.rows, W=tile.words, TAIL=tail_of(half, tile.words), ASM=ASM,
            num_warps=tile.warps, **NO_FUSION,
        )  # fmt: skip
        return out
    if fused_norm and static:
        codes, scales, decode_scale = _launch.outputs(rows, columns, decode_scale, x.device)
        tile = ROW_QUANTISE
        row_quantise[(triton.cdiv(triton.cdiv(rows, 128) * 128, tile.rows),)](
            source, stride, weight, factor, offset, index, decode_scale, codes, scales, rows, eps,
            HALF=half, R=tile.rows, W=tile.words, ASM=ASM,
            FP4=ASM and _launch.fp4_of(x.device), num_warps=tile.warps, **NO_FUSION,
        )  # fmt: skip
        return _launch.result(codes, scales, decode_scale, (rows, columns))
    if fused_norm:
        measure[(triton.cdiv(rows, MEASURE.rows),)](
            source, stride, weight, factor, offset, index, rstd, amax, rows, eps,
            AMAX=True, HALF=half, R=MEASURE.rows, BLOCK=MEASURE.words, TAIL=tail_of(half, MEASURE.words), ASM=ASM,
            num_warps=MEASURE.warps, **NO_FUSION,
        )  # fmt: skip
    elif to_nvfp4 and not static:
        grid = (triton.cdiv(rows, AMAX.rows), triton.cdiv(half, AMAX.words))
        amax_tiles[grid](
            source, stride, factor, offset, index, amax, rows, columns,
            R=AMAX.rows, W=AMAX.words, ASM=ASM, num_warps=AMAX.warps, **NO_FUSION,
        )  # fmt: skip
    if to_nvfp4:
        codes, scales, decode_scale = _launch.outputs(rows, columns, decode_scale, x.device)
        out, covered = codes, triton.cdiv(rows, 128) * 128
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        codes = scales = decode_scale = out
        covered = rows
    tile = QUANTISE if to_nvfp4 else MODULATE
    fp4 = to_nvfp4 and ASM and _launch.fp4_of(x.device)
    modulate_quantise[(triton.cdiv(covered, tile.rows), triton.cdiv(half, tile.words))](
        source, stride, weight, rstd, factor, offset, index, amax, decode_scale, codes, scales,
        out if to_nvfp4 else _launch.words(out), rows, columns,
        NORM=fused_norm, STATIC=static, NVFP4=to_nvfp4, EVEN=half % tile.words == 0,
        R=tile.rows, W=tile.words, ASM=ASM, FP4=fp4,
        num_warps=tile.warps, **NO_FUSION,
    )  # fmt: skip
    return _launch.result(codes, scales, decode_scale, (rows, columns)) if to_nvfp4 else out
