"""CuTe DSL kernel of norm + modulation + NVFP4: one warp a row, x read once and kept in registers.

Three modes of one kernel (`rows_kernel`)::

    static     x -> sum of squares -> codes and scales by a decode scale that is given        one launch
    measure    x -> sum of squares -> rstd; largest magnitude of the modulated rows           first of two
    quantise   x, rstd, largest magnitude -> codes and scales                                 second of two

Who owns what. Lane u of a warp owns the 16 elements 512j + 16u.. of every chunk j of 512: one FP4 block, so its scale
needs no other lane. They are also what threads 4u..4u+3 of ATen's RMSNorm kernel own (thread i: elements 512j + 4i..),
so four accumulators a lane and a few shuffles give ATen's sum in ATen's order (see `_modulate_triton`). The weight lies
in shared memory as fp32, unpacked once by a CTA that then takes many rows.

Two 16-byte loads fetch a block. Eight neighbouring lanes would then hit 16 of the 32 banks twice; lanes 4..7 of eight
therefore load, and work on, the second half of their block first (`swapped`). The accumulators, once a row, and the two
words of codes are put right afterwards.

Instructions are what this costs, not bytes, so the e2m1 rounding is shorter than the Triton kernels' (`_codes`). On one
H200 it is level with them all the same (research/REPRODUCIBILITY.md). It needs a decode scale within 2**+-100; other
ones, zero, NaN and infinity take a longer body of the same kernel.

Run on one H200 (sm_90a): the Triton kernels' bytes, dynamic and static. Not run on Blackwell.
"""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx

CHUNK = 512  # elements of a chunk: 32 lanes of 16
WARP = 32
MODES = ("static", "measure", "quantise")

INV_6 = "0f3E2AAAAB"  # fp32(1/6)
INV_RANGE = "0f39C30C31"  # fp32(1/2688)
FLT_MAX = "0f7F7FFFFF"
TWO_22, MINUS_TWO_22 = "0f4A800000", "0fCA800000"
ONE, SCALED_ONE = "0f3F800000", "0f3C800000"  # 1 and 2**-6
MIN_CLAMP = "0f00C00000"  # 1.5 * 2**-126 = 6 / FLT_MAX, about
HUGE, SMALL = "0f71800000", "0f0D800000"  # 2**100, 2**-100


def _words(prefix, count=8, start=0):
    return [f"{prefix}{at}" for at in range(start, start + count)]


def _vector(names):
    return "{" + ", ".join(names) + "}"


def _squares(first):
    """PTX: add the squares of a block's 16 elements to four accumulators, in ATen's order by fma; 0 at `first`.

    The words are operands 0..7, the accumulators 8..11.
    """
    lines = ["{", ".reg .f32 t, u;", ".reg .b32 v;"]
    for word in range(8):
        total = f"{{$w{word // 2}}}"
        before = total if word % 2 else "0f00000000" if first else f"{{$r{8 + word // 2}}}"
        lines += [
            f"shl.b32 v, {{$r{word}}}, 16;",
            "mov.b32 t, v;",
            f"and.b32 v, {{$r{word}}}, 0xFFFF0000;",
            "mov.b32 u, v;",
            f"fma.rn.f32 {total}, t, t, {before};",
            f"fma.rn.f32 {total}, u, u, {total};",
        ]
    return "\n".join([*lines, "}"])


def _modulated(offset_bytes, weight_bytes, x, rstd, weight, tables):
    """PTX: h0..h7 = bf16(bf16(bf16(weight * (rstd * x)) * factor) + offset), every rounding on its own.

    Args:
        offset_bytes: of the block in a row of words; `tables` are four addresses: factor and offset, either half.
        weight_bytes: of the block in the weight in shared memory, whose address is `weight`.
        x: eight operands with words; rstd: operand.
    """
    lines = [
        ".reg .b32 h<8>, f<8>, o<8>, v;",
        ".reg .f32 w<16>, t, u;",
    ]
    for quarter in range(4):
        names = _vector(_words("w", 4, quarter * 4))
        lines.append(f"ld.shared.v4.f32 {names}, [{weight}+{weight_bytes + quarter * 512}];")
    for prefix, pair in (("f", tables[:2]), ("o", tables[2:])):
        for half, address in enumerate(pair):
            names = _vector(_words(prefix, 4, half * 4))
            lines.append(f"ld.global.nc.v4.b32 {names}, [{address}+{offset_bytes}];")
    for word in range(8):
        lines += [
            f"shl.b32 v, {x[word]}, 16;",
            "mov.b32 t, v;",
            f"and.b32 v, {x[word]}, 0xFFFF0000;",
            "mov.b32 u, v;",
            f"mul.rn.f32 t, {rstd}, t;",
            f"mul.rn.f32 u, {rstd}, u;",
            f"mul.rn.f32 t, w{2 * word}, t;",
            f"mul.rn.f32 u, w{2 * word + 1}, u;",
            f"cvt.rn.bf16x2.f32 h{word}, u, t;",
            f"mul.rn.bf16x2 h{word}, h{word}, f{word};",
            f"add.rn.bf16x2 h{word}, h{word}, o{word};",
        ]
    return lines


