"""Certification with stand-in ops on the CPU: wrong bits are found, reasons are kept, files are used and distrusted."""

import dataclasses
import gc
import json
import re
import threading

import pytest
import torch
from conftest import pack_module

certify = pack_module("kernels.certify")
parity = pack_module("kernels.parity")
fused = pack_module("kernels.fused")
nvfp4 = pack_module("kernels.nvfp4")
op_module = pack_module("kernels.fused._op")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in_gpu(monkeypatch, tmp_path):
    """The CPU counts as a device to certify on, and the cache is the test's own."""
    monkeypatch.setattr(certify, "needs", lambda device: True)
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path / "cache"))
    certify.clear()
    yield
    certify.clear()


def noise(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def doubled(x):
    return x * 2


def bf16_cases(device):
    yield parity.Case("small", (noise(3, 32),))
    x = noise(5, 32)
    x[1, 1] = float("nan")
    yield parity.Case("with a NaN", (x,))


def quantised(x, decode_scale):
    return nvfp4.quantize(x, decode_scale)


def code_cases(device):
    for rows, static in ((1, None), (17, None), (130, torch.tensor(0.01))):
        yield parity.Case(f"{rows} rows", (noise(rows, 80, rows), static), lambda x, scale: x, static)


def added_(x, y):
    return x.add_(y)


def in_place_cases(device):
    yield parity.Case("sum", (noise(3, 32), noise(3, 32, 1)), written=0)


KINDS = {
    "bf16": (doubled, bf16_cases),
    "codes": (quantised, code_cases),
    "in place": (added_, in_place_cases),
}


class Counted:
    """A function that counts its calls; a class, so that its source is this file."""

    __module__ = __name__
    __qualname__ = "Counted"

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def stand_in(kind, run, accepts=lambda *arguments: None, name="op"):
    reference, cases = KINDS[kind]
    item = fused.Implementation("fast", Counted(run), lambda device: None, accepts)
    return fused.Op(name, "", reference, int, (item,), cases)


def probes(op):
    return op.implementations[0].run.calls


def flip(field, at, mask=1):
    """The right codes with bits of one byte flipped."""
    return lambda x, decode_scale: flipped(nvfp4.quantize(x, decode_scale), field, at, mask)


def flipped(q, field, at, mask=1):
    tensor = getattr(q, field).clone()
    tensor.view(torch.uint8)[at] ^= mask
    return dataclasses.replace(q, **{field: tensor})


# ---------------------------------------------------------------- right and wrong implementations


def writes_argument(x):
    out = x * 2
    x[0, 0] = 1.0
    return out


def nan_with_payload(x):
    out = (x * 2).view(torch.int16)
    out[torch.isnan(x)] = 0x7FC1
    return out.view(torch.bfloat16)


def one_bit(x):
    out = (x * 2).view(torch.int16)
    out[2, 7] ^= 1
    return out.view(torch.bfloat16)


def low_nibble_first(x, decode_scale):
    q = nvfp4.quantize(x, decode_scale)
    return dataclasses.replace(q, codes=(q.codes << 4) | (q.codes >> 4))


def unswizzled(x, decode_scale):
    q = nvfp4.quantize(x, decode_scale)
    linear = torch.zeros_like(q.block_scale)
    linear[: x.shape[0], : x.shape[1] // 16] = nvfp4.unswizzle(q.block_scale, x.shape[0], x.shape[1] // 16)
    return dataclasses.replace(q, block_scale=linear)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_one_is_certified(kind):
    op = stand_in(kind, KINDS[kind][0])
    assert certify.refusal(op, "fast", CPU) is None
    assert op_module.choose(op, CPU, "auto") == ("fast", {}) and op_module.choose(op, CPU, "fast") == ("fast", {})


def scale_of_its_own(x, decode_scale):
    q = nvfp4.quantize(x, decode_scale)
    return dataclasses.replace(q, decode_scale=q.decode_scale * 1.01)


FAR = "differ from nvfp4.quantize by more than one"
WRONG = [
    ("bf16", one_bit, r"small: 1 of 96 values differ from the reference, the first at row 2, column 7$"),
    ("bf16", lambda x: x * 2 + 0.0 * x.sum(), r"with a NaN: 1\d\d of 160 values differ"),
    ("bf16", lambda x: (x * 2)[:2], r"gives \(2, 32\) torch.bfloat16, not \(3, 32\) torch.bfloat16"),
    ("bf16", lambda x: x.float() * 2, r"gives \(3, 32\) torch.float32"),
    ("bf16", lambda x: None, "gives a NoneType, not a tensor"),
    ("bf16", writes_argument, "writes into its argument 0"),
    ("codes", flip("codes", (0, 0), 0x44), f"codes {FAR} step"),
    ("codes", flip("codes", (0, 0), 0x08), f"codes {FAR} step"),
    ("codes", low_nibble_first, f"codes {FAR} step"),
    ("codes", unswizzled, "scales"),
    ("codes", flip("block_scale", (0, 0), 2), f"scales {FAR} code"),
    ("codes", flip("block_scale", (-1, -1)), "1 scales and 0 bytes of codes in the padding are not zero"),
    ("codes", flip("codes", (-1, -1)), "0 scales and 1 bytes of codes in the padding are not zero"),
    ("codes", scale_of_its_own, "the decode scale is .*, not "),
    ("codes", lambda x, d: x, "gives a Tensor, not NVFP4"),
    ("codes", lambda x, d: nvfp4.quantize(x[:, :64], d), r"gives codes \(16, 32\) and scales \(128, 4\) of \(1, 64\)"),
    ("in place", lambda x, y: x + y, "does not return argument 0"),
    ("in place", lambda x, y: x.add_(y.mul_(1.5)), "writes into its argument 1"),
]


@pytest.mark.parametrize(("kind", "run", "reason"), WRONG)
def test_a_wrong_one_is_refused_with_the_place(kind, run, reason):
    op = stand_in(kind, run)
    found = certify.refusal(op, "fast", CPU)
    assert found.startswith("not certified on cpu: ") and re.search(reason, found)
    assert op_module.choose(op, CPU, "auto") == ("reference", {"fast": found})
    with pytest.raises(fused.FusedRefused, match="^op cannot run: fast: not certified on cpu: .*; choose"):
        op_module.run(op, CPU, "fast", *next(iter(KINDS[kind][1](CPU))).arguments)


def test_nan_payloads_and_signs_of_zero():
    assert certify.refusal(stand_in("bf16", nan_with_payload), "fast", CPU) is None
    assert parity.bits_reason(torch.tensor([-0.0]), torch.tensor([0.0])).startswith("1 of 1 values differ")


def test_padding_is_compared_with_garbage_behind_it():
    """An implementation that leaves its buffers as the allocator gave them."""

    def unpadded(x, decode_scale):
        q = nvfp4.quantize(x, decode_scale)
        codes = torch.full_like(q.codes, 0xA5)
        codes[: x.shape[0]] = q.codes[: x.shape[0]]
        return dataclasses.replace(q, codes=codes)

    assert "600 bytes of codes in the padding" in certify.refusal(stand_in("codes", unpadded), "fast", CPU)


# ---------------------------------------------------------------- exceptions


@pytest.mark.parametrize(
    ("error", "reason", "lasting"),
    [
        (
            RuntimeError("CUDA error: no kernel image is available"),
            "no code for this",
            True,
        ),
        (
            RuntimeError("PTXAS error: ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'"),
            "TRITON_PTXAS_PATH",
            True,
        ),
        (ModuleNotFoundError("No module named 'triton'"), "install triton", True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "free device memory", False),
        (MemoryError(), "MemoryError", False),
        (AssertionError(), "AssertionError", True),
        (RuntimeError("at " + "/opt/x/y.py " * 200), "at y.py y.py", True),
    ],
)
def test_an_exception_is_the_reason_with_what_helps(error, reason, lasting, tmp_path):
    def run(x):
        raise error

    op = stand_in("bf16", run)
    found = certify.refusal(op, "fast", CPU)
    assert found.startswith(f"not certified on cpu: {type(error).__name__}") and reason in found
    assert len(found) < 1000 and "/opt" not in found
    assert certify.refusal(op, "fast", CPU) == found and probes(op) == 1
    assert len(list(tmp_path.rglob("*.json"))) == lasting


def test_a_refusal_that_may_pass_is_tried_again_by_ensure(monkeypatch):
    def run(x):
        if probes(op) == 1:
            raise MemoryError
        return x * 2

    op = stand_in("bf16", run)
    monkeypatch.setattr(certify, "_ops", lambda: {"op": op})
    certify.ensure(CPU)
    assert "MemoryError" in certify.refusal("op", "fast", CPU)
    certify.ensure(CPU)
    assert certify.refusal("op", "fast", CPU) is None


def test_a_cancel_passes_and_leaves_nothing(tmp_path):
    class Cancel(BaseException):
        pass

    def run(x):
        raise Cancel

    op = stand_in("bf16", run)
    with pytest.raises(Cancel):
        certify.refusal(op, "fast", CPU)
    assert not list(tmp_path.rglob("*.json"))
    with pytest.raises(Cancel):
        certify.refusal(op, "fast", CPU)


def test_what_brings_no_cases_or_takes_none_is_refused():
    op = dataclasses.replace(stand_in("bf16", doubled, name="dropped in"), cases=None)
    assert "brings no cases" in certify.refusal(op, "fast", CPU)
    assert "accepts none of the cases" in certify.refusal(stand_in("bf16", doubled, lambda x: "no"), "fast", CPU)


# ---------------------------------------------------------------- what a probe leaves behind


def test_a_probe_disturbs_nothing():
    def run(x):
        assert not torch.is_grad_enabled()
        torch.rand(5)
        return x * 2

    torch.manual_seed(3)
    before = torch.get_rng_state()
    gc.collect()
    alive = sum(1 for item in gc.get_objects() if type(item) is torch.Tensor)
    with torch.enable_grad():
        assert certify.refusal(stand_in("bf16", run), "fast", CPU) is None
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    gc.collect()
    assert sum(1 for item in gc.get_objects() if type(item) is torch.Tensor) <= alive + 1


def test_memory_is_asked_first():
    op = stand_in("bf16", doubled)
    for _ in range(3):
        certify.refusal(op, "fast", CPU)
        op_module.choose(op, CPU, "auto")
    assert probes(op) == 2  # its two cases, once
    certify.clear()
    certify.refusal(op, "fast", CPU)
    assert probes(op) == 2  # from the file


def test_threads_probe_once():
    op = stand_in("bf16", doubled)
    threads = [threading.Thread(target=certify.refusal, args=(op, "fast", CPU)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert probes(op) == 2


@pytest.mark.parametrize("what", ["compile", "capture"])
def test_no_probe_while_tracing_or_capturing(monkeypatch, what):
    op = stand_in("bf16", doubled)
    if what == "compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        monkeypatch.setattr(certify, "busy", lambda device: "a CUDA graph is being captured")
    reason = certify.refusal(op, "fast", CPU)
    assert "not certified on cpu yet, and" in reason and probes(op) == 0
    monkeypatch.undo()
    monkeypatch.setattr(certify, "needs", lambda device: True)
    assert certify.refusal(op, "fast", CPU) is None


def test_the_cpu_itself_needs_no_certificate(monkeypatch):
    monkeypatch.undo()
    op = stand_in("bf16", one_bit)
    assert certify.refusal(op, "fast", "cpu") is None and probes(op) == 0
    assert certify.norm_of("cpu") == "aten" and certify.has_run("cpu")


# ---------------------------------------------------------------- the files


def files(tmp_path):
    return sorted(tmp_path.rglob("*.json"))


def fresh(op):
    """The state as in a new process."""
    certify.clear()
    op.implementations[0].run.calls = 0
    return certify.refusal(op, "fast", CPU), probes(op)


def test_both_outcomes_come_from_the_file(tmp_path):
    for op, right in ((stand_in("bf16", doubled), True), (stand_in("bf16", one_bit, name="broken"), False)):
        first = certify.refusal(op, "fast", CPU)
        assert (first is None) == right
        assert fresh(op) == (first, 0)
    assert len(files(tmp_path)) == 2 and not list(tmp_path.rglob("*.part"))
    stored = json.loads(files(tmp_path)[0].read_text())
    assert stored["schema"] == certify.SCHEMA and stored["environment"]["torch"] == torch.__version__


DAMAGE = [
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: "[]",
    lambda text: "null",
    lambda text: "[" * 100000,
    lambda text: text.replace("h3bw-certificate/1", "h3bw-certificate/9"),
    lambda text: text.replace('"op": "op"', '"op": "other"'),
    lambda text: text.replace('"implementation": "fast"', '"implementation": "slow"'),
    lambda text: text.replace('"state": "certified"', '"state": "fine"'),
    lambda text: text.replace('"state": "certified"', '"state": "refused"'),
    lambda text: text.replace('"reason": null', '"reason": "but"'),
    lambda text: text.replace('"reason": null,', ""),
    lambda text: text.replace('"key": "', '"key": "0'),
    lambda text: text.replace('"oracle": "', '"oracle": 1, "was": "'),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_file_counts_as_absent(tmp_path, damage):
    op = stand_in("bf16", doubled)
    certify.refusal(op, "fast", CPU)
    (file,) = files(tmp_path)
    good = file.read_text()
    assert damage(good) != good
    file.write_text(damage(good))
    assert fresh(op) == (None, 2)
    assert json.loads(file.read_text())["certificate"]["state"] == "certified"  # written again
    file.write_bytes(b"\xff\xfe\x00")
    assert fresh(op) == (None, 2)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path / "file"))
    op = stand_in("bf16", doubled)
    assert certify.refusal(op, "fast", CPU) is None
    assert fresh(op) == (None, 2)


def test_the_cache_can_be_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("H3BW_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    op = stand_in("bf16", doubled)
    certify.refusal(op, "fast", CPU)
    assert certify.cache_folder() is None and not files(tmp_path) and fresh(op) == (None, 2)


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path / "mine"))
    assert certify.cache_folder() == tmp_path / "mine" / "certificates"
    monkeypatch.delenv("H3BW_CACHE")
    monkeypatch.setattr(certify.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert certify.cache_folder() == tmp_path / "xdg" / "h3-blackwell-runtime" / "certificates"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert certify.cache_folder() == tmp_path / ".cache" / "h3-blackwell-runtime" / "certificates"
    monkeypatch.setattr(certify.sys, "platform", "darwin")
    assert certify.cache_folder() == tmp_path / "Library" / "Caches" / "h3-blackwell-runtime" / "certificates"


def test_whatever_the_outcome_depends_on_changes_the_key(monkeypatch, tmp_path):
    op = stand_in("bf16", doubled)
    item = op.implementations[0]

    def key(op=op, item=item):
        return certify._key(op, item, CPU)

    base = key()
    assert base == key() and len(base) == 64
    others = {
        "op": key(dataclasses.replace(op, name="another")),
        "implementation": key(item=dataclasses.replace(item, name="another")),
        "function": key(item=dataclasses.replace(item, run=doubled)),
        "reference": key(dataclasses.replace(op, reference=one_bit)),
    }
    real = certify.environment(CPU)
    for name in real:
        with monkeypatch.context() as patch:
            patch.setattr(certify, "environment", lambda device, name=name: {**real, name: "another"})
            others[name] = key()
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_PTXAS_PATH", "newer")
        others["ptxas named"] = key()
    with monkeypatch.context() as patch:
        patch.setattr(certify, "_folder_digests", lambda folder: ("another",))
        others["sources"] = key()
    assert len({base, *others.values()}) == len(others) + 1
    assert {"device", "capability", "driver", "torch", "triton", "comfy-kitchen", "oracle", "ptxas"} <= set(real)


def test_every_source_counts(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("a = 1")
    digests = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        certify._folder_digests.cache_clear()
        digests.append(certify._folder_digests(tmp_path))
    assert digests[0] != digests[1]
    certify._folder_digests.cache_clear()


def test_without_a_readable_source_nothing_is_kept(tmp_path):
    run = Counted(doubled)
    run.__module__ = "nowhere"
    op = stand_in("bf16", doubled)
    op = dataclasses.replace(op, implementations=(dataclasses.replace(op.implementations[0], run=run),))
    assert certify.refusal(op, "fast", CPU) is None and not files(tmp_path)


# ---------------------------------------------------------------- status


def test_status_tells_what_is_known_and_probes_nothing(monkeypatch):
    right, broken = stand_in("bf16", doubled, name="right"), stand_in("bf16", one_bit, name="broken")
    elsewhere = fused.Implementation("elsewhere", doubled, lambda device: "needs another device")
    right = dataclasses.replace(right, implementations=(*right.implementations, elsewhere))
    monkeypatch.setattr(certify, "_ops", lambda: {"right": right, "broken": broken})

    def states():
        return [(entry["op"], entry["implementation"], entry["state"]) for entry in certify.status(CPU)]

    assert not certify.has_run(CPU)
    assert states() == [
        ("right", "fast", "not_run"), ("right", "elsewhere", "not_run"), ("broken", "fast", "not_run")
    ]  # fmt: skip
    assert probes(right) == probes(broken) == 0
    certify.ensure(CPU)
    assert certify.has_run(CPU)
    expected = [
        ("right", "fast", "certified"), ("right", "elsewhere", "not_run"), ("broken", "fast", "refused"),
        ("rms_norm", "", "not_run"),
    ]  # fmt: skip
    assert states() == expected
    entries = {entry["op"] + entry["implementation"]: entry for entry in certify.status(CPU)}
    keys = {"op", "implementation", "state", "reason", "oracle", "from_cache", "probe_ms", "key"}
    assert all(set(entry) == keys for entry in entries.values()) and json.dumps(list(entries.values()))
    assert entries["rightfast"]["probe_ms"] > 0 and entries["rightfast"]["oracle"] == "its reference, every bit"
    assert entries["rightelsewhere"]["reason"] == "needs another device"
    assert "values differ" in entries["brokenfast"]["reason"] and not entries["brokenfast"]["from_cache"]
    certify.clear()
    entries = {entry["op"] + entry["implementation"]: entry for entry in certify.status(CPU)}
    assert entries["rightfast"]["from_cache"] and entries["brokenfast"]["state"] == "refused"
