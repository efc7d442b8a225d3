"""q, k and v as a kernel can take them: views go in as they are, and what has to be copied is counted."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .contract import LAYOUTS, NHD, AttentionRefused, Backend

ALIGNABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # 8-bit floats need a scale of their own
INT32_ELEMENTS = 2**31  # offsets at or past this do not fit a signed 32-bit number


@dataclass(frozen=True)
class Fixes:
    """What is done to q, k and v before a kernel gets them, for every call of one shape.

    Attributes:
        cast: per tensor, the dtype it is converted to, or None.
        pack: per tensor, the axis order it is packed in, or None.
        copies, copied_bytes: what that writes, per call.
        reasons: why, one sentence a copy.
    """

    cast: tuple[torch.dtype | None, ...] = (None, None, None)
    pack: tuple[str | None, ...] = (None, None, None)
    copies: int = 0
    copied_bytes: int = 0
    reasons: tuple[str, ...] = ()

    def apply(self, tensors: list[torch.Tensor]) -> None:
        """Replace the tensors that need it in the list: the originals are let go one by one."""
        for place, (dtype, order) in enumerate(zip(self.cast, self.pack, strict=True)):
            if dtype is not None:
                tensors[place] = tensors[place].to(dtype)
            if order is not None:
                tensors[place] = packed(tensors[place], order)


NONE = Fixes()


def layout_of(backend: Backend, asked: str) -> str:
    """The layout that ``asked`` stands for; ``auto`` is the backend's variable, else its default.

    Raises:
        AttentionRefused: the word, or the variable's value, is none of ``LAYOUTS``.
    """
    source = "layout"
    if asked == "auto" and backend.layout_variable:
        source, asked = backend.layout_variable, os.environ.get(backend.layout_variable, "").strip() or "auto"
    if asked not in LAYOUTS:
        raise AttentionRefused(backend.name, f"{source} must be {' or '.join(LAYOUTS)}, have {asked!r}")
    return backend.layout if asked == "auto" else asked


def fixes_for(backend: Backend, layout: str, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Fixes:
    """Decide what has to be copied: nothing, where the kernel can read the views that it is given.

    Args:
        backend: its record says what its kernel can address.
        layout: ``contiguous`` packs all three in the kernel's own order; the others hand views on.
        tensors: q, k and v, ``[B, H, S, D]``.
        dtype: what they are computed in.
    """
    cast, pack, reasons, copies, written = [], [], [], 0, 0
    for name, tensor in zip("qkv", tensors, strict=True):
        wanted = None if tensor.dtype == dtype else dtype
        why = None
        if wanted is not None:
            reasons.append(f"{name} is converted from {word(tensor.dtype)} to {word(dtype)}")
        shape, stride, offset = tensor.shape, tensor.stride(), address(tensor)
        if wanted is not None:
            # What `.to` returns keeps the order of the axes and is dense, at an address of its own.
            stride, offset = tensor.to("meta").to(wanted).stride(), 0
        if layout == "contiguous" and not is_packed(shape, stride, backend.order):
            why = f"{name} is packed, as the layout contiguous asks for"
        elif backend.dense_last and shape[-1] > 1 and stride[-1] != 1:
            why = f"{name} is packed: its last dimension has stride {stride[-1]}"
        elif backend.int32_offsets and reach(shape, stride) >= INT32_ELEMENTS:
            why = f"{name} is packed: it reaches 2^31 elements from its start"
        elif not is_aligned(shape, stride, offset, backend.align_elements, dtype.itemsize):
            why = f"{name} is packed: an address in it is no multiple of {backend.align_elements} elements"
        if why is not None:
            reasons.append(why)
        made = (wanted is not None) + (why is not None)
        copies, written = copies + made, written + made * tensor.numel() * dtype.itemsize
        cast.append(wanted)
        pack.append(None if why is None else backend.order)
    if not copies:
        return NONE
    return Fixes(tuple(cast), tuple(pack), copies, written, tuple(reasons))


def fit_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a packed copy when one batch entry reaches past 2^31 elements from its start.

    The offset counted is that of the last element along heads, rows and columns, from the real strides: a view of
    H3's qkv buffer (row stride 21,504) passes it at 99,866 rows although the view itself holds a third of that. The
    batch is left out, since these kernels step over it in 64 bits. A copy costs the view's size in memory.
    """
    if reach(tensor.shape, tensor.stride()) < INT32_ELEMENTS:
        return tensor
    return tensor.contiguous()


def reach(shape, stride) -> int:
    """Offset in elements of the last element of one batch entry."""
    return sum((size - 1) * step for size, step in zip(shape[1:], stride[1:], strict=True))


def is_packed(shape, stride, order: str) -> bool:
    """Whether elements follow one another without gaps in the order of the axes."""
    expected = 1
    for axis in (3, 1, 2, 0) if order == NHD else (3, 2, 1, 0):
        if shape[axis] > 1 and stride[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def is_aligned(shape, stride, offset_bytes: int, elements: int, itemsize: int) -> bool:
    """Whether every row starts at a multiple of ``elements`` elements, and so loads of that many do.

    The stride of a dimension of one is never walked; the last dimension is walked one by one.
    """
    if elements == 1:
        return True
    steps = (step for size, step in zip(shape[:-1], stride[:-1], strict=True) if size > 1)
    return offset_bytes % (elements * itemsize) == 0 and all(step % elements == 0 for step in steps)


def address(tensor: torch.Tensor) -> int:
    """A tensor's address in bytes; for a subclass, which may have none (fake tensors), its offset in its storage."""
    if type(tensor) is torch.Tensor:
        return tensor.data_ptr()
    return tensor.storage_offset() * tensor.element_size()


def packed(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """A packed copy in an axis order; always a copy, since a tensor can be dense and still start at an odd address."""
    if order == NHD:
        return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return tensor.clone(memory_format=torch.contiguous_format)


def word(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
