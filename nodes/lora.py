"""``H3BW_LoraSideBranch``: a LoRA that survives four bits, and what stock LoRA nodes cost.

``y = linear(x) + strength * alpha/r * B(Ax)``: the weight stays as it is. A small delta folded into an NVFP4 weight is
lost: at 1 % of the weight's spread rounding to nearest leaves nothing of it, and ComfyUI's stochastic rounding buries
it under noise of 15 times its size (tests/nodes/test_lora.py measures both).
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import Counter

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..kernels import checkpoint, lora
from . import adapt, attach, run

INT8_LAYOUT = "TensorWiseINT8Layout"
SETTINGS = "LoraSideBranch"

log = logging.getLogger("h3bw")

# (file, its time and size, the model's linears, device) -> patcher of the factors, as long as some MODEL holds it: a
# node that only changes its strength, or a second branch, shares them.
_loaded: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class LowRankFactors(torch.nn.Module):
    """The bf16 factors of one LoRA as linears that ComfyUI loads, offloads and frees like any model's.

    Attributes:
        pairs: linear's name -> :class:`adapt.Pair` with strength 1.
        reading: counts and reasons of the file; its tensors are not kept.
    """

    def __init__(self, reading: lora.Reading):
        super().__init__()
        self.pairs: dict[str, adapt.Pair] = {}
        self.reading = lora.Reading({}, reading.used, reading.left_out, reading.ranks, reading.alpha)
        for name, branches in reading.branches.items():
            down = _linear(torch.cat([branch.down.to(torch.bfloat16) for branch in branches]))
            ups, first = [], 0
            for branch in branches:
                last = first + branch.down.shape[0]
                up = _linear(branch.up.to(torch.bfloat16))
                ups.append((up, slice(first, last), slice(branch.start, branch.stop), branch.scale))
                first = last
            self.pairs[name] = adapt.Pair(down, tuple(ups), 1.0)
            self.add_module(name.replace(".", "/"), torch.nn.ModuleList([down, *(up for up, *_ in ups)]))


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    rows, columns = weight.shape
    linear = comfy.ops.manual_cast.Linear(columns, rows, bias=False, device="meta", dtype=weight.dtype)
    linear.load_state_dict({"weight": weight.contiguous()}, assign=True)
    return linear.requires_grad_(False)


class SideBranch:
    """LoRAs beside the linears of a model: an entry of ``attach.KEY``. Holds factors, never a module of the model."""

    def __init__(self, parts: tuple[tuple[comfy.model_patcher.ModelPatcher, float], ...]):
        self.parts = parts

    def models(self) -> list[comfy.model_patcher.ModelPatcher]:
        """What ComfyUI loads with the model (it asks every patch that has this method)."""
        return [patcher for patcher, _ in self.parts]

    def joined(self, other: SideBranch) -> SideBranch:
        """Both as one, so that a linear's output is updated once."""
        return SideBranch(self.parts + other.parts)

    def replacements(self, dit: torch.nn.Module, record: run.Run | None) -> list:
        """See :class:`attach.Attachment`."""
        counts = record.side if record is not None else Counter()
        of_linear: dict[str, list[adapt.Pair]] = {}
        for patcher, strength in self.parts:
            for name, pair in patcher.model.pairs.items():
                of_linear.setdefault(name, []).append(adapt.Pair(pair.down, pair.ups, strength))

        def maker(linear, pairs):
            return lambda forward: adapt.SideForward(linear, forward, tuple(pairs), counts)

        modules = {name: dit.get_submodule(name) for name in of_linear}
        return [(modules[name], maker(modules[name], pairs)) for name, pairs in of_linear.items()]


