"""The two sides of a comparison: stock and patched, from whatever MODEL is connected.

For parity, stock is the same MODEL without this pack's blocks; LoRA branches, the attention backend and other nodes'
patches stay on both sides, so that one thing varies. For a benchmark, stock is without the attention backend too.
"""

from __future__ import annotations

import comfy.model_management

from . import adapt_attention, report, run
from .attention import AttentionBackend, AttentionOverride
from .fuse import ANY_ROWS, BlockPatch, FuseBlocks, default_scale_backend, hard_off


def without_fused_blocks(model):
    """A clone of a MODEL without what Fuse H3 Blocks put there; everything else stays."""
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    settings = run.find_settings(model)
    table = options.get("patches_replace", {}).get("dit", {})
    for key, patch in list(table.items()):
        while isinstance(patch, (BlockPatch, adapt_attention.BlockMark)):
            patch = patch.previous
        if patch is None:
            del table[key]
        else:
            table[key] = patch
    options.pop(run.RUN, None)
    for wrappers in options.get("wrappers", {}).values():
        wrappers.pop(run.WRAPPER_KEY, None)
    others = {name: value for name, value in settings.items() if name != "FuseBlocks"}
    for name, value in others.items():
        run.attach(clone, name, value)
    override = adapt_attention.installed(options)
    if isinstance(override, AttentionOverride) and override.settings.dense_blocks:
        adapt_attention.mark_blocks(clone, sorted(override.settings.dense_blocks), BlockPatch)
    return clone


def stock_of(model):
    """A clone of a MODEL as ComfyUI alone would run it: without fused blocks, with ComfyUI's own attention."""
    clone = without_fused_blocks(model)
    options = clone.model_options["transformer_options"]
    override = adapt_attention.installed(options)
    if isinstance(override, AttentionOverride):
        options.pop(adapt_attention.OVERRIDE)
        if override.previous is not None:
            adapt_attention.install(clone, override.previous)
        table = options.get("patches_replace", {}).get("dit", {})
        for key in [key for key, patch in table.items() if isinstance(patch, adapt_attention.BlockMark)]:
            patch = report.unmarked(table.pop(key))
            if patch is not None:
                table[key] = patch
        options.pop(run.RUN, None)
        for wrappers in options.get("wrappers", {}).values():
            wrappers.pop(run.WRAPPER_KEY, None)
    return clone


def attend(model, backend: str = "auto", **options):
    """H3 Attention Backend; ``options`` are the inputs that its menu has under the backend."""
    return AttentionBackend.execute(model, backend={"backend": backend, **options}).result[0]


def fuse(model, mode: str = "exact", emulate: str = "off"):
    """Fuse H3 Blocks with its defaults."""
    switches = {name: not hard_off(name) for name in ("modulate", "swiglu", "elementwise")}
    return FuseBlocks.execute(
        model, mode=mode, attention_output=True, scale_backend=default_scale_backend(), emulate=emulate, **switches
    ).result[0]


def pair(model, emulate: str) -> tuple:
    """``(stock, patched)`` for one way to run the linears.

    Args:
        model: with Fuse H3 Blocks or without; with it, its own settings are the patched side.
        emulate: of Fuse H3 Blocks; ignored where the user set it.
    """
    settings = run.find_settings(model).get("FuseBlocks")
    bare = without_fused_blocks(model)
    patched = fuse(bare, emulate=emulate) if settings is None else model
    emulate = emulate if settings is None else settings["emulate"]
    # With four bits emulated, stock's own block code runs on emulated linears too.
    return (fuse(bare, mode="off", emulate="w4a4") if emulate == "w4a4" else bare), of_any_rows(patched)


def of_any_rows(model):
    """A clone whose fused blocks take short streams too: a comparison with blocks that step aside shows nothing."""
    clone = model.clone()
    clone.model_options.setdefault("transformer_options", {})[ANY_ROWS] = True
    return clone


def ways(model, asked: str) -> tuple[str, ...]:
    """The settings of ``emulate`` that the ladder is climbed with.

    ``auto``: the user's own; else what the device runs, and four bits emulated where it does not multiply them.
    """
    settings = run.find_settings(model).get("FuseBlocks")
    if settings is not None:
        return (settings["emulate"],)
    if asked != "auto":
        return (asked,)
    if model.load_device.type == "cpu":
        return ("bf16", "w4a4")
    return ("off",) if comfy.model_management.supports_nvfp4_compute(model.load_device) else ("off", "w4a4")
