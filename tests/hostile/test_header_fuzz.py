"""24,000 damaged headers: no exception but CheckpointError, and nothing accepted that safetensors refuses."""

import json

import fuzz_headers
import pytest
from conftest import pack_module

FILES = 24_000


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return fuzz_headers.fuzz(FILES, seed=0, folder=tmp_path_factory.mktemp("fuzz"))


def test_nothing_but_checkpoint_errors(found):
    assert found["other_exceptions"] == []


def test_what_we_accept_the_library_accepts_and_reads_alike(found):
    assert found["only_we_accept"] == []
    assert found["differ"] == []


def test_the_files_are_worth_something(found):
    """Enough of both kinds, and most reasons to refuse are met; the rest have files of their own in test_checkpoint."""
    stricter = sum(found["only_library_accepts"].values())
    assert found["both_accept"] + found["both_refuse"] + stricter == FILES
    assert min(found["both_accept"], found["both_refuse"]) > FILES / 10
    assert {
        "bad_dtype", "bad_entry", "bad_metadata", "bad_number", "bad_offsets", "bad_shape", "duplicate", "empty",
        "header_length", "nesting", "not_json", "not_object", "not_utf8", "overlap", "shape_overflow",
        "size_mismatch", "too_short", "trailing", "truncated",
    } <= found["codes"].keys()  # fmt: skip


def test_where_we_are_stricter_is_meant(found):
    """Two equal names, a header that does not begin with an object, and so on: each of these has its reason."""
    assert set(found["only_library_accepts"]) <= {
        "duplicate", "not_object", "shape_overflow", "pickle", "not_safetensors", "bad_entry", "bad_number",
        "bad_shape", "nesting",
    }  # fmt: skip


def test_a_looser_reader_would_be_caught(tmp_path, monkeypatch):
    """The comparison itself: without the check for holes and overlaps, files pass that the library refuses."""
    header = pack_module("kernels.checkpoint.header")
    monkeypatch.setattr(header, "_check_coverage", lambda *arguments: None)
    found = fuzz_headers.fuzz(2000, seed=0, folder=tmp_path)
    assert found["only_we_accept"]
    monkeypatch.setattr(header, "_is_size", lambda value: value >= 0)
    assert fuzz_headers.fuzz(2000, seed=0, folder=tmp_path)["other_exceptions"]


def test_the_record_is_valid(found, tmp_path):
    path = tmp_path / "record.json"
    fuzz_headers.write_record(found, path)
    data = json.loads(path.read_text("utf-8"))
    assert pack_module("kernels.measure.validation").validate(data) == []
    assert {gate["result"] for gate in data["gates"]} == {"passed"}
