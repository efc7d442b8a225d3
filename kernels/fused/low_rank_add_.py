"""``y += alpha * hidden @ low_rank.T`` in place: a LoRA's update of a linear's output, rounded once.

4 bytes an element of y whatever the rank: memory decides, not the products. cuBLAS's bf16 GEMM with ``beta = 1`` may
round between its partial sums; this does not, and gives the bits that ``swiglu_side`` gives inside SwiGLU.
"""

from __future__ import annotations

import torch

from . import _launch, _op

RANK_MULTIPLE = 16  # the depth of a tensor core's step in bf16


def updated(y, hidden, low_rank, alpha):
    """``round(y + alpha * hidden @ low_rank.T)`` in y's dtype, summed in fp32: a new tensor."""
    return torch.addmm(y.float(), hidden.float(), low_rank.float().t(), alpha=alpha).to(y.dtype)


def reference(y, hidden, low_rank, alpha):
    return y.copy_(updated(y, hidden, low_rank, alpha))


def stand_in(y, hidden, low_rank, alpha):
    """The library's GEMM: in place, without fp32 copies of y."""
    return y.addmm_(hidden, low_rank.t(), alpha=alpha)


def bytes_moved(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Read and write y; the factors of some dozen columns are not counted."""
    return 2 * rows * columns * element_bytes


def check(op: str, name: str, y: torch.Tensor, hidden: torch.Tensor, low_rank: torch.Tensor) -> None:
    """Refuse factors that are not ``[S, r]`` and ``[N, r]`` in the dtype of y, ``[S, N]``, which it calls ``name``."""
    rows, columns = y.shape
    _op.check_rows(op, "hidden", hidden)
    if hidden.shape[0] != rows or tuple(low_rank.shape) != (columns, hidden.shape[1]):
        raise ValueError(
            f"{op}: hidden must be [{rows}, r] and low_rank [{columns}, r], have {tuple(hidden.shape)} and "
            f"{tuple(low_rank.shape)}"
        )
    if not hidden.dtype == low_rank.dtype == y.dtype:
        raise TypeError(
            f"{op}: the factors must have {name}'s dtype, {y.dtype}, have {hidden.dtype} and {low_rank.dtype}"
        )


def accepts(y, hidden, low_rank, alpha) -> str | None:
    """Why the Triton kernel does not take these arguments, or None."""
    if any(t.dtype != torch.bfloat16 for t in (y, hidden, low_rank)):
        return "needs bfloat16"
    if any(t.stride(-1) != 1 for t in (y, hidden, low_rank)):
        return "needs rows whose elements lie beside one another"
    if hidden.shape[1] == 0 or hidden.shape[1] % RANK_MULTIPLE:
        return f"needs a rank that is a multiple of {RANK_MULTIPLE}, have {hidden.shape[1]}"
    return "needs at least one row and one column" if y.numel() == 0 else None


def _triton(*arguments):
    from . import _side_triton

    return _side_triton.low_rank_add_(*arguments)


OP = _op.Op(
    "low_rank_add_",
    "a low-rank update, in place",
    reference,
    bytes_moved,
    (_op.Implementation("triton", _triton, _launch.device_refusal, accepts),),
    stand_in=stand_in,
)


def low_rank_add_(
    y: torch.Tensor, hidden: torch.Tensor, low_rank: torch.Tensor, alpha: float, *, impl: str = "auto"
) -> torch.Tensor:
    """``y = round(y + alpha * hidden @ low_rank.T)``, written into ``y``; the sum is taken in fp32.

    The order of the additions over the rank is the kernel's own. Where every partial sum is exact in fp32 no order
    shows, and that is what is certified.

    Args:
        y: ``[S, N]`` bf16, changed in place; may be columns of a wider tensor.
        hidden: ``[S, r]``, in y's dtype; likewise.
        low_rank: ``[N, r]``, likewise.
        alpha: factor of the update.
        impl: ``"auto"``, ``"reference"`` or an implementation's name. Where no implementation takes the arguments,
            ``"auto"`` is ``y.addmm_``.

    Returns:
        ``y`` itself.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
        FusedRefused: the implementation asked for cannot run here.
    """
    _op.check_rows(OP.name, "y", y)
    check(OP.name, "y", y, hidden, low_rank)
    return _op.run(OP, y.device, impl, y, hidden, low_rank, alpha)
