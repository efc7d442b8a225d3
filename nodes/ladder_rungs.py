"""The rungs of the parity ladder: what is run, on which side, and what is compared.

Blocks are compared inside one forward that carries two streams, each side's own, so no block output is kept. What the
two sides are is said in ``sides``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import comfy.ops
import comfy.quant_ops
import torch

from ..kernels import certify, fused, nvfp4, parity
from ..kernels.fused import _cases
from ..kernels.measure import ladder, producers, stock
from . import adapt, report, run, sampling
from .fuse import BlockPatch, sites_on

RAGGED_ROWS = (1, 15, 16, 17, 127, 129, 300)
STEPS_CHECKSUM = 12
Cancel = Callable[[], None]


# ---------------------------------------------------------------- kernels


@torch.inference_mode()
def kernels(climb: ladder.Ladder, device: torch.device, cancel: Cancel) -> None:
    """Rung 1: the certification's awkward cases, run again, and fresh random ones against ComfyUI's chain."""
    for name, op in fused.OPS.items():
        cancel()
        for item in op.implementations:
            case = f"{name}, {item.name}, awkward values"
            refused = item.refuse(device) or certify.refusal(op, item.name, device)
            if refused is not None:
                climb.skipped(ladder.KERNELS, case, refused)
                continue
            count, wrong = 0, []
            for probe in (item.cases or op.cases or _cases.CASES[name])(device):
                if item.accepts(*probe.arguments) is None:
                    count += 1
                    why = parity.case_reason(probe, op.reference, item.run)
                    wrong += [why] if why else []
            told = wrong[0] if wrong else f"{count} cases against {oracle(op, device)}"
            numbers = {"cases": count, "failed": len(wrong)}
            climb.bounded(ladder.KERNELS, case, len(wrong), 0, numbers, told)
    randomised(climb, device, cancel)


def oracle(op, device: torch.device) -> str:
    """What the cases of an op are compared with."""
    return parity.oracle_of(device) if op.name.endswith("_nvfp4") else "the reference, every bit"


def randomised(climb: ladder.Ladder, device: torch.device, cancel: Cancel) -> None:
    """Random inputs at ragged shapes: what ``auto`` runs here against ComfyUI's chain and comfy-kitchen's quantiser."""
    quantise, backend = stock.quantiser(device)
    columns = producers.PRESETS["small" if device.type == "cpu" else producers.H3_COLUMNS]
    for group in producers.groups_of()[0]:
        case = f"{group.name}, random, {len(RAGGED_ROWS)} heights"
        if group.op.endswith("_nvfp4") and quantise is None:
            climb.skipped(ladder.KERNELS, case, f"comfy-kitchen's quantiser is not here: {backend}")
            continue
        runs_as, refused = fused.best(group.op, device)
        if device.type != "cpu" and runs_as == "reference":
            why = "; ".join(refused.values()) or "it has no kernel"
            climb.skipped(ladder.KERNELS, case, f"no kernel runs here: {why}")
            continue
        differing, elements, where = 0, 0, ""
        for seed, rows in enumerate(RAGGED_ROWS):
            cancel()
            generator = torch.Generator(device).manual_seed(1000 + seed)
            inputs = producers.make_inputs(group.op, rows, columns, generator)
            scale = nvfp4.default_decode_scale(stock.BF16_PART[group.op](*inputs)).reshape(()) if group.static else None
            options = {} if group.static is None else {"decode_scale": scale}
            twin = (inputs[0].clone(), *inputs[1:])  # an in-place op writes into the first
            expected = stock.chain(group.op, quantise, scale)(*inputs)
            count, words = difference(getattr(fused, group.op)(*twin, **options), expected)
            differing, elements = differing + count, elements + rows * producers.width_of(group.op, columns)
            where = where or (f"{rows} rows: {words}" if count else "")
        told = where or f"{runs_as} equals ComfyUI's chain in every bit ({elements:,} elements)"
        numbers = {"elements": elements, "differing": differing}
        climb.bounded(ladder.KERNELS, case, differing, 0, numbers, told)


def difference(ours, theirs) -> tuple[int, str]:
    """:func:`producers.difference` of what is no padding: comfy-kitchen leaves what it likes there.

    That ours is zero is part of the awkward cases.
    """
    return producers.difference(*(trimmed(q) if isinstance(q, nvfp4.NVFP4) else q for q in (ours, theirs)))


def trimmed(q: nvfp4.NVFP4) -> nvfp4.NVFP4:
    """The codes of the logical rows and their scales, row by row."""
    rows, columns = q.shape
    scales = nvfp4.unswizzle(q.block_scale.view(torch.uint8), rows, columns // nvfp4.BLOCK)
    return nvfp4.NVFP4(q.codes[:rows], scales.contiguous(), q.decode_scale, q.shape)


# ---------------------------------------------------------------- blocks, inside one forward


class Lockstep:
    """What the patches of one forward share: the patched side's stream, and the numbers found."""

    def __init__(self, alone: tuple[int, ...], cancel: Cancel):
        self.alone = alone
        self.cancel = cancel
        self.stream: torch.Tensor | None = None
        self.chained: dict[int, dict] = {}
        self.isolated: dict[int, dict] = {}
        self.projections: dict[int, dict[str, dict | str]] = {}


