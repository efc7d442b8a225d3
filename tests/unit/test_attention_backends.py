"""Every adapter against a package with the published signature: what reaches it, and what never does."""

# ruff: noqa: F811  (pytest fixtures are imported and named as arguments)
from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from attention_stand_ins import (  # noqa: F401
    TOLERANCE,
    as_gpu,
    attention,
    call,
    error,
    fresh,
    oracle,
    package,
    qkv,
)
from conftest import pack_module

BF16 = torch.bfloat16
GPU = torch.device("cuda:0")


class Received(list):
    """The arguments of every call of a stand-in."""

    def views(self, q, k, v, order):
        """Whether the last call got the caller's memory, in that order of axes and with the caller's strides."""
        given = [t.transpose(1, 2) if order == "NHD" else t for t in (q, k, v)]
        got = self[-1][0]
        return all(
            a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
            for a, b in zip(got, given, strict=True)
        )


def nhd_oracle(q, k, v, scale):
    return oracle(*(t.transpose(1, 2) for t in (q, k, v)), scale).to(v.dtype).transpose(1, 2)


def stand_in_fa4(monkeypatch):
    got = Received()

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
        block_sparse_tensors_bwd=None, return_lse=False,
    ):  # fmt: skip
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, BF16), "inputs must be half"
        got.append(((q, k, v), softmax_scale))
        assert (causal, mask_mod, softcap) == (False, None, 0.0)
        return nhd_oracle(q, k, v, softmax_scale), None

    package(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func)
    return got


def stand_in_flash(monkeypatch):
    got = Received()

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        got.append(((q, k, v), softmax_scale))
        assert (dropout_p, causal) == (0.0, False)
        return nhd_oracle(q, k, v, softmax_scale)

    package(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    return got


def stand_in_sage1(monkeypatch, version="1.0.6"):
    got = Received()

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
        assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
        assert q.size(-1) in [64, 96, 128], "headdim should be in [64, 96, 128]."
        got.append(((q, k, v), sm_scale, smooth_k, kwargs, k.float().mean(1).abs().max()))
        if smooth_k:
            k -= k.mean(dim=1, keepdim=True)  # as the real one does, in the caller's memory
        return nhd_oracle(q, k, v, sm_scale)

    package(monkeypatch, "sageattention", version, sageattn=sageattn)
    return got


def stand_in_sage2(monkeypatch, version="2.2.0"):
    got = Received()

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
        got.append(((q, k, v), sm_scale, tensor_layout, kwargs))
        return nhd_oracle(q, k, v, sm_scale)

    package(monkeypatch, "sageattention", version, sageattn=sageattn)
    return got


def stand_in_sage3(monkeypatch):
    got = Received()

    def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs):
        k -= k.mean(dim=-2, keepdim=True)
        got.append(((q, k, v), attn_mask, kwargs))
        return oracle(q, k, v).to(q.dtype)

    package(monkeypatch, "sageattn3", "1.0.0", sageattn3_blackwell=sageattn3_blackwell)
    return got


def stand_in_sol(monkeypatch, available=True):
    got = Received()

    def sol_attn(
        q, k, v, tau=1.0, scale=None, sink_blocks=None, sink_q=None, key_bias=None, topk_ratio=0.0, tail=True,
        block_len=None, coarse_gate=None, token_aug=0,
    ):  # fmt: skip
        got.append(((q, k, v), scale, tau, sink_blocks, (sink_q, key_bias, topk_ratio, tail, coarse_gate)))
        return nhd_oracle(q, k, v, scale)

    package(monkeypatch, "comfy_kitchen", sol_attn=sol_attn, sol_attn_is_available=lambda device=None: available)
    return got


def stand_in_sol_pack(monkeypatch):
    got = Received()
    package(monkeypatch, "comfy_kitchen")

    def sol_attn(
        q, k, v, *, scale=None, tau=1.0, thresh_type="diag", int8_qk=False, int8_pv=False, sink_blocks=(0, 0),
        sink_q=(0, 0),
    ):  # fmt: skip
        got.append(((q, k, v), scale, tau, sink_blocks, (sink_q, int8_qk, int8_pv)))
        return nhd_oracle(q, k, v, scale)

    package(monkeypatch, "packs/ComfyUI-sol-attn_x_1.sol_kernel", sol_attn=sol_attn)
    return got


