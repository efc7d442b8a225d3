"""``nvfp4(RMSNorm(x) * (1 + scale[row]) + shift[row])`` per segment: the input of ``attn.qkv_proj`` and ``mlp.fc1``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import nvfp4
from . import _launch, _op, norm_modulate_nvfp4__cute
from .norm_modulate import accepts, check
from .norm_modulate import reference as bf16_reference


def reference(x, weight, eps, scale, shift, segments, decode_scale, norm):
    return nvfp4.quantize(bf16_reference(x, weight, eps, scale, shift, segments, norm), decode_scale)


def stand_in(x, weight, eps, scale, shift, segments, decode_scale, norm):
    """The reference with ATen's norm (see ``norm_modulate.stand_in``)."""
    return reference(x, weight, eps, scale, shift, segments, decode_scale, "aten")


def bytes_moved(rows: int, columns: int, element_bytes: int = 2, static: bool = False) -> int:
    """Two readings of x (for the maximum, then to quantise; one with a static scale), codes and scales out."""
    readings = 1 if static else 2
    return rows * columns * element_bytes * readings + rows * columns // 2 + rows * columns // 16


def _triton(*arguments):
    from . import _modulate_triton

    return _modulate_triton.nvfp4_rows(*arguments)


def _own_norm_cases(device):
    from . import _cases

    return _cases.norm_modulate_nvfp4(device, "fused")


TRITON = _op.Implementation("triton", _triton, _launch.device_refusal, accepts)
CUTE = _op.Implementation(
    "cute",
    norm_modulate_nvfp4__cute.run,
    norm_modulate_nvfp4__cute.refuse,
    norm_modulate_nvfp4__cute.accepts,
    cases=_own_norm_cases,
    by_name=True,  # level with the other on an H200 (research/REPRODUCIBILITY.md)
)

OP = _op.Op(
    "norm_modulate_nvfp4",
    "RMSNorm and per-segment modulation, NVFP4 out",
    reference,
    bytes_moved,
    (TRITON, CUTE),
    stand_in=stand_in,
)


def norm_modulate_nvfp4(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
    segments: Sequence,
    *,
    decode_scale: torch.Tensor | None = None,
    impl: str = "auto",
    norm: str = "aten",
) -> nvfp4.NVFP4:
    """:func:`norm_modulate` followed by :func:`nvfp4.quantize`, as one op.

    Every rounding of the unfused chain is kept: norm, table row and ``1 + scale``, product, sum, then the quantiser's.

    Args:
        x, weight, eps, scale, shift, segments, norm: as in :func:`norm_modulate`.
        decode_scale: fp32 0-d, the static per-tensor scale (multiply to decode); None takes it from the tensor's
            largest magnitude, ``amax / 2688``, without waiting for the device.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        :class:`nvfp4.NVFP4` of logical shape ``[S, K]``: even element in the high nibble, block scales swizzled
        128x4, rows of codes padded to 16 and scales to 128x4 with zeros.

    Raises:
        ValueError, TypeError: shapes, dtypes or segments that do not fit.
        FusedRefused: the implementation asked for cannot run here.
    """
    check(OP.name, x, weight, scale, shift, segments, norm)
    return _op.run(OP, x.device, impl, x, weight, eps, scale, shift, segments, decode_scale, norm)
