"""How fast a checkpoint is loaded: ours against the safetensors library and ComfyUI, from the page cache.

    python -m kernels.measure.load_bench --device cuda:0 --file big.safetensors --record load.json

Every loader runs once a round in balanced orders, after one untimed run each; before each run the tensors of the last
one are dropped and torch's cached blocks given back, so that everybody pays for the allocation. The clock is the
host's, around the call and a synchronisation of the device: a load is host work, so here it is the measurement. The
file is read once before, and stays in the page cache where memory allows: what is compared is software, not disks.

On a CPU a plain sequential read of the file, through one buffer of 8 MiB and into one block of memory, runs with them.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from .. import nvfp4
from ..checkpoint import StreamWriter, load, pieces, read_header, staging, tiny_h3
from ..checkpoint.quantize import LINEARS
from ..checkpoint.writer import NVFP4_MARKER, marker_tensor
from .manifest import Manifest
from .samples import balanced_orders

FULL = {"hidden": 5376, "inner": 7168, "ffn": 14336, "text": 5120, "blocks": 50, "refiner": 2}
"""H3's sizes; the pruned NVFP4 file made of them has 12.6 GB."""
OURS, LIBRARY, COMFY = "direct", "safetensors load_file", "ComfyUI load_torch_file"
SEQUENTIAL, WHOLE = "sequential read, one 8 MiB buffer", "sequential read() into memory"
SWEEP = ((4, 8), (8, 4), (8, 8), (12, 4), (12, 8), (12, 16), (16, 8))
"""(threads, MiB a chunk) of the staged load, for choosing its defaults."""