def linears_of(dit: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """``name -> (out, in)`` of every linear of an H3, quantised or not."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in dit.named_modules()
        if isinstance(module, comfy.ops.CastWeightBiasOp) and hasattr(module, "out_features")
    }


def load_factors(path: str, model) -> comfy.model_patcher.ModelPatcher:
    """Read a LoRA file for a model, or find the factors that another node holds already.

    Raises:
        ValueError: the file is gone.
        CheckpointError: it is no safetensors file, or damaged.
        LoraError: see :func:`kernels.lora.read`.
    """
    linears = linears_of(adapt.h3_model(model))
    try:
        stat = os.stat(path)
    except OSError as error:
        raise ValueError(f"{os.path.basename(path)}: cannot be read: {error.strerror}") from None
    key = (path, stat.st_mtime_ns, stat.st_size, tuple(linears.items()), model.load_device, model.offload_device)
    found = _loaded.get(key)
    if found is not None:
        return found
    progress = comfy.utils.ProgressBar(100)

    def report(done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        progress.update_absolute(done * 100 // max(total, 1), 100)

    tensors, metadata = checkpoint.load(path, "cpu", direct=True, progress=report)
    factors = LowRankFactors(lora.read(tensors, linears, metadata, os.path.basename(path)))
    patcher = comfy.model_patcher.CoreModelPatcher(
        factors, load_device=model.load_device, offload_device=model.offload_device
    )
    _loaded[key] = patcher
    return patcher


def require_places(dit: torch.nn.Module, names, file: str) -> None:
    """Refuse linears that ComfyUI multiplies without calling their forward, where a branch would get lost."""
    for name in names:
        if name.endswith("mlp.fc2") and getattr(dit.get_submodule(name).weight, "_layout_cls", None) == INT8_LAYOUT:
            raise ValueError(
                f"{file}: {name} of this model is INT8; ComfyUI quantises its input together with the activation "
                "function, past the place of a side branch; use LoraLoaderModelOnly with this model, or an NVFP4 one"
            )


class LoraSideBranch(io.ComfyNode):
    """Add a LoRA beside the linears of an H3."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_LoraSideBranch",
            display_name="H3 LoRA Side Branch",
            category="H3 Blackwell/model",
            description=(
                "Adds a LoRA beside the linears of a MiniMax H3, in bf16, and leaves the weights alone: a LoRA that "
                "ComfyUI's own nodes would round away in an NVFP4 weight keeps its strength. Nodes in a row add up."
            ),
            search_aliases=["lora", "h3", "minimax", "nvfp4", "turbo", "low rank", "adapter"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax H3, in NVFP4 or not."),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A file of the folder models/loras: ComfyUI, diffusers, PEFT or kohya keys.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.01,
                    tooltip="How much of the LoRA is added; 0 leaves the model as it is, to the bit.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="A clone with the LoRA beside it; the input model is unchanged.")],
        )

    @classmethod
    def execute(cls, model, lora_name, strength) -> io.NodeOutput:
        dit = adapt.h3_model(model)
        if not math.isfinite(strength):
            raise ValueError(f"strength must be a finite number, is {strength}")
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        factors = load_factors(path, model)
        file = os.path.basename(path)
        require_places(dit, factors.model.pairs, file)
        require_range(factors.model.pairs, strength, file)
        reading = factors.model.reading
        summary = {
            "file": file,
            "strength": strength,
            "linears": len(factors.model.pairs),
            "ranks": list(reading.ranks),
            "alpha": reading.alpha,
            "keys_used": len(reading.used),
            "keys_left_out": len(reading.left_out),
            "left_out": dict(list(reading.left_out.items())[:2]),
        }
        warning = partial_warning(summary)
        if warning:
            log.warning("H3 Blackwell: %s", warning)
        patched = model.clone()
        before = run.find_settings(model).get(SETTINGS, {}).get("loras", [])
        run.attach(patched, SETTINGS, {"loras": [*before, summary]})
        found = attach.entries(model)
        if strength != 0:
            found = [*found, SideBranch(((factors, strength),))]
        attach.install(patched, found)
        return io.NodeOutput(patched)


def require_range(pairs: dict[str, adapt.Pair], strength: float, file: str) -> None:
    """Refuse a factor that no fp32 number is, here and not in the first step."""
    largest = max(abs(scale * strength) for pair in pairs.values() for *_, scale in pair.ups)
    if largest > torch.finfo(torch.float32).max:
        raise ValueError(f"{file}: strength {strength:g} times alpha / rank is {largest:.3g}, too large for a number")


def partial_warning(summary: dict) -> str | None:
    """A sentence when a file does not fit whole, with counts and two examples, or None."""
    if not summary["keys_left_out"]:
        return None
    total = summary["keys_used"] + summary["keys_left_out"]
    examples = ", ".join(f"{key} ({reason})" for key, reason in summary["left_out"].items())
    return f"{summary['file']}: {summary['keys_used']} of {total} keys used, left out among others {examples}"


def lines(settings: dict, side: Counter) -> list[str]:
    """What the report says about side branches."""
    out = []
    for item in settings.get(SETTINGS, {}).get("loras", ()):
        ranks = ", ".join(map(str, item["ranks"]))
        state = "off (strength 0)" if item["strength"] == 0 else f"beside {item['linears']} linears"
        alpha = "no alpha (scale 1)" if item["alpha"] == "none" else f"alpha from the file's {item['alpha']}"
        out.append(f"LoRA {item['file']} at {item['strength']:g}: {state}, rank {ranks}, {alpha}")
        warning = partial_warning(item)
        if warning:
            out.append(warning)
    out += [f"side branches computed from {source} x {count}" for source, count in side.items()]
    return out


# ---------------------------------------------------------------- stock LoRA nodes


def stock_patches(patcher) -> dict | None:
    """What weight patches of other nodes (stock LoRA loaders) cost on NVFP4 linears, or None without any.

    Returns:
        ``{"patched": n, "requantised": [...], "left_fp4": [...], "pending": [...]}`` with names of linears: folded into
        the weight, which is rounded to NVFP4 again; applied during each forward, which then multiplies in bf16; not
        loaded yet, or applied by ComfyUI's dynamic loading when the weight is used (requantised there too).
    """
    groups: dict[str, list[str]] = {"requantised": [], "left_fp4": [], "pending": []}
    for key in patcher.patches:
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        try:
            linear = adapt.h3_model(patcher).get_submodule(name)
        except (AttributeError, adapt.NotH3):
            continue
        if getattr(getattr(linear, "weight", None), "_layout_cls", None) != adapt.NVFP4_LAYOUT:
            continue
        if getattr(linear, "weight_function", None):
            groups["left_fp4"].append(name)
        elif key in patcher.backup:
            groups["requantised"].append(name)
        else:
            groups["pending"].append(name)
    patched = sum(map(len, groups.values()))
    return {"patched": patched, **groups} if patched else None


def stock_lines(costs: dict | None) -> list[str]:
    """What the report says about them."""
    if costs is None:
        return []
    said = {
        "requantised": "requantised to NVFP4 with stochastic rounding, whose noise is larger than a small delta",
        "left_fp4": "left the FP4 path: dequantised, patched and multiplied in bf16 at every call (low VRAM)",
        "pending": "not in place now: requantised to NVFP4 when ComfyUI loads or uses the weight",
    }
    out = [
        f"a stock LoRA patches {len(costs[group])} NVFP4 linears, among them {costs[group][0]}: {text}"
        for group, text in said.items()
        if costs[group]
    ]
    return [*out, "H3 LoRA Side Branch keeps such a LoRA's strength and the FP4 path"]
