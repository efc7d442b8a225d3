"""NVFP4 as ComfyUI stores and multiplies it: the one definition of the format, in plain torch.

``value = e2m1(code) * e4m3(block_scale) * decode_scale``

For a logical matrix ``[M, K]``:

* ``codes``, uint8 ``[roundup(M, 16), roundup(K, 16)/2]``: two e2m1 codes a byte, the even element in the HIGH nibble;
* ``block_scale``, float8_e4m3fn ``[roundup(M, 128), roundup(ceil(K/16), 4)]``: one scale for 16 elements of a row, in
  the 128x4 order of cuBLAS (see `swizzle`);
* ``decode_scale``, float32, 0-d: one per tensor, to multiply by: ``amax / (448*6)``.

All padding is zero. ModelOpt, torchao and LightX2V put the even element in the LOW nibble and leave the scales
unswizzled: such bytes have to be converted (``checkpoint.layout``), they cannot be recognised by their shape.

This is the reference: byte for byte what comfy-kitchen's eager backend makes (checked against 0.2.31 on the CPU, for
finite input and a decode scale above zero), and defined where that backend is not: see `quantize`. comfy-kitchen's CUDA
quantiser multiplies by approximate reciprocals instead; against it about 5e-4 of the codes differ by one step.
"""

from dataclasses import dataclass

import torch

BLOCK = 16
"""Elements of a row that share a block scale."""
ROW_MULTIPLE = 16
"""Rows of ``codes`` are padded to a multiple of this."""
SCALE_TILE_ROWS = 128
SCALE_TILE_COLS = 4
"""``block_scale`` is padded to, and swizzled in, tiles of 128 rows by 4 blocks: 512 bytes."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
RANGE = E4M3_MAX * E2M1_MAX
"""Largest magnitude in units of the decode scale: 2688."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows are worked through in pieces of about this many elements, so that a 28672 x 5376 weight needs a few 16 MiB
# temporaries and not several 600 MiB ones.
_PIECE_ELEMENTS = 1 << 22


