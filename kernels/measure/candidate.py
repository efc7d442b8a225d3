"""One implementation of a fused op against another: loading it, its short cases, its checksums, its time.

    baseline, candidate = implementation_of(op, "shipped", device), implementation_of(op, "mine.py", device)
    report = check(op, candidate, device, rows=38016, columns=producers.PRESETS[producers.H3_COLUMNS])
    saved = time_gate(record, op, baseline, candidate, device, rows=38016, columns=...)

A candidate is one Python file. It is loaded as if it lay in ``kernels/fused``, so ``from . import _launch`` works, and
has ``run(*arguments)`` with the arguments that the op's implementations get (``OP.reference`` has the same). It may
have ``refuse(device)`` and ``accepts(*arguments)``, as :class:`fused.Implementation` has them, and ``TITLE`` and
``HYPOTHESIS``, texts for the registry. ``tests/experiment.py`` runs an experiment: the checks of each side in a process
of its own, the time of both in one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from .. import fused, nvfp4, parity
from ..discover import reason as told
from ..fused import _cases
from . import producers, roofline, stock
from .manifest import Manifest, tensor_bytes
from .samples import BARS
from .timing import time_rotating

BASELINE, CANDIDATE = "baseline", "candidate"
SHIPPED, REFERENCE = "shipped", "reference"
LEAST_CASES = 13
RAGGED = (1, 15, 16, 17, 127, 129)
OPS = tuple(stock.BF16_PART)  # those with inputs of H3's shapes


class CandidateError(RuntimeError):
    """An experiment cannot run as asked: what was asked, what there is, what to do."""


def load(path) -> ModuleType:
    """Load a candidate's file as a module of ``kernels.fused``.

    Raises:
        CandidateError: it is missing, does not import, or has no ``run``.
    """
    path = Path(path)
    if not path.is_file():
        raise CandidateError(f"{path.name}: there is no such file")
    name = f"{fused.__name__}._candidate_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a probe: whatever the file raises is its own affair
            del sys.modules[name]
            raise CandidateError(f"{path.name} does not import: {told(error)}") from error
    if not callable(getattr(sys.modules[name], "run", None)):
        raise CandidateError(f"{path.name}: a candidate needs a function run(*arguments)")
    return sys.modules[name]


def implementation_of(op: str, what: str, device: torch.device) -> fused.Implementation:
    """An implementation by name, as a file, or ``"shipped"``: what ``auto`` would take, certification aside.

    Raises:
        CandidateError: no such op, implementation or file.
    """
    if op not in OPS:
        raise CandidateError(f"{op}: no such op, or none with inputs; choose of {', '.join(OPS)}")
    known = {item.name: item for item in fused.OPS[op].implementations}
    if what == SHIPPED:
        willing = (item for item in known.values() if not item.by_name and item.refuse(device) is None)
        found = next(willing, None)
        return implementation_of(op, REFERENCE, device) if found is None else found
    if what == REFERENCE:
        return fused.Implementation(REFERENCE, fused.OPS[op].reference, lambda device: None)
    if what in known:
        return known[what]
    if not what.endswith(".py"):
        raise CandidateError(
            f"{op}: no implementation {what!r}; choose {SHIPPED}, {REFERENCE}, {', '.join(known)}, a file"
        )
    module = load(what)
    return fused.Implementation(
        Path(what).name,
        module.run,
        getattr(module, "refuse", lambda device: None),
        getattr(module, "accepts", lambda *arguments: None),
    )


# ---------------------------------------------------------------- inputs


def arguments_of(op: str, inputs: tuple, decode_scale, norm: str) -> tuple:
    """What ``run`` takes, from the public function's inputs."""
    scaled = (decode_scale,) if op.endswith("_nvfp4") else ()
    return (*inputs, *scaled, *((norm,) if op.startswith("norm_modulate") else ()))


def short_cases(op: str, device: torch.device, norm: str) -> Iterator[parity.Case]:
    """The op's own cases, and ragged numbers of rows of the small widths: at least ``LEAST_CASES``."""
    for case in _cases.CASES[op](device):
        if op.startswith("norm_modulate"):
            case = dataclasses.replace(case, arguments=(*case.arguments[:-1], norm))
        yield case
    columns = producers.PRESETS["small"]
    for rows in RAGGED:
        generator = torch.Generator(device).manual_seed(rows)
        inputs = producers.make_inputs(op, rows, columns, generator)
        name = f"{rows} rows of noise"
        if op.endswith("_nvfp4"):
            h = stock.BF16_PART[op](*inputs)
            for text, scale in (("dynamic", None), ("static", nvfp4.default_decode_scale(h).reshape(()))):
                arguments = arguments_of(op, inputs, scale, norm)
                yield parity.Case(f"{name}, {text} scale", arguments, lambda *arguments, h=h: h.clone(), scale)
        else:
            written = 0 if op.endswith("_") else None
            yield parity.Case(name, arguments_of(op, inputs, None, norm), written=written)


def h3_arguments(
    group: producers.Group, rows: int, columns: producers.Columns, device: torch.device, seed: int, norm: str
) -> list[tuple]:
    """Seeded argument sets of H3's shape, enough to pass the L2 cache."""
    generator = torch.Generator(device).manual_seed(seed)
    count = producers.set_count(producers.input_bytes(group.op, rows, columns), device)
    made = [producers.make_inputs(group.op, rows, columns, generator) for _ in range(count)]
    scale = nvfp4.default_decode_scale(stock.BF16_PART[group.op](*made[0])).reshape(()) if group.static else None
    return [arguments_of(group.op, inputs, scale, norm) for inputs in made]


