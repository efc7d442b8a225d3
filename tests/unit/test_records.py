"""Every record in research/records is valid, says where it was measured, and passes ``python -m kernels.measure``."""

import json
import shutil
import subprocess
import sys

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

RECORDS = sorted((PACK_ROOT / "research" / "records").glob("*.json"))


def test_there_are_records():
    assert RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record(path):
    data = pack_module("kernels.measure").read(path)
    assert data["status"] == "finished"
    gpus = data["hardware"]["gpus"]
    if not path.name.startswith("cpu_"):
        assert gpus, "a record without a GPU is no measurement of one"
    assert path.name.startswith("h200") is bool(gpus and "H200" in gpus[0]["name"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_an_edited_record_is_refused(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    case = next((case for case in data["cases"] if case.get("samples")), None)
    if case is not None:
        case["summary"]["median"] *= 0.5
    else:
        gate = next(gate for gate in data["gates"] if gate["result"] == "passed")
        gate["result"] = "failed"
    assert pack_module("kernels.measure.validation").validate(data)


# ---------------------------------------------------------------- the command


def command(folder):
    """``(exit status, lines)`` of the command over a folder, without torch, as a person without a GPU runs it."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kernels.measure", str(folder)], cwd=PACK_ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def research(tmp_path):
    return shutil.copytree(PACK_ROOT / "research", tmp_path / "research", ignore=shutil.ignore_patterns("*.log"))


def test_the_command_passes_what_is_kept():
    code, lines = command(PACK_ROOT / "research")
    assert code == 0 and all(line.startswith("ok   ") for line in lines), lines
    assert [line.split()[1].rstrip(":") for line in lines] == [
        *(f"records/{path.name}" for path in RECORDS), "experiments.json",
    ]  # fmt: skip


def test_the_command_sees_one_edited_byte(research):
    path = research / "records" / "h200_bench_kernels.json"
    found = pack_module("kernels.measure.manifest").strict_json(path)
    found["cases"][2]["samples"][0] += 1e-6
    path.write_text(json.dumps(found), encoding="utf-8")
    code, lines = command(research)
    bad = [line for line in lines if line.startswith("BAD  ")]
    assert code == 1 and len(lines) == len(RECORDS) + 1 and len(bad) == 2
    assert "records/h200_bench_kernels.json: " in bad[0] and "the samples say" in bad[0]
    assert "sha256: expected " in bad[1] and ", found " in bad[1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: shutil.rmtree(folder / "records"), "BAD  records: holds no record"),
        (lambda folder: (folder / "experiments.json").unlink(), "BAD  experiments.json: is missing"),
        (
            lambda folder: (folder / "experiments.json").write_text('{"schema": 1, "schema": 2}', encoding="utf-8"),
            "BAD  experiments.json: a name is given twice in one object",
        ),
        (
            lambda folder: (folder / "records" / "x.json").write_text('{"a": NaN}', encoding="utf-8"),
            "BAD  records/x.json: NaN is not JSON",
        ),
        (
            lambda folder: (folder / "records" / "x.json").write_bytes(b"\xff"),
            "BAD  records/x.json: 'utf-8' codec can't decode",
        ),
    ],
    ids=["no records", "no registry", "registry names a member twice", "NaN in a record", "a record of other bytes"],
)  # fmt: skip
def test_the_command_refuses(change, expected, research):
    change(research)
    code, lines = command(research)
    assert code == 1 and any(line.startswith(expected) for line in lines), lines
