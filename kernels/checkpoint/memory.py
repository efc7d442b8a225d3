"""How much memory there is before a load begins: what the operating system, and for a GPU the driver, would give."""

import ctypes
import sys

import torch

from .header import CheckpointError

MARGIN_BYTES = 256 << 20
"""Left free beside what a load needs: Python objects, page tables, the neighbours."""


def system_available() -> int | None:
    """Bytes that the operating system can hand out without swapping; None where it does not tell.

    Linux: ``MemAvailable``, which counts the page cache as free, and on unified memory (GB10) is the GPU's memory too,
    where CUDA's own "free" counts a cached file as used. Windows: ``ullAvailPhys``. Not looked at: a container's limit.
    """
    if sys.platform == "win32":
        return _windows_available()
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def require(file: str, needed: int, device: torch.device, host_buffer: int) -> None:
    """Refuse a load that does not fit, before anything is allocated.

    Args:
        file: name to put into the error.
        needed: bytes of tensor data.
        device: where they will lie.
        host_buffer: bytes of host memory that a load to another device takes meanwhile.

    Raises:
        CheckpointError: ``memory``, with what is needed and what there is.
    """
    unified = device.type == "cpu" or shares_system_memory(device)
    host = host_buffer + (needed if unified else 0)
    available = system_available()
    if available is not None and host + MARGIN_BYTES > available:
        raise CheckpointError(
            "memory", file, "",
            f"needs {_gib(host + MARGIN_BYTES)} of memory to load, the system has {_gib(available)} available; close "
            "other programs or unload other models, or load a smaller (pruned, NVFP4) file",
        )  # fmt: skip
    if not unified and device.type == "cuda":
        free = _cuda_free(device)
        if needed > free:
            raise CheckpointError(
                "memory", file, "",
                f"needs {_gib(needed)} on {device}, which has {_gib(free)} free; load to the CPU, or unload other "
                "models",
            )  # fmt: skip


def shares_system_memory(device: torch.device) -> bool:
    """Whether a CUDA device has no memory of its own, as on GB10 and Jetson."""
    if device.type != "cuda":
        return False
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def _cuda_free(device: torch.device) -> int:
    """What the driver calls free, and what torch's allocator has reserved and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB ({count} bytes)"


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in (
            "ullTotalPhys", "ullAvailPhys", "ullTotalPageFile", "ullAvailPageFile", "ullTotalVirtual",
            "ullAvailVirtual", "ullAvailExtendedVirtual",
        )),
    ]  # fmt: skip


def _windows_available() -> int | None:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return status.ullAvailPhys
