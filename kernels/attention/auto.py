"""``auto``: the fastest exact backend for a kind of call on a device, found by timing them once there.

A kind of call is ``(device, dtype, batch, heads, head_dim, rows rounded up to a power of two, memory order)``. At its
first call the candidates that passed their probe run on the caller's own tensors: first all of them on a few heads,
twice, in rotation; then the best ones (within ``KEEP`` of the fastest, at most ``FINALISTS``) on the whole call,
``ROUNDS`` times in rotation. A sample is the time between two CUDA events around queued calls. In all that is fewer
than ``BUDGET_CALLS`` calls' time, 2 % of the 1,000 calls of a 20-step run; what a first call takes for compiling is
kept apart in the evidence.

The decision, with its samples and each candidate's error on a slice of the caller's tensors, stays in memory and in a
file beside the certificates. Its name hashes the sources of the backends, the device, the driver and the versions, so
a later run reads it and a changed machine measures again.

Nothing is timed on a CPU, while a CUDA graph is captured or while torch.compile traces; then a decision that is known
is used, else the first exact backend that takes the call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from .. import certify, discover
from .contract import Backend, Request
from .errors import Slice
from .operands import word

SCHEMA = "h3bw-attention-choice/1"
LEAST_BUCKET = 64
ROUNDS, SCREENINGS = 3, 2
KEEP, FINALISTS = 1.25, 3
BUDGET_CALLS = 20
SCREENING_FLOPS = 2e12  # about 3 ms on an H200: enough tiles to fill it several times
SAMPLE_MS, MOST_CALLS = 0.5, 20
# ComfyUI's order of PyTorch's kernels. The one that it would pick is left only for one that is clearly faster: short
# calls are bound by the host, where a few samples say little about a few microseconds.
STOCK = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
SHORT_MS, MARGIN, SHORT_MARGIN = 0.1, 0.02, 0.10

_lock = threading.RLock()
_decisions: dict[str, Decision] = {}


@dataclass
class Decision:
    """What ``auto`` runs for a kind of call on a device, and why.

    Attributes:
        chosen: the backend's name.
        kind: the kind of call in words.
        device: its name and index when the decision was made.
        rows: rows of the call that was timed.
        samples: finalist -> ms per call of the whole call.
        screened: candidate -> ms per call on a few heads.
        first_call_ms: candidate -> its first call, compilation included (host clock).
        errors: candidate -> errors against double precision on a slice of the caller's tensors.
        dropped: candidate -> why it was not chosen from.
        cost_ms: time that measuring took, first calls left out.
        environment: device, driver and versions that it holds for.
        from_cache: read from a file.
    """

    chosen: str
    kind: str
    device: str
    rows: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    screened: dict[str, float] = field(default_factory=dict)
    first_call_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    cost_ms: float = 0.0
    environment: dict = field(default_factory=dict)
    from_cache: bool = False

    def as_dict(self) -> dict:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        times = {**self.screened, **{name: median(samples) for name, samples in self.samples.items()}}
        told = ", ".join(
            f"{name} {times[name]:.3f} ms{'' if name in self.samples else ' (few heads)'}"
            for name in sorted(times, key=lambda name: (name not in self.samples, times[name]))
        )
        where = "from the cache" if self.from_cache else f"measured in {self.cost_ms:.0f} ms"
        return f"auto chose {self.chosen} for {self.kind} ({where}): {told}"


def decisions() -> list[Decision]:
    """What has been decided in this process."""
    return list(_decisions.values())


def forget() -> None:
    """Forget what is in memory; the files stay."""
    with _lock:
        _decisions.clear()


def decide(
    request: Request,
    tensors: tuple[torch.Tensor, ...],
    candidates: Mapping[str, tuple[Backend, Callable]],
    between: Callable[[], None],
) -> Decision | None:
    """The decision for a call: from memory, from its file, or measured now. None where nothing may be measured.

    Args:
        request: layout, scale, options and error bound are part of the kind.
        tensors: q, k, v as the caller gave them.
        candidates: name -> ``(record, function(q, k, v) on the caller's tensors)``, the preferred ones first.
        between: called between timed calls; raises to cancel, and then nothing is kept.
    """
    device = certify.indexed(tensors[0].device)
    key, kind = key_of(request, tensors, [backend for backend, _ in candidates.values()], device)
    with _lock:
        found = _decisions.get(key) or read(key, candidates)
        if found is None:
            if not measurable(device) or certify.busy(device):
                return None
            functions = {name: function for name, (_, function) in candidates.items()}
            approximate = {name for name, (backend, _) in candidates.items() if not backend.exact}
            with torch.no_grad(), current(device):
                found = measure(request, tensors, functions, approximate, kind, device, between)
            if found is None:
                return None
            certify.keep(key, {"schema": SCHEMA, "key": key, "choice": found.as_dict()})
        _decisions[key] = found
        return found


def measurable(device: torch.device) -> bool:
    """Whether a device has the events that are timed with."""
    return device.type == "cuda"


def current(device: torch.device):
    """A context in which ``device`` is the current one."""
    return torch.cuda.device(device)


def wait(device: torch.device) -> None:
    """Wait until everything queued on the device has run."""
    torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The device's name and index."""
    return f"{torch.cuda.get_device_name(device)} ({device})"


def bucket(rows: int) -> int:
    """Rows rounded up to a power of two, at least ``LEAST_BUCKET``: 38,016 is 65,536."""
    return max(LEAST_BUCKET, 1 << (rows - 1).bit_length())


def key_of(request: Request, tensors, backends: list[Backend], device: torch.device) -> tuple[str, str]:
    """``(name of the file, the kind of call in words)``; the name is "" where nothing can be kept on disk."""
    q, k, v = tensors
    batch, heads, rows, head_dim = q.shape
    keys = k.shape[2]
    orders = "/".join("rows first" if t.stride(2) >= t.stride(1) else "heads first" for t in tensors)
    dense = "/".join("dense" if t.stride(2) * min(rows, keys) <= t.numel() else "strided" for t in tensors)
    count = f"at most {bucket(rows)} rows" + ("" if rows == keys else f" on at most {bucket(keys)} keys")
    dtypes = "/".join(dict.fromkeys(word(t.dtype) for t in tensors))
    kind = f"{dtypes}, {batch} x {heads} x {head_dim}, {count}"
    texts = (SCHEMA, str(device), kind, orders, dense, request.layout, repr(request.scale), repr(request.options),
             repr(request.max_error), *(backend.name for backend in backends))  # fmt: skip
    packages = tuple(dict.fromkeys(package for backend in backends for package in backend.packages))
    functions = (measure, *(backend.load for backend in backends))
    return certify.key_of(*texts, functions=functions, packages=packages, device=device), kind


def read(key: str, candidates) -> Decision | None:
    """A decision from its file, or None when there is none for one of these candidates."""
    stored = certify.kept(key)
    try:
        if stored is None or (stored["schema"], stored["key"]) != (SCHEMA, key):
            return None
        found = Decision(**stored["choice"])
        sound = found.chosen in candidates and all(map(samples_are_numbers, found.samples.values()))
        found.from_cache = True
        return found if sound else None
    except (KeyError, TypeError, AttributeError):
        return None


def samples_are_numbers(samples) -> bool:
    """Whether a list from a file holds times."""
    return bool(samples) and all(isinstance(value, (int, float)) and math.isfinite(value) for value in samples)


def measure(request, tensors, functions, approximate, kind, device, between) -> Decision | None:
    """Time the candidates on the caller's tensors; None when none of them ran."""
    decision = Decision("", kind, device_name(device), tensors[0].shape[2])
    decision.environment = certify.environment(device)
    few = few_heads(tensors)
    checked = Slice(*few, request.scale)
    running = {}
    for name, function in functions.items():
        between()
        bound = request.max_error if name in approximate else None
        reason = first_call(decision, name, function, few, device, checked, bound)
        if reason is None:
            running[name] = function
        else:
            decision.dropped[name] = reason
    del checked
    started = time.perf_counter()
    if len(running) > 1:
        screened = rotate(running, few, SCREENINGS, between)
        decision.screened = {name: min(samples) for name, samples in screened.items()}
        best = min(decision.screened.values())
        order = sorted(decision.screened, key=decision.screened.get)
        finalists = [name for name in order if decision.screened[name] <= KEEP * best][:FINALISTS]
        for name in order:
            if name not in finalists:
                decision.dropped[name] = f"{decision.screened[name] / best:.2f} times the fastest on a few heads"
        running = {name: running[name] for name in finalists}
    if len(running) > 1:
        running = warm(tensors, running, decision, between)
    if not running:
        return None
    if len(running) > 1:
        decision.samples = rotate(running, tensors, ROUNDS, between)
    decision.chosen = pick(decision.samples, list(running), next((name for name in STOCK if name in functions), None))
    decision.cost_ms = round((time.perf_counter() - started) * 1000, 3)
    return decision


def pick(samples: dict[str, list[float]], names: list[str], stock: str | None) -> str:
    """The fastest of ``names`` by its median; ComfyUI's own choice where that is within the margin."""
    if len(names) == 1:
        return names[0]
    medians = {name: median(samples[name]) for name in names}
    fastest = min(medians, key=medians.get)
    margin = SHORT_MARGIN if medians[fastest] < SHORT_MS else MARGIN
    return stock if stock in medians and medians[stock] <= medians[fastest] * (1 + margin) else fastest


def few_heads(tensors) -> tuple[torch.Tensor, ...]:
    """The same call on as many heads as ``SCREENING_FLOPS`` allow: views, rows and strides as they are."""
    batch, heads, rows, head_dim = tensors[0].shape
    one_head = 4 * batch * rows * tensors[1].shape[2] * head_dim
    count = max(1, min(heads, int(SCREENING_FLOPS // max(one_head, 1))))
    return tuple(tensor[:, :count] for tensor in tensors)


def first_call(decision: Decision, name: str, function, tensors, device, checked: Slice, bound) -> str | None:
    """Call once, wait, measure the error; why the candidate is out, or None."""
    started = time.perf_counter()
    try:
        out = function(*tensors)
        wait(device)
    except Exception as error:  # a probe: a candidate that does not run here is dropped, with the reason shown
        return told(error)
    decision.first_call_ms[name] = round((time.perf_counter() - started) * 1000, 3)
    found = checked.errors(out)
    decision.errors[name] = found.as_dict()
    if not math.isfinite(found.relative) and bool(torch.isfinite(checked.reference).all()):
        return "its result is not finite on these tensors, where the reference is"
    if bound is not None and not found.relative <= bound:
        return f"relative error {found.relative:.2e} is over the bound {bound:g}"
    return None


def warm(tensors, running: dict, decision: Decision, between) -> dict:
    """Call each once at full size (libraries plan for a shape at its first call); drops what has no memory there."""
    kept = {}
    for name, function in running.items():
        between()
        try:
            function(*tensors)
        except torch.cuda.OutOfMemoryError as error:
            decision.dropped[name] = told(error)
        else:
            kept[name] = function
    return kept


def told(error: Exception) -> str:
    """The first line of an exception, without paths."""
    return discover.reason(error).splitlines()[0][:300]


def rotate(functions: dict, tensors, rounds: int, between) -> dict[str, list[float]]:
    """ms per call, ``rounds`` samples each; every round starts with another one."""
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    calls = dict.fromkeys(names, 1)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            between()
            milliseconds = timed(functions[name], tensors, calls[name])
            if number == 0 and milliseconds < SAMPLE_MS:
                # Too short for events: more calls a sample, also for this one.
                calls[name] = min(MOST_CALLS, math.ceil(SAMPLE_MS / max(milliseconds, 1e-3)))
                milliseconds = timed(functions[name], tensors, calls[name])
            samples[name].append(milliseconds)
    return samples


def timed(function, tensors, calls: int) -> float:
    """ms per call between two events around queued calls."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        function(*tensors)
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / calls


def median(samples: list[float]) -> float:
    """The middle sample."""
    ordered = sorted(samples)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
