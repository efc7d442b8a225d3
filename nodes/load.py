"""``H3BW_LoadNVFP4``: an H3 file to a MODEL, through ComfyUI's own module loading."""

from __future__ import annotations

import logging
import os

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io, ui

from ..kernels import checkpoint
from ..kernels.checkpoint import layout as file_layout
from . import adapt

LAYOUTS = ["auto", "comfy", "modelopt"]

log = logging.getLogger("h3bw")


def direct_read_default() -> bool:
    """``H3_DISABLE_MMAP=1`` makes direct reading the widget's default."""
    return os.environ.get("H3_DISABLE_MMAP", "").strip() == "1"


def load_h3(path: str, layout: str = "auto", direct: bool = False, compute_dtype=None, disable_dynamic: bool = False):
    """Load an H3 diffusion model from a safetensors file.

    Args:
        path: full path of the file.
        layout: nibble order and scale layout of NVFP4 layers: ``"auto"`` (metadata), ``"comfy"`` or ``"modelopt"``.
        direct: read each tensor into its own storage and keep no mapping of the file.
        compute_dtype: dtype of the residual stream; None leaves it to ComfyUI.
        disable_dynamic: ComfyUI asks for this when it needs a patcher without dynamic VRAM.

    Returns:
        A ``ModelPatcher`` whose ``cached_patcher_init`` reloads it in the same way.

    Raises:
        CheckpointError: the file is damaged, not an H3, or its NVFP4 layers contradict the layout.
        ValueError: ComfyUI would run the model in fp16.
    """
    return load_and_describe(path, layout, direct, compute_dtype, disable_dynamic)[0]


def load_and_describe(path, layout="auto", direct=False, compute_dtype=None, disable_dynamic=False):
    """:func:`load_h3`, and what was found in the file and will run natively here, as a short text."""
    name = os.path.basename(path)
    # The file is judged before anything is allocated, so a bad one leaves the model in use untouched.
    header = checkpoint.read_header(path)
    if not file_layout.is_h3(header.tensors):
        raise checkpoint.CheckpointError(
            "not_h3",
            name,
            None,
            "the file has no video_patch_proj and audio_patch_proj, so it is not a MiniMax H3 diffusion model; "
            "choose an H3 file (text encoders and VAEs have loaders of their own)",
        )
    cancelled = comfy.model_management.throw_exception_if_processing_interrupted
    found = checkpoint.verify(path, header, layout, progress=lambda done, total: cancelled())
    if direct:
        progress = comfy.utils.ProgressBar(100)
        shown = -1

        def report(done: int, total: int) -> None:
            nonlocal shown
            cancelled()
            percent = done * 100 // max(total, 1)
            if percent > shown:
                shown = percent
                progress.update_absolute(percent, 100)

        state_dict, metadata = checkpoint.load(path, "cpu", direct=True, progress=report)
    else:
        state_dict, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    state_dict, info = file_layout.normalise(state_dict, metadata, declared=layout, file=name)
    if info["layout_from"] == "assumption":
        log.warning(
            "H3 Blackwell: %s does not say how its NVFP4 layers are laid out; taking ComfyUI's order. If the picture "
            "is noise, the file may be ModelOpt's: choose layout modelopt.",
            name,
        )

    left_out = {"keys outside the model": info["dropped"], "metadata of missing layers": info["ignored_metadata"]}
    for what, keys in left_out.items():
        if keys:
            log.info("H3 Blackwell: %s: left out %d %s, the first is %s", name, len(keys), what, keys[0])

    options = {} if compute_dtype is None else {"dtype": compute_dtype}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        state_dict, model_options=options, metadata=info["metadata"], disable_dynamic=disable_dynamic
    )
    if patcher is None:
        raise checkpoint.CheckpointError(
            "unknown_model", name, None, "ComfyUI does not recognise the model in it; is this ComfyUI 0.30 or newer?"
        )
    adapt.h3_model(patcher)
    if compute_dtype is not None:
        patcher.model.manual_cast_dtype = compute_dtype
    refuse_fp16(patcher.model.get_dtype_inference(), name)
    formats = {layer.format for layer in info["layers"].values()}
    fp4_layers = sum(layer.format == "nvfp4" for layer in info["layers"].values())
    warn_slow_fp4(fp4_layers, comfy.model_management.supports_nvfp4_compute(patcher.load_device))
    patcher.cached_patcher_init = (load_h3, (path, layout, direct, compute_dtype))
    summary = checkpoint.summary(header, found, name)
    return patcher, describe(summary, info, direct, {name: native(name, patcher.load_device) for name in formats})


