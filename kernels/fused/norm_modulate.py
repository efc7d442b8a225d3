"""``h[a:b] = RMSNorm(x)[a:b] * (1 + scale[row]) + shift[row]`` per segment, bf16 out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _launch, _op

NORMS = ("aten", "fused")


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, norm: str) -> torch.Tensor:
    """RMSNorm over the last axis in the stream's dtype.

    ``"aten"`` is ``torch.nn.functional.rms_norm``, which is what ComfyUI runs: bit-equal to it by construction.
    ``"fused"`` is the formula ``dtype(weight * (x * rsqrt(mean(x^2) + eps)))`` with fp32 inside and one rounding, the
    arithmetic of a kernel that reads x itself; its sum is taken in another order, so about 1e-6 of values move by one
    unit in the last place.
    """
    if norm == "aten":
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (wide * rstd)).to(x.dtype)


def modulate_(h: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, segments: Sequence) -> torch.Tensor:
    """Modulate ``h`` [S, K] in place, with the three roundings of ComfyUI's chain.

    1. the table row is cast to h's dtype and ``1 + scale`` rounds to it; 2. the product rounds; 3. the sum rounds.
    """
    for start, stop, row in segments:
        h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return h


def reference(x, weight, eps, scale, shift, segments, norm):
    return modulate_(normalise(x, weight, eps, norm), scale, shift, segments)


def stand_in(x, weight, eps, scale, shift, segments, norm):
    """The reference with ATen's norm: the formula of ``norm="fused"`` is not ATen's to the bit, a kernel's is."""
    return reference(x, weight, eps, scale, shift, segments, "aten")


def bytes_moved(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Read x once, write h once; tables and weight stay in cache."""
    return 2 * rows * columns * element_bytes


def accepts(x, weight, eps, scale, shift, *rest) -> str | None:
    """Why the Triton kernels do not take these arguments, or None."""
    if weight.dtype != x.dtype:
        return f"needs the weight in x's dtype, have {weight.dtype} and {x.dtype}"
    if scale.dtype not in (torch.bfloat16, torch.float32) or scale.dtype != shift.dtype:
        return f"needs tables of one dtype, fp32 or bf16, have {scale.dtype} and {shift.dtype}"
    return _launch.shape_refusal(x, x.shape[1])


def _triton(*arguments):
    from . import _modulate_triton

    return _modulate_triton.bf16_rows(*arguments)


OP = _op.Op(
    "norm_modulate",
    "RMSNorm and per-segment modulation, bf16 out",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, accepts),),
    stand_in=stand_in,
)


def check(op: str, x, weight, scale, shift, segments, norm: str) -> None:
    """Refuse arguments that do not fit together (used by the NVFP4 twin as well)."""
    _op.check_rows(op, "x", x)
    columns = x.shape[1]
    if tuple(weight.shape) != (columns,):
        raise ValueError(f"{op}: weight must be [{columns}], have {tuple(weight.shape)}")
    _op.check_rows(op, "scale", scale, columns)
    _op.check_rows(op, "shift", shift, columns)
    if scale.shape != shift.shape:
        raise ValueError(f"{op}: scale {tuple(scale.shape)} and shift {tuple(shift.shape)} must have one shape")
    if norm not in NORMS:
        raise ValueError(f"{op}: norm must be one of {', '.join(NORMS)}, have {norm!r}")
    _op.check_segments(op, segments, x.shape[0], scale.shape[0])


def norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
    segments: Sequence,
    *,
    impl: str = "auto",
    norm: str = "aten",
) -> torch.Tensor:
    """``h[a:b] = RMSNorm(x)[a:b] * (1 + scale[row]) + shift[row]`` for each segment ``(a, b, row)``.

    Rows outside every segment come out normalised and not modulated, as in ComfyUI. ``x`` is left unchanged.

    Args:
        x: ``[S, K]`` bf16 (fp32 and fp16 in the reference), the residual stream.
        weight: ``[K]`` RMSNorm weight, in x's dtype for bit equality with ComfyUI.
        eps: added to the mean square.
        scale: ``[T, K]`` fp32 or bf16 modulation table; rows are cast to x's dtype before use.
        shift: ``[T, K]``, likewise.
        segments: list of ``(start, stop, row)``; ``row`` an int or a LongTensor ``[stop - start]`` on x's device.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.
        norm: ``"aten"`` (ComfyUI's own norm) or ``"fused"``.

    Returns:
        ``[S, K]`` in x's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or segments that do not fit.
        FusedRefused: the implementation asked for cannot run here.

    Source: ``_mod_scale_shift`` and ``DiTBlock.forward`` in ComfyUI's ``comfy/ldm/minimax/model.py``.
    """
    check(OP.name, x, weight, scale, shift, segments, norm)
    return _op.run(OP, x.device, impl, x, weight, eps, scale, shift, segments, norm)
