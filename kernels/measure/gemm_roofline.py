"""``run``: the four GEMMs of an H3 block and its producers at a number of rows: floor, measured, share.

    from kernels.measure import gemm_roofline
    print(gemm_roofline.run(torch.device("cuda:0"), rows=38016, out_path="roofline.json").text)

    floor = max(bytes / bandwidth of a copy measured in the same run, flops / peak)       share = floor / measured

The peak is the data sheet's where it is known, else what a square GEMM reached in the same run. A GEMM runs as *bf16*
(weights dequantised before), as *dequantised* (four-bit weights dequantised in the call, which is what ComfyUI runs
without FP4) and as *fp4* (comfy-kitchen's ``scaled_mm_nvfp4``), where the device has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .. import certify, discover, fused, nvfp4
from . import ladder, predictions, producers, provenance, roofline, telemetry
from .manifest import Manifest
from .report import control_lines, device_name
from .samples import BARS
from .timing import sets_needed, time_rotating

BF16, DEQUANTISED, FP4, AUTO, SQUARE = "bf16", "dequantised", "fp4", "auto", "square"
SQUARE_SIDE, CPU_SQUARE_SIDE = 8192, 128
FP4_CAPABILITY = (10, 0)
# fp4 against the same operands dequantised and multiplied in bf16: they differ by the order of sums and one rounding.
FP4_RELATIVE = 0.01
DTYPE = torch.bfloat16
HEADINGS = ("op", "variant", "ms", "IQR", "floor ms", "bound by", "share", "TFLOP/s", "GB/s")


@dataclass(frozen=True)
class Line:
    """One variant of one op; ``tflops`` None for a producer."""

    group: str
    variant: str
    ms: float
    iqr_ms: float
    floor_ms: float
    bound: str
    share: float
    tflops: float | None
    gb_per_s: float


@dataclass
class Report:
    """What :func:`run` found: the lines of the table, the text for a person, and the record as it was written."""

    lines: list[Line]
    text: str
    record: dict


def shapes(columns: producers.Columns) -> dict[str, tuple[int, int]]:
    """``{linear: (N, K)}`` of a block."""
    hidden, inner, attention = columns
    return {
        "qkv_proj": (3 * attention, hidden),
        "out_proj": (hidden, attention),
        "fc1": (2 * inner, hidden),
        "fc2": (hidden, inner),
    }


def fp4_reason(device: torch.device) -> str | None:
    """Why the device does not multiply FP4 here, or None."""
    if device.type != "cuda":
        return f"{device.type} has no FP4 matrix multiply"
    if torch.cuda.get_device_capability(device) < FP4_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no FP4 matrix multiply (compute capability 10.0 or newer has)"
    try:
        import comfy_kitchen

        q = nvfp4.quantize(torch.ones(128, 128, dtype=DTYPE, device=device))
        comfy_kitchen.scaled_mm_nvfp4(
            q.codes, q.codes, q.decode_scale, q.decode_scale, q.block_scale, q.block_scale, out_dtype=DTYPE
        )
        torch.cuda.synchronize(device)
    except Exception as error:  # a probe: whatever the library or the driver raises is the reason
        return discover.reason(error)
    return None


def bytes_of(variant: str, rows: int, n: int, k: int) -> int:
    """Bytes that a GEMM has to move: x, weight and y, each once."""
    operand = {BF16: (2.0, 2.0), DEQUANTISED: (2.0, 0.5625), FP4: (0.5625, 0.5625)}[variant]
    return int(rows * k * operand[0] + n * k * operand[1] + rows * n * 2)


class _Bench:
    """One run."""

    def __init__(self, device, rows, columns, rounds, warm_up_s, seed, record, between):
        self.device, self.rows, self.columns, self.rounds, self.warm_up_s = device, rows, columns, rounds, warm_up_s
        self.seed, self.record, self.between = seed, record, between
        self.lines: list[Line] = []
        self.copy: dict = {}
        self.peaks: dict[str, float] = {}
        self.no_fp4 = fp4_reason(device)

    def enter(self, group: str, timing, shape) -> dict[str, dict]:
        """Put a timing into the record; returns its cases."""
        self.record.add_orders(group, timing.orders)
        self.record.set_protocol(
            timer=timing.timer, warm_up={**(self.record.data["protocol"]["warm_up"] or {}), group: timing.warm_up}
        )
        return {
            name: self.record.add_case(group, name, shape, "bfloat16", samples, calls=timing.calls[name])
            for name, samples in timing.samples.items()
        }

    def time(self, variants: dict[str, Callable], sets) -> object:
        """Time variants as everything here is timed."""
        return time_rotating(
            variants, rounds=self.rounds, device=self.device, sets=sets, warm_up_s=self.warm_up_s, between=self.between
        )

    def copy_case(self) -> None:
        """The copy that every byte rate is compared with."""
        copy = roofline.copy_bandwidth(self.device, rounds=min(self.rounds, 20), between=self.between)
        self.copy = self.enter("copy", copy.timing, (copy.elements,))["copy"]
        ms = self.copy["summary"]["median"]
        self.copy["roofline"] = roofline.rate(copy.moved_bytes, ms, copy.moved_bytes, ms)

    def peak_cases(self) -> None:
        """Peaks in TFLOP/s: the data sheet's, or a square GEMM's."""
        side = SQUARE_SIDE if self.device.type == "cuda" else CPU_SQUARE_SIDE
        x, w = self.operand(side, side, 0), self.operand(side, side, 1)
        variants: dict[str, Callable] = {BF16: partial(torch.nn.functional.linear, x, w)}
        if self.no_fp4 is None:
            variants[FP4] = self.fp4_call(nvfp4.quantize(x), nvfp4.quantize(w))
        cases = self.enter(SQUARE, self.time(variants, ((),)), (side, side))
        for name, call in variants.items():
            self.record.add_output(f"{SQUARE} / {name}", [call()])
            self.record.ran(f"{SQUARE} / {name}", name)
            self.peaks[name] = 2 * side**3 / cases[name]["summary"]["median"] / 1e9
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        sheet = next((device for device in predictions.DEVICES if device.match in gpu), None)
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.peaks.items())
        if sheet is not None:
            self.peaks.update({BF16: sheet.bf16} | ({FP4: sheet.fp4} if sheet.fp4 else {}))
            told = f"data sheet: {', '.join(f'{name} {value:.4g}' for name, value in self.peaks.items())}; here: {told}"
        self.record.note(f"peak in TFLOP/s, dense; a square GEMM of {side} {told}")

    def operand(self, rows: int, columns: int, number: int) -> torch.Tensor:
        """bf16 noise from the seed and a number of its own."""
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + number)
        return torch.empty(rows, columns, dtype=DTYPE, device=self.device).normal_(generator=generator)

    @staticmethod
    def fp4_call(x: nvfp4.NVFP4, w: nvfp4.NVFP4) -> Callable:
        """The FP4 multiply of two quantised matrices; it raises where it cannot, and never dequantises instead."""
        import comfy_kitchen

        return partial(
            comfy_kitchen.scaled_mm_nvfp4, x.codes, w.codes, x.decode_scale, w.decode_scale, x.block_scale,
            w.block_scale, out_dtype=DTYPE,
        )  # fmt: skip

    def gemm(self, name: str, n: int, k: int, number: int) -> None:
        """One linear, in every way that the device has."""
        codes = nvfp4.quantize(self.operand(n, k, 100 + number))
        weight = nvfp4.dequantize(codes, DTYPE)
        count = sets_needed(self.rows * k * DTYPE.itemsize, self.device)
        rows = [self.operand(self.rows, k, 200 + 10 * number + place) for place in range(min(count, 8))]
        self.record.add_input(f"{name}: seed {self.seed}", [rows[0], codes.codes])
        quantised = [nvfp4.quantize(x) for x in rows] if self.no_fp4 is None else [None] * len(rows)
        sets = [(x, None if q is None else self.fp4_call(q, codes)) for x, q in zip(rows, quantised, strict=True)]
        variants: dict[str, Callable] = {BF16: lambda x, call: torch.nn.functional.linear(x, weight)}
        unpack = dequantiser()
        if unpack is not None:
            variants[DEQUANTISED] = lambda x, call: torch.nn.functional.linear(x, unpack(codes)[:n, :k])
        else:
            self.record.fell_back(f"{name} / {DEQUANTISED}", "comfy-kitchen's dequantiser", "it is not installed")
        if self.no_fp4 is None:
            variants[FP4] = lambda x, call: call()
        else:
            self.record.fell_back(f"{name} / {FP4}", "FP4 matrix multiply", self.no_fp4)
        timing = self.time(variants, sets)
        cases = self.enter(name, timing, (self.rows, n, k))
        expected = variants[BF16](*sets[0])
        for variant, call in variants.items():
            found = call(*sets[0])[: self.rows]
            self.record.add_output(f"{name} / {variant}", [found])
            self.record.ran(f"{name} / {variant}", variant)
            if variant == FP4:
                expected = torch.nn.functional.linear(nvfp4.dequantize(quantised[0], DTYPE), weight)
            if variant != BF16:
                numbers = ladder.compare(found.contiguous(), expected)
                most = FP4_RELATIVE if variant == FP4 else 2.0**-7
                self.record.add_gate(
                    f"{name} / {variant}: relative difference from bf16", "at_most", most,
                    observed=numbers["relative"] if numbers["relative"] is not None else float(1 << 30),
                )  # fmt: skip
            flops = 2.0 * self.rows * n * k
            peak = self.peaks[FP4 if variant == FP4 else BF16]
            self.judge(name, variant, cases, timing, bytes_of(variant, self.rows, n, k), flops, peak)

    def producer(self, group: producers.Group) -> None:
        """One producer, as ``auto`` runs it here."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        one = producers.input_bytes(group.op, self.rows, self.columns)
        made = [
            producers.make_inputs(group.op, self.rows, self.columns, generator)
            for _ in range(producers.set_count(one, self.device))
        ]
        options = {}
        if group.static:
            options["decode_scale"] = torch.tensor(0.01, device=self.device)
        norm = certify.norm_of(self.device) if producers.takes(group.op, "norm") else None
        if norm is not None:
            options["norm"] = norm
        call = partial(getattr(fused, group.op), **options)
        runs_as, refused = fused.best(group.op, self.device)
        self.record.ran(f"{group.name} / {AUTO}", runs_as if norm is None else f"{runs_as}, norm {norm}")
        for implementation, why in refused.items():
            self.record.fell_back(f"{group.name} / {implementation}", implementation, why)
        timing = self.time({AUTO: call}, made)
        cases = self.enter(group.name, timing, (self.rows, producers.width_of(group.op, self.columns)))
        self.record.add_output(f"{group.name} / {AUTO}", producers.tensors_of(call(*made[0])))
        floor = producers.floor_bytes(group, norm, self.rows, self.columns)
        self.judge(group.name, AUTO, cases, timing, floor, None, None)

    def judge(self, group, variant, cases, timing, moved: int, flops: float | None, peak: float | None) -> None:
        """Floor, share and, for a variant against its baseline, the verdict."""
        case = cases[variant]
        ms = case["summary"]["median"]
        copied = self.copy["roofline"]["floor_bytes"], self.copy["summary"]["median"]
        case["roofline"] = roofline.rate(moved, ms, *copied)
        if variant != timing.baseline and self.device.type != "cpu":
            self.record.compare(case, cases[timing.baseline], cases[timing.control], BARS["kernel"], self.seed)
        by_bytes = case["roofline"]["floor_ms"]
        by_flops = 0.0 if flops is None else flops / peak / 1e9
        floor = max(by_bytes, by_flops)
        self.lines.append(
            Line(
                group, variant, ms, case["summary"]["iqr"], floor, "flops" if by_flops > by_bytes else "bytes",
                floor / ms, None if flops is None else flops / ms / 1e9, case["roofline"]["gb_per_s"],
            )
        )  # fmt: skip


