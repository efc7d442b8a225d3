"""Strict reading of a safetensors header, with the standard library only.

A safetensors file is ``<u64 little endian: header bytes> <JSON header, padded with spaces> <data>``; the header maps
each name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the start of the data, and may
carry ``"__metadata__"``, a map of strings. Everything that can be wrong with that is found here, before a byte of data
is read or a tensor allocated: never looser than safetensors 0.8 (``tests/fuzz_headers.py``), and stricter, because that
takes the last of two equal names without a word.
"""

import json
import os
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MAX_RANK = 64
"""torch and numpy stop at 64 dimensions."""
MAX_TENSOR_BYTES = 2**63 - 1

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element of each dtype that safetensors 0.8 knows."""

# First bytes of what people rename to .safetensors. A header length can begin with any of them (0x80 is the low byte of
# one length in 32), so they count only where no header follows.
_FOREIGN = (
    (b"PK", "pickle", "a zip archive, as torch.save writes"),
    (b"\x80", "pickle", "a Python pickle"),
    (b"GGUF", "not_safetensors", "a GGUF file"),
    (b"version https://git-lfs", "not_safetensors", "a Git LFS pointer, not the file it points to"),
    (b"<", "not_safetensors", "an HTML or XML page, as a failed download leaves"),
)


class CheckpointError(Exception):
    """A checkpoint that cannot be used, and why. The one exception of this package.

    Attributes:
        code: short fixed word for programs and tests, for example ``"truncated"``.
        file: the file's name without its folder (paths must not reach a browser); empty where there is no file.
        tensor: the tensor or layer concerned; empty where it is the whole file.
        message: what was found, what is wanted, what to do.
    """

    def __init__(self, code: str, file: str, tensor: str, message: str):
        file = os.path.basename(file)
        super().__init__(code, file, tensor, message)
        self.code, self.file, self.tensor, self.message = code, file, tensor, message

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.file, self.tensor, self.message) if part) + f" [{self.code}]"
        # A file's name need not be Unicode; half a character in an error ends ComfyUI's queue when it logs it.
        return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header. `begin` and `end` are byte offsets from the start of the data, not of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors tile ``[data_offset, file_bytes)`` without hole or overlap.

    `tensors` is in the header's order. `metadata` is empty where the file has none.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_offset: int
    file_bytes: int


def read_header(path: str | os.PathLike) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: with one of the codes ``unreadable`` (missing, a folder, no permission), ``empty``,
            ``too_short``, ``pickle``, ``not_safetensors``, ``header_length``, ``truncated``, ``not_utf8``,
            ``not_json``, ``nesting``, ``not_object``, ``bad_number``, ``duplicate``, ``bad_name``, ``bad_metadata``,
            ``bad_entry``, ``bad_dtype``, ``bad_shape``, ``shape_overflow``, ``bad_offsets``, ``size_mismatch``,
            ``overlap``, ``hole``, ``trailing``.
    """
    path = os.fspath(path)
    file = os.path.basename(path)
    try:
        # a FIFO or a device would block or never end
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError("unreadable", file, "", "is not a regular file; choose a .safetensors file")
        with open(path, "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(32)
            length = _header_length(file, start, file_bytes)
            stream.seek(8)
            raw = stream.read(length)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError("unreadable", file, "", f"cannot be read: {reason}") from error
    if len(raw) != length:
        raise CheckpointError(
            "truncated", file, "", f"ended after {8 + len(raw)} bytes while it was read; copy it again"
        )

    entries = _parse(file, raw)
    metadata = _metadata(file, entries.pop("__metadata__", None))
    tensors = {name: _tensor_info(file, name, entry) for name, entry in entries.items()}
    _check_coverage(file, tensors, 8 + length, file_bytes)
    return Header(tensors, metadata, 8 + length, file_bytes)


def _header_length(file: str, start: bytes, file_bytes: int) -> int:
    """The header's byte count from the first 32 bytes, or the reason why this is no safetensors file."""
    if not start:
        raise CheckpointError("empty", file, "", "is empty (0 bytes); download it again")
    has_header = start[8:9] == b"{"
    if not has_header:
        for magic, code, what in _FOREIGN:
            if start.startswith(magic):
                raise CheckpointError(code, file, "", f"is {what}, not a safetensors file; get the safetensors version")
    if file_bytes < 8:
        raise CheckpointError(
            "too_short", file, "", f"has {file_bytes} bytes, a safetensors file at least 10; download it again"
        )
    length = int.from_bytes(start[:8], "little")
    if has_header and file_bytes - 8 < length <= MAX_HEADER_BYTES:
        raise CheckpointError(
            "truncated",
            file,
            "",
            f"has {file_bytes} bytes, but its header alone ends at byte {8 + length}; the download was cut, repeat it",
        )
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(
            "header_length", file, "",
            f"says its header has {length} bytes; the file has {file_bytes} and a header 2 to {MAX_HEADER_BYTES}; "
            "not a safetensors file, or damaged",
        )  # fmt: skip
    return length


def _parse(file: str, raw: bytes) -> dict:
    """The header as a dict, refusing what JSON or Python would let pass."""

    def unique(pairs: list) -> dict:
        seen = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(
                    "duplicate", file, _shown(key), "the header has this name twice; which one is meant cannot be known"
                )
            seen[key] = value
        return seen

    def constant(token: str) -> None:
        raise CheckpointError("bad_number", file, "", f"the header holds {token}, which is not JSON")

    def integer(digits: str) -> int:
        # 2**64 has 20 digits; Python refuses more than 4300 with an error of its own, and takes "-0" for 0
        if len(digits) > 20 or digits == "-0":
            raise CheckpointError(
                "bad_number", file, "", f"the header holds the number {digits[:24]}, no size or offset"
            )
        return int(digits)

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "not_utf8", file, "", f"the header is not UTF-8 at byte {8 + error.start}; the file is damaged"
        ) from error
    try:
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_int=integer)
    except RecursionError as error:
        raise CheckpointError(
            "nesting", file, "", "the header is nested too deeply; a real one has three levels"
        ) from error
    except ValueError as error:
        raise CheckpointError("not_json", file, "", f"the header is not JSON ({error}); the file is damaged") from error
    if not isinstance(parsed, dict):
        raise CheckpointError("not_object", file, "", f"the header is a JSON {type(parsed).__name__}, wanted an object")
    if not text.startswith("{"):
        raise CheckpointError("not_object", file, "", "the header must begin with '{'")
    return parsed


