"""SageAttention 2.2 (built from source): q and k in INT8, v in fp16 or FP8 by device.

Read at commit d1a57a546c3d395b1ffcbeecc66d81db76f3b4b5: ``sageattn(q, k, v, tensor_layout="HND", is_causal=False,
sm_scale=None, return_lse=False, **kwargs)`` picks the kernel of the device, smooths k (H3 needs it) without writing
into it, pads v to 128 rows where its sm_90 kernel wants that, and makes its device the current one (the caller's guard
puts that back). ``**kwargs`` swallows a mask, and there ``smooth_k=False`` too; versions that honour the name get True.
Only the automatic choice works on compute capability 12.x, so no kernel is called by name.

Not run on hardware by this project: tested against a stand-in with that signature.
"""

from __future__ import annotations

from importlib import metadata

import torch

from .. import NHD, Backend, Call

DTYPES = (torch.bfloat16, torch.float16)
MAJORS = (8, 9, 12)  # 10.x and 11.x raise "Unsupported CUDA architecture"


def load():
    """Return the adapter around ``sageattention.sageattn``.

    Raises:
        ImportError: sageattention is missing or older than 2.2 (version 1 is ``sage1``).
    """
    from sageattention import sageattn

    found = metadata.version("sageattention")
    if tuple(int(part) if part.isdigit() else 0 for part in found.split(".")[:2]) < (2, 2):
        raise ImportError(f"sageattention {found} is installed, this backend needs 2.2.0, built from source")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Approximate attention on ``[B, H, S, D]`` views; the kernel sees ``[B, S, H, D]`` with their strides."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return sageattn(
            q, k, v, tensor_layout=NHD, is_causal=False, sm_scale=scale, smooth_k=True
        ).transpose(1, 2)  # fmt: skip

    return attend


def refuse(call: Call) -> str | None:
    """Refuse devices, dtypes and head sizes it raises for."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16 or float16, have {call.dtype}"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major not in MAJORS:
        return f"has kernels for compute capability 8.x, 9.0 and 12.x, {call.device} has {major}.{minor}"
    if call.head_dim > 128:
        return f"head_dim must be at most 128, have {call.head_dim}"
    return None


BACKEND = Backend(
    name="sage2",
    exact=False,
    needs="SageAttention 2.2.0, built from source",
    load=load,
    refuse=refuse,
    summary="SageAttention 2.2: INT8 scores, k smoothed, the device's own kernel",
    packages=("sageattention",),
    int32_offsets=True,
    align_elements=8,
    dense_last=True,
    order=NHD,
    layout_variable="H3_SAGE_QKV_LAYOUT",
    run_here=False,
)
