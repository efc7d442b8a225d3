"""Device code that the Triton producers share: bf16 pairs in 32-bit words, and a word's way to an NVFP4 byte.

A row of bf16 is loaded as int32 words. Element 2i is the low half of word i and element 2i+1 the high half, so a word
holds exactly the two elements that share a byte of codes, and no shuffle is ever needed to pair them.

Arithmetic of comfy-kitchen's CUDA quantiser, step by step, is kept (see `quantise`): approximate reciprocals where it
has them, because g and x have 8 significant bits, ties are common, and one unit in the last place of a reciprocal moves
0.6 % of the codes.

What limits these kernels on Hopper is the integer pipe (64 lanes a clock and SM against 128 for fp32): there is no FP4
conversion before compute capability 10.0. Hence the rounding below, which leaves all but two instructions an element to
the fp32 pipe, and packed bf16 arithmetic wherever two elements fit into one instruction.

`ASM` is False in Triton's interpreter, which has no inline assembly: the same values are then made from plain
operations. `FP4` says that the target converts fp32 to e2m1 in hardware (100, 103, 110, 120, 121 and their families).
"""

import triton
import triton.language as tl
from triton import knobs

ASM = not knobs.runtime.interpret
# A fused multiply-add where the chain rounds twice would move bits.
NO_FUSION = {"enable_fp_fusion": False}

INV_6 = tl.constexpr(0.16666667163372039794921875)  # fp32(1/6)
INV_RANGE = tl.constexpr(0.0003720238164532929659)  # fp32(1/2688)
FLT_MAX = tl.constexpr(3.4028234663852885981e38)
TINY = tl.constexpr(1.1754943508222875e-38)  # 2**-126


@triton.jit
def low(word):
    """fp32 of the even element."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    """fp32 of the odd element."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_bits(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits + 0x7FFF + ((bits >> 16) & 1)


@triton.jit
def pair(even, odd, ASM: tl.constexpr):
    """Round two fp32 values to bf16 (to nearest, ties to even) and put them into a word."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((_rounded_bits(even) >> 16) & 0xFFFF) | (_rounded_bits(odd) & -65536)


@triton.jit
def mul2(a, b, ASM: tl.constexpr):
    """Product of two words, each half rounded to bf16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair(low(a) * low(b), high(a) * high(b), ASM)


@triton.jit
def add2(a, b, ASM: tl.constexpr):
    """Sum of two words, each half rounded to bf16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair(low(a) + low(b), high(a) + high(b), ASM)


@triton.jit
def _larger_asm(a, b):
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger_or_nan_asm(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger(a, b, ASM: tl.constexpr):
    """Halves of larger magnitude of two words, their signs garbage; a NaN wins against everything."""
    if ASM:
        return _larger_or_nan_asm(a, b)
    else:
        odd = tl.maximum((a >> 16) & 0x7FFF, (b >> 16) & 0x7FFF)
        return (odd << 16) | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def amax_bits(words, axis: tl.constexpr, ASM: tl.constexpr):
    """Largest magnitude along an axis as bf16 bits (0..0x7FFF, a NaN being larger than Inf)."""
    if ASM:
        words = tl.reduce(words, axis, _larger_or_nan_asm)
        return tl.maximum((words >> 16) & 0x7FFF, words & 0x7FFF)
    else:
        return tl.max(tl.maximum((words >> 16) & 0x7FFF, words & 0x7FFF), axis=axis)


@triton.jit
def _block_amax(words, ASM: tl.constexpr):
    """fp32 maximum of 16 magnitudes, `words` [R, B, 8]; a NaN is passed over, as fmaxf passes it."""
    if ASM:
        best = tl.reduce(words, 2, _larger_asm)
        return tl.maximum(tl.abs(low(best)), tl.abs(high(best)))
    else:
        return tl.max(tl.maximum(tl.abs(low(words)), tl.abs(high(words))), axis=2)


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1/x as rcp.approx.ftz gives it."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _mul_ftz(a, b, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def _magnitude(a, e, ASM: tl.constexpr):
    """|a| * e. In one asm: Triton would take the sign off with an integer instruction, ptxas does it in the product."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.ftz.f32 t, $1; mul.ftz.f32 $0, t, $2; }", "=f,f,f", [a, e], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.abs(a) * e


@triton.jit
def decode_scale_of(amax_bits):
    """``fp32(bf16(amax * fp32(1/2688)))`` from the bf16 bits of amax, as torch on CUDA divides bf16 by 2688."""
    product = (amax_bits << 16).to(tl.float32, bitcast=True) * INV_RANGE
    rounded = (_rounded_bits(product) & -65536).to(tl.float32, bitcast=True)
    return tl.where(product == product, rounded, product)