def synthetic_kinds(sizes: dict[str, int] = FULL) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every tensor of a pruned NVFP4 H3, from the tiny one with its sizes replaced."""
    tiny, _ = tiny_h3(quantise=False, hidden=256, heads=3, head_dim=128, ffn=640, blocks=1, refiner_blocks=1)
    h, inner, ffn = sizes["hidden"], sizes["inner"], sizes["ffn"]
    # every size of that tiny model is another number, so each can be told from the rest
    real = {256: h, 384: inner, 1152: 3 * inner, 640: ffn, 1280: 2 * ffn, 64: sizes["text"], 4608: 18 * h, 512: 2 * h}
    repeats = {"blocks.0.": sizes["blocks"], "token_refiner.blocks.0.": sizes["refiner"]}
    kinds = {}
    for name, tensor in tiny.items():
        shape = tuple(real.get(size, size) for size in tensor.shape)
        start = next((start for start in repeats if name.startswith(start)), None)
        for index in range(1 if start is None else repeats[start]):
            own = name if start is None else start[:-2] + f"{index}." + name[len(start) :]
            layer = own.removesuffix(".weight")
            if start == "blocks.0." and layer.endswith(LINEARS):
                kinds[own] = (torch.uint8, nvfp4.code_shape(shape))
                kinds[f"{own}_scale"] = (torch.float8_e4m3fn, nvfp4.scale_shape(shape))
                kinds[f"{own}_scale_2"] = (torch.float32, ())
                kinds[f"{layer}.comfy_quant"] = (torch.uint8, (len(NVFP4_MARKER),))
            else:
                kinds[own] = (tensor.dtype, shape)
    return kinds


def write_synthetic(path, sizes: dict[str, int] = FULL, device: str | torch.device = "cpu", seed: int = 0) -> None:
    """Write such a file with random weights, one tensor at a time; a GPU makes the numbers quickly."""
    generator = torch.Generator(device).manual_seed(seed)
    kinds = synthetic_kinds(sizes)
    with StreamWriter(path, kinds, {"format": "pt", "model": f"synthetic MiniMax H3, seed {seed}"}) as out:
        for name in out.order:
            dtype, shape = kinds[name]
            if name.endswith(".comfy_quant"):
                tensor = marker_tensor(NVFP4_MARKER)
            elif dtype == torch.uint8:
                tensor = torch.randint(0, 256, shape, dtype=dtype, generator=generator, device=device)
            elif dtype == torch.float8_e4m3fn:
                raw = torch.randint(0x20, 0x70, shape, dtype=torch.uint8, generator=generator, device=device)
                tensor = raw.view(dtype)
            elif shape == ():
                tensor = torch.tensor(1e-4)
            else:
                tensor = (torch.randn(shape, generator=generator, device=device) * 0.02).to(dtype)
            out.put(name, tensor.cpu())


def run(
    device: str | torch.device,
    path: str | os.PathLike,
    out_path: str | os.PathLike,
    *,
    rounds: int = 8,
    sizes: dict[str, int] = FULL,
    comfy: Callable[[str], dict[str, torch.Tensor]] | None = None,
    sweep: bool = False,
    between: Callable[[], None] | None = None,
) -> dict:
    """Compare the loaders on one file and write a record (``run-manifest/1``, kind load).

    Args:
        device: where the tensors go.
        path: the file; where there is none, a synthetic H3 of `sizes` is written and stays.
        out_path: the record.
        rounds: at least this many, raised to whole balanced cycles.
        comfy: ComfyUI's loader, ``path -> tensors on the device``; this package does not know ComfyUI.
        sweep: also time the staged load with other numbers of threads and chunk sizes (CUDA only).
        between: called before every run; may raise to stop.

    Returns:
        The record. Its gates: equal bytes; at least as fast as the faster of the others (on a CPU 0.9 times the
        sequential read); host memory.
    """
    device, path = torch.device(device), os.fspath(path)
    if not os.path.exists(path):
        write_synthetic(path, sizes, device)
    header = read_header(path)
    total = header.file_bytes - header.data_offset
    loaders: dict[str, Callable[[], object]] = {
        OURS: lambda: load(path, device)[0],
        LIBRARY: lambda: safetensors.torch.load_file(path, device=str(device)),
    }
    if comfy is not None:
        loaders[COMFY] = lambda: comfy(path)
    if device.type == "cpu":
        loaders |= {SEQUENTIAL: lambda: _sequential(path), WHOLE: lambda: Path(path).read_bytes()}
    with Manifest(out_path, "load", device=device) as record:
        record.set_protocol(
            timer="host clock around a load and a synchronisation of the device; file in the page cache",
            warm_up={"runs": 1}, seed=0,
        )  # fmt: skip
        record.add_file("inputs", path)
        if comfy is None:
            record.fell_back(COMFY, COMFY, "not given: run tests/bench_load.py, which knows ComfyUI")
        differing = _differing(path, load(path, device)[0])
        record.add_gate("tensors that differ from safetensors", "at_most", 0, observed=differing)
        medians = _time(record, "load", loaders, total, rounds, device, between)
        for name in loaders:
            record.ran(name, name, len(record.data["protocol"]["orders"]["load"]))
        _judge(record, medians, device)
        _judge_memory(record, path, device, total)
        if sweep and device.type == "cuda":
            variants = {
                f"{threads} threads, {mib} MiB": _staged(path, header, device, threads, mib << 20)
                for threads, mib in SWEEP
            }
            _time(record, "staging", variants, total, 1, device, between)
    return record.data


def as_text(record: dict) -> str:
    """Medians, rates and gates, a line each."""
    lines = []
    for case in record["cases"]:
        milliseconds = case["summary"]["median"]
        rate = case["shape"][0] / milliseconds / 1e6
        lines.append(f"{case['group']:8} {case['variant']:36} {milliseconds:10.1f} ms {rate:8.2f} GB/s")
    for gate in record["gates"]:
        lines.append(f"{gate['result']:8} {gate['name']}: {gate['observed']} {gate['rule']} {gate['threshold']}")
    return "\n".join([*lines, *record["notes"]])


def _time(record, group, variants, total, rounds, device, between) -> dict[str, float]:
    """Enter a group of cases; returns the median ms by name."""
    cycle = balanced_orders(list(variants))
    orders = [cycle[number % len(cycle)] for number in range(-(-rounds // len(cycle)) * len(cycle))]
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for name in variants:
        _one(variants[name], device)
    for order in orders:
        for name in order:
            if between is not None:
                between()
            samples[name].append(_one(variants[name], device))
    record.add_orders(group, orders)
    medians = {}
    for name, found in samples.items():
        medians[name] = record.add_case(group, name, (total,), "uint8", found)["summary"]["median"]
    return medians


def _one(call: Callable[[], object], device: torch.device) -> float:
    """ms of one run, from a state in which nothing of an earlier one is kept."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    milliseconds = (time.perf_counter() - started) * 1000
    del result
    return milliseconds


