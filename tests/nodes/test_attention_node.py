"""The override: what it takes, what it hands on and to whom, what it refuses before sampling."""

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, equal, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


def tensors(s=17, heads=3, d=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, s, d, generator=generator).to(dtype) for _ in range(3)]


def oracle(q, k, v, scale=None):
    weights = (q.double() @ k.double().transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    return weights.softmax(-1) @ v.double()


class Next:
    """Stands for ComfyUI's own function, or for an earlier override."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "next"


@pytest.fixture
def override():
    module = pack_module("nodes.attention")
    run = pack_module("nodes.run")
    record = run.Run()
    return module.AttentionOverride("auto"), record, {"transformer_options": {run.RUN: record}}


@pytest.mark.parametrize("s", [1, 16, 127])
@pytest.mark.parametrize("d", [80, 160, 256])
@pytest.mark.parametrize("skip_reshape", [True, False])
@pytest.mark.parametrize("skip_output_reshape", [True, False])
def test_every_shape_gives_the_exact_answer(override, s, d, skip_reshape, skip_output_reshape):
    patch, record, options = override
    q, k, v = tensors(s, 3, d)
    expected = oracle(q, k, v)
    if not skip_output_reshape:
        expected = expected.transpose(1, 2).reshape(1, s, 3 * d)
    given = (q, k, v) if skip_reshape else (t.transpose(1, 2).reshape(1, s, 3 * d) for t in (q, k, v))
    out = patch(
        Next(), *given, 3, mask=None, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape,
        _inside_attn_wrapper=True, **options,
    )  # fmt: skip
    assert out.shape == expected.shape and out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)
    assert dict(record.attention) == {"sdpa": 1} and not record.attention_handed_on


def test_a_scale_is_honoured(override):
    patch, _, options = override
    q, k, v = tensors()
    out = patch(Next(), q, k, v, 3, skip_reshape=True, skip_output_reshape=True, scale=0.7, **options)
    torch.testing.assert_close(out.double(), oracle(q, k, v, 0.7), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"mask": torch.ones(17, 17)}, "the call has a mask"),
        ({"attn_precision": torch.float32}, "the call asks for torch.float32 inside"),
        ({"surprise": 1}, "does not know: surprise"),
        ({"enable_gqa": True}, "does not know: enable_gqa"),
        ({"skip_reshape": False}, "with 3 heads"),
    ],
)
def test_what_it_cannot_honour_is_handed_on_unchanged(override, kwargs, reason):
    patch, record, options = override
    q, k, v = tensors()
    stock = Next()
    assert patch(stock, q, k, v, 3, **{"skip_reshape": True, **kwargs}, **options) == "next"
    args, passed = stock.calls[0]
    assert args == (q, k, v, 3) and all(passed[name] is value for name, value in kwargs.items())
    assert len(record.attention_handed_on) == 1 and reason in next(iter(record.attention_handed_on))
    assert not record.attention


def test_an_earlier_override_gets_what_is_handed_on(pack):
    module = pack_module("nodes.attention")
    earlier, stock = Next(), Next()
    patch = module.AttentionOverride("auto", earlier)
    q, k, v = tensors()
    assert patch(stock, q, k, v, 3, mask=torch.ones(17, 17), skip_reshape=True) == "next"
    assert not stock.calls and earlier.calls[0][0][0] is stock


def test_an_approximate_backend_leaves_full_precision_calls_alone(pack):
    module = pack_module("nodes.attention")
    stock = Next()
    patch = module.AttentionOverride("kitchen_int8")
    q, k, v = tensors()
    assert patch(stock, q, k, v, 3, skip_reshape=True, low_precision_attention=False) == "next"
    assert len(stock.calls) == 1


def test_the_node_composes_with_an_earlier_override_and_says_what_ran():
    model, positive, latent = selftest()
    seen = []

    def earlier(function, *args, **kwargs):
        seen.append(args[0].shape)
        return function(*args, **kwargs)

    before = model.clone()
    before.model_options["transformer_options"]["optimized_attention_override"] = earlier
    patched = attend(before)
    assert equal(sample(patched, positive, latent), sample(attend(model), positive, latent))
    assert not seen and run_of(patched).attention["sdpa"] == 9
    assert before.model_options["transformer_options"]["optimized_attention_override"] is earlier


def test_a_later_override_is_in_charge_and_named():
    model, positive, latent = selftest()
    patched = attend(fuse(model)).clone()
    patched.model_options["transformer_options"]["optimized_attention_override"] = lambda f, *a, **k: f(*a, **k)
    out = sample(patched, positive, latent)
    report = pack_module("nodes.report").build(patched, out[0])
    assert "a later node replaced the attention backend; it is in charge" in report["notes"]
    rung = next(item for item in report["rungs"] if item["rung"].startswith("attention"))
    assert rung["result"] == "skipped" and "another node replaced it" in rung["reason"]


def test_a_backend_asked_for_by_name_stops_before_sampling():
    model, _, _ = selftest()
    refused = pack_module("kernels.attention").AttentionRefused
    for name in ("kitchen_int8", "sage3", "sol", "fa4"):
        with pytest.raises(refused, match=rf"^{name}: .+; choose sdpa or sdpa_math or auto$"):
            attend(model, name)


def test_a_name_from_elsewhere_gets_the_reason_and_the_alternatives(pack):
    model, _, _ = selftest()
    refused = pack_module("kernels.attention").AttentionRefused
    with pytest.raises(refused, match="^xformers: this version has no .*auto"):
        attend(model, "xformers")


def test_the_menu_is_the_folder(pack):
    node = pack_module("nodes.attention").AttentionBackend
    menu = next(item for item in node.define_schema().inputs if item.id == "backend")
    assert [option.key for option in menu.options] == ["auto", *pack_module("kernels.attention").names()]


# ---------------------------------------------------------------- through ComfyUI's own validation and call


@pytest.fixture
def registered(pack, monkeypatch):
    """The node as ComfyUI's executor sees it; returns ``call(inputs)`` on a prompt's inputs."""
    import asyncio

    import execution

    import nodes as core_nodes

    node = pack_module("nodes.attention").AttentionBackend
    node.GET_SCHEMA()
    monkeypatch.setitem(core_nodes.NODE_CLASS_MAPPINGS, "H3BW_AttentionBackend", node)
    selftest_node = pack_module("nodes.selftest").SelfTestModel
    selftest_node.GET_SCHEMA()
    monkeypatch.setitem(core_nodes.NODE_CLASS_MAPPINGS, "H3BW_SelfTestModel", selftest_node)
    tiny = {"adaln": "pruned", "width": 64, "height": 64, "length": 22, "seed": 0, "reference": "none"}

    def call(**inputs):
        prompt = {
            "1": {"class_type": "H3BW_SelfTestModel", "inputs": tiny},
            "2": {"class_type": "H3BW_AttentionBackend", "inputs": {"model": ["1", 0], **inputs}},
        }
        valid, errors, _ = asyncio.run(execution.validate_inputs("p", prompt, "2", {}))
        if not valid:
            return "; ".join(error["details"] for error in errors)
        model = selftest()[0]
        data, _, v3_data = execution.get_input_data(
            prompt["2"]["inputs"], node, "2", dynprompt=Prompt(prompt), execution_list=Ran(model)
        )
        out, *_ = asyncio.run(
            execution._async_map_node_over_list("p", "2", node, data, "EXECUTE_NORMALIZED", v3_data=v3_data)
        )
        return out[0]

    return call


class Prompt:
    """What ComfyUI calls a dynamic prompt, as far as inputs ask for it."""

    def __init__(self, prompt):
        self.prompt = prompt

    def get_original_prompt(self):
        return self.prompt


class Ran:
    """An execution list in which the model has been made."""

    def __init__(self, model):
        self.model = model

    def get_cache(self, source, target):
        return type("Entry", (), {"outputs": [[self.model]]})()


def settings_in(model):
    adapt = pack_module("nodes.adapt_attention")
    return adapt.installed(model.model_options["transformer_options"]).settings


def test_a_prompt_saved_before_there_were_more_widgets(registered):
    settings = settings_in(registered(backend="auto"))
    assert settings == pack_module("nodes.attention").Settings() and settings.exact


def test_sub_widgets_arrive(registered):
    found = settings_in(
        registered(
            **{"backend": "auto", "backend.allow_approximate": True, "backend.max_error": 0.01, "layout": "contiguous",
               "backend.dense_steps": 20.0, "backend.dense_blocks": "0, 2"}
        )
    )  # fmt: skip
    assert (found.max_error, found.layout, found.dense_steps) == (0.01, "contiguous", 0.2)
    assert found.dense_blocks == {0, 2} and not found.exact


def test_sols_widgets_are_its_own(pack):
    settings_of = pack_module("nodes.attention").settings_of
    sol = settings_of("sol", "auto", 50)
    assert dict(sol.options) == {"tau": 1.3} and sol.exact_conditioning and sol.dense_steps == 0.2
    sol = settings_of(
        {"backend": "sol", "tau": 1.0, "exact_conditioning": False, "dense_steps": 0.0, "dense_blocks": "0 49"},
        "native",
        50,
    )
    assert dict(sol.options) == {"tau": 1.0} and not sol.exact_conditioning and sol.dense_blocks == {0, 49}
    plain = settings_of({"backend": "sdpa", "dense_steps": None}, "auto", None)
    assert plain.options == () and plain.exact and plain.dense_steps == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 101.0])
def test_numbers_out_of_range_are_named(pack, value):
    with pytest.raises(ValueError, match="dense_steps must be from 0 to 100, have"):
        pack_module("nodes.attention").settings_of({"backend": "sol", "dense_steps": value}, "auto", 50)


def test_core_checks_the_ranges(registered):
    assert "dense_steps" in registered(**{"backend": "auto", "backend.dense_steps": 120.0})
    assert "layout: 'nhd' not in" in registered(backend="auto", layout="nhd")


def test_a_menus_value_that_is_unknown_stops_with_its_name(registered):
    with pytest.raises(pack_module("kernels.attention").AttentionRefused, match="^xformers: this version has no"):
        registered(backend="xformers")


@pytest.mark.parametrize(
    ("text", "found"), [("", set()), ("0, 49", {0, 49}), (" 3 ", {3}), ("1-3 , 7", {1, 2, 3, 7}), ("2 - 4", {2, 3, 4})]
)
def test_block_lists(pack, text, found):
    assert pack_module("nodes.attention").parse_blocks(text, 50) == found


@pytest.mark.parametrize("text", ["a", "1,-2", "4-2", "1.5", "99999", "0;1"])
def test_bad_block_lists_are_named(pack, text):
    with pytest.raises(ValueError, match="dense_blocks: '.*' is no block"):
        pack_module("nodes.attention").parse_blocks(text, 50)


def test_blocks_that_the_model_does_not_have(pack):
    with pytest.raises(ValueError, match="the model has blocks 0 to 2, 49 was asked for"):
        pack_module("nodes.attention").parse_blocks("0, 49", 3)
    with pytest.raises(ValueError, match="only a MiniMax H3 says which block runs"):
        pack_module("nodes.attention").settings_of({"backend": "auto", "dense_blocks": "1"}, "auto", None)


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
