"""Whether an implementation of an op gives what it has to: one call, compared bit by bit with an oracle.

A bf16 op has to equal its reference in every bit; a NaN may carry any payload. An op that writes NVFP4 has to equal
comfy-kitchen's CUDA quantiser applied to the reference chain: that is what ComfyUI runs. Where that quantiser is
missing, :func:`nvfp4.quantize` is the oracle; it divides where kernels multiply by approximate reciprocals, so there

* no scale differs by more than one e4m3 code, and not more than 1 % of them differ;
* where the scales agree and are not zero, no code differs by more than one step, and not more than 1 % of them differ.

In both cases the decode scale is equal, all padding is zero whatever lay in the memory before, and the arguments are
as they were. Inf and NaN are not among the inputs of NVFP4 cases: what becomes of them is not compared.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from . import nvfp4

TOLERATED = 0.01  # of the scales, and of the codes, against an oracle that divides
_FILL = 0xA5  # as codes, scales and bf16: not zero, and no NaN that an `==` would hide
_FILL_SCALARS = 0x42  # as the bits of a maximum: larger than any the cases have
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        name: what is special about it, for the reason of a refusal.
        arguments: what ``Implementation.run`` and ``Op.reference`` take, on the device.
        chain: for an op that writes NVFP4: ``(*arguments) -> bf16 [M, K]`` before the quantiser. None: a tensor comes
            out and is compared with the reference's.
        decode_scale: for an op that writes NVFP4: the static scale among the arguments, or None.
        written: position of the argument that an in-place op writes to and returns.
    """

    name: str
    arguments: tuple
    chain: Callable | None = None
    decode_scale: torch.Tensor | None = None
    written: int | None = None


def case_reason(case: Case, reference: Callable, run: Callable) -> str | None:
    """Run ``case`` through ``run`` and say what is wrong with the outcome, or None.

    Args:
        case: its arguments must not be used by anything else: an in-place op writes into them.
        reference: the op's reference.
        run: the implementation.

    Raises:
        Exception: whatever ``run`` raises.
    """
    before = _copy(case.arguments)
    if case.chain is None:
        expected = reference(*_copy(case.arguments))
        sizes = [expected.nbytes]
    else:
        expected = case.chain(*_copy(case.arguments))
        padded = nvfp4.code_shape(expected.shape), nvfp4.scale_shape(expected.shape)
        sizes = [rows * columns for rows, columns in padded]
    _leave_garbage(sizes, expected.device)
    found = run(*case.arguments)
    reason = _written_reason(case, before, found)
    if reason is None:
        if case.chain is None:
            reason = bits_reason(found, expected)
        else:
            reason = codes_reason(found, expected, case.decode_scale)
    return None if reason is None else f"{case.name}: {reason}"


def bits_reason(found, expected: torch.Tensor) -> str | None:
    """Why two tensors are not equal in every bit (NaN payloads aside), or None."""
    if not isinstance(found, torch.Tensor):
        return f"gives a {type(found).__name__}, not a tensor"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"gives {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    kind = _INTEGERS[expected.element_size()]
    unequal = found.contiguous().view(kind) != expected.contiguous().view(kind)
    if expected.dtype.is_floating_point:
        unequal &= ~(torch.isnan(found) & torch.isnan(expected))
    return _where(unequal, "values differ from the reference")


