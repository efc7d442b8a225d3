"""The Triton producers on a GPU: every byte against the stock chain and comfy-kitchen's CUDA quantiser.

Stock here is what ComfyUI runs: torch's RMSNorm, modulation row by row of the table, amax, and the CUDA quantiser. The
one intended difference: an all-zero tensor gives zeros, where the quantiser's scale bytes are 0x7E.
"""

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.gpu

K, FFN, INNER = 5376, 14336, 7168
ROWS = [1, 15, 16, 17, 127, 128, 129, 4097, 38016, 109000]
KINDS = ["random", "ties", "tiny", "huge", "wide", "zero blocks", "one-hot", "one inf", "one nan"]


@pytest.fixture(scope="module")
def kitchen():
    cuda = pytest.importorskip("comfy_kitchen.backends.cuda", reason="comfy-kitchen is not installed")
    if pack_module("kernels.fused._launch").device_refusal(torch.device("cuda", 0)) is not None:
        pytest.skip("the producers do not run on this GPU")
    return cuda.quantize_nvfp4


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def data(rows, columns, kind="random", seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    x = random(rows, columns)
    if kind == "ties":
        x = torch.randint(-8, 9, (rows, columns), generator=generator, device="cuda").float() / 4
    elif kind == "tiny":
        x = x * 1e-30
    elif kind == "huge":
        x = x * 1e15
    elif kind == "wide":
        x = x * torch.exp(random(rows, columns) * 6)
    elif kind == "zero blocks":
        keep = torch.rand(rows, columns // 16, generator=generator, device="cuda") > 0.5
        x = x * keep.float().repeat_interleave(16, 1)
    elif kind == "one-hot":
        x = x * (torch.arange(columns, device="cuda") % 37 == 0)
    elif kind in ("one inf", "one nan"):
        x[rows // 2, columns // 3] = float(kind.removeprefix("one "))
    return x.bfloat16()


def table(seed=1, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda") * 0.3

    return (1 + random(K) * 0.3).bfloat16(), random(6, K).to(dtype), random(6, K).to(dtype)


def three(rows):
    a, b = rows // 10, rows // 5
    return [(0, a, 1), (a, a, 0), (a, b, 2), (b, rows, 0)]


def modulated(x, weight, scale, shift, segments):
    h = torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-5)
    for start, stop, row in segments:
        h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return h


def poison():
    """Leave non-zero bytes where the next buffers will lie."""
    buffers = [torch.full((32 << 20,), 0xAB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del buffers


def differences(kitchen, q, h, decode_scale=None):
    """``(codes, scales, padding bytes that are not zero)`` of q against the stock quantiser on h."""
    nvfp4 = pack_module("kernels.nvfp4")
    rows, columns = h.shape
    if decode_scale is None:
        decode_scale = (torch.amax(h.abs()) / 2688).float()
        assert torch.equal(q.decode_scale, decode_scale) or bool(decode_scale.isnan() & q.decode_scale.isnan())
    codes, scales = kitchen(h, decode_scale, 0.0, rows % 16 != 0 or columns % 16 != 0)
    ours = nvfp4.unswizzle(q.block_scale.view(torch.uint8), rows, columns // 16)
    theirs = nvfp4.unswizzle(scales.view(torch.uint8), rows, columns // 16)
    padding = int((nvfp4.swizzle(ours) != q.block_scale.view(torch.uint8)).sum()) + int(q.codes[rows:].any())
    return int((q.codes[:rows] != codes[:rows]).sum()), int((ours != theirs).sum()), padding


@pytest.mark.parametrize("norm", ["aten", "fused"])
@pytest.mark.parametrize("rows", ROWS)
def test_norm_modulate(kitchen, rows, norm):
    fused = pack_module("kernels.fused")
    weight, scale, shift = table()
    static = torch.tensor(0.01, device="cuda")
    for kind in KINDS if rows in (17, 129) else ["random"]:
        x = data(rows, K, kind)
        before = x.clone()
        quiet = shift * 0 if kind in ("zero blocks", "one-hot") else shift
        given = (x, weight, 1e-5, scale, quiet, three(rows))
        h = modulated(x, weight, scale, quiet, three(rows))
        for decode in (None, static):
            poison()
            q = fused.norm_modulate_nvfp4(*given, decode_scale=decode, norm=norm, impl="triton")
            assert differences(kitchen, q, h, decode) == (0, 0, 0), (kind, decode)
        bf16 = fused.norm_modulate(*given, norm=norm, impl="triton")
        assert torch.equal(bf16.nan_to_num(1.0), h.nan_to_num(1.0))
        assert torch.equal(x.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("norm", ["aten", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_of_every_kind(kitchen, norm, dtype):
    fused = pack_module("kernels.fused")
    weight, scale, shift = table(dtype=dtype)
    x = data(500, K)
    per_token = torch.randint(0, 6, (190,), device="cuda")
    segments = [*[(i * 15, i * 15 + 15, i % 6) for i in range(20)], (300, 300, 2), (310, 500, per_token)]
    h = modulated(x, weight, scale, shift, segments)
    q = fused.norm_modulate_nvfp4(x, weight, 1e-5, scale, shift, segments, norm=norm, impl="triton")
    assert differences(kitchen, q, h) == (0, 0, 0)
    assert torch.equal(fused.norm_modulate(x, weight, 1e-5, scale, shift, segments, norm=norm, impl="triton"), h)
    y, gate = data(500, K, seed=5), shift
    expected, found = x.clone(), x.clone()
    for start, stop, row in segments:
        expected[start:stop].addcmul_(y[start:stop], gate[row].to(x.dtype))
    assert fused.gate_residual_(found, gate, y, segments, impl="triton") is found
    assert torch.equal(found, expected)


def test_norm_fused_is_atens_order():
    """0 of 2e8 elements differ; K other than H3's too."""
    fused = pack_module("kernels.fused")
    for columns in (80, 768, K, FFN):
        rows = 40_000_000 // columns
        x, weight = data(rows, columns), data(1, columns, seed=2)[0]
        nothing = torch.zeros(1, columns, device="cuda")
        found = fused.norm_modulate(x, weight, 1e-5, nothing, nothing, [(0, rows, 0)], norm="fused", impl="triton")
        expected = torch.nn.functional.rms_norm(x, (columns,), weight, 1e-5) * 1.0 + 0.0
        assert int((found != expected).sum()) == 0, columns


def test_silu_of_every_gate():
    fused = pack_module("kernels.fused")
    gate = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(64, 1024)
    found = fused.swiglu(torch.cat([gate, torch.ones_like(gate)], dim=1), impl="triton")
    expected = torch.nn.functional.silu(gate)
    same = (found.view(torch.int16) == expected.view(torch.int16)) | (found.isnan() & expected.isnan())
    assert bool(same.all())


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_and_rows(kitchen, rows):
    fused = pack_module("kernels.fused")
    static = torch.tensor(0.01, device="cuda")
    for kind in KINDS if rows in (17, 129) else ["random"]:
        gate_up = data(rows, 2 * FFN, kind)
        gate, up = gate_up.chunk(2, -1)
        h = torch.nn.functional.silu(gate).mul_(up)
        poison()
        # The product of tiny numbers is all zero: the one case where the scales are meant to differ.
        for decode in (None, static) if bool(h.any()) else (static,):
            q = fused.swiglu_nvfp4(gate_up, decode_scale=decode, impl="triton")
            assert differences(kitchen, q, h, decode) == (0, 0, 0), (kind, decode)
            del q
        assert torch.equal(fused.swiglu(gate_up, impl="triton").nan_to_num(1.0), h.nan_to_num(1.0))
        del gate_up, gate, up, h
        x = data(rows, INNER, kind)
        heads = x.view(rows, 56, 128).transpose(0, 1)
        for given in (x, heads, heads.contiguous()):
            q = fused.rows_nvfp4(given, impl="triton")
            assert differences(kitchen, q, x) == (0, 0, 0), kind


@pytest.mark.parametrize("columns", [16, 80, 96, 1040])
def test_narrow_rows(kitchen, columns):
    fused = pack_module("kernels.fused")
    x, weight = data(130, columns), data(1, columns, seed=2)[0]
    scale = torch.randn(3, columns, device="cuda")
    segments = [(0, 50, 0), (50, 130, 2)]
    h = modulated(x, weight, scale, scale, segments)
    for norm in ("aten", "fused"):
        for decode in (None, torch.tensor(0.02, device="cuda")):
            poison()
            given = (x, weight, 1e-5, scale, scale, segments)
            q = fused.norm_modulate_nvfp4(*given, decode_scale=decode, norm=norm, impl="triton")
            assert differences(kitchen, q, h, decode) == (0, 0, 0)
    assert differences(kitchen, fused.rows_nvfp4(x, impl="triton"), x) == (0, 0, 0)


def test_zeros_give_zeros():
    fused = pack_module("kernels.fused")
    poison()
    q = fused.rows_nvfp4(torch.zeros(17, 64, device="cuda", dtype=torch.bfloat16), impl="triton")
    assert not q.codes.any() and not q.block_scale.view(torch.uint8).any() and float(q.decode_scale) == 0


def test_a_graph_replays_and_nothing_is_kept():
    fused = pack_module("kernels.fused")
    weight, scale, shift = table()
    x, gate_up = data(300, K), data(300, 2 * FFN)

    def ops():
        a = fused.norm_modulate_nvfp4(x, weight, 1e-5, scale, shift, three(300), norm="fused", impl="triton")
        b = fused.swiglu_nvfp4(gate_up, impl="triton")
        return a, b

    expected = [(q.codes.clone(), q.block_scale.clone(), q.decode_scale.clone()) for q in ops()]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ops()
    assert torch.cuda.memory_allocated() == before
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops()
    for q in captured:
        q.codes.fill_(0xAB)
    graph.replay()
    for q, (codes, block_scale, decode_scale) in zip(captured, expected, strict=True):
        assert torch.equal(q.codes, codes) and torch.equal(q.decode_scale, decode_scale)
        assert torch.equal(q.block_scale.view(torch.uint8), block_scale.view(torch.uint8))
