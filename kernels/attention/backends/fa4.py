"""FlashAttention 4 (``flash-attn-4``, CuTe DSL): exact, compiled on the device at the first call.

Read from flash-attn-4 4.0.0b27: ``flash_attn.cute.flash_attn_func(q, k, v, ..., softmax_scale=None, causal=False,
...)`` on ``[B, S, H, D]``, strides free as long as the last dimension is dense and addresses and strides are multiples
of 16 bytes. Its input checks are asserts; what they would catch is refused here.
"""

from __future__ import annotations

import torch

from .. import NHD, Backend, Call

DTYPES = (torch.bfloat16, torch.float16)
MAJORS = (8, 9, 10, 11, 12)


def load():
    """Return the adapter around ``flash_attn.cute.flash_attn_func``.

    Raises:
        ImportError: flash-attn-4 is missing; nvidia-cutlass-dsl, quack-kernels or apache-tvm-ffi do not fit it.
    """
    try:
        from flash_attn.cute import flash_attn_func
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "cutlass":
            raise
        raise ImportError(
            "nvidia-cutlass-dsl is missing, or its .pth file was not read: install it into the Python that runs "
            "ComfyUI (a folder named by PYTHONPATH does not read .pth files)"
        ) from error

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Full attention on ``[B, H, S, D]`` views; the kernel sees ``[B, S, H, D]`` with their strides."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = flash_attn_func(q, k, v, softmax_scale=scale, causal=False)
        # 4.0.0b27 returns (out, log-sum-exp or None); other versions the tensor alone.
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def refuse(call: Call) -> str | None:
    """Refuse devices, dtypes and head sizes that it asserts against."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16 or float16, have {call.dtype}"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major not in MAJORS:
        return f"has kernels for compute capability 8.x to 12.x, {call.device} has {major}.{minor}"
    # Every row of the record's devices has these; 9.x and 10.x have more, which H3 does not need.
    if not 8 <= call.head_dim <= 128 or call.head_dim % 8:
        return f"head_dim must be a multiple of 8 from 8 to 128, have {call.head_dim}"
    return None


BACKEND = Backend(
    name="fa4",
    exact=True,
    needs="flash-attn-4 >= 4.0.0b27",
    load=load,
    refuse=refuse,
    summary="FlashAttention 4, compiled at its first call; on compute capability 12.x a kernel of FA2's class",
    packages=("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels"),
    align_elements=8,
    dense_last=True,
    order=NHD,
)
