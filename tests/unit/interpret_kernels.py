"""Run by test_kernels_interpreted.py in a process of its own with TRITON_INTERPRET=1; prints one JSON line.

Triton's interpreter runs the kernels' Python on NumPy arrays: indexing, masks, segments, padding and both roundings are
really executed, with plain operations in place of inline assembly. Not executed there: the assembly itself.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conftest import pack_module

SEGMENTS = [(0, 2, 1), (2, 3, 4), (3, 3, 0), (3, 7, 2), (7, 13, torch.tensor([0, 3, 6, 0, 3, 6]))]


def compare(ours, reference) -> dict:
    """Differences between two quantised matrices; `far` counts codes that differ by more than one step."""
    nvfp4 = pack_module("kernels.nvfp4")
    a, b = nvfp4.unpack(ours.codes).int(), nvfp4.unpack(reference.codes).int()
    rows, columns = reference.shape
    padding = ours.codes[rows:].any() or nvfp4.swizzle(
        nvfp4.unswizzle(ours.block_scale.view(torch.uint8), rows, -(-columns // 16))
    ).ne(ours.block_scale.view(torch.uint8)).any()
    return {
        "codes": int((a != b).sum()),
        "far": int(((a - b).abs() > 1).sum()),
        "scales": int((ours.block_scale.view(torch.uint8) != reference.block_scale.view(torch.uint8)).sum()),
        "decode": float((ours.decode_scale - reference.decode_scale).abs()),
        "padding": bool(padding),
        "elements": rows * columns,
    }


def main() -> None:
    fused = pack_module("kernels.fused")
    modulate = pack_module("kernels.fused._modulate_triton")
    swiglu = pack_module("kernels.fused._swiglu_triton")
    gate = pack_module("kernels.fused._gate_triton")
    assert not modulate.ASM
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    nvfp4, bf16 = {}, {}
    static = torch.tensor(0.01)
    for rows, columns in ((1, 16), (13, 64), (17, 80), (131, 96)):
        x, weight = (random(rows, columns) * 4).bfloat16(), (1 + 0.1 * random(columns)).bfloat16()
        x[rows // 2, :16] = 0
        scale, shift = random(9, columns), random(9, columns)
        segments = SEGMENTS if rows >= 13 else [(0, 1, 3)]
        segments = [*segments, *[(at, at + 1, at % 9) for at in range(13, min(rows, 30))]]
        for norm in ("aten", "fused"):
            given = (x, weight, 1e-5, scale, shift, segments)
            for word, decode in (("dynamic", None), ("static", static)):
                expected = fused.norm_modulate_nvfp4(*given, decode_scale=decode, norm=norm, impl="reference")
                found = modulate.nvfp4_rows(*given, decode, norm)
                nvfp4[f"modulate {rows}x{columns} {norm} {word}"] = compare(found, expected)
            expected = fused.norm_modulate(*given, norm=norm, impl="reference")
            bf16[f"modulate {rows}x{columns} {norm}"] = int((modulate.bf16_rows(*given, norm) != expected).sum())
        gate_up = random(rows, 2 * columns).bfloat16()
        for word, decode in (("dynamic", None), ("static", static)):
            expected = fused.swiglu_nvfp4(gate_up, decode_scale=decode, impl="reference")
            nvfp4[f"swiglu {rows}x{columns} {word}"] = compare(swiglu.swiglu_nvfp4(gate_up, decode), expected)
        expected = fused.swiglu(gate_up, impl="reference")
        bf16[f"swiglu {rows}x{columns}"] = int((swiglu.swiglu(gate_up) != expected).sum())
        heads = random(2, rows, columns // 2).bfloat16()
        nvfp4[f"heads {rows}x{columns}"] = compare(swiglu.rows_nvfp4(heads, None), fused.rows_nvfp4(heads))
        nvfp4[f"rows {rows}x{columns}"] = compare(swiglu.rows_nvfp4(x, None), fused.rows_nvfp4(x))
        y, expected, found = random(rows, columns).bfloat16(), x.clone(), x.clone()
        fused.gate_residual_(expected, scale, y, segments, impl="reference")
        gate.gate_residual_(found, scale, y, segments)
        bf16[f"gate {rows}x{columns}"] = int((found != expected).sum())
    zeros = swiglu.rows_nvfp4(torch.zeros(3, 32, dtype=torch.bfloat16), None)
    quiet = not zeros.codes.any() and not zeros.block_scale.view(torch.uint8).any() and float(zeros.decode_scale) == 0
    print(json.dumps({"nvfp4": nvfp4, "bf16": bf16, "zeros": bool(quiet)}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
