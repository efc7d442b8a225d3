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
from .provenance import ENV_PREFIXES, SECRET, WITHHELD
from .samples import BARS, CONTROL, Bar, summary, verdict

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
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
CAPABILITY = re.compile(r"[1-9][0-9]*\.[0-9]")
CUDA_TIMER = "CUDA events"  # how the name of every timer that measures a GPU begins
ROTATED = ("kernel", "attention", "block")  # timed by `time_rotating`, in whole balanced cycles
RELATIVE = 1e-9  # numbers computed again agree to this; JSON keeps every bit of a float


def validate(record) -> list[str]:
    """Say what is wrong with a record, one sentence a problem; an empty list means that nothing was found.

    Args:
        record: the parsed JSON (:func:`manifest.read` also refuses NaN and a name given twice).
    """
    check = Check()
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


class Check:
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
            self.need(not UUID.search(value), f"{where}: holds a GPU's UUID; only its hash is kept")

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


def _same(found: dict, computed: dict, where: str, check: Check) -> None:
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


def _top(record: dict, check: Check) -> None:
    check.need(record["schema"] == SCHEMA, f"schema: must be {SCHEMA}, is {record['schema']!r}")
    check.need(record["kind"] in KINDS, f"kind: must be one of {', '.join(KINDS)}, is {record['kind']!r}")
    check.need(record["status"] in STATUSES, f"status: must be {' or '.join(STATUSES)}, is {record['status']!r}")
    _texts(record["notes"], "notes", check)
    started, finished = _moment(record["started_at"]), _moment(record["finished_at"])
    check.need(started is not None, "started_at: must be a time with its zone")
    if started is not None:
        begins = f"{started.astimezone(datetime.timezone.utc):%Y%m%dT%H%M%SZ}-{record['kind']}-"
        fine = re.fullmatch(re.escape(begins) + "[0-9a-f]{8}", record["run_id"])
        check.need(bool(fine), f"run_id: must be {begins} and 8 hex digits, is {record['run_id']!r}")
    if record["finished_at"] is None:
        check.need(record["status"] != "finished", "finished_at: a finished run has one")
    else:
        check.need(finished is not None, "finished_at: must be a time with its zone, or null")
        if started is not None and finished is not None:
            check.need(started <= finished, "finished_at: lies before started_at")
    if record["status"] == "finished":
        check.need(bool(record["cases"] or record["gates"]), "cases: a finished run has cases or gates")


def _text(value, where: str, check: Check) -> None:
    check.need(isinstance(value, str) and bool(value.strip()), f"{where}: must be a text, is {value!r}")


def _texts(value, where: str, check: Check) -> None:
    fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
    check.need(fine, f"{where}: must be a list of texts")


def _source(record: dict, check: Check) -> None:
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


def _invocation(record: dict, check: Check) -> None:
    invocation = record["invocation"]
    _texts(invocation["argv"], "invocation.argv", check)
    check.need(bool(invocation["argv"]), "invocation.argv: must not be empty")
    hide = False
    for item in invocation["argv"]:
        option, equals, value = item.partition("=")
        secret = item.startswith("-") and bool(SECRET.search(option))
        shown = value if secret and equals else item if hide else WITHHELD
        check.need(shown == WITHHELD, "invocation.argv: holds the value of an option that sounds like a secret")
        hide = secret and not equals
    check.need(
        isinstance(invocation["cwd"], str) and not re.search(r"[\\/]", invocation["cwd"]) and invocation["cwd"] != "",
        "invocation.cwd: must be '.' or a folder's name",
    )
    _text(invocation["python"], "invocation.python", check)
    for name, value in invocation["env"].items():
        check.need(name.startswith(ENV_PREFIXES), f"invocation.env: {name} is not on the allow-list")
        check.need(isinstance(value, str), f"invocation.env.{name}: must be a text")
        fine = value == WITHHELD or not SECRET.search(name)
        check.need(fine, f"invocation.env.{name}: sounds like a secret and is not withheld")


def _environment(record: dict, check: Check) -> None:
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


