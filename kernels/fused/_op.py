"""What an op file declares, how an implementation is chosen, and the argument checks the ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import certify

REFERENCE = "reference"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedRefused(RuntimeError):
    """An op cannot run as asked.

    Attributes:
        op: name of the op.
        reasons: implementation -> why it refuses.
    """

    def __init__(self, op: str, reasons: dict[str, str]):
        self.op = op
        self.reasons = dict(reasons)
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(f"{op} cannot run: {listed}; choose impl='auto' or '{REFERENCE}'")


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op on some devices.

    ``run`` takes the op's own arguments after validation. ``refuse(device)`` gives the reason why it cannot run on a
    device, ``accepts(*arguments)`` the reason why it cannot take these, or None. Neither imports or launches anything.
    ``cases`` are what it is certified with instead of the op's: for one that takes none of those. One that is
    ``by_name`` runs, and is certified, only when asked for by its name: ``auto`` has a faster one.
    """

    name: str
    run: Callable
    refuse: Callable[[torch.device], str | None]
    accepts: Callable[..., str | None] = lambda *arguments: None
    cases: Callable | None = None
    by_name: bool = False


@dataclass(frozen=True)
class Op:
    """An op as its file declares it.

    Attributes:
        name: also the file's name and the public function's name.
        summary: one line for tables and reports.
        reference: the PyTorch implementation, any device.
        bytes_moved: ``(rows, columns, **options) -> bytes`` that an ideal fused implementation reads and writes.
        implementations: faster ones, best first.
        cases: ``(device) -> iterable of parity.Case`` that implementations are certified with. None: those that
            ``_cases.CASES`` holds under the op's name; without any, no implementation is certified on a GPU.
        stand_in: what ``auto`` runs instead of the reference when no implementation takes the arguments; None: the
            reference itself.
    """

    name: str
    summary: str
    reference: Callable
    bytes_moved: Callable[..., int]
    implementations: tuple[Implementation, ...] = ()
    cases: Callable | None = None
    stand_in: Callable | None = None


def choose(op: Op, device: torch.device, impl: str) -> tuple[str, dict[str, str]]:
    """Pick an implementation of ``op`` for ``device``; raises :class:`FusedRefused` when a named one cannot run.

    On a GPU only what is certified there runs: the first time, this probes (see ``certify``); later it looks it up.
    """
    device = torch.device(device)
    known = {item.name: item for item in op.implementations}
    if impl == REFERENCE:
        return REFERENCE, {}
    if impl != "auto":
        if impl not in known:
            raise FusedRefused(op.name, {impl: f"not an implementation; have {', '.join([REFERENCE, *known])}"})
        reason = known[impl].refuse(device) or certify.refusal(op, impl, device)
        if reason is not None:
            raise FusedRefused(op.name, {impl: reason})
        return impl, {}
    reasons: dict[str, str] = {}
    for item in op.implementations:
        if item.by_name:
            continue
        reason = item.refuse(device) or certify.refusal(op, item.name, device)
        if reason is None:
            return item.name, reasons
        reasons[item.name] = reason
    return REFERENCE, reasons


def run(op: Op, device: torch.device, impl: str, *args):
    """Run the implementation that :func:`choose` picks; ``auto`` runs the reference when it does not take these."""
    name, _ = choose(op, device, impl)
    for item in op.implementations:
        if item.name == name:
            reason = item.accepts(*args)
            if reason is None:
                return item.run(*args)
            if impl != "auto":
                raise FusedRefused(op.name, {name: reason})
    if impl == "auto" and op.stand_in is not None:
        return op.stand_in(*args)
    return op.reference(*args)


def check_rows(op: str, name: str, tensor: torch.Tensor, columns: int | None = None) -> None:
    """Refuse anything but a 2-D float tensor (``[rows, columns]``)."""
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} must be [rows, columns], have {tuple(tensor.shape)}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: {name} must be bf16, fp16 or fp32, have {tensor.dtype}")
    if columns is not None and tensor.shape[1] != columns:
        raise ValueError(f"{op}: {name} must have {columns} columns, has {tensor.shape[1]}")


def check_segments(op: str, segments: Sequence, rows: int, table_rows: int) -> None:
    """Refuse segments that do not fit the rows or the modulation table.

    Args:
        op: name used in the message.
        segments: ``(start, stop, row)`` with ``row`` an int or a LongTensor of ``stop - start`` row indices. Empty
            segments are allowed. The indices of a LongTensor are not read: that would wait for the device.
        rows: rows of the stream.
        table_rows: rows of the modulation table.
    """
    for start, stop, row in segments:
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"{op}: segment ({start}, {stop}) does not fit {rows} rows")
        if isinstance(row, torch.Tensor):
            if row.dtype != torch.long or row.numel() not in (1, stop - start):
                raise ValueError(
                    f"{op}: segment ({start}, {stop}) needs a LongTensor of {stop - start} rows, "
                    f"have {row.dtype} {tuple(row.shape)}"
                )
        elif not -table_rows <= row < table_rows:
            raise ValueError(f"{op}: segment ({start}, {stop}) asks for row {row} of a table of {table_rows}")