class LockstepPatch:
    """A ``double_block`` replacement that runs stock and the patched block on streams of their own and compares."""

    def __init__(self, index: int, last: bool, patched, stock_side, shared: Lockstep):
        self.index, self.last, self.patched, self.stock_side, self.shared = index, last, patched, stock_side, shared

    def __call__(self, arguments: dict, extra: dict) -> dict:
        """ComfyUI's calling convention; hands stock's output on."""
        shared, x = self.shared, arguments["img"]
        shared.cancel()
        if self.index == 0:
            shared.stream = x.clone()
        isolated = None
        if self.index in shared.alone:
            isolated = self._run(self.patched, {**arguments, "img": x.clone()}, extra)
            options = arguments["transformer_options"]
            block = options[run.DIT].blocks[self.index]
            shared.projections[self.index] = projections(block, arguments, extra, self.patched.sites)
        chained = self._run(self.patched, {**arguments, "img": shared.stream}, extra)
        # Stock's own calls are not counted as this pack's.
        quiet = {key: value for key, value in arguments["transformer_options"].items() if key != run.RUN}
        expected = self._run(self.stock_side, {**arguments, "transformer_options": quiet}, extra)
        shared.chained[self.index] = ladder.compare(chained, expected)
        if isolated is not None:
            shared.isolated[self.index] = ladder.compare(isolated, expected)
        shared.stream = None if self.last else chained
        return {"img": expected}

    @staticmethod
    def _run(patch, arguments: dict, extra: dict) -> torch.Tensor:
        return (extra["original_block"](arguments) if patch is None else patch(arguments, extra))["img"]