def _block_scale(g, inverse_g, cap, at_zero, bits, wide):
    """PTX: amax of h0..h7 (a NaN is passed over), e4m3 bits of the scale into `bits`, t = g * scale, e = 1/t.

    The steps of `_words_triton.quantise`. With g = 0, `cap` is 0 and `at_zero` infinite: the scale is 0 and so is e.
    """
    lines = [
        ".reg .b32 m<4>;",
        ".reg .f32 a, b, s, s8, step, e;",
        ".reg .b16 narrow, part, rest;",
    ]
    lines += [f"max.xorsign.abs.bf16x2 m{at}, h{at}, h{at + 4};" for at in range(4)]
    lines += [f"max.xorsign.abs.bf16x2 m{at}, m{at}, m{at + 2};" for at in range(2)]
    lines += [
        "max.xorsign.abs.bf16x2 m0, m0, m1;",
        "shl.b32 m1, m0, 16;",
        "and.b32 m2, m0, 0xFFFF0000;",
        "mov.b32 a, m1;",
        "mov.b32 b, m2;",
        "abs.f32 a, a;",
        "abs.f32 b, b;",
        "max.f32 a, a, b;",
        f"mul.rn.ftz.f32 s, a, {INV_6};",
        f"mul.rn.ftz.f32 s, s, {inverse_g};",
        f"min.f32 s, s, {cap if wide else '0f43E00000'};",
        "mov.f32 b, 0f00000000;",
        "cvt.rn.satfinite.e4m3x2.f32 narrow, b, s;",
        f"cvt.u32.u16 {bits}, narrow;",
        "cvt.rn.f16x2.e4m3x2 m1, narrow;",
        "mov.b32 {part, rest}, m1;",
        "cvt.f32.f16 s8, part;",
        f"fma.rn.ftz.f32 step, s8, {g}, {at_zero};" if wide else f"mul.rn.ftz.f32 step, s8, {g};",
        "rcp.approx.ftz.f32 e, step;",
        f"min.f32 e, e, {FLT_MAX};",
    ]
    return lines


def _fp4_codes(codes):
    """PTX: codes of h0..h7 by the hardware conversion; a word of codes for either half."""
    lines = [".reg .b8 q<4>;"]
    for half in range(2):
        for at in range(4):
            word = half * 4 + at
            lines += [
                f"shl.b32 v, h{word}, 16;",
                "mov.b32 t, v;",
                f"and.b32 v, h{word}, 0xFFFF0000;",
                "mov.b32 u, v;",
                "mul.rn.ftz.f32 t, t, e;",
                "mul.rn.ftz.f32 u, u, e;",
                f"cvt.rn.satfinite.e2m1x2.f32 q{at}, t, u;",
            ]
        lines.append(f"mov.b32 {codes[half]}, {_vector(_words('q', 4))};")
    return lines


