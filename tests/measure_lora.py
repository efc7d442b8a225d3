"""What a LoRA side branch costs a fused block of H3's widths, against the block's four GEMMs in bf16.

    python tests/measure_lora.py OUT.json [--rows 38016] [--ranks 32,128] [--rounds 20] [--commit HASH]

The block is the pack's own, with W4A4 emulated so that the producers of a GPU with FP4 run, and with two parts held out
of the timing: the linears' products (each hands out one buffer) and attention (its first result is handed out again).
What is left is what the branch changes: the producers, the branch's own products and the updates. On a CPU the tiny
block runs, and it says that this is no measurement. ComfyUI is found as for the tests.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import pack_module, use_comfyui
from h3_lora import LINEARS, core_keys, factors, side_branch, write_lora
from h3_sampling import fuse

BAR = 0.06  # of the GEMMs' time
GEMMS, PLAIN = "four GEMMs, bf16", "fused block without products"
HANDED = ", no updates"  # the producers hand the branch its rows, and it multiplies them by `down`


def held_out(dit, index: int, rows: int) -> None:
    """Make the emulated linears of a block hand out a buffer each instead of multiplying."""
    import torch

    adapt = pack_module("nodes.adapt")
    ready: dict = {}

    def forward(self, x, *args, **kwargs):
        if self.linear not in ready:
            noise = torch.randn(rows, self.linear.out_features, device=dit.video_patch_proj.weight.device)
            ready[self.linear] = noise.bfloat16()
        return ready[self.linear]

    adapt._EmulatedForward.__call__ = forward


def calls_of(model, ranks: list[int], rows: int, generator) -> dict:
    """``{variant: function of the stream}``: the plain block, and one for each rank."""
    bench, attach = pack_module("nodes.bench_block"), pack_module("nodes.attach")
    runs, adapt, attention = (pack_module(f"nodes.{name}") for name in ("run", "adapt", "adapt_attention"))
    dit = adapt.h3_model(model)
    given = bench.inputs_of(dit.blocks[0], rows, generator)
    seen: dict = {}

    def attend(function, *args, **kwargs):
        if "out" not in seen:
            seen["out"] = function(*args, **kwargs)
        return seen["out"]

    def original(arguments):
        raise RuntimeError("the fused block fell back: nothing to measure")

    models = {PLAIN: fuse(model, emulate="w4a4")}
    for rank in ranks:
        name = write_lora(f"measured_{rank}.safetensors", core_keys(factors(model, rank=rank)))
        models[f"LoRA of rank {rank}"] = fuse(side_branch(model, name), emulate="w4a4")
    found = {}
    for name, patcher in models.items():
        own = patcher.model_options["transformer_options"]
        options = {runs.DIT: dit, attention.OVERRIDE: attend, runs.RUN: own[runs.RUN]}
        patch = own["patches_replace"]["dit"]["double_block", 0]

        def call(x, own=own, options=options, patch=patch):
            with attach.attached(dit, own):
                return bench._call(original, patch, given, options, x)

        found[name] = call
        if name != PLAIN:
            found[name + HANDED] = partial(without_updates, adapt.SideForward, call)
    return found


def without_updates(side, call, x):
    """A call of the block whose branches get what they need and compute `down`, and whose updates are left out."""
    before = side._add, side._parts
    side._add, side._parts = (lambda self, y, hidden: y), (lambda self, hidden: {})
    try:
        return call(x)
    finally:
        side._add, side._parts = before


def gemms(shapes, rows: int, generator):
    """The four products of a block in bf16, as one callable."""
    import torch

    made = partial(torch.randn, generator=generator, device=generator.device)
    pairs = [(made(rows, columns).bfloat16(), made(out, columns).bfloat16()) for out, columns in shapes]

    def call(x):
        for left, right in pairs:
            torch.nn.functional.linear(left, right)

    return call


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=38016)
    parser.add_argument("--ranks", default="32,128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    use_comfyui()
    import comfy.model_management as management
    import torch

    measure, certify = pack_module("kernels.measure"), pack_module("kernels.certify")
    timing, provenance = pack_module("kernels.measure.timing"), pack_module("kernels.measure.provenance")
    device = management.get_torch_device()
    on_cpu = device.type == "cpu"
    rows = min(given.rows, 64) if on_cpu else given.rows
    ranks = [int(rank) for rank in given.ranks.split(",")]
    source = {"commit": given.commit, "dirty": False} if given.commit else None
    with torch.no_grad(), measure.Manifest(given.out, "block", device=device, source=source) as record:
        if on_cpu:
            record.note("CPU, not a measurement: the host clock, few rows, the tiny model's block")
        model = pack_module("nodes.random_model").random_h3(device, blocks=1, refiner_blocks=1, small=on_cpu)
        management.load_models_gpu([model])
        certify.ensure(device)
        dit = pack_module("nodes.adapt").h3_model(model)
        generator = torch.Generator(device).manual_seed(0)
        calls = calls_of(model, ranks, rows, generator)
        shapes = [tuple(dit.blocks[0].get_submodule(name).weight.shape) for name in LINEARS]
        hidden = dit.video_patch_proj.out_features
        stream = torch.randn(rows, hidden, generator=generator, device=device).bfloat16()
        held_out(dit, 0, rows)
        record.set_protocol(seed=0, l2={"sets": 1, "set_bytes": stream.nbytes, "l2_bytes": timing.l2_bytes(device)})
        record.add_input("seed 0: stream", [stream])
        variants = {**calls, GEMMS: gemms(shapes, rows, generator)}
        taken = timing.time_rotating(
            variants, rounds=1 if on_cpu else given.rounds, device=device, baseline=PLAIN, sets=[(stream,)],
            warm_up_s=0.0 if on_cpu else 0.5,
        )  # fmt: skip
        record.set_protocol(timer=taken.timer)
        cases = pack_module("kernels.measure.producers").enter(record, "block", taken, (rows, hidden))
        for name, why in taken.uncaptured.items():
            record.fell_back(f"block / {name}", "capture in a CUDA graph", why)
        for name, call in calls.items():
            record.ran(f"block / {name}", "fused block")
            record.add_output(f"block / {name}", [call(stream.clone())])
        record.ran(f"block / {GEMMS}", "torch.nn.functional.linear")
        median = {name: case["summary"]["median"] for name, case in cases.items()}
        for rank in ranks:
            for what in ("", HANDED):
                name = f"LoRA of rank {rank}{what}"
                share = (median[name] - median[PLAIN]) / median[GEMMS]
                shown = {"reason": "CPU: not a measurement"} if on_cpu else {"observed": share}
                record.add_gate(f"{name}: share of the GEMMs", "at_most", BAR, **shown)
                print(f"{name}: {share:.2%} of the four GEMMs' time")
        record.data["environment"] = provenance.environment()
    for name, value in median.items():
        print(f"{name:32s} {value:8.3f} ms")
    return 1 if any(gate["result"] == "failed" for gate in record.data["gates"]) else 0


if __name__ == "__main__":
    sys.exit(main())
