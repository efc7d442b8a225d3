"""The isolated experiment: right, wrong and raising candidates on the CPU, and the timing gate on a made-up GPU."""

import hashlib
import json
import shutil
import subprocess
import sys

import experiment as driver
import pytest
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

candidate = pack_module("kernels.measure.candidate")
experiments = pack_module("kernels.measure.experiments")
measure = pack_module("kernels.measure")
timing = pack_module("kernels.measure.timing")
provenance = pack_module("kernels.measure.provenance")
producers = pack_module("kernels.measure.producers")
fused = pack_module("kernels.fused")
CPU = torch.device("cpu")

RIGHT = """
from .. import nvfp4
from .rows_nvfp4 import rows

TITLE = "rows, once more"
HYPOTHESIS = "saves at least 5 % and 10 us"

def run(x, decode_scale):
    found = nvfp4.quantize(rows(x), decode_scale)
    return found
"""
WRONG = RIGHT.replace(
    "return found", "found.codes[x.shape[0] // 2 if x.dim() == 2 else 0, 3] ^= 0x70\n    return found"
)
RAISES = RIGHT.replace("found = ", 'raise RuntimeError("no kernel image in /home/me/x.so")\n    found = ')


# ---------------------------------------------------------------- the whole command, on the CPU


@pytest.fixture
def research(tmp_path):
    return shutil.copytree(PACK_ROOT / "research", tmp_path / "research", ignore=shutil.ignore_patterns("*.log"))


def command(research, source, *more):
    """``(exit status, last line or standard error, record)``."""
    path, out = research / "mine.py", research / "records" / "mine.json"
    path.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(PACK_ROOT / "tests" / "experiment.py"), "--op", "rows_nvfp4", "--candidate", str(path),
         "--device", "cpu", "--out", str(out), "--registry", str(research / "experiments.json"), "--id", "mine", *more],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        return done.returncode, done.stderr, None
    return 0, json.loads(done.stdout.splitlines()[-1]), measure.read(out)


def entered(research):
    data, problems = experiments.read(research / "experiments.json", research / "records")
    assert problems == []
    return next(item for item in data["experiments"] if item["id"] == "mine")


def results(record):
    return {gate["name"]: (gate["result"], gate["observed"]) for gate in record["gates"]}


def test_a_right_candidate(research):
    code, last, record = command(research, RIGHT)
    assert code == 0, last
    gates = results(record)
    assert gates["candidate: short cases that ran"][0] == "passed" and gates["candidate: short cases that ran"][1] >= 13
    assert gates["candidate: checks that failed"] == ("passed", 0)
    assert gates["candidate: results whose bytes are not the baseline's"] == ("passed", 0)
    for group in ("rows_nvfp4, dynamic", "rows_nvfp4, static"):
        assert gates[f"{group}: ms saved at least"] == ("skipped", None)
        assert any(f"{group} at H3's shape: sha256" in note for note in record["notes"])
    assert {gate["reason"] for gate in record["gates"] if "saved" in gate["name"]} == {driver.NO_GPU}
    assert gates["candidate: memcheck errors"] == ("skipped", None)
    found = entered(research)
    digest = hashlib.sha256((research / "records" / "mine.json").read_bytes()).hexdigest()
    assert found["status"] == last["status"] == "blocked" and "no GPU" in found["reason"]
    assert found["evidence"] == [
        {"file": "mine.json", "run_id": record["run_id"], "sha256": digest, "cases": []}
    ]  # fmt: skip
    assert (found["title"], found["default_on"]) == ("rows, once more", False)


def test_one_wrong_byte(research):
    code, last, record = command(research, WRONG)
    assert code == 0, last
    assert results(record)["candidate: checks that failed"][0] == "failed"
    found = entered(research)
    assert found["status"] == last["status"] == "rejected"
    assert "random 1x5376 as 2 axes, dynamic scale: " in found["reason"] and "1 of" in found["reason"]
    assert {gate["reason"] for gate in record["gates"] if "saved" in gate["name"]} == {"not timed: a check failed"}
    # Nothing deletes an outcome, nor the record that it rests on.
    assert command(research, RIGHT)[:2] == (2, "experiments.json: mine is rejected, which stays; choose another id\n")
    told = command(research, RIGHT, "--id", "other")[1]
    assert told == "experiments.json: mine rests on mine.json; choose another name for the record\n"
    assert entered(research) == found


