"""The attention registry and its backends, against an fp32 oracle; what cannot run says why."""

# ruff: noqa: F811  (pytest fixtures are imported and named as arguments)
from __future__ import annotations

import importlib.util
import math
import shutil
import sys

import pytest
import torch
from attention_stand_ins import TOLERANCE, call, error, fresh, only, oracle, qkv, stand_in  # noqa: F401
from comfy_server import PACK_ROOT
from conftest import pack_module

attention = pack_module("kernels.attention")
discover = pack_module("kernels.discover")
dispatch = pack_module("kernels.attention.dispatch")

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


@pytest.mark.parametrize("name", ["xformers", "SDPA", ""])
def test_unknown_name_lists_what_there_is(name):
    with pytest.raises(attention.AttentionRefused, match="no attention backend of that name; it has sdpa") as refused:
        attention.run(name, *qkv(16, 128))
    assert (refused.value.name, refused.value.others) == (name, ("sdpa", "sdpa_math", "auto"))
    assert str(refused.value).endswith("choose sdpa or sdpa_math or auto")


def test_a_name_of_any_length_is_told_shortly():
    refused = attention.AttentionRefused("x" * 10_000_000, "is not there")
    assert str(refused) == f"{'x' * 60}...: is not there" and len(refused.name) == 10_000_000


def test_half_a_character_in_a_name_is_spelled_out():
    """Such a text cannot be printed or logged."""
    assert str(attention.AttentionRefused("sage\ud800", "is not there")) == "sage\\ud800: is not there"


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
    with pytest.raises(attention.AttentionRefused, match="layout must be auto or .*, have 'packed'"):
        attention.run("auto", q, k, v, layout="packed")


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

    monkeypatch.setattr(attention.auto, "measurable", lambda device: False)

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
    exact = [record.name for record in attention.records() if record.exact]
    assert theirs.names() == [*exact, "dropped_in", *(name for name in attention.names() if name not in exact)]
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
    with pytest.raises(
        theirs.AttentionRefused, match="broken: OSError: .*; choose sdpa or sdpa_math or dropped_in or auto"
    ):
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
    assert {"dropped_in", "kitchen_int8", "sdpa"} < set(discover_.modules(backends)[0])


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
