"""One experiment on a fused op: a baseline and a candidate, isolated, checked, timed, recorded, entered.

    python tests/experiment.py --op rows_nvfp4 --candidate research/candidates/_rows_backwards_triton.py \\
        --device cuda:0 --out research/records/NAME.json --registry research/experiments.json --id ID [--commit HASH]

Each side runs its short cases (at least 13) and its checksum at H3's shape in a fresh process of its own, and the short
cases once more under compute-sanitizer's memcheck where that is installed, with torch's memory cache off. When all that
holds, both are timed in rotation in this process. The record (run-manifest/1) goes to --out, the verdict into the
registry; a candidate that fails a check is rejected and not timed. On a CPU nothing is timed, and the gates say so.

The last line is JSON. Exit status: 0 with any outcome, 2 where the experiment could not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import pack_module

SANITIZER = "compute-sanitizer"
BESIDE_CUDA = Path("/usr/local/cuda/bin") / SANITIZER
LATE = "results that differ after the timing"  # the end of a gate's name in kernels/measure/candidate.py
NO_GPU = "no GPU: a CPU is not measured"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument(
        "--candidate", required=True, help="a Python file; kernels/measure/candidate.py says of what form"
    )
    parser.add_argument("--baseline", default="shipped", help="shipped, reference, an implementation's name or a file")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True, help="the record")
    parser.add_argument("--registry", type=Path, help="research/experiments.json; --out must lie in records beside it")
    parser.add_argument("--id", help="of the experiment in the registry")
    parser.add_argument("--rows", type=int, help="38016; on a CPU 64")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--scale", choices=("both", "dynamic", "static"), default="both", help="of ops that write NVFP4"
    )
    parser.add_argument("--norm", choices=("aten", "fused"), default="aten", help="of ops with a norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one process may take")
    parser.add_argument("--commit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def shape_of(given: argparse.Namespace, device) -> dict:
    """Rows and columns of the checksum case and the timing."""
    producers = pack_module("kernels.measure.producers")
    if device.type == "cpu":
        rows, columns = min(given.rows or producers.CPU_ROWS, producers.CPU_ROWS), producers.PRESETS["small"]
    else:
        rows, columns = given.rows or producers.H3_ROWS, producers.PRESETS[producers.H3_COLUMNS]
    return {"rows": rows, "columns": columns, "scale": given.scale, "norm": given.norm, "seed": given.seed}


# ---------------------------------------------------------------- one side, in a process of its own


def child(given: argparse.Namespace) -> int:
    """Check one implementation (``--child``) and write what was found to ``--out``."""
    import torch

    candidate = pack_module("kernels.measure.candidate")
    device = torch.device(given.device)
    try:
        side = candidate.implementation_of(given.op, given.child, device)
        found = candidate.check(given.op, side, device, short=given.short, **shape_of(given, device))
    except candidate.CandidateError as error:
        found = {"implementation": given.child, "refused": None, "cases": [], "checksums": {}, "failure": str(error)}
    given.out.write_text(json.dumps(found), encoding="utf-8")
    return 0


def isolated(given: argparse.Namespace, what: str, folder: Path, sanitizer: str | None = None) -> tuple[dict, str]:
    """``(what a side's own process found, its output)``; a process that dies is a failure with its last words."""
    path = folder / "found.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
    for name in ("op", "candidate", "device", "scale", "norm", "seed"):
        command += [f"--{name}", str(getattr(given, name))]
    command += ["--child", what, "--out", str(path)]
    command += [] if given.rows is None else ["--rows", str(given.rows)]
    environment = dict(os.environ)
    if sanitizer is not None:
        command = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no", *command, "--short"]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # a cached block hides what is written past its tensor
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            errors="replace", timeout=given.timeout, check=False,
        )  # fmt: skip
        output, ended = done.stdout, f"its process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or ""
        output = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
        ended = f"its process took more than {given.timeout:g} s"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8")), output
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
    failure = f"{ended}: {last.strip()}"
    return {
        "implementation": Path(what).name,
        "refused": None,
        "cases": [],
        "checksums": {},
        "failure": failure,
    }, output


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH or beside the usual CUDA, or None."""
    return shutil.which(SANITIZER) or (str(BESIDE_CUDA) if BESIDE_CUDA.is_file() else None)


def sanitizer_errors(output: str) -> tuple[int | None, str | None]:
    """``(errors, the first one)`` from the tool's output; None where it did not get to its summary."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    first = re.search(r"^========= ((?:Invalid|Misaligned|Uninitialized|Race|Program hit|Address).*)$", output, re.M)
    return int(found[-1]) if found else None, first[1].strip() if first else None


# ---------------------------------------------------------------- gates


