"""Certification on a real device: what ships is certified, what is broken on purpose is refused and not used."""

import dataclasses

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.gpu

certify = pack_module("kernels.certify")
fused = pack_module("kernels.fused")
launch = pack_module("kernels.fused._launch")

DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache and an empty memory, before and after."""
    reason = launch.device_refusal(torch.device(DEVICE))
    if reason is not None:
        pytest.skip(f"gpu: {reason}")
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path))
    certify.clear()
    yield
    certify.clear()


def entries():
    """Certificates by op; what runs by name only is certified when it is asked for."""
    return {entry["op"]: entry for entry in certify.status(DEVICE) if entry["implementation"] != "cute"}


def test_every_op_is_certified(tmp_path):
    certify.ensure(DEVICE)
    found = entries()
    for name, entry in found.items():
        print(f"{name}: {entry['state']} in {entry['probe_ms']:.0f} ms against {entry['oracle']}; {entry['reason']}")
    assert {name: found[name]["reason"] for name in fused.OPS} == dict.fromkeys(fused.OPS)
    assert {found[name]["state"] for name in fused.OPS} == {"certified"}
    assert all(fused.best(name, DEVICE)[0] == "triton" for name in fused.OPS) and certify.has_run(DEVICE)
    assert found["rms_norm"]["state"] in ("certified", "refused")
    assert certify.norm_of(DEVICE) == ("fused" if found["rms_norm"]["state"] == "certified" else "aten")
    assert len(list(tmp_path.rglob("*.json"))) == len(fused.OPS) + 1


def test_the_second_process_reads_the_files_and_a_second_call_nothing(monkeypatch):
    certify.ensure(DEVICE)
    before = {name: entry["state"] for name, entry in entries().items()}
    certify.clear()

    def probe(*arguments):
        raise AssertionError("probed again")

    monkeypatch.setattr(certify, "_probe", probe)
    certify.ensure(DEVICE)
    assert {name: entry["state"] for name, entry in entries().items()} == before
    assert all(entry["from_cache"] for entry in entries().values())
    monkeypatch.setattr(certify, "_read", probe)
    assert fused.best("swiglu", DEVICE)[0] == "triton"


def test_a_probe_is_short_once_compiled_and_disturbs_nothing(monkeypatch):
    monkeypatch.setenv("H3BW_CACHE", "off")
    certify.ensure(DEVICE)
    certify.clear()
    torch.cuda.synchronize()
    states = torch.cuda.get_rng_state(0), torch.get_rng_state()
    allocated = torch.cuda.memory_allocated(0)
    certify.ensure(DEVICE)
    torch.cuda.synchronize()
    assert torch.equal(torch.cuda.get_rng_state(0), states[0]) and torch.equal(torch.get_rng_state(), states[1])
    assert torch.cuda.memory_allocated(0) <= allocated
    total = sum(entry["probe_ms"] for entry in entries().values())
    print({name: round(entry["probe_ms"]) for name, entry in entries().items()})
    assert total < 10_000


def test_no_probe_inside_a_graph_capture():
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=DEVICE)
    graph, reasons = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        reasons.append(certify.refusal("swiglu", "triton", DEVICE))
        x.add_(1)
    assert "a CUDA graph is being captured" in reasons[0] and entries()["swiglu"]["state"] == "not_run"
    assert certify.refusal("swiglu", "triton", DEVICE) is None


def wrong(op):
    """``op`` with its kernel behind a wrapper that flips the lowest bit of one code, or of one bf16 number."""
    item = op.implementations[0]

    def run(*arguments):
        out = item.run(*arguments)
        if isinstance(out, torch.Tensor):
            out.view(torch.int16)[0, 5] ^= 1
        else:
            out.codes[0, 5] ^= 1
        return out

    return dataclasses.replace(op, implementations=(dataclasses.replace(item, run=run),))


def test_one_wrong_code_is_refused(monkeypatch):
    """One step in one code: seen where comfy-kitchen's CUDA quantiser is the oracle, which is exact."""
    monkeypatch.setitem(fused.OPS, "swiglu_nvfp4", wrong(fused.OPS["swiglu_nvfp4"]))
    reason = certify.refusal("swiglu_nvfp4", "triton", DEVICE)
    oracle = entries()["swiglu_nvfp4"]["oracle"]
    if not oracle.startswith("comfy-kitchen"):
        pytest.skip(f"gpu: no exact oracle for codes, have {oracle}")
    assert "codes differ from comfy-kitchen's CUDA quantiser, the first at row 0, column 11" in reason
    name, reasons = fused.best("swiglu_nvfp4", DEVICE)
    assert name == "reference" and reasons == {"triton": reason}
    assert certify.refusal("swiglu", "triton", DEVICE) is None


@pytest.fixture
def tiny(pack):
    from h3_sampling import selftest

    return selftest()


@pytest.mark.parametrize("which", ["all", "one"])
def test_fuse_blocks_falls_back_and_says_so(tiny, monkeypatch, which):
    from h3_sampling import equal, fuse, run_of, sample

    model, positive, latent = tiny
    stock = sample(model, positive, latent)
    broken = list(fused.OPS) if which == "all" else ["swiglu"]
    for name in broken:
        monkeypatch.setitem(fused.OPS, name, wrong(fused.OPS[name]))
    patched = fuse(model, emulate="off")
    # A bf16 op that is refused runs as its reference, which is ComfyUI's own chain.
    assert equal(sample(patched, positive, latent), stock)
    record, report = run_of(patched), pack_module("nodes.report")
    text = report.as_text(report.build(patched))
    if which == "all":
        assert not record.fused
        reasons = {reason for _, reason in record.fallbacks}
        assert len(reasons) == 1 and next(iter(reasons)).startswith("no fused kernel runs here: not certified on cuda")
    else:
        assert len(record.fused) == 3
    for name in broken:
        assert f"{name} does not run as triton: " in text


def test_a_refused_producer_is_left_out_of_the_block(tiny, monkeypatch):
    from h3_sampling import fuse, run_of, sample

    model, positive, latent = tiny
    op = fused.OPS["swiglu_nvfp4"]

    def no_image(*arguments):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    item = dataclasses.replace(op.implementations[0], run=no_image)
    monkeypatch.setitem(fused.OPS, "swiglu_nvfp4", dataclasses.replace(op, implementations=(item,)))
    patched = fuse(model, emulate="w4a4")
    sample(patched, positive, latent, steps=1)
    (reason,) = {reason for linear, reason in run_of(patched).bf16_inputs if linear == "mlp.fc2"}
    assert reason.startswith("swiglu_nvfp4 is left out: not certified on cuda:0: RuntimeError: CUDA error: no kernel")
    assert "no code for this GPU" in reason and len(run_of(patched).fused) == 3
