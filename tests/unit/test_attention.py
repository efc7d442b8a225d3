"""The attention registry and its backends, against an fp32 oracle; what cannot run says why."""

from __future__ import annotations

import importlib.util
import inspect
import math
import shutil
import sys
from types import ModuleType

import pytest
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

attention = pack_module("kernels.attention")
discover = pack_module("kernels.discover")
kitchen = pack_module("kernels.attention.backends.kitchen_int8")

# Largest error relative to the oracle's largest value: a few roundings of the result, in units of 2^-mantissa.
TOLERANCE = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def oracle(q, k, v, scale=None):
    """Softmax attention in fp32, written out; independent of any attention function."""
    q, k, v = q.float(), k.float(), v.float()
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def error(out, expected):
    return ((out.float() - expected).abs().max() / expected.abs().max()).item()


def qkv(rows, head_dim, *, heads=3, dtype=torch.float32, seed=0):
    """q, k and v as H3 has them: strided views of one ``[1, rows, 3 * heads * head_dim]`` buffer."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(1, rows, 3 * heads * head_dim, generator=generator).to(dtype)
    return [part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in buffer.chunk(3, -1)]


def call(**changes):
    q, k, v = qkv(16, 128, dtype=torch.bfloat16)
    described = attention.Call.of(q, k, v)
    return type(described)(**{**vars(described), **changes})


@pytest.fixture
def fresh():
    """No backend counts as loaded, before and after."""
    attention._loaded.cache_clear()
    yield
    attention._loaded.cache_clear()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", ["auto", "sdpa"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [80, 128, 160, 256])
@pytest.mark.parametrize("rows", [1, 16, 127])
def test_equals_the_oracle(name, rows, head_dim, dtype):
    q, k, v = qkv(rows, head_dim, dtype=dtype)
    out = attention.run(name, q, k, v)
    assert (out.shape, out.dtype, out.device) == (q.shape, dtype, q.device)
    assert error(out, oracle(q, k, v)) < TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [0.5, 1.0, -0.1])
def test_scale_is_the_callers(scale):
    q, k, v = qkv(17, 128)
    out = attention.run("sdpa", q, k, v, scale=scale)
    assert error(out, oracle(q, k, v, scale)) < TOLERANCE[torch.float32]
    assert error(out, oracle(q, k, v)) > 0.01


def test_default_scale_is_of_head_dim():
    q, k, v = qkv(17, 80)
    assert torch.equal(attention.run("sdpa", q, k, v), attention.run("sdpa", q, k, v, scale=80**-0.5))


def test_more_keys_than_queries():
    q, k, v = qkv(129, 80)
    assert error(attention.run("auto", q[:, :, :15], k, v), oracle(q[:, :, :15], k, v)) < TOLERANCE[torch.float32]


def test_dtype_is_that_of_v():
    q, k, v = qkv(16, 128)
    out = attention.run("sdpa", q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention.run("sdpa", q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert attention.run("sdpa", q.bfloat16(), k.bfloat16(), v).dtype == torch.float32


def test_a_backend_that_widens_does_not_change_the_callers_dtype(only):
    only(stand_in(lambda: oracle))  # returns fp32 whatever it is given
    assert attention.run("stand_in", *qkv(16, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_layouts_agree():
    q, k, v = qkv(127, 128)
    assert torch.equal(attention.run("sdpa", q, k, v, layout="contiguous"), attention.run("sdpa", q, k, v))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_is_bit_equal_to_comfyui_on_the_cpu(comfy, dtype):
    from comfy.ldm.modules.attention import attention_pytorch

    q, k, v = qkv(127, 128, dtype=dtype)
    stock = attention_pytorch(q, k, v, q.shape[1], skip_reshape=True, skip_output_reshape=True)
    assert torch.equal(attention.run("auto", q, k, v), stock)


def test_no_flag_of_torch_changes():
    flags = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    before = [getattr(torch.backends.cuda, flag)() for flag in flags]
    attention.run("auto", *qkv(16, 128))
    assert [getattr(torch.backends.cuda, flag)() for flag in flags] == before


# ---------------------------------------------------------------- what is chosen, what is refused


def test_auto_takes_an_exact_backend_and_exact_ones_are_first():
    backend, passed_over = attention.choose("auto", call())
    assert (backend.name, backend.exact, passed_over) == ("sdpa", True, {})
    listed = attention.list_backends("cpu")
    assert listed[0] == ("sdpa", True, None)
    assert [name for name, _, _ in listed] == attention.names()
    assert [exact for _, exact, _ in listed] == sorted((exact for _, exact, _ in listed), reverse=True)


@pytest.mark.parametrize("name", ["sage3", "sage2", "sage1", "fa4", "flash", "sol", "SDPA", ""])
def test_unknown_name_lists_what_there_is(name):
    with pytest.raises(attention.AttentionRefused, match="no attention backend of that name; it has sdpa") as refused:
        attention.run(name, *qkv(16, 128))
    assert (refused.value.name, refused.value.others) == (name, ("sdpa", "auto"))
    assert str(refused.value).endswith("choose sdpa or auto")


MALFORMED = {
    "mask": ({"mask": True}, "takes no mask"),
    "nan scale": ({"scale": math.nan}, "scale must be a finite number, have nan"),
    "inf scale": ({"scale": math.inf}, "scale must be a finite number, have inf"),
    "3 dimensions": ({"q_shape": (3, 16, 128)}, "q must be"),
    "fewer key heads": ({"k_shape": (1, 1, 16, 128), "v_shape": (1, 1, 16, 128)}, "same B, H and D"),
    "other v": ({"v_shape": (1, 3, 15, 128)}, "have [1, 3, 16, 128], [1, 3, 16, 128] and [1, 3, 15, 128]"),
    "empty": ({"k_shape": (1, 3, 0, 128), "v_shape": (1, 3, 0, 128)}, "no empty dimension"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_every_backend_refuses_what_none_can_honour(name):
    changes, text = MALFORMED[name]
    reasons = attention.explain(call(**changes))
    assert set(reasons) == set(attention.names())
    assert all(text in reason for reason in reasons.values())
    with pytest.raises(attention.AttentionRefused) as refused:
        attention.choose("auto", call(**changes))
    assert f"sdpa: {reasons['sdpa']}" in refused.value.reason
    assert refused.value.others == ()


def test_run_refuses_what_it_cannot_align():
    q, k, v = qkv(16, 128)
    with pytest.raises(attention.AttentionRefused, match="one device, have cpu, cpu and meta"):
        attention.run("auto", q, k, v.to("meta"))
    with pytest.raises(attention.AttentionRefused, match="plain floating point, have torch.int8"):
        attention.run("auto", q.to(torch.int8), k, v)
    with pytest.raises(attention.AttentionRefused, match="plain floating point, have torch.float32 and torch.float8"):
        attention.run("auto", q, k.to(torch.float8_e4m3fn), v)
    with pytest.raises(attention.AttentionRefused, match="sdpa: dtype must be bfloat16, .* have torch.int32"):
        attention.run("sdpa", q, k, v.int())
    with pytest.raises(attention.AttentionRefused, match="layout must be auto or contiguous, have 'native'"):
        attention.run("auto", q, k, v, layout="native")


def stand_in(load, **changes):
    fields = {"name": "stand_in", "exact": True, "needs": "", "refuse": lambda call: None, "summary": ""}
    return attention.Backend(**{**fields, "load": load, **changes})


@pytest.fixture
def only(monkeypatch, fresh):
    """Put backends in the place of those in the folder."""

    def put(*backends):
        registry = ({backend.name: backend for backend in backends}, {})
        monkeypatch.setattr(attention, "_registry", lambda: registry)

    return put


@pytest.mark.parametrize("kind", [ImportError, OSError, AssertionError, RuntimeError])
def test_a_load_that_raises_is_asked_once_and_costs_nothing_else(only, kind):
    asked = []

    def load():
        asked.append(1)
        raise kind("libfoo.so.1: cannot open /opt/foo/libfoo.so.1")

    only(stand_in(load), stand_in(lambda: oracle, name="good"))
    reason = f"does not load ({kind.__name__}: libfoo.so.1: cannot open libfoo.so.1)"
    for _ in range(2):
        assert attention.explain(call()) == {"stand_in": reason, "good": None}
    assert asked == [1]
    backend, passed_over = attention.choose("auto", call())
    assert (backend.name, passed_over) == ("good", {"stand_in": reason})
    with pytest.raises(attention.AttentionRefused, match="choose good or auto"):
        attention.run("stand_in", *qkv(16, 128))


def test_a_missing_package_is_not_installed(only):
    def load():
        import sageattn3_that_is_nowhere

        return sageattn3_that_is_nowhere

    only(stand_in(load, name="sage3", exact=False), stand_in(lambda: oracle, name="sdpa"))
    with pytest.raises(attention.AttentionRefused) as refused:
        attention.run("sage3", *qkv(16, 128))
    assert str(refused.value) == (
        "sage3: not installed (No module named 'sageattn3_that_is_nowhere'); choose sdpa or auto"
    )


def test_a_refusal_that_raises_is_a_reason(only):
    def refuse(call):
        raise RuntimeError("driver too old")

    only(stand_in(lambda: oracle, refuse=refuse))
    assert attention.explain(call()) == {"stand_in": "cannot be asked (RuntimeError: driver too old)"}


def test_approximate_backends_run_by_name_only(only):
    only(stand_in(lambda: oracle, exact=False))
    assert attention.run("stand_in", *qkv(16, 128)).shape == (1, 3, 16, 128)
    with pytest.raises(attention.AttentionRefused, match="no exact backend takes this call") as refused:
        attention.run("auto", *qkv(16, 128))
    assert refused.value.others == ("stand_in",)


def test_an_error_of_the_kernel_reaches_the_caller(only):
    def attend(q, k, v, scale):
        raise RuntimeError("no kernel image")

    only(stand_in(lambda: attend), stand_in(lambda: oracle, name="other"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        attention.run("auto", *qkv(16, 128))


def test_a_result_of_another_layout_is_caught(only):
    only(stand_in(lambda: lambda q, k, v, scale: oracle(q, k, v, scale).transpose(1, 2)))
    with pytest.raises(
        attention.AttentionRefused, match=r"returned shape \(1, 16, 3, 128\), expected \(1, 3, 16, 128\)"
    ):
        attention.run("stand_in", *qkv(16, 128))


def test_launched_on_the_device_of_the_tensors(only, monkeypatch):
    """cuda:0 current, tensors on cuda:1: shown without a GPU by tensors that only claim a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    def attend(q, k, v, scale):
        entered.append("ran")
        return torch.empty_like(q)

    only(stand_in(lambda: attend))
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with FakeTensorMode():
        q = torch.empty(1, 3, 16, 128, device="cuda:1")
        attention.run("auto", q, q, q)
    assert entered == [torch.device("cuda:1"), "ran", "left"]


