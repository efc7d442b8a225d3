"""The `cute` implementation where its package is absent or old: refused with the reason, and `auto` does without."""

import importlib.metadata

import pytest
import torch
from conftest import pack_module


@pytest.fixture
def host():
    module = pack_module("kernels.fused.norm_modulate_nvfp4__cute")
    module.package_refusal.cache_clear()
    yield module
    module.package_refusal.cache_clear()


@pytest.mark.parametrize(("version", "expected"), [(None, "not installed"), ("4.3.5", "or newer"), ("4.6.2", None)])
def test_package(host, monkeypatch, version, expected):
    def found(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    reason = host.package_refusal()
    assert reason is None if expected is None else expected in reason


def test_what_runs_by_name_only_is_not_taken_by_auto(monkeypatch):
    op_module, fused = pack_module("kernels.fused._op"), pack_module("kernels.fused")
    cpu = torch.device("cpu")

    def item(name, refusal=None, **fields):
        return fused.Implementation(name, lambda value: f"{name} {value}", lambda device: refusal, **fields)

    op = op_module.Op(
        "made_up", "", lambda value: f"reference {value}", lambda *a: 0,
        (item("broken", "broken"), item("other", by_name=True)),
    )  # fmt: skip
    assert op_module.run(op, cpu, "auto", 1) == "reference 1"
    assert op_module.choose(op, cpu, "auto") == ("reference", {"broken": "broken"})
    assert op_module.run(op, cpu, "other", 1) == "other 1"
    certify = pack_module("kernels.certify")
    monkeypatch.setattr(certify, "_ops", lambda: {"made_up": op})
    assert certify._implementations(cpu) == []
    assert pack_module("kernels.fused.norm_modulate_nvfp4").CUTE.by_name