def dequantiser() -> Callable | None:
    """``codes -> bf16 weight`` as ComfyUI dequantises, or None without comfy-kitchen."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    return lambda q: comfy_kitchen.dequantize_nvfp4(q.codes, q.decode_scale, q.block_scale, DTYPE)


@torch.inference_mode()
def run(
    device, rows: int = producers.H3_ROWS, columns=producers.H3_COLUMNS, rounds: int = 20, *, out_path,
    source: dict | None = None, seed: int = 0, warm_up_s: float = 0.3, between: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:  # fmt: skip
    """Measure GEMMs and producers on a device and write the record.

    Args:
        device: CUDA, or a CPU: there at most ``producers.CPU_ROWS`` rows of the small widths and one cycle of orders
            are run, and everything is labelled as no measurement.
        rows: rows of the stream.
        columns: a key of ``producers.PRESETS``.
        rounds: raised to a whole number of balanced cycles.
        out_path: the record's file; its folder must exist.
        source, seed, warm_up_s, between, progress: as in :func:`producers.run`.

    Raises:
        BenchError: numbers out of range, an unknown preset, not enough device memory.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise producers.BenchError(f"device {device.type}: only CUDA devices and the CPU are timed; choose cuda or cpu")
    if type(rows) is not int or type(rounds) is not int or rows < 1 or rounds < 1 or columns not in producers.PRESETS:
        raise producers.BenchError(
            f"rows and rounds must be whole numbers from 1 and columns one of {', '.join(producers.PRESETS)}; have "
            f"{rows!r}, {rounds!r} and {columns!r}"
        )
    on_cpu = device.type == "cpu"
    if on_cpu:
        rows, rounds, warm_up_s, columns = min(rows, producers.CPU_ROWS), 1, 0.0, "small"
    else:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        certify.ensure(device)
    widths = producers.PRESETS[columns]
    groups, apart = producers.groups_of()
    with (
        Manifest(Path(out_path), "kernel", device=device, source=source) as record,
        telemetry.Gpu(provenance.uuid_of(device)) as gpu,
        contextlib.nullcontext() if on_cpu else torch.cuda.device(device),
    ):
        if on_cpu:
            record.note("CPU, not a measurement: the host clock, few rows, small widths, the references only")
        record.set_protocol(seed=seed, telemetry="NVML, at the start" if gpu.clocks() else None)
        bench = _Bench(device, rows, widths, rounds, warm_up_s, seed, record, between)
        try:
            bench.copy_case()
            bench.peak_cases()
            todo = [
                partial(bench.gemm, name, n, k, place) for place, (name, (n, k)) in enumerate(shapes(widths).items())
            ]
            todo += [partial(bench.producer, group) for group in groups]
            for number, work in enumerate(todo):
                progress(number, len(todo))
                work()
                if not on_cpu:
                    torch.cuda.empty_cache()
            progress(len(todo), len(todo))
        except torch.cuda.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise producers.BenchError(
                f"{rows} rows do not fit: {free / 2**30:.1f} GiB are free on {torch.cuda.get_device_name(device)}; "
                "choose fewer rows, or unload models"
            ) from None
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
    return Report(bench.lines, as_text(bench.lines, record.data), record.data)


