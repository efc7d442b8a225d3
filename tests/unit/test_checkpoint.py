"""kernels/checkpoint: every bad file has its code, reading is bit-equal, writing is atomic, layouts are not guessed."""

import json
import os
import pickle
import struct
import zipfile

import pytest
import safetensors.torch
import torch
from conftest import pack_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

nvfp4 = pack_module("kernels.nvfp4")
checkpoint = pack_module("kernels.checkpoint")
reader = pack_module("kernels.checkpoint.reader")
dtypes = pack_module("kernels.checkpoint.dtypes")
CheckpointError = checkpoint.CheckpointError


def entry(begin=0, end=4, dtype="U8", shape=(4,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def safetensors_bytes(header, data=b"\1\2\3\4", length=None) -> bytes:
    """A file from a header given as an object, as JSON text or as bytes."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def one(**changes) -> bytes:
    return safetensors_bytes({"a": entry() | changes})


ENTRY = json.dumps(entry())
GOOD = safetensors_bytes({"a": entry(), "__metadata__": {"k": "v"}})
DEEP = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
BAD = {
    "empty": ("empty", b""),
    "seven bytes": ("too_short", b"\0" * 7),
    "length 0": ("header_length", struct.pack("<Q", 0) + b"{}"),
    "length 2^63": ("header_length", safetensors_bytes({"a": entry()}, length=2**63)),
    "length 2^64 - 1": ("header_length", safetensors_bytes({"a": entry()}, length=2**64 - 1)),
    "length past the end": ("truncated", safetensors_bytes({"a": entry()}, length=5000)),
    "length past the end, no header": ("header_length", struct.pack("<Q", 5000) + b"x" * 20),
    "cut in the header": ("truncated", GOOD[:30]),
    "cut in the data": ("truncated", GOOD[:-1]),
    "not UTF-8": ("not_utf8", safetensors_bytes(b'{"\xff\xfe": 1}')),
    "not JSON": ("not_json", safetensors_bytes('{"a": ')),
    "two objects": ("not_json", safetensors_bytes("{}{}", b"")),
    "an array": ("not_object", safetensors_bytes("[1, 2]")),
    "a number": ("not_object", safetensors_bytes("12")),
    "a string": ("not_object", safetensors_bytes('"ab"')),
    "white space first": ("not_object", safetensors_bytes(" {}", b"")),
    "NaN": ("bad_number", safetensors_bytes('{"a": NaN}')),
    "Infinity": ("bad_number", safetensors_bytes('{"a": {"dtype": "U8", "shape": [-Infinity]}}')),
    "minus zero": ("bad_number", safetensors_bytes('{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}')),
    "5000 digits": ("bad_number", safetensors_bytes('{"a": ' + "9" * 5000 + "}")),
    "200,000 brackets": ("nesting", safetensors_bytes(DEEP)),
    "200,000 brackets, array": ("nesting", safetensors_bytes("[" * 200_000)),
    "900 brackets as shape": ("bad_shape", one(shape=json.loads("[" * 900 + "]" * 900))),
    "a name twice": ("duplicate", safetensors_bytes(f'{{"a":{ENTRY},"a":{ENTRY}}}')),
    "a name twice, escaped": ("duplicate", safetensors_bytes(f'{{"a":{ENTRY},"\\u0061":{ENTRY}}}')),
    "dtype twice": ("duplicate", safetensors_bytes('{"a":{"dtype":"U8","dtype":"I8"}}')),
    "a surrogate": ("bad_name", safetensors_bytes(f'{{"\\ud800":{ENTRY}}}')),
    "metadata a list": ("bad_metadata", safetensors_bytes({"a": entry(), "__metadata__": []})),
    "metadata a number": ("bad_metadata", safetensors_bytes({"a": entry(), "__metadata__": {"k": 1}})),
    "metadata a surrogate": ("bad_metadata", safetensors_bytes('{"__metadata__":{"k":"\\udfff"}}', b"")),
    "overlap": ("overlap", safetensors_bytes({"a": entry(0, 3, shape=[3]), "b": entry(2, 4, shape=[2])})),
    "the same bytes twice": ("overlap", safetensors_bytes({"a": entry(), "b": entry()})),
    "an empty tensor inside another": ("overlap", safetensors_bytes({"a": entry(), "b": entry(2, 2, shape=[0])})),
    "hole": ("hole", safetensors_bytes({"a": entry(0, 1, shape=[1]), "b": entry(2, 4, shape=[2])})),
    "hole at the start": ("hole", safetensors_bytes({"a": entry(1, 4, shape=[3])})),
    "trailing byte": ("trailing", GOOD + b"\0"),
    "data without tensors": ("trailing", safetensors_bytes("{}", b"\0")),
    "entry a list": ("bad_entry", safetensors_bytes({"a": [1]})),
    "entry without dtype": ("bad_entry", safetensors_bytes({"a": {"shape": [4], "data_offsets": [0, 4]}})),
    "a member too many": ("bad_entry", one(strides=[1])),
    "unknown dtype": ("bad_dtype", one(dtype="F12")),
    "dtype a number": ("bad_dtype", one(dtype=8)),
    "dtype a list": ("bad_dtype", one(dtype=[])),
    "bool dim": ("bad_shape", one(shape=[True, 4])),
    "float dim": ("bad_shape", one(shape=[4.0])),
    "negative dim": ("bad_shape", one(shape=[-4])),
    "negative dims": ("bad_shape", one(shape=[-2, -2])),
    "text dim": ("bad_shape", one(shape=["4"])),
    "shape a number": ("bad_shape", one(shape=4)),
    "null shape": ("bad_shape", one(shape=None)),
    "65 dims": ("bad_shape", one(shape=[1] * 64 + [4])),
    "product past 2^64": ("shape_overflow", one(shape=[2**32, 2**32 + 1])),
    "product past 2^64 that wraps to 4": ("shape_overflow", one(shape=[2**62 + 1, 4])),
    "overflow hidden by a zero": ("shape_overflow", one(shape=[2**63, 2**63, 0], data_offsets=[0, 0])),
    "overflow of small dims hidden by a zero": ("shape_overflow", one(shape=[2**40, 2**40, 0], data_offsets=[0, 0])),
    "bool offsets": ("bad_offsets", one(shape=[1], data_offsets=[False, True])),
    "float offsets": ("bad_offsets", one(data_offsets=[0, 4.0])),
    "negative offsets": ("bad_offsets", one(data_offsets=[-4, 0])),
    "reversed offsets": ("bad_offsets", one(data_offsets=[4, 0])),
    "three offsets": ("bad_offsets", one(data_offsets=[0, 2, 4])),
    "null offsets": ("bad_offsets", one(data_offsets=None)),
    "shape and offsets differ": ("size_mismatch", one(shape=[3])),
    "half a byte": ("size_mismatch", one(dtype="F4", shape=[7])),
    "pickle": ("pickle", pickle.dumps({"a": list(range(99))})),
    "GGUF": ("not_safetensors", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)),
    "LFS pointer": ("not_safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
    "HTML": ("not_safetensors", b"<!DOCTYPE html><html></html>"),
}  # fmt: skip


def refused(path, call=None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        (call or checkpoint.read_header)(path)
    error = caught.value
    assert error.file == "model.safetensors"
    assert str(os.path.dirname(path)) not in str(error)
    return error


@pytest.mark.parametrize("what", BAD)
def test_bad_file_has_its_code(tmp_path, what):
    code, content = BAD[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = refused(path)
    assert error.code == code, str(error)
    assert len(str(error)) < 700
    assert refused(path, checkpoint.load).code == code
    assert refused(path, checkpoint.inspect).code == code


def test_the_good_file_is_read(tmp_path):
    """The base of most bad files: without this every one of them could be refused for another reason."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    header = checkpoint.read_header(path)
    assert header.metadata == {"k": "v"}
    assert header.tensors["a"] == checkpoint.TensorInfo("U8", (4,), 0, 4)
    assert header.tensors["a"].nbytes == 4
    assert header.file_bytes == len(GOOD) == header.data_offset + 4
    for header, data in (("{}", b""), ('{"__metadata__":null}', b""), ("{}  ", b"")):
        path.write_bytes(safetensors_bytes(header, data))
        assert checkpoint.read_header(path).tensors == {}
    path.write_bytes(safetensors_bytes({"e": entry(0, 0, shape=[0]), "a": entry(), "z": entry(4, 4, shape=[2, 0])}))
    assert list(checkpoint.read_header(path).tensors) == ["e", "a", "z"]


def test_a_header_length_that_looks_like_a_pickle_is_no_pickle(tmp_path):
    """One header length in 32 begins with byte 0x80, the first byte of a pickle; 0x4b50 spells PK."""
    path = tmp_path / "model.safetensors"
    for length in (0x80, 0x180, 0x4B50):
        header = json.dumps({"a": entry()}).encode().ljust(length)
        path.write_bytes(safetensors_bytes(header))
        assert path.read_bytes()[:1] in (b"\x80", b"P")
        assert list(checkpoint.read_header(path).tensors) == ["a"]


def test_torch_save_is_called_a_pickle(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(3)}, path)
    assert zipfile.is_zipfile(path)
    assert refused(path).code == "pickle"
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert refused(path).code == "pickle"


def test_a_cut_download_says_both_byte_counts(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD[:-3])
    error = refused(path)
    assert str(len(GOOD)) in error.message
    assert str(len(GOOD) - 3) in error.message


def test_missing_and_folder(tmp_path):
    assert refused(tmp_path / "model.safetensors").code == "unreadable"
    (tmp_path / "model.safetensors").mkdir()
    assert refused(tmp_path / "model.safetensors").code == "unreadable"
    with pytest.raises(CheckpointError, match="unreadable"):
        checkpoint.read_header("a\0b")


def test_error_survives_pickling_and_hides_folders():
    error = CheckpointError("code", "some/folder/x.safetensors", "t", "m")
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.file, again.tensor, again.message) == ("code", "x.safetensors", "t", "m")
    assert str(again) == "x.safetensors: t: m [code]"


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damaged_bytes_are_read_or_refused_like_safetensors(tmp_path, data):
    """Whatever is accepted here safetensors accepts too, with the same tensors; nothing but CheckpointError escapes."""
    content = bytearray(safetensors_bytes({"a": entry(), "b": entry(4, 12, "F32", (2,))}, bytes(range(12))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        tensors, _ = checkpoint.load(path)
    except CheckpointError:
        return
    other = safetensors.torch.load(bytes(content))
    assert tensors.keys() == other.keys()
    for name in other:
        assert same_bits(tensors[name], other[name])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def every_dtype() -> dict[str, torch.Tensor]:
    """Random bytes, a scalar and an empty tensor of each dtype."""
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in dtypes.TORCH_DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (15, 16), dtype=torch.uint8, generator=g)
        matrix = raw.view(dtype)
        tensors |= {
            name: matrix,
            f"{name}.scalar": matrix[3, 0].clone(),
            f"{name}.empty": torch.empty(0, 3, dtype=dtype),
        }
    return tensors


@pytest.mark.parametrize("direct", [True, False])
def test_reader_is_bit_equal_to_safetensors_for_every_dtype(tmp_path, direct):
    path = tmp_path / "all.safetensors"
    checkpoint.write(path, every_dtype(), {"k": "v"})
    want = safetensors.torch.load_file(path)
    got, metadata = checkpoint.load(path, direct=direct)
    assert metadata == {"k": "v"}
    assert got.keys() == want.keys() == every_dtype().keys()
    for name, tensor in every_dtype().items():
        assert same_bits(got[name], want[name]), name
        assert same_bits(got[name], tensor), name
        assert got[name].is_contiguous()


def test_reader_reads_files_that_safetensors_wrote(tmp_path):
    path = tmp_path / "all.safetensors"
    tensors = {name: tensor for name, tensor in every_dtype().items() if not name.startswith("F8_E8M0")}
    safetensors.torch.save_file(tensors, path)
    got, metadata = checkpoint.load(path)
    assert metadata == {}
    assert got.keys() == tensors.keys()
    assert all(same_bits(got[name], tensors[name]) for name in tensors)


def test_progress_moves_every_percent_and_may_cancel(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.write(
        path, {"big": torch.zeros(30_000, dtype=torch.uint8), **{f"s{i}": torch.zeros(7) for i in range(50)}}
    )
    calls = []
    checkpoint.load(path, progress=lambda done, total: calls.append((done, total)))
    total = 30_000 + 50 * 28
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    steps = [b[0] - a[0] for a, b in zip(calls, calls[1:], strict=False)]
    assert max(steps) <= total / 100
    assert min(steps) > 0

    class Cancelled(BaseException):
        pass

    def cancel(done, total):
        if done > total / 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        checkpoint.load(path, progress=cancel)
    calls.clear()
    checkpoint.load(path, direct=False, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, total), (total, total)]


def test_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    error = refused(path, lambda p: checkpoint.load(p, progress=lambda done, _: done or os.truncate(p, 2000)))
    assert error.code == "truncated"


def test_dtype_that_torch_cannot_hold(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry(dtype="F4", shape=[8])}))
    assert checkpoint.read_header(path).tensors["a"].nbytes == 4
    assert refused(path, checkpoint.load).code == "dtype_unsupported"


