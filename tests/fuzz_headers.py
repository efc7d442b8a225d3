"""Damaged safetensors files by the thousand: what our reader says of each, and what the safetensors library says.

    python tests/fuzz_headers.py 100000 --seed 7 --record header_fuzz.json

One seed gives the same files everywhere. `fuzz` is what the test calls; the command line can write its counts as a
record (``run-manifest/1``, kind parity).
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors
from conftest import pack_module

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4,
         "F64": 8, "I64": 8, "U16": 2, "U32": 4, "U64": 8}  # fmt: skip
NAMES = ("a", "weight", "blocks.0.mlp.fc1.weight", "ünï", 'quo"te', "", "__meta__", "\u2028", "tab\t", "x" * 300)
NUMBERS = (
    "-1", "-0", "0", "1", "2", "3", "4", "1.0", "4.0", "1e0", "2e1", "0.5", "1E400", "true", "false", "null",
    '"4"', "[]", "{}", "NaN", "-Infinity", "01", "+1", "0x4", "4294967296", "9223372036854775807",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "1" * 30, "9" * 5000,
)  # fmt: skip
TEXTS = ("F4", "F6_E2M3", "F8_E8M0", "f32", "F12", "", "C64", "float32", "\\ud800", "U8\\u0000", "\\u0055\\u0038")
STRANGE = (
    *NUMBERS, "[" * 100 + "]" * 100, "[" * 125 + "]" * 125, "[" * 200 + "]" * 200, '{"a":' * 150 + "1" + "}" * 150,
    '{"a":1,"a":2}', '"\\ud800"', '"\\ud83d\\ude00"', '"\t"', '"\\x"', "1e", "1.", ".5", "-", "1e-400",
    "1" * 400 + ".5",
)  # fmt: skip
JUNK = (
    " ", "\n", "\t", "\r\n", "\0", ",", "}", "{", "]", "[", ":", '"', "\\", "/*x*/", "\ufeff", "\x0b", "é", "\x7f",
    '"x":1,', '"x":{},', "null", "[" * 150, "[" * 3000 + "]" * 3000, "{}", "\u00a0",
)  # fmt: skip


def good_file(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A header that every reader takes, and its data: a few small tensors, empty and 0-d ones among them."""
    names = rng.sample(NAMES, rng.randint(0, 4))
    position, header = 0, {}
    for name in names:
        dtype = rng.choice(list(SIZES))
        shape = [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randint(0, 3))]
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    items = list(header.items())
    rng.shuffle(items)
    header = dict(items)
    if rng.random() < 0.3:
        header["__metadata__"] = {rng.choice(NAMES): rng.choice(NAMES) for _ in range(rng.randint(0, 2))}
    return header, rng.randbytes(position)


def encoded(header: dict[str, Any] | str, data: bytes, rng: random.Random) -> bytes:
    """The file: JSON in one of the spellings that mean the same, padded or not."""
    if not isinstance(header, str):
        separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", "\t:")))
        header = json.dumps(header, ensure_ascii=rng.random() < 0.5, separators=separators)
    raw = header.encode("utf-8", "surrogatepass")
    raw += b" " * rng.choice((0, 0, 1, -len(raw) % 8, 64))
    return struct.pack("<Q", len(raw)) + raw + data


def flipped(rng: random.Random) -> bytes:
    """Bytes changed, removed or put in, most of them in the header."""
    content = bytearray(encoded(*good_file(rng), rng))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        end = (
            len(content) if rng.random() < 0.2 else min(len(content), 8 + struct.unpack("<Q", content[:8])[0] % 10_000)
        )
        at = rng.randrange(max(1, end))
        how = rng.random()
        if how < 0.5:
            content[at : at + 1] = bytes((rng.randrange(256),))
        elif how < 0.7:
            content[at : at + 1] = bytes(((content[at] if at < len(content) else 0) ^ 1 << rng.randrange(8),))
        elif how < 0.85:
            del content[at : at + rng.randint(1, 4)]
        else:
            content[at:at] = rng.randbytes(rng.randint(1, 4))
        if len(content) < 8:
            break
    return bytes(content)


def cut(rng: random.Random) -> bytes:
    """A download that ended early, or that something was put behind; and other length words."""
    content = encoded(*good_file(rng), rng)
    how = rng.random()
    if how < 0.4:
        return content[: rng.randint(0, len(content))]
    if how < 0.6:
        return content + rng.choice((b"\0", b" ", b"\n", rng.randbytes(9)))
    length = struct.unpack("<Q", content[:8])[0]
    words = (0, 1, 2, 7, length - 1, length + 1, length + 8, 10**8, 10**8 + 1, 2**31, 2**32, 2**63, 2**64 - 1)
    return struct.pack("<Q", rng.choice(words) % 2**64) + content[8:]


def reworded(rng: random.Random) -> bytes:
    """The JSON's text changed at a place that means something: a number, a name, a bracket, something put between."""
    header, data = good_file(rng)
    text = json.dumps(header)
    how = rng.random()
    places = [at for at, sign in enumerate(text) if sign in "0123456789"]
    if how < 0.4 and places:
        at = rng.choice(places)
        stop = at
        while stop < len(text) and text[stop] in "0123456789":
            stop += 1
        return encoded(text[:at] + rng.choice(NUMBERS) + text[stop:], data, rng)
    if how < 0.55:
        for dtype in SIZES:
            if f'"{dtype}"' in text:
                return encoded(text.replace(f'"{dtype}"', f'"{rng.choice(TEXTS)}"', 1), data, rng)
    if how < 0.7:
        # a member that no reader knows: how far into it does one look
        return encoded(text.replace('{"dtype"', '{"x":' + rng.choice(STRANGE) + ',"dtype"', 1), data, rng)
    at = rng.randint(0, len(text))
    return encoded(text[:at] + rng.choice(JUNK) + text[at:], data, rng)


