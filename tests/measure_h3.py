"""Runs one of the measuring nodes without a ComfyUI server and writes its record.

    python tests/measure_h3.py ladder   OUT.json [--blocks 50]           parity, on a random model of H3's widths
    python tests/measure_h3.py step     OUT.json [--sizes 1344x768x124] [--variants pack,attention,fuse,sol]
    python tests/measure_h3.py block    OUT.json [--rows 38016]
    python tests/measure_h3.py roofline OUT.json [--rows 38016]

ComfyUI is found as for the tests (H3BW_COMFYUI). On a CPU everything is small and no measurement. --commit puts the
commit into the record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import pack_module, use_comfyui


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("ladder", "step", "block", "roofline"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="1344x768x124", help="WIDTHxHEIGHTxFRAMES, with commas between")
    parser.add_argument("--variants", default="pack,attention,fuse")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="3 for step, 20 for the others")
    parser.add_argument("--rows", type=int, default=38016)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--tau", type=float, default=1.3)
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    use_comfyui()
    import comfy.model_management
    import torch

    device = comfy.model_management.get_torch_device()
    source = {"commit": given.commit} if given.commit else None
    common = {"out_path": given.out, "source": source}
    with torch.inference_mode():  # as ComfyUI runs its nodes
        if given.what == "ladder":
            model = None
            if device.type != "cpu":
                model = pack_module("nodes.random_model").random_h3(device, blocks=given.blocks)
            report = pack_module("nodes.parity_ladder").climb(model, **common)
        elif given.what == "step":
            sizes = [tuple(map(int, size.split("x"))) for size in given.sizes.split(",")]
            report = pack_module("nodes.bench_step").run(
                None, sizes, given.variants.split(","), given.steps, rounds=given.rounds or 3, tau=given.tau,
                blocks=given.blocks, **common,
            )  # fmt: skip
        elif given.what == "block":
            report = pack_module("nodes.bench_block").run(rows=given.rows, rounds=given.rounds or 20, **common)
        else:
            report = pack_module("kernels.measure.gemm_roofline").run(
                device, given.rows, rounds=given.rounds or 20, **common
            )
    print(report.text)
    return 1 if any(gate["result"] == "failed" for gate in report.record["gates"]) else 0


if __name__ == "__main__":
    sys.exit(main())