# ---- writer


def test_writer_refuses_to_overwrite_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"a": torch.zeros(2)})
    before = path.read_bytes()
    assert refused(path, lambda p: checkpoint.write(p, {"a": torch.ones(2)})).code == "exists"
    assert path.read_bytes() == before
    checkpoint.write(path, {"a": torch.ones(2)}, overwrite=True)
    assert checkpoint.load(path)[0]["a"].tolist() == [1, 1]
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_changes_nothing(tmp_path, monkeypatch, failure):
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"a": torch.zeros(2)})
    before = path.read_bytes()

    def fail(descriptor):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        checkpoint.write(path, {"a": torch.ones(2)}, overwrite=True)
    if isinstance(failure, OSError):
        assert caught.value.code == "unwritable"
        assert "No space left" in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_target_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    seen = []
    replace = os.replace

    def spy(source, target):
        assert os.path.dirname(source) == os.path.dirname(target), "a rename is atomic within one folder only"
        seen.append((path.exists(), list(checkpoint.read_header(source).tensors)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    checkpoint.write(path, {"a": torch.zeros(2)})
    assert seen == [(False, ["a"])]


@pytest.mark.skipif(os.name != "posix", reason="file modes and umask are POSIX")
def test_file_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        checkpoint.write(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    finally:
        os.umask(old)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_writer_is_deterministic_aligned_and_takes_views(tmp_path):
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    tensors = {
        "u8": torch.ones(3, dtype=torch.uint8),
        "t": base.t(),
        "row": base[1],
        "c": torch.tensor([1 + 2j]).conj(),
    }
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    checkpoint.write(a, tensors)
    checkpoint.write(b, reversed(tensors.items()))
    assert a.read_bytes() == b.read_bytes()
    header = checkpoint.read_header(a)
    assert header.data_offset % 8 == 0
    assert all(info.begin % 4 == 0 for name, info in header.tensors.items() if name != "u8")
    loaded = safetensors.torch.load_file(a)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("tensors", "metadata", "code"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], None, "duplicate"),
        ({"__metadata__": torch.zeros(1)}, None, "bad_name"),
        ({3: torch.zeros(1)}, None, "bad_name"),
        ({"\ud800": torch.zeros(1)}, None, "bad_name"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, None, "bad_dtype"),
        ({"a": torch.zeros(2, 2).to_sparse()}, None, "bad_dtype"),
        ({"a": torch.zeros(1)}, {"k": 1}, "bad_metadata"),
    ],
)
def test_writer_refuses(tmp_path, tensors, metadata, code):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.write(tmp_path / "model.safetensors", tensors, metadata)
    assert caught.value.code == code
    assert os.listdir(tmp_path) == []


