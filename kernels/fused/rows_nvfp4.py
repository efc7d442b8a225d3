"""``nvfp4(x)`` of the attention output: the input of ``attn.out_proj``."""

from __future__ import annotations

import torch

from .. import nvfp4
from . import _launch, _op


def rows(x: torch.Tensor) -> torch.Tensor:
    """View ``[H, S, D]`` as ``[S, H*D]`` (a copy where the strides do not allow a view); 2-D is returned as it is."""
    return x if x.dim() == 2 else x.transpose(0, 1).reshape(x.shape[1], -1)


def reference(x, decode_scale):
    return nvfp4.quantize(rows(x), decode_scale)


def bytes_moved(rows: int, columns: int, element_bytes: int = 2, static: bool = False) -> int:
    """Two readings of x (one with a static scale), codes and scales out."""
    readings = 1 if static else 2
    return rows * columns * element_bytes * readings + rows * columns // 2 + rows * columns // 16


def _accepts(x, decode_scale) -> str | None:
    columns = x.shape[1] if x.dim() == 2 else x.shape[0] * x.shape[2]
    return _launch.shape_refusal(x if x.dim() == 2 else x[0], columns)


def _triton(x, decode_scale):
    from . import _swiglu_triton

    return _swiglu_triton.rows_nvfp4(x, decode_scale)


OP = _op.Op(
    "rows_nvfp4",
    "attention output, NVFP4 out",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, _accepts),),
)


def rows_nvfp4(x: torch.Tensor, *, decode_scale: torch.Tensor | None = None, impl: str = "auto") -> nvfp4.NVFP4:
    """Quantise the attention output, whichever way the backend laid it out.

    Args:
        x: ``[S, H*D]``, or ``[H, S, D]`` as a backend without output reshape returns it.
        decode_scale: fp32 0-d static per-tensor scale, or None for ``amax / 2688``.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        :class:`nvfp4.NVFP4` of logical shape ``[S, H*D]`` (layout as in :func:`norm_modulate_nvfp4`).

    Raises:
        ValueError, TypeError: wrong rank or dtype.
        FusedRefused: the implementation asked for cannot run here.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"{OP.name}: x must be [S, H*D] or [H, S, D], have {tuple(x.shape)}")
    if x.dtype not in _op.FLOAT_DTYPES:
        raise TypeError(f"{OP.name}: x must be bf16, fp16 or fp32, have {x.dtype}")
    return _op.run(OP, x.device, impl, x, decode_scale)
