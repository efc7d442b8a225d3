"""``silu(gate) * up`` with both roundings, bf16 out."""

from __future__ import annotations

import torch

from . import _launch, _op


def reference(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    # silu rounds to the tensor's dtype before the product does: one rounding fewer costs 22 dB over a long run.
    return torch.nn.functional.silu(gate).mul_(up)


def bytes_moved(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Read gate and up, write the product; ``columns`` counts output columns."""
    return 3 * rows * columns * element_bytes


def accepts(gate_up, *rest) -> str | None:
    """Why the Triton kernels do not take these arguments, or None."""
    return _launch.shape_refusal(gate_up, gate_up.shape[1] // 2)


def _triton(gate_up):
    from . import _swiglu_triton

    return _swiglu_triton.swiglu(gate_up)


OP = _op.Op(
    "swiglu",
    "silu(gate) * up, bf16 out",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, accepts),),
)


def check(op: str, gate_up: torch.Tensor) -> None:
    """Refuse anything but ``[S, 2F]``."""
    _op.check_rows(op, "gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"{op}: gate_up must have an even number of columns, has {gate_up.shape[1]}")


def swiglu(gate_up: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """``bf16(bf16(silu(gate)) * up)`` of ``gate_up = [gate | up]``.

    Args:
        gate_up: ``[S, 2F]`` bf16 (fp32 and fp16 in the reference): the output of ``mlp.fc1``, gate first.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        ``[S, F]`` in gate_up's dtype. ``gate_up`` is left unchanged.

    Raises:
        ValueError, TypeError: wrong rank, dtype or an odd number of columns.
        FusedRefused: the implementation asked for cannot run here.

    Source: ``linear_input_act(..., "swiglu")`` in ComfyUI's ``comfy/ops.py``.
    """
    check(OP.name, gate_up)
    return _op.run(OP, gate_up.device, impl, gate_up)
