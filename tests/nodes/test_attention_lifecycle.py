"""The override in a run: steps and blocks kept exact, containers, other nodes, counts, what it leaves behind."""

import pytest
import torch
from attention_calls import Next, oracle, tensors
from conftest import pack_module
from h3_sampling import attend, equal, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


# ---------------------------------------------------------------- exceptions by step and block


@pytest.fixture
def rough(monkeypatch):
    """An approximate backend that runs on the CPU and is called "rough"; returns what its calls were."""
    kernels = pack_module("kernels.attention")
    calls = []

    def attend_roughly(q, k, v, scale, *, tau, sink_rows):
        calls.append((q.shape[2], tau, sink_rows))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale) * 1.01

    options = (kernels.Option("tau", 1.3, 0.0, 4.0, 0.1, ""), kernels.Option("sink_rows", 0, 0, 1e6, 1, ""))
    record = kernels.Backend("rough", False, "", lambda: attend_roughly, lambda call: None, "", options=options)
    real = kernels.registry.known()
    monkeypatch.setattr(kernels.registry, "known", lambda: ({**real[0], "rough": record}, real[1]))
    kernels.forget()
    yield calls
    kernels.forget()


@pytest.mark.parametrize("order", ["attention last", "fuse last", "alone", "twice"])
def test_blocks_and_steps_are_kept_dense(rough, order):
    model, positive, latent = selftest()
    backend = {"backend": "rough", "dense_steps": 34.0, "dense_blocks": "0, 2", "tau": 2.0}
    if order == "attention last":
        patched = attend(fuse(model), backend)
    elif order == "fuse last":
        patched = fuse(attend(model, backend))
    elif order == "twice":
        patched = attend(fuse(attend(fuse(model), backend)), backend)
    else:
        patched = attend(model, backend)
    sample(patched, positive, latent, steps=3)
    record = run_of(patched)
    # 3 steps x 3 blocks: the first two steps (0 and 1/3 are below 34 %) are dense, then blocks 0 and 2.
    assert record.attention == {"sdpa": 8, "rough": 1}
    assert record.attention_dense == {"one of the first 34% of the steps": 2, "a block that is kept dense": 6}
    assert len(rough) == 1 and rough[0][1] == 2.0
    if order != "alone":
        assert pack_module("nodes.report").overridden(patched) == []
        assert all(record.fused[index] == 3 for index in range(3))


def test_conditioning_rows_are_sinks(rough):
    model, positive, latent = selftest()
    patched = attend(model, {"backend": "rough", "dense_steps": 0.0})
    sample(patched, positive, latent, steps=2)
    video, audio = latent["samples"].unbind()
    target = video.shape[2] * (video.shape[3] // 2) * (video.shape[4] // 2) + 2 * audio.shape[-1]
    assert {(rows, sinks) for rows, _, sinks in rough} == {(rows, rows - target) for rows, _, _ in rough}
    assert all(0 < sinks < rows for rows, _, sinks in rough)
    rough.clear()
    patched = attend(model, {"backend": "rough", "dense_steps": 0.0, "exact_conditioning": False})
    sample(patched, positive, latent, steps=2)
    assert {sinks for _, _, sinks in rough} == {0}


def test_marks_on_blocks_change_nothing_else(rough):
    model, positive, latent = selftest()
    plain = attend(model, {"backend": "rough", "dense_steps": 0.0})
    marked = attend(model, {"backend": "rough", "dense_steps": 0.0, "dense_blocks": "0-2"})
    everything = sample(marked, positive, latent)
    assert equal(everything, sample(attend(model, "sdpa"), positive, latent))
    assert not equal(everything, sample(plain, positive, latent))
    assert not model.model_options["transformer_options"].get("patches_replace")


@pytest.mark.parametrize(
    ("sigma", "share"), [(1.0, 0.0), (0.9999999, 0.0), (0.9, 0.25), (0.8, 0.25), (0.5, 0.5), (0.2, 0.75), (0.0, 0.75)]
)
def test_the_step_of_a_sigma(pack, sigma, share):
    schedule = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.0])
    assert pack_module("nodes.adapt_attention").step_share(torch.tensor([sigma]), schedule) == share


