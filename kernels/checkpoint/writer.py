"""Writing safetensors files: whole or not at all."""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping

import torch

from .. import nvfp4
from .dtypes import NAMES
from .header import CheckpointError, read_header

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted: no lock is needed to tell that it is in use
    fcntl = None

NVFP4_MARKER = b'{"format": "nvfp4"}'


def nvfp4_tensors(name: str, weight: torch.Tensor, file: str = "") -> dict[str, torch.Tensor]:
    """The tensors by which ComfyUI knows an NVFP4 linear, quantised from `weight` by `nvfp4.quantize`.

    Args:
        name: the layer, for example ``blocks.0.attn.qkv_proj``.
        weight: ``[out, in]`` fp32, bf16 or fp16. It is checked for Inf and NaN, which waits for a GPU.
        file: name to put into an error.

    Returns:
        See `layer_tensors`.

    Raises:
        CheckpointError: ``nonfinite_weight`` with both counts, ``bad_weight`` for a wrong rank or dtype.
    """
    if weight.ndim != 2 or weight.dtype not in nvfp4.DTYPES:
        raise CheckpointError(
            "bad_weight",
            file,
            name,
            f"NVFP4 wants a float32, bfloat16 or float16 matrix, has {weight.dtype} {list(weight.shape)}",
        )
    n_inf, n_nan = nvfp4.count_nonfinite(weight)
    if n_inf or n_nan:
        raise nonfinite(file, name, n_inf, n_nan, weight.numel())
    return layer_tensors(name, nvfp4.quantize(weight))


def layer_tensors(name: str, q: nvfp4.NVFP4) -> dict[str, torch.Tensor]:
    """A quantised weight under ComfyUI's keys.

    Returns:
        ``name.weight`` uint8 (rows padded to 16), ``name.weight_scale`` e4m3 swizzled, ``name.weight_scale_2`` fp32
        0-d, ``name.comfy_quant`` the marker as uint8 JSON.
    """
    return {
        f"{name}.weight": q.codes,
        f"{name}.weight_scale": q.block_scale,
        f"{name}.weight_scale_2": q.decode_scale,
        f"{name}.comfy_quant": marker_tensor(NVFP4_MARKER),
    }


def nonfinite(file: str, name: str, n_inf: int, n_nan: int, count: int) -> CheckpointError:
    """The error for a weight that no scale can hold."""
    return CheckpointError(
        "nonfinite_weight",
        file,
        name,
        f"has {n_inf} Inf and {n_nan} NaN of {count} weights; the source file is damaged",
    )


