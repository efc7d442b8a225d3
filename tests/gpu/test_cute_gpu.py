"""The CuTe DSL implementation on a GPU: every byte against the Triton one and against the stock chain.

Run it alone: ``python -m pytest tests/gpu/test_cute_gpu.py``. Needs nvidia-cutlass-dsl (the pack's extra `cute`). The
stock chain is torch's RMSNorm, the modulation row by row of the table, amax, and comfy-kitchen's CUDA quantiser; it is
left out where comfy-kitchen is not installed.
"""

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.gpu

H3 = 5376
ROWS = [1, 15, 16, 17, 127, 128, 129, 4097, 38016]
COLUMNS = [H3, 16, 512, 528, 1024]
KINDS = ["random", "ties", "tiny", "huge", "wide", "zero blocks", "one inf", "one nan", "zero"]
EPS = 1e-5


@pytest.fixture(autouse=True)
def no_gradients():
    host = pack_module("kernels.fused.norm_modulate_nvfp4__cute")
    reason = host.refuse(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    with torch.inference_mode():
        yield


def made(rows, columns, kind="random", dtype=torch.float32, seed=0):
    """``x, weight, scale, shift`` on the GPU."""
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
        x = x * (torch.rand(rows, columns // 16, generator=generator, device="cuda") > 0.5).repeat_interleave(16, 1)
    elif kind in ("one inf", "one nan"):
        x[rows // 2, columns // 3] = float(kind.removeprefix("one "))
    elif kind == "zero":
        x = x * 0
    weight = (1 + random(columns) * 0.1).bfloat16()
    scale, shift = (random(6, columns) * 0.3).to(dtype), (random(6, columns) * 0.3).to(dtype)
    if kind in ("zero blocks", "zero"):
        shift = shift * 0
    return x.bfloat16(), weight, scale, shift


def three(rows):
    a, b = rows // 10, rows // 5
    return [(0, a, 1), (a, a, 0), (a, b, 2), (b, rows, 0)]


def poison():
    """Leave non-zero bytes where the next buffers will lie."""
    buffers = [torch.full((32 << 20,), 0xAB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del buffers


def unequal(found, expected):
    """``(codes, scales, whether the decode scale differs)``, paddings included."""
    scales = found.block_scale.view(torch.uint8) != expected.block_scale.view(torch.uint8)
    decode = found.decode_scale != expected.decode_scale
    decode &= ~(found.decode_scale.isnan() & expected.decode_scale.isnan())
    return int((found.codes != expected.codes).sum()), int(scales.sum()), bool(decode)


def check(x, weight, scale, shift, segments, decode):
    op = pack_module("kernels.fused").norm_modulate_nvfp4
    results = []
    for impl in ("triton", "cute"):
        poison()
        given = {"decode_scale": decode, "norm": "fused", "impl": impl}
        results.append(op(x, weight, EPS, scale, shift, segments, **given))
    assert unequal(results[1], results[0]) == (0, 0, False)
    rows = x.shape[0]
    assert not results[1].codes[rows:].any(), "padding rows"
    return results[1]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_triton_s_bytes(rows, columns):
    for kind in KINDS if rows in (17, 129) else ["random"]:
        for dtype in (torch.float32, torch.bfloat16):
            given = made(rows, columns, kind, dtype)
            for decode in (None, torch.tensor(0.01, device="cuda")):
                check(*given, three(rows), decode)


@pytest.mark.parametrize("g", [0.0, 1e-38, 1e-33, 1e-6, 300.0, 1e31, 1e36, 3e38, float("inf"), float("nan")])
def test_any_static_scale(g):
    for kind in ("random", "wide", "one inf", "one nan", "zero"):
        check(*made(129, 528, kind), three(129), torch.tensor(g, device="cuda"))


@pytest.mark.parametrize("factor", [1.0, 1e30, 3e36])
def test_huge_modulation(factor):
    x, weight, scale, shift = made(33, H3, "wide")
    for decode in (None, torch.tensor(1e34, device="cuda")):
        check(x, weight, scale * factor, shift, three(33), decode)


def test_segments_of_every_kind():
    x, weight, scale, shift = made(500, H3)
    per_token = torch.randint(0, 6, (190,), device="cuda")
    segments = [*[(i * 15, i * 15 + 15, i % 6) for i in range(20)], (300, 300, 2), (310, 500, per_token)]
    for decode in (None, torch.tensor(0.01, device="cuda")):
        check(x, weight, scale, shift, segments, decode)


def test_rows_that_are_a_view():
    """Rows apart, off the 16 bytes that a load needs, and one row of a wider tensor."""
    x, weight, scale, shift = made(40, 1024)
    wide = torch.cat([x, x, x[:, :8]], dim=1)
    for view in (wide[:, :1024], wide[:, 8:1032], wide[:, 3:1027], wide[3:4, 1:1025], wide[::2, 1024:2048]):
        before = view.clone()
        check(view, weight, scale, shift, three(view.shape[0]), None)
        assert torch.equal(view, before)


@pytest.mark.parametrize("kind", ["random", "ties", "wide", "zero blocks"])
def test_stock_chain(kind):
    kitchen = pytest.importorskip("comfy_kitchen.backends.cuda", reason="comfy-kitchen is not installed")
    nvfp4 = pack_module("kernels.nvfp4")
    for rows in (17, 4097):
        x, weight, scale, shift = made(rows, H3, kind)
        h = torch.nn.functional.rms_norm(x, (H3,), weight, EPS)
        for start, stop, row in three(rows):
            h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
        for decode in ((torch.amax(h.abs()) / 2688).float(), torch.tensor(0.01, device="cuda")):
            codes, scales = kitchen.quantize_nvfp4(h, decode, 0.0, rows % 16 != 0)
            found = check(x, weight, scale, shift, three(rows), decode)
            assert int((found.codes[:rows] != codes[:rows]).sum()) == 0
            ours, theirs = (
                nvfp4.unswizzle(t.view(torch.uint8), rows, H3 // 16) for t in (found.block_scale, scales)
            )  # fmt: skip
            assert int((ours != theirs).sum()) == 0


def test_a_graph_replays_and_nothing_is_kept():
    op = pack_module("kernels.fused").norm_modulate_nvfp4
    x, weight, scale, shift = made(300, H3)
    static = torch.tensor(0.01, device="cuda")

    def both():
        given = (x, weight, EPS, scale, shift, three(300))
        return [op(*given, decode_scale=decode, norm="fused", impl="cute") for decode in (None, static)]

    expected = both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    both()
    assert torch.cuda.memory_allocated() == before
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for q in captured:
        q.codes.fill_(0xAB)
    graph.replay()
    for q, e in zip(captured, expected, strict=True):
        assert unequal(q, e) == (0, 0, False)


def test_it_is_certified():
    certify, fused = pack_module("kernels.certify"), pack_module("kernels.fused")
    assert certify.refusal(fused.OPS["norm_modulate_nvfp4"], "cute", "cuda") is None