def test_writer_into_a_missing_folder(tmp_path):
    assert refused(tmp_path / "no" / "model.safetensors", lambda p: checkpoint.write(p, {})).code == "unwritable"


def test_nvfp4_tensors_are_those_of_the_format():
    weight = torch.randn(130, 80, generator=torch.Generator().manual_seed(0))
    tensors = checkpoint.nvfp4_tensors("blocks.0.mlp.fc1", weight)
    q = nvfp4.quantize(weight)
    assert torch.equal(tensors["blocks.0.mlp.fc1.weight"], q.codes)
    assert same_bits(tensors["blocks.0.mlp.fc1.weight_scale"], q.block_scale)
    assert same_bits(tensors["blocks.0.mlp.fc1.weight_scale_2"], q.decode_scale)
    assert json.loads(bytes(tensors["blocks.0.mlp.fc1.comfy_quant"].tolist())) == {"format": "nvfp4"}
    weight[3, 4], weight[5, 6], weight[7, 8] = float("inf"), float("-inf"), float("nan")
    with pytest.raises(CheckpointError, match="2 Inf and 1 NaN of 10400") as caught:
        checkpoint.nvfp4_tensors("blocks.0.mlp.fc1", weight)
    assert (caught.value.code, caught.value.tensor) == ("nonfinite_weight", "blocks.0.mlp.fc1")
    with pytest.raises(CheckpointError, match="bad_weight"):
        checkpoint.nvfp4_tensors("x", torch.zeros(3))


