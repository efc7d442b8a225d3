"""The experiment registry, ``experiments/1``: what was tried, what it had to reach, and what became of it.

    problems = validate(strict_json("research/experiments.json"), "research/records")

Standard library only. An experiment's members:

    id, title        plain words with dashes, used once; a line for people
    hypothesis       what was expected, with a number, or with the words :data:`UNRECORDED`
    status           proposed, running, accepted, rejected, inconclusive, blocked, superseded
    bar              set before the run: ``{"level", "share", "ms"}`` of ``samples.BARS``, or ``{"level", "text"}``, own
                     and a text with a number; null only with a hypothesis whose number was not recorded
    baseline         what it is held against
    evidence         ``[{"file", "run_id", "sha256", "cases"}]``: a record in research/records, and the cases
                     (``group / variant``) whose verdicts it rests on
    reason           why the status is what it is; needed by a decided one, and where there is no evidence
    superseded_by    id of the one in its place, exactly when it is superseded
    default_on       whether it is on by default, which only an accepted one may be

An accepted experiment needs evidence, and no verdict that it cites may say otherwise. Nothing is deleted: a lost
experiment stays, so that it is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path

from .manifest import strict_json
from .samples import BARS
from .validation import Check

SCHEMA = "experiments/1"
STATUSES = ("proposed", "running", "accepted", "rejected", "inconclusive", "blocked", "superseded")
OPEN = ("proposed", "running", "blocked")
DECIDED = ("accepted", "rejected", "inconclusive")
VERDICTS = {"accept": "accepted", "reject": "rejected", "inconclusive": "inconclusive"}  # status that a verdict makes
MEMBERS = {
    "id", "title", "hypothesis", "status", "bar", "baseline", "evidence", "reason", "superseded_by", "default_on",
}  # fmt: skip
EVIDENCE = {"file", "run_id", "sha256", "cases"}
OWN = "own"
UNRECORDED = "number not recorded"
ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.json")
NUMBER = re.compile(r"(?<![\w.])\d")  # not that of a name such as P1 or NVFP4


class RegistryError(ValueError):
    """A registry that must not be written or cannot be read; ``problems`` has one sentence each."""

    def __init__(self, file: str, problems: list[str]):
        self.file, self.problems = file, list(problems)
        super().__init__(f"{file}: " + "; ".join(self.problems))


def validate(data, records=None) -> list[str]:
    """Say what is wrong with a registry, one sentence a problem; an empty list means that nothing was found.

    Args:
        data: the parsed JSON (``manifest.strict_json`` also refuses NaN and a name given twice).
        records: folder of the records that the evidence names; None leaves the files unread.
    """
    check = Check()
    try:
        check.text(data, "registry")
    except RecursionError:
        return ["the registry is nested too deeply"]
    if not check.members(data, {"schema", "experiments"}, "registry"):
        return check.problems
    check.need(data["schema"] == SCHEMA, f"schema: must be {SCHEMA}, is {data['schema']!r}")
    if not isinstance(data["experiments"], list) or not data["experiments"]:
        return [*check.problems, "experiments: must be a list with at least one experiment"]
    whole = []
    for place, experiment in enumerate(data["experiments"]):
        if check.members(experiment, MEMBERS, f"experiments[{place}]"):
            whole.append(experiment)
    known = {experiment["id"]: experiment for experiment in whole if isinstance(experiment["id"], str)}
    for place, experiment in enumerate(whole):
        where = experiment["id"] if isinstance(experiment["id"], str) else f"experiments[{place}]"
        for part in (_words, _bar, _status, _superseded, _evidence):
            try:
                part(experiment, known, where, check, records)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                check.problem(f"{where}: malformed ({type(error).__name__}: {error})")
    twice = sorted(name for name, count in Counter(str(item["id"]) for item in whole).items() if count > 1)
    check.need(not twice, f"experiments: twice there is {', '.join(twice)}")
    return check.problems


def read(path, records=None) -> tuple[dict | None, list[str]]:
    """Parse a registry strictly; returns it (None where it is no JSON) and its problems."""
    try:
        data = strict_json(path)
    except (ValueError, RecursionError) as error:
        return None, [str(error)]
    return data, validate(data, records)


def ready(path, name: str, file: str, records) -> tuple[dict, dict | None]:
    """A registry that an experiment can be entered into, and the open one of that id or None. Ask before a run.

    Args:
        name: the experiment's id.
        file: name of the record that it will have.

    Raises:
        RegistryError: the registry is bad, has the id with an outcome, which nothing deletes, or another experiment
            rests on the record.
    """
    path = Path(path)
    data, problems = read(path, records)
    if problems:
        raise RegistryError(path.name, problems)
    if not ID.fullmatch(name):
        raise RegistryError(path.name, [f"an id is lower-case words with dashes, not {name!r}"])
    old = next((item for item in data["experiments"] if item["id"] == name), None)
    if old is not None and old["status"] not in OPEN:
        raise RegistryError(path.name, [f"{name} is {old['status']}, which stays; choose another id"])
    for item in data["experiments"]:
        if item is not old and any(cited["file"] == file for cited in item["evidence"]):
            raise RegistryError(path.name, [f"{item['id']} rests on {file}; choose another name for the record"])
    return data, old


def enter(path, experiment: dict, records, found: tuple[dict, dict | None]) -> None:
    """Put an experiment into a registry, in place of the open one of its id.

    Args:
        found: of :func:`ready`, before the run.

    Raises:
        RegistryError: the registry would be bad.
    """
    path, (data, old) = Path(path), found
    kept = [item for item in data["experiments"] if item is not old]
    data = {**data, "experiments": [*kept, experiment]}
    problems = validate(data, records)
    if problems:
        raise RegistryError(path.name, problems)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _said(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _unrecorded(experiment: dict) -> bool:
    return UNRECORDED in experiment["hypothesis"]


def _words(experiment: dict, known: dict, where: str, check: Check, records) -> None:
    fine = isinstance(experiment["id"], str) and bool(ID.fullmatch(experiment["id"]))
    check.need(fine, f"{where}.id: must be lower-case words with dashes, is {experiment['id']!r}")
    for name in ("title", "hypothesis", "baseline"):
        check.need(_said(experiment[name]), f"{where}.{name}: must be a text")
    check.need(
        bool(NUMBER.search(experiment["hypothesis"])) is not _unrecorded(experiment),
        f"{where}.hypothesis: must hold a number, or say {UNRECORDED!r}",
    )
    fine = experiment["reason"] is None or _said(experiment["reason"])
    check.need(fine, f"{where}.reason: must be a text or null")


def _bar(experiment: dict, known: dict, where: str, check: Check, records) -> None:
    bar, where = experiment["bar"], f"{where}.bar"
    if bar is None:
        check.need(_unrecorded(experiment), f"{where}: is set before the run; null only where it was not recorded")
    elif isinstance(bar, dict) and bar.get("level") in BARS:
        level = BARS[bar["level"]]
        wanted = {"level": bar["level"], "share": level.share, "ms": level.ms}
        check.need(bar == wanted, f"{where}: that of a {bar['level']} is {level.share} and {level.ms} ms, is {bar}")
    elif check.members(bar, {"level", "text"}, where):
        check.need(bar["level"] == OWN, f"{where}.level: must be {', '.join(BARS)} or {OWN}, is {bar['level']!r}")
        fine = _said(bar["text"]) and bool(NUMBER.search(bar["text"]))
        check.need(fine, f"{where}.text: must hold a number")


def _status(experiment: dict, known: dict, where: str, check: Check, records) -> None:
    status, on = experiment["status"], experiment["default_on"]
    check.need(status in STATUSES, f"{where}.status: must be one of {', '.join(STATUSES)}, is {status!r}")
    check.need(type(on) is bool, f"{where}.default_on: must be true or false, is {on!r}")
    check.need(not on or status == "accepted", f"{where}.default_on: only an accepted one may be, this is {status}")
    check.need(status not in DECIDED or _said(experiment["reason"]), f"{where}.reason: {status}, so it needs a reason")
    check.need(
        status != "accepted" or not _unrecorded(experiment), f"{where}.status: accepted without a recorded number"
    )
    if not experiment["evidence"]:
        check.need(status != "accepted", f"{where}.evidence: accepted, so it needs a record")
        check.need(_said(experiment["reason"]), f"{where}.evidence: empty, so the reason has to say why")


def _superseded(experiment: dict, known: dict, where: str, check: Check, records) -> None:
    other, superseded = experiment["superseded_by"], experiment["status"] == "superseded"
    if not superseded:
        check.need(
            other is None, f"{where}.superseded_by: only a superseded one has it, this is {experiment['status']}"
        )
        return
    passed = [experiment["id"]]
    while other is not None or len(passed) == 1:
        if other not in known:
            check.problem(f"{where}.superseded_by: there is no experiment {other!r}")
            return
        if other in passed:
            check.problem(f"{where}.superseded_by: goes round in a circle through {other}")
            return
        passed.append(other)
        other = known[other]["superseded_by"]


def _evidence(experiment: dict, known: dict, where: str, check: Check, records) -> None:
    if not isinstance(experiment["evidence"], list):
        check.problem(f"{where}.evidence: must be a list")
        return
    for place, item in enumerate(experiment["evidence"]):
        at = f"{where}.evidence[{place}]"
        if not check.members(item, EVIDENCE, at):
            continue
        check.sha256(item["sha256"], f"{at}.sha256")
        check.need(_said(item["run_id"]), f"{at}.run_id: must be a text")
        fine = isinstance(item["cases"], list) and all(map(_said, item["cases"]))
        check.need(fine, f"{at}.cases: must be a list of texts, group / variant")
        if not isinstance(item["file"], str) or not FILE.fullmatch(item["file"]):
            check.problem(f"{at}.file: must be the name of a record, is {item['file']!r}")
        elif records is not None and fine:
            _record(experiment, item, Path(records) / item["file"], at, check)
    names = [item["file"] for item in experiment["evidence"] if isinstance(item, dict) and "file" in item]
    check.need(len(names) == len(set(names)), f"{where}.evidence: names a record twice")


def _record(experiment: dict, item: dict, path: Path, at: str, check: Check) -> None:
    """The record behind a piece of evidence is that very file, finished, and says what the status says."""
    if not path.is_file():
        check.problem(f"{at}: there is no record {path.name}")
        return
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    check.need(digest == item["sha256"], f"{at}.sha256: expected {item['sha256']}, found {digest} in {path.name}")
    try:
        record = strict_json(path)
    except (ValueError, RecursionError) as error:
        check.problem(f"{at}: {path.name} is no JSON ({error})")
        return
    found = record["run_id"]
    check.need(found == item["run_id"], f"{at}.run_id: expected {item['run_id']}, found {found} in {path.name}")
    fine = record["status"] == "finished"
    check.need(fine, f"{at}: {path.name} is {record['status']}; only a finished run is evidence")
    cases = {f"{case['group']} / {case['variant']}": case for case in record["cases"]}
    for name in item["cases"]:
        comparison = cases[name]["comparison"] if name in cases else None
        if comparison is None:
            check.problem(f"{at}.cases: {path.name} has no verdict on {name!r}")
            continue
        said, status = comparison["verdict"], experiment["status"]
        fine = status not in DECIDED or VERDICTS[said] == status
        check.need(fine, f"{at}.cases: {status}, but {path.name} says {said} of {name!r}")
    measured = isinstance(experiment["bar"], dict) and experiment["bar"].get("level") in BARS
    if experiment["status"] == "accepted" and measured:
        check.need(bool(item["cases"]), f"{at}.cases: accepted by a time, so it must name the cases that say accept")
