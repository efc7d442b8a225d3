"""``run``: every attention backend of the pack at H3's shapes on one device, with errors, memory and a record.

    from kernels.measure import attention_bench
    report = attention_bench.run(torch.device("cuda:0"), out_path="record.json")
    print(report.text)

q, k and v are strided views of one ``[1, rows, 3 * heads * head_dim]`` buffer, as H3 has them, filled with noise. Each
backend runs as :func:`kernels.attention.run` runs it, copies included; ``stock`` is the kernel that ComfyUI's order of
PyTorch's kernels picks (flash, cuDNN, memory-efficient, math), called directly. TFLOP/s count full attention,
``4 * heads * rows^2 * head_dim``, also for sparse kernels. Errors come first and again after the timing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from .. import attention
from ..attention.errors import Errors, Slice
from ..discover import reason as told
from . import provenance, telemetry
from .attention_report import Line, as_text
from .manifest import Manifest
from .samples import BARS
from .timing import L2_FACTOR, l2_bytes, sets_needed, time_rotating

SEQUENCES = (128, 512, 4096, 16384, 38016, 108800)
HEADS, HEAD_DIM = 56, 128
CPU_ROWS, CPU_HEADS = 64, 4
STOCK, AUTO = "stock", attention.AUTO
STOCK_ORDER = attention.auto.STOCK
DTYPE = torch.bfloat16
MOST_SETS = 32
# Not timed when one call takes longer than this, and this many times as long as stock's.
LONG_MS, TIMES_STOCK = 50.0, 1.3
EXACT_RELATIVE, APPROXIMATE_RELATIVE = 2**-7, 0.05
AUTO_SLACK, STOCK_SLACK = 1.03, 1.02  # auto against the best exact one, and against stock
OVERHEAD_US, OVERHEAD_CALLS, OVERHEAD_QUEUED = 30.0, 200, 20
OVERHEAD_ROWS = 4096  # overhead is looked for where it shows


class BenchError(RuntimeError):
    """The benchmark cannot run as asked: what was asked, what there is, what to do."""


@dataclass
class Report:
    """What :func:`run` found: the lines of the table, the text for a person, and the record as it was written."""

    lines: list[Line]
    text: str
    record: dict
    fallbacks: list[dict] = field(default_factory=list)


def make_inputs(rows: int, heads: int, head_dim: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """q, k and v ``[1, heads, rows, head_dim]`` bf16: noise, views of one buffer."""
    buffer = torch.empty(1, rows, 3 * heads * head_dim, dtype=DTYPE, device=generator.device)
    buffer.normal_(generator=generator)
    return tuple(part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in buffer.chunk(3, -1))


def by_plan(request: attention.Request) -> Callable:
    """``function(q, k, v)`` that runs a request as the pack does."""

    def call(q, k, v):
        tensors = [q, k, v]
        return attention.execute(attention.plan_for(request, tensors), tensors)

    return call


class _Bench:
    """One run: what every length needs."""

    def __init__(self, device, heads, head_dim, names, rounds, warm_up_s, seed, record, between, entry):
        self.device, self.heads, self.head_dim, self.names = device, heads, head_dim, names
        self.rounds, self.warm_up_s, self.seed = rounds, warm_up_s, seed
        self.record, self.between, self.entry = record, between, entry
        self.lines: list[Line] = []

    def length(self, rows: int, gpu: telemetry.Gpu) -> None:
        """Errors, memory, timing, errors again, checksums, verdicts, gates."""
        group = f"{rows} rows"
        one = 3 * rows * self.heads * self.head_dim * DTYPE.itemsize
        count = min(MOST_SETS, sets_needed(one, self.device))
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made = [make_inputs(rows, self.heads, self.head_dim, generator) for _ in range(count)]
        self.record.add_input(f"{group}: seed {self.seed}, {count} sets", (t for inputs in made for t in inputs))
        cache = l2_bytes(self.device)
        policy = self.record.data["protocol"]["l2"] or {"l2_bytes": cache, "factor": L2_FACTOR, "groups": {}}
        exceeds = None if cache is None else count * one > L2_FACTOR * cache
        policy["groups"][group] = {"sets": count, "set_bytes": one, "exceeds_factor": exceeds}
        self.record.set_protocol(l2=policy)
        variants, kinds, direct = self._variants(group, made[0])
        checked = Slice(*made[0], None)
        errors, above, first_ms = {}, {}, {}
        for name, call in list(variants.items()):
            self.between()
            errors[name], above[name], first_ms[name] = self._once(call, made[0], checked)
            if name not in (AUTO, STOCK) and first_ms[name] > max(LONG_MS, TIMES_STOCK * first_ms[STOCK]):
                times = first_ms[name] / first_ms[STOCK]
                self.record.fell_back(f"{group} / {name}", name, f"not timed: {times:.1f} times as long as stock")
                del variants[name]
        clocks = gpu.clocks()
        timing = time_rotating(
            variants, rounds=self.rounds, device=self.device, sets=made, warm_up_s=self.warm_up_s, between=self.between
        )
        told_clocks = None if clocks is None else {"before": clocks, "after": gpu.clocks()}
        self.record.add_orders(group, timing.orders)
        warm_up = self.record.data["protocol"]["warm_up"] or {}
        self.record.set_protocol(timer=timing.timer, warm_up={**warm_up, group: timing.warm_up})
        shape = (1, self.heads, rows, self.head_dim)
        cases = {
            name: self.record.add_case(
                group, name, shape, "bfloat16", samples, calls=timing.calls[name], clocks=told_clocks
            )
            for name, samples in timing.samples.items()
        }
        for name, why in timing.uncaptured.items():
            self.record.fell_back(f"{group} / {name}", "capture in a CUDA graph", why)
        for name, call in variants.items():
            out = call(*made[0])
            self.record.add_output(f"{group} / {name}", [out])
            again = checked.errors(out)
            worst = max((errors[name], again), key=lambda found: found.relative)
            self._judge(rows, name, kinds[name], cases, timing, worst, above[name])
        self._gates(group, rows, cases, kinds, above)
        if rows <= OVERHEAD_ROWS:
            self._overhead(group, direct, made[0])

    def _variants(self, group: str, inputs: tuple) -> tuple[dict[str, Callable], dict[str, str], Callable]:
        """Every variant that runs here, stock first, its kind, and the kernel behind ``auto`` called directly."""
        variants: dict[str, Callable] = {}
        kinds: dict[str, str] = {}
        for name in STOCK_ORDER:
            request = attention.Request(name)
            try:
                plan = attention.plan_for(request, list(inputs))
            except attention.AttentionRefused:
                continue
            variants[STOCK], kinds[STOCK] = partial(plan.function, scale=None), "exact"
            self.record.ran(f"{group} / {STOCK}", name)
            break
        records = {record.name: record for record in attention.records()}
        for name in self.names:
            try:
                plan = attention.plan_for(attention.Request(name), list(inputs), self.between)
            except attention.AttentionRefused as refusal:
                self.record.fell_back(f"{group} / {name}", name, refusal.reason)
                continue
            call = by_plan(attention.Request(name))
            try:
                call(*inputs)
            except torch.cuda.OutOfMemoryError:
                self.record.fell_back(f"{group} / {name}", name, "not enough device memory")
                continue
            except Exception as error:  # a probe: one backend that breaks at a shape must not end the others' run
                self.record.fell_back(f"{group} / {name}", name, told(error).splitlines()[0])
                continue
            variants[name], kinds[name] = call, "exact" if records[name].exact else "approximate"
            self.record.ran(f"{group} / {name}", name)
            if plan.fixes.copies:
                self.record.note(f"{group} / {name}: {'; '.join(plan.fixes.reasons)} ({plan.fixes.copied_bytes} bytes)")
        plan = attention.plan_for(attention.Request(), list(inputs), self.between)
        variants[AUTO], kinds[AUTO] = by_plan(attention.Request()), "exact"
        self.record.ran(f"{group} / {AUTO}", plan.backend.name)
        if plan.decision is not None:
            decision = plan.decision
            first = ", ".join(f"{name} {ms:.0f} ms" for name, ms in decision.first_call_ms.items())
            self.record.note(f"{group}: {decision}; first calls: {first}")
        return variants, kinds, partial(plan.function, scale=None)

    def _once(self, call: Callable, inputs: tuple, checked: Slice) -> tuple[Errors, int | None, float]:
        """Errors of a call, the memory it held above inputs and output, and its time to the nearest millisecond."""
        if self.device.type != "cuda":
            return checked.errors(call(*inputs)), None, 0.0
        call(*inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        out = call(*inputs)
        events[1].record()
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        return checked.errors(out), max(0, above), events[0].elapsed_time(events[1])

    def _judge(self, rows, name, kind, cases, timing, errors: Errors, above) -> None:
        case, baseline = cases[name], cases[timing.baseline]
        judged = None
        if name != timing.baseline and self.device.type != "cpu":  # a verdict needs a measurement
            judged = self.record.compare(case, baseline, cases[timing.control], BARS["kernel"], self.seed)
        median = case["summary"]["median"]
        flops = 4 * self.heads * rows * rows * self.head_dim
        limit = EXACT_RELATIVE if kind == "exact" else APPROXIMATE_RELATIVE
        where = f"{rows} rows / {name}"
        if name == "sol":
            self.record.add_gate(
                f"{where}: relative error", "at_most", limit, not_applicable=True,
                reason="sparse: what it leaves out depends on the inputs, and noise is not H3",
            )  # fmt: skip
        else:
            self.record.add_gate(f"{where}: relative error", "at_most", limit, observed=errors.relative)
        self.record.note(f"{where}: {errors}")
        self.lines.append(
            Line(
                rows, name, kind, median, case["summary"]["iqr"], flops / median / 1e9,
                baseline["summary"]["median"] / median, errors.relative, errors.cosine, errors.worst_channel, above,
                "–" if judged is None else judged["verdict"],
            )
        )  # fmt: skip

    def _gates(self, group, rows, cases, kinds, above) -> None:
        """What the pack promises of ``auto`` and of memory."""
        if self.device.type == "cpu":
            for what in ("auto over the best exact backend", "auto over stock", "memory above the direct call"):
                self.record.add_gate(f"{group}: {what}", "at_most", 1, reason="a CPU is not measured")
            return
        own = cases[AUTO]["summary"]["median"]
        exact = [cases[name]["summary"]["median"] for name, kind in kinds.items() if kind == "exact" and name in cases]
        self.record.add_gate(
            f"{group}: auto over the best exact backend", "at_most", AUTO_SLACK, observed=own / min(exact)
        )
        stock = cases[STOCK]["summary"]["median"]
        self.record.add_gate(f"{group}: auto over stock", "at_most", STOCK_SLACK, observed=own / stock)
        if "sdpa_flash" in above:
            tensor = rows * self.heads * self.head_dim * DTYPE.itemsize
            extra = above["sdpa_flash"] - above[STOCK]
            self.record.add_gate(f"{group}: bytes above the direct call", "at_most", 3 * tensor, observed=extra)

    def _overhead(self, group: str, direct: Callable, inputs: tuple) -> None:
        """Host time to issue a call, ours against the kernel alone: what a step with short calls feels."""
        ours = self.entry or by_plan(attention.Request())
        found = {}
        for name, call in (("direct", direct), ("ours", ours), ("direct again", direct), ("ours again", ours)):
            spent = 0.0
            for _ in range(OVERHEAD_CALLS // OVERHEAD_QUEUED):
                self._wait()  # outside the clock: a full queue would make the host wait for the device
                started = time.perf_counter()
                for _ in range(OVERHEAD_QUEUED):
                    call(*inputs)
                spent += time.perf_counter() - started
            found[name] = spent / OVERHEAD_CALLS * 1e6
        extra = min(found["ours"], found["ours again"]) - min(found["direct"], found["direct again"])
        self.record.note(
            f"{group}: host time per call, us: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        )
        gate = f"{group}: us of host time above the direct call"
        if self.device.type == "cpu":
            self.record.add_gate(gate, "at_most", OVERHEAD_US, reason="a CPU is not measured")
        else:
            self.record.add_gate(gate, "at_most", OVERHEAD_US, observed=extra)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.inference_mode()
def run(
    device,
    seq: Sequence[int] = SEQUENCES,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    backends: str | Sequence[str] = "all",
    rounds: int = 20,
    *,
    out_path,
    source: dict | None = None,
    seed: int = 0,
    warm_up_s: float = 0.3,
    entry: Callable | None = None,
    between: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Measure the attention backends on a device and write the record (``run-manifest/1``, kind ``attention``).

    Args:
        device: CUDA, or a CPU: there one length of at most ``CPU_ROWS`` rows and ``CPU_HEADS`` heads is run, and
            everything is labelled as no measurement.
        seq: rows of q, k and v (H3 at 1344x768x124: 38,016).
        heads, head_dim: 56 and 128 for H3.
        backends: ``"all"`` (those that run by name only are left out), one name or several.
        rounds: raised to a whole number of balanced cycles.
        out_path: the record's file; its folder must exist.
        source: what the caller knows of the source, such as a commit.
        seed: of the inputs and the bootstrap.
        warm_up_s: seconds of warm-up a length.
        entry: ``function(q, k, v)`` whose host time is compared with the direct call; None takes this module's way in.
        between: called before every round; raises to cancel.
        progress: called with lengths done and lengths in all.

    Raises:
        BenchError: an unknown backend, numbers out of range, not enough device memory.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise BenchError(f"device {device.type}: only CUDA devices and the CPU are timed; choose cuda or cpu")
    if not seq or any(type(number) is not int or number < 1 for number in (*seq, heads, head_dim, rounds)):
        raise BenchError(
            f"seq, heads, head_dim and rounds must be whole numbers from 1, have {seq}, {heads}, {head_dim}, {rounds}"
        )
    names = chosen(backends)
    on_cpu = device.type == "cpu"
    seq = sorted(set(seq))
    if on_cpu:
        seq, heads, rounds, warm_up_s = [min(*seq, CPU_ROWS)], min(heads, CPU_HEADS), 1, 0.0
    else:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        require_memory(seq[-1], heads, head_dim, device)
    with (
        Manifest(Path(out_path), "attention", device=device, source=source) as record,
        telemetry.Gpu(provenance.uuid_of(device)) as gpu,
        contextlib.nullcontext() if on_cpu else torch.cuda.device(device),
    ):
        if on_cpu:
            record.note("CPU, not a measurement: the host clock, few rows, few heads")
        record.set_protocol(seed=seed, telemetry="NVML, before and after each group" if gpu.clocks() else None)
        bench = _Bench(device, heads, head_dim, names, rounds, warm_up_s, seed, record, between, entry)
        try:
            for number, rows in enumerate(seq):
                progress(number, len(seq))
                bench.length(rows, gpu)
                if not on_cpu:
                    torch.cuda.empty_cache()
            progress(len(seq), len(seq))
        except torch.cuda.OutOfMemoryError:
            raise BenchError(too_large(rows, heads, head_dim, device)) from None
        finally:
            if not on_cpu:
                torch.cuda.empty_cache()
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
    return Report(bench.lines, as_text(bench.lines, record.data), record.data, record.data["dispatch"]["fallbacks"])


def chosen(backends: str | Sequence[str]) -> list[str]:
    """The names to run."""
    known = {record.name: record for record in attention.records()}
    if backends == "all":
        return [name for name, record in known.items() if not record.opt_in]
    names = [backends] if isinstance(backends, str) else list(backends)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BenchError(f"backends: {', '.join(unknown) or 'none'} asked for; choose all or of {', '.join(known)}")
    return names


def memory_needed(rows: int, heads: int, head_dim: int) -> int:
    """Bytes: q, k and v, copies of them, and four outputs."""
    return 10 * rows * heads * head_dim * DTYPE.itemsize + (1 << 30)


def require_memory(rows: int, heads: int, head_dim: int, device: torch.device) -> None:
    """Raise before anything is allocated when the longest call cannot fit."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if memory_needed(rows, heads, head_dim) > free + cached:
        raise BenchError(too_large(rows, heads, head_dim, device))


def too_large(rows: int, heads: int, head_dim: int, device: torch.device) -> str:
    """What does not fit, and what to do."""
    needed, (free, _) = memory_needed(rows, heads, head_dim), torch.cuda.mem_get_info(device)
    return (
        f"{rows} rows with {heads} heads need about {needed / 2**30:.1f} GiB on {torch.cuda.get_device_name(device)}, "
        f"{free / 2**30:.1f} GiB are free; choose fewer rows, or unload models"
    )