def test_a_candidate_that_raises(research):
    code, last, record = command(research, RAISES)
    assert code == 0, last
    found = entered(research)
    assert found["status"] == "rejected"
    assert "random 1x5376 as 2 axes, dynamic scale: RuntimeError: no kernel image in x.so" in found["reason"]
    assert results(record)["candidate: short cases that ran"] == ("failed", 1)


# ---------------------------------------------------------------- its parts


def test_every_op_has_enough_short_cases_and_its_reference_passes_one():
    for op in candidate.OPS:
        assert len(list(candidate.short_cases(op, CPU, "aten"))) >= candidate.LEAST_CASES
        reference = candidate.implementation_of(op, "reference", CPU)
        *_, last = candidate.short_cases(op, CPU, "aten")
        assert candidate._case(op, reference, last)["outcome"] == "passed"


def test_shipped_is_what_auto_takes():
    willing = candidate.implementation_of("norm_modulate_nvfp4", "triton", CPU)
    assert candidate.implementation_of("rows_nvfp4", "shipped", CPU).name == "reference"
    assert willing is fused.OPS["norm_modulate_nvfp4"].implementations[0]
    with pytest.raises(candidate.CandidateError, match="no implementation 'other'"):
        candidate.implementation_of("rows_nvfp4", "other", CPU)
    with pytest.raises(candidate.CandidateError, match="no such op"):
        candidate.implementation_of("softmax", "shipped", CPU)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("import nothing_of_that_name", "does not import: ModuleNotFoundError"), ("x = 1", "needs a function run")],
)
def test_files_that_are_no_candidates(source, expected, tmp_path):
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    with pytest.raises(candidate.CandidateError, match=expected):
        candidate.load(tmp_path / "mine.py")


def test_a_refusal_is_not_a_failure():
    refusing = fused.Implementation("mine", lambda *arguments: None, lambda device: "needs compute capability 12.0")
    found = candidate.check("rows_nvfp4", refusing, CPU, rows=16, columns=producers.PRESETS["small"])
    assert found["refused"] == "needs compute capability 12.0" and found["cases"] == []
    assert driver.outcome_of([], found["refused"], None)[0] == "blocked"


def test_a_nan_is_a_nan_whatever_its_payload():
    bits = torch.tensor([0x7FC0, 0x7FC1, 0x3F80], dtype=torch.int16)
    other = torch.tensor([0x7FC3, 0x7FC0, 0x3F80], dtype=torch.int16)
    assert candidate.digest_of(bits.view(torch.bfloat16)) == candidate.digest_of(other.view(torch.bfloat16))
    other[2] += 1
    assert candidate.digest_of(bits.view(torch.bfloat16)) != candidate.digest_of(other.view(torch.bfloat16))


REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 1 bytes
=========     at halves_tiles+0x340
========= ERROR SUMMARY: 3 errors
"""


def test_the_sanitizer_is_read():
    assert driver.sanitizer_errors(REPORT) == (3, "Invalid __global__ write of size 1 bytes")
    assert driver.sanitizer_errors("========= ERROR SUMMARY: 0 errors\n") == (0, None)
    assert driver.sanitizer_errors("cannot attach") == (None, None)


@pytest.fixture
def record(tmp_path):
    with measure.Manifest(tmp_path / "run.json", "kernel") as record:
        yield record


def given(**members):
    wanted = ["--op", "rows_nvfp4", "--candidate", "mine.py", "--out", "x.json"]
    arguments = driver.parse(wanted)
    for name, value in members.items():
        setattr(arguments, name, value)
    return arguments


@pytest.mark.parametrize(
    ("output", "result", "fails"),
    [
        (REPORT, "failed", True),
        ("========= ERROR SUMMARY: 0 errors\n", "passed", False),
        ("cannot attach\n", "skipped", False),
    ],
)
def test_the_gate_of_the_sanitizer(output, result, fails, record, tmp_path, monkeypatch):
    asked = []

    def isolated(given, what, folder, tool):
        asked.append((what, tool))
        cases = [{"name": "one", "outcome": "passed", "reason": None}]
        return {"cases": cases, "failure": "it ended"}, output

    monkeypatch.setattr(driver, "isolated", isolated)
    monkeypatch.setattr(driver, "find_sanitizer", lambda: "tool")
    failed = driver.gates_of_sanitizer(record, given(), {"baseline": "triton", "candidate": "mine.py"}, tmp_path, True)
    assert asked == [("triton", "tool"), ("mine.py", "tool")]
    assert [gate["result"] for gate in record.data["gates"]] == [result] * 2
    assert bool(failed) is fails and all(text.startswith("candidate: 3 memcheck errors") for text in failed)


def test_a_case_that_fails_under_the_sanitizer_alone(record, tmp_path, monkeypatch):
    """No error of memcheck's own: other timing or memory made the result another one."""
    cases = [{"name": "one", "outcome": "failed", "reason": "one: 2 of 16 codes differ"}]
    quiet = "========= ERROR SUMMARY: 0 errors\n"
    monkeypatch.setattr(driver, "isolated", lambda *asked: ({"cases": cases, "failure": None}, quiet))
    monkeypatch.setattr(driver, "find_sanitizer", lambda: "tool")
    failed = driver.gates_of_sanitizer(record, given(), {"baseline": "triton", "candidate": "mine.py"}, tmp_path, True)
    assert failed == ["candidate: under compute-sanitizer: one: 2 of 16 codes differ"]


def test_a_process_that_dies_is_a_failure_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.sys, "executable", shutil.which("false"))
    found, _ = driver.isolated(given(), "mine.py", tmp_path)
    assert found["failure"] == "its process ended with 1: it said nothing" and found["cases"] == []


def fake_gpu(monkeypatch, candidate_ms):
    """Timings as a GPU would give them: 12 rounds, the candidate's ms given, the others 0.2."""

    def time_rotating(variants, *, rounds, device, sets=((),), warm_up_s=0.3, between=None):
        names = [*variants, next(iter(variants)) + " (A/A)"]
        cycle = measure.balanced_orders(names)
        orders = [cycle[number % len(cycle)] for number in range(len(cycle) * 2)]
        noise = [0.2 + 0.0001 * (number % 3) for number in range(len(orders))]
        samples = {name: list(noise) for name in names}
        if "candidate" in samples:
            samples["candidate"] = [value - 0.2 + candidate_ms for value in noise]
        return timing.Timing(
            timing.GRAPHS, names[0], names[-1], orders, samples, dict.fromkeys(names, 4), len(sets), {"seconds": 0.0}
        )

    monkeypatch.setattr(candidate, "time_rotating", time_rotating)
    monkeypatch.setattr(pack_module("kernels.measure.roofline"), "time_rotating", time_rotating)


@pytest.mark.parametrize(("ms", "status"), [(0.1, "accepted"), (0.199, "rejected")])
def test_the_timing_gate(ms, status, tmp_path, monkeypatch):
    fake_gpu(monkeypatch, ms)
    side = candidate.implementation_of("rows_nvfp4", "reference", CPU)
    out = tmp_path / "records" / "mine.json"
    out.parent.mkdir()
    gpu = {
        "name": "GPU", "uuid_sha256": "0" * 64, "capability": "9.0", "multiprocessors": 1, "memory_bytes": 1,
        "l2_bytes": 1, "driver": "1", "power_limit_w": None, "clocks": None,
    }  # fmt: skip
    with measure.Manifest(out, "kernel") as record:
        record.data["hardware"]["gpus"] = [gpu]
        judged = candidate.time_gate(
            record, "rows_nvfp4", side, side, CPU, rows=17, columns=producers.PRESETS["small"], rounds=12
        )
    outcome, reason, cases = driver.outcome_of([], None, judged)
    assert outcome == status and cases == list(judged)
    record = measure.read(out)
    wanted = "passed" if outcome == "accepted" else "failed"
    assert results(record)["rows_nvfp4, static: ms saved at least"][0] == wanted
    entry = driver.entry_of(given(out=out, id="mine"), outcome, reason, cases, "triton")
    registry = tmp_path / "experiments.json"
    other = {**entry, "id": "other", "status": "proposed", "evidence": []}
    registry.write_text(json.dumps({"schema": experiments.SCHEMA, "experiments": [other]}), encoding="utf-8")

    def enter(entry):
        experiments.enter(registry, entry, out.parent, experiments.ready(registry, entry["id"], "new.json", out.parent))

    enter(entry)
    assert [item["id"] for item in experiments.read(registry, out.parent)[0]["experiments"]] == ["other", "mine"]
    enter({**entry, "id": "other"})  # an open one is replaced
    assert [item["status"] for item in experiments.read(registry, out.parent)[0]["experiments"]] == [outcome] * 2
    for bad, why in ((entry, "which stays"), ({**entry, "id": "A b"}, "lower-case"), ({**entry, "id": "new"}, "title")):
        with pytest.raises(experiments.RegistryError, match=why):
            enter({**bad, "title": " "})


