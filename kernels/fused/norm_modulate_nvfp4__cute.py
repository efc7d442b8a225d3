"""The ``cute`` implementation of ``norm_modulate_nvfp4``: what it refuses, and how its kernel is launched.

The kernel itself is in ``_modulate_cute``, which is imported at the first launch. The modulation table is prepared by
the Triton implementation's kernel. A static scale takes one launch after that, a dynamic one two.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

import torch

from . import _launch
from .norm_modulate import accepts as triton_accepts

PACKAGE = "nvidia-cutlass-dsl"
MIN_VERSION = (4, 6, 2)  # the one it was tried with
MAX_COLUMNS = 8192  # a lane keeps columns/64 words of its row in registers
# (warps of a CTA, CTAs of an SM) up to WIDE columns, and above. They bound a thread's registers: 65,536 / 32 / warps.
# The best of three on one H200: 12 x 1 and 8 x 2 were slower with a dynamic scale.
SHAPE, SHAPE_WIDE = (16, 1), (8, 1)
WIDE = 6144
SHARED_RESERVED = 1024  # bytes the driver keeps of a CTA's shared memory
DYNAMIC = True  # whether calls without a decode scale are taken


@functools.lru_cache(maxsize=1)
def package_refusal() -> str | None:
    """Why CuTe DSL is not used in this environment, or None. Imports nothing of it."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed (the pack's extra 'cute')"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < MIN_VERSION:
        return f"needs {PACKAGE} {'.'.join(map(str, MIN_VERSION))} or newer, have {version}"
    return None


@functools.lru_cache(maxsize=64)
def refuse(device: torch.device) -> str | None:
    """Why the CuTe kernel does not run on a device, or None."""
    reason = _launch.device_refusal(device) or package_refusal()
    if reason is None and torch.cuda.get_device_capability(device) != torch.cuda.get_device_capability(0):
        return "CuTe DSL builds for the kind of GPU that cuda:0 is; this device is of another kind"
    return reason


def accepts(x, weight, eps, scale, shift, segments, decode_scale, norm) -> str | None:
    """Why the CuTe kernel does not take these arguments, or None."""
    if norm != "fused":
        return f"has a norm of its own only, asked for norm='{norm}'"
    if decode_scale is None and not DYNAMIC:
        return "needs a static decode scale"
    if x.shape[1] > MAX_COLUMNS:
        return f"takes up to {MAX_COLUMNS} columns, have {x.shape[1]}"
    return triton_accepts(x, weight, eps, scale, shift)


def architecture(capability: tuple[int, int]) -> str:
    """Target of a compute capability: its own, with the features that only that one has."""
    return f"sm_{capability[0]}{capability[1]}a"


def shape_of(columns: int) -> tuple[int, int]:
    """Warps of a CTA, and CTAs that are to fit on an SM."""
    return SHAPE if columns <= WIDE else SHAPE_WIDE


def run(x, weight, eps, scale, shift, segments, decode_scale, norm):
    """The op's arguments after validation; see ``norm_modulate_nvfp4``."""
    from . import _modulate_triton

    with _launch.on(x.device):
        factor, offset, index, amax = _modulate_triton.table_of(x, scale, shift, segments)
        x, weight = _aligned(x), _launch.words(weight[None])[0]
        rows, columns = x.shape
        static = decode_scale is not None
        codes, scales, decode_scale = _launch.outputs(rows, columns, decode_scale, x.device)
        rstd = None if static else torch.empty(rows, dtype=torch.float32, device=x.device)
        pointers = [
            tensor.data_ptr() if tensor is not None else 0
            for tensor in (weight, factor, offset, index, rstd, amax, decode_scale, codes, scales)
        ]
        given = (x.data_ptr(), x.stride(0) * x.element_size(), *pointers, rows, eps)
        for mode in ("static",) if static else ("measure", "quantise"):
            _compiled(columns, mode, x.device)(*given, _grid(rows, columns, mode, x.device), _stream(x.device))
        return _launch.result(codes, scales, decode_scale, (rows, columns))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it when its rows do not begin at multiples of 16 bytes."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits or (x.shape[0] == 1 and x.stride(1) == 1 and x.data_ptr() % 16 == 0) else _copy(x)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _grid(rows: int, columns: int, mode: str, device: torch.device) -> int:
    """CTAs of a launch: as many as run at once; less when rows (with the padding) are fewer. Few rows: a row a CTA."""
    covered = rows if mode == "measure" else -(-rows // 128) * 128
    return min(covered, _processors(device) * shape_of(columns)[1])


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device):
    from cuda.bindings import driver

    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=64)
def _compiled(columns: int, mode: str, device: torch.device):
    """The kernel for a width, a mode and a device, loaded there. Kept for the process."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return build(columns, mode, torch.cuda.get_device_capability(device), shared)


def build(columns: int, mode: str, capability: tuple[int, int], shared_per_sm: int, options: tuple = ()):
    """Compile the kernel; needs no GPU.

    Args:
        columns: width of the rows, a multiple of 16 up to :data:`MAX_COLUMNS`.
        mode: one of ``_modulate_cute.MODES``.
        capability: the target. It is given to the compiler: the variable CUTE_DSL_ARCH is neither read nor written
            here, though CuTe DSL asks it, or else the first GPU, whether the result can be loaded.
        shared_per_sm: bytes of shared memory an SM has.
        options: more compile options of CuTe DSL.

    Returns:
        What is called with the arguments of ``launch_rows`` up to its constants.
    """
    from cuda.bindings import driver
    from cutlass import Float32, Int32, Int64, cute

    from . import _modulate_cute as device_code

    warps, ctas = shape_of(columns)
    wanted = ctas * (-(-columns // device_code.CHUNK) * device_code.CHUNK * 4 + SHARED_RESERVED)
    carveout = min(100, -(-100 * wanted // shared_per_sm))
    return cute.compile[(cute.GPUArch(architecture(capability)), *options)](
        device_code.launch_rows, *[Int64(0)] * 11, Int32(1), Float32(1.0), Int32(1), driver.CUstream(0),
        columns, mode, _launch.has_fp4_conversion(capability), warps, ctas, carveout,
    )  # fmt: skip
