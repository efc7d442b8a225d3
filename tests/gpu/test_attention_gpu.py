"""Every attention backend that runs on this GPU, against double precision; run with ``-rs -s`` to see every number.

A backend that is not installed, or refuses the device or the call, is skipped with its own reason. What is printed are
the errors; time is the benchmark's (``kernels.measure.attention_bench``).
"""

from __future__ import annotations

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.gpu

attention = pack_module("kernels.attention")
certify = pack_module("kernels.certify")
errors = pack_module("kernels.attention.errors")

NAMES = attention.names()
ROWS = (1, 16, 127, 128, 129, 4097)
HEADS, HEAD_DIM = 4, 128
BF16 = torch.bfloat16
# bf16 keeps 8 bits: rounding the result costs about 1.2e-3 of its norm, rounding the probabilities about as much again.
EXACT_RELATIVE = 5e-3
APPROXIMATE_COSINE = 0.999
H3_STRIDE = 3 * 56 * 128


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """Certificates and decisions of these tests only; certificates are kept from test to test."""
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path_factory.getbasetemp() / "attention-cache"))


def record_of(name):
    return next(record for record in attention.records() if record.name == name)


def runs_here(name):
    """The record, or a skip with the reason."""
    record = record_of(name)
    if record.opt_in:
        pytest.skip(f"{name} runs only when somebody asks for it")
    reason = {entry[0]: entry[2] for entry in attention.list_backends("cuda")}[name]
    if reason is None:
        reason = attention.probe.refusal(record, attention.registry.loaded(record)[0], torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return record


def views(rows, *, heads=HEADS, dtype=BF16, seed=0, offset=0.0):
    """q, k, v as H3 has them: views of one buffer; k with a constant of +-offset on each channel."""
    generator = torch.Generator("cuda").manual_seed(seed)
    buffer = torch.randn(1, rows, 3 * heads * HEAD_DIM, device="cuda", generator=generator)
    if offset:
        signs = torch.randn(heads * HEAD_DIM, device="cuda", generator=generator).sign()
        buffer[..., heads * HEAD_DIM : 2 * heads * HEAD_DIM] += offset * signs
    return [part.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2) for part in buffer.to(dtype).chunk(3, -1)]


def odd_views(rows):
    """The same numbers behind an odd address (k) and rows of 131 elements (v)."""
    q, k, v = views(rows)
    odd = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view(k.shape).copy_(k)
    wide = torch.zeros(*v.shape[:3], 131, dtype=v.dtype, device="cuda")[..., :HEAD_DIM].copy_(v)
    return [q, odd, wide]


def mixed(rows):
    """q and k in fp32, as a norm leaves them, v in bf16."""
    q, k, v = views(rows, dtype=torch.float32)
    return [q, k, v.to(BF16)]


def turned(rows):
    """Packed ``[B, H, S, D]``, and q with its last two dimensions swapped in memory."""
    q, k, v = (t.contiguous() for t in views(rows))
    return [q.transpose(2, 3).contiguous().transpose(2, 3), k, v]


KINDS = {
    "strided": lambda rows: views(rows),
    "k offset by 50": lambda rows: views(rows, offset=50.0),
    "q and k fp32": mixed,
    "odd strides": odd_views,
    "heads first": turned,
}


def attempt(name, tensors, **options):
    """The result, or a skip with the refusal."""
    try:
        return attention.run(name, *tensors, **options)
    except attention.AttentionRefused as refusal:
        pytest.skip(str(refusal))


def check(name, out, tensors, scale=None):
    found = errors.compare(out, errors.reference(*tensors, scale))
    print(f"\n{name} {tuple(out.shape)}: {found}, largest {found.max_relative:.2e}", end="")
    if record_of(name).exact:
        assert found.relative <= EXACT_RELATIVE, found
    else:
        assert found.cosine >= APPROXIMATE_COSINE, found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_parity(name, kind, rows):
    record = runs_here(name)
    tensors = KINDS[kind](rows)
    before = [t.clone() for t in tensors]
    out = attempt(name, tensors, **dict(record.probe_options))
    assert out.shape == tensors[0].shape and out.dtype == tensors[2].dtype and out.device == tensors[2].device
    assert all(map(torch.equal, tensors, before)), "it wrote into its inputs"
    check(name, out, tensors)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.03, 0.2])
