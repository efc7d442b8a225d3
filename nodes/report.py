"""``H3BW_RuntimeReport``: what really ran, as text in the UI and as a JSON file."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform

import comfyui_version
import torch
from comfy_api.latest import io

from ..kernels import attention as attention_kernels
from ..kernels import certify
from . import adapt_attention, attention, lora, output, run
from .fuse import BlockPatch

SCHEMA = "h3bw-report/1"


def compare_latents(latent: dict, reference: dict) -> dict:
    """Compare two latents bit for bit.

    Returns:
        A rung: ``passed`` when every stream has the same shape, dtype and bytes; its numbers name each stream's
        differing elements, largest absolute difference and element count.
    """
    ours, theirs = streams(latent), streams(reference)
    numbers: dict = {}
    reason = None
    if len(ours) != len(theirs):
        reason = f"{len(ours)} streams against {len(theirs)}"
    for name, (a, b) in enumerate_streams(ours, theirs):
        if a.shape != b.shape or a.dtype != b.dtype:
            reason = f"{name} is {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
            continue
        a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
        unequal = int((bits(a) != bits(b)).sum())
        numbers[name] = {
            "elements": a.numel(),
            "differing": unequal,
            "max_abs": largest_difference(a, b) if unequal else 0.0,
        }
        if unequal and reason is None:
            reason = f"{name} differs in {unequal} of {a.numel()} elements"
    return {
        "rung": "latents equal, bit for bit",
        "result": "failed" if reason else "passed",
        "numbers": numbers,
        "reason": reason,
    }


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Largest absolute difference, or None when it is not finite (JSON has no word for that)."""
    value = float((a.double() - b.double()).abs().max())
    return value if math.isfinite(value) else None


def streams(latent: dict) -> list[torch.Tensor]:
    """The tensors of a latent: video and audio of an H3 latent, or the single one of any other."""
    samples = latent["samples"]
    return list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]


def enumerate_streams(ours: list, theirs: list):
    """Pair the streams of two latents under their names."""
    names = ("video", "audio", *(f"stream {index}" for index in range(2, len(ours))))
    return list(zip(names, zip(ours, theirs, strict=False), strict=False))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, so that -0.0 and 0.0 differ and a NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def finite_rung(latent: dict, record) -> dict:
    """Whether the latent is finite, and the first block that was not."""
    counts = {
        name: int((~torch.isfinite(a)).sum()) for name, (a, _) in enumerate_streams(streams(latent), streams(latent))
    }
    reason = None
    if record is not None and record.nonfinite:
        step, block = record.nonfinite
        reason = f"block {block} is the first with a non-finite output, in evaluation {step}"
    elif any(counts.values()):
        reason = "the latent is not finite, though every block that was watched was"
    return {
        "rung": "finite",
        "result": "failed" if reason else "passed",
        "numbers": {"nonfinite_" + name: count for name, count in counts.items()},
        "reason": reason,
    }


def blocks_rung(record) -> dict:
    """How many blocks ran fused.

    When some ran in ComfyUI's own code it is skipped, with the reasons; with emulation on it is failed, because then
    the fused block was asked for on this very device.
    """
    whole = {block for block in record.fused if not any(block == other for other, _ in record.fallbacks)}
    complete = record.blocks > 0 and len(whole) == record.blocks
    asked = record.settings.get("FuseBlocks", {}).get("emulate", "off")
    return {
        "rung": "blocks fused",
        "result": "passed" if complete else ("failed" if asked != "off" else "skipped"),
        "numbers": {"fused": len(whole), "blocks": record.blocks, "steps": record.steps},
        "reason": None if complete else record.headline(),
    }


def overridden(model) -> list[str]:
    """What later nodes took out of this pack's hands."""
    notes = []
    options = model.model_options.get("transformer_options", {})
    record = options.get(run.RUN)
    if record is None:
        return notes
    in_charge = adapt_attention.installed(options)
    if "AttentionBackend" in record.settings and not isinstance(in_charge, attention.AttentionOverride):
        notes.append("a later node replaced the attention backend; it is in charge")
    if "FuseBlocks" in record.settings:
        table = options.get("patches_replace", {}).get("dit", {})
        lost = [
            key
            for key, patch in table.items()
            if key[0] == "double_block" and not isinstance(unmarked(patch), BlockPatch)
        ]
        if lost:
            notes.append(f"a later node owns {len(lost)} blocks; they run fused only if it calls the original block")
    return notes


def unmarked(patch):
    """The patch below a mark of the attention node's, which only says which block runs."""
    while isinstance(patch, adapt_attention.BlockMark):
        patch = patch.previous
    return patch