def _metadata(file: str, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(
            "bad_metadata", file, "__metadata__", f"is a {type(value).__name__}, wanted a map of strings"
        )
    for key, text in value.items():
        if not isinstance(text, str) or not _is_text(text) or not _is_text(key):
            raise CheckpointError(
                "bad_metadata", file, "__metadata__", f"{_shown(key)} is not a Unicode string; values must be strings"
            )
    return value


def _tensor_info(file: str, name: str, entry: object) -> TensorInfo:
    shown = _shown(name)
    if not _is_text(name):
        raise CheckpointError("bad_name", file, shown, "the name is not Unicode text")
    # No other member either: the library skips one, but not one that its JSON parser cannot read, and ours reads more.
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "bad_entry", file, shown, "wanted an object with dtype, shape and data_offsets, and nothing else"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            "bad_dtype", file, shown, f"dtype {_shown(dtype)} is unknown; known are {', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(dim) for dim in shape):
        raise CheckpointError(
            "bad_shape",
            file,
            shown,
            f"shape {_shown(shape)} must be a list of at most {MAX_RANK} whole numbers, none negative",
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(at) for at in offsets)
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(
            "bad_offsets", file, shown, f"data_offsets {_shown(offsets)} must be [begin, end], whole, 0 <= begin <= end"
        )
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        # a zero further on must not hide an overflow: others multiply from the left, in 64 bits
        bits *= dim or 1
    if bits > 8 * MAX_TENSOR_BYTES or any(dim > MAX_TENSOR_BYTES for dim in shape):
        raise CheckpointError(
            "shape_overflow", file, shown, f"shape {_shown(shape)} of {dtype} is more than 2^63 bytes"
        )
    if 0 in shape:
        bits = 0
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            "size_mismatch",
            file,
            shown,
            f"shape {_shown(shape)} of {dtype} is {bits / 8:g} bytes, data_offsets span {offsets[1] - offsets[0]}",
        )
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _check_coverage(file: str, tensors: Mapping[str, TensorInfo], data_offset: int, file_bytes: int) -> None:
    """The tensors must tile the data exactly: no overlap, no hole, no byte missing or left over."""
    position, previous = 0, "the start"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            code = "overlap" if info.begin < position else "hole"
            raise CheckpointError(
                code,
                file,
                _shown(name),
                f"begins at byte {info.begin} of the data, but {_shown(previous)} ends at {position}; damaged file",
            )
        position, previous = info.end, name
    wanted = data_offset + position
    if file_bytes < wanted:
        raise CheckpointError(
            "truncated",
            file,
            "",
            f"has {file_bytes} bytes of {wanted}; {wanted - file_bytes} are missing: the download was cut, repeat it",
        )
    if file_bytes > wanted:
        raise CheckpointError(
            "trailing",
            file,
            "",
            f"has {file_bytes} bytes, its header describes {wanted}; {file_bytes - wanted} are left over",
        )


def _is_size(value: object) -> bool:
    # bool is an int to Python
    return type(value) is int and value >= 0


def _is_text(value: str) -> bool:
    """False for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """A short printable form of something out of a file that is not trusted."""
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 120:
        return value
    # reprlib bounds depth and length: repr of a list 900 levels deep can exhaust the stack that parsing it did not
    return reprlib.repr(value)
