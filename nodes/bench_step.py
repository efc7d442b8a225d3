"""``H3BW_BenchStep``: seconds per sampling step, stock against this pack, on one graph, seed and loader in one run.

Without a MODEL a full-size H3 with random weights is drawn on the GPU. A script runs it as::

    from <pack>.nodes import bench_step
    print(bench_step.run(out_path="record.json").text)
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io

from ..kernels import attention as attention_kernels
from ..kernels import certify
from ..kernels.measure import Manifest, balanced_orders, ladder, predictions, provenance, step_report, telemetry
from ..kernels.measure.samples import BARS, CONTROL
from ..kernels.measure.timing import HOST
from . import adapt, adapt_attention, output, random_model, report, sampling, selftest, sides
from . import run as runs

EVENTS = "CUDA events at the sampler's callbacks, the first step of each pass left out"
SIZES = {
    "1344x768, 124 frames": ((1344, 768, 124),),
    "864x480, 124 frames": ((864, 480, 124),),
    "320x192, 22 frames": ((320, 192, 22),),
    "1344x768, 362 frames": ((1344, 768, 362),),
    "all four": ((320, 192, 22), (864, 480, 124), (1344, 768, 124), (1344, 768, 362)),
}
STOCK, PACK, ATTENTION, FUSE, WIRED = "stock", "pack", "attention", "fuse", "as wired"
VARIANTS = {"stock, pack": (STOCK, PACK), "stock, pack, each half alone": (STOCK, PACK, ATTENTION, FUSE)}
CPU_SIZE = (64, 64, 22)
TAU = 1.3
SMALL_BYTES = 1 << 20  # a run's own flags take 512 bytes
# What the project promised for its H200 at 1344x768x124, set before any run: (with fa4, without).
PROMISED_ROWS, PROMISED = 38000, {PACK: (0.64, 0.70), "sol": (0.42, 0.42)}


class BenchError(RuntimeError):
    """The benchmark cannot run as asked: what was asked, what there is, what to do."""


@dataclass
class Report:
    """What :func:`run` found: the lines of the table, the text for a person, and the record as it was written."""

    lines: list[step_report.Line]
    text: str
    record: dict


def patched(model, name: str, tau: float, emulate: str):
    """The MODEL of one variant.

    Args:
        model: as connected.
        name: ``stock``; ``pack`` (Fuse H3 Blocks and attention auto, both with their defaults); ``attention`` or
            ``fuse`` (one of the two); ``as wired``; or an attention backend's name, with the fused blocks.
        tau: of sparse backends; none of their steps is kept dense.
        emulate: of Fuse H3 Blocks.
    """
    if name == WIRED:
        return model
    bare = sides.stock_of(model)
    if name == STOCK:
        return bare
    if name == ATTENTION:
        return sides.attend(bare)
    fused = sides.fuse(bare, emulate=emulate)
    if name == FUSE:
        return fused
    if name == PACK:
        return sides.attend(fused)
    if name not in attention_kernels.names():
        known = ", ".join((STOCK, PACK, ATTENTION, FUSE, WIRED, *attention_kernels.names()))
        raise BenchError(f"variants: {name!r} asked for; choose of {known}")
    return sides.attend(fused, name, tau=tau, dense_steps=0.0)


class _Pass:
    """One sampling run, timed at its callbacks."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list = []

    def __call__(self, step, x, x0) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def ms_per_step(self) -> float:
        """From the end of the first evaluation to the end of the last one."""
        first, last, count = self.marks[0], self.marks[-1], len(self.marks) - 1
        if self.device.type == "cuda":
            last.synchronize()
            return first.elapsed_time(last) / count
        return (last - first) * 1000 / count