def stand_in_kitchen(monkeypatch):
    got = Received()

    def int8_attention(q, k, v, *, scale=None, attn_mask=None):
        got.append(((q, k, v), scale, attn_mask))
        return oracle(q, k, v, scale).to(q.dtype)

    package(
        monkeypatch, "comfy_kitchen", int8_attention=int8_attention,
        int8_attention_is_available=lambda device=None: str(device) == "cuda:0",
    )  # fmt: skip
    return got


STAND_INS = {
    "fa4": (stand_in_fa4, "NHD"),
    "flash": (stand_in_flash, "NHD"),
    "sage1": (stand_in_sage1, "NHD"),
    "sage2": (stand_in_sage2, "NHD"),
    "sage3": (stand_in_sage3, "HND"),
    "sol": (stand_in_sol, "NHD"),
    "kitchen_int8": (stand_in_kitchen, "HND"),
}
SMOOTHED = ("sage1", "sage3")  # get a k of their own, smoothed


def rows_for(name, rows):
    """`rows`, or the next number of rows that the backend takes."""
    return -(-rows // 64) * 64 if name == "sage1" else rows


def cc_of(name):
    return (12, 0) if name == "sage3" else (9, 0)


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("rows", [1, 16, 127, 128, 129, 4097])
def test_the_answer_is_the_packages(name, rows, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    STAND_INS[name][0](monkeypatch)
    q, k, v = qkv(rows, 128, heads=1, dtype=BF16)
    refused = rows % 64 if name == "sage1" else rows == 1 and name in SMOOTHED
    if refused:
        expected = f"must be a multiple of 64, have {rows}" if name == "sage1" else "takes no single key"
        with pytest.raises(attention.AttentionRefused, match=expected):
            attention.run(name, q, k, v)
        return
    out = attention.run(name, q, k, v)
    assert (out.shape, out.dtype) == (q.shape, BF16)
    assert error(out, oracle(q, k, v)) < TOLERANCE[BF16]


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("layout", ["auto", "strided_nhd", "native"])
def test_views_of_the_buffer_reach_the_kernel(name, layout, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    make, order = STAND_INS[name]
    got = make(monkeypatch)
    q, k, v = qkv(rows_for(name, 33), 128, dtype=BF16)
    plan = attention.plan_for(attention.Request(name, layout), [q, k, v])
    assert (plan.fixes.copies, plan.fixes.copied_bytes) == (0, 0)
    kept = k.clone()
    attention.execute(plan, [q, k, v])
    if name in SMOOTHED:
        assert got.views(q, got[-1][0][1].transpose(1, 2) if order == "NHD" else got[-1][0][1], v, order)
    else:
        assert got.views(q, k, v, order)
    assert torch.equal(k, kept)


@pytest.mark.parametrize("name", STAND_INS)
def test_contiguous_packs_all_three(name, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    make, order = STAND_INS[name]
    got = make(monkeypatch)
    q, k, v = qkv(rows_for(name, 33), 128, dtype=BF16)
    assert error(attention.run(name, q, k, v, layout="contiguous"), oracle(q, k, v)) < TOLERANCE[BF16]
    assert all(t.is_contiguous() for t in got[-1][0])


@pytest.mark.parametrize("name", STAND_INS)
def test_q_and_k_in_fp32_with_v_in_bf16(name, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    got = STAND_INS[name][0](monkeypatch)
    q, k, v = qkv(rows_for(name, 129), 128)
    out = attention.run(name, q, k, v.to(BF16))
    assert out.dtype == BF16 and {t.dtype for t in got[-1][0]} == {BF16}
    assert error(out, oracle(q, k, v)) < 2 * TOLERANCE[BF16]


@pytest.mark.parametrize("name", [name for name in STAND_INS if name != "sage3"])
def test_the_scale_is_the_callers(name, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    got = STAND_INS[name][0](monkeypatch)
    q, k, v = qkv(rows_for(name, 33), 128, dtype=BF16)
    assert error(attention.run(name, q, k, v, scale=0.3), oracle(q, k, v, 0.3)) < TOLERANCE[BF16]
    assert got[-1][1] == 0.3


@pytest.mark.parametrize("name", STAND_INS)
def test_no_mask_ever_reaches_a_package(name, as_gpu, monkeypatch):
    as_gpu(cc_of(name))
    got = STAND_INS[name][0](monkeypatch)
    masked = call(device=GPU, mask=True)
    assert attention.explain(masked)[name] == "takes no mask, the call has one"
    with pytest.raises(attention.AttentionRefused, match="takes no mask"):
        attention.choose(name, masked)
    assert "attn_mask" not in inspect.signature(attention.run).parameters and not got


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("kind", [ImportError, OSError, AssertionError, RuntimeError])
def test_an_import_that_raises_is_the_reason_and_costs_nothing_else(name, kind, fresh, monkeypatch):
    import sys

    module = {"fa4": "flash_attn", "flash": "flash_attn", "sage1": "sageattention", "sage2": "sageattention",
              "sage3": "sageattn3"}.get(name, "comfy_kitchen")  # fmt: skip

    class Broken:
        def find_spec(self, asked, path=None, target=None):
            if asked.split(".")[0] == module:
                raise kind("libfoo.so: undefined symbol")

    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    if name == "sol" and kind is ImportError:
        reason = "and the Sol-Attn pack is not loaded"
    else:
        reason = f"does not load ({kind.__name__}: libfoo.so: undefined symbol)"
    listed = {entry[0]: entry[2] for entry in attention.list_backends("cpu")}
    assert reason in listed[name] and listed["sdpa"] is None
    with pytest.raises(attention.AttentionRefused, match="choose sdpa or sdpa_math or auto"):
        attention.run(name, *qkv(16, 128))


def test_fa4_without_its_paths_says_what_is_missing(as_gpu, monkeypatch):
    """flash-attn-4 is there, nvidia-cutlass-dsl's .pth file was not read."""
    import sys

    as_gpu()
    package(monkeypatch, "flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn.cute", raising=False)

    class Cute:
        def find_spec(self, asked, path=None, target=None):
            if asked == "flash_attn.cute":
                raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(sys, "meta_path", [Cute(), *sys.meta_path])
    assert "its .pth file was not read" in attention.explain(call(device=GPU))["fa4"]


# ---------------------------------------------------------------- Sage


def test_sage1_smooths_k_without_touching_the_callers(as_gpu, monkeypatch):
    as_gpu()
    got = stand_in_sage1(monkeypatch)
    q, k, v = qkv(64, 128)
    k = (k + 50 * torch.randn(1, 3, 1, 128).sign()).to(BF16)
    kept = k.clone()
    out = attention.run("sage1", q.to(BF16), k, v.to(BF16))
    _, _, smooth, kwargs, mean = got[-1]
    assert torch.equal(k, kept) and smooth is False and kwargs == {}
    assert mean < 0.5  # the offset of 50 is gone before the quantiser sees it
    expected = oracle(q.to(BF16), kept, v.to(BF16))
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), dim=0) > 0.999


def test_sage2_always_smooths_and_lets_the_package_choose_its_kernel(as_gpu, monkeypatch):
    as_gpu()
    got = stand_in_sage2(monkeypatch)
    attention.run("sage2", *qkv(64, 128, dtype=BF16))
    assert got[-1][2:] == ("NHD", {"smooth_k": True})


@pytest.mark.parametrize(
    ("version", "runs", "other", "reason"),
    [
        ("1.0.6", "sage1", "sage2", "sageattention 1.0.6 is installed, this backend needs 2.2.0"),
        ("2.2.0", "sage2", "sage1", "sageattention 2.2.0 is installed, this backend is for 1.0.6; choose sage2"),
        ("2.2.0+cu130torch2.9", "sage2", "sage1", "choose sage2"),
    ],
)
def test_the_two_versions_of_one_package_are_told_apart(version, runs, other, reason, as_gpu, monkeypatch):
    as_gpu()
    stand_in_sage2(monkeypatch, version)
    shape, stride = (1, 3, 64, 128), (64 * 384, 128, 384, 1)
    sizes = {f"{t}_shape": shape for t in "qkv"} | {f"{t}_stride": stride for t in "qkv"}
    reasons = attention.explain(call(device=GPU, **sizes))
    assert reasons[runs] is None and reason in reasons[other]


def test_sage2_older_than_it_must_be(as_gpu, monkeypatch):
    as_gpu()
    stand_in_sage2(monkeypatch, "2.1.1")
    assert "2.1.1 is installed, this backend needs 2.2.0" in attention.explain(call(device=GPU))["sage2"]


def test_sage3_has_no_scale(as_gpu, monkeypatch):
    as_gpu((12, 1))
    got = stand_in_sage3(monkeypatch)
    q, k, v = qkv(33, 128, dtype=BF16)
    with pytest.raises(attention.AttentionRefused, match="takes no scale, the call has 0.3"):
        attention.run("sage3", q, k, v, scale=0.3)
    attention.run("sage3", q, k, v, scale=128**-0.5)
    assert got[-1][1:] == (None, {})


def test_sage3_is_taken_by_name_only(as_gpu, monkeypatch):
    as_gpu((12, 0))
    got = stand_in_sage3(monkeypatch)
    assert attention.explain(call(device=GPU))["sage3"] is None
    assert "sage3" not in attention.registry.takers(call(device=GPU))
    assert attention.choose("auto", call(device=GPU))[0].name != "sage3" and not got


# ---------------------------------------------------------------- Sol


@pytest.mark.parametrize("make", [stand_in_sol, stand_in_sol_pack])
def test_sol_gets_blocks_for_rows(make, as_gpu, monkeypatch):
    as_gpu()
    got = make(monkeypatch)
    q, k, v = qkv(200, 128, dtype=BF16)
    for rows, blocks in ((0, 0), (1, 1), (64, 1), (65, 2), (10_000, 4)):
        attention.run("sol", q, k, v, tau=1.5, sink_rows=rows)
        assert got[-1][2:4] == (1.5, (0, blocks))
    attention.run("sol", q, k, v)
    assert got[-1][2:4] == (1.3, (0, 0))


def test_sol_refuses_what_its_kernels_would_read_past(as_gpu, monkeypatch):
    as_gpu()
    stand_in_sol(monkeypatch)
    q, k, v = qkv(64, 128, dtype=BF16)
    with pytest.raises(attention.AttentionRefused, match="same rows, have 32 and 64"):
        attention.run("sol", q[:, :, :32], k, v)


def test_sol_comes_from_kitchen_first_and_says_what_is_missing(as_gpu, monkeypatch):
    as_gpu()
    package(monkeypatch, "comfy_kitchen")
    reason = attention.explain(call(device=GPU))["sol"]
    assert "has no sol_attn (0.2.33 and newer have it), and the Sol-Attn pack is not loaded" in reason
    attention.registry.loaded.cache_clear()
    pack = stand_in_sol_pack(monkeypatch)
    kitchen = stand_in_sol(monkeypatch)
    attention.run("sol", *qkv(64, 128, dtype=BF16))
    assert kitchen and not pack


# ---------------------------------------------------------------- refusals


REFUSED = [
    ("fa4", (9, 0), {"head_dim": 80}, None),
    ("fa4", (9, 0), {"head_dim": 160}, "head_dim must be a multiple of 8 from 8 to 128, have 160"),
    ("fa4", (7, 5), {}, "has kernels for compute capability 8.x to 12.x, cuda:0 has 7.5"),
    ("fa4", (13, 0), {}, "cuda:0 has 13.0"),
    ("fa4", (9, 0), {"dtype": torch.float32}, "dtype must be bfloat16 or float16, have torch.float32"),
    ("flash", (9, 0), {"head_dim": 257}, "head_dim must be a multiple of 8 and at most 256, have 257"),
    ("flash", (7, 5), {}, "needs compute capability 8.0 or newer, cuda:0 has 7.5"),
    ("sage1", (9, 0), {"head_dim": 80}, "head_dim must be 64, 96 or 128, have 80"),
    ("sage2", (9, 0), {"head_dim": 160}, "head_dim must be at most 128, have 160"),
    ("sage2", (10, 0), {}, "has kernels for compute capability 8.x, 9.0 and 12.x, cuda:0 has 10.0"),
    ("sage2", (12, 1), {}, None),
    ("sage3", (12, 1), {"head_dim": 96}, "head_dim must be 64 or 128, have 96"),
    ("sage3", (9, 0), {}, "has kernels for compute capability 10.x and 12.x, cuda:0 has 9.0"),
    ("sage3", (10, 3), {}, None),
    ("sol", (9, 0), {"head_dim": 64}, "head_dim must be 128, have 64"),
    ("sol", (9, 0), {"dtype": torch.float32}, "dtype must be bfloat16 or float16, have torch.float32"),
    ("kitchen_int8", (9, 0), {"head_dim": 257}, "head_dim must be at most 256, have 257"),
    ("kitchen_int8", (9, 0), {"dtype": torch.float64}, "have torch.float64"),
    ("sdpa_cudnn", (7, 5), {}, "needs compute capability 8.0 or newer, cuda:0 has 7.5"),
    ("sdpa_cudnn", (9, 0), {"head_dim": 160}, "head_dim must be a multiple of 8 and at most 128, have 160"),
    ("sdpa_cudnn", (9, 0), {"rows": 1}, "cuDNN takes no single row"),
    ("sdpa_flash", (9, 0), {"head_dim": 100}, "head_dim must be a multiple of 8 and at most 256, have 100"),
    ("sdpa_efficient", (7, 5), {}, "needs compute capability 8.0 or newer, cuda:0 has 7.5"),
    ("sdpa_efficient", (7, 5), {"dtype": torch.float16}, None),
    ("sdpa_math", (9, 0), {"rows": 2**15}, "writes q k^T out, which is 3221225472 numbers here; at most 1073741824"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cc", "changes", "reason"), REFUSED)
def test_refusals_name_what_was_found(name, cc, changes, reason, as_gpu, monkeypatch):
    as_gpu(cc)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    if name in STAND_INS:
        STAND_INS[name][0](monkeypatch)
    shape = (1, 3, changes.get("rows", 16), changes.get("head_dim", 128))
    found = attention.explain(
        call(device=GPU, dtype=changes.get("dtype", BF16), q_shape=shape, k_shape=shape, v_shape=shape)
    )[name]
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("name", [*STAND_INS, "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"])
def test_a_cpu_is_refused_by_what_needs_a_gpu(name, fresh, monkeypatch):
    if name in STAND_INS:
        STAND_INS[name][0](monkeypatch)
    assert attention.explain(call())[name] == "needs a CUDA device, have cpu"


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)])
def test_every_capability_gets_an_answer_from_everyone(cc, as_gpu):
    as_gpu(cc)
    for name, reason in attention.explain(call(device=GPU)).items():
        assert reason is None or (isinstance(reason, str) and "cannot be asked" not in reason), name


def test_without_the_functions_both_versions_are_named(as_gpu, monkeypatch):
    as_gpu()
    package(monkeypatch, "comfy_kitchen", "0.2.20")
    reason = attention.explain(call(device=GPU))["kitchen_int8"]
    assert "has no int8_attention and no int8_attention_is_available; 0.2.31 is known to have it" in reason


# ---------------------------------------------------------------- PyTorch's kernels


def test_the_operators_have_the_arguments_that_are_passed():
    sdpa = pack_module("kernels.attention.backends.sdpa")
    for kind in sdpa.OPERATORS:
        assert callable(sdpa.load_kernel(kind))


def test_an_operator_with_other_arguments_is_refused(monkeypatch):
    sdpa = pack_module("kernels.attention.backends.sdpa")
    monkeypatch.setitem(sdpa.OPERATORS, "flash", ("_scaled_dot_product_flash_attention", ("causal",)))
    with pytest.raises(ImportError, match="has _scaled_dot_product_flash_attention with the arguments query, key"):
        sdpa.load_kernel("flash")
    monkeypatch.setitem(sdpa.OPERATORS, "flash", ("_scaled_dot_product_of_the_future", ()))
    with pytest.raises(ImportError, match="has no operator _scaled_dot_product_of_the_future"):
        sdpa.load_kernel("flash")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 16, 129])
def test_the_math_kernel_runs_anywhere(rows, dtype):
    q, k, v = qkv(rows, 80, dtype=dtype)
    assert error(attention.run("sdpa_math", q, k, v, scale=0.2), oracle(q, k, v, 0.2)) < TOLERANCE[dtype]


def test_the_math_kernel_keeps_fp32_scores_whatever_the_process_allows():
    """ComfyUI sets this flag; with k offset by 50 the kernel by itself is then 50 times as far off."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 129, 64, generator=generator) for _ in range(3))
    q, k, v = q.to(BF16), (k + 50).to(BF16), v.to(BF16)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        out = attention.run("sdpa_math", q, k, v)
        assert error(out, oracle(q, k, v)) < 5e-3
        assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def test_sdpa_packs_what_the_kernel_it_may_pick_cannot_read():
    operands = pack_module("kernels.attention.operands")
    record = next(record for record in attention.records() if record.name == "sdpa")
    q, k, v = qkv(17, 128, dtype=BF16)
    assert operands.fixes_for(record, "native", (q, k, v), v.dtype) is operands.NONE
    odd = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    found = operands.fixes_for(record, "native", (q, odd, v), v.dtype)
    assert found.pack == (None, "HND", None) and found.copies == 1


def test_real_packages_have_the_stand_ins_signatures(fresh, monkeypatch):
    """Against what is installed here; what is not was read from its source (see each adapter's docstring)."""
    comfy_kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")

    got = {name: getattr(comfy_kitchen, name, None) for name in ("int8_attention", "sol_attn")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in_kitchen(monkeypatch)
        import comfy_kitchen as pretended

        assert list(inspect.signature(pretended.int8_attention).parameters) == list(
            inspect.signature(got["int8_attention"]).parameters
        )
