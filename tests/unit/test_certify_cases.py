"""The cases that the shipped ops are certified with find what they are there for, and the two rules of comparison."""

import dataclasses
import re

import pytest
import torch
from conftest import pack_module

certify = pack_module("kernels.certify")
parity = pack_module("kernels.parity")
fused = pack_module("kernels.fused")
nvfp4 = pack_module("kernels.nvfp4")
shipped_cases = pack_module("kernels.fused._cases")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in_gpu(monkeypatch, tmp_path):
    """The CPU counts as a device to certify on, and the cache is the test's own."""
    monkeypatch.setattr(certify, "needs", lambda device: True)
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path / "cache"))
    certify.clear()
    yield
    certify.clear()


def noise(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def flipped(q, field, at, mask=1):
    tensor = getattr(q, field).clone()
    tensor.view(torch.uint8)[at] ^= mask
    return dataclasses.replace(q, **{field: tensor})


def test_tolerance_is_for_few_codes_and_one_step():
    """One step in 1 % of the codes passes where the oracle divides; one step in more of them does not."""
    x = noise(130, 80)
    g = nvfp4.default_decode_scale(x)
    codes, bits = parity._reference_codes(x, g)
    moved = codes.clone()
    up = ((moved & 7) < 7).flatten().nonzero().flatten()
    moved.view(-1)[up[:104]] += 1
    assert parity._close_reason(moved, bits, codes, bits) is None
    moved.view(-1)[up[104:110]] += 1
    assert "1 % may" in parity._close_reason(moved, bits, codes, bits)
    far = codes.clone()
    far.view(-1)[((codes & 7) < 6).flatten().nonzero().flatten()[0]] += 2
    assert "1 of 10400 codes differ from nvfp4.quantize by more than one step" in parity._close_reason(
        far, bits, codes, bits
    )
    one = bits.clone()
    one[0, 0] += 1
    assert parity._close_reason(codes ^ 7 * (one != bits).repeat_interleave(16, 1), one, codes, bits) is None
    assert parity._close_reason(codes ^ 7, bits * 0, codes, bits * 0) is None  # a scale of zero: any code means zero
    assert parity._close_reason(codes & 8, bits * 0, codes * 0, bits * 0) is None


def test_all_zero_needs_zero_scales():
    x = torch.zeros(17, 80).bfloat16()
    q = nvfp4.quantize(x)
    assert parity.codes_reason(q, x, None) is None
    negative = dataclasses.replace(q, codes=torch.where(torch.arange(32)[:, None] < 17, 0x88, 0).expand(-1, 40).byte())
    assert parity.codes_reason(negative, x, None) is None
    assert "scales are not zero" in parity.codes_reason(flipped(q, "block_scale", (0, 0)), x, None)
    assert "codes are not zero" in parity.codes_reason(flipped(q, "codes", (0, 0)), x, None)


@pytest.fixture
def small_cases(monkeypatch):
    """The shipped cases, H3's width made small."""
    width = 256
    kinds = tuple((rows, width if columns > width else columns, kind) for rows, columns, kind in shipped_cases.KINDS)
    for name, value in (("KINDS", kinds), ("H3_COLUMNS", width), ("NORM_ROWS", 16), ("NORM_TURNS", 2)):
        monkeypatch.setattr(shipped_cases, name, value)


def shipped_with(change):
    """The registry with an implementation of every op: its reference behind ``change(op name, result, arguments)``."""
    ops = {}
    for name, op in fused.OPS.items():

        def run(*arguments, op=op, name=name):
            return change(name, op.reference(*arguments), arguments)

        run.__qualname__ = f"{change.__qualname__} of {name}"
        ops[name] = dataclasses.replace(op, implementations=(fused.Implementation("fast", run, lambda device: None),))
    return ops


def test_the_shipped_cases_pass_the_references(small_cases, monkeypatch):
    monkeypatch.setattr(certify, "_ops", lambda: shipped_with(lambda name, out, arguments: out))
    certify.ensure(CPU)
    reasons = {entry["op"]: entry["reason"] for entry in certify.status(CPU)}
    reasons.pop("rms_norm")
    assert reasons == dict.fromkeys(shipped_cases.CASES)
    assert set(shipped_cases.CASES) == set(fused.OPS)


def spoil(out):
    """Change the last element that is not padding by the least that can be changed."""
    if isinstance(out, torch.Tensor):
        bits = out.view(torch.int16)
        bits[-1, -1] ^= 1
        return out
    scales = out.block_scale.view(torch.uint8).clone()
    scales[0, 0] ^= 2
    return dataclasses.replace(out, block_scale=scales.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("broken", list(shipped_cases.CASES))
def test_the_shipped_cases_find_one_wrong_element(small_cases, monkeypatch, broken):
    ops = shipped_with(lambda name, out, arguments: spoil(out))
    monkeypatch.setattr(certify, "_ops", lambda: ops)
    assert re.search("1 of .* (values|scales) differ", certify.refusal(broken, "fast", CPU))


def test_the_kinds_of_values_are_what_they_are_called(small_cases):
    """What the modulated rows hold, before they are quantised."""
    seen = {}
    for case in shipped_cases.norm_modulate_nvfp4(CPU):
        h = case.chain(*case.arguments)
        blocks = h.view(h.shape[0], -1, 16).abs().amax(-1)
        seen.setdefault(case.name.split()[0], []).append((h, blocks))
    assert set(seen) == {"random", "ties", "wide", "blocks", "one_hot", "zero"}
    assert not any(h.any() for h, _ in seen["zero"])
    assert all(0.5 < float((blocks == 0).float().mean()) < 0.8 for _, blocks in seen["blocks"])
    assert all(int((h != 0).sum()) == h.shape[0] for h, _ in seen["one_hot"])
    wide = [blocks[blocks > 0].log2() for _, blocks in seen["wide"]]
    assert all(float(exponents.max() - exponents.min()) > 12 for exponents in wide)
    ties = [case for case in shipped_cases.rows_nvfp4(CPU) if case.name.startswith("ties") and case.decode_scale]
    codes = [case.chain(*case.arguments) for case in ties]
    assert all(((h.abs() % 0.5) == 0.25).float().mean() > 0.3 for h in codes) and ties


def test_every_gate_is_among_the_cases():
    every = [case for case in shipped_cases.swiglu(CPU) if case.name.startswith("every")]
    assert all(len(case.arguments[0][:, :256].contiguous().view(torch.int16).unique()) == 65536 for case in every)

    def off_by_one_gate(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(torch.where(gate == -88.5, 0.0, gate)).mul_(up)

    reasons = [parity.case_reason(case, fused.OPS["swiglu"].reference, off_by_one_gate) for case in every]
    assert all("1 of 65536 values differ" in reason for reason in reasons)


def test_the_norm_is_fused_only_where_it_is_atens(small_cases, monkeypatch):
    def exact(name, out, arguments):
        return out if arguments[-1] != "fused" else fused.OPS[name].reference(*arguments[:-1], "aten")

    def moved(name, out, arguments):
        return spoil(exact(name, out, arguments)) if arguments[-1] == "fused" else out

    for change, norm in ((exact, "fused"), (moved, "aten")):
        certify.clear()
        ops = shipped_with(change)
        monkeypatch.setattr(certify, "_ops", lambda ops=ops: ops)
        assert certify.norm_of(CPU) == norm
        (entry,) = (entry for entry in certify.status(CPU) if entry["op"] == "rms_norm")
        assert entry["implementation"] == "fast"
        assert entry["state"] == ("certified" if norm == "fused" else "refused")
        certify.clear()
        assert certify.norm_of(CPU) == norm
        (entry,) = (entry for entry in certify.status(CPU) if entry["op"] == "rms_norm")
        assert entry["from_cache"]
    assert "norm='fused' of norm_modulate" in entry["reason"]


def test_without_a_certified_kernel_the_norm_is_atens(small_cases, monkeypatch):
    ops = shipped_with(lambda name, out, arguments: spoil(out) if name == "norm_modulate_nvfp4" else out)
    monkeypatch.setattr(certify, "_ops", lambda: ops)
    assert certify.norm_of(CPU) == "aten"
    (entry,) = (entry for entry in certify.status(CPU) if entry["op"] == "rms_norm")
    assert entry["state"] == "not_run" and entry["reason"] == "norm_modulate_nvfp4 runs as its reference"
