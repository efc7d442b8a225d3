"""``silu(gate) * up`` of ``gate_up + alpha * hidden @ low_rank.T``: a LoRA's update of fc1, on its way into SwiGLU.

fc1's output is the largest tensor of a block: adding the update to it in place reads and writes 4 bytes for each of its
elements, 4.4 GB a block at H3's size. SwiGLU reads it anyway.
"""

from __future__ import annotations

import torch

from . import _launch, _op
from .low_rank_add_ import RANK_MULTIPLE, updated
from .low_rank_add_ import check as check_factors
from .swiglu import check
from .swiglu import reference as swiglu_reference


def reference(gate_up, hidden, low_rank, alpha):
    return swiglu_reference(updated(gate_up, hidden, low_rank, alpha))


def stand_in(gate_up, hidden, low_rank, alpha):
    """The library's GEMM, without fp32 copies of gate_up."""
    return swiglu_reference(torch.addmm(gate_up, hidden, low_rank.t(), alpha=alpha))


def bytes_moved(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Read gate and up, write the product; the factors of some dozen columns are not counted."""
    return 3 * rows * columns * element_bytes


def accepts(gate_up, hidden, low_rank, alpha) -> str | None:
    """Why the Triton kernel does not take these arguments, or None."""
    if any(t.dtype != torch.bfloat16 or not t.is_contiguous() for t in (gate_up, hidden, low_rank)):
        return "needs contiguous bfloat16"
    if hidden.shape[1] % RANK_MULTIPLE:
        return f"needs a rank that is a multiple of {RANK_MULTIPLE}, have {hidden.shape[1]}"
    return _launch.shape_refusal(gate_up, gate_up.shape[1] // 2)


def _triton(*arguments):
    from . import _side_triton

    return _side_triton.swiglu_side(*arguments)


OP = _op.Op(
    "swiglu_side",
    "a low-rank update of gate_up, then silu(gate) * up, bf16 out",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, accepts),),
    stand_in=stand_in,
)


def swiglu_side(
    gate_up: torch.Tensor, hidden: torch.Tensor, low_rank: torch.Tensor, alpha: float, *, impl: str = "auto"
) -> torch.Tensor:
    """``swiglu(bf16(gate_up + alpha * hidden @ low_rank.T))``, without writing the sum to memory.

    The sum is taken in fp32 and rounded once. cuBLAS's bf16 GEMM that accumulates into gate_up rounds more often: on an
    H200 its results differed from the exact ones rounded where these did not. The order of the additions over the rank
    is the kernel's own; where every partial sum is exact in fp32 no order shows, and that is what is certified.

    Args:
        gate_up: ``[S, 2F]`` bf16, gate first, without the update; left unchanged.
        hidden: ``[S, r]``, in gate_up's dtype.
        low_rank: ``[2F, r]``, likewise.
        alpha: factor of the update.
        impl: ``"auto"``, ``"reference"`` or an implementation's name.

    Returns:
        ``[S, F]`` in gate_up's dtype.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
        FusedRefused: the implementation asked for cannot run here.
    """
    check(OP.name, gate_up)
    check_factors(OP.name, "gate_up", gate_up, hidden, low_rank)
    return _op.run(OP, gate_up.device, impl, gate_up, hidden, low_rank, alpha)