def test_one_lost_kind_of_scale_loses_and_a_crossing_one_leaves_it_open():
    def found(verdict):
        return {"verdict": verdict, "saving_ms": 0.02, "saving_share": 0.1, "reason": "because"}

    both = {"a / candidate": found("accept"), "b / candidate": found("reject")}
    assert driver.outcome_of([], None, both)[0::2] == ("rejected", ["b / candidate"])
    both["b / candidate"] = found("inconclusive")
    assert driver.outcome_of([], None, both)[0::2] == ("inconclusive", ["b / candidate"])
    assert driver.outcome_of(["candidate: wrong"], None, both)[:2] == ("rejected", "candidate: wrong")
    assert driver.outcome_of(["baseline: wrong"], None, both)[0] == "inconclusive"
    assert driver.outcome_of([], None, None)[0] == "blocked"


def test_bytes_that_differ_from_the_baseline_are_named(record):
    def side(digest):
        cases = [{"name": f"case {number}", "outcome": "passed", "reason": None, "sha256": "a"} for number in range(13)]
        cases[4]["sha256"] = digest
        return {"implementation": "x", "refused": None, "cases": cases, "checksums": {"g": digest}, "failure": None}

    failed = driver.gates_of_cases(record, {"baseline": side("a"), "candidate": side("b")}, 13, None)
    assert failed == ["candidate: case 4: its bytes are not the baseline's (and 1 more)"]
    record.data["gates"].clear()
    assert driver.gates_of_cases(record, {"baseline": side("a"), "candidate": side("b")}, 13, "it divides") == []
    assert results(record.data)["candidate: results whose bytes are not the baseline's"] == ("not_applicable", None)


def test_too_few_cases_are_a_failure(record):
    few = {"implementation": "x", "refused": None, "checksums": {}, "failure": None, "cases": [
        {"name": "one", "outcome": "passed", "reason": None, "sha256": "a"},
        {"name": "two", "outcome": "left out", "reason": "needs 16 columns", "sha256": None},
    ]}  # fmt: skip
    failed = driver.gates_of_cases(record, {"baseline": few, "candidate": few}, 13, None)
    assert failed == ["baseline: 1 of 13 short cases ran", "candidate: 1 of 13 short cases ran"]
    assert record.data["dispatch"]["fallbacks"][0]["reason"] == "needs 16 columns"


def test_a_candidate_that_goes_wrong_after_the_timing_is_rejected():
    name = "rows_nvfp4, dynamic: results that differ after the timing"
    gates = [{"name": name, "result": "failed", "observed": 3}, {"name": "other", "result": "failed", "observed": 1}]
    failed = driver.late_failures(gates, None)
    assert failed == [f"candidate: {name}: 3"]
    assert driver.outcome_of(failed, None, {})[0] == "rejected"
    assert driver.late_failures(gates, "the reference divides") == []
    assert driver.late_failures([{**gates[0], "result": "passed", "observed": 0}], None) == []


def test_a_file_that_is_not_there_is_no_verdict(research):
    out = research / "records" / "mine.json"
    done = subprocess.run(
        [sys.executable, str(PACK_ROOT / "tests" / "experiment.py"), "--op", "rows_nvfp4", "--candidate", "gone.py",
         "--device", "cpu", "--out", str(out), "--registry", str(research / "experiments.json"), "--id", "mine"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("gone.py: there is no such file")
    assert not out.exists() and '"mine"' not in (research / "experiments.json").read_text("utf-8")
