"""A MiniMax H3 of full size with random weights as a MODEL, without a file: what a benchmark needs."""

from __future__ import annotations

import comfy.model_management
import comfy.sd
import torch

from ..kernels.checkpoint import tiny
from . import adapt

H3 = {"hidden": 5376, "heads": 56, "head_dim": 128, "ffn": 14336, "text_dim": 5120}
BLOCKS, REFINER_BLOCKS = 50, 2
GIB_OF_FULL_SIZE = 12.6e9 / 2**30


def random_h3(device, blocks: int = BLOCKS, refiner_blocks: int = REFINER_BLOCKS, seed: int = 0, small: bool = False):
    """Draw and quantise a pruned NVFP4 H3 on a device and hand it to ComfyUI's own module loading.

    Args:
        device: where the numbers are drawn. On a GPU 50 blocks take seconds; they then lie where ComfyUI keeps models
            that are not in use, and are loaded by the first sampling as any model is.
        blocks, refiner_blocks: how many; 50 and 2 are H3's, 12.6 GB.
        seed: of the weights.
        small: the self-test's widths in place of H3's.

    Returns:
        A ``ModelPatcher``.

    Raises:
        RuntimeError: this ComfyUI does not know H3.
    """
    device = torch.device(device)
    widths = {} if small else H3
    tensors, metadata = tiny.tiny_h3(seed=seed, blocks=blocks, refiner_blocks=refiner_blocks, device=device, **widths)
    offload = comfy.model_management.unet_offload_device()
    for name in list(tensors):
        tensors[name] = tensors[name].to(offload)  # one by one: the device never holds the model twice
    on_cpu = comfy.model_management.get_torch_device().type == "cpu"
    # bf16 on the CPU too, where ComfyUI would choose fp32: the fused block is defined on a bf16 stream.
    options = {"dtype": torch.bfloat16} if on_cpu else {}
    patcher = comfy.sd.load_diffusion_model_state_dict(tensors, model_options=options, metadata=metadata)
    if patcher is None:
        raise RuntimeError("this ComfyUI does not recognise a MiniMax H3; it has to be 0.30 or newer")
    if on_cpu:
        patcher.model.manual_cast_dtype = torch.bfloat16
    adapt.h3_model(patcher)
    patcher.cached_patcher_init = (random_h3, (device, blocks, refiner_blocks, seed, small))
    return patcher
