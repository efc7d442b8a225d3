"""What reaches a kernel: views as they are, and every copy for a reason and counted."""

# ruff: noqa: F811  (pytest fixtures are imported and named as arguments)
from __future__ import annotations

import pytest
import torch
from attention_stand_ins import attention, fresh, only, oracle, qkv, stand_in  # noqa: F401
from conftest import pack_module

operands = pack_module("kernels.attention.operands")
BF16 = torch.bfloat16


def h3_views(rows):
    """q, k, v of H3's buffer [1, rows, 3 * 56 * 128], without memory."""
    buffer = torch.empty(1, rows, 3 * 56 * 128, dtype=BF16, device="meta")
    return [part.unflatten(-1, (56, 128)).transpose(1, 2) for part in buffer.chunk(3, -1)]


def fixes(backend, q, k, v, layout="native"):
    return operands.fixes_for(backend, layout, (q, k, v), v.dtype)


# ---------------------------------------------------------------- 2^31


@pytest.mark.parametrize(("rows", "copied"), [(99_865, False), (99_866, True)])
def test_fit_int32_on_both_sides_of_h3s_limit(rows, copied):
    for view in h3_views(rows):
        fitted = attention.fit_int32(view)
        assert (fitted is not view) == copied
        assert fitted.shape == view.shape and fitted.dtype == view.dtype
        assert not copied or fitted.is_contiguous()


@pytest.mark.parametrize(("stride", "copied"), [(2**31 - 1, False), (2**31, True)])
def test_the_last_element_counts(stride, copied):
    tensor = torch.empty_strided((1, 1, 2, 1), (1, 1, stride, 1), device="meta")
    assert (attention.fit_int32(tensor) is not tensor) == copied
    small = torch.empty(1, 1, 2, 1, device="meta")
    found = fixes(stand_in(None, int32_offsets=True), small, tensor, small)
    assert found.pack == (None, attention.HND if copied else None, None)
    assert found.copies == int(copied) and found.copied_bytes == 8 * copied


def test_the_batch_is_left_out():
    tensor = torch.empty_strided((2, 1, 1, 1), (2**31, 1, 1, 1), device="meta")
    assert attention.fit_int32(tensor) is tensor


@pytest.mark.parametrize("name", ["sdpa", "sdpa_efficient", "sage1", "sage2", "sage3"])
def test_only_the_offending_tensor_is_packed(name):
    backend = next(record for record in attention.records() if record.name == name)
    q, (_, k, v) = h3_views(99_866)[0], h3_views(16)
    found = fixes(backend, q, k, v)
    assert found.pack == (backend.order, None, None)
    assert found.copied_bytes == q.numel() * 2 and found.reasons == (
        "q is packed: it reaches 2^31 elements from its start",
    )
    assert fixes(backend, *h3_views(99_865)) is operands.NONE


def test_kernels_with_64_bit_offsets_get_long_views():
    for backend in attention.records():
        if not backend.int32_offsets:
            assert fixes(backend, *h3_views(108_800)).copies == 0


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", ["auto", "strided_nhd", "native"])
def test_views_of_the_qkv_buffer_need_no_copy(layout):
    for backend in attention.records():
        assert fixes(backend, *h3_views(38_016), operands.layout_of(backend, layout)) is operands.NONE


def test_contiguous_packs_in_the_kernels_order_and_counts_it():
    q, k, v = qkv(16, 128, dtype=BF16)
    for order in (attention.HND, attention.NHD):
        found = fixes(stand_in(None, order=order), q, k, v, "contiguous")
        assert (found.copies, found.copied_bytes) == (3, 3 * q.numel() * 2)
        tensors = [q, k, v]
        found.apply(tensors)
        for packed, given in zip(tensors, (q, k, v), strict=True):
            assert torch.equal(packed, given)
            assert operands.is_packed(packed.shape, packed.stride(), order)
            assert not operands.is_packed(given.shape, given.stride(), order)
        assert fixes(stand_in(None, order=order), *tensors, "contiguous") is operands.NONE


def test_the_variable_is_the_default_and_only_the_default(monkeypatch):
    sage = next(record for record in attention.records() if record.name == "sage1")
    sol = next(record for record in attention.records() if record.name == "sol")
    assert (operands.layout_of(sage, "auto"), operands.layout_of(sol, "auto")) == ("strided_nhd", "native")
    monkeypatch.setenv("H3_SAGE_QKV_LAYOUT", "contiguous")
    assert operands.layout_of(sage, "auto") == "contiguous"
    assert operands.layout_of(sage, "native") == "native"
    assert operands.layout_of(sol, "auto") == "native"
    monkeypatch.setenv("H3_SOL_QKV_LAYOUT", "nhd")
    with pytest.raises(attention.AttentionRefused, match="sol: H3_SOL_QKV_LAYOUT must be auto or .*, have 'nhd'"):
        operands.layout_of(sol, "auto")


# ---------------------------------------------------------------- dtypes, alignment, strides


def test_q_and_k_in_fp32_are_converted_and_counted():
    q, k, v = qkv(127, 128)
    v = v.to(BF16)
    found = fixes(stand_in(None, align_elements=8, dense_last=True), q, k, v)
    assert found.cast == (BF16, BF16, None) and found.pack == (None, None, None)
    assert (found.copies, found.copied_bytes) == (2, 2 * q.numel() * 2)
    assert found.reasons[0] == "q is converted from float32 to bfloat16"