def restructured(rng: random.Random) -> bytes:
    """The header's objects changed: members missing, too many, twice; offsets moved; other types."""
    header, data = good_file(rng)
    header = copy.deepcopy(header)
    tensors = [name for name in header if name != "__metadata__"]
    if not tensors:
        odd = (
            "[]",
            "null",
            "1",
            '"a"',
            "{}",
            '{"__metadata__":null}',
            '{"__metadata__":{"a":1}}',
            '{"__metadata__":[]}',
        )
        return encoded(rng.choice(odd), data, rng)
    name = rng.choice(tensors)
    entry, how = header[name], rng.randrange(9)
    odd_values = (None, True, -1, 1.0, "x", [], {}, [0], [0, 0], [0, 1, 2], [[0], 1], [True, False], {"a": 1})
    if how == 0:
        del entry[rng.choice(list(entry))]
    elif how == 1:
        entry[rng.choice(("x", "Dtype", "", "strides"))] = rng.choice(odd_values)
    elif how == 2:
        entry[rng.choice(list(entry))] = rng.choice(odd_values)
    elif how == 3:
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-8, -4, -1, 1, 2, 4, 100))
    elif how == 4:
        entry["shape"].insert(rng.randint(0, len(entry["shape"])), rng.choice((0, 1, 1, 1, 2, 2**32, 2**63 - 1, 2**64)))
    elif how == 5:
        header[rng.choice(("b", "__metadata__"))] = copy.deepcopy(entry)
    elif how == 6:
        body = json.dumps(header)[1:-1]
        return encoded("{" + body + "," + json.dumps(name) + ":" + json.dumps(entry) + "}", data, rng)
    elif how == 7:
        other = header[rng.choice(tensors)]
        entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    else:
        header["__metadata__"] = rng.choice((*odd_values, {"a": None}, {"a": 1}, {"a": ["b"]}, {"": ""}))
    return encoded(header, data, rng)


def intact(rng: random.Random) -> bytes:
    """Not damaged at all: so that "both accept" means something."""
    return encoded(*good_file(rng), rng)


KINDS = (flipped, flipped, cut, reworded, reworded, restructured, restructured, intact)


def library(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What the safetensors library reads, or None where it refuses."""
    try:
        found = safetensors.deserialize(content)
    except Exception:  # its own error, or Python's for a name that is no text
        return None
    return {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in found}


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Try `count` files.

    Returns:
        ``both_accept``, ``both_refuse``, ``only_library_accepts`` (our code -> how often), ``only_we_accept`` and
        ``other_exceptions`` and ``differ`` (the first few files each, as hex; all must stay empty), ``codes``.
    """
    header_module = pack_module("kernels.checkpoint.header")
    rng = random.Random(seed)
    path = folder / "model.safetensors"
    both_accept = both_refuse = 0
    codes: collections.Counter = collections.Counter()
    stricter: collections.Counter = collections.Counter()
    bad: dict[str, list[str]] = {"only_we_accept": [], "other_exceptions": [], "differ": []}
    for number in range(count):
        content = KINDS[number % len(KINDS)](rng)
        path.write_bytes(content)
        theirs = library(content)
        try:
            header = header_module.read_header(path)
        except header_module.CheckpointError as error:
            codes[error.code] += 1
            if theirs is None:
                both_refuse += 1
            else:
                stricter[error.code] += 1
            continue
        except Exception as error:  # the very thing that is looked for
            bad["other_exceptions"].append(f"{type(error).__name__} {content[:2000].hex()}")
            continue
        if theirs is None:
            bad["only_we_accept"].append(content[:2000].hex())
            continue
        both_accept += 1
        ours = {
            name: (info.dtype, info.shape, content[header.data_offset + info.begin : header.data_offset + info.end])
            for name, info in header.tensors.items()
        }
        if ours != theirs:
            bad["differ"].append(content[:2000].hex())
    return {
        "files": count,
        "seed": seed,
        "both_accept": both_accept,
        "both_refuse": both_refuse,
        "only_library_accepts": dict(sorted(stricter.items())),
        "codes": dict(sorted(codes.items())),
        **bad,
    }


def write_record(found: dict[str, Any], path: Path) -> None:
    """The counts as a record; each is a gate, so that a validator can hold them against their thresholds."""
    manifest = pack_module("kernels.measure.manifest")
    with manifest.Manifest(path, "parity") as record:
        record.set_protocol(seed=found["seed"])
        stricter = sum(found["only_library_accepts"].values())
        record.note(
            f"{found['files']} generated safetensors files, read by kernels/checkpoint/header.py and by safetensors "
            f"{safetensors.__version__}: both accept {found['both_accept']}, both refuse {found['both_refuse']}, "
            f"only the library accepts {stricter}"
        )
        for code, number in found["only_library_accepts"].items():
            record.note(f"refused here, accepted by the library: {code} {number}")
        record.add_gate("files", "at_least", 20_000, observed=found["files"])
        record.add_gate("both accept", "at_least", found["files"] // 10, observed=found["both_accept"])
        record.add_gate("both refuse", "at_least", found["files"] // 10, observed=found["both_refuse"])
        for what in ("only_we_accept", "other_exceptions", "differ"):
            record.add_gate(what.replace("_", " "), "at_most", 0, observed=len(found[what]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(options.count, options.seed, Path(folder))
    if options.record:
        write_record(found, options.record)
    print(json.dumps(found, indent=1))
    return 1 if found["only_we_accept"] or found["other_exceptions"] or found["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
