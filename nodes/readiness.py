"""Whether this process is ready for a real run: what the last warm-up did, and whether its model is still loaded.

Filled by ``H3BW_Warmup``, read by the routes. Reading has no effect: it asks no device, probes nothing, loads nothing
and opens no file but the pack's own ``pyproject.toml``. Of the model there is a weak reference only, so that a warm-up
keeps nothing alive. ``ready`` is worked out at every question from ComfyUI's own list of loaded models and never
remembered: after an unload there is nothing that could still say yes. A model that ComfyUI holds partly in system
memory counts as loaded.

What is told holds no path, no name of a file and nothing of a prompt. Texts of errors stay in ComfyUI's log, because
they may.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.model_management
import comfyui_version
import torch

from ..kernels import attention, certify, discover
from . import adapt_attention, fuse, run

SCHEMA = "h3bw-ready/1"
NOT_WARMED, RUNNING, WARMED = "not warmed", "running", "warmed"
VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
SWITCH = ("0", "1")
# The variables of the record: the values that mean something. Another value is not repeated to whoever asks.
VARIABLES = {
    "H3_DISABLE_MMAP": SWITCH,
    "H3_NVFP4_SCALE_BACKEND": tuple(fuse.SCALE_BACKENDS),
    "H3_NVFP4_SCALE_VERSION": ("1",),  # there is no other; nothing reads it
    "H3_FUSED_ELEMENTWISE": SWITCH,
    "H3_NVFP4_MODULATE_FUSION": SWITCH,
    "H3_NVFP4_SWIGLU_FUSION": SWITCH,
    "H3_SAGE_QKV_LAYOUT": tuple(attention.LAYOUTS),
    "H3_SOL_QKV_LAYOUT": tuple(attention.LAYOUTS),
}


@dataclass(frozen=True)
class WarmUp:
    """The last warm-up; replaced as a whole, because the server's thread reads while another one samples.

    Attributes:
        state: ``"not warmed"``, ``"running"`` or ``"warmed"``.
        reason: why it is not warmed.
        model: weak reference to ComfyUI's model (the weights, not the patcher: clones share them).
        device: where it is loaded.
        shape: width, height, frames and steps.
        seconds: wall time, loading included.
        ran: what ran, see :func:`what_ran`.
        nvfp4: how NVFP4 layers are multiplied on the device, or None for a model without any.
    """

    state: str = NOT_WARMED
    reason: str | None = "no warm-up has run in this process"
    model: weakref.ref | None = None
    device: str | None = None
    shape: dict | None = None
    seconds: float | None = None
    ran: dict | None = None
    nvfp4: str | None = None


_now = WarmUp()
_generation = 0  # warm-ups that found the process not ready


@contextlib.contextmanager
def warming(patcher, shape: dict) -> Iterator[None]:
    """While open, a warm-up runs; unless :func:`finish` was called in it, nothing is warmed afterwards.

    Args:
        patcher: the MODEL.
        shape: width, height, frames and steps.
    """
    global _now, _generation
    if why_not() is not None:
        _generation += 1
    model, device = weakref.ref(patcher.model), str(patcher.load_device)
    _now = WarmUp(RUNNING, "the warm-up is running", model, device, shape)
    reason = "the warm-up was cancelled"  # ComfyUI's cancel is a BaseException and passes
    try:
        yield
    except Exception as error:
        reason = f"the warm-up stopped with {type(error).__name__}; its text is in ComfyUI's log"
        run.log.warning("H3 Blackwell: the warm-up stopped: %s", error)
        raise
    finally:
        if _now.state == RUNNING:
            _now = WarmUp(NOT_WARMED, reason, device=device, shape=shape)


def finish(seconds: float, ran: dict, nvfp4: str | None) -> None:
    """The warm-up that is open has done all it should."""
    global _now
    _now = replace(_now, state=WARMED, reason=None, seconds=round(seconds, 3), ran=ran, nvfp4=nvfp4)


def why_not() -> str | None:
    """Why this process is not ready, or None."""
    now = _now
    if now.state != WARMED:
        return now.reason
    model = now.model()
    if model is None:
        return "the model that was warmed up has been freed"
    for entry in list(comfy.model_management.current_loaded_models):
        patcher = entry.model
        # An entry stays in the list, emptied, while it is unloaded, and when that raises.
        if patcher is not None and patcher.model is model and entry.real_model is not None:
            return None
    return f"the model that was warmed up has been unloaded from {now.device}"


def fingerprint() -> int:
    """A number that stays for as long as the warm-up holds, and then changes: ComfyUI runs the node again."""
    return _generation if why_not() is None else _generation + 1


# ---------------------------------------------------------------- what is told


def what_ran(record: dict) -> dict:
    """The part of :meth:`run.Run.as_dict` that may be told to everyone."""
    settings = record["settings"]
    asked = settings.get("AttentionBackend")
    fallbacks: dict[str, int] = {}
    for entry in record["fallbacks"]:
        reason = discover.without_paths(entry["reason"])
        fallbacks[reason] = fallbacks.get(reason, 0) + 1
    return {
        "state": record["state"],
        "attention": {
            "asked": None if asked is None else asked["backend"],
            "exact": None if asked is None else asked["exact"],
            "layout": None if asked is None else asked["layout"],
            "ran": record["attention"],
            "handed_on": {discover.without_paths(k): count for k, count in record["attention_handed_on"].items()},
            # Calls that this pack does not see go there, unless another node has put itself in between.
            "comfyui": adapt_attention.default_name(),
        },
        "fusion": settings.get("FuseBlocks"),
        "lora_branches": len(settings.get("LoraSideBranch", {}).get("loras", ())),
        "blocks": record["blocks"],
        "blocks_fused": len(record["fused_calls"]),
        "fallbacks": [{"reason": reason, "blocks": count} for reason, count in fallbacks.items()],
        "evaluations": record["steps"],
    }


def environment() -> dict:
    """The variables of the record as they are set: a value that means something, or that it means nothing here."""
    told = {}
    for name, values in VARIABLES.items():
        value = os.environ.get(name, "").strip()
        told[name] = None if not value else value if value in values else "(a value that this pack does not know)"
    return told


def certification() -> list[dict]:
    """The certificates that are in memory: one a kernel and device."""
    return [
        {"device": str(device), **{name: found[name] for name in ("op", "implementation", "state", "reason")}}
        for device, found in certify.remembered()
    ]


def ready() -> dict:
    """The answer of ``/h3bw/ready``; its member ``ready`` decides the status."""
    now, reason, latest = _now, why_not(), run.latest()
    ran = now.ran or {}
    current = what_ran(latest) if latest is not None else {}
    return {
        "schema": SCHEMA,
        "ready": reason is None,
        "reason": reason,
        "pack_version": pack_version(),
        "attention": {"initial": ran.get("attention"), "current": current.get("attention")},
        "options": {
            "fusion": {"initial": ran.get("fusion"), "current": current.get("fusion")},
            "environment": environment(),
        },
        "certification": certification(),
        "warm_up": {
            "state": now.state,
            "device": now.device,
            "shape": now.shape,
            "seconds": now.seconds,
            "nvfp4": now.nvfp4,
            **{name: ran.get(name) for name in ("blocks", "blocks_fused", "fallbacks", "lora_branches", "evaluations")},
        },
    }


def health() -> dict:
    """The answer of ``/h3bw/health``: that the process answers, and what it is."""
    return {
        "alive": True,
        "pack_version": pack_version(),
        "comfyui_version": comfyui_version.__version__,
        "device": device_kind(),
    }


def device_kind() -> str:
    """``cpu``, ``mps``, ``cuda``, ``rocm`` or ``gpu``, as ComfyUI decided at its start; asks no device."""
    kind = comfy.model_management.cpu_state.name.lower()
    if kind != "gpu":
        return kind
    return "cuda" if torch.version.cuda else "rocm" if torch.version.hip else kind


@functools.lru_cache(maxsize=1)
def pack_version() -> str | None:
    """The version in ``pyproject.toml``, or None where that file is missing."""
    try:
        text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    found = VERSION.search(text)
    return found[1] if found else None
