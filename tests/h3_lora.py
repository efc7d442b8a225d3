"""Tiny LoRAs of the tiny H3, written where ComfyUI looks for them, and the models behind the LoRA nodes."""

from __future__ import annotations

import os

import torch
from conftest import pack_module

LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def linears_of(model) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of every linear of a MODEL."""
    return pack_module("nodes.lora").linears_of(model.model.diffusion_model)


def factors(model, rank=4, seed=0, size=0.05, names=None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """``{linear: (A [r, K], B [N, r])}`` fp32 for the four linears of each block, or for `names`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = linears_of(model)
    if names is None:
        names = [name for name in shapes if name.startswith("blocks.") and name.endswith(LINEARS)]
    made = {}
    for name in names:
        rows, columns = shapes[name]
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        made[name] = down, torch.randn(rows, rank, generator=generator) * size
    return made


def core_keys(made, prefix="diffusion_model.") -> dict[str, torch.Tensor]:
    """The factors under the keys that ai-toolkit and others write, as bf16."""
    out = {}
    for name, (down, up) in made.items():
        out[f"{prefix}{name}.lora_A.weight"] = down.bfloat16()
        out[f"{prefix}{name}.lora_B.weight"] = up.bfloat16()
    return out


def write_lora(name: str, tensors: dict, metadata=None) -> str:
    """Write ``models/loras/<name>`` of the ComfyUI under test; returns the name."""
    import folder_paths

    folder = folder_paths.get_folder_paths("loras")[0]
    os.makedirs(folder, exist_ok=True)
    pack_module("kernels.checkpoint.writer").write(os.path.join(folder, name), tensors, metadata, overwrite=True)
    folder_paths.filename_list_cache.pop("loras", None)
    return name


def side_branch(model, name: str, strength=1.0):
    """The model behind H3 LoRA Side Branch."""
    return pack_module("nodes.lora").LoraSideBranch.execute(model, name, strength).result[0]


def stock_lora(model, name: str, strength=1.0):
    """The model behind ComfyUI's own LoraLoaderModelOnly."""
    import nodes

    return nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]
