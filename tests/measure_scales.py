"""How much error each choice of block scales leaves on weights of known distributions, as a record.

python tests/measure_scales.py research/records/cpu_scale_choice.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from conftest import pack_module

SHAPE = (1024, 2048)
BAR = 0.05


def weights() -> dict[str, torch.Tensor]:
    """Gaussian, with rows of lognormal size, bf16, and heavy tails; one seed."""
    torch.manual_seed(0)
    rows = torch.exp(0.5 * torch.randn(SHAPE[0], 1))
    return {
        "Gaussian": torch.randn(SHAPE),
        "Gaussian, lognormal rows": torch.randn(SHAPE) * rows,
        "Gaussian, bf16": (torch.randn(SHAPE) * 0.02).to(torch.bfloat16),
        "Laplacian": torch.distributions.Laplace(0.0, 1.0).sample(SHAPE),
        "Student's t, 5": torch.distributions.StudentT(5.0).sample(SHAPE),
        "Student's t, 3": torch.distributions.StudentT(3.0).sample(SHAPE),
    }


def main() -> int:
    manifest, scales = pack_module("kernels.measure.manifest"), pack_module("kernels.checkpoint.scales")
    steps = scales._STEPS
    failed = 0
    with manifest.Manifest(Path(sys.argv[1]), "parity") as record:
        record.set_protocol(seed=0)
        record.note(
            f"relative error of {SHAPE[0]} x {SHAPE[1]} weights, and what the other choices take off that of amax"
        )
        for name, weight in weights().items():
            held = scales.Weight(weight, None, torch.device("cpu"))
            errors = {"amax": scales.quantize(held, "amax")[1]}
            for what, tried in (("4 or 6 alone", (0,)), ("adaptive", steps)):
                scales._STEPS = tried
                errors[what] = scales.quantize(held, "adaptive")[1]
            saved = {what: 1 - error / errors["amax"] for what, error in errors.items()}
            record.add_gate(f"{name}: adaptive below amax", "at_least", BAR, observed=saved["adaptive"])
            record.note(
                f"{name}: amax {errors['amax']:.5f}, 4 or 6 alone {errors['4 or 6 alone']:.5f} "
                f"({saved['4 or 6 alone']:.1%} less), adaptive {errors['adaptive']:.5f} ({saved['adaptive']:.1%} less)"
            )
            print(record.data["notes"][-1])
            failed += saved["adaptive"] < BAR
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