# ---------------------------------------------------------------- 32-bit offsets


def h3_views(rows):
    buffer = torch.empty(1, rows, 3 * 56 * 128, dtype=torch.bfloat16, device="meta")
    return [part.unflatten(-1, (56, 128)).transpose(1, 2) for part in buffer.chunk(3, -1)]


def test_fit_int32_on_both_sides_of_h3s_limit():
    near = h3_views(99_865)[1]
    assert attention.fit_int32(near) is near
    far = h3_views(99_866)[1]
    packed = attention.fit_int32(far)
    assert packed.is_contiguous()
    assert packed.shape == far.shape
    assert packed.dtype == far.dtype


@pytest.mark.parametrize(("stride", "copied"), [(2**31 - 1, False), (2**31, True)])
def test_fit_int32_counts_the_last_element(stride, copied):
    tensor = torch.empty_strided((1, 1, 2, 1), (1, 1, stride, 1), device="meta")
    assert (attention.fit_int32(tensor) is not tensor) == copied


def test_fit_int32_leaves_the_batch_out():
    tensor = torch.empty_strided((2, 1, 1, 1), (2**31, 1, 1, 1), device="meta")
    assert attention.fit_int32(tensor) is tensor


def test_only_the_offending_tensor_is_copied(monkeypatch):
    got = []

    def sdpa(q, k, v, **options):
        got.extend((q, k, v))
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q, (_, k, v) = h3_views(99_866)[0], h3_views(16)
    attention.run("sdpa", q, k, v)
    assert got[0].is_contiguous()
    assert got[1] is k
    assert got[2] is v