def test_alignment_cases():
    def aligned(tensor, elements):
        return operands.is_aligned(
            tensor.shape, tensor.stride(), operands.address(tensor), elements, tensor.element_size()
        )

    whole = torch.zeros(16 * 4 + 4)
    assert aligned(whole[:64].view(1, 1, 16, 4), 4)
    assert not aligned(whole[2:66].view(1, 1, 16, 4), 4)
    assert aligned(whole[2:66].view(1, 1, 16, 4), 2)
    single = torch.zeros(8).as_strided((1, 1, 1, 4), (5, 5, 5, 1))  # the stride of a dimension of one is never walked
    assert aligned(single, 4)
    assert not aligned(torch.zeros(130 * 16)[:2080].view(1, 1, 16, 130)[..., :128], 4)


@pytest.mark.parametrize("name", ["sdpa_flash", "fa4", "flash", "kitchen_int8", "sage2", "sol"])
def test_odd_strides_and_addresses_are_packed_alone(name):
    backend = next(record for record in attention.records() if record.name == name)
    q, k, v = qkv(16, 128, dtype=BF16)
    odd_address = torch.empty(k.numel() + 1, dtype=BF16)[1:].view(k.shape).copy_(k)
    odd_stride = torch.zeros(*v.shape[:3], 130, dtype=BF16)[..., :128].copy_(v)
    found = fixes(backend, q, odd_address, odd_stride)
    assert found.pack == (None, backend.order, backend.order) and found.copies == 2
    tensors = [q, odd_address, odd_stride]
    found.apply(tensors)
    assert tensors[0] is q
    for got, given in ((tensors[1], odd_address), (tensors[2], odd_stride)):
        assert got.data_ptr() % 16 == 0 and torch.equal(got, given)
        assert operands.is_packed(got.shape, got.stride(), backend.order)


def test_a_last_dimension_with_a_stride_is_packed():
    q, k, v = qkv(16, 128, dtype=BF16)
    turned = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert turned.stride(-1) != 1
    assert fixes(stand_in(None, dense_last=True), q, turned, v).pack == (None, attention.HND, None)
    assert fixes(stand_in(None), q, turned, v) is operands.NONE


# ---------------------------------------------------------------- on the way to the kernel


def test_a_call_like_an_earlier_one_is_looked_up(only, monkeypatch):
    only(stand_in(lambda: oracle))
    request = attention.Request()
    plan = attention.plan_for(request, qkv(16, 128))
    made = []
    monkeypatch.setattr(attention.dispatch, "make_plan", lambda *arguments: made.append(1) or (plan, True))
    assert attention.plan_for(request, qkv(16, 128, seed=3)) is plan and not made
    changed = [
        (attention.Request(scale=0.5), qkv(16, 128)),
        (request, qkv(17, 128)),
        (request, [t.contiguous() for t in qkv(16, 128)]),
        (request, qkv(16, 128, dtype=BF16)),
        (request, [*qkv(16, 128)[:2], torch.empty(16 * 384 + 1)[1:].view(1, 16, 3, 128).transpose(1, 2)]),
    ]
    for number, (other, tensors) in enumerate(changed, 1):
        attention.plan_for(other, list(tensors))
        assert len(made) == number


def test_a_plan_keeps_no_tensor(only):
    import gc
    import weakref

    only(stand_in(lambda: oracle, align_elements=8))
    tensors = [t.clone() for t in qkv(16, 128)]
    watched = [weakref.ref(t) for t in tensors]
    out = attention.execute(attention.plan_for(attention.Request(), tensors), tensors)
    assert tensors == [] and out.shape == (1, 3, 16, 128)
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]


def test_tensors_are_let_go_before_the_kernel_is_done(only):
    import weakref

    watched, alive = [], []

    def attend(q, k, v, scale):
        out = oracle(q, k, v, scale)
        alive.append([ref() is not None for ref in watched])
        del q, k, v
        alive.append([ref() is not None for ref in watched])
        return out

    only(stand_in(lambda: attend, order=attention.NHD))
    tensors = [t.contiguous() for t in qkv(16, 128)]
    watched += [weakref.ref(t) for t in tensors]
    attention.execute(attention.plan_for(attention.Request(layout="contiguous"), tensors), tensors)
    assert alive[0] == [False, False, False]  # copies were made, the originals went before the kernel ran
    alive.clear()
    tensors = [t.contiguous() for t in qkv(16, 128)]
    watched[:] = [weakref.ref(t) for t in tensors]
    attention.execute(attention.plan_for(attention.Request(), tensors), tensors)
    assert alive == [[True, True, True], [False, False, False]]


def test_options_are_checked(only):
    got = []

    def attend(q, k, v, scale, *, tau):
        got.append(tau)
        return oracle(q, k, v, scale)

    sparse = stand_in(lambda: attend, options=(attention.Option("tau", 1.3, 0.0, 4.0, 0.1, ""),), exact=False)
    only(sparse, stand_in(lambda: oracle, name="plain"))
    attention.run("stand_in", *qkv(16, 128))
    attention.run("stand_in", *qkv(16, 128), tau=2.0)
    assert got == [1.3, 2.0]
    for value in (4.5, -1.0, float("nan"), float("inf"), "much"):
        with pytest.raises(attention.AttentionRefused, match="tau must be from 0 to 4, have"):
            attention.run("stand_in", *qkv(16, 128), tau=value)
    with pytest.raises(attention.AttentionRefused, match="plain: has no option tau; it takes none"):
        attention.run("plain", *qkv(16, 128), tau=2.0)
    with pytest.raises(attention.AttentionRefused, match="stand_in: has no option mask; it takes tau"):
        attention.run("stand_in", *qkv(16, 128), mask=2.0)