def describe(summary: dict, info: dict, direct: bool, here: dict[str, str]) -> str:
    """What a file holds and how it will run, in a few lines.

    Args:
        summary: of ``checkpoint.summary``.
        info: of ``checkpoint.normalise``.
        here: quantised format -> how this device runs it.
    """
    adaln = {"pruned": "pruned (AdaLN from a time table)", "full": "full (AdaLN from the time embedder)"}
    lines = [
        f"{summary['file']}: MiniMax H3, {adaln[summary['adaln']]}, {summary['blocks']} blocks and "
        f"{summary['refiner_blocks']} refiner blocks, {summary['bytes'] / 2**30:.2f} GiB"
    ]
    for kind, counts in sorted(summary["formats"].items()):
        lines.append(f"  {kind}: " + ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())))
    layers, static = len(info["layers"]), summary["static_scales"]
    if layers:
        scales = f"static in {static} of {layers} quantised layers" if static else "dynamic, measured at every step"
        lines.append(f"activation scales: {scales}")
    if info["layout"] is not None:
        lines.append(f"NVFP4 byte order: {info['layout']}, by {info['layout_from']}")
    lines += [f"{name} here: {how}" for name, how in sorted(here.items())]
    lines.append("read: directly into memory" if direct else "read: through ComfyUI's memory map")
    return "\n".join(lines)


def native(name: str, device: torch.device) -> str:
    """How layers of a format are multiplied on a device, and why not natively where they are not."""
    management = comfy.model_management
    slow = "right but slow: dequantised for every multiply, because "
    if name == "nvfp4":
        if not management.supports_nvfp4_compute(device):
            return f"{slow}{_device(device)} has no FP4 matrix multiply (compute capability 10.0 or newer has)"
        if old_cuda() is not None:
            return f"{slow}torch is built for CUDA {old_cuda()} and comfy-kitchen's kernels need 13.0"
        return "natively, FP4 times FP4"
    if name.startswith("float8"):
        if not management.supports_fp8_compute(device):
            return f"{slow}{_device(device)} has no FP8 matrix multiply (compute capability 8.9 or newer has)"
        return "natively, FP8 times FP8"
    return "as ComfyUI runs it"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return "{} with compute capability {}.{}".format(device, *torch.cuda.get_device_capability(device))


def old_cuda() -> str | None:
    """The CUDA version that torch is built for, where it is too old for comfy-kitchen's kernels."""
    version = torch.version.cuda
    return version if version is not None and tuple(map(int, version.split(".")[:2])) < (13, 0) else None


def refuse_fp16(dtype: torch.dtype, file: str) -> None:
    """H3's residual stream reaches 1e6 to 1e7; fp16 ends at 65,504."""
    if dtype == torch.float16:
        raise ValueError(
            f"{file}: ComfyUI would run H3 in float16, whose range ends at 65,504; H3's residual stream reaches 1e7 "
            "and would turn into Inf; start ComfyUI without --fp16-unet (H3 runs in bfloat16)"
        )


def warn_slow_fp4(layers: int, native: bool) -> None:
    """Say so when NVFP4 layers will take a slow path that ComfyUI takes in silence.

    Args:
        layers: number of NVFP4 layers.
        native: whether the device multiplies FP4 (compute capability 10.0 or newer).
    """
    if layers and not native:
        log.warning(
            "H3 Blackwell: this device has no FP4 matrix multiply; %d NVFP4 layers are dequantised for every multiply "
            "(right, but slow)",
            layers,
        )
        return
    if layers and old_cuda() is not None:
        log.warning(
            "H3 Blackwell: torch is built for CUDA %s; comfy-kitchen's CUDA backend needs 13.0, so NVFP4 will run "
            "slower than bf16. Install a cu130 build of torch.",
            old_cuda(),
        )


class LoadNVFP4(io.ComfyNode):
    """Load a MiniMax H3 diffusion model."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_LoadNVFP4",
            display_name="Load MiniMax H3 (NVFP4)",
            category="H3 Blackwell/loaders",
            description=(
                "Loads a MiniMax H3 diffusion model. NVFP4 layers are checked before anything is allocated, and "
                "ModelOpt's nibble order and scale layout are converted. Every H3 file that ComfyUI reads loads too. "
                "Shows what the file holds and what of it runs natively here."
            ),
            search_aliases=["nvfp4", "fp4", "h3", "minimax", "unet", "diffusion model", "modelopt", "blackwell"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A file of the folder models/diffusion_models.",
                ),
                io.Boolean.Input(
                    "direct_read",
                    default=direct_read_default(),
                    tooltip=(
                        "Read the file into memory instead of mapping it (H3_DISABLE_MMAP=1): on unified memory a "
                        "mapping is counted twice. Shows progress and can be cancelled."
                    ),
                ),
                io.Combo.Input(
                    "layout",
                    options=LAYOUTS,
                    default="auto",
                    tooltip=(
                        "Nibble order and scale layout of the NVFP4 layers. auto reads the file's metadata; a file "
                        "written by ModelOpt without it needs modelopt."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, unpatched.")],
        )

    @classmethod
    def execute(cls, unet_name, direct_read, layout) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        model, text = load_and_describe(path, layout, direct_read)
        return io.NodeOutput(model, ui=ui.PreviewText(text))
