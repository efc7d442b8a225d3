"""Writing safetensors files: whole or not at all."""

import json
import os
import secrets
from collections.abc import Iterable, Mapping

import torch

from .. import nvfp4
from .dtypes import NAMES
from .header import CheckpointError, read_header

NVFP4_MARKER = b'{"format": "nvfp4"}'


def nvfp4_tensors(name: str, weight: torch.Tensor, file: str = "") -> dict[str, torch.Tensor]:
    """The tensors by which ComfyUI knows an NVFP4 linear, quantised from `weight` by `nvfp4.quantize`.

    Args:
        name: the layer, for example ``blocks.0.attn.qkv_proj``.
        weight: ``[out, in]`` fp32, bf16 or fp16. It is checked for Inf and NaN, which waits for a GPU.
        file: name to put into an error.

    Returns:
        ``name.weight`` uint8 (rows padded to 16), ``name.weight_scale`` e4m3 swizzled, ``name.weight_scale_2`` fp32
        0-d, ``name.comfy_quant`` the marker as uint8 JSON.

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
        raise CheckpointError(
            "nonfinite_weight",
            file,
            name,
            f"has {n_inf} Inf and {n_nan} NaN of {weight.numel()} weights; the source file is damaged",
        )
    q = nvfp4.quantize(weight)
    return {
        f"{name}.weight": q.codes,
        f"{name}.weight_scale": q.block_scale,
        f"{name}.weight_scale_2": q.decode_scale,
        f"{name}.comfy_quant": marker_tensor(NVFP4_MARKER),
    }


def marker_tensor(text: bytes) -> torch.Tensor:
    """A ``comfy_quant`` marker: its JSON bytes as a uint8 vector."""
    return torch.tensor(list(text), dtype=torch.uint8)


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a safetensors file under a temporary name beside `path`, flush it to the disk and rename it.

    Whoever looks sees the old file, no file, or the whole new one; an error or a cancel leaves no temporary file. The
    data are ordered by falling element size and then by name, so every tensor is aligned and equal input gives equal
    bytes. Memory: one contiguous CPU copy of a tensor at a time, and only where it is not contiguous on the CPU
    already.

    Args:
        path: target; its folder must exist.
        tensors: by name. Shared storage is written twice.
        metadata: strings to strings.
        overwrite: replace an existing file. Without it an existing one is an error, before anything is written.

    Raises:
        CheckpointError: ``exists``, ``unwritable``, ``duplicate``, ``bad_name``, ``bad_dtype``, ``bad_metadata``.
    """
    path = os.fspath(path)
    file = os.path.basename(path)
    entries = _ordered(file, tensors.items() if isinstance(tensors, Mapping) else tensors)
    head = _header_bytes(file, entries, metadata or {})
    if not overwrite:
        _refuse_existing(path, file)
    temporary = os.path.join(os.path.dirname(path), f".{file}.{secrets.token_hex(6)}.tmp")
    try:
        try:
            # 0o666 and O_EXCL: the umask decides about the mode as for any file, and nobody else's file is opened
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
            with open(descriptor, "wb") as stream:
                stream.write(head)
                for _, tensor in entries:
                    stream.write(_data(tensor))
                stream.flush()
                os.fsync(stream.fileno())
            read_header(temporary)
            if not overwrite:
                _refuse_existing(path, file)
            os.replace(temporary, path)
        except OSError as error:
            raise CheckpointError("unwritable", file, "", f"cannot be written: {error.strerror or error}") from error
    finally:
        # still there only when something went wrong, a cancel (BaseException) included
        if os.path.lexists(temporary):
            os.unlink(temporary)
    _sync_folder(os.path.dirname(path) or ".")


def _refuse_existing(path: str, file: str) -> None:
    if os.path.lexists(path):
        raise CheckpointError("exists", file, "", "exists already; choose another name or ask for overwrite")


def _ordered(file: str, pairs: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    entries, seen = [], set()
    for name, tensor in pairs:
        if not isinstance(name, str) or name == "__metadata__":
            raise CheckpointError("bad_name", file, str(name), "is not a possible tensor name")
        if name in seen:
            raise CheckpointError("duplicate", file, name, "was given twice")
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise CheckpointError(
                "bad_dtype", file, name, f"{tensor.dtype} {tensor.layout} cannot be stored as safetensors"
            )
        seen.add(name)
        entries.append((name, tensor.detach()))
    return sorted(entries, key=lambda entry: (-entry[1].element_size(), entry[0]))


def _header_bytes(file: str, entries: list[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Length word and JSON, padded with spaces so that the data begin at a multiple of 8."""
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise CheckpointError(
            "bad_metadata", file, "__metadata__", "keys and values must be strings; turn numbers into text first"
        )
    header, position = {}, 0
    if metadata:
        header["__metadata__"] = dict(metadata)
    for name, tensor in entries:
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