def test_a_call_that_packing_cannot_save_is_refused():
    shape = (1, 56, 2**31 // (56 * 128) + 1, 128)
    reason = attention.explain(call(q_shape=shape, k_shape=shape, v_shape=shape))["sdpa"]
    assert reason.startswith("one batch entry must hold at most 2^31 elements, has 2147")


# ---------------------------------------------------------------- comfy-kitchen INT8


@pytest.fixture
def stand_in_kitchen(monkeypatch, fresh):
    """A ``comfy_kitchen`` with the two functions the adapter uses and a record of how they were called."""
    module = ModuleType("comfy_kitchen")
    module.received, module.devices = [], []

    def int8_attention(q, k, v, *, scale=None, attn_mask=None):
        module.received.append((q, k, v, scale, attn_mask))
        return oracle(q, k, v, scale).to(q.dtype)

    def int8_attention_is_available(device=None):
        module.devices.append(device)
        return str(device) == "cuda:1"

    module.int8_attention = int8_attention
    module.int8_attention_is_available = int8_attention_is_available
    monkeypatch.setitem(sys.modules, "comfy_kitchen", module)
    return module


def test_stand_in_has_the_signatures_of_the_real_one(stand_in_kitchen, monkeypatch):
    monkeypatch.delitem(sys.modules, "comfy_kitchen")
    real = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    if not hasattr(real, "int8_attention"):
        pytest.skip(f"comfy-kitchen {kitchen.version()} has no int8_attention")
    for name in kitchen.NAMES:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (stand_in_kitchen, real))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]