class _Bench:
    """One run: what every size needs."""

    def __init__(self, model, names, steps, rounds, tau, seed, record, progress):
        self.model, self.names, self.steps, self.rounds, self.tau, self.seed = model, names, steps, rounds, tau, seed
        self.record, self.progress = record, progress
        self.device = model.load_device
        self.on_cuda = self.device.type == "cuda"
        self.lines: list[step_report.Line] = []
        self.hidden = adapt.h3_model(model).video_patch_proj.out_features
        self.cancel = comfy.model_management.throw_exception_if_processing_interrupted

    def size(self, size: tuple[int, int, int], gpu: telemetry.Gpu) -> None:
        """Time every variant at one size."""
        positive, latent = sampling.prompt(self.model, "T2VA", *size, seed=self.seed)
        group = "{}x{}x{}".format(*size)
        rows = sampling.rows_of(size[0], size[1], selftest.snap_frames(size[2]))
        emulate = "off" if self.on_cuda else "bf16"
        models = {name: patched(self.model, name, self.tau, emulate) for name in self.names}
        control = STOCK + CONTROL
        models[control] = models[STOCK]
        self.record.add_input(f"{group}: conditioning and latent", [positive[0][0], *sampling.parts(latent["samples"])])
        for name in self.names:  # compiles, certifies, lets auto choose; on an H200 the first one differs from the rest
            self.cancel()
            sampling.sample(models[name], positive, latent, 1, seed=self.seed, sampler="euler")
        orders = balanced_orders(list(models))
        samples: dict[str, list[float]] = {name: [] for name in models}
        peaks: dict[str, int] = {}
        ends: dict[str, list] = {}
        ran = []
        before = gpu.clocks()
        for number in range(self.rounds):
            order = orders[number % len(orders)]
            for name in order:
                self.cancel()
                timed = _Pass(self.device)
                if self.on_cuda:
                    torch.cuda.reset_peak_memory_stats(self.device)
                out = sampling.sample(
                    models[name], positive, latent, self.steps + 1, seed=self.seed, sampler="euler", on_step=timed
                )
                samples[name].append(timed.ms_per_step())
                if self.on_cuda:
                    held = torch.cuda.max_memory_allocated(self.device)
                    peaks[name] = max(held, peaks.get(name, 0))
                ends.setdefault(name, []).append([part.cpu() for part in report.streams(out)])
            ran.append(order)
            self.progress()
        told = {"before": before, "after": gpu.clocks()}
        self.record.add_orders(group, ran)
        clocks = told if any(told.values()) else None
        cases = {
            name: self.record.add_case(
                group, name, (rows, self.hidden), "bfloat16", values, calls=self.steps, clocks=clocks
            )
            for name, values in samples.items()
        }
        for name in self.names:
            self.record.add_output(f"{group} / {name}", ends[name][-1])
        self._parity(group, ends)
        for name in self.names:
            self._judge(group, rows, name, cases, control, peaks, self._what_ran(group, name, models[name]))

    def _parity(self, group: str, ends: dict[str, list]) -> None:
        """Every variant repeats itself, and the fused blocks change no bit, with either attention."""

        def differing(a, b):
            return sum(ladder.compare(x, y)["differing"] for x, y in zip(a, b, strict=True))

        for name in self.names:
            if len(ends[name]) > 1:
                self.record.add_gate(
                    f"{group} / {name}: first and last pass differ in", "at_most", 0,
                    observed=differing(ends[name][0], ends[name][-1]),
                )  # fmt: skip
        for ours, theirs in ((FUSE, STOCK), (PACK, ATTENTION)):
            if ours in ends and theirs in ends:
                self.record.add_gate(
                    f"{group} / {ours}: latent differs from {theirs}'s in", "at_most", 0,
                    observed=differing(ends[ours][-1], ends[theirs][-1]),
                )  # fmt: skip

    def _what_ran(self, group: str, name: str, model) -> str:
        """Enter a variant's run record; returns it in a few words."""
        found = runs.find(model)
        if found is None:
            implementation = f"ComfyUI's blocks, {adapt_attention.default_name()}"
            self.record.ran(f"{group} / {name}", implementation)
            return implementation
        fused = sorted(found.fused)
        self.record.ran(f"{group} / {name}: blocks", f"{len(fused)} of {found.blocks} fused")
        for backend, count in found.attention.items():
            self.record.ran(f"{group} / {name}: attention", backend, count)
        for (block, reason), _ in sorted(found.fallbacks.items()):
            self.record.fell_back(f"{group} / {name}: block {block}", "fused", reason)
        for reason in found.attention_handed_on:
            self.record.fell_back(f"{group} / {name}: attention", "the backend asked for", reason)
        for choice in found.attention_choices.values():
            self.record.note(f"{group} / {name}: {choice['text']}")
        words = [f"{len(fused)}/{found.blocks} fused"] if "FuseBlocks" in found.settings else []
        words += [f"attention {backend}" for backend in found.attention]
        return ", ".join(words)

    def _judge(self, group, rows, name, cases, control, peaks, ran: str) -> None:
        case, baseline, judged = cases[name], cases[STOCK], None
        share = case["summary"]["median"] / baseline["summary"]["median"]
        if name != STOCK:
            most = self._promised(rows, name)
            if self.on_cuda:
                judged = self.record.compare(case, baseline, cases[control], BARS["step"], self.seed)
                self.record.add_gate(f"{group} / {name}: time over stock's", "at_most", most, observed=share)
                self.record.add_gate(
                    f"{group} / {name}: peak bytes, stock's and a MiB are the bar", "at_most",
                    peaks[STOCK] + SMALL_BYTES, observed=peaks[name],
                )  # fmt: skip
            else:
                why = "a CPU is not measured"
                self.record.add_gate(f"{group} / {name}: time over stock's", "at_most", most, reason=why)
        if name in peaks:
            self.record.note(f"{group} / {name}: peak {peaks[name]:,} bytes")
        self.lines.append(
            step_report.Line(
                group, rows, name, case["summary"]["median"] / 1000, case["summary"]["iqr"] / 1000, share,
                peaks.get(name), "–" if judged is None else judged["verdict"], ran,
            )
        )  # fmt: skip

    def _promised(self, rows: int, name: str) -> float:
        """The bar: the project's own on the GPU and at the size it was set for, else no slower than stock."""
        on_h200 = self.on_cuda and "H200" in torch.cuda.get_device_name(self.device)
        if not on_h200 or name not in PROMISED or not 0.95 * PROMISED_ROWS < rows < 1.05 * PROMISED_ROWS:
            return 1.0
        reasons = {backend: reason for backend, _, reason in attention_kernels.list_backends(self.device)}
        with_fa4, without = PROMISED[name]
        return with_fa4 if reasons.get("fa4", "absent") is None else without