def _codes(codes, wide):
    """PTX: codes of h0..h7 without hardware FP4.

    Magnitudes above 6 become about 6 while they are bf16 (`clamp`: within 2**-8 of 6/e, and anything from 5 to 7 rounds
    to 6). Then v = |h| * e rounds to two significant bits from 1 on and to halves below:

        m = power of two below max(v, 1);  r = fma(m, 2**22, v);  q = fma(m, -2**22, r)

    One unit in the last place of r is m / 2, the step, and fp32 addition sends ties to even. e is scaled by 2**-6, so
    that q is an e4m3 number (subnormal below 1) whose bits 2..4 are the e2m1 code; one instruction makes two of them.
    When e may be too small for that (`wide`), q is scaled instead, and what e4m3 makes of a NaN is cut down to its
    code, 7.
    """
    scale_e = [] if wide else [f"mul.rn.f32 e, e, {SCALED_ONE};"]
    lines = [
        ".reg .b32 clamp, c, d, p, n<4>;",
        ".reg .f32 m, r;",
        ".reg .b16 lower, upper;",
        "mul.rn.f32 s, step, 0f40C00000;",
        f"max.f32 s, s, {MIN_CLAMP};",
        "cvt.rn.bf16x2.f32 clamp, s, s;",
        *scale_e,
    ]
    one = ONE if wide else SCALED_ONE
    for half in range(2):
        for pair in range(2):
            for at in range(2):
                word = half * 4 + pair * 2 + at
                lines += [
                    f"min.xorsign.abs.bf16x2 c, h{word}, clamp;",
                    "shl.b32 v, c, 16;",
                    "mov.b32 t, v;",
                    "and.b32 v, c, 0xFFFF0000;",
                    "mov.b32 u, v;",
                ]
                for name in ("t", "u"):
                    lines += [
                        f"abs.f32 {name}, {name};",
                        f"mul.rn.ftz.f32 {name}, {name}, e;",
                        f"max.f32 m, {name}, {one};",
                        "mov.b32 v, m;",
                        "and.b32 v, v, 0x7F800000;",
                        "mov.b32 m, v;",
                        f"fma.rn.f32 r, m, {TWO_22}, {name};",
                        f"fma.rn.f32 {name}, m, {MINUS_TWO_22}, r;",
                    ]
                    if wide:
                        lines.append(f"mul.rn.f32 {name}, {name}, {SCALED_ONE};")
                lines.append(f"cvt.rn.satfinite.e4m3x2.f32 {('lower', 'upper')[at]}, u, t;")
            lines += [
                "mov.b32 c, {lower, upper};",
                f"prmt.b32 p, h{half * 4 + pair * 2}, h{half * 4 + pair * 2 + 1}, 0x7531;",
                *(["and.b32 c, c, 0x1C1C1C1C;"] if wide else []),
                "shl.b32 c, c, 2;",
                "lop3.b32 c, 0x80808080, p, c, 0xCA;",  # sign bits from p, the rest from c
                "shr.u32 d, c, 12;",
                f"add.u32 n{half * 2 + pair}, c, d;",
            ]
        lines.append(f"prmt.b32 {codes[half]}, n{half * 2}, n{half * 2 + 1}, 0x6420;")
    return lines


def _block(mode_codes, offset_bytes, weight_bytes, fp4, wide):
    """PTX of a block in either kind of pass; see the calls below for the operands."""
    x = [f"{{$r{at}}}" for at in range(8)]
    rest = [f"{{$r{at}}}" for at in range(8, 18)]
    rstd, weight, tables = rest[0], rest[1], rest[2:6]
    lines = _modulated(offset_bytes, weight_bytes, x, rstd, weight, tables)
    if mode_codes:
        g, inverse_g, cap, at_zero = rest[6:10]
        lines += _block_scale(g, inverse_g, cap, at_zero, "{$w2}", wide)
        codes = ("{$w0}", "{$w1}")
        lines += _fp4_codes(codes) if fp4 else _codes(codes, wide)
    else:
        lines += [f"max.NaN.xorsign.abs.bf16x2 h{at}, h{at}, h{at + 4};" for at in range(4)]
        lines += [f"max.NaN.xorsign.abs.bf16x2 h{at}, h{at}, h{at + 2};" for at in range(2)]
        lines.append("max.NaN.xorsign.abs.bf16x2 {$w0}, h0, h1;")
    return "\n".join(["{", *lines, "}"])


def _load_block(address_pair, offset_bytes, inside=None):
    """Eight words of a lane's block: two 16-byte loads; zeros where `inside` (a Boolean or None for all) is false."""
    words = []
    for address in address_pair:
        names = _vector([f"{{$w{at}}}" for at in range(4)])
        load = f"ld.global.nc.v4.b32 {names}, [{{$r0}}+{offset_bytes}];"
        if inside is None:
            words += inline_ptx(load, write_only_types=[Int32] * 4, read_only_args=[address])
        else:
            zeros = "\n".join(f"mov.b32 {{$w{at}}}, 0;" for at in range(4))
            text = f"{{\n.reg .pred p;\nsetp.ne.s32 p, {{$r1}}, 0;\n{zeros}\n@p {load}\n}}"
            words += inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address, inside])
    return words


