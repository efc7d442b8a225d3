"""Orders, statistics, timing on the CPU, and records: what a good one is, and that edited ones are refused."""

import contextlib
import copy
import json
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

measure = pack_module("kernels.measure")
samples = pack_module("kernels.measure.samples")
timing = pack_module("kernels.measure.timing")
manifest = pack_module("kernels.measure.manifest")
provenance = pack_module("kernels.measure.provenance")
roofline = pack_module("kernels.measure.roofline")
validate = measure.validate
CPU = torch.device("cpu")
BAR = samples.BARS["kernel"]


# ---------------------------------------------------------------- orders and statistics


def test_the_orders_of_three():
    assert ["".join(order) for order in samples.balanced_orders("ABC")] == ["ABC", "BCA", "CAB", "CBA", "ACB", "BAC"]


@pytest.mark.parametrize("count", range(1, 8))
def test_orders_balance_places_and_neighbours(count):
    names = [f"v{index}" for index in range(count)]
    orders = samples.balanced_orders(names)
    assert len(orders) == 2 * count and all(sorted(order) == names for order in orders)
    assert set(Counter((name, place) for order in orders for place, name in enumerate(order)).values()) == {2}
    follows = Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert len(follows) == count * (count - 1) and set(follows.values()) <= {2}


def test_orders_want_distinct_names():
    for names in ("", "AA"):
        with pytest.raises(ValueError, match="distinct"):
            samples.balanced_orders(names)


def test_summary_is_numpys():
    import numpy

    values = [random.Random(3).uniform(1, 2) for _ in range(17)]
    found = samples.summary(values)
    first, middle, third = numpy.quantile(values, [0.25, 0.5, 0.75])
    assert found["median"] == pytest.approx(middle) and found["iqr"] == pytest.approx(third - first)
    assert (found["count"], found["min"], found["max"]) == (17, min(values), max(values))


def noisy(centre, seed, count=40, spread=0.01):
    generator = random.Random(seed)
    return [centre * (1 + generator.gauss(0, spread)) for _ in range(count)]


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [(0.5, "accept"), (0.99, "reject"), (1.2, "reject"), (0.95, "inconclusive")],
)
def test_verdicts(candidate, expected):
    judged = samples.verdict(noisy(1.0, 1), noisy(candidate, 2), BAR, 0, noisy(1.0, 3))
    assert judged["verdict"] == expected, judged
    assert judged["interval_share"][0] <= judged["saving_share"] <= judged["interval_share"][1]


def test_both_bars_count():
    """Half of 8 us is far more than 5 %, but it is not 10 us."""
    assert samples.verdict(noisy(0.008, 1), noisy(0.004, 2), BAR)["verdict"] == "reject"


def test_a_control_that_differs_lets_nothing_through():
    baseline, candidate = noisy(1.0, 1), noisy(0.5, 2)
    judged = samples.verdict(baseline, candidate, BAR, 0, [value * 1.05 for value in baseline])
    assert judged["verdict"] == "inconclusive" and "two copies" in judged["reason"]


def test_the_verdict_is_seeded():
    one, two = (samples.verdict(noisy(1.0, 1), noisy(0.9, 2), BAR, 7) for _ in range(2))
    assert one == two != samples.verdict(noisy(1.0, 1), noisy(0.9, 2), BAR, 8)


def test_settling_clocks_do_not_make_a_saving():
    """Two equal variants while the clock settles by 12 %: rotation finds nothing, one after the other would."""
    accepted = 0
    for seed in range(10):
        generator = random.Random(seed)
        orders = samples.balanced_orders(["a", "b", "c"])
        times, place = {name: [] for name in "abc"}, 0
        for number in range(30):
            for name in orders[number % 6]:
                times[name].append((1 + 0.12 * math.exp(-place / 30)) * (1 + generator.gauss(0, 0.005)))
                place += 1
        accepted += samples.verdict(times["a"], times["b"], BAR, seed, times["c"])["verdict"] == "accept"
    assert accepted == 0


