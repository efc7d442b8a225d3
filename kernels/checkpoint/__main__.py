"""Make an NVFP4 file of a MiniMax H3 from the command line, in the pack's folder::

    python -m kernels.checkpoint source.safetensors target.safetensors [--scale adaptive|amax] [--keep blocks.0 ...]

Progress goes to stderr, the summary to stdout, its last line being the report as JSON.
"""

import argparse
import json
import os
import sys

from .header import CheckpointError
from .quantize import quantize_file, summary
from .scales import CHOICES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.checkpoint", description="bf16, fp32 or fp8 MiniMax H3 to NVFP4, as ComfyUI reads it"
    )
    parser.add_argument("source", help="the safetensors file of the diffusion model")
    parser.add_argument("target", help="the file to write; it must not exist, its folder must")
    parser.add_argument("--scale", choices=CHOICES, default=CHOICES[0], help="how block scales are chosen")
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="LAYER",
        help="layers to leave as they are: blocks.0, mlp.fc2, blocks.4?.attn.*",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default a GPU where there is one")
    parser.add_argument("--report", help="a JSON file for the report, and a PNG picture of the errors beside it")
    options = parser.parse_args(arguments)
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = done * 100 // max(total, 1)
        if percent > shown:
            shown = percent
            print(f"\r{percent} %", end="", file=sys.stderr, flush=True)

    try:
        report = quantize_file(
            options.source, options.target, scale=options.scale, keep_layers=options.keep, device=options.device,
            progress=progress,
        )  # fmt: skip
        print(file=sys.stderr)
        if options.report:
            from . import error_plot

            with open(options.report, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1, allow_nan=False)
            error_plot.draw(report, os.path.splitext(options.report)[0] + ".png")
    except (CheckpointError, OSError, ValueError, RuntimeError) as error:  # torch refuses a device with a RuntimeError
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(summary(report))
    print(json.dumps(report, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
