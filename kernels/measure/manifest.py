"""The record of one run, ``run-manifest/1``: strict JSON, whole or marked as aborted, never half written.

    with Manifest(path, "kernel", device=device) as record:
        record.add_input("x", [x])
        record.add_case("swiglu", "stock", shape, "bfloat16", samples, calls=4)
        record.add_gate("parity", "at_most", 0, observed=0)

The file is there from the first line on and says ``aborted``: a run that is killed has left that. Leaving the block
normally makes it ``finished``, leaving it by an exception keeps ``aborted`` with the exception's type in the notes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from . import provenance
from .samples import BARS, Bar, summary, verdict
from .validation import KINDS, RULES, SCHEMA, validate


class ManifestError(ValueError):
    """A record that must not be written or cannot be read; ``problems`` has one sentence each."""

    def __init__(self, file: str, problems: list[str]):
        self.file, self.problems = os.path.basename(file), list(problems)
        super().__init__(f"{self.file}: not a {SCHEMA} record: " + "; ".join(self.problems))


class UnwritableError(ValueError):
    """A record that the disk does not take; ``reason`` is the system's."""

    def __init__(self, file: str, reason: str):
        self.file, self.reason = file, reason
        super().__init__(f"{file} cannot be written: {reason}")


class Manifest:
    """Builds and writes one record.

    Args:
        path: the file to write; its folder must exist.
        kind: one of ``KINDS``.
        device: ``torch.device`` of the run, for the hardware; None for none.
        source: members of ``source`` that the caller knows better, such as a commit (see :func:`provenance.source`).
        image_digest: of the container, if the caller knows it.
    """

    def __init__(self, path, kind: str, *, device=None, source: dict | None = None, image_digest: str | None = None):
        if kind not in KINDS:
            raise ValueError(f"Manifest: kind must be one of {', '.join(KINDS)}, is {kind!r}")
        self.path = Path(path)
        started = _now()
        self.data: dict = {
            "schema": SCHEMA,
            "run_id": f"{started:%Y%m%dT%H%M%SZ}-{kind}-{secrets.token_hex(4)}",
            "kind": kind,
            "started_at": started.isoformat(timespec="milliseconds"),
            "finished_at": None,
            "status": "aborted",
            "notes": [],
            "source": {**provenance.source(), **(source or {})},
            "invocation": provenance.invocation(),
            "environment": provenance.environment(image_digest),
            "hardware": provenance.hardware(device),
            "inputs": [],
            "outputs": [],
            "protocol": {
                "timer": "none", "rounds": {}, "orders": {}, "warm_up": None, "l2": None, "seed": None,
                "telemetry": None,
            },
            "cases": [],
            "dispatch": {"ran": [], "fallbacks": []},
            "gates": [],
        }  # fmt: skip

    def __enter__(self) -> Manifest:
        self.write()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
            return
        self.note(f"the run ended with {kind.__name__}")
        self.data["finished_at"] = _now().isoformat(timespec="milliseconds")
        # The exception that ends the run is the one to see; the file on disk says aborted as it is.
        with contextlib.suppress(UnwritableError):
            self.write()

    def note(self, text: str) -> None:
        """Add a sentence for the reader."""
        self.data["notes"].append(provenance.plain(text))

    def add_input(self, name: str, tensors: Iterable) -> str:
        """Record the SHA-256 over the bytes of some tensors or byte strings, one after the other; returns it."""
        return self._add("inputs", name, tensors)

    def add_output(self, name: str, tensors: Iterable) -> str:
        """Likewise for a result; take it after the timing."""
        return self._add("outputs", name, tensors)

    def add_file(self, part: str, path) -> str:
        """Record a file under its name: ``part`` is ``"inputs"`` or ``"outputs"``."""
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
                size += len(block)
        self.data[part].append({"name": os.path.basename(path), "sha256": digest.hexdigest(), "bytes": size})
        return digest.hexdigest()

    def _add(self, part: str, name: str, tensors: Iterable) -> str:
        digest, size = hashlib.sha256(), 0
        for item in tensors:
            raw = item if isinstance(item, (bytes, bytearray)) else tensor_bytes(item)
            digest.update(raw)
            size += len(raw)
        self.data[part].append({"name": name, "sha256": digest.hexdigest(), "bytes": size})
        return digest.hexdigest()

    def set_protocol(self, **members) -> None:
        """Set members of ``protocol``, for example ``timer``, ``seed``, ``l2``."""
        unknown = sorted(members.keys() - self.data["protocol"].keys())
        if unknown:
            raise ValueError(f"Manifest: protocol has no {', '.join(unknown)}")
        self.data["protocol"].update(members)

    def add_orders(self, group: str, orders: list[list[str]]) -> None:
        """Record the orders that a group's rounds really ran in."""
        self.data["protocol"]["orders"][group] = orders
        self.data["protocol"]["rounds"][group] = len(orders)

    def add_case(
        self, group: str, variant: str, shape, dtype: str, samples: list[float], *, calls: int = 1, clocks=None
    ) -> dict:
        """Record every sample of a variant, in ms per call; returns the case, whose summary is made here."""
        case = {
            "group": group,
            "variant": variant,
            "shape": list(shape),
            "dtype": dtype,
            "unit": "ms",
            "samples": list(samples),
            "summary": summary(samples),
            "calls": calls,
            "clocks": clocks,
            "roofline": None,
            "comparison": None,
        }
        self.data["cases"].append(case)
        return case

    def compare(
        self, case: dict, baseline: dict, control: dict | None, bar: Bar = BARS["kernel"], seed: int = 0
    ) -> dict:
        """Judge a case against the baseline of its group and enter the verdict; returns it."""
        judged = verdict(
            baseline["samples"], case["samples"], bar, seed, None if control is None else control["samples"]
        )
        other = None if control is None else control["variant"]
        case["comparison"] = {"baseline": baseline["variant"], "control": other, "seed": seed, **judged}
        return case["comparison"]

    def ran(self, what: str, implementation: str, count: int = 1) -> None:
        """Count what really ran."""
        for entry in self.data["dispatch"]["ran"]:
            if (entry["what"], entry["implementation"]) == (what, implementation):
                entry["count"] += count
                return
        self.data["dispatch"]["ran"].append({"what": what, "implementation": implementation, "count": count})

    def fell_back(self, what: str, asked: str, reason: str) -> None:
        """Record that something asked for did not run, and why."""
        reason = provenance.plain(reason)
        for entry in self.data["dispatch"]["fallbacks"]:
            if (entry["what"], entry["asked"], entry["reason"]) == (what, asked, reason):
                entry["count"] += 1
                return
        self.data["dispatch"]["fallbacks"].append({"what": what, "asked": asked, "reason": reason, "count": 1})

    def add_gate(
        self, name: str, rule: str, threshold: float, *, observed: float | None = None, reason: str | None = None,
        not_applicable: bool = False,
    ) -> str:  # fmt: skip
        """Record a gate; returns its result.

        With an observed number the rule decides between ``passed`` and ``failed``. Without one the gate is ``skipped``
        or ``not_applicable`` and needs a reason.
        """
        if rule not in RULES:
            raise ValueError(f"gate {name}: rule must be one of {', '.join(RULES)}, is {rule!r}")
        if observed is None:
            if not reason:
                raise ValueError(f"gate {name}: has no observed value; say why it was skipped")
            result = "not_applicable" if not_applicable else "skipped"
        else:
            result = "passed" if RULES[rule](observed, threshold) else "failed"
        self.data["gates"].append(
            {
                "name": name, "result": result, "rule": rule, "threshold": threshold, "observed": observed,
                "reason": None if reason is None else provenance.plain(reason),
            }
        )  # fmt: skip
        return result

    def finish(self) -> None:
        """Mark the run as finished and write it.

        Raises:
            ManifestError: the record contradicts itself; the file on disk goes on saying ``aborted``.
        """
        self.data["finished_at"] = _now().isoformat(timespec="milliseconds")
        self.data["status"] = "finished"
        problems = validate(json.loads(as_json(self.data)))
        if problems:
            self.data["status"] = "aborted"
            raise ManifestError(self.path.name, problems)
        self.write()

    def write(self) -> None:
        """Write the record under a temporary name beside its own, then rename it.

        Raises:
            UnwritableError: names the file, not its folder.
        """
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                file.write(as_json(self.data))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            raise UnwritableError(self.path.name, error.strerror or str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def tensor_bytes(tensor) -> bytes | memoryview:
    """The bytes of a tensor's elements, row-major, whatever its strides, dtype and device."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return memoryview(flat.numpy())


def as_json(data: dict) -> str:
    """Strict JSON: no NaN, no Infinity."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _strict_object(pairs):
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is given twice in one object")
    return members


def _no_constant(word: str):
    raise ValueError(f"{word} is not JSON")


def strict_json(path):
    """Parse a file as strict JSON.

    Raises:
        ValueError, RecursionError: not UTF-8, not JSON, NaN or Infinity, a name given twice, nested too deeply.
    """
    text = Path(path).read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=_strict_object, parse_constant=_no_constant)


def read(path) -> dict:
    """Read a record strictly and validate it.

    Raises:
        ManifestError: not JSON, NaN or Infinity, a name given twice, or anything that ``validate`` finds.
    """
    name = os.path.basename(path)
    try:
        data = strict_json(path)
    except (ValueError, RecursionError) as error:
        raise ManifestError(name, [str(error)]) from None
    problems = validate(data)
    if problems:
        raise ManifestError(name, problems)
    return data
