"""The registry of experiments: what a good one is, that edited ones are refused, and that what lost is off."""

import copy
import dataclasses
import io
import json
import math
import re
import tokenize

import pytest
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

experiments = pack_module("kernels.measure.experiments")
strict_json = pack_module("kernels.measure.manifest").strict_json
RECORDS = PACK_ROOT / "research" / "records"
REGISTRY = strict_json(PACK_ROOT / "research" / "experiments.json")
BY_ID = {experiment["id"]: experiment for experiment in REGISTRY["experiments"]}
OF_THE_RECORD = {name for name in BY_ID if name.startswith("record-")}


def test_the_registry_holds():
    assert experiments.validate(REGISTRY, RECORDS) == []


def test_all_seven_statuses_have_a_word_and_both_outcomes_an_experiment():
    assert len(experiments.STATUSES) == 7
    assert {experiment["status"] for experiment in BY_ID.values()} <= set(experiments.STATUSES)
    assert {"accepted", "rejected", "inconclusive"} <= {experiment["status"] for experiment in BY_ID.values()}


def test_the_rejected_paths_of_the_record_are_there_without_invented_numbers():
    assert len(OF_THE_RECORD) == 4
    for name in OF_THE_RECORD:
        found = BY_ID[name]
        assert (found["status"], found["evidence"], found["default_on"]) == ("rejected", [], False)
        numbers = set(re.findall(r"(?<![\w.-])\d[\d.]*", found["hypothesis"])) | set(re.findall(r"\d+ ms", str(found)))
        assert numbers == ({"220", "220 ms"} if "p3" in name else set())


# ---------------------------------------------------------------- edited registries


def entry(name):
    return lambda registry: next(item for item in registry["experiments"] if item["id"] == name)


def put(name, member, value):
    """A change: a member of an experiment gets a value."""

    def change(registry):
        entry(name)(registry)[member] = value

    return change


def cite(name, member, value):
    """A change: a member of an experiment's first piece of evidence."""

    def change(registry):
        entry(name)(registry)["evidence"][0][member] = value

    return change


