"""Clocks, power and driver of an NVIDIA GPU, asked from NVML; reading only.

Standard library only. Every answer that does not come is None: a record without clocks says so and is still a record.
"""

from __future__ import annotations

import ctypes
import os

LIBRARY = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
SM, MEMORY = 1, 2  # nvmlClockType_t


class Gpu:
    """One GPU by its UUID; use as a context manager, which opens and closes NVML.

    Args:
        uuid: as the driver writes it, ``GPU-…`` or ``MIG-…``; None for no GPU.
    """

    def __init__(self, uuid: str | None):
        self._uuid = uuid
        self._nvml = None
        self._handle = ctypes.c_void_p()

    def __enter__(self) -> Gpu:
        if self._uuid is None:
            return self
        try:
            nvml = ctypes.CDLL(LIBRARY)
            if nvml.nvmlInit_v2() == 0:
                self._nvml = nvml
                found = nvml.nvmlDeviceGetHandleByUUID(self._uuid.encode(), ctypes.byref(self._handle))
                if found != 0:
                    self._handle = ctypes.c_void_p()
        except (OSError, AttributeError):
            self._nvml = None
        return self

    def __exit__(self, *exception) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _number(self, function: str, *before) -> int | None:
        if self._nvml is None or not self._handle:
            return None
        value = ctypes.c_uint()
        try:
            status = getattr(self._nvml, function)(self._handle, *before, ctypes.byref(value))
        except AttributeError:
            return None
        return value.value if status == 0 else None

    def clocks(self) -> dict | None:
        """``sm_mhz``, ``memory_mhz``, ``power_w``, ``celsius`` of this moment; None when the driver tells nothing."""
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        found = {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", SM),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", MEMORY),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "celsius": self._number("nvmlDeviceGetTemperature", 0),
        }
        return None if all(value is None for value in found.values()) else found

    def power_limit_w(self) -> float | None:
        """The power limit in force."""
        milliwatts = self._number("nvmlDeviceGetPowerManagementLimit")
        return None if milliwatts is None else milliwatts / 1000

    def driver(self) -> str | None:
        """The driver's version."""
        if self._nvml is None:
            return None
        text = ctypes.create_string_buffer(80)
        status = self._nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return text.value.decode() if status == 0 else None