def gates_of_cases(record, sides: dict[str, dict], least: int, exact: str | None) -> list[str]:
    """Enter what the processes found of both sides; returns what the candidate has failed.

    Args:
        exact: why the two sides need not give the same bytes, or None.
    """
    failed = []
    ends = {}
    for side, found in sides.items():
        bad = [case["reason"] for case in found["cases"] if case["outcome"] in ("failed", "raised")]
        bad += [found["failure"]] if found["failure"] else []
        ran = [case for case in found["cases"] if case["outcome"] != "left out"]
        for case in found["cases"]:
            if case["outcome"] == "left out":
                record.fell_back(f"{side} / {case['name']}", found["implementation"], case["reason"])
        record.add_gate(f"{side}: short cases that ran", "at_least", least, observed=len(ran), reason=first_of(bad))
        record.add_gate(f"{side}: checks that failed", "at_most", 0, observed=len(bad), reason=first_of(bad))
        ends[side] = {case["name"]: case["sha256"] for case in found["cases"] if case["outcome"] == "passed"}
        ends[side] |= {f"{group} at H3's shape": digest for group, digest in found["checksums"].items()}
        if bad or len(ran) < least:
            failed.append(f"{side}: {first_of(bad) or f'{len(ran)} of {least} short cases ran'}")
    theirs, ours = ends.values()
    for name in sorted(key for key in ours if key.endswith("at H3's shape")):
        record.note(f"{name}: sha256 {ours[name]}, the baseline's {theirs.get(name, 'is missing')}")
    common = sorted(theirs.keys() & ours.keys())
    if exact is not None:
        record.add_gate("candidate: results whose bytes are not the baseline's", "at_most", 0, reason=exact,
                        not_applicable=True)  # fmt: skip
    elif common:
        other = [name for name in common if theirs[name] != ours[name]]
        why = first_of([f"{name}: its bytes are not the baseline's" for name in other])
        record.add_gate(
            "candidate: results whose bytes are not the baseline's", "at_most", 0, observed=len(other), reason=why
        )
        failed += [f"candidate: {why}"] if why else []
    else:
        why = "no result that both sides have"
        record.add_gate("candidate: results whose bytes are not the baseline's", "at_most", 0, reason=why)
    return failed


def first_of(reasons: list[str]) -> str | None:
    """The first reason, and how many more there are."""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return reasons[0] + more if reasons else None


def gates_of_sanitizer(
    record, given: argparse.Namespace, sides: dict[str, str], folder: Path, on_gpu: bool
) -> list[str]:
    """memcheck over the short cases of both sides; returns what the candidate has failed."""
    tool, failed = find_sanitizer(), []
    for side, what in sides.items():
        gate, why = f"{side}: memcheck errors", None
        errors = first = None
        if not on_gpu:
            why = "no GPU"
        elif tool is None:
            why = f"{SANITIZER} is neither on PATH nor beside CUDA"
        else:
            found, output = isolated(given, what, folder, tool)
            errors, first = sanitizer_errors(output)
            if errors is None or (errors == 0 and not found["cases"]):
                errors, why = None, f"it did not get through under {SANITIZER}: {found['failure'] or 'no summary'}"
            elif errors:
                first = first or "memcheck found errors"
            bad = [case["reason"] for case in found["cases"] if case["outcome"] in ("failed", "raised")]
            if bad and side == "candidate":  # without an error of memcheck's own
                failed.append(f"candidate: under {SANITIZER}: {first_of(bad)}")
        record.add_gate(gate, "at_most", 0, observed=errors, reason=why or first)
        if errors and side == "candidate":
            failed.append(f"candidate: {errors} memcheck errors, the first: {first}")
    return failed


def late_failures(gates: list[dict], exact: str | None) -> list[str]:
    """What the candidate got wrong after it was timed, where both sides have to give the same bytes."""
    late = [gate for gate in gates if gate["name"].endswith(LATE) and gate["result"] == "failed"]
    return [] if exact is not None else [f"candidate: {gate['name']}: {gate['observed']:g}" for gate in late]


def outcome_of(failed: list[str], refused: str | None, judged: dict[str, dict] | None) -> tuple[str, str, list[str]]:
    """``(status, reason, cases whose verdicts are that status)`` of an experiment."""
    lost = [text for text in failed if text.startswith("candidate")]
    if lost:
        return "rejected", "; ".join(lost), []
    if failed:
        return "inconclusive", f"the baseline does not hold: {'; '.join(failed)}", []
    if refused is not None:
        return "blocked", f"not run: {refused}", []
    if judged is None:
        return "blocked", f"correct, and not timed ({NO_GPU})", []
    told = "; ".join(
        f"{name.rpartition(' / ')[0]}: {found['saving_ms'] * 1000:.1f} us, {found['saving_share']:.1%} saved, "
        f"{found['verdict']}: {found['reason']}"
        for name, found in judged.items()
    )
    words = {found["verdict"] for found in judged.values()}
    verdict = "accept" if words == {"accept"} else "reject" if "reject" in words else "inconclusive"
    status = {"accept": "accepted", "reject": "rejected", "inconclusive": "inconclusive"}[verdict]
    return status, told, [name for name, found in judged.items() if found["verdict"] == verdict]


# ---------------------------------------------------------------- the experiment