WON, LOST, OPEN = "triton-swiglu-nvfp4", "static-one-warp", "side-shared-factors"
REPLACED = "e2m1-integer-rounding"
MUTATIONS = {
    "schema": (lambda r: r.update(schema="experiments/2"), "schema"),
    "unknown member of the registry": (lambda r: r.update(author="me"), "does not know author"),
    "no experiments": (lambda r: r.update(experiments=[]), "at least one"),
    "experiments of another kind": (lambda r: r.update(experiments={}), "must be a list"),
    "missing member": (lambda r: entry(WON)(r).pop("baseline"), "misses baseline"),
    "unknown member": (put(WON, "owner", "me"), "does not know owner"),
    "id": (put(WON, "id", "Triton SwiGLU"), "id: must be lower-case"),
    "id twice": (put(LOST, "id", WON), "twice there is"),
    "title": (put(WON, "title", " "), "title"),
    "hypothesis without a number": (put(WON, "hypothesis", "is faster than NVFP4 P1"), "must hold a number"),
    "hypothesis with a number that was not recorded": (
        put("record-bounded-ring-qkv", "hypothesis", "saves 30 ms; number not recorded"), "hypothesis"
    ),
    "status": (put(WON, "status", "won"), "status: must be one of"),
    "no bar": (put(WON, "bar", None), "set before the run"),
    "bar lowered": (put(WON, "bar", {"level": "kernel", "share": 0.01, "ms": 0.01}), "that of a kernel is 0.05"),
    "bar without a number": (put(LOST, "bar", {"level": "own", "text": "faster"}), "bar.text"),
    "bar of another level": (put(LOST, "bar", {"level": "mine", "text": "1.5"}), "bar.level"),
    "bar of another kind": (put(LOST, "bar", 0.05), "bar: must be an object"),
    "no baseline": (put(WON, "baseline", ""), "baseline"),
    "rejected, on by default": (put(LOST, "default_on", True), "only an accepted one"),
    "proposed, on by default": (put(OPEN, "default_on", True), "only an accepted one"),
    "default_on of another kind": (put(LOST, "default_on", 0), "true or false"),
    "accepted without evidence": (put(LOST, "status", "accepted"), "accepted, so it needs a record"),
    "accepted without a verdict": (cite(WON, "cases", []), "must name the cases"),
    "accepted without a number": (put("record-bounded-ring-qkv", "status", "accepted"), "without a recorded number"),
    "rejected without a reason": (put(LOST, "reason", None), "rejected, so it needs a reason"),
    "inconclusive without a reason": (put("direct-load-cpu", "reason", "  "), "needs a reason"),
    "no evidence and no reason": (put(OPEN, "reason", None), "the reason has to say why"),
    "evidence of another kind": (put(WON, "evidence", {}), "evidence: must be a list"),
    "evidence with an unknown member": (cite(WON, "url", "x"), "does not know url"),
    "sha256 of another file": (cite(WON, "sha256", "0" * 64), f"expected {'0' * 64}, found "),
    "sha256 that is none": (cite(WON, "sha256", "abc"), "64 hex digits"),
    "run id of another run": (cite(WON, "run_id", "20260101T000000Z-kernel-00000000"), "run_id: expected 20260101T"),
    "record that is not there": (cite(WON, "file", "gone.json"), "there is no record gone.json"),
    "record outside the folder": (cite(WON, "file", "../experiments.json"), "must be the name of a record"),
    "case that is not there": (cite(WON, "cases", ["swiglu / cute"]), "has no verdict on 'swiglu / cute'"),
    "verdict that says otherwise": (cite(WON, "cases", ["swiglu_nvfp4, static / reference"]), "says reject of"),
    "a win called a loss": (put(WON, "status", "rejected"), "says accept of"),
    "record named twice": (lambda r: entry(WON)(r)["evidence"].append(entry(WON)(r)["evidence"][0]), "names a record"),
    "superseded by nobody": (put(REPLACED, "superseded_by", None), "there is no experiment None"),
    "superseded by one that is not there": (put(REPLACED, "superseded_by", "other"), "there is no experiment 'other'"),
    "superseded by itself": (put(REPLACED, "superseded_by", REPLACED), "circle"),
    "superseded in a circle": (
        lambda r: (
            put(WON, "status", "superseded")(r), put(WON, "superseded_by", REPLACED)(r),
            put(REPLACED, "superseded_by", WON)(r),
        ),
        "circle",
    ),
    "not superseded, with a successor": (put(LOST, "superseded_by", WON), "only a superseded one"),
    "path of a machine": (put(LOST, "reason", "see /home/me/run.json"), "path of one machine"),
    "not finite": (put(WON, "bar", {"level": "kernel", "share": math.nan, "ms": 0.01}), "JSON has no word for"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_edited_registry_is_refused(name):
    change, expected = MUTATIONS[name]
    registry = copy.deepcopy(REGISTRY)
    change(registry)
    problems = experiments.validate(registry, RECORDS)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize("registry", [None, [], "x", 3, {}, {"schema": 1, "experiments": [1, None]}])
def test_what_is_no_registry_at_all(registry):
    assert experiments.validate(registry)


def test_an_aborted_record_is_no_evidence(tmp_path):
    item = entry(WON)(REGISTRY)["evidence"][0]
    record = strict_json(RECORDS / item["file"])
    record["status"] = "aborted"
    (tmp_path / item["file"]).write_text(json.dumps(record), encoding="utf-8")
    problems = experiments.validate({"schema": experiments.SCHEMA, "experiments": [BY_ID[WON]]}, tmp_path)
    assert any("only a finished run is evidence" in problem for problem in problems)


def test_without_the_records_their_numbers_are_left_alone():
    registry = copy.deepcopy(REGISTRY)
    cite(WON, "sha256", "0" * 64)(registry)
    assert experiments.validate(registry) == []


# ---------------------------------------------------------------- what lost is off


def code():
    """The names in the shipped code, without comments and texts."""
    kept = []
    for part in ("kernels", "nodes"):
        for path in sorted((PACK_ROOT / part).rglob("*.py")):
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
            kept += [token.string for token in tokens if token.type == tokenize.NAME]
    return set(kept)


def words():
    """All identifiers and texts of the shipped code, in lower case: options, environment variables, widgets."""
    return "\n".join(
        path.read_text(encoding="utf-8").lower()
        for part in ("kernels", "nodes")
        for path in sorted((PACK_ROOT / part).rglob("*.py"))
    )


def picks(op_name, monkeypatch):
    """What ``auto`` takes where no implementation refuses and all are certified."""
    op_module = pack_module("kernels.fused._op")
    monkeypatch.setattr(op_module.certify, "refusal", lambda *arguments: None)
    op = pack_module("kernels.fused").OPS[op_name]
    willing = [dataclasses.replace(item, refuse=lambda device: None) for item in op.implementations]
    return op_module.choose(dataclasses.replace(op, implementations=tuple(willing)), torch.device("cpu"), "auto")[0]


def cute_is_off(monkeypatch):
    ops = pack_module("kernels.fused").OPS
    assert "cute" in [item.name for item in ops["norm_modulate_nvfp4"].implementations]
    return all(picks(name, monkeypatch) != "cute" for name, op in ops.items() if op.implementations)


def tile_is_not(name, *lost):
    """A tile of the norm and modulation kernels is none of these (rows, words, warps)."""

    def check(monkeypatch):
        pytest.importorskip("triton", reason="Triton is not installed here")
        found = getattr(pack_module("kernels.fused._modulate_triton"), name)
        return dataclasses.astuple(found) not in lost

    return check


def absent(pattern):
    return lambda monkeypatch: re.search(pattern, words()) is None


def no_huge_pages(monkeypatch):
    return not {"madvise", "MADV_HUGEPAGE"} & code()


def body(function):
    """Source of a Triton function."""
    return pack_module("kernels.fused._modulate_triton").__dict__[function].src


def sage1_refuses_ragged_keys(monkeypatch):
    sage1, contract = pack_module("kernels.attention.backends.sage1"), pack_module("kernels.attention.contract")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wanted = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "k_shape": (1, 2, 129, 64)}
    given = {field.name: wanted.get(field.name, (1, 2, 129, 64)) for field in dataclasses.fields(contract.Call)}
    call = contract.Call(**given)
    return "multiple of 64" in sage1.refuse(call)


def never_unasked(name):
    """An approximate backend is taken by ``auto`` only under an error bound, which no default sets."""

    def check(monkeypatch):
        contract = pack_module("kernels.attention.contract")
        backend = pack_module(f"kernels.attention.backends.{name}").BACKEND
        return not backend.exact and contract.Request().max_error is None

    return check


def triton_kernel_without(function, pattern):
    pytest.importorskip("triton", reason="Triton is not installed here")
    return re.search(pattern, body(function)) is None


def zero_start_is_off(monkeypatch):
    return triton_kernel_without("_largest_of_rows", r"best = tl\.zeros")


def measuring_has_no_policy(monkeypatch):
    return triton_kernel_without("measure", r"evict_") and triton_kernel_without("_largest_of_rows", r"evict_")


def rounding_is_cut(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here")
    source = pack_module("kernels.fused._words_triton")._rounded.src
    return "0x7F800000" in source and "4194304.0" in source


def magnitudes_are_cut_after_rounding(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here")
    source = pack_module("kernels.fused._words_triton")._codes_of.src
    return "min.f16x2" in source and "bf16x2" not in source


def copy_is_a_kernel(monkeypatch):
    return ".copy_(" not in (PACK_ROOT / "kernels" / "measure" / "roofline.py").read_text(encoding="utf-8")


def steps_around_too(monkeypatch):
    return len(pack_module("kernels.checkpoint.scales")._STEPS) > 1


def only_its_node_attaches_a_lora(monkeypatch) -> bool:
    """Too dear for everybody: no other node puts a side branch beside a linear."""
    files = (PACK_ROOT / "nodes").glob("*.py")
    attaching = {file.name for file in files if "attach.install(" in file.read_text("utf-8")}
    return attaching == {"lora.py", "calibrate.py"}


def rows_take_the_small_tile(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here")
    return dataclasses.astuple(pack_module("kernels.fused._swiglu_triton").QUANTISE) != (4, 512, 2)


def rows_keep_halves_apart(monkeypatch):
    return "quantise_halves" not in (PACK_ROOT / "kernels" / "fused" / "_swiglu_triton.py").read_text(encoding="utf-8")


OFF = {
    "rows-backwards": rows_take_the_small_tile,
    "rows-halves-in-one-thread": rows_keep_halves_apart,
    "attention-sage1-4096": never_unasked("sage1"),
    "attention-sage1-any-length": sage1_refuses_ragged_keys,
    "four-or-six-scales": steps_around_too,
    "load-huge-pages": no_huge_pages,
    "cute-norm-modulate-dynamic": cute_is_off,
    "cute-norm-modulate-static": cute_is_off,
    "cute-smaller-launches": cute_is_off,
    "static-four-warps": tile_is_not("ROW_QUANTISE", (1, 1024, 4)),
    "static-one-warp": tile_is_not("ROW_QUANTISE", (1, 512, 1), (1, 256, 1)),
    "static-four-rows": tile_is_not("ROW_QUANTISE", (4, 512, 4)),
    "static-cute": cute_is_off,
    "static-cute-prefetch": cute_is_off,
    "clamp-packed-bf16": magnitudes_are_cut_after_rounding,
    "xorsign-zero-start": zero_start_is_off,
    "one-warp-half-blocks": tile_is_not("ROW_QUANTISE", (1, 512, 1), (1, 256, 1)),
    "e2m1-uncut-power": rounding_is_cut,
    "measure-cache-policies": measuring_has_no_policy,
    "measure-more-rows": tile_is_not("MEASURE", (2, 512, 2), (4, 512, 2), (2, 512, 4), (4, 512, 4)),
    "bf16-rows-clamped": tile_is_not("ROW_MODULATE", (1, 512, 2), (1, 512, 4)),
    "copy-in-a-graph": copy_is_a_kernel,
    "lora-share": only_its_node_attaches_a_lora,
    "record-bounded-ring-qkv": absent(r"bounded.{0,3}ring|ring.{0,3}qkv|qkv.{0,3}ring"),
    "record-sage2-p1-entry-fusion": absent(r"sage\w*[^a-z\n]{0,2}p1\b|entry.?fusion"),
    "record-sage2-p2-v-preparation": absent(r"sage\w*[^a-z\n]{0,2}p2\b|\bv.?prep"),
    "record-sage2-p3-temporal-pairing": absent(r"sage\w*[^a-z\n]{0,2}p3\b|temporal.?pair"),
}
# Its bar is missed, and another one, against ComfyUI's chain, is not: it runs as part of an accepted experiment.
KEPT = {"static-two-warps": "triton-norm-modulate-nvfp4", "step-h3-exact": "step-h3-pack"}


def test_every_rejected_experiment_is_tied_to_the_code():
    rejected = {name for name, experiment in BY_ID.items() if experiment["status"] == "rejected"}
    assert rejected - OFF.keys() - KEPT.keys() == set()
    assert all(other in BY_ID[name]["reason"] and BY_ID[other]["default_on"] for name, other in KEPT.items())


@pytest.mark.parametrize("name", sorted(OFF))
def test_what_was_rejected_is_off(name, monkeypatch):
    assert not BY_ID[name]["default_on"]
    if BY_ID[name]["status"] == "rejected":
        assert OFF[name](monkeypatch), f"{name} was rejected, but the code has it on"


def test_nothing_but_what_was_accepted_is_on_by_default():
    on = {name for name, experiment in BY_ID.items() if experiment["default_on"]}
    assert on and {BY_ID[name]["status"] for name in on} == {"accepted"}
    assert "attention-sol" not in on and "attention-int8-38016" not in on


def test_what_is_on_by_default_is_on(monkeypatch):
    for op in ("norm_modulate_nvfp4", "swiglu_nvfp4", "rows_nvfp4", "norm_modulate", "swiglu", "gate_residual_"):
        assert picks(op, monkeypatch) == "triton"
    fa4 = pack_module("kernels.attention.backends.fa4").BACKEND
    assert fa4.exact and fa4.measured and not fa4.opt_in
    assert pack_module("kernels.checkpoint.scales").CHOICES[0] == "adaptive"


def test_a_lost_backend_that_becomes_auto_is_seen(monkeypatch):
    """The guard bites: without ``by_name`` on cute, standing first, the check fails."""
    fused = pack_module("kernels.fused")
    op = fused.OPS["norm_modulate_nvfp4"]
    first = tuple(dataclasses.replace(item, by_name=False) for item in reversed(op.implementations))
    monkeypatch.setitem(fused.OPS, op.name, dataclasses.replace(op, implementations=first))
    assert not cute_is_off(monkeypatch)