def blocks(climb: ladder.Ladder, stock_side, patched, positive, latent, case: str, cancel: Cancel) -> str | None:
    """Rungs 2 to 4, in one model evaluation.

    Returns:
        None, or why no block ran fused, and then what follows would compare stock with itself.
    """
    count = len(adapt.h3_model(patched).blocks)
    chosen = tuple(sorted({0, count // 2, count - 1}))
    shared = Lockstep(chosen, cancel)
    both = patched.clone()
    table = patched.model_options["transformer_options"]["patches_replace"]["dit"]
    theirs = stock_side.model_options.get("transformer_options", {}).get("patches_replace", {}).get("dit", {})
    foreign = [index for index in range(count) if not isinstance(unmarked(table, index), BlockPatch)]
    if foreign:
        reason = f"a later node owns {len(foreign)} blocks, the first is {foreign[0]}; put Fuse H3 Blocks after it"
        for rung in (ladder.PROJECTIONS, ladder.BLOCKS, ladder.ALL_BLOCKS):
            climb.skipped(rung, case, reason)
        return reason
    for index in range(count):
        patch = LockstepPatch(
            index, index == count - 1, unmarked(table, index), theirs.get(("double_block", index)), shared
        )
        both.set_model_patch_replace(patch, "dit", "double_block", index)
    sampling.sample(both, positive, latent, 1)
    record = run.find(both)
    ran = {index for index in record.fused if not any(index == other for other, _ in record.fallbacks)}
    reason = None if ran else f"no block ran fused: {record.headline()}"
    projected(climb, shared.projections, case)
    if reason is not None:
        climb.skipped(ladder.BLOCKS, case, reason)
        climb.skipped(ladder.ALL_BLOCKS, case, reason)
        return reason
    note = None if len(ran) == count else record.headline()
    climb.compared(ladder.BLOCKS, case, *first_of(shared.isolated), note=note)
    numbers, where = first_of(shared.chained)
    climb.compared(ladder.ALL_BLOCKS, case, {**numbers, "fused": len(ran), "blocks": count}, where, note)
    return None


def unmarked(table: dict, index: int):
    """The patch of a block below the attention node's mark."""
    return report.unmarked(table.get(("double_block", index)))


def first_of(found: dict[int, dict]) -> tuple[dict, str]:
    """The numbers of the first block that differs, or the sum of the equal ones; and where."""
    for index, numbers in sorted(found.items()):
        if numbers["differing"]:
            return {**numbers, "block": index}, f"block {index} is the first that differs"
    some = next(iter(found.values()))
    return {**some, "elements": sum(numbers["elements"] for numbers in found.values())}, ""


def projected(climb: ladder.Ladder, found: dict[int, dict[str, dict | str]], case: str) -> None:
    """Enter rung 2: one line a linear, over the blocks looked at."""
    for name in adapt.LINEARS:
        of_this = {block: linears[name] for block, linears in found.items()}
        skipped = {block: why for block, why in of_this.items() if isinstance(why, str)}
        run_here = {block: numbers for block, numbers in of_this.items() if block not in skipped}
        label = f"{case}, {name}"
        if not run_here:
            climb.skipped(ladder.PROJECTIONS, label, "; ".join(dict.fromkeys(skipped.values())))
            continue
        numbers = {
            key: sum(found[key] for found in run_here.values())
            for key in ("elements", "codes", "products", "differing")
        }
        wrong = next((f"block {b}: {n['words']}" for b, n in sorted(run_here.items()) if n["differing"]), None)
        which = ", ".join(map(str, sorted(run_here)))
        told = wrong or f"codes, scales and products of blocks {which} equal ComfyUI's, bit for bit"
        climb.bounded(ladder.PROJECTIONS, label, numbers["differing"], 0, numbers, told)


def projections(block, arguments: dict, extra: dict, sites: adapt.Sites) -> dict[str, dict | str]:
    """Our producers on what stock's own code hands to the producers' places, for the four linears of a block.

    Returns:
        Linear -> numbers, or the reason why nothing was compared.
    """
    kept, handles = {}, []

    def keep(name):
        def hook(module, taken, *given):
            kept[name] = (given[0] if given else taken[0]).detach().clone()

        return hook

    for name in adapt.LINEARS:
        handles.append(block.get_submodule(name).register_forward_pre_hook(keep(name)))
    handles += [norm.register_forward_pre_hook(keep(norm)) for norm in (block.norm1, block.norm2)]
    handles.append(block.mlp.fc1.register_forward_hook(keep("gate_up")))
    quiet = {key: value for key, value in arguments["transformer_options"].items() if key != run.RUN}
    try:
        extra["original_block"]({**arguments, "img": arguments["img"].clone(), "transformer_options": quiet})
    finally:
        for handle in handles:
            handle.remove()
    device, segments = arguments["img"].device, arguments["mod_segments"]
    shift1, scale1, _, shift2, scale2, _ = block.adaln_proj(arguments["t_emb"])
    sites, refused = sites_on(device, sites)

    def modulated(norm, scale, shift):
        def make(static):
            with adapt.cast_weight(norm, kept[norm]) as weight:
                return fused.norm_modulate_nvfp4(
                    kept[norm], weight, norm.eps, scale, shift, segments, decode_scale=static, norm=sites.norm
                )

        return make

    makers = {
        "attn.qkv_proj": ("modulate", modulated(block.norm1, scale1, shift1)),
        "attn.out_proj": (
            "attention_output", lambda static: fused.rows_nvfp4(kept["attn.out_proj"], decode_scale=static)
        ),
        "mlp.fc1": ("modulate", modulated(block.norm2, scale2, shift2)),
        "mlp.fc2": ("swiglu", lambda static: fused.swiglu_nvfp4(kept["gate_up"], decode_scale=static)),
    }  # fmt: skip
    found: dict[str, dict | str] = {}
    for name, (site, make) in makers.items():
        linear = block.get_submodule(name)
        reason = adapt.weight_reason(linear) or refused.get(site)
        if reason is None and not isinstance(kept.get(name), torch.Tensor):
            reason = "this ComfyUI hands it its input in another way"
        found[name] = reason if reason is not None else one_projection(block, linear, make, kept[name])
    return found


def one_projection(block, linear, make: Callable, rows: torch.Tensor) -> dict:
    """Codes and product of one linear: from our producer, and from ComfyUI's quantiser on the same rows."""
    rows = rows.reshape(-1, rows.shape[-1])
    static = adapt.input_scale(linear, rows.device)
    ours = make(static)
    theirs = comfy.quant_ops.QuantizedTensor.from_float(rows, adapt.NVFP4_LAYOUT, scale=static)
    parameters = theirs._params
    expected = nvfp4.NVFP4(theirs._qdata, parameters.block_scale, parameters.scale.reshape(()), tuple(rows.shape))
    codes, words = difference(ours, expected)
    comfy.ops.run_every_op()
    native = adapt.fp4_reason(linear) is None
    with contextlib.nullcontext() if native else adapt.emulating_w4a4(block):
        product = ladder.compare(linear(adapt.quantized_tensor(ours, rows.dtype)), linear(rows))
    if product["differing"]:
        words = f"{words}; product: {ladder.in_words(product)}"
    return {
        "elements": rows.numel(), "codes": codes, "products": product["differing"], "words": words,
        "differing": codes + product["differing"],
    }  # fmt: skip


# ---------------------------------------------------------------- sampling runs


def trajectory(model, positive, latent, steps: int) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a run under its name: x and x0 of each step, and the final latent."""
    seen: list[tuple[str, torch.Tensor]] = []

    def on_step(step, x, x0):
        for what, value in (("x", x), ("x0", x0)):
            for name, part in zip(("video", "audio"), sampling.parts(value), strict=False):
                seen.append((f"step {step + 1}, {what}, {name}", part.detach().clone()))

    out = sampling.sample(model, positive, latent, steps, on_step=on_step)
    final = [part.clone() for part in report.streams(out)]
    return seen + [(f"final latent, {name}", part) for name, part in zip(("video", "audio"), final, strict=False)]


def compared(ours: list, theirs: list) -> tuple[dict, str]:
    """Numbers of the first tensor of two runs that differs, or of all of them; and its name."""
    elements = 0
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        numbers = ladder.compare(a, b)
        elements += numbers["elements"]
        if numbers["differing"]:
            return numbers, f"{name} is the first that differs"
    return {"elements": elements, "differing": 0, "max_abs": 0.0, "relative": 0.0, "sqnr_db": None}, ""


def repeats(climb: ladder.Ladder, stock_side, positive, latent, case: str) -> None:
    """Rung 0. The first sampling of a process is thrown away.

    On an H200 it differed from all later ones in stock alone: one element in the first attention of the text refiner.
    """
    sampling.sample(stock_side, positive, latent, 1)
    runs = [trajectory(stock_side, positive, latent, 2) for _ in range(2)]
    numbers, where = compared(*runs)
    moved = any(float(part.float().std()) > 0 for _, part in runs[0])
    climb.compared(ladder.REPEATS, case, numbers, where, None if moved else "but nothing moves: the latents are flat")


def sampled(climb: ladder.Ladder, stock_side, patched, positive, latent, case: str, cancel: Cancel) -> None:
    """Rungs 5 and 6."""
    cancel()
    theirs = trajectory(stock_side, positive, latent, 2)
    ours = trajectory(patched, positive, latent, 2)
    climb.compared(ladder.TWO_STEPS, case, *compared(ours, theirs))
    cancel()
    ends = {}
    for side, model in (("stock", stock_side), ("patched", patched)):
        ends[side] = report.streams(sampling.sample(model, positive, latent, STEPS_CHECKSUM))
        digest = climb.record.add_output(f"{case}: {STEPS_CHECKSUM} steps, {side}", ends[side])
        ends[f"{side} sha256"] = digest
    named = [list(zip(("video", "audio"), ends[side], strict=True)) for side in ("patched", "stock")]
    numbers, where = compared(*named)
    finite = all(bool(torch.isfinite(part).all()) for part in ends["stock"])
    note = f"SHA-256 {ends['patched sha256'][:16]}" if finite else "but stock's latent is not finite"
    climb.compared(ladder.CHECKSUMS, case, numbers, where, note)


def peak(climb: ladder.Ladder, stock_side, patched, positive, latent, case: str) -> None:
    """Rung 7: peak memory of a run, and a profile of one step."""
    device = stock_side.load_device
    if device.type != "cuda":
        climb.skipped(
            ladder.PEAK, case, f"{device.type} has no device memory of torch's to watch and no device timeline"
        )
        return
    peaks, profiles = {}, {}
    for side, model in (("stock", stock_side), ("patched", patched)):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        sampling.sample(model, positive, latent, 2)
        peaks[side] = torch.cuda.max_memory_allocated(device)
        profiles[side] = profile(model, positive, latent)
    told = ", ".join(f"{side} {value / 2**20:,.1f} MiB" for side, value in peaks.items())
    numbers = {f"{side}_bytes": value for side, value in peaks.items()} | {"profiles": profiles}
    climb.bounded(ladder.PEAK, f"{case}, memory", peaks["patched"], peaks["stock"], numbers, f"peak of {told}")
    for side, found in profiles.items():
        climb.record.note(f"profile of one step, {case}, {side}: {found}")


def profile(model, positive, latent) -> str:
    """Device time and launches of one evaluation, the five longest kernels, in words; or why there is no profile."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            sampling.sample(model, positive, latent, 1)
            torch.cuda.synchronize(model.load_device)
    except RuntimeError as error:  # no CUPTI here, or another profiler holds it
        return f"skipped, the profiler does not run here: {type(error).__name__}"
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / 1000
    longest = "; ".join(f"{e.key[:50]} x{e.count} {e.self_device_time_total / 1000:.2f} ms" for e in events[:5])
    return f"{total:.2f} ms on the device in {sum(event.count for event in events)} launches: {longest}"