def test_the_scale_is_the_callers(name, scale):
    record = runs_here(name)
    tensors = views(515)
    check(name, attempt(name, tensors, scale=scale, **dict(record.probe_options)), tensors, scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", attention.LAYOUTS)
def test_layouts_agree(name, layout):
    record = runs_here(name)
    tensors = views(515)
    check(name, attempt(name, tensors, layout=layout, **dict(record.probe_options)), tensors)


def test_sol_without_sinks_is_recorded():
    runs_here("sol")
    for rows in (4097, 16384):
        tensors = views(rows)
        reference = errors.Slice(*tensors, None)
        for tau in (0.5, 1.0, 1.3):
            found = reference.errors(attention.run("sol", *tensors, tau=tau))
            print(f"\nsol, {rows} rows of noise, tau {tau}: {found}", end="")
            assert torch.isfinite(torch.tensor(found.relative))


@pytest.mark.parametrize("name", NAMES)
def test_more_keys_than_queries(name):
    runs_here(name)
    q, k, v = views(515)
    check(name, attempt(name, [q[:, :, :129], k, v]), [q[:, :, :129], k, v])


@pytest.mark.parametrize("name", NAMES)
def test_views_that_reach_past_2_to_the_31(name):
    """The last rows of a view whose offsets need 32 unsigned bits; kernels with 32-bit offsets get a packed copy."""
    record = runs_here(name)
    rows = 100_096
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of free memory, {free / 2**30:.1f} GiB are free")
    if name == "sdpa_math":
        pytest.skip("writes q k^T out")
    buffer = torch.empty(1, rows, H3_STRIDE, dtype=BF16, device="cuda")
    buffer.normal_(generator=torch.Generator("cuda").manual_seed(0))
    tensors = [buffer[..., start : start + 128].unflatten(-1, (1, 128)).transpose(1, 2) for start in (0, 7168, 14336)]
    assert all((rows - 1) * t.stride(2) > 2**31 for t in tensors)
    plan = attention.plan_for(attention.Request(name, options=record.probe_options), list(tensors))
    assert plan.fixes.copies == (3 if record.int32_offsets else 0)
    out = attempt(name, tensors, **dict(record.probe_options))
    reference = errors.Slice(*tensors, None)  # its rows are spread from the first to the last
    found = reference.errors(out)
    print(f"\n{name}, {rows} rows of stride {H3_STRIDE}: {found}", end="")
    assert found.relative <= EXACT_RELATIVE if record.exact else found.cosine >= APPROXIMATE_COSINE


@pytest.mark.parametrize("name", NAMES)
def test_no_copy_of_h3s_views_and_no_memory_beyond_the_kernels_own(name):
    record = runs_here(name)
    tensors = views(4096, heads=56)
    if name == "sdpa_math":
        pytest.skip("writes q k^T out")
    plan = attention.plan_for(attention.Request(name, options=record.probe_options), list(tensors))
    assert (plan.fixes.copies, plan.fixes.copied_bytes) == (0, 0)

    def peak(call):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before
        del out
        return held

    direct = peak(lambda: plan.function(*tensors, None, **plan.options))
    ours = peak(lambda: attention.execute(plan, list(tensors)))
    one = tensors[0].numel() * 2
    print(f"\n{name}: {ours / one:.2f} tensors at the peak, the kernel alone {direct / one:.2f}", end="")
    assert ours <= direct + one // 100


def test_auto_decides_once_and_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path))
    certify.clear()
    attention.forget()
    tensors = views(9000, heads=8)
    plan = attention.plan_for(attention.Request(), list(tensors))
    decision = plan.decision
    assert decision is not None and decision.chosen == plan.backend.name and plan.backend.exact
    print(f"\n{decision}; first calls {decision.first_call_ms}; dropped {decision.dropped}", end="")
    assert all(found["relative"] <= EXACT_RELATIVE for found in decision.errors.values())
    out = attention.run("auto", *tensors)
    check(plan.backend.name, out, tensors)

    def never(*arguments):
        raise RuntimeError("measured again")

    # Not `measure` itself: the sources of what it is defined in are part of the file's name.
    monkeypatch.setattr(attention.auto, "first_call", never)
    monkeypatch.setattr(attention.auto, "rotate", never)
    certify.clear()
    attention.forget()
    again = attention.plan_for(attention.Request(), list(tensors)).decision
    assert again.from_cache and again.chosen == decision.chosen and again.samples == decision.samples
    attention.forget()


def test_auto_takes_an_approximate_one_only_within_the_bound(monkeypatch, tmp_path):
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path))
    attention.forget()
    tensors = views(9000, heads=8)
    tight = attention.plan_for(attention.Request(max_error=1e-6), list(tensors))
    assert tight.backend.exact
    loose = attention.plan_for(attention.Request(max_error=0.05), list(tensors))
    print(f"\n{loose.decision}; errors {loose.decision.errors}", end="")
    for name, reason in tight.decision.dropped.items():
        if not record_of(name).exact:
            assert "is over the bound 1e-06" in reason
    attention.forget()


def test_a_captured_graph_uses_what_is_decided_and_measures_nothing():
    tensors = views(2000)
    expected = attention.run("auto", *tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention.run("auto", *tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run("auto", *tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    unseen = views(3000, heads=3)
    attention.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = attention.plan_for(attention.Request(), list(unseen))
    assert plan.backend.exact and plan.decision is None
    attention.forget()


def test_launched_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in NAMES:
        if {entry[0]: entry[2] for entry in attention.list_backends("cuda:1")}[name] is None:
            tensors = [t.to("cuda:1") for t in views(129)]
            try:
                out = attention.run(name, *tensors, **dict(record_of(name).probe_options))
            except attention.AttentionRefused as refusal:
                print(f"\n{refusal}", end="")
                continue
            assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            check(name, out, tensors)


def test_no_flag_of_torch_changes():
    flags = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    before = [getattr(torch.backends.cuda, flag)() for flag in flags], torch.cuda.current_device()
    for name in NAMES:
        if not record_of(name).opt_in:
            try:
                attention.run(name, *views(129))
            except attention.AttentionRefused as refusal:
                print(f"\n{refusal}", end="")
    assert ([getattr(torch.backends.cuda, flag)() for flag in flags], torch.cuda.current_device()) == before


def test_a_tiny_h3_samples_with_auto_and_says_what_ran(pack):
    from h3_sampling import attend, finite, run_of, sample, selftest

    model, positive, latent = selftest()
    patched = attend(model)
    out = sample(patched, positive, latent)
    record = run_of(patched)
    print(f"\n{record.headline()}; {[choice['text'] for choice in record.attention_choices.values()]}", end="")
    assert finite(out) and sum(record.attention.values()) == 9 and not record.attention_handed_on
    assert not record.attention_copies
