"""NVFP4 weights with a choice of block scales, worked through in pieces of rows, with the error that they leave.

``amax``: ComfyUI's own choice, which maps the largest of 16 weights to 6 (`nvfp4.quantize`, the same bytes).

``adaptive``: e2m1's steps are 0.5 up to 2, 1 up to 4 and then 2, so what lies between 4 and 6 of its block's scale
loses most. A block may also map its largest weight to 4, which gives up the coarse last step for finer ones, and either
scale may move by one step of e4m3; of these six the one with the least squared error stays. The choice of 4 or 6 is
that of "Four Over Six" (2025); the neighbours are ours. A scale for 4 is 1.5 times one for 6: the decode scale is
therefore ``amax / (256*6)``, so that the largest block has room (384 of 448).

Relative error, fp32, 2M weights (``research/records/cpu_scale_choice.json``): amax leaves 0.095 on a Gaussian; 4 or 6
alone takes 8.6 % off that on a Gaussian, 5.9 % on a Laplacian and 4.1 % on Student's t with 3 degrees of freedom, the
six candidates 14.4, 10.9 and 7.8 %.
"""

from collections.abc import Callable, Iterator

import torch

from .. import nvfp4
from .writer import nonfinite

CHOICES = ("adaptive", "amax")
ADAPTIVE_RANGE = 256 * nvfp4.E2M1_MAX
_TARGETS = (6.0, 4.0)
_STEPS = (0, 1, -1)
_LARGEST = 0x7E  # the byte of 448, e4m3's largest number

# A piece is a multiple of 128 rows: whole tiles of block scales, so that pieces can be quantised on their own.
_PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}


class Weight:
    """A matrix in a dtype that is no arithmetic type, or is one, seen in fp32 a few rows at a time.

    Args:
        stored: ``[N, K]`` fp32, bf16, fp16, float8_e4m3fn or float8_e5m2.
        scale: fp32 factor of the stored values: 0-d, or ``[N, 1]``; None for one.
        device: where the arithmetic runs.
    """

    def __init__(self, stored: torch.Tensor, scale: torch.Tensor | None, device: torch.device):
        self.shape = tuple(stored.shape)
        self.device = device
        # a tensor of 600 MB crosses to a GPU once; on the CPU this is the tensor itself
        self._stored, self._scale = stored.to(device), None if scale is None else scale.to(device)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """fp32 ``[stop - start, K]``."""
        piece = self._stored[start:stop].to(torch.float32)
        if self._scale is None:
            return piece
        return piece * (self._scale if self._scale.ndim == 0 else self._scale[start:stop])

    def amax(self, tick: Callable[[], None]) -> torch.Tensor:
        """Largest magnitude, fp32, 0-d; Inf or NaN where the weight has one. `tick` is called at every piece."""
        amax = torch.zeros((), device=self.device)
        for start, stop in pieces(*self.shape, self.device):
            tick()
            amax = torch.maximum(amax, self.rows(start, stop).abs().amax())
        return amax

    def decode_scale(self, choice: str, amax: torch.Tensor) -> torch.Tensor:
        """fp32, 0-d. ``amax`` divides in the stored dtype, as ComfyUI does, where that is an arithmetic one."""
        if choice == "amax":
            own = self._scale is None and self._stored.dtype in nvfp4.DTYPES
            return nvfp4.default_decode_scale(amax.to(self._stored.dtype if own else torch.float32).reshape(1, 1))
        return amax / torch.full_like(amax, ADAPTIVE_RANGE)

    def count_nonfinite(self) -> tuple[int, int]:
        """``(number of Inf, number of NaN)``."""
        found = [nvfp4.count_nonfinite(self.rows(*piece)) for piece in pieces(*self.shape, self.device)]
        return sum(inf for inf, _ in found), sum(nan for _, nan in found)


