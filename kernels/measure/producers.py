"""``run``: every fused op of the pack against ComfyUI's chain on one device, with parity, roofline and a record.

    from kernels.measure import producers
    report = producers.run(torch.device("cuda:0"), rows=38016, out_path="record.json")
    print(report.text)

Parity comes first and again after the timing, on the same inputs. An implementation that refuses the device (too old,
or not certified) is not timed and stands in the record with its reason.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .. import fused, nvfp4
from . import provenance, roofline, stock, telemetry
from .manifest import Manifest
from .report import Line, as_text
from .samples import BARS
from .timing import L2_FACTOR, l2_bytes, sets_needed, time_rotating

STOCK, REFERENCE = "stock", "reference"
H3_ROWS = 38016  # 1344x768, 124 frames: 306 text, 414 audio and 37,296 video rows
CPU_ROWS = 64
MOST_SETS = 64
DTYPE = torch.bfloat16
FUSED_NORM_SHARE = 1e-5  # of codes that may move when the sum of squares is taken in another order
DIVISION_SHARE = 2e-3  # true division against comfy-kitchen's approximate reciprocals; 1.2e-3 seen at 512 rows


class Columns(NamedTuple):
    """Widths of a block: the residual stream, the MLP's inner width, the attention output."""

    hidden: int
    inner: int
    attention: int


H3_COLUMNS = "H3 (5376 / 14336 / 7168)"
PRESETS = {H3_COLUMNS: Columns(5376, 14336, 7168), "small": Columns(256, 512, 256)}


class BenchError(RuntimeError):
    """The benchmark cannot run as asked: what was asked, what there is, what to do."""


@dataclass
class Report:
    """What :func:`run` found: the lines of the table, the text for a person, and the record as it was written."""

    lines: list[Line]
    text: str
    record: dict
    fallbacks: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """One op with one kind of scale: what is timed against one another."""

    op: str
    static: bool | None  # None for an op without a scale

    @property
    def name(self) -> str:
        """Such as ``"swiglu_nvfp4, static"``."""
        return self.op if self.static is None else f"{self.op}, {'static' if self.static else 'dynamic'}"


def groups_of(ops: str | Sequence[str] = "all") -> tuple[list[Group], list[str]]:
    """The groups of some ops, and the ops that have no chain to be compared with.

    Raises:
        BenchError: a name that is no op.
    """
    names = list(fused.OPS) if ops == "all" else [ops] if isinstance(ops, str) else list(ops)
    unknown = [name for name in names if name not in fused.OPS]
    if unknown or not names:
        raise BenchError(f"ops: {', '.join(unknown) or 'none'} asked for; choose all or of {', '.join(fused.OPS)}")
    known = [name for name in names if name in stock.BF16_PART]
    groups = []
    for name in known:
        groups += [Group(name, kind) for kind in ((False, True) if takes(name, "decode_scale") else (None,))]
    return groups, [name for name in names if name not in known]


def takes(op: str, option: str) -> bool:
    """Whether the op's public function has an option."""
    return option in inspect.signature(getattr(fused, op)).parameters


def width_of(op: str, columns: Columns) -> int:
    """Output columns of an op."""
    return columns.inner if "swiglu" in op else columns.attention if op == "rows_nvfp4" else columns.hidden


def segments_of(rows: int) -> list[tuple[int, int, int]]:
    """Text, audio and video in the shares of H3's rows, one table row each."""
    text, audio = rows * 306 // H3_ROWS, rows * 720 // H3_ROWS
    return [(0, text, 0), (text, audio, 1), (audio, rows, 2)]


def make_inputs(op: str, rows: int, columns: Columns, generator: torch.Generator) -> tuple:
    """Positional arguments of an op: noise, never zeros, from a seeded generator on the device."""
    width = width_of(op, columns)

    def noise(*shape, spread=1.0, centre=0.0, dtype=DTYPE):
        out = torch.empty(*shape, dtype=dtype, device=generator.device)
        return out.normal_(centre, spread, generator=generator)

    if "swiglu" in op:
        return (noise(rows, 2 * width, spread=2.0),)
    if op == "rows_nvfp4":
        return (noise(rows, width),)
    segments = segments_of(rows)
    table = [noise(len(segments), width, spread=0.3, dtype=torch.float32) for _ in range(2)]
    x = noise(rows, width, spread=8.0)
    if op == "gate_residual_":
        return (x, table[0], noise(rows, width), segments)
    return (x, noise(width, spread=0.1, centre=1.0), 1e-5, *table, segments)


