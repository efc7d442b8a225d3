"""What a backend declares, what a call is, and what a caller asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

AUTO = "auto"
LAYOUTS = ("auto", "strided_nhd", "native", "contiguous")
LONGEST_NAME = 60  # characters of what was asked for, in an error
HND, NHD = "HND", "NHD"  # order of the axes after the batch: heads, rows, head_dim, or rows first


class AttentionRefused(RuntimeError):
    """A backend cannot take a call.

    Attributes:
        name: what was asked for.
        reason: why it does not run.
        others: what can be asked for instead, ``"auto"`` last where it is among them.
    """

    def __init__(self, name: str, reason: str, others: tuple[str, ...] = ()):
        self.name, self.reason, self.others = name, reason, tuple(others)
        instead = f"; choose {' or '.join(self.others)}" if self.others else ""
        # A name comes from a workflow, which may hold anything there: ten megabytes, or half a character, on which
        # ComfyUI's queue ends when it logs the error.
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        shown = shown.encode("utf-8", "backslashreplace").decode()
        super().__init__(f"{shown}: {reason}{instead}")


@dataclass(frozen=True)
class Call:
    """What is known about an attention call before it runs; made by :meth:`of` or by hand, to ask without tensors.

    Attributes:
        device: where the tensors are.
        dtype: the dtype it is computed and returned in, which is v's.
        q_shape, k_shape, v_shape: ``(batch, heads, rows, head_dim)``.
        q_stride, k_stride, v_stride: in elements.
        mask: whether the caller holds a mask.
        scale: factor on ``q k^T``; None means ``head_dim ** -0.5``.
    """

    device: torch.device
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    q_stride: tuple[int, ...]
    k_stride: tuple[int, ...]
    v_stride: tuple[int, ...]
    mask: bool = False
    scale: float | None = None

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: bool = False, scale: float | None = None):
        """Describe a call on these ``[B, H, S, D]`` tensors."""
        shapes = (tuple(tensor.shape) for tensor in (q, k, v))
        strides = (tuple(tensor.stride()) for tensor in (q, k, v))
        return cls(v.device, v.dtype, *shapes, *strides, mask=mask, scale=scale)

    @property
    def head_dim(self) -> int:
        """Length of one q, k or v row."""
        return self.q_shape[-1]

    @property
    def default_scale(self) -> bool:
        """Whether the scale is the one that every kernel takes by itself."""
        return self.scale is None or self.scale == self.head_dim**-0.5


@dataclass(frozen=True)
class Option:
    """A number that an approximate backend takes: its name, default, range, step and what it does."""

    name: str
    default: float
    least: float
    most: float
    step: float
    text: str


@dataclass(frozen=True)
class Backend:
    """What a file in ``backends/`` declares, as ``BACKEND`` or, for several, in ``BACKENDS``.

    Attributes:
        name: the file's name, or it begins with that and an underscore.
        exact: full softmax attention with fp32 accumulation.
        needs: what has to be installed, for people.
        load: imports what it needs and returns ``function(q, k, v, scale, **options) -> out`` on ``[B, H, S, D]``
            tensors of one dtype and device, which it must not write into. May raise; the text becomes the reason, once
            per process.
        refuse: ``Call -> reason or None``, asked after ``load`` succeeded. It launches nothing.
        summary: one line for menus and tables.
        packages: distributions whose versions its results and its speed depend on.
        int32_offsets: its kernels may compute element offsets in 32 bits: a tensor that reaches past 2^31 is packed.
        align_elements: base addresses and strides must be multiples of this many elements, else the tensor is packed.
        dense_last: the last dimension must have stride 1, else the tensor is packed.
        order: how its kernel orders the axes: what ``contiguous`` packs for.
        layout: what the layout ``auto`` stands for where ``layout_variable`` is not set.
        layout_variable: environment variable with another default for the layout.
        options: what it takes beside the tensors and the scale.
        probe_options: options under which the probe's small call must be accurate.
        measured: whether ``auto`` times it; those that are not are taken only where nothing that is runs.
        opt_in: runs only when asked for by name: never probed or timed for any other reason.
        run_here: False for a backend that nobody of this project could run on hardware.
    """

    name: str
    exact: bool
    needs: str
    load: Callable[[], Callable]
    refuse: Callable[[Call], str | None]
    summary: str
    packages: tuple[str, ...] = ()
    int32_offsets: bool = False
    align_elements: int = 1
    dense_last: bool = False
    order: str = HND
    layout: str = "strided_nhd"
    layout_variable: str = ""
    options: tuple[Option, ...] = ()
    probe_options: tuple[tuple[str, float], ...] = ()
    measured: bool = True
    opt_in: bool = False
    run_here: bool = True


@dataclass(frozen=True)
class Request:
    """What a caller wants, the same for many calls.

    Attributes:
        name: a backend's name, or ``"auto"``.
        layout: one of ``LAYOUTS``.
        scale: factor on ``q k^T``; None means ``head_dim ** -0.5``.
        options: ``((name, value), ...)`` for a backend that takes them; others are left at their defaults.
        max_error: for ``auto``: approximate backends take part when their relative error on the caller's own tensors
            is at most this. None: exact ones only.
    """

    name: str = AUTO
    layout: str = "auto"
    scale: float | None = None
    options: tuple[tuple[str, float], ...] = field(default=())
    max_error: float | None = None