def roundup(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class NVFP4:
    """A quantised matrix; see the module's table for dtypes, shapes and byte order."""

    codes: torch.Tensor
    block_scale: torch.Tensor
    decode_scale: torch.Tensor
    shape: tuple[int, int]


def code_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of ``codes`` for a logical ``(M, K)``: ``(130, 80)`` gives ``(144, 40)``."""
    rows, cols = shape
    return roundup(rows, ROW_MULTIPLE), roundup(cols, BLOCK) // 2


def scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of ``block_scale`` for a logical ``(M, K)``: ``(130, 80)`` gives ``(256, 8)``."""
    rows, cols = shape
    return roundup(rows, SCALE_TILE_ROWS), roundup(-(-cols // BLOCK), SCALE_TILE_COLS)


def pack(codes4: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes into one byte, the even element in the high nibble: ``[7, 13]`` becomes ``[0x7d]``.

    Args:
        codes4: uint8, last dimension even, each value below 16 (not checked: it would read the data).

    Returns:
        uint8 with half the last dimension.
    """
    if codes4.dtype != torch.uint8 or codes4.ndim == 0 or codes4.shape[-1] % 2:
        raise ValueError(
            f"pack: wants uint8 codes with an even last dimension, has {codes4.dtype} {tuple(codes4.shape)}; "
            f"pad to {BLOCK}"
        )
    return (codes4[..., 0::2] << 4) | codes4[..., 1::2]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: ``[0x7d]`` becomes ``[7, 13]`` (uint8, twice the last dimension)."""
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise ValueError(f"unpack: wants packed uint8 codes, has {packed.dtype} {tuple(packed.shape)}")
    return torch.stack((packed >> 4, packed & 0x0F), dim=-1).flatten(-2)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Row-major block scales into cuBLAS's 128x4 order, padded with zeros.

    The scale of row r and block c goes to byte
    ``((r//128)*ceil(Kb/4) + c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + c%4``.

    Args:
        scales: ``[M, Kb]``, any dtype (float8_e4m3fn or the same bits as uint8).

    Returns:
        A new contiguous tensor ``[roundup(M, 128), roundup(Kb, 4)]`` of the same dtype.
    """
    if scales.ndim != 2:
        raise ValueError(f"swizzle: wants scales [rows, blocks], has shape {tuple(scales.shape)}")
    rows, cols = scales.shape
    padded = scales.new_zeros(roundup(rows, SCALE_TILE_ROWS), roundup(cols, SCALE_TILE_COLS))
    padded[:rows, :cols] = scales
    # r = 128*tile_row + 32*quarter + lane and c = 4*tile_col + c4; the bytes run tile_row, tile_col, lane, quarter, c4
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def unswizzle(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle`: the ``[rows, cols]`` scales, row-major; what lies in the padding is never looked at."""
    want = (roundup(rows, SCALE_TILE_ROWS), roundup(cols, SCALE_TILE_COLS))
    if tuple(scales.shape) != want:
        raise ValueError(
            f"unswizzle: {rows} rows of {cols} blocks are stored as {list(want)}, have {list(scales.shape)}; "
            "scales that were never swizzled need layout 'modelopt'"
        )
    tiles = scales.reshape(want[0] // 128, want[1] // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(want)[:rows, :cols].contiguous()


def count_nonfinite(x: torch.Tensor) -> tuple[int, int]:
    """``(number of Inf, number of NaN)`` in `x`. Reads the result on the host: on a GPU it waits for the device."""
    return int(torch.isinf(x).sum()), int(torch.isnan(x).sum())


def default_decode_scale(x: torch.Tensor) -> torch.Tensor:
    """``fp32(amax(|x|) / 2688)``, divided in x's own dtype, as ComfyUI does for weights and activations.

    The bf16 or fp16 rounding is part of the format's bytes, so it is kept. In fp16 it is coarse for an amax below about
    0.16, where the quotient is subnormal: pass a scale to `quantize` there if that matters.
    Inf and NaN are left out of the maximum. Where the quotient underflows to zero it is taken again in fp32; it is zero
    only for a tensor without a finite non-zero element (or an amax below about 1.9e-42).

    Args:
        x: ``[M, K]`` fp32, bf16 or fp16; empty gives 0.

    Returns:
        fp32, 0-d, on x's device. Never waits for the device.
    """
    _check_matrix("default_decode_scale", x)
    amax = _finite_amax(x)
    scale = (amax / RANGE).to(torch.float32)
    return torch.where(scale == 0, amax.to(torch.float32) / RANGE, scale)


def quantize(x: torch.Tensor, decode_scale: torch.Tensor | float | None = None) -> NVFP4:
    """Quantise a matrix: for each 16 elements of a row ``s = e4m3(amax/6 / d)``, then ``code = e2m1(x / (d*s))``.

    All arithmetic is fp32 with true division; both roundings are to nearest, ties to even, saturating. A block whose
    scale rounds to zero gets zero codes. A negative value that rounds to zero keeps its sign (code 8).

    Where comfy-kitchen's eager backend spreads NaN, this does not:

    * all zero, or a decode scale of 0: codes, scales and decode scale are zero; no scale byte is ever
      0x7F, 0xFF or >= 0x80;
    * Inf saturates, with its sign, to ``2688 * decode_scale``: without a given scale that is the largest finite
      magnitude of the tensor, up to the rounding of the scale (a tensor of nothing but Inf and zeros becomes zeros);
    * NaN becomes 0. Neither changes a block other than its own. `count_nonfinite` counts them; this function does not
      raise on them, because it would have to wait for the GPU.

    Args:
        x: ``[M, K]`` fp32, bf16 or fp16, any strides, any M and K (0 included), CPU or CUDA.
        decode_scale: fp32 scalar, one-element tensor or number; None means `default_decode_scale`. Checked to be finite
            and not negative where that needs no device synchronisation, that is for a number or a CPU tensor.

    Returns:
        An `NVFP4` on x's device. Temporaries stay under about 100 MiB whatever the size of x.

    Raises:
        ValueError: wrong rank, wrong dtype, or a decode scale that is not one finite, non-negative number.
    """
    _check_matrix("quantize", x)
    x = x.detach()
    rows, cols = x.shape
    decode_scale = default_decode_scale(x) if decode_scale is None else _as_decode_scale(decode_scale, x.device)

    codes = torch.zeros(code_shape((rows, cols)), dtype=torch.uint8, device=x.device)
    scales = torch.zeros(rows, -(-cols // BLOCK), dtype=torch.float8_e4m3fn, device=x.device)
    for start, stop in _pieces(rows, cols):
        piece = x[start:stop].to(torch.float32)
        piece = torch.where(torch.isnan(piece), 0.0, piece)
        piece = torch.nn.functional.pad(piece, (0, scales.shape[1] * BLOCK - cols))
        codes4, scales[start:stop] = _quantize_blocks(piece.reshape(stop - start, -1, BLOCK), decode_scale)
        codes[start:stop] = pack(codes4)
    return NVFP4(codes, swizzle(scales), decode_scale, (rows, cols))


def dequantize(q: NVFP4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``e2m1 * (decode_scale * e4m3)`` in fp32, then one cast to `dtype`.

    Args:
        q: codes, swizzled scales and decode scale on one device. Only the elements of the logical shape are read, so
            the result does not depend on what lies in the padding.
        dtype: any floating dtype. comfy-kitchen's eager backend multiplies in the output dtype; in fp32 both give the
            same bits, in bf16 it rounds once more than this.

    Returns:
        ``q.shape``, contiguous. Never waits for the device.
    """
    rows, cols = q.shape
    if q.codes.dtype != torch.uint8 or tuple(q.codes.shape) != code_shape(q.shape):
        raise ValueError(
            f"dequantize: {rows}x{cols} needs uint8 codes {list(code_shape(q.shape))}, has {q.codes.dtype} "
            f"{list(q.codes.shape)}"
        )
    if q.block_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"dequantize: block_scale must be float8_e4m3fn, is {q.block_scale.dtype}; view the bytes, do not convert"
        )
    blocks = -(-cols // BLOCK)
    scales = unswizzle(q.block_scale, rows, blocks)
    values = _e2m1_values(q.codes.device)
    out = torch.empty(rows, cols, dtype=dtype, device=q.codes.device)
    for start, stop in _pieces(rows, cols):
        index = unpack(q.codes[start:stop]).to(torch.int32).flatten()
        block = values.index_select(0, index).view(stop - start, blocks, BLOCK)
        block = block * (scales[start:stop].to(torch.float32) * q.decode_scale).unsqueeze(-1)
        out[start:stop] = block.view(stop - start, -1)[:, :cols]
    return out


def _check_matrix(what: str, x: torch.Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"{what}: wants a matrix [M, K], has shape {list(x.shape)}; reshape to rows first")
    if x.dtype not in DTYPES:
        raise ValueError(f"{what}: dtype must be float32, bfloat16 or float16, is {x.dtype}")


def _as_decode_scale(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """`value` as an fp32 0-d tensor on `device`, checked when the check costs no synchronisation."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or not value.dtype.is_floating_point:
            raise ValueError(
                f"quantize: decode_scale must be one floating point number, is {value.dtype} {list(value.shape)}"
            )
        if value.device.type != "cpu":
            return value.detach().to(device=device, dtype=torch.float32).reshape(())
        value = value.detach().to(torch.float32).item()
    if not 0 <= value <= torch.finfo(torch.float32).max:
        raise ValueError(f"quantize: decode_scale must be finite in fp32 and not negative, is {value}")
    return torch.full((), value, dtype=torch.float32, device=device)


def _pieces(rows: int, cols: int) -> list[tuple[int, int]]:
    step = max(1, _PIECE_ELEMENTS // max(1, cols))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)] if cols else []


def _finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude in x's dtype, 0-d; 0 for an empty matrix or one without finite elements."""
    amax = torch.zeros((), dtype=x.dtype, device=x.device)
    for start, stop in _pieces(*x.shape):
        piece = x[start:stop]
        amax = torch.maximum(amax, torch.where(torch.isfinite(piece), piece.abs(), 0.0).amax())
    return amax


def _quantize_blocks(blocks: torch.Tensor, decode_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``[R, Kb, 16]`` without NaN to codes uint8 ``[R, 16*Kb]`` (one a byte) and scales e4m3 ``[R, Kb]``."""
    # a tensor, because CUDA divides by a Python number through its reciprocal
    scale = blocks.abs().amax(dim=-1) / torch.full_like(decode_scale, E2M1_MAX) / decode_scale
    # 0/0 where the decode scale is zero; that the cast saturates above 448 is not promised
    scale = torch.where(decode_scale == 0, 0.0, scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (decode_scale * scale.to(torch.float32)).unsqueeze(-1)
    quotient = torch.where(step == 0, 0.0, blocks / step)
    return e2m1_codes(quotient).flatten(1), scale


def e2m1_codes(v: torch.Tensor) -> torch.Tensor:
    """e2m1 code of each fp32 value, to nearest, ties to the even code, saturating at 6; NaN is not expected.

    The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7, so the code is the number of midpoints passed; at a
    midpoint itself the even neighbour wins, hence the alternation of > and >=.
    """
    magnitude = v.abs()
    code = torch.signbit(v).to(torch.uint8) << 3
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code


def _e2m1_values(device: torch.device) -> torch.Tensor:
    """The 16 values by code, fp32; computed on the device, because copying a table there would synchronise."""
    code = torch.arange(8, device=device)
    exponent, mantissa = code >> 1, code & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    magnitude = halves.to(torch.float32) * 0.5
    return torch.cat((magnitude, -magnitude))
