"""How fast the device copies, and what a kernel's time is against that.

The floor of an op is ``bytes it must move / copy bandwidth``; its share is ``floor / time``. A copy reads and writes,
as the ops do, so it is a fairer ceiling than the data sheet's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .timing import L2_FACTOR, Timing, l2_bytes, time_rotating

COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Copy:
    """A measured copy: ``moved_bytes`` (read and written) per call, and its :class:`Timing`."""

    moved_bytes: int
    elements: int
    timing: Timing


def copy_bandwidth(device, *, rounds: int = 20, between: Callable[[], None] | None = None) -> Copy:
    """Time a device-to-device copy of bf16 noise, at least ``L2_FACTOR`` times the L2 and 1 GiB where there is room.

    Args:
        device: a ``torch.device``; on a CPU 16 MiB are copied, and the timing says that it is no measurement.
        rounds: as in :func:`time_rotating`.
        between: likewise.
    """
    import torch

    size = CPU_COPY_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        least = L2_FACTOR * (l2_bytes(device) or 0)
        size = max(least, min(COPY_BYTES, free // 4))
    elements = size // 2
    source = torch.empty(elements, dtype=torch.bfloat16, device=device)
    source.normal_(generator=torch.Generator(device).manual_seed(0))
    target = torch.empty_like(source)

    def copy(tensor):
        # A kernel, as the ops are. Captured in a graph, copy_ becomes a memcpy node on the copy engines, which moved
        # 2.7 TB/s on an H200 where the same copy outside a graph moved 4.2.
        torch.neg(tensor, out=target)

    timing = time_rotating(
        {"copy": copy}, rounds=rounds, device=device, sets=[(source,)], warm_up_s=0.2, between=between
    )
    return Copy(2 * elements * 2, elements, timing)


def rate(floor_bytes: int, median_ms: float, copy_bytes: int, copy_ms: float) -> dict:
    """A case's ``roofline``: GB/s over the bytes that had to move, the floor in ms, the share of the copy's rate."""
    copied, own = copy_bytes / copy_ms, floor_bytes / median_ms
    return {
        "floor_bytes": floor_bytes,
        "gb_per_s": own / 1e6,
        "floor_ms": floor_bytes / copied,
        "share_of_copy": own / copied,
    }
