"""``validate``: is this a whole and honest ``run-manifest/1``? Standard library only.

Everything that follows from something else in the record is computed again: summaries and verdicts from the samples,
gates from their numbers, rates from bytes and times. A record in which one was edited contradicts itself and is
refused. What this cannot see: samples and everything that follows from them changed together. For that an experiment
cites the record by the SHA-256 of its file.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Callable

from .. import discover
from .provenance import ENV_PREFIXES
from .samples import CONTROL, Bar, summary, verdict

SCHEMA = "run-manifest/1"
KINDS = ("kernel", "attention", "block", "step", "parity", "load", "smoke")
STATUSES = ("finished", "aborted")
RESULTS = ("passed", "failed", "skipped", "not_applicable")
RULES: dict[str, Callable[[float, float], bool]] = {
    "at_most": lambda observed, threshold: observed <= threshold,
    "at_least": lambda observed, threshold: observed >= threshold,
    "equal": lambda observed, threshold: observed == threshold,
}
TOP = {
    "schema", "run_id", "kind", "started_at", "finished_at", "status", "notes", "source", "invocation", "environment",
    "hardware", "inputs", "outputs", "protocol", "cases", "dispatch", "gates",
}  # fmt: skip
MEMBERS = {
    "source": {"commit", "tree", "dirty", "diff_sha256", "untracked"},
    "invocation": {"argv", "cwd", "env", "python"},
    "environment": {"os", "image_digest", "packages", "libraries"},
    "hardware": {"cpu", "gpus"},
    "protocol": {"timer", "rounds", "orders", "warm_up", "l2", "seed", "telemetry"},
    "dispatch": {"ran", "fallbacks"},
}
CASE = {"group", "variant", "shape", "dtype", "unit", "samples", "summary", "calls", "clocks", "roofline", "comparison"}
COMPARISON = {
    "baseline", "control", "seed", "bar_ms", "bar_share", "saving_ms", "saving_share", "interval_ms", "interval_share",
    "control_ms", "verdict", "reason",
}  # fmt: skip
GPU = {
    "name", "uuid_sha256", "capability", "multiprocessors", "memory_bytes", "l2_bytes", "driver", "power_limit_w",
    "clocks",
}  # fmt: skip
COPY = "copy"  # group and variant of the copy that rates are compared with
SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RUN_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z._-]{7,99}")
RELATIVE = 1e-9  # numbers computed again agree to this; JSON keeps every bit of a float


def validate(record) -> list[str]:
    """Say what is wrong with a record, one sentence a problem; an empty list means that nothing was found.

    Args:
        record: the parsed JSON (:func:`manifest.read` also refuses NaN and a name given twice).
    """
    check = _Check()
    if not isinstance(record, dict):
        return [f"the record must be an object, is {type(record).__name__}"]
    try:
        check.text(record, "record")
    except RecursionError:
        return ["the record is nested too deeply"]
    check.members(record, TOP, "record")
    for name, wanted in MEMBERS.items():
        check.members(record.get(name), wanted, name)
    if check.problems:
        return check.problems  # the parts below may rely on every member being there
    for part in (_top, _source, _invocation, _environment, _hardware, _files, _protocol, _cases, _dispatch, _gates):
        try:
            part(record, check)
        except (TypeError, KeyError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
            # A member of a type that the part did not expect: the record is bad, and the validator must say so.
            check.problem(f"{part.__name__.strip('_')}: malformed ({type(error).__name__}: {error})")
    return check.problems


class _Check:
    """Collects problems."""

    def __init__(self):
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def need(self, holds: bool, text: str) -> None:
        if not holds:
            self.problem(text)

    def members(self, value, wanted: set[str], where: str) -> bool:
        """`value` must be an object with exactly these members."""
        if not isinstance(value, dict):
            self.problem(f"{where}: must be an object, is {type(value).__name__}")
            return False
        missing, unknown = sorted(wanted - value.keys()), sorted(value.keys() - wanted)
        self.need(not missing, f"{where}: misses {', '.join(missing)}")
        self.need(not unknown, f"{where}: does not know {', '.join(unknown)}")
        return not missing and not unknown

    def text(self, value, where: str) -> None:
        """No non-finite number and no absolute path anywhere."""
        if isinstance(value, dict):
            for key, item in value.items():
                self.text(key, where)
                self.text(item, f"{where}.{key}")
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                self.text(item, f"{where}[{place}]")
        elif isinstance(value, float):
            self.need(math.isfinite(value), f"{where}: is {value}, which JSON has no word for")
        elif isinstance(value, str):
            self.need(discover.without_paths(value) == value, f"{where}: holds a path of one machine")

    def sha256(self, value, where: str) -> None:
        fine = isinstance(value, str) and bool(SHA256.fullmatch(value))
        self.need(fine, f"{where}: must be 64 hex digits of SHA-256")

    def count(self, value, where: str, least: int = 0) -> None:
        self.need(type(value) is int and value >= least, f"{where}: must be a whole number from {least}, is {value!r}")


def _is_number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _near(a, b) -> bool:
    """Equality of two JSON values, floats up to rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_near, a, b))
    if _is_number(a) and _is_number(b):
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-12)
    return type(a) is type(b) and a == b