def marker_tensor(text: bytes) -> torch.Tensor:
    """A ``comfy_quant`` marker: its JSON bytes as a uint8 vector."""
    return torch.tensor(list(text), dtype=torch.uint8)


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a safetensors file whole or not at all; see `StreamWriter`.

    Memory: one contiguous CPU copy of a tensor at a time, and only where it is not contiguous on the CPU already.

    Args:
        path: target; its folder must exist.
        tensors: by name. Shared storage is written twice.
        metadata: strings to strings.
        overwrite: replace an existing file. Without it an existing one is an error, before anything is written.

    Raises:
        CheckpointError: ``exists``, ``unwritable``, ``duplicate``, ``bad_name``, ``bad_dtype``, ``bad_metadata``.
    """
    file = os.path.basename(os.fspath(path))
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in entries:
            raise CheckpointError("duplicate", file, str(name), "was given twice")
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise CheckpointError(
                "bad_dtype", file, str(name), f"{tensor.dtype} {tensor.layout} cannot be stored as safetensors"
            )
        entries[name] = tensor.detach()
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in entries.items()}
    with StreamWriter(path, kinds, metadata, overwrite) as out:
        for name in out.order:
            out.put(name, entries[name])


class StreamWriter:
    """A safetensors file whose tensors come one by one, in any order, and that appears whole or not at all.

        with StreamWriter(path, {"a": (torch.uint8, (3,))}) as out:
            out.put("a", tensor)

    The data go into a temporary file beside `path`, which is flushed to the disk and renamed when the block ends.
    Whoever looks sees the old file, no file, or the whole new one; an error or a cancel leaves no temporary file. A
    killed process leaves a hidden one, ``.<name>.<hex>.tmp``; the next that writes to `path` removes it, unless another
    process holds it locked. The data are ordered by falling element size and then by
    name, so every tensor is aligned and equal input gives equal bytes, whatever the order of `put`.

    Args:
        path: target; its folder must exist and have room for the whole file.
        kinds: dtype and shape of every tensor by name.
        metadata: strings to strings.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: ``exists``, ``unwritable``, ``disk_full``, ``bad_name``, ``bad_dtype``, ``bad_metadata`` on
            entering; ``unwritable`` afterwards; ``incomplete`` on leaving where a tensor was not put.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ):
        self.path = os.fspath(path)
        self.file = os.path.basename(self.path)
        self._overwrite = overwrite
        self._kinds = dict(kinds)
        for name, (dtype, _) in self._kinds.items():
            if not isinstance(name, str) or name == "__metadata__":
                raise CheckpointError("bad_name", self.file, str(name), "is not a possible tensor name")
            if dtype not in NAMES:
                raise CheckpointError("bad_dtype", self.file, name, f"{dtype} cannot be stored as safetensors")
        self.order = sorted(self._kinds, key=lambda name: (-self._kinds[name][0].itemsize, name))
        self._head, self._begin, self.nbytes = _header(self.file, self.order, self._kinds, metadata or {})
        self._left = set(self._kinds)
        self._stream = None
        self._temporary = os.path.join(os.path.dirname(self.path), f".{self.file}.{secrets.token_hex(6)}.tmp")

    def __enter__(self):
        if not self._overwrite:
            self._refuse_existing()
        try:
            self._clear_leftovers()
            free = shutil.disk_usage(os.path.dirname(self.path) or ".").free
            if free < self.nbytes:
                raise CheckpointError(
                    "disk_full", self.file, "",
                    f"will have {self.nbytes} bytes, the disk has {free} free; make room or choose another folder",
                )  # fmt: skip
            # 0o666 and O_EXCL: the umask decides about the mode as for any file, and nobody else's file is opened
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._stream = open(os.open(self._temporary, flags, 0o666), "wb", buffering=0)  # noqa: SIM115
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
                    fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(0, memoryview(self._head))
        except OSError as error:
            self._discard()
            raise self._unwritable(error) from error
        return self

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; it must have the dtype and shape that were announced, and is written once."""
        dtype, shape = self._kinds[name]
        if name not in self._left or tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name}: announced as {dtype} {list(shape)}, to be put once; got {tensor.dtype} {list(tensor.shape)}"
            )
        try:
            self._write(self._begin[name], _data(tensor))
        except OSError as error:
            raise self._unwritable(error) from error
        self._left.remove(name)

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._unwritable(failure) from failure
        finally:
            # there only when something went wrong, a cancel (BaseException) included
            self._discard()

    def _finish(self) -> None:
        if self._left:
            raise CheckpointError("incomplete", self.file, min(self._left), f"{len(self._left)} tensors are missing")
        os.fsync(self._stream.fileno())
        self._stream.close()
        read_header(self._temporary)
        if not self._overwrite:
            self._refuse_existing()
        os.replace(self._temporary, self.path)
        _sync_folder(os.path.dirname(self.path) or ".")

    def _write(self, offset: int, data: memoryview) -> None:
        self._stream.seek(offset)
        while data:
            data = data[self._stream.write(data) :]

    def _discard(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if os.path.lexists(self._temporary):
            os.unlink(self._temporary)

    def _clear_leftovers(self) -> None:
        """Remove what killed processes left of this file: it may be as large as the file itself."""
        folder = os.path.dirname(self.path) or "."
        leftover = re.compile(re.escape(f".{self.file}.") + r"[0-9a-f]{12}\.tmp")
        for name in filter(leftover.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):  # in use, or not ours to remove
                _remove_unheld(os.path.join(folder, name))

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.path):
            raise CheckpointError("exists", self.file, "", "exists already; choose another name or ask for overwrite")

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError("unwritable", self.file, "", f"cannot be written: {error.strerror or error}")


def _remove_unheld(path: str) -> None:
    """Remove a temporary file; OSError where a process still writes it."""
    if fcntl is not None:
        with open(path, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.unlink(path)


def _header(
    file: str, order: list[str], kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Length word and JSON, padded so that the data begin at a multiple of 8; each tensor's place; the file's size."""
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise CheckpointError(
            "bad_metadata", file, "__metadata__", "keys and values must be strings; turn numbers into text first"
        )
    header, begin, position = {}, {}, 0
    if metadata:
        header["__metadata__"] = dict(metadata)
    for name in order:
        dtype, shape = kinds[name]
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        begin[name], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: at + len(head) for name, at in begin.items()}, len(head) + position


def _data(tensor: torch.Tensor) -> memoryview:
    # a conjugated or negated view has a flag where its bytes should differ
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _sync_folder(folder: str) -> None:
    """Make the rename itself durable where the system can (POSIX); elsewhere a folder cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        # some network and FUSE file systems refuse; the file itself is synced
        pass
    finally:
        os.close(descriptor)
