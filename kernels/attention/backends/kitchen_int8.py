"""INT8 attention of comfy-kitchen: q, k, v and the probabilities in 8 bits, softmax in fp32."""

from __future__ import annotations

from importlib import metadata

import torch

from .. import Backend, Call

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
NAMES = ("int8_attention", "int8_attention_is_available")
LONG_ROWS = 4096  # from here on memory counts for more than one more call on the host
PARTS = ("prequantize_int8_attention", "int8_attention_from_prequantized")


def load():
    """Return the adapter around ``comfy_kitchen.int8_attention``.

    Raises:
        ImportError: comfy-kitchen is missing, or has no INT8 attention (0.2.26 has none, 0.2.31 has it).
    """
    import comfy_kitchen

    missing = [name for name in NAMES if not hasattr(comfy_kitchen, name)]
    if missing:
        raise ImportError(
            f"comfy-kitchen {version()} has no {' and no '.join(missing)}; 0.2.31 is known to have it; "
            "update comfy-kitchen"
        )
    in_parts = all(hasattr(comfy_kitchen, name) for name in PARTS)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Approximate attention on ``[B, H, S, D]``; fp32 inputs come back as fp32 with bf16's precision.

        comfy-kitchen rotates q and k by a Hadamard matrix and may shift k by one of its rows, both without changing the
        exact result.
        """
        if not in_parts or k.shape[2] < LONG_ROWS:
            return comfy_kitchen.int8_attention(q, k, v, scale=scale)
        quantized = comfy_kitchen.prequantize_int8_attention(q, k, v, scale=scale)
        del q, k, v  # the 8-bit copies are all that the kernel reads
        return comfy_kitchen.int8_attention_from_prequantized(quantized)

    return attend


def refuse(call: Call) -> str | None:
    """Refuse what the kernel has no code for, and devices that comfy-kitchen does not run it on."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.dtype not in DTYPES:
        return f"dtype must be bfloat16, float16 or float32, have {call.dtype}"
    if call.head_dim > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, have {call.head_dim}"
    import comfy_kitchen

    # The device goes with the question: asked without one, it answers for the current device.
    if not comfy_kitchen.int8_attention_is_available(call.device):
        return (
            f"comfy-kitchen {version()} cannot run it on {call.device}; "
            "it needs its compiled CUDA part and compute capability 7.5 or newer"
        )
    return None


def version() -> str:
    """Return the installed version of comfy-kitchen, for messages."""
    try:
        return metadata.version("comfy-kitchen")
    except metadata.PackageNotFoundError:
        return "(unknown version)"


BACKEND = Backend(
    name="kitchen_int8",
    exact=False,
    needs="comfy-kitchen >= 0.2.31",
    load=load,
    refuse=refuse,
    summary="comfy-kitchen's INT8 kernel",
    packages=("comfy-kitchen",),
    # Its kernels multiply rows by strides in 64 bits, so long strided views go in as they are.
    int32_offsets=False,
    align_elements=4,  # the kernel loads four elements at a time
    dense_last=True,
)