def equal_reason(found: nvfp4.NVFP4 | torch.Tensor, expected: nvfp4.NVFP4 | torch.Tensor) -> str | None:
    """Why two results of one op are not the same bytes, padding included, or None."""
    if isinstance(expected, torch.Tensor):
        return bits_reason(found, expected)
    for name in ("decode_scale", "block_scale", "codes"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        reason = bits_reason(ours.view(torch.uint8), theirs.view(torch.uint8)) if ours.dim() else None
        if ours.dim() == 0 and not torch.equal(ours, theirs):
            reason = f"is {float(ours):.9g}, not {float(theirs):.9g}"
        if reason is not None:
            return f"{name} {reason}"
    return None


def codes_reason(found, h: torch.Tensor, decode_scale: torch.Tensor | None) -> str | None:
    """Why a quantised matrix is not what quantising ``h`` [M, K] gives, or None."""
    rows, columns = h.shape
    wanted = nvfp4.code_shape(h.shape), nvfp4.scale_shape(h.shape)
    if not isinstance(found, nvfp4.NVFP4):
        return f"gives a {type(found).__name__}, not NVFP4"
    have = tuple(found.codes.shape), tuple(found.block_scale.shape)
    if have != wanted or tuple(found.shape) != (rows, columns):
        return f"gives codes {have[0]} and scales {have[1]} of {tuple(found.shape)}, not {wanted[0]} and {wanted[1]}"
    if found.codes.dtype != torch.uint8 or found.block_scale.dtype != torch.float8_e4m3fn:
        return f"gives codes {found.codes.dtype} and scales {found.block_scale.dtype}, not uint8 and float8_e4m3fn"
    g = nvfp4.default_decode_scale(h) if decode_scale is None else decode_scale.float().reshape(())
    if found.decode_scale.dtype != torch.float32 or not torch.equal(found.decode_scale.reshape(()), g):
        return f"the decode scale is {float(found.decode_scale):.9g}, not {float(g):.9g}"
    bits = found.block_scale.view(torch.uint8)
    logical = nvfp4.unswizzle(bits, rows, columns // nvfp4.BLOCK)
    stray = int((bits != 0).sum() - (logical != 0).sum()), int((found.codes[rows:] != 0).sum())
    if any(stray):
        return f"{stray[0]} scales and {stray[1]} bytes of codes in the padding are not zero"
    codes = nvfp4.unpack(found.codes[:rows])
    if float(g) == 0:
        # comfy-kitchen makes NaN scales of an all-zero tensor; ours are zero, and a zero may keep its sign.
        return _where((codes & 7) != 0, "codes are not zero") or _where(logical != 0, "scales are not zero")
    oracle = _kitchen(h, g)
    if oracle is None:
        return _close_reason(codes, logical, *_reference_codes(h, g))
    return _where(logical != oracle[1], f"scales differ from {KITCHEN}") or _where(
        codes != oracle[0], f"codes differ from {KITCHEN}"
    )


# ---------------------------------------------------------------- oracles

KITCHEN = "comfy-kitchen's CUDA quantiser"


def oracle_of(device: torch.device) -> str:
    """What NVFP4 codes are compared with on a device: comfy-kitchen's version, or ``"nvfp4.quantize"``."""
    probe = torch.linspace(-6, 6, 16 * nvfp4.BLOCK, dtype=torch.float32).bfloat16().reshape(16, -1).to(device)
    if _kitchen(probe, nvfp4.default_decode_scale(probe)) is None:
        return "nvfp4.quantize, within 1 %"
    return f"comfy-kitchen {importlib.metadata.version('comfy-kitchen')} CUDA, every bit"


def _kitchen(h: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes ``[M, K]`` and scale bits ``[M, K/16]`` of comfy-kitchen's CUDA backend, or None where it does not run.

    A build without code for this GPU may return what lay in memory, so the result has to be near the reference.
    """
    if h.device.type != "cuda":
        return None
    try:
        from comfy_kitchen.backends import cuda
        from comfy_kitchen.registry import registry

        if not registry.is_available("cuda"):
            return None
        packed, scales = cuda.quantize_nvfp4(h.contiguous(), g, 0.0, h.shape[0] % nvfp4.ROW_MULTIPLE != 0)
        torch.cuda.synchronize(h.device)
    except Exception:  # a probe: an oracle that does not run here is none
        return None
    codes = nvfp4.unpack(packed[: h.shape[0]])
    bits = nvfp4.unswizzle(scales.view(torch.uint8), h.shape[0], h.shape[1] // nvfp4.BLOCK)
    return None if _close_reason(codes, bits, *_reference_codes(h, g)) else (codes, bits)


def _reference_codes(h: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = nvfp4.quantize(h, g)
    rows, columns = h.shape
    bits = nvfp4.unswizzle(q.block_scale.view(torch.uint8), rows, columns // nvfp4.BLOCK)
    return nvfp4.unpack(q.codes[:rows]), bits


def _close_reason(codes, bits, expected_codes, expected_bits) -> str | None:
    """Why codes ``[M, K]`` and scale bits ``[M, K/16]`` are not near the reference's, or None."""
    off = (bits.int() - expected_bits.int()).abs()
    far = _where(off > 1, "scales differ from nvfp4.quantize by more than one code")
    if far or int((off > 0).sum()) > max(2, TOLERATED * off.numel()):
        return far or _where(off > 0, "scales differ from nvfp4.quantize; 1 % may")
    counted = ((off == 0) & (bits > 0)).repeat_interleave(nvfp4.BLOCK, dim=1)
    step = (_rank(codes) - _rank(expected_codes)).abs() * counted
    far = _where(step > 1, "codes differ from nvfp4.quantize by more than one step")
    if far or int((step > 0).sum()) > max(2, TOLERATED * step.numel()):
        return far or _where(step > 0, "codes differ from nvfp4.quantize; 1 % may")
    return None


def _rank(codes: torch.Tensor) -> torch.Tensor:
    """Place of each e2m1 code among the values, -7..7; both zeros have place 0."""
    magnitude = (codes & 7).int()
    return torch.where(codes >= 8, -magnitude, magnitude)


# ---------------------------------------------------------------- arguments and memory


def _written_reason(case: Case, before: tuple, found) -> str | None:
    if case.written is not None and found is not case.arguments[case.written]:
        return f"does not return argument {case.written}, which it writes to"
    for position, (now, then) in enumerate(zip(case.arguments, before, strict=True)):
        if position == case.written:
            continue
        if any(bits_reason(a, b) for a, b in zip(_tensors(now), _tensors(then), strict=True)):
            return f"writes into its argument {position}"
    return None


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _copy(value):
    """``value`` with every tensor inside cloned, strides kept."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(item) for item in value)
    return value


def _leave_garbage(sizes: Iterable[int], device: torch.device) -> None:
    """Have the allocator hand out memory that is not zero next: fill buffers of these sizes (bytes) and free them."""
    held = [torch.full((size,), _FILL, dtype=torch.uint8, device=device) for size in sizes for _ in range(3) if size]
    held += [torch.full((4,), _FILL_SCALARS, dtype=torch.uint8, device=device) for _ in range(4)]
    held.clear()


def _where(unequal: torch.Tensor, what: str) -> str | None:
    """``"3 of 80 <what>, the first at row 1, column 7"`` for a matrix of booleans, or None. Waits for the device."""
    count = int(unequal.sum())
    if not count:
        return None
    first = int(unequal.flatten().int().argmax())
    at = f"element {first}"
    if unequal.dim() == 2:
        at = "row {}, column {}".format(*divmod(first, unequal.shape[1]))
    return f"{count} of {unequal.numel()} {what}, the first at {at}"