def test_what_a_killed_process_left_of_this_file_is_removed(tmp_path):
    """It may be as large as the file. What another process still writes, and what only looks alike, stays."""
    path = tmp_path / "a.safetensors"
    left = tmp_path / ".a.safetensors.0123456789ab.tmp"
    alike = [tmp_path / name for name in (".a.safetensors.notes.tmp", ".ab.safetensors.0123456789ab.tmp", "a.tmp")]
    for file in (left, *alike):
        file.write_bytes(b"half")
    kinds = {"x": (torch.uint8, (4,))}
    with checkpoint.StreamWriter(path, kinds) as first:
        assert not left.exists() and all(file.exists() for file in alike)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointError, match="incomplete"), checkpoint.StreamWriter(path, kinds):
            assert set(before) < set(tmp_path.iterdir()), "the file that is being written is still there"
        first.put("x", torch.arange(4, dtype=torch.uint8))
    assert sorted(tmp_path.iterdir()) == sorted([path, *alike])
    assert reader.load(path, "cpu")[0]["x"].tolist() == [0, 1, 2, 3]


def test_a_file_name_that_is_no_text_is_spelled_out():
    """As Python reads the byte FF in a name; such a text cannot be printed or logged."""
    assert str(CheckpointError("exists", "a\udcff.bin", "", "is there")) == "a\\udcff.bin: is there [exists]"