def as_text(lines: list[Line], record: dict) -> str:
    """The table and what has to be known with it."""
    packages = record["environment"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "comfy-kitchen") if packages[name])
    copy = next(case for case in record["cases"] if case["group"] == "copy")
    out = [
        f"{device_name(record)}; {versions}",
        f"timer: {record['protocol']['timer']}; copy {copy['roofline']['gb_per_s']:.0f} GB/s",
        "",
    ]
    rows, last = [HEADINGS], None
    for line in lines:
        rows.append(
            (
                line.group if line.group != last else "", line.variant, f"{line.ms:.4f}", f"{line.iqr_ms:.4f}",
                f"{line.floor_ms:.4f}", line.bound, f"{line.share:.1%}",
                "–" if line.tflops is None else f"{line.tflops:.1f}", f"{line.gb_per_s:.1f}",
            )
        )  # fmt: skip
        last = line.group
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    out += [
        "  ".join(
            cell.ljust(width) if place in (0, 1, 5) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    out += ["", *control_lines(record)]
    reasons: dict[str, list[str]] = {}
    for entry in record["dispatch"]["fallbacks"]:
        reasons.setdefault(entry["reason"], []).append(entry["what"])
    out += [f"not run: {'; '.join(what)}: {reason}" for reason, what in reasons.items()]
    failed = [gate for gate in record["gates"] if gate["result"] == "failed"]
    out += [f"FAILED: {gate['name']}: {gate['observed']}, at most {gate['threshold']}" for gate in failed]
    return "\n".join([*out, *record["notes"], f"run {record['run_id']}"])


def plot(lines: list[Line], record: dict, path) -> str | None:
    """Write each op's share of its floor as a bar chart, PNG.

    Returns:
        None, or why there is no picture (matplotlib is optional).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib"
    figure = Figure(figsize=(10, 1.6 + 0.3 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(lines))
    colours = ["#3f789e" if line.bound == "flops" else "#88aa88" for line in lines]
    axes.barh(places, [100 * line.share for line in lines], color=colours)
    axes.set_yticks(places, [f"{line.group} / {line.variant}" for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel("floor / measured, %; blue: bound by flops, green: bound by bytes")
    axes.set_title(device_name(record))
    figure.savefig(Path(path), format="png", dpi=110)
    return None
