"""``H3BW_FuseBlocks``: the fused block as a patch on a cloned MODEL."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import comfy.ops
import torch
from comfy_api.latest import io

from ..kernels import certify, fused
from . import adapt, adapt_attention, run

MODES = ["exact", "static", "off"]
SCALE_BACKENDS = ["vortex", "kitchen"]
EMULATE = ["off", "bf16", "w4a4"]

# widget -> the record's environment variable: a default for the widget, and `=0` is a hard off
VARIABLES = {
    "modulate": "H3_NVFP4_MODULATE_FUSION",
    "swiglu": "H3_NVFP4_SWIGLU_FUSION",
    "elementwise": "H3_FUSED_ELEMENTWISE",
}
# site -> the op that writes NVFP4 there
PRODUCERS = {"modulate": "norm_modulate_nvfp4", "attention_output": "rows_nvfp4", "swiglu": "swiglu_nvfp4"}
# A stream of fewer rows is left to ComfyUI where no linear of the block takes codes: on an H200, 514 rows took 84 ms a
# step in ComfyUI's blocks and 117 fused, both waiting for the host (research/records); 2,048 rows were faster fused.
LEAST_ROWS = 2048
ANY_ROWS = "h3bw_any_rows"  # transformer_options[ANY_ROWS]: fuse short streams too, for comparisons
BESIDE = "rows_nvfp4"  # ... and from bf16 rows, for a linear with a side branch


def hard_off(widget: str) -> bool:
    """True when the widget's environment variable is set to 0."""
    return os.environ.get(VARIABLES.get(widget, ""), "").strip() == "0"


def default_scale_backend() -> str:
    """``H3_NVFP4_SCALE_BACKEND`` when it names one we have, else ``vortex``."""
    asked = os.environ.get("H3_NVFP4_SCALE_BACKEND", "").strip()
    return asked if asked in SCALE_BACKENDS else SCALE_BACKENDS[0]


class BlockPatch:
    """The replacement of one ``double_block``; holds settings only, never a module or a tensor."""

    def __init__(self, index: int, sites: adapt.Sites, mode: str, emulate: str, previous):
        self.index = index
        self.sites = sites
        self.mode = mode
        self.emulate = emulate
        self.previous = previous

    def __call__(self, arguments: dict, extra: dict) -> dict:
        """ComfyUI's calling convention: ``({"img", ...}, {"original_block"}) -> {"img"}``."""
        recorder = arguments.get("transformer_options", {}).get(run.RUN)

        def inner(inner_arguments):
            return {"img": self._block(inner_arguments, extra["original_block"], recorder)}

        with adapt_attention.in_block(arguments, self.index):
            if self.previous is None:
                out = inner(arguments)
            else:
                out = self.previous(arguments, {**extra, "original_block": inner})
        if recorder is not None:
            recorder.watch(self.index, out["img"])
        return out

    def _block(self, arguments: dict, original_block, recorder):
        dit = arguments.get("transformer_options", {}).get(run.DIT)
        block = dit.blocks[self.index] if dit is not None else None
        reason = self._reason(block, arguments)
        emulating = block is not None and self.emulate == "w4a4" and reason_allows_emulation(reason)
        with adapt.emulating_w4a4(block) if emulating else contextlib.nullcontext():
            if reason is not None:
                if recorder is not None:
                    recorder.fallbacks[self.index, reason] += 1
                return original_block(arguments)["img"]
            comfy.ops.run_every_op()
            device, options = arguments["img"].device, arguments["transformer_options"]
            sites, refused = run.once_a_forward(
                options, ("sites", device, self.sites), lambda: sites_on(device, self.sites)
            )
            out = adapt.fused_forward(
                block,
                arguments["img"],
                arguments["t_emb"],
                arguments["mod_segments"],
                arguments["rope_freqs"],
                options,
                sites,
            )
        if recorder is not None:
            recorder.fused[self.index] += 1
            self._note_bf16_inputs(block, recorder, refused)
        return out

    def _reason(self, block, arguments: dict) -> str | None:
        if block is None:
            return "the forward did not say which model runs (a node removed this pack's wrapper)"
        if self.mode == "off":
            return MODE_OFF
        return (
            adapt.block_reason(block, arguments)
            or self._rows_reason(block, arguments)
            or adapt.class_reason(type(block))
            or self._device_reason(arguments)
        )

    def _device_reason(self, arguments: dict) -> str | None:
        device, options = arguments["img"].device, arguments.get("transformer_options", {})
        return run.once_a_forward(
            options, ("device", device, self.emulate), lambda: device_reason(device, self.emulate)
        )

    def _rows_reason(self, block, arguments: dict) -> str | None:
        """Why a short stream is left to ComfyUI where no linear multiplies FP4: the same bits, and it starts sooner."""
        x, options = arguments["img"], arguments.get("transformer_options", {})
        if x.device.type != "cuda" or self.emulate != "off" or x.shape[0] >= LEAST_ROWS or options.get(ANY_ROWS):
            return None
        if any(adapt.fp4_reason(block.get_submodule(name)) is None for name in adapt.LINEARS):
            return None
        return (
            f"{x.shape[0]} rows in bf16: below {LEAST_ROWS} the time goes into starting kernels, and ComfyUI's block "
            "starts fewer"
        )

    def _note_bf16_inputs(self, block, recorder, refused: dict[str, str]) -> None:
        for name, site in zip(adapt.LINEARS, ("modulate", "attention_output", "modulate", "swiglu"), strict=True):
            on = getattr(self.sites, site)
            reason = adapt.fp4_reason(block.get_submodule(name), self.sites.emulate_w4a4) if on else "switched off"
            if on and adapt.side_forward(block.get_submodule(name)) is not None:
                reason = reason or refused.get("beside")
            reason = reason or refused.get(site)
            if reason is not None:
                recorder.bf16_inputs[name, reason] += 1