@torch.no_grad()
def run(
    device=None, sizes=((1344, 768, 124),), variants=(STOCK, PACK), steps: int = 2, out_path=None, *, model=None,
    rounds: int = 3, tau: float = TAU, seed: int = 0, blocks: int = random_model.BLOCKS, source: dict | None = None,
    progress=lambda done, total: None,
) -> Report:  # fmt: skip
    """Measure seconds per step and write the record.

    Args:
        device: where a random model is drawn; None for ComfyUI's device. A model runs where ComfyUI runs it.
        sizes: ``(width, height, frames)`` each.
        variants: names that :func:`patched` knows; ``stock`` is added, and runs a second time as the A/A control.
        steps: measured steps of a pass; one more runs before them and is left out.
        out_path: the record's file; its folder must exist.
        model: MODEL of an H3; None draws one of full size with random weights (12.6 GB).
        rounds: every variant runs one pass a round. ``2 * (variants + 1)`` make a whole cycle of orders.
        tau: of sparse attention backends asked for by name.
        seed: of prompt, noise, weights and bootstrap.
        blocks: of the random model.
        source: what the caller knows of the source, such as a commit.
        progress: called with rounds done and rounds in all.

    On a CPU the tiny model takes one pass at 64x64, labelled as no measurement.

    Raises:
        BenchError: numbers out of range, an unknown variant, not enough device memory.
        AttentionRefused: an attention backend asked for by name that does not run here.
    """
    if out_path is None:
        raise BenchError("out_path: say where the record is to be written")
    if type(steps) is not int or type(rounds) is not int or steps < 1 or rounds < 1 or not sizes or not variants:
        raise BenchError(f"steps and rounds must be whole numbers from 1, have {steps!r} and {rounds!r}")
    device = comfy.model_management.get_torch_device() if device is None else torch.device(device)
    on_cpu = comfy.model_management.get_torch_device().type == "cpu"
    if on_cpu:
        sizes, steps, rounds = (CPU_SIZE,), 1, 1
    names = list(dict.fromkeys((STOCK, *variants)))
    drawn = model is None
    if drawn:
        model = random_h3(device, blocks, seed, on_cpu)
    adapt.h3_model(model)
    total, done = len(sizes) * rounds, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    with (
        Manifest(out_path, "step", device=model.load_device, source=source) as record,
        telemetry.Gpu(provenance.uuid_of(model.load_device)) as gpu,
        contextlib.nullcontext() if on_cpu else torch.cuda.device(model.load_device),
    ):
        record.set_protocol(
            timer=HOST if on_cpu else EVENTS, seed=seed, l2="not flushed: a step moves many times its size",
            warm_up={"passes": 1, "steps_left_out_of_each_pass": 1},
            telemetry="NVML, before and after each size" if gpu.clocks() else None,
        )  # fmt: skip
        if on_cpu:
            record.note("CPU, not a measurement: the tiny model, one pass of two steps")
        record.note("model: random weights, full widths" if drawn and not on_cpu else "model: tiny" if drawn else
                    "model: as connected")  # fmt: skip
        certify.ensure(model.load_device)
        bench = _Bench(model, names, steps, rounds, tau, seed, record, advance)
        for size in sizes:
            bench.size(tuple(size), gpu)
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
    rows = bench.lines[-1].rows if on_cpu or not bench.lines else max(line.rows for line in bench.lines)
    rows = 38016 if on_cpu else rows
    told = predictions.as_lines(predictions.table(rows, [record.data]), rows)
    return Report(bench.lines, step_report.as_text(bench.lines, record.data, told), record.data)


