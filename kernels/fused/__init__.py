"""The fused producers of an H3 block: what runs between two GEMMs, written once per op.

Every file of this folder that holds an ``OP`` is one op, found by reading the folder. Its contract function (same name
as the file) becomes an attribute of this package, so ``fused.swiglu_nvfp4(gate_up)`` is the public call.

An op has a *reference*: PyTorch, on any device, with every rounding of ComfyUI's unfused chain in ComfyUI's order. It
is the oracle that other implementations are certified against, and it is what runs where nothing faster is certified.
Faster implementations are listed in ``OP.implementations``, in order of preference. ``impl="auto"`` takes the first one
that does not refuse; an implementation asked for by name runs or raises :class:`FusedRefused` with its reason. On a GPU
either has to be certified first, which ``certify`` does on the device the first time.

The ops, in the order in which the data meets them::

    norm_modulate_nvfp4   x -> RMSNorm -> per-segment modulation -> NVFP4       feeds attn.qkv_proj and mlp.fc1
    rows_nvfp4            attention output -> NVFP4                             feeds attn.out_proj
    swiglu_nvfp4          gate_up -> silu(gate) * up -> NVFP4                   feeds mlp.fc2
    swiglu_side           gate_up -> + a LoRA's update -> silu(gate) * up       where fc1 has a side branch
    norm_modulate, swiglu the same with bf16 out, for GPUs without FP4 and for layers that are not NVFP4
    low_rank_add_         y += a LoRA's update, in place                        behind a linear with a side branch
    gate_residual_        x += gate * y, per segment, in place
"""

import sys

from .. import discover
from . import _op
from ._op import FusedRefused, Implementation, Op

OPS: dict[str, Op] = {}
BROKEN: dict[str, str] = {}  # op file -> why it did not import


def _collect(package) -> None:
    found, broken = discover.modules(package)
    BROKEN.update(broken)
    for name, module in found.items():
        op = getattr(module, "OP", None)
        if isinstance(op, Op):
            OPS[op.name] = op
            # The function takes the place of its submodule as this package's attribute: it is the public name.
            setattr(package, op.name, getattr(module, name))


def best(op_name: str, device) -> tuple[str, dict[str, str]]:
    """Name the implementation that ``impl="auto"`` takes for ``op_name`` on ``device``.

    Args:
        op_name: a key of ``OPS``.
        device: a ``torch.device``.

    Returns:
        ``(implementation name, {implementation that refuses: reason})``; the name is ``"reference"`` when no faster
        implementation accepts the device and is certified there.
    """
    return _op.choose(OPS[op_name], device, "auto")


_collect(sys.modules[__name__])

__all__ = ["BROKEN", "OPS", "FusedRefused", "Implementation", "Op", "best", *OPS]
