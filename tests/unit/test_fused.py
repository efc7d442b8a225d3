"""The ops' references against ComfyUI's chain written out, the cases from the field, and the registry."""

import itertools

import pytest
import torch
from conftest import pack_module

fused = pack_module("kernels.fused")
nvfp4 = pack_module("kernels.nvfp4")
op_module = pack_module("kernels.fused._op")

ROWS = [1, 15, 16, 17, 127, 129]
SEGMENTS = [(0, 2, 1), (2, 3, 4), (3, 3, 0), (3, 7, 2), (7, 13, torch.tensor([0, 3, 6, 0, 3, 6]))]


def tensors(rows, columns, table_rows=9, dtype=torch.bfloat16, table=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    x = (random(rows, columns) * 8).to(dtype)
    weight = (1 + 0.1 * random(columns)).to(dtype)
    return x, weight, random(table_rows, columns).to(table), random(table_rows, columns).to(table)


def stock(x, weight, scale, shift, segments, eps=1e-5):
    """ComfyUI's norm and modulation, one row at a time, with each of its roundings spelled out in fp64 and cast."""
    h = torch.nn.functional.rms_norm(x, (x.shape[1],), weight, eps)
    out = h.clone()
    for start, stop, row in segments:
        for position in range(start, stop):
            index = int(row[position - start]) if isinstance(row, torch.Tensor) else row
            factor = (1.0 + scale[index].to(x.dtype).double()).to(x.dtype)
            product = (h[position].double() * factor.double()).to(x.dtype)
            out[position] = (product.double() + shift[index].to(x.dtype).double()).to(x.dtype)
    return out


def same(a, b):
    """Equality of the bytes of two quantised matrices or two tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return (
        a.shape == b.shape
        and torch.equal(a.codes, b.codes)
        and same(a.block_scale, b.block_scale)
        and torch.equal(a.decode_scale, b.decode_scale)
    )


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_modulation_by_int_and_per_token_rows(table):
    """The case from the field: five segments, an empty one and a LongTensor among them; x stays as it was."""
    x, weight, scale, shift = tensors(13, 64, table=table)
    before = x.clone()
    expected = stock(x, weight, scale, shift, SEGMENTS)
    assert same(fused.norm_modulate(x, weight, 1e-5, scale, shift, SEGMENTS), expected)
    q = fused.norm_modulate_nvfp4(x, weight, 1e-5, scale, shift, SEGMENTS)
    assert same(q, nvfp4.quantize(expected))
    assert same(x, before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [16, 80, 96, 5376])
def test_ragged_shapes(rows, columns):
    x, weight, scale, shift = tensors(rows, columns, 3)
    segments = [(0, rows // 3, 0), (rows // 3, rows // 2, 1), (rows // 2, rows, 2)]
    expected = stock(x, weight, scale, shift, segments)
    assert same(fused.norm_modulate(x, weight, 1e-5, scale, shift, segments), expected)
    static = torch.tensor(0.01)
    for decode_scale in (None, static):
        q = fused.norm_modulate_nvfp4(x, weight, 1e-5, scale, shift, segments, decode_scale=decode_scale)
        assert q.shape == (rows, columns) and same(q, nvfp4.quantize(expected, decode_scale))


def test_rows_outside_every_segment_are_normalised_only():
    x, weight, scale, shift = tensors(6, 32, 2)
    out = fused.norm_modulate(x, weight, 1e-5, scale, shift, [(2, 4, 1)])
    plain = torch.nn.functional.rms_norm(x, (32,), weight, 1e-5)
    assert same(out[:2], plain[:2]) and same(out[4:], plain[4:]) and not same(out[2:4], plain[2:4])


def test_scale_of_minus_one_and_zero_shift_give_exact_zeros():
    x, weight, _, _ = tensors(17, 64, 1)
    scale, shift = torch.full((1, 64), -1.0), torch.zeros(1, 64)
    q = fused.norm_modulate_nvfp4(x, weight, 1e-5, scale, shift, [(0, 17, 0)])
    assert not (q.codes & 0x77).any() and not q.block_scale.view(torch.uint8).any() and q.decode_scale == 0
    assert torch.equal(nvfp4.dequantize(q), torch.zeros(17, 64))


@pytest.mark.parametrize("norm", ["aten", "fused"])
def test_the_norm_written_out_moves_almost_nothing(norm):
    x, weight, scale, shift = tensors(128, 5376, 1)
    a = fused.norm_modulate(x, weight, 1e-5, scale, shift, [(0, 128, 0)], norm=norm)
    b = fused.norm_modulate(x, weight, 1e-5, scale, shift, [(0, 128, 0)])
    assert float((a != b).float().mean()) <= (0 if norm == "aten" else 1e-3)


def every_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def test_swiglu_rounds_twice_for_every_gate():
    """All 65,536 bf16 gates against silu in fp64, rounded once, times up, rounded again."""
    gate = every_bf16()
    up = torch.full_like(gate, 1.4140625)
    out = fused.swiglu(torch.stack([gate, up], dim=1))[:, 0]
    silu = (gate.double() * torch.sigmoid(gate.double())).to(torch.bfloat16)
    expected = (silu.double() * 1.4140625).to(torch.bfloat16)
    number = ~torch.isnan(expected) & ~torch.isinf(gate)
    # exp(89) is past fp32, so the stock chain gives -0 where the true value is below 2e-37
    far = number & (gate <= -89) & (gate >= -97)
    near = number & ~far
    assert torch.equal(out[near], expected[near]) and int(near.sum()) > 65000
    assert int(far.sum()) == 17 and torch.equal(out[far].view(torch.int16), torch.full((17,), -32768).short())
    once = (gate.double() * torch.sigmoid(gate.double()) * 1.4140625).to(torch.bfloat16)
    assert int((once[near] != expected[near]).sum()) > 1000  # one rounding would show


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_to_codes(rows):
    generator = torch.Generator().manual_seed(rows)
    gate_up = torch.randn(rows, 2 * 80, generator=generator).bfloat16()
    gate_up[:, 3] = 0.0
    before = gate_up.clone()
    expected = torch.nn.functional.silu(gate_up[:, :80]) * gate_up[:, 80:]
    assert same(fused.swiglu(gate_up), expected)
    assert same(fused.swiglu_nvfp4(gate_up), nvfp4.quantize(expected))
    assert same(fused.swiglu_nvfp4(gate_up, decode_scale=torch.tensor(0.02)), nvfp4.quantize(expected, 0.02))
    assert same(gate_up, before)


def test_zero_gates_give_zero_codes():
    gate_up = torch.cat([torch.zeros(5, 32), torch.ones(5, 32)], dim=1).bfloat16()
    q = fused.swiglu_nvfp4(gate_up)
    assert not q.codes.any() and not q.block_scale.view(torch.uint8).any()


@pytest.mark.parametrize("strided", [False, True])
def test_attention_rows_of_either_layout(strided):
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(3, 17, 32, generator=generator).bfloat16()
    rows = heads.transpose(0, 1).reshape(17, 96)
    if strided:
        heads = torch.stack([heads, heads], dim=-1)[..., 0]
    assert same(fused.rows_nvfp4(heads), nvfp4.quantize(rows))
    assert same(fused.rows_nvfp4(rows), nvfp4.quantize(rows))


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_gated_residual_in_place(table):
    x, _, gate, _ = tensors(13, 64, table=table)
    y = tensors(13, 64, seed=1)[0]
    expected = x.clone()
    for start, stop, row in SEGMENTS:
        for position in range(start, stop):
            index = int(row[position - start]) if isinstance(row, torch.Tensor) else row
            g = gate[index].to(x.dtype)
            expected[position] = torch.addcmul(x[position], y[position], g)
    out = fused.gate_residual_(x, gate, y, SEGMENTS)
    assert out is x and same(x, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 13, 64)}, "x must be [rows, columns], have (2, 13, 64)"),
        ({"x": torch.zeros(13, 64, dtype=torch.int8)}, "x must be bf16, fp16 or fp32, have torch.int8"),
        ({"weight": torch.zeros(63)}, "weight must be [64], have (63,)"),
        ({"scale": torch.zeros(9, 32)}, "scale must have 64 columns, has 32"),
        ({"shift": torch.zeros(8, 64)}, "scale (9, 64) and shift (8, 64) must have one shape"),
        ({"segments": [(0, 14, 0)]}, "segment (0, 14) does not fit 13 rows"),
        ({"segments": [(5, 4, 0)]}, "segment (5, 4) does not fit 13 rows"),
        ({"segments": [(0, 13, 9)]}, "segment (0, 13) asks for row 9 of a table of 9"),
        ({"segments": [(0, 13, torch.zeros(12, dtype=torch.long))]}, "segment (0, 13) needs a LongTensor of 13 rows"),
        ({"segments": [(0, 13, torch.zeros(13))]}, "segment (0, 13) needs a LongTensor of 13 rows"),
        ({"norm": "layer"}, "norm must be one of aten, fused, have 'layer'"),
    ],
)
@pytest.mark.parametrize("name", ["norm_modulate", "norm_modulate_nvfp4"])
def test_arguments_that_do_not_fit(name, change, message):
    x, weight, scale, shift = tensors(13, 64)
    given = {"x": x, "weight": weight, "scale": scale, "shift": shift, "segments": SEGMENTS, "norm": "aten", **change}
    norm = given.pop("norm")
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(fused, name)(eps=1e-5, norm=norm, **given)
    assert str(caught.value).startswith(f"{name}: {message}")


def test_other_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="even number of columns, has 63"):
        fused.swiglu(torch.zeros(3, 63))
    with pytest.raises(ValueError, match=r"x must be \[S, H\*D\] or \[H, S, D\], have \(3,\)"):
        fused.rows_nvfp4(torch.zeros(3))
    with pytest.raises(ValueError, match=r"y must be \(3, 16\) .*like x, have \(2, 16\)"):
        fused.gate_residual_(torch.zeros(3, 16), torch.zeros(1, 16), torch.zeros(2, 16), [])


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 16, 4), (17, 80, 16), (129, 48, 33)])
def test_swiglu_with_a_low_rank_update(rows, columns, rank):
    """The update goes into gate_up in place, as beside an unfused linear, and then through SwiGLU; inputs unchanged."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 2 * columns), (rows, rank), (2 * columns, rank)
    gate_up, hidden, low_rank = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    before = [t.clone() for t in (gate_up, hidden, low_rank)]
    found = fused.swiglu_side(gate_up, hidden, low_rank, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(before, (gate_up, hidden, low_rank), strict=True))
    expected = gate_up.clone()
    expected.addmm_(hidden, low_rank.t(), alpha=0.3)
    assert torch.equal(found, fused.swiglu(expected)) and not torch.equal(found, fused.swiglu(gate_up))
    assert fused.OPS["swiglu_side"].bytes_moved(rows, columns) == 6 * rows * columns


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 16, 4), (17, 80, 16), (129, 48, 33)])
def test_a_low_rank_update_in_place(rows, columns, rank):
    """Columns of wider tensors, as split q, k and v have them: only those of y change, and by one rounded sum."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 3 * columns), (rows, 2 * rank), (columns, rank)
    wide, hidden, low_rank = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    y, part = wide[:, columns : 2 * columns], hidden[:, rank:]
    before = wide.clone()
    exact = y.double() + 0.3 * part.double() @ low_rank.double().t()
    assert fused.low_rank_add_(y, part, low_rank, 0.3, impl="reference") is y
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert torch.equal(wide[:, :columns], before[:, :columns])
    assert torch.equal(wide[:, 2 * columns :], before[:, 2 * columns :])
    y.copy_(before[:, columns : 2 * columns])
    expected = before[:, columns : 2 * columns].addmm(part, low_rank.t(), alpha=0.3)
    assert torch.equal(fused.low_rank_add_(y, part, low_rank, 0.3), expected)  # auto without a kernel: the library's
    assert fused.OPS["low_rank_add_"].bytes_moved(rows, columns) == 4 * rows * columns


@pytest.mark.parametrize("op", ["swiglu_side", "low_rank_add_"])
def test_updates_of_few_bits_round_once_in_any_order(op):
    """What certifies the kernels: reference and library agree there, in fp64 too."""
    cases = pack_module("kernels.fused._cases").CASES[op]
    for case in cases(torch.device("cpu")):
        y, hidden, low_rank, alpha = case.arguments
        exact = (y.double() + alpha * hidden.double() @ low_rank.double().t()).float().bfloat16()
        expected = exact if op == "low_rank_add_" else fused.swiglu(exact)
        assert torch.equal(fused.OPS[op].reference(*case.arguments), expected), case.name


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"hidden": torch.zeros(2, 4)}, ValueError, r"hidden must be \[3, r\] and low_rank \[32, r\]"),
        ({"low_rank": torch.zeros(31, 4)}, ValueError, r"hidden must be \[3, r\] and low_rank \[32, r\]"),
        ({"y": torch.zeros(32)}, ValueError, "y must be"),
        ({"hidden": torch.zeros(3, 4).half()}, TypeError, "must have y's dtype"),
    ],
)
def test_low_rank_add_refuses_what_does_not_fit(change, error, text):
    given = {"y": torch.zeros(3, 32), "hidden": torch.zeros(3, 4), "low_rank": torch.zeros(32, 4), **change}
    with pytest.raises(error, match=text):
        fused.low_rank_add_(*given.values(), 1.0)


def test_low_rank_add_takes_columns_of_wider_tensors_and_ranks_that_a_tensor_core_divides():
    accepts = fused.OPS["low_rank_add_"].implementations[0].accepts
    zeros = torch.zeros(3, 96, dtype=torch.bfloat16)
    assert accepts(zeros[:, 32:64], zeros[:, :16], torch.zeros(32, 16, dtype=torch.bfloat16), 1.0) is None
    assert "multiple of 16, have 20" in accepts(zeros, zeros[:, :20], zeros[:, :20], 1.0)
    assert "needs bfloat16" in accepts(zeros, zeros[:, :16].float(), zeros[:, :16], 1.0)
    assert "beside one another" in accepts(zeros[:, ::2], zeros[:, :16], zeros[:, :16], 1.0)
    assert "at least one row" in accepts(zeros[:0], zeros[:0, :16], zeros[:, :16], 1.0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"hidden": torch.zeros(2, 4)}, ValueError, r"hidden must be \[3, r\] and low_rank \[32, r\]"),
        ({"low_rank": torch.zeros(32, 5)}, ValueError, r"hidden must be \[3, r\] and low_rank \[32, r\]"),
        ({"gate_up": torch.zeros(3, 31)}, ValueError, "even number of columns"),
        ({"hidden": torch.zeros(3, 4).half()}, TypeError, "must have gate_up's dtype"),
        ({"hidden": torch.zeros(3)}, ValueError, "hidden must be"),
    ],
)
def test_swiglu_side_refuses_what_does_not_fit(change, error, text):
    given = {"gate_up": torch.zeros(3, 32), "hidden": torch.zeros(3, 4), "low_rank": torch.zeros(32, 4), **change}
    with pytest.raises(error, match=text):
        fused.swiglu_side(*given.values(), 1.0)


def test_swiglu_side_takes_ranks_that_a_tensor_core_divides():
    accepts = fused.OPS["swiglu_side"].implementations[0].accepts
    gate_up = torch.zeros(3, 32, dtype=torch.bfloat16)

    def factors(rank, dtype=torch.bfloat16):
        return torch.zeros(3, rank, dtype=dtype), torch.zeros(32, rank, dtype=dtype)

    assert accepts(gate_up, *factors(48), 1.0) is None
    assert "multiple of 16, have 20" in accepts(gate_up, *factors(20), 1.0)
    assert "contiguous bfloat16" in accepts(gate_up, *factors(16, torch.float32), 1.0)
    assert "contiguous bfloat16" in accepts(gate_up, factors(32)[0][:, ::2], factors(16)[1], 1.0)


# ---------------------------------------------------------------- the registry


def test_the_folder_is_the_registry():
    assert not fused.BROKEN
    assert set(fused.OPS) >= {
        "gate_residual_", "low_rank_add_", "norm_modulate", "norm_modulate_nvfp4", "rows_nvfp4", "swiglu",
        "swiglu_nvfp4", "swiglu_side",
    }  # fmt: skip
    for name, op in fused.OPS.items():
        assert op.summary and callable(getattr(fused, name)) and getattr(fused, name).__name__ == name


def test_bytes_are_those_of_the_floors():
    """NVFP4.md's table: 4.56 and 2.56 bytes an element for modulation, 8.56 and 4.56 for SwiGLU."""
    rows, columns = 38016, 5376
    for name, dynamic, static in (("norm_modulate_nvfp4", 4.5625, 2.5625), ("swiglu_nvfp4", 8.5625, 4.5625)):
        moved = fused.OPS[name].bytes_moved
        assert moved(rows, columns) == dynamic * rows * columns
        assert moved(rows, columns, static=True) == static * rows * columns