def _hardware(record: dict, check: Check) -> None:
    cpu, timer = record["hardware"]["cpu"], record["protocol"]["timer"]
    if check.members(cpu, {"name", "cores"}, "hardware.cpu"):
        check.need(isinstance(cpu["name"], str), "hardware.cpu.name: must be a text")
        check.count(cpu["cores"], "hardware.cpu.cores", 1)
    if record["status"] == "finished" and timer.startswith(CUDA_TIMER):
        check.need(bool(record["hardware"]["gpus"]), f"hardware.gpus: is empty, but the timer is {timer!r}")
    for place, gpu in enumerate(record["hardware"]["gpus"]):
        where = f"hardware.gpus[{place}]"
        if check.members(gpu, GPU, where):
            _text(gpu["name"], f"{where}.name", check)
            check.count(gpu["memory_bytes"], f"{where}.memory_bytes", 1)
            fine = isinstance(gpu["capability"], str) and bool(CAPABILITY.fullmatch(gpu["capability"]))
            check.need(fine, f"{where}.capability: must be such as '9.0', is {gpu['capability']!r}")
            fine = gpu["driver"] is None or isinstance(gpu["driver"], str)
            check.need(fine, f"{where}.driver: must be a text or null")
            fine = gpu["power_limit_w"] is None or (_is_number(gpu["power_limit_w"]) and gpu["power_limit_w"] > 0)
            check.need(fine, f"{where}.power_limit_w: must be watts or null")
            if gpu["uuid_sha256"] is not None:
                check.sha256(gpu["uuid_sha256"], f"{where}.uuid_sha256")


def _files(record: dict, check: Check) -> None:
    for part in ("inputs", "outputs"):
        for place, entry in enumerate(record[part]):
            where = f"{part}[{place}]"
            if check.members(entry, {"name", "sha256", "bytes"}, where):
                check.sha256(entry["sha256"], f"{where}.sha256")
                check.count(entry["bytes"], f"{where}.bytes")
                fine = (entry["bytes"] == 0) is (entry["sha256"] == EMPTY_SHA256)
                check.need(fine, f"{where}: no bytes and the checksum of nothing go together")
                _text(entry["name"], f"{where}.name", check)
        _unique([entry["name"] for entry in record[part]], part, check)


def _unique(names: list, where: str, check: Check) -> None:
    twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    check.need(not twice, f"{where}: twice there is {', '.join(twice)}")


def _protocol(record: dict, check: Check) -> None:
    protocol = record["protocol"]
    _text(protocol["timer"], "protocol.timer", check)
    fine = record["status"] != "finished" or not record["cases"] or protocol["timer"] != "none"
    check.need(fine, "protocol.timer: there are cases, so something timed them")
    seed = protocol["seed"]
    check.need(seed is None or type(seed) is int, "protocol.seed: must be a whole number or null")
    for group, rounds in protocol["rounds"].items():
        check.count(rounds, f"protocol.rounds.{group}", 1)
    for group, orders in protocol["orders"].items():
        where = f"protocol.orders.{group}"
        cases = {case["variant"]: case for case in record["cases"] if case["group"] == group}
        check.need(bool(cases), f"{where}: no case has this group")
        for number, order in enumerate(orders):
            if sorted(order) != sorted(cases):
                check.problem(f"{where}[{number}]: round ran {', '.join(order)}, the cases are {', '.join(cases)}")
                break
        if any(case["comparison"] for case in cases.values()):
            _rotation(orders, record["kind"], where, check)
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


def _rotation(orders: list[list[str]], kind: str, where: str, check: Check) -> None:
    """Orders that a verdict may stand on: every variant in every place equally often, or at least not always one."""
    held = Counter((name, place) for order in orders for place, name in enumerate(order))
    if kind in ROTATED:
        even = len(held) == len(orders[0]) ** 2 and len(set(held.values())) == 1
        check.need(even, f"{where}: not balanced, a variant has one place more often than another")
    elif len(orders) > 1:
        check.need(len(set(map(tuple, orders))) > 1, f"{where}: every round has the same order")


