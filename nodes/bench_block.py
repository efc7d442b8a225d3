"""``H3BW_BenchBlock``: one H3 block of real width, stock against patched, in rotation and with an A/A control."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial

import comfy.ldm.minimax.model as h3
import comfy.model_management
import torch
from comfy_api.latest import io

from ..kernels import certify
from ..kernels.measure import Manifest, ladder, producers, provenance, step_report, telemetry
from ..kernels.measure.samples import BARS
from ..kernels.measure.timing import L2_FACTOR, l2_bytes, sets_needed, time_rotating
from . import adapt, adapt_attention, output, random_model, sides
from . import run as runs
from .bench_kernels import MOST_ROWS

STOCK, ATTENTION, FUSE, PACK = VARIANTS = ("stock", "attention", "fuse", "pack")
EQUAL = ((FUSE, STOCK), (PACK, ATTENTION))  # bit for bit: they differ by the fused block alone
ROPE = 96  # of a head's dimensions


class BenchError(RuntimeError):
    """The benchmark cannot run as asked: what was asked, what there is, what to do."""


@dataclass
class Report:
    """What :func:`run` found: the lines of the table, the text for a person, and the record as it was written."""

    lines: list[step_report.Line]
    text: str
    record: dict


def inputs_of(block, rows: int, generator: torch.Generator) -> dict:
    """What a block is called with, but for the stream: seeded noise, three segments, rope of 96 dimensions."""
    device = generator.device
    linear = block.adaln_proj.linear
    dtype = torch.float32 if not block.adaln_proj.apply_silu else torch.bfloat16
    angles = torch.rand(rows, ROPE // 2, generator=generator, device=device) * 6.28
    return {
        "t_emb": torch.randn(1, linear.in_features, generator=generator, device=device).to(dtype),
        "mod_segments": producers.segments_of(rows),
        "rope_freqs": h3.rope_rotation_table(torch.cat([angles, angles], dim=1), torch.bfloat16),
    }


def calls_of(model, index: int, given: dict, emulate: str) -> dict:
    """``{variant: function of the stream}``, each as ComfyUI's forward would call the block; and each one's run record.

    Args:
        model: MODEL, loaded.
        index: of the block.
        given: of :func:`inputs_of`.
        emulate: of Fuse H3 Blocks.

    Returns:
        ``{variant: (call, Run or None)}``.
    """
    dit = adapt.h3_model(model)
    block = dit.blocks[index]

    def original(arguments):
        return {
            "img": block(
                arguments["img"], arguments["t_emb"], arguments["mod_segments"], arguments["rope_freqs"],
                transformer_options=arguments["transformer_options"],
            )
        }  # fmt: skip

    bare = sides.stock_of(model)
    fused = sides.fuse(bare, emulate=emulate)
    models = {STOCK: bare, ATTENTION: sides.attend(bare), FUSE: fused, PACK: sides.attend(fused)}
    found = {}
    for name, patcher in models.items():
        own = patcher.model_options.get("transformer_options", {})
        options = {key: own[key] for key in (runs.RUN, adapt_attention.OVERRIDE) if key in own}
        options[runs.DIT] = dit
        patch = own.get("patches_replace", {}).get("dit", {}).get(("double_block", index))
        found[name] = partial(_call, original, patch, given, options), own.get(runs.RUN)
    return found


def _call(original, patch, given: dict, options: dict, x: torch.Tensor) -> torch.Tensor:
    arguments = {"img": x, **given, "transformer_options": options}
    return (original(arguments) if patch is None else patch(arguments, {"original_block": original}))["img"]


class _Bench:
    """One run: the variants, what they gave, and the record."""

    def __init__(self, calls: dict, stream: torch.Tensor, group: str, record: Manifest):
        self.calls = {name: call for name, (call, _) in calls.items()}
        self.counts = {name: count for name, (_, count) in calls.items()}
        self.stream, self.group, self.record = stream, group, record
        self.on_cuda = stream.device.type == "cuda"
        self.peaks: dict[str, int] = {}

    def parity(self, when: str, checksums: bool) -> None:
        """Run every variant once on the same stream and compare; peaks are noted on the way."""
        ends = {}
        for name, call in self.calls.items():
            x = self.stream.clone()
            if self.on_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            ends[name] = call(x)
            if self.on_cuda:
                torch.cuda.synchronize()
                self.peaks[name] = torch.cuda.max_memory_allocated() - before
            if checksums:
                self.record.add_output(f"{self.group} / {name}", [ends[name]])
        for ours, theirs in EQUAL:
            numbers = ladder.compare(ends[ours], ends[theirs])
            self.record.add_gate(
                f"{ours} differs from {theirs}, {when}", "at_most", 0, observed=numbers["differing"],
                reason=ladder.in_words(numbers),
            )  # fmt: skip
        if checksums:
            apart = ladder.compare(ends[ATTENTION], ends[STOCK])
            self.record.note(f"attention auto against ComfyUI's default, both exact: {ladder.in_words(apart)}")

    def judge(self, timing, clocks, rows: int, hidden: int, seed: int) -> list[step_report.Line]:
        """Cases, verdicts and memory gates."""
        self.record.add_orders(self.group, timing.orders)
        self.record.set_protocol(timer=timing.timer, warm_up={self.group: timing.warm_up})
        for name, why in timing.uncaptured.items():
            self.record.fell_back(f"{self.group} / {name}", "capture in a CUDA graph", why)
        cases = {
            name: self.record.add_case(
                self.group, name, (rows, hidden), "bfloat16", samples, calls=timing.calls[name], clocks=clocks
            )
            for name, samples in timing.samples.items()
        }
        lines = []
        baseline = cases[timing.baseline]
        for name in self.calls:
            case, judged = cases[name], None
            if name != STOCK and self.on_cuda:
                judged = self.record.compare(case, baseline, cases[timing.control], BARS["block"], seed)
                self.record.add_gate(
                    f"{name}: bytes above the input, stock's are the bar", "at_most", self.peaks[STOCK],
                    observed=self.peaks[name],
                )  # fmt: skip
            median = case["summary"]["median"]
            lines.append(
                step_report.Line(
                    self.group, rows, name, median / 1000, case["summary"]["iqr"] / 1000,
                    median / baseline["summary"]["median"], self.peaks.get(name),
                    "–" if judged is None else judged["verdict"], self.ran(name),
                )
            )  # fmt: skip
        return lines

    def ran(self, name: str) -> str:
        """Enter what a variant ran; returns it in words."""
        count = self.counts[name]
        words = []
        if count is not None:
            if "FuseBlocks" in count.settings:
                words.append("fused" if count.fused and not count.fallbacks else "not fused")
            words += [f"attention {backend}" for backend in count.attention]
            for _, reason in sorted(count.fallbacks):
                self.record.fell_back(f"{self.group} / {name}", "fused", reason)
            for choice in count.attention_choices.values():
                self.record.note(f"{name}: {choice['text']}")
        told = ", ".join(words) or "ComfyUI's block"
        self.record.ran(f"{self.group} / {name}", told)
        return told


@torch.no_grad()  # not inference mode: a model made outside of it could not be moved inside
def run(
    device=None, rows: int = producers.H3_ROWS, rounds: int = 20, *, out_path, model=None, block: int = 0,
    seed: int = 0, warm_up_s: float = 0.5, source: dict | None = None,
) -> Report:  # fmt: skip
    """Measure one block and write the record.

    Args:
        device: where a random model of one block is drawn; None for ComfyUI's device.
        rows: rows of the stream; on a CPU at most ``producers.CPU_ROWS``, and the tiny model's block.
        rounds: raised to a whole number of balanced cycles of orders (ten for the five variants).
        out_path: the record's file; its folder must exist.
        model: MODEL of an H3 whose block is timed, as ComfyUI loads it; None draws one of H3's widths.
        block: its number.
        seed: of the inputs, the weights and the bootstrap.
        warm_up_s: seconds of warm-up.
        source: what the caller knows of the source, such as a commit.

    Raises:
        BenchError: numbers out of range, or too little device memory.
    """
    on_cpu = comfy.model_management.get_torch_device().type == "cpu"
    device = comfy.model_management.get_torch_device() if device is None else torch.device(device)
    if type(rows) is not int or type(rounds) is not int or rows < 1 or rounds < 1:
        raise BenchError(f"rows and rounds must be whole numbers from 1, have {rows!r} and {rounds!r}")
    if on_cpu:
        rows, rounds, warm_up_s = min(rows, producers.CPU_ROWS), 1, 0.0
    if model is None:
        model = random_model.random_h3(device, blocks=1, refiner_blocks=1, seed=seed, small=on_cpu)
    dit = adapt.h3_model(model)
    if not 0 <= block < len(dit.blocks):
        raise BenchError(f"block: the model has blocks 0 to {len(dit.blocks) - 1}, {block} was asked for")
    hidden = dit.video_patch_proj.out_features
    comfy.model_management.load_models_gpu([model], memory_required=rows * hidden * 2 * 20)
    device = model.load_device
    certify.ensure(device)
    cancel = comfy.model_management.throw_exception_if_processing_interrupted
    with (
        Manifest(out_path, "block", device=device, source=source) as record,
        telemetry.Gpu(provenance.uuid_of(device)) as gpu,
        contextlib.nullcontext() if on_cpu else torch.cuda.device(device),
    ):
        if on_cpu:
            record.note("CPU, not a measurement: the host clock, few rows, the tiny model's block")
        one, cache = rows * hidden * 2, l2_bytes(device)
        count = min(sets_needed(one, device), 8)
        record.set_protocol(
            seed=seed, telemetry="NVML, before and after" if gpu.clocks() else None,
            l2={"sets": count, "set_bytes": one, "l2_bytes": cache, "factor": L2_FACTOR},
        )  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)
        given = inputs_of(dit.blocks[block], rows, generator)
        streams = [
            torch.empty(rows, hidden, dtype=torch.bfloat16, device=device).normal_(0, 8, generator=generator)
            for _ in range(count)
        ]
        record.add_input(f"seed {seed}: stream, t_emb, rope", [streams[0], given["t_emb"], given["rope_freqs"]])
        calls = calls_of(model, block, given, "bf16" if on_cpu else "off")
        bench = _Bench(calls, streams[0], f"block {block}", record)
        for call in bench.calls.values():  # compiles and chooses; the first call is not compared
            call(streams[0].clone())
        try:
            bench.parity("before the timing", checksums=False)
            pristine = streams[0].clone()  # a block writes into its stream
            clocks = gpu.clocks()
            timing = time_rotating(
                bench.calls, rounds=rounds, device=device, baseline=STOCK, sets=[(x,) for x in streams],
                warm_up_s=warm_up_s, between=cancel,
            )  # fmt: skip
            clocks = {"before": clocks, "after": gpu.clocks()}
            bench.stream = pristine
            bench.parity("after the timing", checksums=True)
        except torch.cuda.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise BenchError(
                f"{rows} rows do not fit: {free / 2**30:.1f} GiB are free on {torch.cuda.get_device_name(device)}; "
                "choose fewer rows, or unload models"
            ) from None
        lines = bench.judge(timing, clocks if any(clocks.values()) else None, rows, hidden, seed)
        record.data["environment"] = provenance.environment()  # again: the libraries that the run has loaded
    return Report(lines, step_report.as_text(lines, record.data, (), "ms/block"), record.data)


class BenchBlock(io.ComfyNode):
    """Measure one block where it runs."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_BenchBlock",
            display_name="H3 Bench Block",
            category="H3 Blackwell/benchmarks",
            description=(
                "Times one MiniMax H3 block of real width on this GPU: ComfyUI's own, with the exact attention choice, "
                "fused, and both, in rotation with an A/A control, after checking that fusing changes no bit. Needs no "
                "weights. On a CPU it runs a tiny block and says that this is no measurement."
            ),
            search_aliases=["benchmark", "speed", "block", "h3", "nvfp4", "fused"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", optional=True, tooltip="A MiniMax H3; without one, a random block is drawn."),
                io.Int.Input(
                    "rows",
                    default=producers.H3_ROWS,
                    min=1,
                    max=MOST_ROWS,
                    tooltip="Rows of the stream; 38016 is 1344x768 with 124 frames.",
                ),
                io.Int.Input("block", default=0, min=0, max=9999, tooltip="Which block of a connected model."),
                io.Int.Input(
                    "rounds",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Raised to a whole number of balanced cycles of orders; on a CPU one cycle is run.",
                ),
                io.String.Input("filename_prefix", default="h3bw/bench_block", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The table shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: a second run is a second measurement."""
        return time.time_ns()

    @classmethod
    def execute(cls, rows, block, rounds, filename_prefix, model=None) -> io.NodeOutput:
        path, saved = output.place(filename_prefix, "json")
        found = run(None, rows, rounds, out_path=path, model=model, block=block if model is not None else 0)
        text, shown = output.with_picture(
            found.text, path, saved, lambda picture: step_report.plot(found.lines, found.record, picture)
        )
        return io.NodeOutput(text, ui=shown)
