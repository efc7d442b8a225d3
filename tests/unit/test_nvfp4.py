"""kernels/nvfp4.py against comfy-kitchen's eager backend, and against arithmetic done by hand where that gives NaN."""

import itertools

import pytest
import torch
from conftest import pack_module
from hypothesis import example, given, settings
from hypothesis import strategies as st

nvfp4 = pack_module("kernels.nvfp4")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROWS = st.one_of(st.sampled_from([1, 5, 15, 16, 17, 127, 128, 129, 130]), st.integers(1, 300))
COLS = st.one_of(st.sampled_from([16, 80, 96]), st.integers(1, 130))
KINDS = ("normal", "lognormal rows", "tiny", "huge", "zero blocks", "one hot", "ties", "mixed signs of zero")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(scope="module")
def kitchen():
    """comfy-kitchen's eager NVFP4 functions: the byte reference on the CPU."""
    return pytest.importorskip(
        "comfy_kitchen.backends.eager.quantization", reason="comfy-kitchen, the byte reference, is not installed"
    )


def matrix(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A finite matrix of one of the KINDS."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    if kind == "lognormal rows":
        x *= torch.exp(2 * torch.randn(rows, 1, generator=g))
    elif kind == "tiny":
        # above the fp16 subnormals: there ComfyUI's own scale underflows, see test_underflowing_scale
        x = x * 0.1 + 0.5 if dtype == torch.float16 else x * 1e-30
    elif kind == "huge":
        x = x.clamp(-3, 3) * (2e4 if dtype == torch.float16 else 1e38)
    elif kind == "zero blocks":
        x[:, : 16 * (cols // 32)] = 0
        x[rows // 2] = 0
    elif kind == "one hot":
        x = torch.zeros(rows, cols)
        x[rows // 2, cols // 2] = -3.0
    elif kind == "ties":
        # amax 6 in every block and multiples of a quarter: with scale 1 every odd one lies between two codes
        x = torch.randint(-24, 25, (rows, cols), generator=g) / 4.0
        x[:, ::16] = 6.0
    elif kind == "mixed signs of zero":
        x = torch.where(x > 0.5, x, torch.copysign(torch.zeros(()), x))
    return x.to(dtype)


def comfy_scale(x: torch.Tensor) -> torch.Tensor:
    """The decode scale as ComfyUI makes it."""
    return (torch.amax(x.abs()) / (448 * 6)).to(torch.float32)


def raw(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def linear_scales(q) -> torch.Tensor:
    """The logical scales as bytes, read by the byte formula of the format instead of by unswizzle."""
    rows, blocks = q.shape[0], -(-q.shape[1] // 16)
    flat = raw(q.block_scale).flatten()
    out = torch.empty(rows, blocks, dtype=torch.uint8)
    for r, c in itertools.product(range(rows), range(blocks)):
        out[r, c] = flat[byte_of(r, c, blocks)]
    return out


def byte_of(r: int, c: int, blocks: int) -> int:
    tile = (r // 128) * -(-blocks // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@settings(max_examples=200, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), rows=ROWS, cols=COLS, dtype=DTYPES, seed=st.integers(0, 2**16))
@example(kind="normal", rows=130, cols=80, dtype=torch.bfloat16, seed=0)
@example(kind="ties", rows=17, cols=96, dtype=torch.float32, seed=0)
def test_equals_kitchen_bytes(kitchen, kind, rows, cols, dtype, seed):
    x = matrix(kind, rows, cols, dtype, seed)
    scale = comfy_scale(x)
    if scale == 0:
        return  # "mixed signs of zero" can be all zero, which the eager backend turns into NaN
    codes, scales = kitchen.quantize_nvfp4(x, scale, pad_16x=True)
    q = nvfp4.quantize(x)
    assert torch.equal(q.decode_scale, scale)
    assert torch.equal(q.codes, codes)
    assert torch.equal(raw(q.block_scale), raw(scales))
    assert torch.equal(nvfp4.dequantize(q), kitchen.dequantize_nvfp4(codes, scale, scales, torch.float32)[:rows, :cols])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS), rows=ROWS, cols=COLS, dtype=DTYPES, exponent=st.floats(-12, 4), seed=st.integers(0, 99)
)
def test_equals_kitchen_with_a_static_scale(kitchen, kind, rows, cols, dtype, exponent, seed):
    """Scales far too small saturate, far too large lose blocks: both as in the reference."""
    x = matrix(kind, rows, cols, dtype, seed)
    scale = torch.tensor(10.0**exponent)
    codes, scales = kitchen.quantize_nvfp4(x, scale, pad_16x=True)
    for given_scale in (scale, scale.reshape(1), float(scale)):
        q = nvfp4.quantize(x, given_scale)
        assert torch.equal(q.codes, codes)
        assert torch.equal(raw(q.block_scale), raw(scales))
        assert q.decode_scale.shape == ()
        assert q.decode_scale == scale


def test_large_matrix_in_pieces_equals_kitchen(kitchen, monkeypatch):
    """Rows are worked through in pieces; where they are cut must not show."""
    x = matrix("lognormal rows", 257, 96, torch.bfloat16, 1)
    codes, scales = kitchen.quantize_nvfp4(x, comfy_scale(x), pad_16x=True)
    for elements in (1, 96 * 5, 96 * 128):
        monkeypatch.setattr(nvfp4, "_PIECE_ELEMENTS", elements)
        q = nvfp4.quantize(x)
        assert torch.equal(q.codes, codes)
        assert torch.equal(raw(q.block_scale), raw(scales))
        assert nvfp4.dequantize(q).shape == (257, 96)


def test_case_2_six_and_minus_three():
    """[6, -3] is 0x7d in ComfyUI's order (0xd7 in ModelOpt's), and the golden bytes of a whole row."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6.0, -3.0])
    q = nvfp4.quantize(x, 1.0)
    assert q.codes[0, 0] == 0x7D
    assert raw(q.block_scale)[0, 0] == 0x38, "e4m3 of 1.0"
    x[0] = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    assert bytes(nvfp4.quantize(x, 1.0).codes[0].tolist()).hex() == "1234567" + "89abcdef0"
    assert torch.equal(nvfp4.dequantize(nvfp4.quantize(x, 1.0)), x)


@pytest.mark.parametrize("shape", [(m, k) for m in (1, 5, 17, 127, 129, 130) for k in (16, 80, 96)])
def test_case_3_shapes_and_padding(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = nvfp4.quantize(x)
    assert q.shape == shape
    assert nvfp4.dequantize(q).shape == shape
    codes4 = nvfp4.unpack(q.codes)
    assert not codes4[shape[0] :].any()
    assert not codes4[:, shape[1] :].any()
    blocks = -(-shape[1] // 16)
    whole = nvfp4.unswizzle(q.block_scale, q.block_scale.shape[0], q.block_scale.shape[1]).view(torch.uint8).clone()
    assert whole[: shape[0], :blocks].all()
    whole[: shape[0], :blocks] = 0
    assert not whole.any()
    # 16 elements of a row share a scale whose own rounding is at most 1/16: no error above half a step of 2*6/6
    assert (nvfp4.dequantize(q) - x).abs().max() <= x.abs().max() * (1 / 6 + 1 / 16)


def test_case_3_exact_padded_shapes():
    q = nvfp4.quantize(torch.ones(130, 80))
    assert q.codes.shape == (144, 40)
    assert q.block_scale.shape == (256, 8)
    assert (q.codes.dtype, q.block_scale.dtype, q.decode_scale.dtype) == (
        torch.uint8, torch.float8_e4m3fn, torch.float32,
    )  # fmt: skip


def test_poisoned_padding_does_not_reach_the_result():
    x = torch.randn(130, 72, generator=torch.Generator().manual_seed(3))
    q = nvfp4.quantize(x)
    want = nvfp4.dequantize(q)
    codes4 = nvfp4.unpack(q.codes)
    codes4[130:] = 7
    codes4[:, 72:] = 7
    scales = torch.full((256, 8), 0x7F, dtype=torch.uint8)
    scales[:130, :5] = linear_scales(q)
    poisoned = nvfp4.NVFP4(nvfp4.pack(codes4), nvfp4.swizzle(scales).view(torch.float8_e4m3fn), q.decode_scale, q.shape)
    assert torch.equal(nvfp4.dequantize(poisoned), want)


def test_strided_input_gives_the_same_bytes():
    """What lies between and behind the elements of a view is no part of the matrix."""
    buffer = torch.full((40, 200), float("nan"))
    x = torch.randn(33, 50, generator=torch.Generator().manual_seed(4))
    buffer[:33, :100:2] = x
    a, b = nvfp4.quantize(buffer[:33, :100:2]), nvfp4.quantize(x)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(raw(a.block_scale), raw(b.block_scale))
    for cols in (50, 48):
        c = nvfp4.quantize(x[:, :cols].t().contiguous().t())
        assert torch.equal(c.codes, nvfp4.quantize(x[:, :cols].contiguous()).codes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=ROWS, blocks=st.integers(1, 9))
def test_swizzle_follows_the_byte_formula(rows, blocks):
    scales = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    got = nvfp4.swizzle(scales)
    want = torch.zeros(nvfp4.roundup(rows, 128) * nvfp4.roundup(blocks, 4), dtype=torch.uint8)
    for r, c in itertools.product(range(rows), range(blocks)):
        want[byte_of(r, c, blocks)] = scales[r, c]
    assert got.shape == (nvfp4.roundup(rows, 128), nvfp4.roundup(blocks, 4))
    assert torch.equal(got.flatten(), want)
    assert torch.equal(nvfp4.unswizzle(got, rows, blocks), scales)


def test_pack_and_unpack_every_byte():
    every = torch.arange(256, dtype=torch.uint8)
    codes4 = nvfp4.unpack(every)
    assert codes4[2 * 0x7D : 2 * 0x7D + 2].tolist() == [7, 13]
    assert torch.equal(nvfp4.pack(codes4), every)


def test_codes_round_to_nearest_even_at_every_midpoint():
    """Every midpoint, and the fp32 numbers next to it, in both signs."""
    lower = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    x = torch.tensor([0.0, *lower, *E2M1[1:]])
    x = torch.cat((x, x.nextafter(torch.tensor(9.0)).clamp(max=6.0), x.nextafter(torch.tensor(0.0))))
    x = torch.cat((x, -x, torch.tensor([6.0])))
    x = torch.nn.functional.pad(x.repeat_interleave(15).view(-1, 15), (0, 1), value=6.0)
    got = nvfp4.unpack(nvfp4.quantize(x, 1.0).codes)[: len(x), 0]
    for value, code in zip(x[:, 0].tolist(), got.tolist(), strict=True):
        distance = [abs(abs(value) - magnitude) for magnitude in E2M1]
        nearest = [i for i, d in enumerate(distance) if d == min(distance)]
        want = nearest[0] if len(nearest) == 1 else next(i for i in nearest if i % 2 == 0)
        assert code & 7 == want, value
        assert bool(code & 8) == (str(value)[0] == "-"), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_case_1_all_zero(dtype):
    q = nvfp4.quantize(torch.zeros(16, 32, dtype=dtype))
    assert q.decode_scale == 0
    assert not q.codes.any()
    assert not raw(q.block_scale).any()
    assert torch.equal(nvfp4.dequantize(q), torch.zeros(16, 32))


def test_given_scale_of_zero_gives_zeros():
    q = nvfp4.quantize(torch.ones(3, 32), torch.zeros(()))
    assert not q.codes.any()
    assert not raw(q.block_scale).any()
    assert not nvfp4.dequantize(q).any()


def test_zero_rows_and_blocks_stay_zero_beside_values():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    x[7] = 0
    x[9, 16:32] = 0
    q = nvfp4.quantize(x)
    back = nvfp4.dequantize(q)
    assert not back[7].any()
    assert not back[9, 16:32].any()
    assert (raw(q.block_scale) < 0x7F).all()


def test_underflowing_scale_is_taken_in_fp32():
    """amax/2688 underflows in fp16 for 5e-5, where the eager backend gives NaN: the values survive here."""
    x = torch.full((4, 32), 5e-5, dtype=torch.float16)
    assert comfy_scale(x) == 0
    q = nvfp4.quantize(x)
    assert q.decode_scale == x[0, 0].float() / 2688
    assert torch.allclose(nvfp4.dequantize(q), x.float(), rtol=1e-6)
    q = nvfp4.quantize(torch.full((4, 32), 1e-45))
    assert q.decode_scale == 0
    assert not q.codes.any()
    assert not raw(q.block_scale).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_inf_and_nan_stay_in_their_place(dtype, static):
    clean = torch.randn(20, 64, generator=torch.Generator().manual_seed(6)).to(dtype)
    clean[0, 0] = 5.0  # the largest magnitude, elsewhere
    clean[11, 16] = 5.0  # and in the Inf's block, so that its scale is the same
    x = clean.clone()
    x[11, 20], x[11, 21], x[3, 40] = float("inf"), float("-inf"), float("nan")
    clean[11, 20], clean[11, 21], clean[3, 40] = 5.0, -5.0, 0.0
    scale = float(comfy_scale(clean)) if static else None
    if static:
        # the limit is 2688 * decode_scale then, close to amax
        clean[11, 20] = clean[11, 21] = 0
    a, b = nvfp4.quantize(x, scale), nvfp4.quantize(clean, scale)
    same = nvfp4.unpack(a.codes) == nvfp4.unpack(b.codes)
    if static:
        assert nvfp4.dequantize(a)[11, 20:22].tolist() == [nvfp4.dequantize(b)[0, 0], -nvfp4.dequantize(b)[0, 0]]
        same[11, 20:22] = True
        same[11, 16:32] = True  # their own block may take the limit's scale
    assert same.all()
    assert (raw(a.block_scale) < 0x7F).all()
    assert nvfp4.dequantize(a).isfinite().all()
    assert a.decode_scale == b.decode_scale
    assert nvfp4.count_nonfinite(x) == (2, 1)
    assert nvfp4.count_nonfinite(clean) == (0, 0)


def test_nothing_but_nonfinite_values_gives_zeros():
    q = nvfp4.quantize(torch.tensor([[float("inf"), float("nan"), float("-inf")]]))
    assert q.decode_scale == 0
    assert not nvfp4.dequantize(q).any()
    assert not raw(q.block_scale).any()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)])
def test_empty(shape):
    q = nvfp4.quantize(torch.zeros(shape))
    assert q.codes.shape == nvfp4.code_shape(shape)
    assert q.block_scale.shape == nvfp4.scale_shape(shape)
    assert nvfp4.dequantize(q).shape == shape


def test_nothing_is_read_back_from_the_device():
    """A meta tensor has no data, so any read on the host (a wait for the GPU) would raise."""
    x = torch.empty(130, 80, dtype=torch.bfloat16, device="meta")
    for scale in (None, 0.5, torch.empty((), device="meta")):
        q = nvfp4.quantize(x, scale)
        assert q.codes.shape == (144, 40)
        assert nvfp4.dequantize(q, torch.bfloat16).shape == (130, 80)


def test_input_is_left_alone():
    x = torch.tensor([[float("inf"), float("nan"), 1.0]])
    before = x.clone()
    nvfp4.quantize(x)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(
    ("x", "scale", "words"),
    [
        (torch.zeros(16), None, "matrix"),
        (torch.zeros(2, 3, 16), None, "matrix"),
        (torch.zeros(2, 16, dtype=torch.float64), None, "dtype"),
        (torch.zeros(2, 16, dtype=torch.int32), None, "dtype"),
        (torch.zeros(2, 16), -1.0, "not negative"),
        (torch.zeros(2, 16), float("nan"), "finite"),
        (torch.zeros(2, 16), 1e39, "finite"),
        (torch.zeros(2, 16), torch.tensor(float("inf")), "finite"),
        (torch.zeros(2, 16), torch.ones(2), "one floating"),
        (torch.zeros(2, 16), torch.ones(1, dtype=torch.int64), "one floating"),
    ],
)
def test_bad_arguments_say_what_is_wanted(x, scale, words):
    with pytest.raises(ValueError, match=words):
        nvfp4.quantize(x, scale)


def test_bad_quantised_tensors_are_refused():
    q = nvfp4.quantize(torch.ones(128, 64))
    with pytest.raises(ValueError, match="codes"):
        nvfp4.dequantize(nvfp4.NVFP4(q.codes, q.block_scale, q.decode_scale, (128, 80)))
    with pytest.raises(ValueError, match="view the bytes"):
        nvfp4.dequantize(nvfp4.NVFP4(q.codes, raw(q.block_scale), q.decode_scale, q.shape))
    with pytest.raises(ValueError, match="stored as"):
        nvfp4.unswizzle(torch.zeros(130, 8), 130, 8)
    with pytest.raises(ValueError, match="scales"):
        nvfp4.swizzle(torch.zeros(8))
    with pytest.raises(ValueError, match="even"):
        nvfp4.pack(torch.zeros(1, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        nvfp4.unpack(torch.zeros(1, 3))
