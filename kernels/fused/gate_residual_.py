"""``x[a:b] += gate[row] * y[a:b]`` per segment, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _launch, _op


def reference(x, gate, y, segments):
    for start, stop, row in segments:
        x[start:stop].addcmul_(y[start:stop], gate[row].to(x.dtype))
    return x


def bytes_moved(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Read x and y, write x."""
    return 3 * rows * columns * element_bytes


def _accepts(x, gate, y, segments) -> str | None:
    if gate.dtype not in (torch.bfloat16, torch.float32):
        return f"needs an fp32 or bf16 table, have {gate.dtype}"
    if x.stride(-1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
        return "needs rows of whole 32-bit words to write into"
    return _launch.shape_refusal(x, x.shape[1])


def _triton(*arguments):
    from . import _gate_triton

    return _gate_triton.gate_residual_(*arguments)


OP = _op.Op(
    "gate_residual_",
    "gated residual, in place",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, _accepts),),
)


def gate_residual_(
    x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, segments: Sequence, *, impl: str = "auto"
) -> torch.Tensor:
    """``x[a:b] += gate[row] * y[a:b]`` for each segment ``(a, b, row)``, written into ``x``.

    The product and the sum round once together (``addcmul``), after the gate row was cast to x's dtype.

    Args:
        x: ``[S, K]`` bf16 residual stream (fp32 and fp16 in the reference), changed in place.
        gate: ``[T, K]`` fp32 or bf16 table.
        y: ``[S, K]`` in x's dtype: the output of ``attn.out_proj`` or ``mlp.fc2``.
        segments: list of ``(start, stop, row)``; ``row`` an int or a LongTensor ``[stop - start]``.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        ``x`` itself.

    Raises:
        ValueError, TypeError: shapes, dtypes or segments that do not fit.
        FusedRefused: the implementation asked for cannot run here.

    Source: ``_mod_gate`` in ComfyUI's ``comfy/ldm/minimax/model.py``.
    """
    _op.check_rows(OP.name, "x", x)
    _op.check_rows(OP.name, "gate", gate, x.shape[1])
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(f"{OP.name}: y must be {tuple(x.shape)} {x.dtype} like x, have {tuple(y.shape)} {y.dtype}")
    _op.check_segments(OP.name, segments, x.shape[0], gate.shape[0])
    return _op.run(OP, x.device, impl, x, gate, y, segments)