MODE_OFF = "mode is off"


def reason_allows_emulation(reason: str | None) -> bool:
    """Emulation also serves the unfused side of a comparison, and only that: other fallbacks run as stock."""
    return reason is None or reason == MODE_OFF


def device_reason(device: torch.device, emulate: str) -> str | None:
    """Why no fused op runs on a device, or None."""
    if device.type != "cuda":
        return f"the stream is on {device.type} and emulate is off" if emulate == "off" else None
    if not certify.has_run(device):
        # Not now: a probe compiles and waits for the device, which nobody expects in the middle of a step.
        return f"the kernels were not certified on {device} when the model was patched; patch it where it runs"
    if emulate != "off":
        return None
    chosen = [fused.best(name, device) for name in fused.OPS]
    if any(name != "reference" for name, _ in chosen):
        return None
    reasons = list(dict.fromkeys(reason for _, refused in chosen for reason in refused.values()))
    if not reasons:
        return "this version has no fused kernel"
    others = f" (and {len(reasons) - 1} other reasons, see the report)" if len(reasons) > 1 else ""
    return f"no fused kernel runs here: {reasons[0]}{others}"


def sites_on(device: torch.device, sites: adapt.Sites) -> tuple[adapt.Sites, dict[str, str]]:
    """What of ``sites`` runs on a device; lookups only.

    On a GPU the reference quantiser is not to the bit what ComfyUI's is, so a site whose producer is not certified
    there hands on bf16 and ComfyUI quantises, as without this pack.

    Returns:
        ``(sites, {site that is off: reason})``.
    """
    if device.type != "cuda":
        return sites, {}
    refused = {}
    for site, op in PRODUCERS.items():
        name, reasons = fused.best(op, device)
        if getattr(sites, site) and name == "reference":
            refused[site] = f"{op} is left out: {'; '.join(reasons.values()) or 'it has no kernel'}"
    name, reasons = fused.best(BESIDE, device)
    if sites.beside and name == "reference":
        why = "; ".join(reasons.values()) or "it has no kernel"
        refused["beside"] = f"{BESIDE}, which makes the codes beside a LoRA branch, is left out: {why}"
    side_swiglu = sites.side_swiglu and fused.best("swiglu_side", device)[0] != "reference"
    norm = sites.norm if certify.norm_of(device) == "fused" else "aten"
    found = {"norm": norm, "side_swiglu": side_swiglu, **dict.fromkeys(refused, False)}
    if any(getattr(sites, name) != value for name, value in found.items()):
        sites = dataclasses.replace(sites, **found)
    return sites, refused


