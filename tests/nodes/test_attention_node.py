"""The override: what it takes, what it hands on and to whom, what it refuses before sampling."""

import pytest
import torch
from attention_calls import Next, oracle, tensors
from conftest import pack_module
from h3_sampling import attend, equal, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


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


@pytest.mark.parametrize("backend", [3, ["sdpa"], {}, {"backend": None}, {"backend": {"backend": "sdpa"}}, None])
def test_a_backend_that_is_no_name_is_refused(pack, backend):
    with pytest.raises(ValueError, match="backend must be the name of a backend"):
        pack_module("nodes.attention").settings_of(backend, "auto", 50)


def test_a_layout_that_is_none_is_refused(pack):
    with pytest.raises(ValueError, match="layout must be one of auto, .*, is 'bogus'"):
        pack_module("nodes.attention").settings_of("sdpa", "bogus", 50)
    with pytest.raises(ValueError, match="is '" + "x" * 59 + r"\.\.\.$"):
        pack_module("nodes.attention").settings_of("sdpa", "x" * 10_000_000, 50)


@pytest.mark.parametrize("value", ["much", [1], {}])
def test_a_number_that_is_none_is_refused(pack, value):
    with pytest.raises(ValueError, match="dense_steps must be a number"):
        pack_module("nodes.attention").settings_of({"backend": "sol", "dense_steps": value}, "auto", 50)


def test_a_call_without_heads_is_handed_on(pack):
    module = pack_module("nodes.adapt_attention")
    tensors = [torch.zeros(1, 4, 8) for _ in range(3)]
    with pytest.raises(module.NotOurs, match="with 0 heads"):
        module.understand(*tensors, 0, exact=True)


def test_handing_on_a_call_by_keywords(pack):
    hand_on = pack_module("nodes.adapt_attention").hand_on
    given = dict.fromkeys(("q", "k", "v"), 1)
    assert hand_on(lambda function, **kwargs: (function, kwargs), "core", (), given) == ("core", given)