def test_kitchen_gets_no_mask_and_the_callers_scale(stand_in_kitchen):
    q, k, v = qkv(16, 128, dtype=torch.bfloat16)
    out = kitchen.load()(q, k, v, 0.25)
    assert error(out, oracle(q, k, v, 0.25)) < TOLERANCE[torch.bfloat16]
    assert stand_in_kitchen.received[0][3:] == (0.25, None)


def test_kitchen_copies_only_what_breaks_its_loads(stand_in_kitchen):
    q, k, v = qkv(16, 128, dtype=torch.bfloat16)
    odd_address = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    wide = torch.zeros(*v.shape[:3], 130, dtype=v.dtype)
    odd_stride = wide[..., :128].copy_(v)
    kitchen.load()(q, odd_address, odd_stride, None)
    got_q, got_k, got_v = stand_in_kitchen.received[0][:3]
    assert got_q is q
    for got, given in ((got_k, odd_address), (got_v, odd_stride)):
        assert got is not given
        assert got.is_contiguous()
        assert got.data_ptr() % 8 == 0
        assert torch.equal(got, given)


def test_kitchen_alignment_cases():
    assert kitchen.aligned(last_dim := torch.zeros(1, 1, 128, 16).transpose(2, 3)).stride(-1) == 1
    assert last_dim.stride(-1) != 1
    single = torch.zeros(8).as_strided((1, 1, 1, 4), (5, 5, 5, 1))  # the stride of a dimension of one is never walked
    assert kitchen.aligned(single) is single
    fp32 = torch.zeros(16 * 4 + 2)[2:].view(1, 1, 16, 4)  # 8 bytes off: enough for bf16, not for fp32
    assert kitchen.aligned(fp32) is not fp32


def test_kitchen_is_asked_about_the_device_of_the_call(stand_in_kitchen):
    device = torch.device("cuda:1")
    assert attention.explain(call(device=device))["kitchen_int8"] is None
    assert "cannot run it on cuda:0" in attention.explain(call(device=torch.device("cuda:0")))["kitchen_int8"]
    assert stand_in_kitchen.devices == [device, torch.device("cuda:0")]
    assert attention.choose("auto", call(device=device))[0].name == "sdpa"
    assert attention.choose("kitchen_int8", call(device=device))[0].name == "kitchen_int8"


def test_kitchen_refusals_name_what_they_found(stand_in_kitchen):
    shape = (1, 3, 16, 257)
    device = torch.device("cuda:1")
    wide = call(device=device, q_shape=shape, k_shape=shape, v_shape=shape)
    assert attention.explain(wide)["kitchen_int8"] == "head_dim must be at most 256, have 257"
    double = call(device=device, dtype=torch.float64)
    assert attention.explain(double)["kitchen_int8"].endswith("have torch.float64")
    assert attention.explain(call())["kitchen_int8"] == "needs a CUDA device, have cpu"
    assert stand_in_kitchen.devices == []


