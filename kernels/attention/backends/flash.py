"""FlashAttention 2 (``flash-attn``): exact."""

from __future__ import annotations

import torch

from .. import NHD, Backend, Call

DTYPES = (torch.bfloat16, torch.float16)


def load():
    """Return the adapter around ``flash_attn.flash_attn_func``.

    Raises:
        ImportError: flash-attn is missing (flash-attn-4 alone has no ``flash_attn_func`` there).
        OSError: it was compiled for another torch.
    """
    from flash_attn import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Full attention on ``[B, H, S, D]`` views; the kernel sees ``[B, S, H, D]`` with their strides."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=scale, causal=False).transpose(1, 2)

    return attend


def refuse(call: Call) -> str | None:
    """Refuse devices, dtypes and head sizes it has no code for."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16 or float16, have {call.dtype}"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major < 8:
        return f"needs compute capability 8.0 or newer, {call.device} has {major}.{minor}"
    if call.head_dim > 256 or call.head_dim % 8:
        return f"head_dim must be a multiple of 8 and at most 256, have {call.head_dim}"
    return None


BACKEND = Backend(
    name="flash",
    exact=True,
    needs="flash-attn >= 2.6",
    load=load,
    refuse=refuse,
    summary="FlashAttention 2",
    packages=("flash-attn",),
    align_elements=8,
    dense_last=True,
    order=NHD,
    run_here=False,
)