def _cases(record: dict, check: Check) -> None:
    cases = {}
    for place, case in enumerate(record["cases"]):
        where = f"cases[{place}]"
        if not check.members(case, CASE, where):
            continue
        samples = case["samples"]
        cases[case["group"], case["variant"]] = case
        check.count(case["calls"], f"{where}.calls", 1)
        check.need(case["unit"] == "ms", f"{where}.unit: must be ms, is {case['unit']!r}")
        fine = bool(case["shape"]) and all(type(size) is int and size > 0 for size in case["shape"])
        check.need(fine, f"{where}.shape: must hold sizes")
        for name in ("group", "variant", "dtype"):
            _text(case[name], f"{where}.{name}", check)
        if case["clocks"] is not None:
            check.members(case["clocks"], {"before", "after"}, f"{where}.clocks")
        if not samples or not all(_is_number(value) and value > 0 for value in samples):
            check.problem(f"{where}.samples: must be milliseconds above zero, at least one")
            continue
        computed = summary(samples)
        check.members(case["summary"], set(computed), f"{where}.summary")
        _same(case["summary"], computed, f"{where}.summary", check)
    _unique([f"{case['group']} / {case['variant']}" for case in record["cases"]], "cases", check)
    copy = cases.get((COPY, COPY))
    named = {entry["name"] for entry in record["outputs"]}
    # A control is the baseline's own callable, and the copy is no result.
    spared = {(group, variant + CONTROL) for group, variant in cases}
    whole = record["status"] == "finished" and record["kind"] in ("kernel", "attention")
    for (group, variant), case in cases.items():
        where = f"cases of {group} / {variant}"
        _comparison(case, cases, record, where, check)
        _roofline(case, copy, where, check)
        owed = {variant} if whole and group != COPY and (group, variant) not in spared else set()
        if case["comparison"] is not None:
            owed |= {variant, case["comparison"]["baseline"]}
        for name in sorted(owed):
            check.need(f"{group} / {name}" in named, f"outputs: misses the checksum of {group} / {name}")


def _comparison(case: dict, cases: dict, record: dict, where: str, check: Check) -> None:
    found = case["comparison"]
    if found is None or not check.members(found, COMPARISON, f"{where}.comparison"):
        return
    where, timer, seed = f"{where}.comparison", record["protocol"]["timer"], record["protocol"]["seed"]
    check.need(timer.startswith(CUDA_TIMER), f"{where}: a verdict needs CUDA events, the timer is {timer!r}")
    check.need(found["baseline"] != case["variant"], f"{where}.baseline: a case is not compared with itself")
    expected = f"{found['baseline']}{CONTROL}"
    check.need(found["control"] == expected, f"{where}.control: must be {expected!r}, is {found['control']!r}")
    check.need(
        type(found["seed"]) is int and found["seed"] == seed,
        f"{where}.seed: must be the protocol's {seed!r}, is {found['seed']!r}",
    )
    bar, own = Bar(found["bar_share"], found["bar_ms"]), BARS.get(record["kind"], BARS["kernel"])
    check.need(bar == own, f"{where}: the bar of {record['kind']} is {own.share} and {own.ms} ms, not {bar}")
    others = {}
    for role in ("baseline", "control"):
        other = cases.get((case["group"], found[role]))
        if other is None:
            check.problem(f"{where}.{role}: no case {found[role]!r} in the group")
            return
        others[role] = other["samples"]
    computed = verdict(others["baseline"], case["samples"], bar, found["seed"], others["control"])
    _same(found, computed, where, check)


def _roofline(case: dict, copy: dict | None, where: str, check: Check) -> None:
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


def _dispatch(record: dict, check: Check) -> None:
    for place, entry in enumerate(record["dispatch"]["ran"]):
        where = f"dispatch.ran[{place}]"
        if check.members(entry, {"what", "implementation", "count"}, where):
            check.count(entry["count"], f"{where}.count", 1)
            for name in ("what", "implementation"):
                _text(entry[name], f"{where}.{name}", check)
    for place, entry in enumerate(record["dispatch"]["fallbacks"]):
        where = f"dispatch.fallbacks[{place}]"
        if check.members(entry, {"what", "asked", "reason", "count"}, where):
            check.count(entry["count"], f"{where}.count", 1)
            for name in ("what", "asked"):
                _text(entry[name], f"{where}.{name}", check)
            fine = isinstance(entry["reason"], str) and bool(entry["reason"].strip())
            check.need(fine, f"{where}.reason: a fallback needs its reason")
    _unique(
        [f"{entry['what']} / {entry['implementation']}" for entry in record["dispatch"]["ran"]], "dispatch.ran", check
    )


def _gates(record: dict, check: Check) -> None:
    for place, gate in enumerate(record["gates"]):
        where = f"gates[{place}]"
        if not check.members(gate, {"name", "result", "rule", "threshold", "observed", "reason"}, where):
            continue
        result, observed, reason = gate["result"], gate["observed"], gate["reason"]
        _text(gate["name"], f"{where}.name", check)
        check.need(reason is None or isinstance(reason, str), f"{where}.reason: must be a text or null")
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