class FuseBlocks(io.ComfyNode):
    """Patch every block of an H3 to run the fused producers."""

    @classmethod
    def define_schema(cls):
        def switch(name, text):
            return io.Boolean.Input(name, default=not hard_off(name), tooltip=text)

        return io.Schema(
            node_id="H3BW_FuseBlocks",
            display_name="Fuse H3 Blocks (NVFP4)",
            category="H3 Blackwell/model",
            description=(
                "Runs norm, modulation, SwiGLU and the gated residuals of every MiniMax H3 block as fused ops that "
                "write NVFP4 directly. Exact: the same bytes as ComfyUI's own chain. Blocks it does not recognise run "
                "as they are, and the Runtime Report says which and why."
            ),
            search_aliases=["nvfp4", "fp4", "blackwell", "h3", "minimax", "fused", "speed"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax H3. LoRAs and sigma shift may come before or after."),
                io.Combo.Input(
                    "mode",
                    options=MODES,
                    default="exact",
                    tooltip=(
                        "exact: activation scales as ComfyUI makes them (per call, or the file's input_scale). "
                        "static: refuse a file without input_scale. off: leave the blocks alone but keep the same "
                        "wrappers, for the other side of a comparison."
                    ),
                ),
                switch("modulate", "Norm and modulation write NVFP4 for qkv_proj and fc1."),
                switch("swiglu", "SwiGLU writes NVFP4 for fc2."),
                io.Boolean.Input(
                    "attention_output", default=True, tooltip="The attention output is written as NVFP4 for out_proj."
                ),
                switch("elementwise", "bf16 ops too: modulation, SwiGLU and residuals where a layer is not NVFP4."),
                io.Combo.Input(
                    "scale_backend",
                    options=SCALE_BACKENDS,
                    default=default_scale_backend(),
                    tooltip=(
                        "Who makes the activation scales and codes. vortex: this pack's fused producers. kitchen: "
                        "comfy-kitchen's quantiser behind bf16 ops, as without this node."
                    ),
                ),
                io.Combo.Input(
                    "emulate",
                    options=EMULATE,
                    default="off",
                    advanced=True,
                    tooltip=(
                        "For parity work on a machine without FP4, slow. bf16: run the fused block with reference ops. "
                        "w4a4: also multiply 4-bit weights by 4-bit activations, dequantised, on either side of a "
                        "comparison."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="A clone with the patch; the input model is unchanged.")],
        )

    @classmethod
    def execute(
        cls, model, mode, modulate, swiglu, attention_output, elementwise, scale_backend, emulate="off"
    ) -> io.NodeOutput:
        dit = adapt.h3_model(model)
        widgets = {"modulate": modulate, "swiglu": swiglu, "elementwise": elementwise}
        forced_off = [VARIABLES[name] for name in widgets if hard_off(name)]
        on = {name: value and not hard_off(name) for name, value in widgets.items()}
        codes = scale_backend == "vortex"
        if mode != "off":
            # Here and not in the first step: a probe compiles and waits for the device.
            for device in {part.load_device for part in (model, *model.get_additional_models_with_key("multigpu"))}:
                if not certify.has_run(device):
                    run.log.info("H3 Blackwell: certifying the fused kernels on %s, once for these versions", device)
                certify.ensure(device)
        sites = adapt.Sites(
            modulate=on["modulate"] and codes,
            swiglu=on["swiglu"] and codes,
            attention_output=attention_output and codes,
            elementwise=on["elementwise"],
            emulate_w4a4=emulate == "w4a4",
            norm=certify.norm_of(model.load_device) if mode != "off" else "aten",
        )
        if mode == "static":
            require_static(dit, sites)
        patched = model.clone()
        run.attach(
            patched,
            "FuseBlocks",
            {
                "mode": mode,
                **on,
                "attention_output": attention_output,
                "scale_backend": scale_backend,
                "emulate": emulate,
                "forced_off_by_environment": forced_off,
            },
        )
        table = patched.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
        for index in range(len(dit.blocks)):
            previous = table.get(("double_block", index))
            while isinstance(previous, (BlockPatch, adapt_attention.BlockMark)):
                previous = previous.previous  # ours again: replace it, never stack; this patch marks the block too
            patch = BlockPatch(index, sites, mode, emulate, previous)
            patched.set_model_patch_replace(patch, "dit", "double_block", index)
        return io.NodeOutput(patched)


def require_static(dit: torch.nn.Module, sites: adapt.Sites) -> None:
    """Refuse mode "static" for a model whose NVFP4 linears lack ``input_scale``."""
    wanted = {
        "attn.qkv_proj": sites.modulate,
        "attn.out_proj": sites.attention_output,
        "mlp.fc1": sites.modulate,
        "mlp.fc2": sites.swiglu,
    }
    missing = [
        f"blocks.{index}.{name}"
        for index, block in enumerate(dit.blocks)
        for name, on in wanted.items()
        if on
        and adapt.weight_reason(block.get_submodule(name)) is None
        and getattr(block.get_submodule(name), "input_scale", None) is None
    ]
    if missing:
        raise ValueError(
            f"mode static needs an input_scale in every NVFP4 layer; {len(missing)} have none, the first is "
            f"{missing[0]}; choose mode exact, or a file with calibrated activation scales"
        )
