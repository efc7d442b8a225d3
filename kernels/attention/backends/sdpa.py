"""``softmax(q k^T * scale) v`` by PyTorch: its own choice of a kernel, and each of its kernels by name.

``scaled_dot_product_attention`` picks flash, cuDNN, memory-efficient or math by an order that is a flag of the process.
The kernels by name are called as the ATen operators behind it, so no flag is read or set. They check less than the
function in front of them; what they cannot take is refused here.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import Backend, Call

ANY = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
MOST_SCORES = 2**30  # elements of q k^T that the math kernel may write: 4 GiB in fp32, twice over
# Operator, and the arguments after q, k and v that it must have; the rest stays at its defaults.
OPERATORS = {
    "cudnn": ("_scaled_dot_product_cudnn_attention", ("attn_bias", "compute_log_sumexp")),
    "flash": ("_scaled_dot_product_flash_attention", ("dropout_p", "is_causal")),
    "efficient": ("_scaled_dot_product_efficient_attention", ("attn_bias", "compute_log_sumexp")),
    "math": ("_scaled_dot_product_attention_math", ("attn_mask", "dropout_p")),
}
POSITIONAL = {"cudnn": (None, False), "flash": (), "efficient": (None, False), "math": ()}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Full attention on ``[B, H, S, D]`` tensors of one dtype, any strides, any head_dim, on any device.

    On the CPU this is bit for bit what ComfyUI's ``attention_pytorch`` computes. On a GPU PyTorch picks one of its
    kernels in its own order, ComfyUI asks for its order; the results differ by rounding.
    """
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def load():
    """Return :func:`attend`; PyTorch is there already."""
    return attend


def refuse(call: Call) -> str | None:
    """Refuse dtypes that PyTorch has no attention for."""
    return wrong_dtype(call, ANY)


def load_kernel(kind: str):
    """Return the adapter around one ATen operator.

    Raises:
        ImportError: this torch has no such operator, or one with other arguments.
    """
    name, wanted = OPERATORS[kind]
    if not hasattr(torch.ops.aten, name):
        raise ImportError(f"torch {torch.__version__} has no operator {name}")
    operator = getattr(torch.ops.aten, name).default
    found = [argument.name for argument in operator._schema.arguments]
    if tuple(found[3 : 3 + len(wanted)]) != wanted or "scale" not in found:
        raise ImportError(f"torch {torch.__version__} has {name} with the arguments {', '.join(found)}")
    extra = POSITIONAL[kind]

    def attend_by_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Full attention on ``[B, H, S, D]`` by this kernel; its other results (log-sum-exp, seeds) are dropped.

        The math kernel gets fp32: left to itself it rounds the scores to bf16 when a flag of the process allows that,
        and ComfyUI sets this flag (relative error 9e-2 with k offset by 50, against 2e-3).
        """
        if kind == "math" and v.dtype in HALVES:
            dtype, (q, k, v) = v.dtype, (tensor.float() for tensor in (q, k, v))
            return operator(q, k, v, *extra, scale=scale)[0].to(dtype)
        return operator(q, k, v, *extra, scale=scale)[0]

    return attend_by_kernel


def wrong_dtype(call: Call, dtypes) -> str | None:
    """The reason where the call's dtype is none of ``dtypes``."""
    if call.dtype in dtypes:
        return None
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"dtype must be {', '.join(first)} or {last}, have {call.dtype}"


def wrong_device(call: Call, least: tuple[int, int]) -> str | None:
    """The reason where the device is no CUDA device of that compute capability."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    found = torch.cuda.get_device_capability(call.device)
    if found < least:
        return f"needs compute capability {least[0]}.{least[1]} or newer, {call.device} has {found[0]}.{found[1]}"
    return None


def wrong_head_dim(call: Call, most: int, multiple: int = 8) -> str | None:
    """The reason where head_dim is too large or no multiple (the operators do not pad it)."""
    if call.head_dim > most or call.head_dim % multiple:
        return f"head_dim must be a multiple of {multiple} and at most {most}, have {call.head_dim}"
    return None


def refuse_cudnn(call: Call) -> str | None:
    """Refuse what cuDNN's kernel has no code for."""
    reason = wrong_device(call, (8, 0)) or wrong_dtype(call, HALVES) or wrong_head_dim(call, 128)
    if reason is None and not torch.backends.cudnn.is_available():
        reason = "this torch has no cuDNN"
    if reason is None and 1 in (call.q_shape[2], call.k_shape[2]):
        reason = "cuDNN takes no single row"
    return reason


def refuse_flash(call: Call) -> str | None:
    """Refuse what the flash kernel has no code for."""
    reason = wrong_device(call, (8, 0)) or wrong_dtype(call, HALVES) or wrong_head_dim(call, 256)
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        reason = f"this torch ({torch.__version__}) was built without it"
    return reason


def refuse_efficient(call: Call) -> str | None:
    """Refuse what the memory-efficient kernel has no code for."""
    least = (8, 0) if call.dtype == torch.bfloat16 else (5, 0)
    return (
        wrong_device(call, least)
        or wrong_dtype(call, (*HALVES, torch.float32))
        or wrong_head_dim(call, 2**16, 4 if call.dtype == torch.float32 else 8)
    )


def refuse_math(call: Call) -> str | None:
    """Refuse dtypes, and scores that do not fit into memory."""
    scores = call.q_shape[0] * call.q_shape[1] * call.q_shape[2] * call.k_shape[2]
    if scores > MOST_SCORES:
        return f"writes q k^T out, which is {scores} numbers here; at most {MOST_SCORES}"
    return wrong_dtype(call, ANY)


def kernel(kind: str, refuse_kernel, summary: str, **fields) -> Backend:
    """The record of one of PyTorch's kernels."""
    load_it = partial(load_kernel, kind)
    load_it.__module__, load_it.__qualname__ = __name__, f"load_kernel.{kind}"
    return Backend(
        f"sdpa_{kind}", True, "torch", load_it, refuse_kernel, summary, packages=("torch",), dense_last=True, **fields
    )


BACKENDS = (
    Backend(
        name="sdpa",
        exact=True,
        needs="torch",
        load=load,
        refuse=refuse,
        summary="PyTorch scaled_dot_product_attention, which picks one of its kernels; runs everywhere",
        packages=("torch",),
        # Its memory-efficient kernel multiplies rows by strides in 32 bits and reads wrong rows past 2^31 elements.
        int32_offsets=True,
        # It does not look at strides before it picks: on an H200 odd ones ended in a misaligned address (torch 2.11.0).
        align_elements=8,
        dense_last=True,
        measured=False,  # what it picks is one of those below
    ),
    kernel("cudnn", refuse_cudnn, "PyTorch's cuDNN kernel", align_elements=8),
    kernel("flash", refuse_flash, "PyTorch's flash kernel: what ComfyUI picks", align_elements=8),
    kernel("efficient", refuse_efficient, "PyTorch's memory-efficient kernel", align_elements=8, int32_offsets=True),
    kernel("math", refuse_math, "PyTorch's matrix products and softmax: slow, writes q k^T out", measured=False),
)