def test_without_a_schedule_an_approximate_backend_stays_out(rough):
    module, run = pack_module("nodes.attention"), pack_module("nodes.run")
    record = run.Run()
    patch = module.AttentionOverride(module.settings_of("rough", "auto", 3))
    patch(Next(), *tensors(), 3, skip_reshape=True, transformer_options={run.RUN: record})
    assert record.attention == {"sdpa": 1}
    assert record.attention_dense == {"ComfyUI does not say which step this is": 1}


# ---------------------------------------------------------------- containers (0.33), other nodes, counts


@pytest.fixture
def containers(pack):
    import comfy.ldm.modules.attention as core

    kind = getattr(core, "AttentionTensorContainer", None)
    if kind is None:
        pytest.skip("this ComfyUI hands tensors, not containers (0.33 and newer do)")
    return kind


def test_containers_are_emptied_and_tensors_freed_early(containers, only_backend):
    import weakref

    model, _, _ = selftest()
    watched, alive = [], []

    def attend_and_look(q, k, v, scale):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        del q, k, v
        alive.append([ref() is not None for ref in watched])
        return out

    only_backend(attend_and_look)
    override = attend(model, "looking").model_options["transformer_options"]["optimized_attention_override"]
    given = tensors()
    watched += [weakref.ref(tensor) for tensor in given]
    expected = oracle(*given)
    held = [containers(tensor) for tensor in given]
    del given
    out = override.container_function(*held, 3, skip_reshape=True, skip_output_reshape=True, transformer_options={})
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)
    assert alive == [[False, False, False]] and all(container.tensor is None for container in held)


@pytest.fixture
def only_backend(monkeypatch):
    """Adds an exact backend called "looking" around a function."""
    kernels = pack_module("kernels.attention")

    def put(function):
        record = kernels.Backend("looking", True, "", lambda: function, lambda call: None, "")
        real = kernels.registry.known()
        monkeypatch.setattr(kernels.registry, "known", lambda: ({**real[0], "looking": record}, real[1]))
        kernels.forget()

    yield put
    kernels.forget()


def test_containers_that_are_handed_on_are_full(containers):
    seen = []

    class Earlier:
        def __call__(self, function, *args, **kwargs):
            raise RuntimeError("called with tensors")

        def container_function(self, *args, **kwargs):
            seen.append([container.take() for container in args[:3]])
            return "earlier"

    module = pack_module("nodes.attention")
    mask = torch.ones(17, 17)
    given = tensors()
    patch = module.AttentionOverride("auto", Earlier())
    held = [containers(tensor) for tensor in given]
    assert patch(Next(), *held, 3, mask=mask, skip_reshape=True) == "earlier"
    assert all(a is b for a, b in zip(seen[0], given, strict=True))
    plain = Next()
    held = [containers(tensor) for tensor in given]
    assert module.AttentionOverride("auto", plain)(None, *held, 3, mask=mask, skip_reshape=True) == "next"
    assert all(a is b for a, b in zip(plain.calls[0][0][1:4], given, strict=True))
    stock = Next()
    held = [containers(tensor) for tensor in given]
    assert module.AttentionOverride("auto")(stock, *held, 3, mask=mask, skip_reshape=True) == "next"
    assert stock.calls[0][0][0] is held[0]


def test_what_is_handed_on_reaches_comfyuis_own_function(pack):
    import comfy.ldm.modules.attention as core

    patched = attend(selftest()[0])
    q, k, v = tensors()
    mask = torch.zeros(17, 17)
    mask[:, 3] = -1e9
    options = patched.model_options["transformer_options"]
    out = core.optimized_attention(q, k, v, 3, mask=mask, skip_reshape=True, transformer_options=options)
    expected = core.optimized_attention(q, k, v, 3, mask=mask, skip_reshape=True)
    assert torch.equal(out, expected)
    record = run_of(patched)
    assert list(record.attention_handed_on) == ["the call has a mask"]


