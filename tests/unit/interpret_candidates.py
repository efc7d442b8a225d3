"""Run by test_candidates.py in a process of its own with TRITON_INTERPRET=1; prints one JSON line.

A candidate is executed by Triton's interpreter against the shipped Triton implementation of
``rows_nvfp4``: the same bytes, padding included.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conftest import pack_module

ROWS = 17  # more than a tile of codes; the interpreter takes seconds a case


def main() -> None:
    candidate, fused = pack_module("kernels.measure.candidate"), pack_module("kernels.fused")
    ours = candidate.load(sys.argv[1])
    theirs = next(item for item in fused.OPS[sys.argv[2]].implementations if item.name == "triton")
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(ROWS, 96, generator=generator) * 4).bfloat16()
    heads = torch.randn(2, ROWS, 48, generator=generator).bfloat16()
    x[3, :16] = 0
    cases = {"rows, dynamic": (x, None), "rows, static": (x, torch.tensor(0.01)), "heads, dynamic": (heads, None)}
    differ = []
    for name, arguments in cases.items():
        if candidate.digest_of(ours.run(*arguments)) != candidate.digest_of(theirs.run(*arguments)):
            differ.append(name)
    print(json.dumps({"ran": list(cases), "differ": differ}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
