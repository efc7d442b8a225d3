"""Loading a safetensors file without a memory map, and describing one without loading it."""

import os
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

import safetensors.torch
import torch

from . import layout
from .dtypes import TORCH_DTYPES
from .header import CheckpointError, Header, TensorInfo, read_header

CHUNK_BYTES = 8 << 20
"""Largest read between two calls of `progress`, hence between two chances to cancel."""


def load(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    direct: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Load every tensor of a safetensors file.

    Args:
        device: where the tensors end up; from the CPU they are moved one by one.
        direct: read each tensor with ``readinto`` straight into storage of its own: the peak is the file's size (plus
            one tensor for another device), no mapping of the file stays behind, and every tensor can be freed by
            itself. With False ``safetensors.torch.load_file`` maps the file.
        progress: ``progress(done_bytes, total_bytes)`` of tensor data, at 0, at least every percent and every 8 MiB,
            and at the end. It may raise, to cancel: the file is closed and the exception passes. Without `direct` it is
            called at the two ends only.

    Returns:
        Tensors by name, in the order of the header, contiguous, with the bytes of the file; and the file's metadata.

    Raises:
        CheckpointError: those of `read_header`; ``dtype_unsupported`` for one that torch here lacks; ``truncated`` when
            the file shrinks meanwhile.
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
    try:
        with open(path, "rb", buffering=0) as stream:
            tensors = _read_all(stream, file, header, torch.device(device), progress)
    except OSError as error:
        raise CheckpointError("unreadable", file, "", f"cannot be read: {error.strerror or error}") from error
    return tensors, dict(header.metadata)


def inspect(path: str | os.PathLike) -> dict:
    """Describe a checkpoint from its header and its quantisation markers alone.

    Returns:
        A dict that JSON can hold: ``file``, ``bytes``, ``tensors``, ``metadata_keys``, ``is_h3``, ``prefix``,
        ``blocks``, ``refiner_blocks``, ``adaln`` (``pruned``, ``full`` or None), ``formats`` (for each kind of linear
        in the blocks, such as ``attn.qkv_proj``, how many layers have which format or dtype), ``format_sources``
        (layers by ``marker``, ``metadata``, ``inferred``), ``static_scales`` (layers with an ``input_scale``),
        ``bytes_by_dtype``.

    Raises:
        CheckpointError: those of `read_header` and of `layout.find_layers`.
    """
    path = os.fspath(path)
    header = read_header(path)
    file = os.path.basename(path)
    markers = _read_markers(path, file, header)
    layers = layout.find_layers(header.tensors, header.metadata, markers, file)
    prefix = layout.prefix_of(header.tensors)
    base = prefix or ""
    formats: dict[str, Counter] = {}
    bytes_by_dtype: Counter = Counter()
    for name, info in header.tensors.items():
        bytes_by_dtype[info.dtype] += info.nbytes
        parts = name[len(base) :].split(".")
        if name.startswith(base) and parts[0] == "blocks" and parts[-1] == "weight" and len(info.shape) == 2:
            layer = layers.get(name[: -len(".weight")])
            formats.setdefault(".".join(parts[2:-1]), Counter())[layer.format if layer else info.dtype] += 1
    adaln = None
    if prefix is not None:
        adaln = "pruned" if f"{base}adaln_t_table" in header.tensors else "full"
    return {
        "file": file,
        "bytes": header.file_bytes,
        "tensors": len(header.tensors),
        "metadata_keys": sorted(header.metadata),
        "is_h3": prefix is not None,
        "prefix": prefix,
        "blocks": _count(header, f"{base}blocks."),
        "refiner_blocks": _count(header, f"{base}token_refiner.blocks."),
        "adaln": adaln,
        "formats": {kind: dict(counts) for kind, counts in formats.items()},
        "format_sources": dict(Counter(layer.source for layer in layers.values())),
        "static_scales": sum(layer.static_input for layer in layers.values()),
        "bytes_by_dtype": dict(bytes_by_dtype),
    }


def _read_all(
    stream: BinaryIO, file: str, header: Header, device: torch.device, progress: Callable[[int, int], None] | None
) -> dict[str, torch.Tensor]:
    total = header.file_bytes - header.data_offset
    # a hundredth of the file, so that small files show progress too
    chunk = CHUNK_BYTES if progress is None else max(1, min(CHUNK_BYTES, total // 100))
    reported = done = 0
    if progress is not None:
        progress(0, total)
    tensors = dict.fromkeys(header.tensors)
    for name, info in sorted(header.tensors.items(), key=lambda item: item[1].begin):
        # bytes first, the dtype as a view: torch's allocation is aligned for every dtype
        storage = torch.empty(info.nbytes, dtype=torch.uint8)
        view = memoryview(storage.numpy())
        stream.seek(header.data_offset + info.begin)
        filled = 0
        while filled < info.nbytes:
            # no further than the next report, so that many small tensors do not stretch a step
            count = stream.readinto(view[filled : filled + chunk - (done - reported)])
            if not count:
                raise CheckpointError(
                    "truncated",
                    file,
                    name,
                    f"ends after {filled} of {info.nbytes} bytes: the file changed while it was read",
                )
            filled += count
            done += count
            if done - reported == chunk or done == total:
                reported = done
                if progress is not None:
                    progress(done, total)
        tensors[name] = storage.view(TORCH_DTYPES[info.dtype]).reshape(info.shape).to(device)
    return tensors


def _read_markers(path: str, file: str, header: Header) -> dict[str, bytes]:
    markers = {}
    try:
        with open(path, "rb") as stream:
            for name, info in header.tensors.items():
                layer, _, part = name.rpartition(".")
                if part == layout.MARKER:
                    layout.check_marker(file, name, info)
                    markers[layer] = _read_bytes(stream, header, info)
    except OSError as error:
        raise CheckpointError("unreadable", file, "", f"cannot be read: {error.strerror or error}") from error
    return markers


def _read_bytes(stream: BinaryIO, header: Header, info: TensorInfo) -> bytes:
    stream.seek(header.data_offset + info.begin)
    return stream.read(info.nbytes)


def _count(header: Header, prefix: str) -> int:
    """How many numbered children there are under `prefix`."""
    return len({name[len(prefix) :].split(".")[0] for name in header.tensors if name.startswith(prefix)})
