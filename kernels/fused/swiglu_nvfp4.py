"""``nvfp4(silu(gate) * up)``: the input of ``mlp.fc2``."""

from __future__ import annotations

import torch

from .. import nvfp4
from . import _launch, _op
from .swiglu import accepts, check
from .swiglu import reference as bf16_reference


def reference(gate_up, decode_scale):
    return nvfp4.quantize(bf16_reference(gate_up), decode_scale)


def bytes_moved(rows: int, columns: int, element_bytes: int = 2, static: bool = False) -> int:
    """Gate and up read twice (once with a static scale), codes and scales out; ``columns`` counts output columns."""
    readings = 1 if static else 2
    return 2 * rows * columns * element_bytes * readings + rows * columns // 2 + rows * columns // 16


def _triton(gate_up, decode_scale):
    from . import _swiglu_triton

    return _swiglu_triton.swiglu_nvfp4(gate_up, decode_scale)


OP = _op.Op(
    "swiglu_nvfp4",
    "silu(gate) * up, NVFP4 out",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, accepts),),
)


def swiglu_nvfp4(gate_up: torch.Tensor, *, decode_scale: torch.Tensor | None = None, impl: str = "auto") -> nvfp4.NVFP4:
    """:func:`swiglu` followed by :func:`nvfp4.quantize`, as one op, with both roundings of SwiGLU kept.

    Args:
        gate_up: ``[S, 2F]``, gate first.
        decode_scale: fp32 0-d static per-tensor scale, or None for ``amax / 2688`` of the product.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        :class:`nvfp4.NVFP4` of logical shape ``[S, F]`` (layout as in :func:`norm_modulate_nvfp4`).

    Raises:
        ValueError, TypeError: wrong rank, dtype or an odd number of columns.
        FusedRefused: the implementation asked for cannot run here.
    """
    check(OP.name, gate_up)
    return _op.run(OP, gate_up.device, impl, gate_up, decode_scale)
