"""Rotated, paired timing: every variant once a round, in balanced orders, with a second copy of the baseline.

On CUDA a sample is the time between two events around one replay of a graph that holds several calls, divided by their
number; no host clock is read, and a round starts with an untimed replay, so that the launches are queued while the
device is busy. Where one variant cannot be captured, all of them run as queued calls between two events: a graph
against launches would not be a comparison. On a CPU ``perf_counter`` is read, and the result says that this is no
measurement.

Clocks that settle, neighbours and caches hit all variants of a round alike; sequential timing does not have that, and
accepts savings that are not there.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import discover
from .samples import CONTROL, balanced_orders

GRAPHS = "CUDA events around graph replays"
QUEUED = "CUDA events around queued calls"
HOST = "host clock (perf_counter) on a CPU: not a measurement"
L2_FACTOR = 5
TARGET_MS = 2.0  # length of a sample: events resolve about a microsecond
MOST_CALLS = 512


@dataclass
class Timing:
    """All that was measured.

    Attributes:
        timer: ``GRAPHS``, ``QUEUED`` (for all, where at least one variant could not be captured) or ``HOST``.
        baseline, control: names; the control is the baseline's callable under another name.
        orders: the order of every round, as it really ran.
        samples: variant -> ms per call, one a round, in the order of the rounds.
        calls: variant -> calls behind one sample.
        sets: input sets that the calls rotate over.
        warm_up: seconds and whole orders before the first round.
        uncaptured: variant -> why it was not captured in a graph.
    """

    timer: str
    baseline: str
    control: str
    orders: list[list[str]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    sets: int = 1
    warm_up: dict = field(default_factory=dict)
    uncaptured: dict[str, str] = field(default_factory=dict)


def l2_bytes(device) -> int | None:
    """Size of the device's L2 cache; None for a CPU or where torch does not tell."""
    if device.type != "cuda":
        return None
    import torch

    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None) or None


