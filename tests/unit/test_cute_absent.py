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


def test_auto_goes_on_to_one_that_accepts():
    op_module, fused = pack_module("kernels.fused._op"), pack_module("kernels.fused")
    cpu = torch.device("cpu")

    def item(name, takes, refusal=None):
        return fused.Implementation(
            name,
            lambda value: f"{name} {value}",
            lambda device: refusal,
            lambda value: None if value in takes else "no",
        )

    op = op_module.Op(
        "made_up", "", lambda value: f"reference {value}", lambda *a: 0,
        (item("first", (1,)), item("broken", (2, 3), "broken"), item("second", (1, 2))),
    )  # fmt: skip
    found = [op_module.run(op, cpu, "auto", value) for value in (1, 2, 3)]
    assert found == ["first 1", "second 2", "reference 3"]
    with pytest.raises(fused.FusedRefused, match="first: no"):
        op_module.run(op, cpu, "first", 2)