def _same(found: dict, computed: dict, where: str, check: _Check) -> None:
    for name, value in computed.items():
        have = found.get(name)
        check.need(_near(have, value), f"{where}.{name}: is {have!r}, the samples say {value!r}")


def _moment(value) -> datetime.datetime | None:
    """A time with its zone, or None."""
    try:
        # Python 3.10 does not read the "Z" that others write.
        found = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    except (AttributeError, ValueError):
        return None
    return found if found.tzinfo is not None else None


def _top(record: dict, check: _Check) -> None:
    check.need(record["schema"] == SCHEMA, f"schema: must be {SCHEMA}, is {record['schema']!r}")
    check.need(record["kind"] in KINDS, f"kind: must be one of {', '.join(KINDS)}, is {record['kind']!r}")
    check.need(record["status"] in STATUSES, f"status: must be {' or '.join(STATUSES)}, is {record['status']!r}")
    run_id = record["run_id"]
    check.need(isinstance(run_id, str) and bool(RUN_ID.fullmatch(run_id)), "run_id: must be 8 to 100 plain characters")
    _texts(record["notes"], "notes", check)
    started, finished = _moment(record["started_at"]), _moment(record["finished_at"])
    check.need(started is not None, "started_at: must be a time with its zone")
    if record["finished_at"] is None:
        check.need(record["status"] != "finished", "finished_at: a finished run has one")
    else:
        check.need(finished is not None, "finished_at: must be a time with its zone, or null")
        if started is not None and finished is not None:
            check.need(started <= finished, "finished_at: lies before started_at")
    if record["status"] == "finished":
        check.need(bool(record["cases"] or record["gates"]), "cases: a finished run has cases or gates")


def _texts(value, where: str, check: _Check) -> None:
    fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
    check.need(fine, f"{where}: must be a list of texts")


def _source(record: dict, check: _Check) -> None:
    source = record["source"]
    commit, tree, diff, untracked = source["commit"], source["tree"], source["diff_sha256"], source["untracked"]
    check.need(commit is not None or tree is not None, "source: needs a commit or a tree hash")
    if commit is not None:
        check.need(isinstance(commit, str) and bool(COMMIT.fullmatch(commit)), "source.commit: must be a whole hash")
    if tree is not None:
        check.sha256(tree, "source.tree")
    if diff is not None:
        check.sha256(diff, "source.diff_sha256")
    _texts(untracked, "source.untracked", check)
    check.need(
        source["dirty"] is (diff is not None or bool(untracked)),
        "source.dirty: must be true exactly when a diff hash or untracked files say what differs",
    )


def _invocation(record: dict, check: _Check) -> None:
    invocation = record["invocation"]
    _texts(invocation["argv"], "invocation.argv", check)
    check.need(bool(invocation["argv"]), "invocation.argv: must not be empty")
    check.need(
        isinstance(invocation["cwd"], str) and not re.search(r"[\\/]", invocation["cwd"]) and invocation["cwd"] != "",
        "invocation.cwd: must be '.' or a folder's name",
    )
    check.need(isinstance(invocation["python"], str), "invocation.python: must be a text")
    for name, value in invocation["env"].items():
        check.need(name.startswith(ENV_PREFIXES), f"invocation.env: {name} is not on the allow-list")
        check.need(isinstance(value, str), f"invocation.env.{name}: must be a text")


