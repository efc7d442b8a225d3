"""SageAttention 1 (``sageattention`` 1.0.6, Triton): q and k in INT8 per block, v in fp16.

Read from 1.0.6: ``sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs)``.
Traps: ``**kwargs`` swallows a mask; smoothing is ``k -= k.mean(...)`` in the caller's tensor, so k is smoothed here,
into a tensor of its own (the one thing that this backend writes beyond the kernel's own buffers); v goes through fp16,
so values past 65,504 become infinite; rows are multiplied by strides in 32 bits. Its input checks are asserts. And its
kernel works on 64 keys at a time and does not mask the scores of those that are missing from the last 64: they count as
keys of score 0 and value 0, and every result is too small (on an H200 by a relative error of 0.23 at 129 keys, 0.64 at
16). So only multiples of 64 are taken.
"""

from __future__ import annotations

from importlib import metadata

import torch

from .. import NHD, Backend, Call

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 96, 128)
KEYS = 64  # that its kernel takes at a time


def load():
    """Return the adapter around ``sageattention.sageattn``.

    Raises:
        ImportError: sageattention is missing, or is version 2 (that one is ``sage2``).
    """
    from sageattention import sageattn

    found = metadata.version("sageattention")
    if not found.startswith("1."):
        raise ImportError(f"sageattention {found} is installed, this backend is for 1.0.6; choose sage2")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Approximate attention on ``[B, H, S, D]`` views; the kernel sees ``[B, S, H, D]`` with their strides.

        Subtracting k's mean over the rows adds one number to each query's scores, which softmax does not see.
        """
        k = k - k.mean(dim=2, keepdim=True)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return sageattn(
            q, k, v, tensor_layout=NHD, is_causal=False, sm_scale=scale, smooth_k=False
        ).transpose(1, 2)  # fmt: skip

    return attend


def refuse(call: Call) -> str | None:
    """Refuse devices, dtypes and head sizes that it asserts against."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16, float16 or float32, have {call.dtype}"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major < 8:
        return f"needs compute capability 8.0 or newer, {call.device} has {major}.{minor}"
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim must be 64, 96 or 128, have {call.head_dim}"
    if call.k_shape[2] % KEYS:
        found = call.k_shape[2]
        return f"the number of keys must be a multiple of {KEYS}, have {found}: its kernel counts the missing ones"
    return None


BACKEND = Backend(
    name="sage1",
    exact=False,
    needs="sageattention 1.0.6",
    load=load,
    refuse=refuse,
    summary="SageAttention 1: INT8 scores, fp16 values, k smoothed",
    packages=("sageattention", "triton"),
    int32_offsets=True,
    dense_last=True,
    order=NHD,
    layout_variable="H3_SAGE_QKV_LAYOUT",
)