@triton.jit
def _e4m3(s, ASM: tl.constexpr):
    """Bits (int32) and fp32 value of e4m3(s) for s in 0..448, to nearest, ties to even."""
    if ASM:
        narrow = s.to(tl.float8e4nv)
        return narrow.to(tl.uint8, bitcast=True).to(tl.int32), narrow.to(tl.float32)
    else:
        bits = s.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        tiny = (s + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(s < 0.015625, tiny, normal)
        exponent, mantissa = code >> 3, code & 7
        value = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
        return code, tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, value)


@triton.jit
def _rounded(a):
    """a >= 0 to a multiple of 0.5, 1 or 2 (below 2, below 4, above), to nearest, ties to even; NaN or Inf for NaN
    and Inf.

    Adding and subtracting 2**22 times the power of two below max(a, 1) does it: fp32 addition rounds to even, and the
    unit in the last place of the sum is the step. The product with 2**22 is exact, so it rides in the fma. (Without
    cutting max(a, 1) down to its power of two, the sum passes a power of two itself for the last a below 2 and 4.)
    """
    power = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(power, -4194304.0, tl.fma(power, 4194304.0, a))


@triton.jit
def _codes_of(even, odd, words, ASM: tl.constexpr):
    """Bytes of codes from rounded magnitudes (6 for anything above, NaN too) and the words' signs.

    A multiple of 0.5 up to 6 has two significant bits. Times 2**-14 it is an fp16 number, subnormal below 1, whose
    exponent and first mantissa bit (bits 9..11) are the e2m1 code.
    """
    if ASM:
        # Signs of bf16 and fp16 pairs lie at the same bits. Each half of $t ends up with its code in its top nibble;
        # byte 1 of four words gives the even codes, byte 3 the odd ones.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, t2, t3, e, o, six, tiny;
            mov.b32 six, 0x46004600;
            mov.b32 tiny, 0x04000400;
            cvt.rn.f16x2.f32 t0, $5, $1;
            cvt.rn.f16x2.f32 t1, $6, $2;
            cvt.rn.f16x2.f32 t2, $7, $3;
            cvt.rn.f16x2.f32 t3, $8, $4;
            min.f16x2 t0, t0, six;
            min.f16x2 t1, t1, six;
            min.f16x2 t2, t2, six;
            min.f16x2 t3, t3, six;
            mul.rn.f16x2 t0, t0, tiny;
            mul.rn.f16x2 t1, t1, tiny;
            mul.rn.f16x2 t2, t2, tiny;
            mul.rn.f16x2 t3, t3, tiny;
            shl.b32 t0, t0, 3;
            shl.b32 t1, t1, 3;
            shl.b32 t2, t2, 3;
            shl.b32 t3, t3, 3;
            lop3.b32 t0, t0, $9, 0x80008000, 0xF8;
            lop3.b32 t1, t1, $10, 0x80008000, 0xF8;
            lop3.b32 t2, t2, $11, 0x80008000, 0xF8;
            lop3.b32 t3, t3, $12, 0x80008000, 0xF8;
            prmt.b32 e, t0, t1, 0x0051;
            prmt.b32 o, t0, t1, 0x0073;
            prmt.b32 t0, t2, t3, 0x0051;
            prmt.b32 t1, t2, t3, 0x0073;
            prmt.b32 e, e, t0, 0x5410;
            prmt.b32 o, o, t1, 0x5410;
            shr.u32 o, o, 4;
            or.b32 $0, e, o;
            }""",
            "=r,f,f,f,f,f,f,f,f,r,r,r,r", [even, odd, words], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        high_code = (tl.minimum(even, 6.0) * TINY).to(tl.int32, bitcast=True) >> 22
        low_code = (tl.minimum(odd, 6.0) * TINY).to(tl.int32, bitcast=True) >> 22
        signs = ((words >> 8) & 0x80) | ((words >> 28) & 0x08)
        return (signs | (high_code << 4) | low_code).to(tl.uint8)


@triton.jit
def _bytes_of(words, e, ASM: tl.constexpr, FP4: tl.constexpr):
    """The byte of codes of each word: even element in the high nibble. `e` fp32 multiplies the elements."""
    if FP4:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 q0, q1, q2, q3;
            cvt.rn.satfinite.e2m1x2.f32 q0, $1, $5;
            cvt.rn.satfinite.e2m1x2.f32 q1, $2, $6;
            cvt.rn.satfinite.e2m1x2.f32 q2, $3, $7;
            cvt.rn.satfinite.e2m1x2.f32 q3, $4, $8;
            mov.b32 $0, {q0, q1, q2, q3};
            }""",
            "=r,f,f,f,f,f,f,f,f", [_mul_ftz(low(words), e, ASM), _mul_ftz(high(words), e, ASM)],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        even = _rounded(_magnitude(low(words), e, ASM))
        odd = _rounded(_magnitude(high(words), e, ASM))
        return _codes_of(even, odd, words, ASM)


