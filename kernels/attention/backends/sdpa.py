"""``softmax(q k^T * scale) v`` by PyTorch's own ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch

from .. import Backend, Call

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Full attention on ``[B, H, S, D]`` tensors of one dtype, any strides, any head_dim, on any device.

    On the CPU this is bit for bit what ComfyUI's ``attention_pytorch`` computes. On a GPU PyTorch picks one of its
    kernels (flash, cuDNN, memory-efficient, math) in its own order, ComfyUI asks for its order; the results differ by
    rounding.
    """
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def load():
    """Return :func:`attend`; PyTorch is there already."""
    return attend


def refuse(call: Call) -> str | None:
    """Refuse dtypes that PyTorch has no attention for."""
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16, float16, float32 or float64, have {call.dtype}"
    return None


BACKEND = Backend(
    name="sdpa",
    exact=True,
    needs="torch",
    load=load,
    refuse=refuse,
    summary="PyTorch scaled_dot_product_attention; runs everywhere",
    # Its memory-efficient kernel multiplies rows by strides in 32 bits and reads wrong rows past 2^31 elements.
    int32_offsets=True,
)
