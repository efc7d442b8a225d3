"""SageAttention 3 (``sageattn3``, FP4) for Blackwell: everything in four bits.

Read at SageAttention d1a57a546c3d395b1ffcbeecc66d81db76f3b4b5: ``sageattn3_blackwell(q, k, v, attn_mask=None,
is_causal=False, per_block_mean=True, **kwargs)`` on ``[B, H, S, D]``. Traps: the mask argument is ignored; there is no
scale argument; ``k -= k.mean(...)`` writes into the caller's tensor, so it gets one of its own; head sizes from 256 on
run SDPA in silence; all three are padded to 128 rows and packed inside, so views bring nothing. Crashes of the process
were reported on compute capability 12.x: it is never probed or timed unless somebody asks for it by name.

Not run on hardware by this project: tested against a stand-in with that signature.
"""

from __future__ import annotations

import torch

from .. import Backend, Call

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
MAJORS = (10, 12)


def load():
    """Return the adapter around ``sageattn3.sageattn3_blackwell``.

    Raises:
        ImportError: sageattn3 is missing, or built for another torch.
    """
    from sageattn3 import sageattn3_blackwell

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Approximate attention on ``[B, H, S, D]`` at the default scale (others are refused)."""
        k = k - k.mean(dim=2, keepdim=True)
        return sageattn3_blackwell(q, k, v, is_causal=False, per_block_mean=True)

    return attend


def refuse(call: Call) -> str | None:
    """Refuse devices, dtypes, head sizes and scales that it would get wrong or ignore."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16 or float16, have {call.dtype}"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major not in MAJORS:
        return f"has kernels for compute capability 10.x and 12.x, {call.device} has {major}.{minor}"
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim must be 64 or 128, have {call.head_dim}"
    if call.k_shape[2] == 1:
        return "takes no single key: smoothed it is zero, and its quantiser divides by the largest value"
    if not call.default_scale:
        return f"takes no scale, the call has {call.scale:g} where its default is {call.head_dim**-0.5:g}"
    return None


BACKEND = Backend(
    name="sage3",
    exact=False,
    needs="sageattn3 (from SageAttention's folder sageattention3_blackwell)",
    load=load,
    refuse=refuse,
    summary="SageAttention 3 in FP4; its quality on H3 is unproven and crashes are reported: by name only",
    packages=("sageattn3",),
    int32_offsets=True,
    dense_last=True,
    layout="native",
    layout_variable="H3_SAGE_QKV_LAYOUT",
    opt_in=True,
    run_here=False,
)
