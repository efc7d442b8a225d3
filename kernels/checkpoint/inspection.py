"""Describing a checkpoint without loading it, and judging its quantised layers from the file's own bytes.

Nothing of a tensor's size is allocated here: headers, markers of at most 64 KiB, scalars, and block scales through one
small buffer.
"""

import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import BinaryIO

from . import layout
from .header import CheckpointError, Header, TensorInfo, read_header

_BUFFER_BYTES = 4 << 20
_SCALARS = {"F32": "<f", "F16": "<e", "F64": "<d"}
_BAD_BLOCK_SCALES = bytes(range(0x7F))
"""The bytes that a block scale may have; deleting them leaves the bad ones."""


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
    return summary(header, layers_of(path, header), os.path.basename(path))


def summary(header: Header, layers: Mapping[str, layout.Layer], file: str) -> dict:
    """What `inspect` returns, from a header and its layers that were read already."""
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


def layers_of(path: str, header: Header) -> dict[str, layout.Layer]:
    """The quantised layers, by the header and the markers in the file; see `layout.find_layers`."""
    file = os.path.basename(path)
    with _opened(path, file) as stream:
        markers = _markers(stream, file, header)
    return layout.find_layers(header.tensors, header.metadata, markers, file)


def verify(
    path: str,
    header: Header,
    declared: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, layout.Layer]:
    """Judge every quantised layer while it is still in the file: shapes, markers, scalars and each block scale.

    So a file with damaged scales is refused before memory for it is asked for and before any model makes room.

    Args:
        header: what `read_header` said of this file.
        declared: ``auto``, ``comfy`` or ``modelopt``, see `layout.normalise`.
        progress: ``progress(done, total)`` in bytes of block scales; may raise to cancel.

    Returns:
        The quantised layers by name, as in the file.

    Raises:
        CheckpointError: those of `layout.find_layers`, ``bad_scale``, ``bad_weight``.
    """
    file = os.path.basename(path)
    layers = layers_of(path, header)
    fp4 = [name for name, layer in layers.items() if layer.format == "nvfp4"]
    for name in fp4:
        layout.check_shapes(file, name, header.tensors, declared)
    with _opened(path, file) as stream:
        for name, layer in layers.items():
            decode = "weight_scale_2" if layer.format == "nvfp4" else "weight_scale"
            for part in (decode, "input_scale"):
                number = _check_scalar(stream, file, header, f"{name}.{part}")
                if part == "weight_scale_2" and number == 0 and _any_byte(stream, header, f"{name}.weight"):
                    raise layout.zero_decode_scale(file, f"{name}.weight_scale_2")
        scales = [f"{name}.weight_scale" for name in fp4]
        total = sum(header.tensors[key].nbytes for key in scales)
        buffer, done = bytearray(_BUFFER_BYTES), 0
        for key in sorted(scales, key=lambda key: header.tensors[key].begin):
            for count in _check_block_scales(stream, file, key, header, buffer):
                done += count
                if progress is not None:
                    progress(done, total)
    return layers


def _check_block_scales(stream: BinaryIO, file: str, key: str, header: Header, buffer: bytearray):
    """Look at every byte of one tensor of block scales; yields the size of each read."""
    info = header.tensors[key]
    stream.seek(header.data_offset + info.begin)
    left, bad, view = info.nbytes, 0, memoryview(buffer)
    while left:
        count = stream.readinto(view[: min(left, len(buffer))])
        if not count:
            raise CheckpointError("truncated", file, key, "the file changed while it was read")
        bad += len(bytes(view[:count]).translate(None, _BAD_BLOCK_SCALES))
        left -= count
        yield count
    if bad:
        raise layout.bad_block_scales(file, key, bad)


def _check_scalar(stream: BinaryIO, file: str, header: Header, key: str) -> float | None:
    """A decode scale or a static activation scale, where the header has one that is a single number; else None."""
    info = header.tensors.get(key)
    if info is None or math.prod(info.shape) != 1:
        return None
    raw = _read(stream, header, info)
    if info.dtype == "BF16":
        number = struct.unpack("<f", b"\0\0" + raw)[0]
    elif info.dtype in _SCALARS:
        number = struct.unpack(_SCALARS[info.dtype], raw)[0]
    else:
        raise CheckpointError("bad_scale", file, key, f"must be a floating point number, is {info.dtype}")
    layout.check_number(file, key, number)
    return number


def _any_byte(stream: BinaryIO, header: Header, key: str) -> bool:
    """Whether a tensor has a byte that is not zero."""
    info = header.tensors[key]
    stream.seek(header.data_offset + info.begin)
    left = info.nbytes
    while left and (block := stream.read(min(left, _BUFFER_BYTES))):
        if block.count(0) != len(block):
            return True
        left -= len(block)
    return False


def _markers(stream: BinaryIO, file: str, header: Header) -> dict[str, bytes]:
    markers = {}
    for name, info in header.tensors.items():
        layer, _, part = name.rpartition(".")
        if part == layout.MARKER:
            layout.check_marker(file, name, info)
            markers[layer] = _read(stream, header, info)
    return markers


class _opened:
    """A file whose OSErrors become `CheckpointError`s."""

    def __init__(self, path: str, file: str):
        self._path, self._file, self._stream = path, file, None

    def __enter__(self) -> BinaryIO:
        try:
            self._stream = open(self._path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._error(error) from error
        return self._stream

    def __exit__(self, kind, error, trace) -> None:
        self._stream.close()
        if isinstance(error, OSError):
            raise self._error(error) from error

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError("unreadable", self._file, "", f"cannot be read: {error.strerror or error}")


def _read(stream: BinaryIO, header: Header, info: TensorInfo) -> bytes:
    stream.seek(header.data_offset + info.begin)
    return stream.read(info.nbytes)


def _count(header: Header, prefix: str) -> int:
    """How many numbered children there are under `prefix`."""
    return len({name[len(prefix) :].split(".")[0] for name in header.tensors if name.startswith(prefix)})