def groups_of(op: str, scale: str) -> list[producers.Group]:
    """The op with both kinds of scale, or one of them."""
    found = producers.groups_of(op)[0]
    return [group for group in found if scale == "both" or group.static in (None, scale == "static")]


def digest_of(result) -> str:
    """SHA-256 over the bytes of a result, every NaN as the same NaN."""
    digest = hashlib.sha256()
    for tensor in producers.tensors_of(result):
        if tensor.dtype == torch.bfloat16:
            tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


# ---------------------------------------------------------------- one side, in a process of its own


@torch.inference_mode()
def check(
    op: str, implementation: fused.Implementation, device: torch.device, *, rows: int, columns: producers.Columns,
    scale: str = "both", norm: str = "aten", seed: int = 0, short: bool = False,
) -> dict:  # fmt: skip
    """Run the short cases and, unless ``short``, the checksum case of one implementation.

    Returns:
        ``refused`` (why it does not run on the device, or None), ``cases`` (name, outcome ``passed``, ``failed``,
        ``raised`` or ``left out``, reason, sha256 of the result) up to the first that raises, ``checksums`` by group,
        and ``failure``, why there is none.
    """
    refused = implementation.refuse(device)
    found = {"implementation": implementation.name, "refused": refused, "cases": [], "checksums": {}, "failure": None}
    if refused is not None:
        return found
    for case in short_cases(op, device, norm):
        outcome = _case(op, implementation, case)
        found["cases"].append(outcome)
        if outcome["outcome"] == "raised":
            return found  # after an error on a GPU nothing there can be believed
    for group in () if short else groups_of(op, scale):
        arguments = h3_arguments(group, rows, columns, device, seed, norm)[0]
        try:
            found["checksums"][group.name] = digest_of(implementation.run(*producers.fresh(op, arguments)))
        except Exception as error:  # a probe: a candidate that cannot run this shape has lost
            found["failure"] = f"{group.name}, {rows} rows: {told(error).splitlines()[0]}"
            return found
    return found


def _case(op: str, implementation: fused.Implementation, case: parity.Case) -> dict:
    kept = []

    def run(*arguments):
        kept.append(implementation.run(*arguments))
        return kept[-1]

    out = {"name": case.name, "outcome": "passed", "reason": None, "sha256": None}
    try:
        why = implementation.accepts(*case.arguments)
        if why is not None:
            return {**out, "outcome": "left out", "reason": why}
        why = parity.case_reason(case, fused.OPS[op].reference, run)
        if why is not None:
            return {**out, "outcome": "failed", "reason": why}
        return {**out, "sha256": digest_of(kept[-1])}
    except Exception as error:  # a probe: what a candidate raises is its result
        return {**out, "outcome": "raised", "reason": f"{case.name}: {told(error).splitlines()[0]}"}


# ---------------------------------------------------------------- both, in one process


@torch.inference_mode()
def time_gate(
    record: Manifest, op: str, baseline: fused.Implementation, candidate: fused.Implementation, device: torch.device, *,
    rows: int, columns: producers.Columns, scale: str = "both", norm: str = "aten", rounds: int = 20, seed: int = 0,
    warm_up_s: float = 0.3,
) -> dict[str, dict]:  # fmt: skip
    """Time both in rotation with an A/A control; cases, verdicts, checksums and gates go into the record.

    Returns:
        ``{"<group> / candidate": comparison}``.
    """
    copy = roofline.copy_bandwidth(device, rounds=rounds)
    milliseconds = producers.enter_copy(record, copy)["summary"]["median"]
    record.set_protocol(seed=seed)
    judged = {}
    for group in groups_of(op, scale):
        sets = h3_arguments(group, rows, columns, device, seed, norm)
        record.add_input(
            f"{group.name}: seed {seed}, {len(sets)} sets",
            (item for arguments in sets for item in arguments if isinstance(item, torch.Tensor)),
        )
        pristine = producers.fresh(op, sets[0])
        producers.note_sets(record, group.name, len(sets), producers.input_bytes(op, rows, columns), device)
        variants = {BASELINE: baseline.run, CANDIDATE: candidate.run}
        timing = time_rotating(variants, rounds=rounds, device=device, sets=sets, warm_up_s=warm_up_s)
        if timing.uncaptured:
            record.set_protocol(timer=timing.timer)  # the worst one that was used
        for name, why in timing.uncaptured.items():
            record.fell_back(f"{group.name} / {name}", "capture in a CUDA graph", why)
        cases = producers.enter(record, group.name, timing, (rows, producers.width_of(op, columns)))
        ends = {name: variants[name](*producers.fresh(op, pristine)) for name in variants}
        for name, item in ((BASELINE, baseline), (CANDIDATE, candidate)):
            record.add_output(f"{group.name} / {name}", producers.tensors_of(ends[name]))
            record.ran(f"{group.name} / {name}", item.name)
            kept_norm = norm if op.startswith("norm_modulate") else None
            moved = producers.floor_bytes(group, kept_norm, rows, columns)
            ms = cases[name]["summary"]["median"]
            cases[name]["roofline"] = roofline.rate(moved, ms, copy.moved_bytes, milliseconds)
        record.add_gate(
            f"{group.name}: results that differ after the timing", "at_most", 0,
            observed=producers.difference(ends[CANDIDATE], ends[BASELINE])[0],
        )  # fmt: skip
        bar = BARS["kernel"]
        found = record.compare(cases[CANDIDATE], cases[BASELINE], cases[timing.control], bar, seed)
        for what, least, values in (("ms", bar.ms, "interval_ms"), ("share", bar.share, "interval_share")):
            record.add_gate(f"{group.name}: {what} saved at least", "at_least", least, observed=found[values][0])
        judged[f"{group.name} / {CANDIDATE}"] = found
    return judged