def random_h3(device: torch.device, blocks: int, seed: int, small: bool):
    """The random model; on a CPU the tiny one."""
    if small:
        return random_model.random_h3("cpu", blocks=3, seed=seed, small=True)
    needed = int(random_model.GIB_OF_FULL_SIZE * 2**30 * blocks / random_model.BLOCKS) + (2 << 30)
    comfy.model_management.free_memory(needed, device)
    comfy.model_management.soft_empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free + cached < needed:
        raise BenchError(
            f"a random H3 of {blocks} blocks needs {needed / 2**30:.1f} GiB to be drawn on "
            f"{torch.cuda.get_device_name(device)}, {free / 2**30:.1f} GiB are free; connect a model, which ComfyUI "
            "can offload, or close what holds the memory"
        )
    return random_model.random_h3(device, blocks=blocks, seed=seed)


class BenchStep(io.ComfyNode):
    """Measure whole sampling steps where it runs."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_BenchStep",
            display_name="H3 Bench Step",
            category="H3 Blackwell/benchmarks",
            description=(
                "Seconds per sampling step of stock ComfyUI, with its default attention, against this pack with its "
                "defaults: same model, graph and seed, in rotation, with peak memory and what really ran. Needs no "
                "weights: without a model it draws a full-size MiniMax H3 on the GPU (12.6 GB). Shows predictions for "
                "GPUs that were not measured. On a CPU the tiny model runs, and it says that this is no measurement."
            ),
            search_aliases=["benchmark", "speed", "h3", "nvfp4", "seconds", "step", "prediction"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", optional=True, tooltip="A MiniMax H3; without one, random weights are drawn."),
                io.Combo.Input(
                    "size",
                    options=list(SIZES),
                    default=next(iter(SIZES)),
                    tooltip="What is sampled: about 38,000, 15,000, 500 and 109,000 rows. On a CPU always 64x64.",
                ),
                io.Combo.Input(
                    "variants",
                    options=list(VARIANTS),
                    default=next(iter(VARIANTS)),
                    tooltip="pack: Fuse H3 Blocks and attention auto. Each half alone: one of the two.",
                ),
                io.Combo.Input(
                    "also_attention",
                    options=["none", *attention_kernels.names()],
                    default="none",
                    tooltip="Also the fused blocks with this backend by name; approximate ones say nothing of quality.",
                ),
                io.Float.Input("tau", default=TAU, min=0.0, max=10.0, step=0.05, tooltip="Of sol: how sparse it is."),
                io.Int.Input("steps", default=2, min=1, max=100, tooltip="Measured steps of a pass; one more is not."),
                io.Int.Input("rounds", default=3, min=1, max=100, tooltip="Each variant runs one pass a round."),
                io.String.Input("filename_prefix", default="h3bw/bench_step", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second measurement."""
        return time.time_ns()

    @classmethod
    def execute(cls, size, variants, also_attention, tau, steps, rounds, filename_prefix, model=None) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        names = [*VARIANTS[variants], *([] if also_attention == "none" else [also_attention])]
        if model is not None and runs.find_settings(model):
            names.append(WIRED)
        bar = comfy.utils.ProgressBar(1)
        found = run(
            None, SIZES[size], names, steps, path, model=model, rounds=rounds, tau=tau,
            progress=lambda done, total: bar.update_absolute(done, total),
        )  # fmt: skip
        text, shown = output.with_picture(
            found.text, path, saved, lambda picture: step_report.plot(found.lines, found.record, picture)
        )
        return io.NodeOutput(text, ui=shown)