# ---------------------------------------------------------------- timing


def test_every_variant_runs_once_a_round_and_the_baseline_twice():
    calls = []
    variants = {name: lambda part, name=name: calls.append((name, part)) for name in ("stock", "ours")}
    rounds = []
    found = timing.time_rotating(
        variants, rounds=5, device=CPU, sets=[(0,), (1,)], warm_up_s=0, between=lambda: rounds.append(1)
    )
    assert found.timer == timing.HOST and "not a measurement" in found.timer
    assert found.orders == samples.balanced_orders(["stock", "ours", "stock (A/A)"])
    assert {name: len(values) for name, values in found.samples.items()} == dict.fromkeys(found.orders[0], 6)
    assert found.calls == dict.fromkeys(found.samples, 2) and len(rounds) == 7
    ran = [name for order in [found.orders[0], *found.orders] for name in order]
    assert calls == [(name.removesuffix(" (A/A)"), part) for name in ran for part in (0, 1)]


def test_a_cancel_between_rounds_stops_it():
    class Cancel(BaseException):
        pass

    def between():
        raise Cancel

    with pytest.raises(Cancel):
        timing.time_rotating({"a": lambda: None}, rounds=1, device=CPU, between=between)


class FakeCuda:
    """Just enough of torch.cuda to follow what is captured, replayed and timed; a call takes a millisecond."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self):
        self.clock, self.capturing, self.graphs = 0.0, None, 0
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = cuda.clock

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at - self.at

        class CUDAGraph:
            def __init__(self):
                self.work = []

            def replay(self):
                cuda.clock += sum(self.work)

        class graph:
            def __init__(self, graph, pool, capture_error_mode):
                assert pool == "pool" and capture_error_mode == "thread_local"
                self.graph = graph

            def __enter__(self):
                cuda.capturing, cuda.graphs = self.graph, cuda.graphs + 1

            def __exit__(self, *exception):
                cuda.capturing = None

        self.Event, self.CUDAGraph, self.graph = Event, CUDAGraph, graph

    def work(self, milliseconds):
        if self.capturing is None:
            self.clock += milliseconds + 0.5  # launched one by one it is slower
        else:
            self.capturing.work.append(milliseconds)

    def graph_pool_handle(self):
        return "pool"

    def Stream(self):
        return self

    def current_stream(self):
        return self

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def device(self, device):
        return contextlib.nullcontext()

    def stream(self, stream):
        return contextlib.nullcontext()


@pytest.fixture
def fake_cuda(monkeypatch):
    fake, zeros = FakeCuda(), torch.zeros
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None: zeros(*shape))
    return fake


def test_cuda_samples_are_graph_replays_long_enough_to_time(fake_cuda):
    variants = {"stock": lambda part: fake_cuda.work(1.5), "ours": lambda part: fake_cuda.work(0.25)}
    found = timing.time_rotating(variants, rounds=1, device=torch.device("cuda"), sets=[(0,), (1,)], warm_up_s=0)
    assert found.timer == timing.GRAPHS and found.uncaptured == {}
    assert found.calls == {"stock": 2, "ours": 8, "stock (A/A)": 2}, "at least 2 ms, and every set equally often"
    assert fake_cuda.graphs == 4, "the anchor of the pool, stock once, ours again with more calls"
    assert found.samples["ours"] == pytest.approx([0.25] * 6)
    assert found.samples["stock"] == found.samples["stock (A/A)"] == pytest.approx([1.5] * 6)


def test_cuda_what_cannot_be_captured_takes_all_out_of_graphs(fake_cuda):
    def syncs():
        if fake_cuda.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        fake_cuda.work(1.0)

    variants = {"stock": lambda: fake_cuda.work(1.0), "reference": syncs}
    found = timing.time_rotating(variants, rounds=1, device=torch.device("cuda"), warm_up_s=0)
    assert found.timer == timing.QUEUED
    assert found.uncaptured == {"reference": "RuntimeError: operation not permitted when stream is capturing"}
    assert found.samples["stock"] == found.samples["reference"] == pytest.approx([1.5] * 6)


def test_cuda_out_of_memory_is_not_taken_for_a_failed_capture(fake_cuda):
    def full():
        if fake_cuda.capturing is not None:
            raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        timing.time_rotating({"a": full}, rounds=1, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "arguments",
    [{"variants": {}}, {"rounds": 0}, {"sets": []}, {"baseline": "z"}, {"variants": {"a": 1, "a (A/A)": 1}}],
)
def test_bad_arguments(arguments):
    arguments = {"variants": {"a": lambda: None}, "rounds": 1, **arguments}
    with pytest.raises(ValueError, match="time_rotating"):
        timing.time_rotating(arguments.pop("variants"), device=CPU, **arguments)


def test_sets_pass_five_times_the_cache(monkeypatch):
    assert timing.sets_needed(1 << 20, CPU) == 1
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50 << 20)
    for size in (1 << 20, 50 << 20, 250 << 20, 300 << 20, 1 << 40):
        assert timing.sets_needed(size, CPU) * size > 250 << 20


def test_copy_and_rate():
    copied = roofline.copy_bandwidth(CPU, rounds=1)
    assert copied.moved_bytes == 4 * copied.elements and set(copied.timing.samples) == {"copy", "copy (A/A)"}
    assert roofline.rate(2_000_000, 1.0, 8_000_000, 2.0) == {
        "floor_bytes": 2_000_000,
        "gb_per_s": 2.0,
        "floor_ms": 0.5,
        "share_of_copy": 0.5,
    }


# ---------------------------------------------------------------- records


A_GPU = {
    "name": "GPU", "uuid_sha256": "0" * 64, "capability": "9.0", "multiprocessors": 132, "memory_bytes": 1 << 30,
    "l2_bytes": 1 << 20, "driver": "580.1", "power_limit_w": 700.0, "clocks": None,
}  # fmt: skip


def build(path):
    """A whole record with a copy, a baseline, its control and a candidate, gates of every kind and a fallback."""
    with measure.Manifest(path, "kernel", device=CPU) as record:
        record.add_input("x", [torch.arange(6, dtype=torch.bfloat16), b"more"])
        variants = {"stock": noisy(2.0, 1, 12), "stock (A/A)": noisy(2.0, 2, 12), "triton": noisy(1.0, 3, 12)}
        copied = record.add_case("copy", "copy", (1024,), "bfloat16", [1.0, 1.0])
        copied["roofline"] = roofline.rate(10**9, 1.0, 10**9, 1.0)
        record.add_orders("copy", [["copy"], ["copy"]])
        cases = {
            name: record.add_case("swiglu", name, (16, 32), "bfloat16", values, calls=2)
            for name, values in variants.items()
        }
        orders = samples.balanced_orders(list(variants))
        record.add_orders("swiglu", [orders[number % 6] for number in range(12)])
        cases["triton"]["roofline"] = roofline.rate(10**6, cases["triton"]["summary"]["median"], 10**9, 1.0)
        record.compare(cases["triton"], cases["stock"], cases["stock (A/A)"], BAR, 5)
        for name in ("stock", "triton"):
            record.add_output(f"swiglu / {name}", [torch.zeros(3)])
            record.ran(f"swiglu / {name}", name, 2)
        record.fell_back("swiglu", "cute", "needs compute capability 10.0, have 9.0")
        record.add_gate("parity", "at_most", 0, observed=0)
        record.add_gate("blocks", "at_most", 0, reason="no checkpoint here")
        record.add_gate("fp4 in the SASS", "at_least", 1, reason="sm_90 has none", not_applicable=True)
        record.set_protocol(timer=timing.GRAPHS, seed=5)
        record.data["hardware"]["gpus"] = [dict(A_GPU)]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return build(tmp_path_factory.mktemp("record") / "run.json")


def test_a_good_record(good, tmp_path):
    assert validate(good) == []
    assert good["status"] == "finished" and good["schema"] == "run-manifest/1"
    assert [gate["result"] for gate in good["gates"]] == ["passed", "skipped", "not_applicable"]
    assert good["inputs"][0]["bytes"] == 16
    path = tmp_path / "run.json"
    path.write_text(json.dumps(good), encoding="utf-8")
    assert measure.read(path) == good


def put(*steps):
    """A change: walk to the last but one step, then set the last but one to the last."""
    *way, last, value = steps

    def change(record):
        for step in way:
            record = record[step]
        record[last] = value

    return change


def scale(record, share):
    """Edit the samples of the candidate and leave what follows from them."""
    record["cases"][3]["samples"] = [value * share for value in record["cases"][3]["samples"]]


CANDIDATE = ("cases", 3)
MUTATIONS = {
    "schema": (put("schema", "run-manifest/2"), "schema"),
    "missing member": (lambda r: r.pop("gates"), "misses gates"),
    "unknown member": (put("extra", 1), "does not know extra"),
    "missing inner member": (lambda r: r["protocol"].pop("seed"), "protocol: misses seed"),
    "kind": (put("kind", "benchmark"), "kind"),
    "status": (put("status", "ok"), "status"),
    "run id": (put("run_id", "a b"), "run_id"),
    "run id of another time": (lambda r: r.update(run_id="20200101T000000Z" + r["run_id"][16:]), "run_id: must be"),
    "run id of another kind": (lambda r: r.update(run_id=r["run_id"].replace("kernel", "step")), "run_id: must be"),
    "run id that is a number": (put("run_id", 7), "malformed"),
    "time without zone": (put("started_at", "2026-01-01T00:00:00"), "started_at"),
    "no end": (put("finished_at", None), "finished_at"),
    "end before start": (put("finished_at", "2001-01-01T00:00:00+00:00"), "before started_at"),
    "notes": (put("notes", "text"), "notes"),
    "nothing measured": (lambda r: (r["cases"].clear(), r["gates"].clear()), "has cases or gates"),
    "no source": (lambda r: r["source"].update(commit=None, tree=None), "commit or a tree"),
    "short commit": (put("source", "commit", "8350d81"), "whole hash"),
    "dirty without a diff": (put("source", "dirty", True), "source.dirty"),
    "clean with a diff": (put("source", "diff_sha256", "0" * 64), "source.dirty"),
    "clean with untracked files": (put("source", "untracked", ["a.py"]), "source.dirty"),
    "no argv": (put("invocation", "argv", []), "argv"),
    "secret in the argv": (put("invocation", "argv", ["a.py", "--api-key", "abc"]), "sounds like a secret"),
    "secret after an equals sign": (put("invocation", "argv", ["a.py", "--token=abc"]), "sounds like a secret"),
    "secret in the environment": (put("invocation", "env", {"COMFY_API_KEY": "abc"}), "is not withheld"),
    "no python": (put("invocation", "python", ""), "invocation.python"),
    "cwd": (put("invocation", "cwd", "a/b"), "cwd"),
    "environment variable": (put("invocation", "env", {"USER": "me"}), "allow-list"),
    "path in a note": (put("notes", ["see /home/me/run.json"]), "path of one machine"),
    "path in a reason": (put("dispatch", "fallbacks", 0, "reason", r"C:\Users\me\x.dll"), "path of one machine"),
    "image digest": (put("environment", "image_digest", "latest"), "image_digest"),
    "package version": (put("environment", "packages", "torch", 2), "packages.torch"),
    "uuid in the clear": (put("hardware", "gpus", 0, "uuid_sha256", "GPU-1"), "uuid_sha256"),
    "uuid in a note": (put("notes", ["ran on GPU-01234567-89ab-cdef-0123-456789abcdef"]), "a GPU's UUID"),
    "no cores": (put("hardware", "cpu", "cores", 0), "hardware.cpu.cores"),
    "unknown of the cpu": (put("hardware", "cpu", "host", "x"), "does not know host"),
    "a GPU's timer without a GPU": (put("hardware", "gpus", []), "hardware.gpus: is empty"),
    "capability": (put("hardware", "gpus", 0, "capability", "sm_90"), "capability"),
    "driver": (put("hardware", "gpus", 0, "driver", 580), "driver"),
    "power limit": (put("hardware", "gpus", 0, "power_limit_w", -1), "power_limit_w"),
    "input hash": (put("inputs", 0, "sha256", "abc"), "inputs[0].sha256"),
    "input size": (put("inputs", 0, "bytes", -1), "inputs[0].bytes"),
    "input of no bytes": (put("inputs", 0, "bytes", 0), "checksum of nothing"),
    "input without a name": (put("inputs", 0, "name", " "), "inputs[0].name"),
    "input twice": (lambda r: r["inputs"].append(r["inputs"][0]), "twice there is x"),
    "output missing": (lambda r: r["outputs"].pop(), "misses the checksum of swiglu / triton"),
    "baseline's output missing": (lambda r: r["outputs"].pop(0), "misses the checksum of swiglu / stock"),
    "output renamed": (put("outputs", 1, "name", "swiglu / other"), "misses the checksum of swiglu / triton"),
    "sample edited": (lambda r: scale(r, 0.5), "the samples say"),
    "sample dropped": (lambda r: r["cases"][3]["samples"].pop(), "11 samples of triton"),
    "no samples": (put(*CANDIDATE, "samples", []), "at least one"),
    "negative sample": (put(*CANDIDATE, "samples", 0, -1.0), "above zero"),
    "boolean sample": (put(*CANDIDATE, "samples", 0, True), "above zero"),
    "non-finite sample": (put(*CANDIDATE, "samples", 0, math.inf), "JSON has no word for"),
    "median edited": (put(*CANDIDATE, "summary", "median", 0.9), "summary.median"),
    "iqr edited": (put(*CANDIDATE, "summary", "iqr", 0.0), "summary.iqr"),
    "count edited": (put(*CANDIDATE, "summary", "count", 80), "summary.count"),
    "case twice": (lambda r: r["cases"].append(copy.deepcopy(r["cases"][3])), "twice there is swiglu / triton"),
    "calls": (put(*CANDIDATE, "calls", 0), "calls"),
    "unit": (put(*CANDIDATE, "unit", "us"), "unit"),
    "shape": (put(*CANDIDATE, "shape", [0]), "shape"),
    "no shape": (put(*CANDIDATE, "shape", []), "shape"),
    "dtype": (put(*CANDIDATE, "dtype", None), "dtype"),
    "clocks": (put(*CANDIDATE, "clocks", {"sm_mhz": 1980}), "clocks: misses after, before"),
    "saving edited": (put(*CANDIDATE, "comparison", "saving_share", 0.9), "saving_share"),
    "verdict edited": (put(*CANDIDATE, "comparison", "verdict", "inconclusive"), "comparison.verdict"),
    "bar lowered after the fact": (put(*CANDIDATE, "comparison", "bar_ms", 99.0), "comparison.verdict"),
    "bootstrap seed": (put(*CANDIDATE, "comparison", "seed", 6), "interval"),
    "bar lowered where the verdict stays": (put(*CANDIDATE, "comparison", "bar_ms", 0.0), "the bar of kernel"),
    "bar of a step on a kernel": (
        lambda r: r["cases"][3]["comparison"].update(bar_share=0.005, bar_ms=5.0), "the bar of kernel"
    ),
    "no control": (lambda r: r["cases"][3]["comparison"].update(control=None, control_ms=None), "control: must be"),
    "another variant as control": (put(*CANDIDATE, "comparison", "control", "stock"), "control: must be"),
    "compared with itself": (put(*CANDIDATE, "comparison", "baseline", "triton"), "not compared with itself"),
    "seed sought after the fact": (put("protocol", "seed", 6), "seed: must be the protocol's"),
    "verdict on a host clock": (put("protocol", "timer", timing.HOST), "a verdict needs CUDA events"),
    "comparison of another kind": (put(*CANDIDATE, "comparison", [1]), "must be an object"),
    "unknown in the comparison": (put(*CANDIDATE, "comparison", "p_value", 0.01), "does not know p_value"),
    "baseline of nobody": (put(*CANDIDATE, "comparison", "baseline", "other"), "no case 'other'"),
    "rate edited": (put(*CANDIDATE, "roofline", "gb_per_s", 9000.0), "gb_per_s"),
    "share edited": (put(*CANDIDATE, "roofline", "share_of_copy", 1.0), "share_of_copy"),
    "floor without a copy": (put("cases", 0, "roofline", None), "no copy measured"),
    "order edited": (put("protocol", "orders", "swiglu", 0, ["stock", "stock", "triton"]), "round ran"),
    "one variant always first": (
        lambda r: r["protocol"]["orders"].update(swiglu=[["stock", "stock (A/A)", "triton"]] * 12), "not balanced"
    ),
    "rounds as a flag": (put("protocol", "rounds", "copy", True), "protocol.rounds.copy"),
    "rounds edited": (put("protocol", "rounds", "swiglu", 9), "9 declared"),
    "orders missing": (lambda r: r["protocol"]["orders"].pop("swiglu"), "orders: misses swiglu"),
    "orders of nobody": (put("protocol", "orders", "other", []), "no case has this group"),
    "timer": (put("protocol", "timer", ""), "timer"),
    "cases that nothing timed": (put("protocol", "timer", "none"), "something timed them"),
    "seed": (put("protocol", "seed", "5"), "seed"),
    "fallback without a reason": (put("dispatch", "fallbacks", 0, "reason", " "), "needs its reason"),
    "fallback without what was asked": (put("dispatch", "fallbacks", 0, "asked", ""), "fallbacks[0].asked"),
    "count of nothing": (put("dispatch", "ran", 0, "count", 0), "count"),
    "ran twice": (lambda r: r["dispatch"]["ran"].append(r["dispatch"]["ran"][0]), "dispatch.ran: twice"),
    "nothing ran": (put("dispatch", "ran", 0, "implementation", None), "ran[0].implementation"),
    "skip without a reason": (put("gates", 1, "reason", None), "needs a reason"),
    "skip with a value": (put("gates", 1, "observed", 0), "no observed value"),
    "skip that counts as passed": (put("gates", 1, "result", "passed"), "needs an observed number"),
    "not applicable with a value": (put("gates", 2, "observed", 1), "no observed value"),
    "pass across the threshold": (put("gates", 0, "observed", 1), "not at most 0"),
    "failure that held": (put("gates", 0, "result", "failed"), "failed, but 0 is at most 0"),
    "gate result": (put("gates", 0, "result", "ok"), "result"),
    "gate rule": (put("gates", 0, "rule", "roughly"), "rule"),
    "gate without a name": (put("gates", 0, "name", ""), "gates[0].name"),
    "gate without a threshold": (put("gates", 0, "threshold", None), "set before the run"),
    "gate that observed a flag": (put("gates", 0, "observed", False), "needs an observed number"),
    "threshold moved after the fact": (put("gates", 0, "threshold", -1), "not at most -1"),
    "gate's reason": (put("gates", 0, "reason", 3), "reason: must be a text or null"),
    "unknown in a gate": (put("gates", 0, "waived", True), "does not know waived"),
    "gate twice": (lambda r: r["gates"].append(r["gates"][0]), "twice there is parity"),
    "cases of another kind": (put("cases", {"a": 1}), "malformed"),
    "gpus of another kind": (put("hardware", "gpus", 3), "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_edited_record_is_refused(name, good):
    change, expected = MUTATIONS[name]
    record = copy.deepcopy(good)
    change(record)
    problems = validate(record)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize("record", [None, [], "x", 3, {}, {"schema": []}])
def test_what_is_no_record_at_all(record):
    assert validate(record)


def test_nesting_without_end_is_a_problem():
    record = inner = {}
    for _ in range(100_000):
        inner["a"] = {}
        inner = inner["a"]
    assert validate(record) == ["the record is nested too deeply"]
    while record:  # taken apart by hand: the interpreter frees nested objects by recursion
        record = record.pop("a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "not JSON"),
        ("[]", "must be an object"),
        ("{", "Expecting"),
        ("[" * 200_000, "recursion"),
    ],
)
def test_reading_is_strict(text, expected, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(manifest.ManifestError, match=expected) as caught:
        measure.read(path)
    assert caught.value.file == "record.json" and str(tmp_path) not in str(caught.value)


def test_a_run_that_dies_leaves_aborted(tmp_path):
    path = tmp_path / "run.json"

    def die():
        with measure.Manifest(path, "smoke") as record:
            assert measure.read(path)["status"] == "aborted"  # what a killed process would have left
            record.add_case("a", "a", (1,), "bfloat16", [1.0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["status"] == "aborted" and data["notes"] == ["the run ended with KeyboardInterrupt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_record_that_contradicts_itself_is_not_finished(tmp_path):
    path = tmp_path / "run.json"

    def contradict():
        with measure.Manifest(path, "smoke") as record:
            record.add_case("a", "a", (1,), "bfloat16", [1.0])["summary"]["median"] = 2.0

    with pytest.raises(manifest.ManifestError, match="summary.median"):
        contradict()
    assert json.loads(path.read_text(encoding="utf-8"))["status"] == "aborted"


def test_a_gate_cannot_be_skipped_in_silence(tmp_path):
    record = measure.Manifest(tmp_path / "run.json", "smoke")
    with pytest.raises(ValueError, match="say why it was skipped"):
        record.add_gate("parity", "at_most", 0)
    assert record.add_gate("late", "at_most", 0, observed=3) == "failed"


def test_no_name_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance.platform, "node", lambda: "my-workstation")
    monkeypatch.setattr(sys, "argv", ["/home/me/ComfyUI/main.py", "--listen", "my-workstation", "--api-key", "abc"])
    monkeypatch.setenv("COMFYUI_PATH", "/home/me/ComfyUI")
    monkeypatch.setenv("COMFY_API_KEY", "abc")
    monkeypatch.setenv("HOSTNAME", "my-workstation")
    record = measure.Manifest(tmp_path / "run.json", "smoke")
    record.note("loaded /home/me/ComfyUI/models/x.safetensors on my-workstation")
    record.write()
    data = measure.read(record.path)
    assert data["invocation"]["argv"] == ["main.py", "--listen", "<host>", "--api-key", "<withheld>"]
    assert data["invocation"]["env"]["COMFYUI_PATH"] == "ComfyUI"
    assert data["invocation"]["env"]["COMFY_API_KEY"] == "<withheld>"
    assert data["invocation"]["cwd"] == "." and data["notes"] == ["loaded x.safetensors on <host>"]
    text = record.path.read_text(encoding="utf-8")
    assert not any(word in text for word in ("workstation", "/home", str(tmp_path), '"abc"'))


def test_the_tree_hash_follows_the_files(tmp_path, monkeypatch):
    first = provenance.source()
    assert first == provenance.source() and first["dirty"] is False and len(first["tree"]) == 64
    (tmp_path / "kernels" / "measure").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "kernels" / "measure" / "provenance.py"))
    empty = provenance.source()["tree"]
    (tmp_path / "kernels" / "a.py").write_text("1", encoding="utf-8")
    assert provenance.source()["tree"] not in (empty, first["tree"])


def test_validation_needs_the_standard_library_only(good, tmp_path):
    """Records are checked where no torch is."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(good), encoding="utf-8")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'triton'))); "
        "from kernels.measure import read; print(read(sys.argv[1])['status'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=PACK_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "finished"


def test_records_of_the_repository_hold():
    for path in (PACK_ROOT / "research" / "records").glob("*.json"):
        if json.loads(path.read_text(encoding="utf-8")).get("schema") == "run-manifest/1":
            measure.read(path)
