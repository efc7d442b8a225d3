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
    with pytest.raises(refused, match=r"^kitchen_int8: .+; choose sdpa or auto$"):
        attend(model, "kitchen_int8")


def test_a_name_from_elsewhere_gets_the_reason_and_the_alternatives(pack):
    node = pack_module("nodes.attention").AttentionBackend
    answer = node.validate_inputs(backend="sage3")
    assert answer.startswith("sage3: this version has no attention backend of that name; choose auto or sdpa")
    assert node.validate_inputs(backend="auto") is True
    # Through a link the name arrives only when the node runs.
    assert node.validate_inputs(backend=None) is True
    model, _, _ = selftest()
    with pytest.raises(pack_module("kernels.attention").AttentionRefused, match="^sage3: this version has no .*auto"):
        attend(model, "sage3")


def test_the_menu_is_the_folder(pack):
    node = pack_module("nodes.attention").AttentionBackend
    combo = next(item for item in node.define_schema().inputs if item.id == "backend")
    assert list(combo.options) == ["auto", *pack_module("kernels.attention").names()]