def input_bytes(op: str, rows: int, columns: Columns) -> int:
    """Bytes of one input set's large tensors."""
    tensors = 2 if "swiglu" in op or op == "gate_residual_" else 1
    return tensors * rows * width_of(op, columns) * DTYPE.itemsize


def memory_needed(groups: Sequence[Group], rows: int, columns: Columns, device: torch.device) -> int:
    """Bytes that the largest group needs: its input sets, three bf16 results of the chain, pieces of the reference."""
    largest = 0
    for group in groups:
        one = input_bytes(group.op, rows, columns)
        result = rows * width_of(group.op, columns) * DTYPE.itemsize
        largest = max(largest, one * set_count(one, device) + 3 * result)
    return largest + (1 << 30)


def set_count(one: int, device: torch.device) -> int:
    """Input sets to rotate over, at most ``MOST_SETS``."""
    return min(MOST_SETS, sets_needed(one, device))


def floor_bytes(group: Group, norm: str | None, rows: int, columns: Columns) -> int:
    """Bytes that a variant has to move: the op's, and those of ATen's norm before it where that is kept."""
    op, width = fused.OPS[group.op], width_of(group.op, columns)
    options = {} if group.static is None else {"static": group.static}
    kept_norm = 2 * rows * width * DTYPE.itemsize if norm == "aten" else 0
    return op.bytes_moved(rows, width, DTYPE.itemsize, **options) + kept_norm


def tensors_of(result) -> list[torch.Tensor]:
    """The tensors of a result: codes, scales and decode scale, or the one tensor."""
    return [result.codes, result.block_scale, result.decode_scale] if isinstance(result, nvfp4.NVFP4) else [result]


def difference(ours, theirs) -> tuple[int, str]:
    """How many codes, scale bytes, decode scales or elements differ, bit for bit, and that in words."""
    if isinstance(ours, nvfp4.NVFP4):
        bits = ours.codes ^ theirs.codes
        codes = int(((bits & 15) != 0).sum()) + int((bits > 15).sum())
        scales = int((ours.block_scale.view(torch.uint8) != theirs.block_scale.view(torch.uint8)).sum())
        decode = int(ours.decode_scale.view(torch.int32) != theirs.decode_scale.view(torch.int32))
        parts = [(codes, "codes"), (scales, "scales"), (decode, "decode scale")]
        words = ", ".join(f"{count} {what}" for count, what in parts if count)
        return codes + scales + decode, words or "equal"
    count = int((ours.view(torch.int16) != theirs.view(torch.int16)).sum())
    return count, f"{count} elements" if count else "equal"


def fresh(op: str, arguments: tuple) -> tuple:
    """The arguments of an op, with a tensor of its own where the op writes into the first."""
    return (arguments[0].clone(), *arguments[1:]) if op.endswith("_") else tuple(arguments)


# ---------------------------------------------------------------- what goes into a record


def enter(record: Manifest, group: str, timing, shape: tuple, clocks: dict | None = None) -> dict[str, dict]:
    """Enter a group that was timed: orders, warm-up and a case for each variant; returns the cases by variant."""
    record.add_orders(group, timing.orders)
    policy = record.data["protocol"]["warm_up"] or {}
    record.set_protocol(warm_up={**policy, group: timing.warm_up})
    told = clocks if clocks is not None and any(value is not None for value in clocks.values()) else None
    dtype = str(DTYPE).removeprefix("torch.")
    return {
        name: record.add_case(group, name, shape, dtype, samples, calls=timing.calls[name], clocks=told)
        for name, samples in timing.samples.items()
    }


