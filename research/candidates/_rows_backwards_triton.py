"""Candidate for ``rows_nvfp4``: a larger tile, and the second pass walks backwards.

Two things differ from the shipped kernels, no byte of the result does:

* A program of two warps takes 4 rows x 512 words, where the shipped one of one warp takes 4 x 128. Per element that is
  13.75 instructions instead of 14.75 for sm_90a (static scale, counted in the SASS), and a thread has 40 registers
  instead of 62, so that more warps fit.
* With a dynamic scale x is read twice. The second pass takes the tiles in the opposite order, so that it begins with
  those that the first pass left in the L2 cache.

Tried before and dropped by the same count: a block's halves in one thread, 15.75 instructions an element. Not run on
hardware when this was written; tests/experiment.py runs it and enters the verdict.
"""

import torch
import triton
import triton.language as tl

from . import _launch
from ._launch import Tile
from ._swiglu_triton import AMAX, _load, amax_tiles
from ._words_triton import ASM, NO_FUSION, decode_scale_of, quantise, store_codes, store_scales
from .rows_nvfp4 import OP

TITLE = "rows_nvfp4: tiles of 4 x 512 words, second pass backwards"
HYPOTHESIS = "saves at least 5 % and 10 us of the shipped kernel at 38,016 rows, dynamic and static, with 0 other bytes"
TILE = Tile(rows=4, words=512, warps=2)

refuse = _launch.device_refusal
accepts = OP.implementations[0].accepts


@triton.jit
def backwards_tiles(
    x_ptr, x_stride, head_stride, amax_ptr, decode_ptr, codes_ptr, scales_ptr, M,
    HALF: tl.constexpr, HEAD: tl.constexpr, STATIC: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Tiles of R rows x W words to codes and swizzled scales; the last tile first where x was read before."""
    down, across = tl.program_id(0), tl.program_id(1)
    if STATIC:
        g = tl.load(decode_ptr)
    else:
        down, across = tl.num_programs(0) - 1 - down, tl.num_programs(1) - 1 - across
        g = decode_scale_of(tl.load(amax_ptr))
        if (down == 0) & (across == 0):
            tl.store(decode_ptr, g)
    rows = down * R + tl.arange(0, R)
    column = across * W + tl.arange(0, W)
    inside = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (column < HALF)[None, :]
    h = _load(x_ptr, x_stride, head_stride, rows, column, inside, HALF, HEAD, False, ASM)
    codes, bits = quantise(h, g, ASM, FP4, R, W)
    store_codes(codes_ptr, rows, column, codes, M, HALF, EVEN)
    store_scales(scales_ptr, rows, across * (W // 8) + tl.arange(0, W // 8), bits, M, HALF // 8)


def run(x, decode_scale):
    """The arguments of ``rows_nvfp4`` after validation: ``[S, K]`` or ``[H, S, D]`` read where it lies."""
    if x.dim() == 3 and (x.stride(-1) != 1 or x.shape[-1] % 2 or any(step % 2 for step in x.stride()[:-1])):
        x = x.transpose(0, 1).reshape(x.shape[1], -1)
    with _launch.on(x.device):
        if x.dim() == 2:
            source, (rows, columns) = _launch.words(x), x.shape
            row_stride, head_stride, head_words = source.stride(0), 0, columns // 2
        else:
            heads, rows, head_dim = x.shape
            source, columns = x.view(torch.int32), heads * head_dim
            row_stride, head_stride, head_words = source.stride(1), source.stride(0), head_dim // 2
        half, static = columns // 2, decode_scale is not None
        amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        if not static:
            amax_tiles[(triton.cdiv(rows, AMAX.rows), triton.cdiv(half, AMAX.words))](
                source, row_stride, head_stride, amax, rows, HALF=half, HEAD=head_words, SWIGLU=False,
                EVEN=half % AMAX.words == 0, R=AMAX.rows, W=AMAX.words, ASM=ASM, num_warps=AMAX.warps, **NO_FUSION,
            )  # fmt: skip
        codes, scales, decode_scale = _launch.outputs(rows, columns, decode_scale, x.device)
        backwards_tiles[(triton.cdiv(triton.cdiv(rows, 128) * 128, TILE.rows), triton.cdiv(half, TILE.words))](
            source, row_stride, head_stride, amax, decode_scale, codes, scales, rows, HALF=half, HEAD=head_words,
            STATIC=static, EVEN=half % TILE.words == 0, R=TILE.rows, W=TILE.words, ASM=ASM,
            FP4=ASM and _launch.fp4_of(x.device), num_warps=TILE.warps, **NO_FUSION,
        )  # fmt: skip
        return _launch.result(codes, scales, decode_scale, (rows, columns))
