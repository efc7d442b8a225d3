"""Attention without a GPU: an oracle, inputs as H3 has them, backends and packages that stand in for real ones."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from conftest import pack_module

attention = pack_module("kernels.attention")
certify = pack_module("kernels.certify")

# Largest error relative to the oracle's largest value: a few roundings of the result, in units of 2^-mantissa.
TOLERANCE = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def oracle(q, k, v, scale=None):
    """Softmax attention in fp32, written out; independent of any attention function."""
    q, k, v = q.float(), k.float(), v.float()
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def error(out, expected):
    """Largest error relative to the largest value."""
    return ((out.float() - expected).abs().max() / expected.abs().max()).item()


def qkv(rows, head_dim, *, heads=3, dtype=torch.float32, seed=0):
    """q, k and v as H3 has them: strided views of one ``[1, rows, 3 * heads * head_dim]`` buffer."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(1, rows, 3 * heads * head_dim, generator=generator).to(dtype)
    return [part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in buffer.chunk(3, -1)]


def call(**changes):
    """A call of 16 rows as H3 makes it, with changes."""
    q, k, v = qkv(16, 128, dtype=torch.bfloat16)
    described = attention.Call.of(q, k, v)
    return type(described)(**{**vars(described), **changes})


def stand_in(load, **changes):
    """A backend's record around ``load``."""
    fields = {"name": "stand_in", "exact": True, "needs": "", "refuse": lambda call: None, "summary": ""}
    return attention.Backend(**{**fields, "load": load, **changes})


@pytest.fixture
def fresh():
    """No backend counts as loaded, and nothing is planned, before and after."""
    attention.registry.loaded.cache_clear()
    attention.forget()
    yield
    attention.registry.loaded.cache_clear()
    attention.forget()


@pytest.fixture
def only(monkeypatch, fresh):
    """Put backends in the place of those in the folder."""

    def put(*backends):
        registry = ({backend.name: backend for backend in backends}, {})
        monkeypatch.setattr(attention.registry, "known", lambda: registry)

    return put


@pytest.fixture
def as_gpu(monkeypatch, fresh):
    """The CPU passes for a GPU of a capability: probes do not run, devices are not entered, refusals see the GPU."""

    def make(cc=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: cc)
        monkeypatch.setattr(certify, "needs", lambda device: False)
        real = attention.Call.of

        def of(q, k, v, **options):
            return type(real(q, k, v))(**{**vars(real(q, k, v, **options)), "device": torch.device("cuda:0")})

        monkeypatch.setattr(attention.Call, "of", of)
        monkeypatch.setattr(attention.auto, "measurable", lambda device: False)

    return make


def package(monkeypatch, name: str, version: str | None = None, **functions) -> ModuleType:
    """A module of that name, with functions and a version, in ``sys.modules``; parents are made too."""
    parent = name.rpartition(".")[0]
    if parent:
        package(monkeypatch, parent)
    module = ModuleType(name)
    module.__path__ = []
    for attribute, value in functions.items():
        setattr(module, attribute, value)
    monkeypatch.setitem(sys.modules, name, module)
    if version is not None:
        from importlib import metadata

        real = metadata.version
        monkeypatch.setattr(metadata, "version", lambda asked: version if asked == name else real(asked))
    return module