def enter_copy(record: Manifest, copy, clocks: dict | None = None) -> dict:
    """Enter the copy that rates are compared with, and its timer; returns its case."""
    case = enter(record, "copy", copy.timing, (copy.elements,), clocks)["copy"]
    milliseconds = case["summary"]["median"]
    case["roofline"] = roofline.rate(copy.moved_bytes, milliseconds, copy.moved_bytes, milliseconds)
    record.set_protocol(timer=copy.timing.timer)
    return case


def note_sets(record: Manifest, group: str, count: int, one: int, device: torch.device) -> None:
    """Enter how many input sets of ``one`` byte count each a group rotates over, and whether they pass the L2 cache."""
    cache = l2_bytes(device)
    policy = record.data["protocol"]["l2"] or {"l2_bytes": cache, "factor": L2_FACTOR, "groups": {}}
    exceeds = None if cache is None else count * one > L2_FACTOR * cache
    policy["groups"][group] = {"sets": count, "set_bytes": one, "exceeds_factor": exceeds}
    record.set_protocol(l2=policy)


class _Bench:
    """One run: what every group needs."""

    def __init__(self, device, rows, columns, rounds, warm_up_s, seed, record, quantise, backend, between):
        self.device, self.rows, self.columns, self.rounds, self.warm_up_s = device, rows, columns, rounds, warm_up_s
        self.seed, self.record, self.between = seed, record, between
        self.quantise, self.backend = quantise, backend
        self.copy: dict = {}
        self.lines: list[Line] = []
        self.uncaptured: list[str] = []

    def copy_case(self, gpu: telemetry.Gpu) -> None:
        """Time the copy that every rate is compared with."""
        before = gpu.clocks()
        copy = roofline.copy_bandwidth(self.device, rounds=min(self.rounds, 20), between=self.between)
        self.copy = enter_copy(self.record, copy, {"before": before, "after": gpu.clocks()})

    def group(self, group: Group, gpu: telemetry.Gpu) -> None:
        """Parity, timing, parity again, checksums, verdicts."""
        one = input_bytes(group.op, self.rows, self.columns)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made = [make_inputs(group.op, self.rows, self.columns, generator) for _ in range(set_count(one, self.device))]
        pristine = fresh(group.op, made[0])  # the timed calls of some ops write into the first input
        self.record.add_input(
            f"{group.name}: seed {self.seed}, {len(made)} sets",
            (item for inputs in made for item in inputs if isinstance(item, torch.Tensor)),
        )
        note_sets(self.record, group.name, len(made), one, self.device)
        variants, norms = self._variants(group, pristine)
        before = self._parity(group, variants, pristine)
        clocks = gpu.clocks()
        timing = time_rotating(
            variants, rounds=self.rounds, device=self.device, sets=made, warm_up_s=self.warm_up_s, between=self.between
        )
        clocks = {"before": clocks, "after": gpu.clocks()}
        after = self._parity(group, variants, pristine, checksums=True)
        shape = (self.rows, width_of(group.op, self.columns))
        cases = enter(self.record, group.name, timing, shape, clocks)
        if timing.uncaptured:
            self.record.set_protocol(timer=f"{self.record.data['protocol']['timer']}; {group.name}: {timing.timer}")
        for name, why in timing.uncaptured.items():
            self.record.fell_back(f"{group.name} / {name}", "capture in a CUDA graph", why)
        for name in variants:
            self._judge(group, name, norms[name], cases, timing, max(before[name], after[name]))

    def _variants(self, group: Group, inputs: tuple) -> tuple[dict[str, Callable], dict[str, str | None]]:
        """Every variant that runs here, each called once, and the norm of each; refusals go into the record."""
        function = getattr(fused, group.op)
        nvfp4_out = group.op.endswith("_nvfp4")
        variants: dict[str, Callable] = {}
        norms: dict[str, str | None] = {}
        options = {"decode_scale": self._static_scale(group, inputs)} if group.static else {}
        if not nvfp4_out or self.quantise is not None:
            variants[STOCK] = stock.chain(group.op, self.quantise, options.get("decode_scale"))
            runs = f"ComfyUI's chain, comfy-kitchen {self.backend}" if nvfp4_out else "ComfyUI's chain"
            self.record.ran(f"{group.name} / {STOCK}", runs)
        else:
            self.record.fell_back(f"{group.name} / {STOCK}", "comfy-kitchen's quantiser", self.backend)
        variants[REFERENCE] = partial(function, impl=REFERENCE, **options)
        norms.update({STOCK: None, REFERENCE: None})
        self.record.ran(f"{group.name} / {REFERENCE}", REFERENCE)
        for implementation in fused.OPS[group.op].implementations:
            for norm in ("aten", "fused") if takes(group.op, "norm") else (None,):
                name = implementation.name if norm is None else f"{implementation.name}, norm {norm}"
                asked = dict(options) if norm is None else {**options, "norm": norm}
                call = partial(function, impl=implementation.name, **asked)
                try:
                    call(*fresh(group.op, inputs))
                except fused.FusedRefused as refusal:
                    self.record.fell_back(f"{group.name} / {name}", name, "; ".join(refusal.reasons.values()))
                    continue
                variants[name], norms[name] = call, norm
                self.record.ran(f"{group.name} / {name}", implementation.name)
        return variants, norms

    def _static_scale(self, group: Group, inputs: tuple) -> torch.Tensor:
        """A static scale as calibration would find it: that of these inputs."""
        part = stock.BF16_PART[group.op](*inputs)
        return nvfp4.default_decode_scale(part).reshape(())

    def _parity(
        self, group: Group, variants: dict, inputs: tuple, checksums: bool = False
    ) -> dict[str, tuple[int, str]]:
        """Each variant's difference from the first one; its output's checksum goes into the record if asked for."""
        expected, found = None, {}
        for name, call in variants.items():
            self.between()
            result = call(*fresh(group.op, inputs))
            if checksums:
                self.record.add_output(f"{group.name} / {name}", tensors_of(result))
            expected = result if expected is None else expected
            found[name] = difference(result, expected)
        return found

    def _judge(self, group: Group, name: str, norm, cases: dict, timing, parity: tuple[int, str]) -> None:
        case, baseline = cases[name], cases[timing.baseline]
        bytes_moved = floor_bytes(group, norm, self.rows, self.columns)
        copied = self.copy["roofline"]["floor_bytes"], self.copy["summary"]["median"]
        case["roofline"] = roofline.rate(bytes_moved, case["summary"]["median"], *copied)
        judged = None
        if name != timing.baseline:
            if self.device.type != "cpu":  # a verdict needs a measurement
                judged = self.record.compare(case, baseline, cases[timing.control], BARS["kernel"], self.seed)
            self._gate(group, name, norm, timing.baseline, parity[0])
        self.lines.append(
            Line(
                group=group.name,
                variant=name,
                ms=case["summary"]["median"],
                iqr_ms=case["summary"]["iqr"],
                gb_per_s=case["roofline"]["gb_per_s"],
                share_of_copy=case["roofline"]["share_of_copy"],
                times_stock=baseline["summary"]["median"] / case["summary"]["median"],
                floor_ms=case["roofline"]["floor_ms"],
                parity="–" if name == timing.baseline else parity[1],
                verdict="–" if judged is None else judged["verdict"],
            )
        )

    def _gate(self, group: Group, name: str, norm: str | None, baseline: str, differing: int) -> None:
        elements = self.rows * width_of(group.op, self.columns)
        share = FUSED_NORM_SHARE if norm == "fused" else 0.0
        # The reference divides truly; comfy-kitchen's compiled backends multiply by approximate reciprocals.
        if group.op.endswith("_nvfp4") and baseline == STOCK and self.backend != "eager" and name == REFERENCE:
            share = DIVISION_SHARE
        self.record.add_gate(
            f"{group.name} / {name}: differing from {baseline}", "at_most", int(share * elements), observed=differing
        )