def _judge(record: Manifest, medians: dict[str, float], device: torch.device) -> None:
    others = {name: value for name, value in medians.items() if name in (LIBRARY, COMFY)}
    faster = min(others, key=others.get)
    ratio = others[faster] / medians[OURS]
    if device.type == "cpu":
        # the library maps the file and reads nothing: its time is no load
        record.note("on a CPU safetensors' load_file maps the file; the bytes are read later, by whoever uses them")
        record.note(
            f"{SEQUENTIAL!r} keeps nothing: it shows the page cache's speed without the cost of new memory, which a "
            f"load has to pay; a load has {medians[SEQUENTIAL] / medians[OURS]:.2f} times its speed"
        )
        record.add_gate(f"speed against: {WHOLE}", "at_least", 0.9, observed=medians[WHOLE] / medians[OURS])
    else:
        record.add_gate(f"speed against the faster of the others ({faster})", "at_least", 1.0, observed=ratio)


def _judge_memory(record: Manifest, path: str, device: torch.device, total: int) -> None:
    """The host's peak during one of our loads, over what the process held before it."""
    chunk = staging.CHUNK_BYTES
    bound = 1.05 * total if device.type == "cpu" else staging.staging_bytes(staging.threads_here(), chunk) + (64 << 20)
    name = "host bytes at the peak of a load"
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts again from here
        before = _status("VmRSS")
        kept = load(path, device)
        peak = _status("VmHWM") - before
        del kept
    except OSError as error:
        record.add_gate(name, "at_most", bound, reason=f"the system does not tell: {error.strerror}")
        return
    record.add_gate(name, "at_most", bound, observed=peak)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _differing(path: str, ours: dict[str, torch.Tensor]) -> int:
    """How many tensors are not the library's, bit for bit; read one at a time, so that two copies need no room."""
    count = 0
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        names = set(file.keys())
        for name in names & ours.keys():
            theirs = file.get_tensor(name).to(ours[name].device)
            same = ours[name].dtype == theirs.dtype and ours[name].shape == theirs.shape
            raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (ours[name], theirs)]
            count += not (same and torch.equal(*raw))
    return count + len(names ^ ours.keys())


def _staged(path: str, header, device: torch.device, threads: int, chunk: int) -> Callable[[], object]:
    def call():
        with pieces.File(path) as source:
            return staging.load(source, header, staging.Cuda(device), None, threads, chunk)

    return call


def _sequential(path: str) -> None:
    buffer = memoryview(bytearray(8 << 20))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def main(arguments: list[str] | None = None, comfy=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--file", required=True, help="a safetensors file; written (12.6 GB) where there is none")
    parser.add_argument("--record", required=True, help="the JSON record to write")
    parser.add_argument("--blocks", type=int, default=FULL["blocks"], help="blocks of a file that is written")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sweep", action="store_true", help="also other numbers of threads and chunk sizes")
    options = parser.parse_args(arguments)
    record = run(
        options.device, options.file, options.record, rounds=options.rounds, sizes={**FULL, "blocks": options.blocks},
        comfy=comfy, sweep=options.sweep,
    )  # fmt: skip
    print(as_text(record))
    print(json.dumps({gate["name"]: gate["result"] for gate in record["gates"]}))
    return int(any(gate["result"] == "failed" for gate in record["gates"]))


if __name__ == "__main__":
    sys.exit(main())
