"""What launching a Triton producer needs on the host: targets, word views, output buffers, segment groups.

Not Triton itself: that is imported by the ``_*_triton.py`` files, which are loaded at the first launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import nvfp4

MIN_CAPABILITY = (9, 0)  # packed bf16 arithmetic and e4m3 conversion in hardware
GROUP = 8  # segments that one launch of `prepare` marks


@dataclass(frozen=True)
class Tile:
    """Rows and words of a program, and its warps."""

    rows: int
    words: int
    warps: int


@functools.lru_cache(maxsize=64)
def device_refusal(device: torch.device) -> str | None:
    """Why the Triton producers do not run on a device, or None. Imports nothing."""
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, have {device.type}"
    if torch.version.hip is not None:
        return "the kernels hold NVIDIA PTX; this torch is built for HIP"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"needs compute capability 9.0 or newer, have {capability[0]}.{capability[1]}"
    return None


def has_fp4_conversion(capability: tuple[int, int]) -> bool:
    """Whether a target converts fp32 to e2m1 in hardware: every family from 10.0 on that is known today."""
    return capability >= (10, 0)


@functools.lru_cache(maxsize=64)
def fp4_of(device: torch.device) -> bool:
    """:func:`has_fp4_conversion` of a device."""
    return has_fp4_conversion(torch.cuda.get_device_capability(device))


def on(device: torch.device):
    """Make ``device`` current while a kernel is launched: Triton launches on the current device, not the tensor's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def words(tensor: torch.Tensor) -> torch.Tensor:
    """View the last axis of a bf16 tensor as int32 words of two elements; a copy only where its memory forbids it."""
    odd = any(step % 2 for step in tensor.stride()[:-1]) or tensor.storage_offset() % 2 or tensor.data_ptr() % 4
    if tensor.stride(-1) != 1 or odd:
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # .contiguous() would keep an odd offset
    return tensor.view(torch.int32)


def shape_refusal(x: torch.Tensor, columns: int) -> str | None:
    """Why the word kernels do not take rows of ``columns`` results, or None."""
    if x.dtype != torch.bfloat16:
        return f"needs bfloat16, have {str(x.dtype).removeprefix('torch.')}"
    if columns % nvfp4.BLOCK:
        return f"needs a multiple of {nvfp4.BLOCK} columns, have {columns}"
    if x.shape[0] == 0 or columns == 0:
        return "needs at least one row and one column"
    return None


def outputs(rows: int, columns: int, decode_scale, device: torch.device):
    """Uninitialised codes, scales and decode scale of an NVFP4 matrix (every byte of them is written)."""
    codes = torch.empty(nvfp4.code_shape((rows, columns)), dtype=torch.uint8, device=device)
    scales = torch.empty(nvfp4.scale_shape((rows, columns)), dtype=torch.uint8, device=device)
    if decode_scale is None:
        decode_scale = torch.empty((), dtype=torch.float32, device=device)
    else:
        decode_scale = torch.as_tensor(decode_scale, dtype=torch.float32, device=device).reshape(())
    return codes, scales, decode_scale


def result(codes, scales, decode_scale, shape) -> nvfp4.NVFP4:
    """Put the buffers together."""
    return nvfp4.NVFP4(codes, scales.view(torch.float8_e4m3fn), decode_scale, shape)


def segment_groups(segments: Sequence) -> tuple[list[list[int]], list[tuple]]:
    """Split segments into groups for :func:`prepare` and those with a row per token.

    Returns:
        ``([start, stop, row, ...] of eight segments each, padded with empty ones; [(start, stop, LongTensor)])``
        with at least one group.
    """
    flat, tensors = [], []
    for start, stop, row in segments:
        if isinstance(row, torch.Tensor):
            tensors.append((start, stop, row))
        elif stop > start:
            flat += [start, stop, row]
    size = 3 * GROUP
    groups = [flat[at : at + size] for at in range(0, len(flat), size)] or [[]]
    return [group + [0] * (size - len(group)) for group in groups], tensors