def _add_lane(value, distance):
    """value + the value of lane ^ distance: a halving of ATen's, whose order of two numbers does not matter."""
    return value + cute.arch.shuffle_sync_bfly(value, offset=distance)


def _unpack(word):
    """fp32 of the even and the odd element."""
    return inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xFFFF0000;",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def _load(kind, address):
    """One 32-bit value, int32 or fp32, that this launch does not write."""
    text = f"ld.global.nc.{'f' if kind is Float32 else 'b'}32 {{$w0}}, [{{$r0}}];"
    return inline_ptx(text, write_only_types=[kind], read_only_args=[address])


def _store_zeros(address, size):
    """Write 8 zero bytes, or one."""
    store = "st.global.v2.b32 [{$r0}], {z, z};" if size == 8 else "st.global.u8 [{$r0}], z;"
    inline_ptx("{\n.reg .b32 z;\nmov.b32 z, 0;\n" + store + "\n}", read_only_args=[address])


@cute.jit
def _fill_weight(weight: Int64, shared: Int32, tid: Int32, columns: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Unpack the weight into shared memory: float4 number ``(4j + i) * 32 + u`` is lane u's i-th of chunk j."""
    for at in range(tid, columns // 2, threads):
        word = _load(Int32, weight + Int64(at) * 4)
        even, odd = _unpack(word)
        element = at * 2
        lane = (element % CHUNK) // 16
        half = ((element % 16) // 8) ^ ((lane // 4) % 2)
        quarter = half * 2 + (element % 8) // 4
        place = (((element // CHUNK) * 4 + quarter) * WARP + lane) * 16 + (element % 4) * 4
        inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[shared + place, even, odd])
    cute.arch.sync_threads()


@cute.kernel
def rows_kernel(
    x: Int64, stride: Int64, weight: Int64, factor: Int64, offset: Int64, index: Int64,
    rstd_at: Int64, amax_at: Int64, decode_at: Int64, codes: Int64, scales: Int64, rows: Int32, eps: Float32,
    columns: cutlass.Constexpr, mode: cutlass.Constexpr, fp4: cutlass.Constexpr, warps: cutlass.Constexpr,
):  # fmt: skip
    """Rows of x, a warp each; the grid strides over them. Addresses are of the tensors' first bytes.

    Args:
        x: bf16 ``[rows, columns]``, rows `stride` bytes apart, 16-byte aligned.
        weight: bf16 ``[columns]``.
        factor, offset: int32 words ``[table rows, columns/2]``, see `_modulate_triton.prepare`.
        index: int32 ``[rows]``, table row of each row.
        rstd_at: fp32 ``[rows]``; written by "measure", read by "quantise".
        amax_at: int32, bf16 bits of the largest magnitude; raised by "measure", read by "quantise".
        decode_at: fp32; read by "static", written by "quantise".
        codes: uint8 ``[rows to 16, columns/2]``. scales: uint8, 128x4 order, rows to 128 and blocks to 4.
    """
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    chunks = (columns + CHUNK - 1) // CHUNK
    shared_weight = cute.arch.alloc_smem(Float32, chunks * CHUNK, 16)
    shared = Int32(shared_weight.toint())
    _fill_weight(weight, shared, tid, columns, warps * WARP)
    lane = tid % WARP
    row = tid // WARP * ctas + cta
    step = ctas * warps
    g = Float32(1.0)
    if cutlass.const_expr(mode == "static"):
        g = _load(Float32, decode_at)
    if cutlass.const_expr(mode == "quantise"):
        g = _decode_scale(amax_at)
        if row == 0 and lane == 0:
            inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[decode_at, g])
    tensors = (x, stride, factor, offset, index, rstd_at, amax_at, codes, scales)
    arguments = (*tensors, rows, eps, g, shared, lane, row, step)
    if cutlass.const_expr(mode == "measure"):
        _measure_rows(*arguments, columns)
    else:
        if cutlass.const_expr(fp4):
            _quantise_rows(*arguments, columns, mode, True, True)
        else:
            plain = inline_ptx(
                f"{{\n.reg .pred p;\nsetp.lt.f32 p, {{$r0}}, {HUGE};\nsetp.gt.and.f32 p, {{$r0}}, {SMALL}, p;\n"
                "selp.s32 {$w0}, 1, 0, p;\n}",
                write_only_types=[Int32], read_only_args=[g],
            )  # fmt: skip
            if plain != 0:
                _quantise_rows(*arguments, columns, mode, False, False)
            else:
                _quantise_rows(*arguments, columns, mode, False, True)


def _decode_scale(amax_at):
    """``fp32(bf16(amax * fp32(1/2688)))`` from the bf16 bits of amax, as `_words_triton.decode_scale_of`."""
    return inline_ptx(
        f"""{{
        .reg .b32 n, odd;
        .reg .f32 product, rounded;
        .reg .pred number;
        ld.global.nc.b32 n, [{{$r0}}];
        shl.b32 n, n, 16;
        mov.b32 product, n;
        mul.rn.f32 product, product, {INV_RANGE};
        mov.b32 n, product;
        bfe.u32 odd, n, 16, 1;
        add.u32 n, n, odd;
        add.u32 n, n, 0x7FFF;
        and.b32 n, n, 0xFFFF0000;
        mov.b32 rounded, n;
        setp.eq.f32 number, product, product;
        selp.f32 {{$w0}}, rounded, product, number;
        }}""",
        write_only_types=[Float32], read_only_args=[amax_at],
    )  # fmt: skip


def _row_address(x, stride, row, lane):
    """Where the two halves of a lane's blocks of a row begin, the one to be worked on first first."""
    start = x + Int64(row) * stride
    return start + Int64(_place(lane)), start + Int64(_place(lane) ^ 16)


def _load_chunk(halves, chunk, lane, columns):
    """The eight words of a lane's block; zeros for lanes that the last chunk leaves without one."""
    whole = chunk < columns // CHUNK
    return _load_block(halves, chunk * CHUNK * 2, None if whole else Int32(lane < columns % CHUNK // 16))


def _row_blocks(halves, lane, columns, now):
    """All words of a lane's blocks of a row, a list of eight a chunk; an empty list unless they are wanted `now`."""
    return [_load_chunk(halves, at, lane, columns) for at in range((columns + CHUNK - 1) // CHUNK)] if now else []


def _block_words(blocks, halves, chunk, lane, columns):
    """A block out of the registers, or, where the row was not loaded as a whole, from memory."""
    return blocks[chunk] if blocks else _load_chunk(halves, chunk, lane, columns)


def _place(lane):
    """Byte of a lane's first half block in a chunk of bf16; the other half is at ``^ 16``."""
    return lane * 32 + (lane // 4) % 2 * 16


def _rstd_of(blocks, lane, columns, eps):
    """rstd of a row from all its words, in every lane."""
    totals = ()
    for block in blocks:
        totals = inline_ptx(_squares(not totals), write_only_types=[Float32] * 4, read_only_args=[*block, *totals])
    totals = inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r4}, 0;\n"
        + "".join(f"selp.f32 {{$w{at}}}, {{$r{at ^ 2}}}, {{$r{at}}}, p;\n" for at in range(4))
        + "}",
        write_only_types=[Float32] * 4, read_only_args=[*totals, lane // 4 % 2],
    )  # fmt: skip
    # ATen's thread 32w + 4v + a is accumulator a of lane 8w + v. Within a warp of its: i += i + 16, 8, 4 (over v: 4, 2,
    # 1), then 2 and 1 (over a); then the warps: w += w + 2, 1.
    for distance in (4, 2, 1):
        totals = [_add_lane(total, distance) for total in totals]
    total = (totals[0] + totals[2]) + (totals[1] + totals[3])
    for distance in (16, 8):
        total = _add_lane(total, distance)
    width = f"0f{struct.unpack('>I', struct.pack('>f', columns))[0]:08X}"
    return inline_ptx(
        f"{{\n.reg .f32 s;\ndiv.rn.f32 s, {{$r0}}, {width};\nadd.rn.f32 s, s, {{$r1}};\n"
        "rsqrt.approx.ftz.f32 {$w0}, s;\n}",
        write_only_types=[Float32], read_only_args=[total, eps],
    )  # fmt: skip


def _rstd(blocks, rstd_at, row, lane, columns, eps, compute):
    return _rstd_of(blocks, lane, columns, eps) if compute else _load(Float32, rstd_at + Int64(row) * 4)


def _tables(factor, offset, table_row, lane, columns):
    """Addresses of a table row's words: factor and offset, either half of the lane's block."""
    start = Int64(table_row) * (columns * 2)
    near, far = Int64(_place(lane)), Int64(_place(lane) ^ 16)
    return factor + start + near, factor + start + far, offset + start + near, offset + start + far


@cute.jit
def _measure_rows(
    x: Int64, stride: Int64, factor: Int64, offset: Int64, index: Int64, rstd_at: Int64, amax_at: Int64,
    codes: Int64, scales: Int64, rows: Int32, eps: Float32, g: Float32, shared: Int32, lane: Int32, row: Int32,
    step: Int32, columns: cutlass.Constexpr,
):  # fmt: skip
    largest = Int32(0)
    while row < rows:
        table_row = _load(Int32, index + Int64(row) * 4)
        blocks = _row_blocks(_row_address(x, stride, row, lane), lane, columns, True)
        rstd = _rstd_of(blocks, lane, columns, eps)
        if lane == 0:
            inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[rstd_at + Int64(row) * 4, rstd])
        tables = _tables(factor, offset, table_row, lane, columns)
        weight = shared + lane * 16
        for chunk in cutlass.range_constexpr(columns // CHUNK):
            largest = _largest(blocks[chunk], chunk, rstd, weight, tables, largest)
        if cutlass.const_expr(columns % CHUNK):  # noqa: SIM102 - the compiler's condition, and the kernel's
            if lane < columns % CHUNK // 16:
                largest = _largest(blocks[columns // CHUNK], columns // CHUNK, rstd, weight, tables, largest)
        row += step
    largest = cute.arch.warp_redux_sync(largest, "max")
    if lane == 0:
        inline_ptx(
            "{\n.reg .b32 n;\n.reg .pred p;\nld.volatile.global.b32 n, [{$r0}];\nsetp.gt.s32 p, {$r1}, n;\n"
            "@p red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};\n}",
            read_only_args=[amax_at, largest],
        )


def _largest(block, chunk, rstd, weight, tables, largest):
    """The larger of `largest` and the modulated magnitudes of a block, as bf16 bits; a NaN is larger than infinity."""
    best = inline_ptx(
        _block(False, chunk * CHUNK * 2, chunk * CHUNK * 4, False, False),
        write_only_types=[Int32], read_only_args=[*block, rstd, weight, *tables],
    )  # fmt: skip
    return inline_ptx(
        "{\n.reg .b32 m, n;\nbfe.u32 m, {$r0}, 16, 15;\nand.b32 n, {$r0}, 0x7FFF;\nmax.s32 m, m, n;\n"
        "max.s32 {$w0}, m, {$r1};\n}",
        write_only_types=[Int32], read_only_args=[best, largest],
    )  # fmt: skip


@cute.jit
def _quantise_rows(
    x: Int64, stride: Int64, factor: Int64, offset: Int64, index: Int64, rstd_at: Int64, amax_at: Int64,
    codes: Int64, scales: Int64, rows: Int32, eps: Float32, g: Float32, shared: Int32, lane: Int32, row: Int32,
    step: Int32, columns: cutlass.Constexpr, mode: cutlass.Constexpr, fp4: cutlass.Constexpr, wide: cutlass.Constexpr,
):  # fmt: skip
    """Rows to codes and scales; zeros into the padding. `wide`: any decode scale, else one within 2**+-100."""
    scaling = _scaling(g)
    swapped = (lane // 4) % 2
    whole, last = columns // CHUNK, columns % CHUNK // 16
    keep = fp4 or not wide  # the long body needs the registers for itself, and reads x once more
    while row < (rows + 127) // 128 * 128:
        code_at, scale_at = _outputs(codes, scales, row, lane, columns)
        if row < rows:
            table_row = _load(Int32, index + Int64(row) * 4)
            halves = _row_address(x, stride, row, lane)
            blocks = _row_blocks(halves, lane, columns, mode == "static")
            rstd = _rstd(blocks, rstd_at, row, lane, columns, eps, mode == "static")
            blocks = blocks if keep else []
            tables = _tables(factor, offset, table_row, lane, columns)
            given = (rstd, shared + lane * 16, *tables, *scaling)
            out = (code_at, scale_at, swapped, fp4, wide)
            for chunk in cutlass.range_constexpr(columns // CHUNK):
                _emit(_block_words(blocks, halves, chunk, lane, columns), chunk, given, *out)
            if cutlass.const_expr(last):
                if lane < last:
                    _emit(_block_words(blocks, halves, whole, lane, columns), whole, given, *out)
                elif lane < (last + 3) // 4 * 4:
                    _store_zeros(scale_at + whole * 4096, 1)
        else:
            for chunk in cutlass.range_constexpr((columns + CHUNK - 1) // CHUNK):
                width = min(WARP, columns // 16 - chunk * WARP)
                if row < (rows + 15) // 16 * 16 and lane < width:
                    _store_zeros(code_at + chunk * 256, 8)
                if lane < (width + 3) // 4 * 4:
                    _store_zeros(scale_at + chunk * 4096, 1)
        row += step


def _outputs(codes, scales, row, lane, columns):
    """Where a lane's codes and scale of a row's first chunk go; a chunk on they are 256 and 4096 bytes further."""
    tiles = (columns // 16 + 3) // 4
    within = row % 32 * 16 + row % 128 // 32 * 4 + lane // 4 * 512 + lane % 4
    return (
        codes + Int64(row) * (columns // 2) + Int64(lane * 8),
        scales + Int64(row // 128) * (tiles * 512) + Int64(within),
    )


def _scaling(g):
    """``(g, 1/g, upper bound of a block scale, what is added to g * scale)``; the last three give zeros for g = 0."""
    return (g, *inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 r;\nsetp.eq.f32 p, {$r0}, 0f00000000;\nrcp.approx.ftz.f32 r, {$r0};\n"
        "selp.f32 {$w0}, 0f7F800000, r, p;\nselp.f32 {$w1}, 0f00000000, 0f43E00000, p;\n"
        "selp.f32 {$w2}, 0f7F800000, 0f00000000, p;\n}",
        write_only_types=[Float32] * 3, read_only_args=[g],
    ))  # fmt: skip


def _emit(block, chunk, given, code_at, scale_at, swapped, fp4, wide):
    """Quantise a block and store its 8 bytes of codes and its scale."""
    first, second, bits = inline_ptx(
        _block(True, chunk * CHUNK * 2, chunk * CHUNK * 4, fp4, wide),
        write_only_types=[Int32] * 3, read_only_args=[*block, *given],
    )  # fmt: skip
    inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 a, b;\nsetp.ne.s32 p, {$r4}, 0;\nselp.b32 a, {$r1}, {$r0}, p;\n"
        f"selp.b32 b, {{$r0}}, {{$r1}}, p;\nst.global.v2.b32 [{{$r3}}+{chunk * 256}], {{a, b}};\n"
        f"st.global.u8 [{{$r5}}+{chunk * 4096}], {{$r2}};\n}}",
        read_only_args=[first, second, bits, code_at, swapped, scale_at],
    )


@cute.jit
def launch_rows(
    x: Int64, stride: Int64, weight: Int64, factor: Int64, offset: Int64, index: Int64,
    rstd_at: Int64, amax_at: Int64, decode_at: Int64, codes: Int64, scales: Int64, rows: Int32, eps: Float32,
    ctas: Int32, stream,
    columns: cutlass.Constexpr, mode: cutlass.Constexpr, fp4: cutlass.Constexpr, warps: cutlass.Constexpr,
    ctas_per_sm: cutlass.Constexpr, carveout: cutlass.Constexpr,
):  # fmt: skip
    """Launch `rows_kernel` with `ctas` CTAs of `warps` warps on a stream."""
    rows_kernel(
        x, stride, weight, factor, offset, index, rstd_at, amax_at, decode_at, codes, scales, rows, eps,
        columns, mode, fp4, warps,
    ).launch(
        grid=[ctas, 1, 1], block=[warps * WARP, 1, 1], stream=stream, min_blocks_per_mp=ctas_per_sm,
        preferred_smem_carveout=carveout,
    )  # fmt: skip
