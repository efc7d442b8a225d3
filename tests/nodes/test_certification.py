"""What the nodes make of certificates, with a GPU that is not there: which sites stay on, which norm, what is shown."""

import dataclasses
import re

import pytest
import torch
from conftest import pack_module
from h3_sampling import equal, run_of, sample, selftest
from h3_sampling import fuse as fuse_model

pytestmark = pytest.mark.usefixtures("pack")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def on_cuda(pack, monkeypatch):
    """``on_cuda(norm=, op=reason)``: nodes/fuse.py where all is certified but the ops that have a reason."""
    fuse = pack_module("nodes.fuse")
    monkeypatch.setattr(fuse.certify, "has_run", lambda device: True)

    def certified(norm="aten", **reasons):
        def best(op, device):
            reason = reasons.get(op)
            return ("triton", {}) if reason is None else ("reference", {"triton": reason})

        monkeypatch.setattr(fuse.fused, "best", best)
        monkeypatch.setattr(fuse.certify, "norm_of", lambda device: norm)
        return fuse

    return certified


def test_a_gpu_is_fused_when_something_is_certified(on_cuda, monkeypatch):
    fuse = on_cuda()
    ops = list(fuse.fused.OPS)
    assert fuse.device_reason(CUDA, "off") is None and fuse.device_reason(CPU, "bf16") is None
    assert fuse.device_reason(CPU, "off") == "the stream is on cpu and emulate is off"
    fuse = on_cuda(**dict.fromkeys(ops, "no kernel image"))
    assert fuse.device_reason(CUDA, "off") == "no fused kernel runs here: no kernel image"
    fuse = on_cuda(**{name: f"broken {name}" for name in ops})
    assert re.fullmatch(
        rf"no fused kernel runs here: broken \w+ \(and {len(ops) - 1} other reasons, see the report\)",
        fuse.device_reason(CUDA, "off"),
    )
    fuse = on_cuda(**dict.fromkeys(ops[1:], "no kernel image"))
    assert fuse.device_reason(CUDA, "off") is None
    monkeypatch.setattr(fuse.certify, "has_run", lambda device: False)
    for emulate in ("off", "bf16", "w4a4"):
        assert "not certified on cuda:0 when the model was patched" in fuse.device_reason(CUDA, emulate)


def test_a_site_without_a_certified_producer_is_off_on_a_gpu_only(on_cuda):
    adapt = pack_module("nodes.adapt")
    sites = adapt.Sites(norm="fused")
    fuse = on_cuda(norm="fused")
    assert fuse.sites_on(CUDA, sites) == (sites, {})
    fuse = on_cuda(norm="aten", swiglu_nvfp4="wrong bits", swiglu="wrong too")
    assert fuse.sites_on(CUDA, sites) == (
        adapt.Sites(swiglu=False, norm="aten"),
        {"swiglu": "swiglu_nvfp4 is left out: wrong bits"},
    )
    assert fuse.sites_on(CPU, sites) == (sites, {})
    off = adapt.Sites(swiglu=False)
    assert fuse.sites_on(CUDA, off) == (off, {})


def test_a_refused_site_hands_on_bf16_and_says_so(monkeypatch):
    adapt, fuse, report = (pack_module(f"nodes.{name}") for name in ("adapt", "fuse", "report"))
    model, positive, latent = selftest()
    expected = sample(fuse_model(model, mode="off", emulate="w4a4"), positive, latent)
    refused = {"swiglu": "swiglu_nvfp4 is left out: wrong bits"}
    monkeypatch.setattr(fuse, "sites_on", lambda _, sites: (dataclasses.replace(sites, swiglu=False), refused))
    monkeypatch.setattr(adapt.fused, "swiglu_nvfp4", None)
    patched = fuse_model(model, emulate="w4a4")
    assert equal(sample(patched, positive, latent), expected)
    assert dict(run_of(patched).bf16_inputs) == {("mlp.fc2", "swiglu_nvfp4 is left out: wrong bits"): 9}
    text = report.as_text(report.build(patched))
    assert "bf16 input for mlp.fc2 x 9: swiglu_nvfp4 is left out: wrong bits" in text


def test_the_norm_reaches_the_ops(monkeypatch):
    adapt, fuse = pack_module("nodes.adapt"), pack_module("nodes.fuse")
    model, positive, latent = selftest()
    seen, ensured = [], []
    for name in ("norm_modulate", "norm_modulate_nvfp4"):
        real = getattr(adapt.fused, name)

        def spied(*arguments, real=real, name=name, **keywords):
            seen.append((name, keywords["norm"], keywords["impl"]))
            return real(*arguments, **keywords)

        monkeypatch.setattr(adapt.fused, name, spied)
    monkeypatch.setattr(fuse.certify, "ensure", ensured.append)
    monkeypatch.setattr(fuse.certify, "norm_of", lambda device: "fused")
    adapt.class_reason(type(model.model.diffusion_model.blocks[0]))  # its own probe runs these ops once a process
    seen.clear()

    def norms(**switches):
        seen.clear()
        patched = fuse_model(model, **switches)
        sample(patched, positive, latent, steps=1)
        return set(seen), len(run_of(patched).fused)

    assert norms(mode="off") == (set(), 0) and ensured == []
    assert norms(emulate="w4a4") == ({("norm_modulate_nvfp4", "fused", "auto")}, 3)
    assert ensured == [model.load_device]
    assert norms(modulate=False) == ({("norm_modulate", "fused", "auto")}, 3)
    assert norms(modulate=False, elementwise=False) == ({("norm_modulate", "aten", "reference")}, 3)


def test_sampling_never_probes(monkeypatch):
    fuse = pack_module("nodes.fuse")
    model, positive, latent = selftest()
    patched = fuse_model(model)

    def probe(*arguments):
        raise AssertionError("a probe while sampling")

    monkeypatch.setattr(fuse.certify, "_probe", probe)
    sample(patched, positive, latent, steps=1)
    assert len(run_of(patched).fused) == 3


def test_report_and_environment_show_what_was_refused(monkeypatch):
    entries = [
        {"op": "swiglu", "implementation": "triton", "state": "refused", "reason": "wrong bits", "oracle": "o"},
        {"op": "rows_nvfp4", "implementation": "triton", "state": "certified", "reason": None, "oracle": "the oracle"},
        {"op": "rms_norm", "implementation": "", "state": "not_run", "reason": "not probed yet", "oracle": ""},
    ]
    model = fuse_model(selftest()[0])
    report, environment = pack_module("nodes.report"), pack_module("nodes.environment")
    if not torch.cuda.is_available():
        assert {entry["state"] for entry in report.build(model)["certification"]} == {"not_run"}
        assert "does not run as" not in report.as_text(report.build(model))
    monkeypatch.setattr(report.certify, "status", lambda device: entries)
    built = report.build(model)
    assert built["certification"] == entries
    lines = report.as_text(built).splitlines()
    assert [line for line in lines if "does not run as" in line] == ["swiglu does not run as triton: wrong bits"]
    text = environment.describe()
    assert "Fused kernels on cpu\n  swiglu triton: refused: wrong bits\n" in text
    assert "  rows_nvfp4 triton: certified against the oracle\n" in text
