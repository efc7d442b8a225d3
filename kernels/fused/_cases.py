"""What the ops of this folder are certified with: small inputs, made on the host from fixed seeds.

Kinds of values, each in a tensor of its own because the dynamic scale is one per tensor:

    random      normal, standard deviation 8
    ties        multiples of 1/4 with a 6 in every block: with a power of two as the scale, codes tie exactly
    wide        normal times powers of two from 2**-20 to 2**20: scales saturate and underflow
    blocks      random, two blocks in three zero, one row zero
    one_hot     one element of a row is not zero
    zero        all zero

H3's width (5376) and one that fills neither a tile of scales nor one of a kernel (80); 1, 17 and 130 rows. Segments are
ints, an empty one, one counted from the table's end, a LongTensor, and rows outside every segment.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..parity import Case
from .norm_modulate import reference as norm_modulate_reference
from .rows_nvfp4 import rows as as_rows
from .swiglu import reference as swiglu_reference

H3_COLUMNS, SELFTEST_COLUMNS, RAGGED_COLUMNS, HEAD_DIM = 5376, 256, 80, 128
TABLE_ROWS = 5
EPS = 1e-5
KINDS = (
    (1, H3_COLUMNS, "random"),
    (17, H3_COLUMNS, "ties"),
    (130, H3_COLUMNS, "wide"),
    (17, H3_COLUMNS, "blocks"),
    (17, H3_COLUMNS, "one_hot"),
    (130, RAGGED_COLUMNS, "random"),
    (17, RAGGED_COLUMNS, "zero"),
)
# Rows that the two norms are compared on: a sum taken in another order moves about one value in a million.
NORM_ROWS, NORM_TURNS = 256, 8


def _values(kind: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 ``[rows, columns]`` of a kind."""
    x = torch.randn(rows, columns, generator=generator) * 8
    if kind == "ties":
        x = torch.randint(-23, 24, (rows, columns), generator=generator) / 4
        x[:, ::16] = 6.0
    elif kind == "wide":
        x = x * 2.0 ** torch.randint(-20, 21, (rows, columns), generator=generator)
    elif kind == "blocks":
        x = x * (torch.arange(columns) // 16 % 3 == 0)
        x[rows // 2] = 0.0
    elif kind == "one_hot":
        x = torch.zeros(rows, columns)
        x[torch.arange(rows), torch.randint(columns, (rows,), generator=generator)] = 3.0
    elif kind == "zero":
        x = torch.zeros(rows, columns)
    return x.bfloat16()


def _table(kind: str, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """``[TABLE_ROWS, columns]`` modulation, with few bits where values shall tie."""
    table = torch.randn(TABLE_ROWS, columns, generator=generator)
    return ((table * 8).round() / 8 if kind == "ties" else table).to(dtype)


def _segments(rows: int, device: torch.device) -> list[tuple]:
    quarter, half, stop = rows // 4, rows // 2, rows - rows // 8
    per_token = (torch.arange(stop - half) * 3 % TABLE_ROWS).to(device)
    return [(0, quarter, 1), (quarter, quarter, 0), (quarter, half, -1), (half, stop, per_token)]


def _scales(kind: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Dynamic, and a static scale that lets some blocks saturate."""
    yield "dynamic scale", None
    yield "static scale", torch.tensor(2.0**-6 if kind == "ties" else 0.0123, device=device)


def _norm_arguments(device, dtypes=(torch.float32, torch.bfloat16)) -> Iterator[tuple[str, str, tuple]]:
    generator = torch.Generator().manual_seed(0)
    for number, (rows, columns, kind) in enumerate(KINDS):
        dtype = dtypes[number % len(dtypes)]
        x = _values(kind, rows, columns, generator)
        weight = (1 + 0.1 * torch.randn(columns, generator=generator)).bfloat16()
        scale, shift = (_table(kind, columns, dtype, generator) for _ in range(2))
        if kind in ("blocks", "one_hot", "zero"):
            shift = torch.zeros_like(shift)  # zeros stay zeros
        segments = _segments(rows, device)
        if kind == "blocks":
            segments = [(at, at + 1, at % TABLE_ROWS) for at in range(rows)]  # more than one launch marks
        on_device = (t.to(device) for t in (x, weight, scale, shift))
        x, weight, scale, shift = on_device
        yield f"{kind} {rows}x{columns}, {dtype} table", kind, (x, weight, EPS, scale, shift, segments)


def norm_modulate(device: torch.device) -> Iterator[Case]:
    for name, _, arguments in _norm_arguments(device):
        yield Case(name, (*arguments, "aten"))


def norm_modulate_nvfp4(device: torch.device, norm: str = "aten") -> Iterator[Case]:
    """With ``norm="fused"``: for implementations that have no other norm. ATen's is what they are held against."""
    for name, kind, arguments in _norm_arguments(device):
        for text, decode_scale in _scales(kind, device):
            yield Case(f"{name}, {text}", (*arguments, decode_scale, norm), _norm_chain, decode_scale)


def _norm_chain(x, weight, eps, scale, shift, segments, decode_scale, norm):
    return norm_modulate_reference(x, weight, eps, scale, shift, segments, "aten")


def rows_nvfp4(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for number, (tokens, columns, kind) in enumerate(KINDS):
        x = _values(kind, tokens, columns, generator).to(device)
        if number % 2 and columns % HEAD_DIM == 0:
            x = x.view(tokens, -1, HEAD_DIM).transpose(0, 1)  # heads first, as [H, S, D]
            x = x.contiguous() if number % 4 == 1 else x
        for text, decode_scale in _scales(kind, device):
            name = f"{kind} {tokens}x{columns} as {x.dim()} axes, {text}"
            yield Case(name, (x, decode_scale), _rows_chain, decode_scale)


def _rows_chain(x, decode_scale):
    return as_rows(x)


def _gate_up(device) -> Iterator[tuple[str, str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for tokens, columns, kind in KINDS:
        gate = torch.randn(tokens, columns, generator=generator).bfloat16()
        up = _values(kind, tokens, columns, generator)
        yield f"{kind} {tokens}x{columns}", kind, torch.cat([gate, up], dim=1).to(device)


def _every_gate() -> torch.Tensor:
    """All 65,536 bf16 numbers, ``[256, 256]``."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def swiglu(device: torch.device) -> Iterator[Case]:
    for name, _, gate_up in _gate_up(device):
        yield Case(name, (gate_up,))
    for up in (1.0, 1.4140625):  # silu itself, and the second rounding
        gate = _every_gate()
        yield Case(f"every bf16 gate times {up}", (torch.cat([gate, torch.full_like(gate, up)], 1).to(device),))


def swiglu_nvfp4(device: torch.device) -> Iterator[Case]:
    for name, kind, gate_up in _gate_up(device):
        for text, decode_scale in _scales(kind, device):
            yield Case(f"{name}, {text}", (gate_up, decode_scale), _swiglu_chain, decode_scale)
    gate = torch.nan_to_num(_every_gate(), nan=0.0, posinf=0.0, neginf=0.0)
    gate_up = torch.cat([gate, torch.ones_like(gate)], 1).to(device)
    decode_scale = torch.tensor(0.0123, device=device)
    yield Case("every finite bf16 gate", (gate_up, decode_scale), _swiglu_chain, decode_scale)


def _swiglu_chain(gate_up, decode_scale):
    return swiglu_reference(gate_up)


def _updates(device: torch.device, seed: int) -> Iterator[tuple[str, tuple]]:
    """``(name, (y, hidden, low_rank, alpha))``: factors of few bits, so that no order of the additions shows in fp32.

    y has an even number of columns, gate and up for SwiGLU.
    """
    generator = torch.Generator().manual_seed(seed)

    def few_bits(rows: int, columns: int, least: float, bound: int) -> torch.Tensor:
        return (torch.randint(-bound, bound + 1, (rows, columns), generator=generator) * least).bfloat16()

    for tokens, columns, rank, alpha in ((1, 512, 16, 0.5), (17, 160, 32, 1.0), (130, 2080, 144, -0.25)):
        y = torch.randn(tokens, columns, generator=generator).bfloat16()
        hidden, low_rank = few_bits(tokens, rank, 0.25, 8), few_bits(columns, rank, 0.125, 8)
        name = f"rank {rank}, {tokens}x{columns}, alpha {alpha}"
        yield name, (y.to(device), hidden.to(device), low_rank.to(device), alpha)


def swiglu_side(device: torch.device) -> Iterator[Case]:
    for name, arguments in _updates(device, 5):
        yield Case(name, arguments)


def low_rank_add_(device: torch.device) -> Iterator[Case]:
    for name, arguments in _updates(device, 6):
        yield Case(name, arguments, written=0)
    y, hidden, low_rank, alpha = next(_updates(device, 7))[1]
    wide = torch.cat([y, y, y], dim=1)
    yield Case(
        "columns of wider tensors", (wide[:, 512:1024], hidden.repeat(1, 3)[:, 16:32], low_rank, alpha), written=0
    )


def gate_residual_(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)
    for number, (tokens, columns, kind) in enumerate(KINDS):
        x, y = (_values(kind, tokens, columns, generator).to(device) for _ in range(2))
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        gate = _table(kind, columns, dtype, generator).to(device)
        yield Case(f"{kind} {tokens}x{columns}, {dtype} table", (x, gate, y, _segments(tokens, device)), written=0)


CASES = {
    function.__name__: function
    for function in (
        norm_modulate,
        norm_modulate_nvfp4,
        rows_nvfp4,
        swiglu,
        swiglu_nvfp4,
        swiglu_side,
        low_rank_add_,
        gate_residual_,
    )  # fmt: skip
}


def norms(device: torch.device) -> Iterator[tuple[str, str, tuple]]:
    """``(op, name, arguments without the norm)`` on which ``norm="fused"`` is held against ``norm="aten"``.

    H3's width and the self-test model's get many rows: turning a row gives its sum of squares another order. The rest
    are the inputs of the ops' own cases.
    """
    generator = torch.Generator().manual_seed(4)
    segments = _segments(NORM_ROWS, device)
    for columns in (H3_COLUMNS, SELFTEST_COLUMNS):
        base = _values("random", NORM_ROWS, columns, generator).to(device)
        weight = (1 + 0.1 * torch.randn(columns, generator=generator)).bfloat16().to(device)
        scale, shift = (_table("random", columns, torch.float32, generator).to(device) for _ in range(2))
        for turn in range(NORM_TURNS):
            x = base.roll(turn * 37, dims=1)
            yield "norm_modulate", f"turn {turn} of {NORM_ROWS}x{columns}", (x, weight, EPS, scale, shift, segments)
    for name, kind, arguments in _norm_arguments(device):
        yield "norm_modulate", name, arguments
        for text, decode_scale in _scales(kind, device):
            yield "norm_modulate_nvfp4", f"{name}, {text}", (*arguments, decode_scale)