def test_kitchen_without_the_function_names_both_versions(stand_in_kitchen):
    del stand_in_kitchen.int8_attention
    reason = attention.explain(call(device=torch.device("cuda:1")))["kitchen_int8"]
    assert f"comfy-kitchen {kitchen.version()} has no int8_attention; 0.2.31 is known to have it" in reason


# ---------------------------------------------------------------- the folder


@pytest.fixture
def copied(tmp_path):
    """Copy ``kernels/`` into a pack called ``My-Pack.v2``, put files among the backends, load it as ComfyUI would."""
    loaded = []

    def load(**files):
        root = tmp_path / "My-Pack.v2"
        shutil.copytree(PACK_ROOT / "kernels", root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "__init__.py").write_text("")
        for name, source in files.items():
            (root / "kernels" / "attention" / "backends" / f"{name}.py").write_text(source)
        name = str(root).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, root / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        loaded.append(name)
        return importlib.import_module(f"{name}.kernels.attention")

    yield load
    for name in [name for name in sys.modules if name.startswith(tuple(loaded))]:
        del sys.modules[name]


GOOD = """
from .. import Backend
from .sdpa import attend
BACKEND = Backend("dropped_in", False, "nothing", lambda: attend, lambda call: None, "a file dropped in")
"""


def test_a_broken_file_takes_nothing_down_and_a_good_one_is_offered(copied):
    theirs = copied(
        dropped_in=GOOD,
        broken='raise OSError("/opt/cuda/lib64/libfoo.so.1: cannot open shared object file")',
        syntax="def",
        mute="",
        renamed=GOOD,
        _private="raise RuntimeError",
    )
    assert theirs.names() == ["sdpa", "dropped_in", "kitchen_int8"]
    reasons = theirs.explain(theirs.Call.of(*qkv(16, 128)))
    assert reasons["sdpa"] is None
    assert reasons["dropped_in"] is None
    assert reasons["broken"] == "OSError: libfoo.so.1: cannot open shared object file"
    assert reasons["syntax"].startswith("SyntaxError: invalid syntax")
    assert reasons["mute"] == "mute.py must hold BACKEND = Backend(name='mute', ...), has None"
    assert "name='dropped_in'" in reasons["renamed"]
    assert "_private" not in reasons
    assert ("broken", False, reasons["broken"]) in theirs.list_backends("cpu")
    assert theirs.run("dropped_in", *qkv(16, 128)).shape == (1, 3, 16, 128)
    with pytest.raises(theirs.AttentionRefused, match="broken: OSError: .*; choose sdpa or dropped_in or auto"):
        theirs.run("broken", *qkv(16, 128))


def test_modules_live_under_the_packs_own_name(copied):
    theirs = copied(dropped_in=GOOD, broken="raise OSError")
    theirs.names()
    package = f"{theirs.__name__}.backends"
    backends = sys.modules[package]
    assert backends.kitchen_int8 is sys.modules[f"{package}.kitchen_int8"]
    assert sys.modules[f"{package}.dropped_in"].attend is backends.sdpa.attend
    assert f"{package}.broken" not in sys.modules
    discover_ = sys.modules[theirs.__name__.rpartition(".")[0] + ".discover"]
    assert discover_.modules(backends) is discover_.modules(backends)
    assert list(discover_.modules(backends)[0]) == ["dropped_in", "kitchen_int8", "sdpa"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "cannot import name 'f' from 'm' (/usr/lib/python3/m/__init__.py)",
            "cannot import name 'f' from 'm' (__init__.py)",
        ),
        ("/opt/venv/: missing", "venv: missing"),
        (r"[WinError 126] C:\Users\Ann Lee\torch\lib\c10.dll or one of", "[WinError 126] c10.dll or one of"),
        ("D:/packs/x.py, line 3", "x.py, line 3"),
        ("see https://example.org/a/b and bf16/fp16", "see https://example.org/a/b and bf16/fp16"),
        ("k [1, 2] and/or v", "k [1, 2] and/or v"),
    ],
)
def test_paths_are_cut_down_to_file_names(text, expected):
    assert discover.without_paths(text) == expected


def test_reason_of_an_error_without_text():
    assert discover.reason(AssertionError()) == "AssertionError"