def _environment(record: dict, check: _Check) -> None:
    environment = record["environment"]
    check.need(isinstance(environment["os"], str) and bool(environment["os"]), "environment.os: must be a text")
    digest = environment["image_digest"]
    check.need(
        digest is None or bool(re.fullmatch(r"(?:.+@)?sha256:[0-9a-f]{64}", digest)),
        "environment.image_digest: must be null or end in sha256: and 64 hex digits",
    )
    for name, version in environment["packages"].items():
        check.need(version is None or isinstance(version, str), f"environment.packages.{name}: must be a text or null")
    _texts(environment["libraries"], "environment.libraries", check)


def _hardware(record: dict, check: _Check) -> None:
    cpu = record["hardware"]["cpu"]
    check.members(cpu, {"name", "cores"}, "hardware.cpu")
    for place, gpu in enumerate(record["hardware"]["gpus"]):
        where = f"hardware.gpus[{place}]"
        if check.members(gpu, GPU, where):
            check.need(isinstance(gpu["name"], str) and bool(gpu["name"]), f"{where}.name: must be a text")
            check.count(gpu["memory_bytes"], f"{where}.memory_bytes", 1)
            if gpu["uuid_sha256"] is not None:
                check.sha256(gpu["uuid_sha256"], f"{where}.uuid_sha256")


def _files(record: dict, check: _Check) -> None:
    for part in ("inputs", "outputs"):
        for place, entry in enumerate(record[part]):
            where = f"{part}[{place}]"
            if check.members(entry, {"name", "sha256", "bytes"}, where):
                check.sha256(entry["sha256"], f"{where}.sha256")
                check.count(entry["bytes"], f"{where}.bytes")
                check.need(isinstance(entry["name"], str) and bool(entry["name"]), f"{where}.name: must be a text")
        _unique([entry["name"] for entry in record[part]], part, check)


def _unique(names: list, where: str, check: _Check) -> None:
    twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    check.need(not twice, f"{where}: twice there is {', '.join(twice)}")


def _protocol(record: dict, check: _Check) -> None:
    protocol = record["protocol"]
    check.need(isinstance(protocol["timer"], str) and bool(protocol["timer"]), "protocol.timer: must be a text")
    seed = protocol["seed"]
    check.need(seed is None or type(seed) is int, "protocol.seed: must be a whole number or null")
    for group, orders in protocol["orders"].items():
        where = f"protocol.orders.{group}"
        cases = {case["variant"]: case for case in record["cases"] if case["group"] == group}
        check.need(bool(cases), f"{where}: no case has this group")
        for number, order in enumerate(orders):
            if sorted(order) != sorted(cases):
                check.problem(f"{where}[{number}]: round ran {', '.join(order)}, the cases are {', '.join(cases)}")
                break
        for variant, case in cases.items():
            check.need(
                len(case["samples"]) == len(orders) == protocol["rounds"].get(group),
                f"{where}: {len(orders)} rounds, {protocol['rounds'].get(group)} declared, "
                f"{len(case['samples'])} samples of {variant}",
            )
    missing = sorted({case["group"] for case in record["cases"]} - protocol["orders"].keys())
    check.need(not missing, f"protocol.orders: misses {', '.join(missing)}")
    unknown = sorted(protocol["rounds"].keys() ^ protocol["orders"].keys())
    check.need(not unknown, f"protocol.rounds: does not go with the orders of {', '.join(unknown)}")


def _cases(record: dict, check: _Check) -> None:
    cases = {}
    for place, case in enumerate(record["cases"]):
        where = f"cases[{place}]"
        if not check.members(case, CASE, where):
            continue
        samples = case["samples"]
        cases[case["group"], case["variant"]] = case
        check.count(case["calls"], f"{where}.calls", 1)
        check.need(case["unit"] == "ms", f"{where}.unit: must be ms, is {case['unit']!r}")
        check.need(all(type(size) is int and size > 0 for size in case["shape"]), f"{where}.shape: must hold sizes")
        if not samples or not all(_is_number(value) and value > 0 for value in samples):
            check.problem(f"{where}.samples: must be milliseconds above zero, at least one")
            continue
        computed = summary(samples)
        check.members(case["summary"], set(computed), f"{where}.summary")
        _same(case["summary"], computed, f"{where}.summary", check)
    _unique([f"{case['group']} / {case['variant']}" for case in record["cases"]], "cases", check)
    copy = cases.get((COPY, COPY))
    for (group, variant), case in cases.items():
        where = f"cases of {group} / {variant}"
        _comparison(case, cases, where, check)
        _roofline(case, copy, where, check)
    if record["status"] == "finished" and record["kind"] == "kernel":
        named = {entry["name"] for entry in record["outputs"]}
        # A control is the baseline's own callable, and the copy is no result.
        spared = {(group, variant + CONTROL) for group, variant in cases}
        for group, variant in cases.keys() - spared:
            if group != COPY:
                check.need(f"{group} / {variant}" in named, f"outputs: misses the checksum of {group} / {variant}")