@torch.inference_mode()
def run(
    device,
    rows: int = H3_ROWS,
    columns: str | Columns = H3_COLUMNS,
    ops: str | Sequence[str] = "all",
    rounds: int = 30,
    *,
    out_path,
    quantise: Callable | None = None,
    source: dict | None = None,
    seed: int = 0,
    warm_up_s: float = 0.3,
    between: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Measure the fused ops on a device and write the record.

    Args:
        device: CUDA, or a CPU: there at most ``CPU_ROWS`` rows and one cycle of orders are run, and everything is
            labelled as no measurement.
        rows: rows of the stream (H3 at 1344x768x124: 38,016).
        columns: a key of ``PRESETS``, or :class:`Columns`.
        ops: ``"all"``, one name or several.
        rounds: raised to a whole number of balanced cycles.
        out_path: the record's file; its folder must exist.
        quantise: NVFP4 quantiser of the stock chain, ``(x, scale=None) -> (codes, params)``, in place of that of
            comfy-kitchen's layout.
        source: what the caller knows of the source, such as a commit.
        seed: of the inputs and the bootstrap.
        warm_up_s: seconds of warm-up a group.
        between: called before every round; raises to cancel.
        progress: called with groups done and groups in all.

    Raises:
        BenchError: an unknown op or preset, numbers out of range, not enough device memory.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise BenchError(f"device {device.type}: only CUDA devices and the CPU are timed; choose cuda or cpu")
    columns = _columns(columns)
    if type(rows) is not int or type(rounds) is not int or rows < 1 or rounds < 1:
        raise BenchError(f"rows and rounds must be whole numbers from 1, have {rows!r} and {rounds!r}")
    groups, apart = groups_of(ops)
    on_cpu = device.type == "cpu"
    if on_cpu:
        rows, rounds, warm_up_s = min(rows, CPU_ROWS), 1, 0.0
    else:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        _require_memory(groups, rows, columns, device)
    found, backend = stock.quantiser(device)
    with (
        Manifest(Path(out_path), "kernel", device=device, source=source) as record,
        telemetry.Gpu(provenance.uuid_of(device)) as gpu,
        contextlib.nullcontext() if on_cpu else torch.cuda.device(device),
    ):
        if on_cpu:
            record.note("CPU, not a measurement: the host clock, few rows, the references only")
        record.set_protocol(seed=seed, telemetry="NVML, before and after each group" if gpu.clocks() else None)
        for name in apart:
            record.fell_back(name, "benchmark", "this version has no chain of ComfyUI's to compare it with")
        if found is not None and quantise is not None:
            found = quantise
        bench = _Bench(device, rows, columns, rounds, warm_up_s, seed, record, found, backend, between)
        try:
            bench.copy_case(gpu)
            for number, group in enumerate(groups):
                progress(number, len(groups))
                bench.group(group, gpu)
                if not on_cpu:
                    torch.cuda.empty_cache()
            progress(len(groups), len(groups))
        except torch.cuda.OutOfMemoryError:
            raise BenchError(_too_large(groups, rows, columns, device)) from None
        finally:
            if not on_cpu:
                torch.cuda.empty_cache()
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
    return Report(bench.lines, as_text(bench.lines, record.data), record.data, record.data["dispatch"]["fallbacks"])


def _columns(columns: str | Columns) -> Columns:
    if isinstance(columns, str):
        if columns not in PRESETS:
            raise BenchError(f"columns: {columns!r} asked for; choose {' or '.join(map(repr, PRESETS))}, or Columns")
        return PRESETS[columns]
    columns = Columns(*columns)
    if any(width < nvfp4.BLOCK or width % nvfp4.BLOCK for width in columns):
        raise BenchError(f"columns: must be multiples of {nvfp4.BLOCK}, have {tuple(columns)}")
    return columns


def _require_memory(groups, rows: int, columns: Columns, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if memory_needed(groups, rows, columns, device) > free + cached:
        raise BenchError(_too_large(groups, rows, columns, device))


def _too_large(groups, rows: int, columns: Columns, device: torch.device) -> str:
    needed, (free, _) = memory_needed(groups, rows, columns, device), torch.cuda.mem_get_info(device)
    return (
        f"{rows} rows need about {needed / 2**30:.1f} GiB on {torch.cuda.get_device_name(device)}, "
        f"{free / 2**30:.1f} GiB are free; choose fewer rows or the columns 'small', or unload models"
    )
