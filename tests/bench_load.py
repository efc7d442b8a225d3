"""kernels/measure/load_bench.py with ComfyUI's own loader among the candidates; the same options.

COMFYUI_PATH=... python tests/bench_load.py --device cuda:0 --file big.safetensors --record load.json --sweep
"""

from __future__ import annotations

import sys

from conftest import pack_module, use_comfyui


def main() -> int:
    arguments = sys.argv[1:]
    use_comfyui()
    import comfy.utils
    import torch

    bench = pack_module("kernels.measure.load_bench")
    named = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cuda:0"
    device = torch.device(named if torch.cuda.is_available() else "cpu")

    def comfyui(path: str) -> dict[str, torch.Tensor]:
        """What it takes to have the tensors on the device; some versions hand out a map of the file at first."""
        return {name: tensor.to(device) for name, tensor in comfy.utils.load_torch_file(path, device=device).items()}

    return bench.main(arguments, comfy=comfyui)


if __name__ == "__main__":
    sys.exit(main())