def pieces(rows: int, cols: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Row ranges of about a fixed number of elements, each but the last a multiple of 128 rows."""
    tile = nvfp4.SCALE_TILE_ROWS
    elements = _PIECE_ELEMENTS.get(device.type, _PIECE_ELEMENTS["cpu"])
    step = max(tile, elements // max(1, cols) // tile * tile)
    return ((start, min(start + step, rows)) for start in range(0, rows, step)) if cols else iter(())


def quantize(
    weight: Weight,
    choice: str = "adaptive",
    tick: Callable[[float], None] | None = None,
    *,
    name: str = "",
    file: str = "",
) -> tuple[nvfp4.NVFP4, float]:
    """Quantise a weight.

    Args:
        choice: one of `CHOICES`.
        tick: called with the share that is done, at every piece; may raise to cancel.
        name, file: the layer and the file's name, for an error.

    Returns:
        The NVFP4 weight on the weight's device, and ``|W - dequantised| / |W|`` (Frobenius; 0 for a weight of zeros).

    Raises:
        ValueError: an unknown choice.
        CheckpointError: ``nonfinite_weight``, with both counts.
    """
    if choice not in CHOICES:
        raise ValueError(f"scale must be one of {', '.join(CHOICES)}, is {choice!r}")
    rows, cols = weight.shape
    report = tick if tick is not None else lambda share: None
    amax = weight.amax(lambda: report(0.0))
    if not bool(torch.isfinite(amax)):
        raise nonfinite(file, name, *weight.count_nonfinite(), rows * cols)
    decode_scale = weight.decode_scale(choice, amax)
    unit = torch.where(amax > 0, amax, 1.0)
    codes = torch.zeros(nvfp4.code_shape(weight.shape), dtype=torch.uint8, device=weight.device)
    scale_shape = nvfp4.scale_shape(weight.shape)
    block_scale = torch.zeros(scale_shape, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn)
    lost = whole = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start, stop in pieces(rows, cols, weight.device):
        piece = weight.rows(start, stop)
        q = nvfp4.quantize(piece, decode_scale) if choice == "amax" else _adaptive(piece, decode_scale)
        codes[start : start + q.codes.shape[0]] = q.codes
        block_scale.view(torch.uint8)[start : start + q.block_scale.shape[0]] = q.block_scale.view(torch.uint8)
        # in units of the largest weight: the square of 1e20 or of 1e-25 is no fp32 number
        whole = whole + (piece / unit).square_().sum(dtype=torch.float64)
        lost = lost + piece.sub(nvfp4.dequantize(q)).div_(unit).square_().sum(dtype=torch.float64)
        report(stop / rows)
    error = float((lost / whole).sqrt()) if float(whole) > 0 else 0.0
    return nvfp4.NVFP4(codes, block_scale, decode_scale, (rows, cols)), error


def _adaptive(x: torch.Tensor, decode_scale: torch.Tensor) -> nvfp4.NVFP4:
    """Quantise fp32 rows with the best of six scales for each block of 16."""
    rows, cols = x.shape
    blocks = -(-cols // nvfp4.BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * nvfp4.BLOCK - cols)).view(rows, blocks, nvfp4.BLOCK)
    magnitude = padded.abs()
    amax = magnitude.amax(dim=-1)
    best_scale, best_error = None, None
    for target in _TARGETS:
        scale = amax / torch.full_like(decode_scale, target) / decode_scale
        scale = torch.where(decode_scale == 0, 0.0, scale).clamp(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)
        byte = scale.view(torch.uint8).to(torch.int16)
        for step in _STEPS:
            # the neighbour of a positive e4m3 number is the next byte; a block of zeros gets its zero below
            candidate = (byte + step).clamp(0, _LARGEST).to(torch.uint8).view(torch.float8_e4m3fn)
            error = _squared_error(magnitude, candidate.to(torch.float32) * decode_scale)
            if best_scale is None:
                best_scale, best_error = candidate.view(torch.uint8), error
                continue
            better = error < best_error
            best_scale = torch.where(better, candidate.view(torch.uint8), best_scale)
            best_error = torch.where(better, error, best_error)
    best_scale = torch.where(amax == 0, 0, best_scale).view(torch.float8_e4m3fn)
    unit = (decode_scale * best_scale.to(torch.float32)).unsqueeze(-1)
    codes4 = nvfp4.e2m1_codes(torch.where(unit == 0, 0.0, padded / unit)).flatten(1)
    codes = torch.zeros(nvfp4.code_shape((rows, cols)), dtype=torch.uint8, device=x.device)
    codes[:rows] = nvfp4.pack(codes4)
    return nvfp4.NVFP4(codes, nvfp4.swizzle(best_scale), decode_scale, (rows, cols))


def _squared_error(magnitude: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Sum over each block of ``(unit * e2m1(magnitude / unit) - magnitude)**2``; ``[rows, blocks]``.

    e2m1's magnitudes are the multiples of 0.5 up to 2, of 1 up to 4 and of 2 up to 6, and rounding a multiple to even
    is rounding the code to even, so torch's own rounding gives the value that `nvfp4.e2m1_codes` encodes.
    """
    unit = unit.unsqueeze(-1)
    # a block whose scale is zero becomes zeros, and the product below says so
    size = (magnitude / unit.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(max=nvfp4.E2M1_MAX)
    # half the power of two at or below a number from 1 on: its exponent bits alone
    grain = (size.clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32).mul_(0.5)
    value = size.div_(grain).round_().mul_(grain.mul_(unit))
    return value.sub_(magnitude).square_().sum(dim=-1)
