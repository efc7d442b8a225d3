"""Loading a safetensors file without a memory map."""

import os
from collections.abc import Callable

import safetensors.torch
import torch

from . import memory, pieces, staging
from .dtypes import TORCH_DTYPES
from .header import CheckpointError, Header, read_header

CHUNK_BYTES = 4 << 20
"""Largest read between two calls of `progress`, hence between two chances to cancel."""
MOST_THREADS = 8


def load(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    direct: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Load every tensor of a safetensors file.

    Args:
        device: where the tensors end up.
        direct: read each tensor straight into storage of its own, in file order and in several threads: the peak is the
            file's size, no mapping of the file stays behind, and every tensor can be freed by itself. To a CUDA device
            it goes through page-locked buffers of a bounded size (`staging.staging_bytes`), read and copy overlapping.
            With False ``safetensors.torch.load_file`` maps the file.
        progress: ``progress(done_bytes, total_bytes)`` of tensor data, from the calling thread: at 0, at least every
            percent, every 4 MiB (8 MiB to a GPU) and every tenth of a second, and at the end. It may raise, to cancel:
            the reads in flight are waited for, the file is closed, nothing stays page-locked and the exception passes.
            Without `direct` it is called at the two ends only.

    Returns:
        Tensors by name, in the order of the header, contiguous, with the bytes of the file; and the file's metadata.

    Raises:
        CheckpointError: those of `read_header`; ``dtype_unsupported`` for one that torch here lacks; ``memory`` where
            it will not fit, before anything is allocated; ``truncated`` when the file shrinks meanwhile.
    """
    path = os.fspath(path)
    header = read_header(path)
    file = os.path.basename(path)
    for name, info in header.tensors.items():
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                "dtype_unsupported", file, name, f"dtype {info.dtype} cannot be loaded by torch {torch.__version__}"
            )
    total = header.file_bytes - header.data_offset
    if not direct:
        if progress is not None:
            progress(0, total)
        tensors = safetensors.torch.load_file(path, device=str(device))
        if progress is not None:
            progress(total, total)
        return {name: tensors[name] for name in header.tensors}, dict(header.metadata)
    device = torch.device(device)
    staged = device.type == "cuda"
    chunk = staging.CHUNK_BYTES if staged else CHUNK_BYTES
    if progress is not None:
        # a hundredth of the file, so that small files show progress too
        chunk = max(1, min(chunk, total // 100))
    threads = staging.threads_here() if staged else max(1, min(MOST_THREADS, pieces.cores()))
    memory.require(file, total, device, staging.staging_bytes(threads, chunk) if staged else 0)
    try:
        with pieces.File(path) as source:
            if staged:
                raw = staging.load(source, header, staging.Cuda(device), progress, threads, chunk)
            else:
                raw = _into_host(source, header, progress, threads, chunk)
    except OSError as error:
        raise CheckpointError("unreadable", file, "", f"cannot be read: {error.strerror or error}") from error
    tensors = {
        name: raw[name].view(TORCH_DTYPES[info.dtype]).reshape(info.shape) for name, info in header.tensors.items()
    }
    if not staged and device.type != "cpu":
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return tensors, dict(header.metadata)


def read_tensor(source: pieces.File, header: Header, name: str) -> torch.Tensor:
    """One tensor of a file, into memory of its own; the caller has `read_header`'s word for the file."""
    info = header.tensors[name]
    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(
            "dtype_unsupported", source.name, name, f"dtype {info.dtype} cannot be loaded by torch {torch.__version__}"
        )
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    source.fill(header.data_offset + info.begin, [memoryview(raw.numpy())])
    return raw.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)


def _into_host(
    source: pieces.File, header: Header, progress: Callable[[int, int], None] | None, threads: int, chunk: int
) -> dict[str, torch.Tensor]:
    """uint8 vectors by name. Bytes first, the dtype later as a view: torch's memory is aligned for every dtype.

    New memory costs more than copying a cached file into it, because the kernel clears each page when it is first
    touched: that is what the threads share. Huge pages (``MADV_HUGEPAGE``) were tried and left out: see
    ``research/REPRODUCIBILITY.md``.
    """
    raw = {name: torch.empty(info.nbytes, dtype=torch.uint8) for name, info in header.tensors.items()}
    views = {name: memoryview(tensor.numpy()) for name, tensor in raw.items()}

    def fill(part: pieces.Chunk) -> None:
        source.fill(part.offset, [views[piece.name][piece.start : piece.stop] for piece in part.pieces])

    pieces.run(pieces.plan(header, chunk), fill, threads, progress)
    return raw