def test_cores_own_node_after_ours_is_in_charge(pack):
    model, positive, latent = selftest()
    patched = attend(model)
    if not hasattr(patched, "set_model_optimized_attention"):
        pytest.skip("this ComfyUI has no ModelAttentionBackend (0.33 and newer do)")
    import comfy.ldm.modules.attention as core

    later = patched.clone()
    later.set_model_optimized_attention(core.attention_pytorch)
    sample(later, positive, latent)
    assert not run_of(later).attention
    notes = pack_module("nodes.report").build(later)["notes"]
    assert "a later node replaced the attention backend; it is in charge" in notes
    ours_again = attend(later)
    sample(ours_again, positive, latent)
    assert run_of(ours_again).attention == {"sdpa": 9}


def test_ours_twice_does_not_stack(pack):
    adapt = pack_module("nodes.adapt_attention")
    model = selftest()[0]

    def earlier(function, *args, **kwargs):
        return function(*args, **kwargs)

    before = model.clone()
    before.model_options["transformer_options"]["optimized_attention_override"] = earlier
    twice = attend(attend(before), "sdpa")
    found = adapt.installed(twice.model_options["transformer_options"])
    assert found.settings.backend == "sdpa" and found.previous is earlier


def test_copies_are_counted_and_shown():
    model, positive, latent = selftest()
    patched = attend(model, {"backend": "sdpa"})
    sample(patched, positive, latent, steps=2)
    assert not run_of(patched).attention_copies
    report = pack_module("nodes.report")
    assert "attention: no copy of q, k or v was made for a kernel" in report.as_text(report.build(patched))
    node = pack_module("nodes.attention").AttentionBackend
    packed = node.execute(model, {"backend": "sdpa"}, "contiguous").result[0]
    sample(packed, positive, latent, steps=2)
    entry = run_of(packed).as_dict()["attention_copies"][0]
    assert (entry["backend"], entry["calls"]) == ("sdpa", 6) and entry["copies"] in (12, 18) and entry["bytes"] > 0
    rung = next(r for r in report.build(packed)["rungs"] if r["rung"].startswith("attention"))
    assert rung["numbers"]["copies"] == entry["copies"] and rung["numbers"]["copied_bytes"] == entry["bytes"]
    assert "copies," in report.as_text(report.build(packed))


def test_what_auto_chose_is_shown(monkeypatch):
    kernels = pack_module("kernels.attention")
    model, positive, latent = selftest()
    choice = kernels.auto.Decision("sdpa", "bfloat16, 1 x 2 x 128", "cpu", 400, {"sdpa": [1.0, 1.1, 1.2]}, cost_ms=9.0)
    real = kernels.dispatch.planned
    monkeypatch.setattr(kernels.dispatch, "planned", lambda r, b, t, **k: real(r, b, t, choice))
    kernels.forget()
    patched = attend(model)
    sample(patched, positive, latent, steps=2)
    kernels.forget()
    report = pack_module("nodes.report")
    text = "auto chose sdpa for bfloat16, 1 x 2 x 128 (measured in 9 ms): sdpa 1.100 ms"
    assert text in report.as_text(report.build(patched))
    assert report.build(patched)["run"]["attention_choices"][0]["samples"] == {"sdpa": [1.0, 1.1, 1.2]}


def test_no_global_changes(pack):
    import comfy.ldm.modules.attention as core

    flags = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")

    def state():
        return [getattr(torch.backends.cuda, flag)() for flag in flags] + [core.optimized_attention]

    before = state()
    model, positive, latent = selftest()
    stock = sample(model, positive, latent)
    patched = attend(model)
    sample(patched, positive, latent)
    assert state() == before
    assert equal(sample(model, positive, latent), stock)
    assert "optimized_attention_override" not in model.model_options["transformer_options"]