def implementation(name, refusal=None):
    return fused.Implementation(name, lambda value: f"{name}({value})", lambda device: refusal)


def test_choice_of_an_implementation():
    op = fused.Op("op", "", lambda value: f"reference({value})", int, (
        implementation("first", "no kernel image"), implementation("second"), implementation("third")
    ))  # fmt: skip
    cpu = torch.device("cpu")
    assert op_module.choose(op, cpu, "auto") == ("second", {"first": "no kernel image"})
    assert op_module.run(op, cpu, "auto", 1) == "second(1)"
    assert op_module.run(op, cpu, "third", 1) == "third(1)"
    assert op_module.run(op, cpu, "reference", 1) == "reference(1)"
    with pytest.raises(fused.FusedRefused, match="^op cannot run: first: no kernel image; choose"):
        op_module.run(op, cpu, "first", 1)
    with pytest.raises(fused.FusedRefused, match="fourth: not an implementation; have reference, first, second, third"):
        op_module.run(op, cpu, "fourth", 1)


def test_auto_never_runs_the_norms_formula():
    """What a kernel's norm="fused" gives is ATen's to the bit; the reference's formula is not, so auto leaves it."""
    kept = fused.OPS["norm_modulate"]
    x, weight, scale, shift = tensors(64, 5376, 1)
    given = (x, weight, 1e-5, scale, shift, [(0, 64, 0)])
    assert kept.stand_in is not None
    assert same(fused.norm_modulate(*given, norm="fused"), fused.norm_modulate(*given, norm="aten"))
    q = fused.norm_modulate_nvfp4(*given, norm="fused")
    assert same(q, fused.norm_modulate_nvfp4(*given, norm="aten"))
    formula = fused.norm_modulate(*given, norm="fused", impl="reference")
    assert float((formula != fused.norm_modulate(*given)).float().mean()) < 1e-3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(64).bfloat16().view(2, 32),
        torch.arange(65).bfloat16()[1:].view(2, 32),
        torch.arange(66).bfloat16().view(2, 33)[:, :32],
        torch.arange(128).bfloat16().view(2, 64)[:, ::2],
    ],
    ids=["packed", "odd offset", "odd stride", "every other"],
)
def test_words_of_any_memory(tensor):
    launch = pack_module("kernels.fused._launch")
    words = launch.words(tensor)
    assert words.dtype == torch.int32 and words.shape == (2, 16)
    assert torch.equal(words.contiguous().view(torch.bfloat16), tensor)


def test_auto_without_a_willing_implementation_is_the_reference():
    op = fused.Op("op", "", lambda value: value + 1, int, (implementation("only", "cc 9.0"),))
    assert op_module.run(op, torch.device("cpu"), "auto", 1) == 2
    assert op_module.choose(op, torch.device("cpu"), "auto") == ("reference", {"only": "cc 9.0"})


def test_every_permutation_of_segments_gives_the_same_rows():
    x, weight, scale, shift = tensors(13, 64)
    expected = fused.norm_modulate(x, weight, 1e-5, scale, shift, SEGMENTS)
    for order in itertools.islice(itertools.permutations(SEGMENTS), 0, 120, 17):
        assert same(fused.norm_modulate(x, weight, 1e-5, scale, shift, order), expected)