def _comparison(case: dict, cases: dict, where: str, check: _Check) -> None:
    found = case["comparison"]
    if found is None or not check.members(found, COMPARISON, f"{where}.comparison"):
        return
    others = {}
    for role in ("baseline", "control"):
        other = cases.get((case["group"], found[role])) if found[role] is not None else None
        if other is None and (role == "baseline" or found[role] is not None):
            check.problem(f"{where}.comparison.{role}: no case {found[role]!r} in the group")
            return
        others[role] = None if other is None else other["samples"]
    bar = Bar(found["bar_share"], found["bar_ms"])
    computed = verdict(others["baseline"], case["samples"], bar, found["seed"], others["control"])
    _same(found, computed, f"{where}.comparison", check)


def _roofline(case: dict, copy: dict | None, where: str, check: _Check) -> None:
    found = case["roofline"]
    if found is None:
        return
    if not check.members(found, {"floor_bytes", "gb_per_s", "floor_ms", "share_of_copy"}, f"{where}.roofline"):
        return
    check.count(found["floor_bytes"], f"{where}.roofline.floor_bytes", 1)
    if copy is None or copy["roofline"] is None:
        check.problem(f"{where}.roofline: the record has no copy measured in the same run")
        return
    copied = copy["roofline"]["floor_bytes"] / copy["summary"]["median"]
    own = found["floor_bytes"] / case["summary"]["median"]
    computed = {
        "gb_per_s": own / 1e6,
        "floor_ms": found["floor_bytes"] / copied,
        "share_of_copy": own / copied,
    }
    _same(found, computed, f"{where}.roofline", check)


def _dispatch(record: dict, check: _Check) -> None:
    for place, entry in enumerate(record["dispatch"]["ran"]):
        where = f"dispatch.ran[{place}]"
        if check.members(entry, {"what", "implementation", "count"}, where):
            check.count(entry["count"], f"{where}.count", 1)
    for place, entry in enumerate(record["dispatch"]["fallbacks"]):
        where = f"dispatch.fallbacks[{place}]"
        if check.members(entry, {"what", "asked", "reason", "count"}, where):
            check.count(entry["count"], f"{where}.count", 1)
            fine = isinstance(entry["reason"], str) and bool(entry["reason"].strip())
            check.need(fine, f"{where}.reason: a fallback needs its reason")


def _gates(record: dict, check: _Check) -> None:
    for place, gate in enumerate(record["gates"]):
        where = f"gates[{place}]"
        if not check.members(gate, {"name", "result", "rule", "threshold", "observed", "reason"}, where):
            continue
        result, observed, reason = gate["result"], gate["observed"], gate["reason"]
        check.need(result in RESULTS, f"{where}.result: must be one of {', '.join(RESULTS)}, is {result!r}")
        check.need(gate["rule"] in RULES, f"{where}.rule: must be one of {', '.join(RULES)}, is {gate['rule']!r}")
        check.need(_is_number(gate["threshold"]), f"{where}.threshold: must be a number, set before the run")
        if result in ("skipped", "not_applicable"):
            check.need(observed is None, f"{where}: {result}, so it has no observed value")
            check.need(isinstance(reason, str) and bool(reason.strip()), f"{where}: {result}, so it needs a reason")
        elif not _is_number(observed):
            check.problem(f"{where}: {result}, so it needs an observed number")
        elif gate["rule"] in RULES and _is_number(gate["threshold"]):
            holds = RULES[gate["rule"]](observed, gate["threshold"])
            check.need(
                (result == "passed") is holds,
                f"{where}: {result}, but {observed} is {'' if holds else 'not '}"
                f"{gate['rule'].replace('_', ' ')} {gate['threshold']}",
            )
    _unique([gate["name"] for gate in record["gates"]], "gates", check)