@triton.jit
def quantise(words, decode_scale, ASM: tl.constexpr, FP4: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Quantise a tile of bf16 words to bytes of codes and e4m3 scale bits.

    s = min(amax16 * fp32(1/6) * rcp(g), 448), s8 = e4m3(s), e = min(rcp(g * s8), FLT_MAX), code = e2m1(x * e); all
    fp32, reciprocals approximate with ftz. A decode scale of 0 gives zeros (a negative zero keeps its sign).

    Args:
        words: int32 ``[R, W]``; W a multiple of 8.
        decode_scale: fp32 scalar g.

    Returns:
        ``(uint8 [R, W] of codes, int32 [R, W/8] with the scales' e4m3 bits)``.
    """
    amax = _block_amax(tl.reshape(words, [R, W // 8, 8]), ASM)
    bits, e = _block_scale(amax, decode_scale, ASM)
    e_wide = tl.reshape(tl.broadcast_to(e[:, :, None], [R, W // 8, 8]), [R, W])
    return _bytes_of(words, e_wide, ASM, FP4), bits


@triton.jit
def quantise_halves(
    first, second, decode_scale, ASM: tl.constexpr, FP4: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr
):
    """:func:`quantise` of blocks that come as two halves, int32 ``[R, BLOCKS, 4]`` each.

    A thread loads 16 bytes at a time, which is half a block. With the halves apart it holds whole blocks: their maximum
    needs no other thread, and no scale is computed twice.

    Returns:
        ``(uint8 [R, BLOCKS, 4] of codes of the first halves, of the second, int32 [R, BLOCKS] of scale bits)``.
    """
    if ASM:
        best = tl.reduce(_larger_asm(first, second), 2, _larger_asm)
        amax = tl.maximum(tl.abs(low(best)), tl.abs(high(best)))
    else:
        amax = tl.maximum(_block_amax(first, ASM), _block_amax(second, ASM))
    bits, e = _block_scale(amax, decode_scale, ASM)
    e_wide = tl.broadcast_to(e[:, :, None], [R, BLOCKS, 4])
    return _bytes_of(first, e_wide, ASM, FP4), _bytes_of(second, e_wide, ASM, FP4), bits


@triton.jit
def _block_scale(amax, decode_scale, ASM: tl.constexpr):
    """e4m3 bits of the block scales and the factor of their elements, from the blocks' maxima."""
    s = _mul_ftz(_mul_ftz(amax, INV_6, ASM), reciprocal(decode_scale, ASM), ASM)
    s = tl.where(decode_scale == 0.0, 0.0, tl.minimum(s, 448.0))
    bits, s8 = _e4m3(s, ASM)
    step = _mul_ftz(tl.zeros_like(s8) + decode_scale, s8, ASM)
    e = tl.minimum(reciprocal(step, ASM), FLT_MAX)
    return bits, tl.where(decode_scale == 0.0, 0.0, e)


@triton.jit
def store_codes(codes_ptr, rows, columns, codes, M, HALF, EVEN: tl.constexpr):
    """Write bytes of codes ``[R, W]``, and zeros into the rows from M up to the next multiple of 16.

    EVEN says that all columns are inside.
    """
    at = codes_ptr + rows.to(tl.int64)[:, None] * HALF + columns[None, :]
    inside = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (columns < HALF)[None, :]
    tl.store(at, codes, mask=inside)
    pad_codes(codes_ptr, rows, columns, M, HALF)


@triton.jit
def pad_codes(codes_ptr, rows, columns, M, HALF):
    """Write zeros into those of the rows that lie between M and the next multiple of 16."""
    if tl.max(rows, axis=0) >= M:
        at = codes_ptr + rows.to(tl.int64)[:, None] * HALF + columns[None, :]
        padding = ((rows >= M) & (rows < (M + 15) // 16 * 16))[:, None] & (columns < HALF)[None, :]
        tl.store(at, tl.zeros(at.shape, tl.uint8), mask=padding)


@triton.jit
def store_scales(scales_ptr, rows, blocks, bits, M, KB):
    """Write scale bits ``[R, B]`` in the 128x4 order, and zeros into the padding rows and blocks."""
    tiles = (KB + 3) // 4
    rows = rows.to(tl.int64)
    tile = (rows // 128 * tiles)[:, None] + (blocks // 4)[None, :]
    within = (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + (blocks % 4)[None, :]
    logical = (rows < M)[:, None] & (blocks < KB)[None, :]
    bits = tl.where(logical, bits, 0).to(tl.uint8)
    tl.store(scales_ptr + tile * 512 + within, bits, mask=(blocks < tiles * 4)[None, :])
