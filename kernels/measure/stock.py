"""What ComfyUI runs in place of each fused op, to be timed against: its unfused chain and comfy-kitchen's quantiser.

The bf16 part of a chain is the reference of the op's bf16 twin, which is written as ComfyUI writes it. The NVFP4 step
is comfy-kitchen's own ``TensorCoreNVFP4Layout.quantize``: ``abs``, ``amax`` and a division for a dynamic scale, then
its fastest backend on the device. ComfyUI's subclass of that layout does the same; a caller inside ComfyUI passes it.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import fused, nvfp4
from ..discover import reason

BF16_PART: dict[str, Callable] = {
    "norm_modulate": lambda *inputs: fused.OPS["norm_modulate"].reference(*inputs, "aten"),
    "norm_modulate_nvfp4": lambda *inputs: fused.OPS["norm_modulate"].reference(*inputs, "aten"),
    "swiglu": lambda *inputs: fused.OPS["swiglu"].reference(*inputs),
    "swiglu_nvfp4": lambda *inputs: fused.OPS["swiglu"].reference(*inputs),
    "rows_nvfp4": lambda x: x,
    "gate_residual_": lambda *inputs: fused.OPS["gate_residual_"].reference(*inputs),
}
"""Op -> its chain up to bf16; also the list of ops that can be timed against stock."""


def quantiser(device) -> tuple[Callable | None, str]:
    """comfy-kitchen's NVFP4 quantiser.

    Returns:
        ``(quantize(x, scale=None) -> (codes, params), backend that runs on the device)``, or ``(None, reason)``.
    """
    import torch

    try:
        import comfy_kitchen
        from comfy_kitchen.tensor import TensorCoreNVFP4Layout

        arguments = {
            "x": torch.ones(16, 16, dtype=torch.bfloat16, device=device),
            "per_tensor_scale": torch.ones((), device=device),
            "epsilon": 0.0, "pad_16x": False, "hi_first": True,
        }  # fmt: skip
        return TensorCoreNVFP4Layout.quantize, comfy_kitchen.registry.get_capable_backend("quantize_nvfp4", arguments)
    except Exception as error:  # a probe: without comfy-kitchen the reference is the baseline
        return None, reason(error)


def chain(op: str, quantise: Callable | None, decode_scale=None) -> Callable:
    """The unfused chain of an op, as a function of its inputs.

    Args:
        op: a key of ``BF16_PART``.
        quantise: as :func:`quantiser` gives it; needed for ops that write NVFP4.
        decode_scale: fp32 0-d static scale, or None.
    """
    part = BF16_PART[op]
    if not op.endswith("_nvfp4"):
        return part

    def run(*inputs):
        rows = part(*inputs)
        codes, params = quantise(rows, scale=decode_scale)
        return nvfp4.NVFP4(codes, params.block_scale, params.scale, tuple(rows.shape))

    return run