def sets_needed(set_bytes: int, device) -> int:
    """How many input sets of ``set_bytes`` each exceed ``L2_FACTOR`` times the device's L2; 1 where that is unknown."""
    cache = l2_bytes(device)
    return 1 if cache is None else max(1, L2_FACTOR * cache // max(set_bytes, 1) + 1)


def time_rotating(
    variants: Mapping[str, Callable],
    *,
    rounds: int,
    device,
    baseline: str | None = None,
    sets: Sequence[tuple] = ((),),
    warm_up_s: float = 0.3,
    calls: int | None = None,
    between: Callable[[], None] | None = None,
) -> Timing:
    """Time callables against one another.

    Args:
        variants: name -> callable; called with one input set, its result is dropped.
        rounds: at least this many; raised to a whole number of balanced cycles (``2 * (variants + 1)`` rounds).
        device: ``torch.device`` that the callables work on.
        baseline: name of the one that the others are compared with; the first by default. It also runs a second time
            in each round, as ``<baseline> (A/A)``.
        sets: argument tuples of equal shapes that successive calls rotate over (see :func:`sets_needed`).
        warm_up_s: seconds of warm-up, in rotation, after compiling and capturing.
        calls: calls behind a sample; None chooses enough for about ``TARGET_MS``, on a CPU one. Raised to a multiple
            of the number of sets.
        between: called before every round; may raise to stop.

    Returns:
        A :class:`Timing`.

    Raises:
        ValueError: no variants, no rounds, no sets, an unknown baseline or a name that ends like a control's.
    """
    if not variants or rounds < 1 or not sets:
        raise ValueError(f"time_rotating: wants variants, rounds and sets, has {len(variants)}, {rounds}, {len(sets)}")
    baseline = next(iter(variants)) if baseline is None else baseline
    control = baseline + CONTROL
    if baseline not in variants or control in variants:
        raise ValueError(f"time_rotating: baseline {baseline!r} must be one of {', '.join(variants)}")
    on_cuda = device.type == "cuda"
    with _current(device):
        if on_cuda:
            pool = _Pool()
            stations = {name: _Cuda(function, sets, calls, pool) for name, function in variants.items()}
        else:
            stations = {name: _Host(function, sets, calls) for name, function in variants.items()}
        names = [*stations, control]
        cycle = balanced_orders(names)
        timing = Timing(HOST, baseline, control, sets=len(sets), samples={name: [] for name in names})
        if on_cuda:
            timing.uncaptured = {name: stations[name].reason for name in variants if stations[name].reason}
            timing.timer = QUEUED if timing.uncaptured else GRAPHS
            if timing.uncaptured:
                for station in stations.values():
                    station.drop_graph()
        stations[control] = stations[baseline]
        timing.calls = {name: stations[name].calls for name in names}
        timing.warm_up = _warm_up(stations, cycle, warm_up_s, between)
        for number in range(math.ceil(rounds / len(cycle)) * len(cycle)):
            if between is not None:
                between()
            order = cycle[number % len(cycle)]
            for name, milliseconds in zip(order, _round(stations, order, baseline, on_cuda), strict=True):
                timing.samples[name].append(milliseconds)
            timing.orders.append(list(order))
    return timing


def _current(device):
    if device.type != "cuda":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(device)


def _warm_up(stations: dict, cycle: list[list[str]], seconds: float, between) -> dict:
    """Run whole orders until the time has passed; the host clock only ends the loop."""
    started, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - started < seconds:
        if between is not None:
            between()
        for name in cycle[count % len(cycle)]:
            stations[name].run()
        stations[cycle[0][0]].wait()
        count += 1
    return {"seconds": round(time.perf_counter() - started, 3), "orders": count, "asked_seconds": seconds}


def _round(stations: dict, order: list[str], baseline: str, on_cuda: bool) -> list[float]:
    if not on_cuda:
        out = []
        for name in order:
            started = time.perf_counter()
            stations[name].run()
            out.append((time.perf_counter() - started) * 1000 / stations[name].calls)
        return out
    stations[baseline].run()  # untimed: keeps the device busy while the host queues the round
    pairs = []
    for name in order:
        before, after = _event(), _event()
        before.record()
        stations[name].run()
        after.record()
        pairs.append((before, after))
    after.synchronize()
    return [
        before.elapsed_time(after) / stations[name].calls for name, (before, after) in zip(order, pairs, strict=True)
    ]


def _event():
    import torch

    return torch.cuda.Event(enable_timing=True)


class _Host:
    """A variant on a CPU."""

    def __init__(self, function: Callable, sets: Sequence[tuple], calls: int | None):
        self._function, self._sets = function, sets
        self.calls = _multiple(calls or 1, len(sets))

    def run(self) -> None:
        for number in range(self.calls):
            self._function(*self._sets[number % len(self._sets)])

    def wait(self) -> None:
        """Nothing is queued on a CPU."""


class _Pool:
    """Graph memory that the variants share: no two replays overlap and no result is kept.

    An empty graph holds it open, since a pool must not come back to life once its last graph is gone.
    """

    def __init__(self):
        import torch

        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        anchored = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(self._anchor, pool=self.handle, capture_error_mode="thread_local"):
            anchored.add_(1)


class _Cuda:
    """A variant on the current CUDA device: a graph of ``calls`` calls, or those calls one by one.

    ``reason`` says why it could not be captured, or is None.
    """

    def __init__(self, function: Callable, sets: Sequence[tuple], calls: int | None, pool: _Pool):
        self._function, self._sets, self._pool = function, sets, pool
        self._graph, self.reason = None, None
        self._compile()
        self.calls = len(sets)
        self._capture()
        if calls is None:
            # The second replay is timed: the first one uploads the graph.
            self.run()
            calls = min(MOST_CALLS, math.ceil(TARGET_MS * self.calls / max(self._elapsed_ms(), 1e-3)))
        wanted = _multiple(calls, len(sets))
        if wanted != self.calls:
            self.calls = wanted
            self._capture()

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run_calls()

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()

    def drop_graph(self) -> None:
        """Run as queued calls from now on."""
        self._graph = None

    def _run_calls(self) -> None:
        for number in range(self.calls):
            self._function(*self._sets[number % len(self._sets)])

    def _compile(self) -> None:
        """Call it on a side stream first, as capturing wants it: kernels are compiled, libraries take their memory."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._function(*self._sets[0])
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def _capture(self) -> None:
        import torch

        if self.reason is not None:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread (ComfyUI's server) may call CUDA meanwhile; that must not spoil the capture.
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
                self._run_calls()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a probe: what a callable cannot do in a capture, it can do outside
            self.reason = discover.reason(error).splitlines()[0]
            self._graph = None
            torch.cuda.synchronize()
            return
        self._graph = graph

    def _elapsed_ms(self) -> float:
        before, after = _event(), _event()
        before.record()
        self.run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)


def _multiple(calls: int, of: int) -> int:
    return math.ceil(calls / of) * of