def build(model, latent=None, reference=None) -> dict:
    """Gather the report of a MODEL that has been sampled."""
    record = run.find(model)
    rungs = []
    notes = overridden(model)
    if record is not None and not run.sampled_with(model, record):
        notes.append("the last sampling was of a later clone of this model; connect the model that the guider gets")
    if latent is not None and reference is not None:
        rungs.append(compare_latents(latent, reference))
    if latent is not None:
        rungs.append(finite_rung(latent, record))
    if record is not None and record.state != "not started":
        if record.settings.get("FuseBlocks", {}).get("mode", "off") != "off":
            rungs.append(blocks_rung(record))
        if "AttentionBackend" in record.settings:
            rungs.append(attention.rung(record))
    return {
        "schema": SCHEMA,
        "written_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "run": record.as_dict() if record is not None else None,
        "notes": notes,
        "stock_lora": lora.stock_patches(model),
        "certification": certify.status(model.load_device),
        "rungs": rungs,
        "latent_sha256": None if latent is None else digests(latent),
    }


def environment() -> dict:
    """The versions that a comparison depends on."""
    import importlib.metadata

    versions = {}
    packages = {package for record in attention_kernels.records() for package in record.packages} - {"torch"}
    for name in ("comfy-kitchen", "triton", "safetensors", "av", *sorted(packages - {"comfy-kitchen", "triton"})):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "comfyui": comfyui_version.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **versions,
    }


def digests(latent: dict) -> dict:
    """SHA-256 of each stream's bytes."""
    out = {}
    for name, (tensor, _) in enumerate_streams(streams(latent), streams(latent)):
        raw = bits(tensor.detach().cpu().contiguous()).numpy().tobytes()
        out[name] = hashlib.sha256(raw).hexdigest()
    return out


def as_text(report: dict) -> str:
    """The report as a few lines for a person."""
    lines = []
    record = report["run"]
    if record is None:
        lines.append(
            "This model has no patch of this pack: put Fuse H3 Blocks before the sampler (mode off watches too)."
        )
    elif record["state"] == "not started":
        lines.append("Nothing was sampled with this model yet: connect the sampled latent, so that this runs last.")
    else:
        lines.append(record["headline"])
        pace = record["seconds"] / record["steps"] if record["steps"] else 0.0
        lines.append(
            f"{record['steps']} model evaluations on {record['device']}, {record['seconds']:.2f} s, {pace:.3f} s each"
        )
        if record["peak_bytes"] is not None:
            lines.append(f"peak device memory {record['peak_bytes'] / 2**30:.2f} GiB")
        for entry in record["bf16_inputs"]:
            lines.append(f"bf16 input for {entry['linear']} x {entry['calls']}: {entry['reason']}")
        lines += attention.lines(record)
        lines += lora.lines(record["settings"], record["side_branches"])
        for name in record["settings"].get("FuseBlocks", {}).get("forced_off_by_environment", ()):
            lines.append(f"{name}=0 in the environment switches this off")
    for entry in report["certification"]:
        if entry["state"] == certify.REFUSED:
            lines.append(f"{entry['op']} does not run as {entry['implementation']}: {entry['reason']}")
    lines += lora.stock_lines(report["stock_lora"])
    lines += report["notes"]
    for rung in report["rungs"]:
        detail = f": {rung['reason']}" if rung["reason"] else ""
        lines.append(f"{rung['result']}: {rung['rung']}{detail}")
    return "\n".join(lines)


class RuntimeReport(io.ComfyNode):
    """Say what ran and whether it equals the reference."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_RuntimeReport",
            display_name="H3 Runtime Report",
            category="H3 Blackwell/diagnostics",
            description=(
                "What the last sampling run of a model really did: fused blocks, fallbacks with their reasons, "
                "attention backends with counts, seconds per step, peak memory, the first non-finite block. With a "
                "reference latent it compares the two bit for bit. Text here, JSON in the output folder."
            ),
            search_aliases=["nvfp4", "h3", "report", "parity", "fallback", "benchmark", "what ran"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The patched model that was sampled."),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The latent sampled with it, so that the report runs last."
                ),
                io.Latent.Input(
                    "reference", optional=True, tooltip="The same graph and seed sampled with the unpatched model."
                ),
                io.Combo.Input(
                    "on_difference",
                    options=["report", "fail"],
                    default="report",
                    tooltip="fail stops the run with an error when a comparison failed; the JSON is written first.",
                ),
                io.String.Input("filename_prefix", default="h3bw/report", tooltip="Under the output folder."),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The text shown on the node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs):
        """Never cached: the same inputs can have been sampled again."""
        return float("nan")

    @classmethod
    def execute(cls, model, on_difference, filename_prefix, latent=None, reference=None) -> io.NodeOutput:
        report = build(model, latent, reference)
        path, saved = output.place(filename_prefix, "json")
        with output.writing(path) as temporary, open(temporary, "x", encoding="utf-8") as out:
            json.dump(report, out, indent=2, allow_nan=False)
        text = as_text(report)
        failed = [rung for rung in report["rungs"] if rung["result"] == "failed"]
        if failed and on_difference == "fail":
            reasons = "; ".join(f"{rung['rung']}: {rung['reason']}" for rung in failed)
            raise RuntimeError(f"{reasons} (see {saved['filename']})")
        return io.NodeOutput(text, ui={"text": (text,), "h3bw_report": [saved], "h3bw_rungs": report["rungs"]})