def test_a_cancel_in_the_middle_leaves_nothing(pack):
    import comfy.model_management

    model, positive, latent = selftest()
    patched = attend(model)

    def cancel(step):
        raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(patched, positive, latent, on_step=cancel)
    assert run_of(patched).state == "interrupted"
    assert equal(sample(patched, positive, latent), sample(attend(model), positive, latent))


def test_nothing_survives_the_forward(pack):
    import gc
    import weakref

    module, run = pack_module("nodes.attention"), pack_module("nodes.run")
    patch, record = module.AttentionOverride("auto"), run.Run()
    given = tensors()
    watched = [weakref.ref(tensor) for tensor in given]
    out = patch(Next(), *given, 3, skip_reshape=True, transformer_options={run.RUN: record})
    watched.append(weakref.ref(out))
    del given, out
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_a_foreign_patch_on_attn_forward_stays_and_ours_serves_it(pack):
    """As KJNodes does it: an object patch on one block's attn.forward, which calls the original."""
    model, positive, latent = selftest()
    called = []

    def patched_with(before):
        out = before.clone()
        original = out.get_model_object("diffusion_model.blocks.1.attn.forward")

        def forward(*args, **kwargs):
            called.append(1)
            return original(*args, **kwargs)

        out.add_object_patch("diffusion_model.blocks.1.attn.forward", forward)
        return out

    expected = sample(attend(model), positive, latent)
    for patched in (attend(patched_with(model)), patched_with(attend(model))):
        called.clear()
        assert equal(sample(patched, positive, latent), expected)
        assert len(called) == 3 and run_of(patched).attention == {"sdpa": 9}


def test_the_refiner_is_served_too(pack):
    model, _, _ = selftest()
    patched = attend(model)
    refiner = model.model.diffusion_model.token_refiner
    options = patched.model_options["transformer_options"]
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        out = refiner(x.clone(), transformer_options=options)
        expected = refiner(x.clone())
    # Another exact function than ComfyUI's default on a CPU: a few bf16 roundings apart.
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)
    assert run_of(patched).attention == {"sdpa": len(refiner.blocks)}


def test_two_branches_with_two_backends(pack):
    model, positive, latent = selftest()
    stock = sample(model, positive, latent)
    one, other = attend(model, "sdpa"), attend(model, "sdpa_math")
    first = sample(one, positive, latent)
    second = sample(other, positive, latent)
    assert equal(sample(one, positive, latent), first) and equal(sample(other, positive, latent), second)
    assert run_of(one).attention == {"sdpa": 9} and run_of(other).attention == {"sdpa_math": 9}
    assert equal(sample(model, positive, latent), stock)


def test_an_error_of_the_kernel_passes_and_leaves_nothing(pack, only_backend):
    model, positive, latent = selftest()

    def broken(q, k, v, scale):
        raise RuntimeError("no kernel image")

    only_backend(broken)
    patched = attend(model, "looking")
    with pytest.raises(RuntimeError, match="no kernel image"):
        sample(patched, positive, latent)
    assert run_of(patched).state == "interrupted" and not run_of(patched).attention
    assert equal(sample(attend(model), positive, latent), sample(attend(model), positive, latent))


def test_the_block_mark_is_gone_after_the_block_and_after_an_error(pack):
    adapt, run = pack_module("nodes.adapt_attention"), pack_module("nodes.run")
    forward = {}
    arguments = {"img": 1, "transformer_options": {run.FORWARD: forward}}
    seen = []

    def original(inner):
        seen.append((adapt.block_of(inner["transformer_options"]), inner is arguments))
        return {"img": 2}

    def raises(inner):
        raise ValueError("in the block")

    assert adapt.BlockMark(7, None)(arguments, {"original_block": original}) == {"img": 2}
    assert seen == [(7, True)] and adapt.block_of(arguments["transformer_options"]) is None
    with pytest.raises(ValueError, match="in the block"):
        adapt.BlockMark(7, None)(arguments, {"original_block": raises})
    assert adapt.block_of(arguments["transformer_options"]) is None
    assert adapt.BlockMark(1, None)({"img": 1}, {"original_block": lambda inner: {"img": inner}})["img"] == {"img": 1}