def experiment(given: argparse.Namespace, folder: Path) -> tuple[str, str, list[str], str]:
    """Run it and write the record; returns status, reason, cases and the baseline's name."""
    import torch

    candidate, measure = pack_module("kernels.measure.candidate"), pack_module("kernels.measure")
    provenance = pack_module("kernels.measure.provenance")
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise candidate.CandidateError(f"{device}: torch sees no GPU; choose --device cpu")
    for path in (given.candidate, given.baseline):
        if path.endswith(".py") and not Path(path).is_file():
            raise candidate.CandidateError(f"{Path(path).name}: there is no such file; nothing was run or entered")
    baseline = candidate.implementation_of(given.op, given.baseline, device)
    what = given.baseline if given.baseline.endswith(".py") else baseline.name
    sides = {candidate.BASELINE: what, candidate.CANDIDATE: given.candidate}
    shape = shape_of(given, device)
    source = {"commit": given.commit} if given.commit else None
    with measure.Manifest(given.out, "kernel", device=device, source=source) as record:
        record.note(f"{given.op}: {Path(given.candidate).name} against {baseline.name}, {shape['rows']} rows")
        record.set_protocol(seed=given.seed)
        for path in {given.candidate, what}:
            if path.endswith(".py") and Path(path).is_file():
                record.add_file("inputs", path)
        found = {}
        for side, name in sides.items():
            print(f"{side}: short cases and checksum of {Path(name).name}, in a process of its own", flush=True)
            found[side], _ = isolated(given, name, folder)
        refused = found[candidate.CANDIDATE]["refused"] or found[candidate.BASELINE]["refused"]
        exact = None
        if on_gpu and given.op.endswith("_nvfp4") and "reference" in sides.values():
            exact = "the reference divides where kernels multiply by approximate reciprocals"
        failed = [] if refused else gates_of_cases(record, found, candidate.LEAST_CASES, exact)
        if not failed and not refused:
            print("memcheck over the short cases", flush=True)
            failed += gates_of_sanitizer(record, given, sides, folder, on_gpu)
        judged = None
        if failed or refused or not on_gpu:
            bar = measure.BARS["kernel"]
            why = f"not run: {refused}" if refused else "not timed: a check failed" if failed else NO_GPU
            for group in candidate.groups_of(given.op, given.scale):
                for unit, least in (("ms", bar.ms), ("share", bar.share)):
                    record.add_gate(f"{group.name}: {unit} saved at least", "at_least", least, reason=why)
        else:
            print("both in rotation", flush=True)
            ours = candidate.implementation_of(given.op, given.candidate, device)
            with torch.cuda.device(device):
                judged = candidate.time_gate(record, given.op, baseline, ours, device, rounds=given.rounds, **shape)
            failed += late_failures(record.data["gates"], exact)
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
        status, reason, cases = outcome_of(failed, refused, judged)
        reason = provenance.plain(reason)
        record.note(f"{status}: {reason}")
    return status, reason, cases, baseline.name


def entry_of(given: argparse.Namespace, status: str, reason: str, cases: list[str], baseline: str) -> dict:
    """The experiment as the registry keeps it."""
    candidate = pack_module("kernels.measure.candidate")
    data = json.loads(given.out.read_text(encoding="utf-8"))
    file = Path(given.candidate).name
    try:
        module = candidate.load(given.candidate)
    except (candidate.CandidateError, SystemExit):  # a file that ends Python at import is rejected, and entered
        module = None
    gpus = data["hardware"]["gpus"]
    where = gpus[0]["name"] if gpus else "CPU"
    digest = hashlib.sha256(given.out.read_bytes()).hexdigest()
    return {
        "id": given.id,
        "title": getattr(module, "TITLE", f"{given.op}: {file}"),
        "hypothesis": getattr(module, "HYPOTHESIS", f"saves at least 5 % and 10 us of {baseline}, with 0 other bytes"),
        "status": status,
        "bar": {"level": "kernel", "share": 0.05, "ms": 0.01},
        "baseline": f"{given.op}, {baseline}, {where}",
        "evidence": [{"file": given.out.name, "run_id": data["run_id"], "sha256": digest, "cases": cases}],
        "reason": reason,
        "superseded_by": None,
        "default_on": False,
    }


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.child:
        return child(given)
    if (given.registry is None) is not (given.id is None):
        print("--registry and --id go together", file=sys.stderr)
        return 2
    if given.registry is not None and given.out.resolve().parent != given.registry.resolve().parent / "records":
        print("--out must lie in the folder records beside the registry", file=sys.stderr)
        return 2
    candidate, experiments = pack_module("kernels.measure.candidate"), pack_module("kernels.measure.experiments")
    try:
        found = None
        if given.registry is not None:
            found = experiments.ready(given.registry, given.id, given.out.name, given.out.parent)
        with tempfile.TemporaryDirectory() as folder:
            status, reason, cases, baseline = experiment(given, Path(folder))
        if given.registry is not None:
            entry = entry_of(given, status, reason, cases, baseline)
            experiments.enter(given.registry, entry, given.out.parent, found)
    except (candidate.CandidateError, experiments.RegistryError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"status": status, "reason": reason, "record": given.out.name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
