"""Give linears another forward while a model is sampled, and at no other time.

What is to be attached rides in the model's ``transformer_options`` as an entry of the patches list ``KEY``, so it
follows the ``MODEL`` and disappears with it; ComfyUI's core never reads that list. The forwards of the shared modules
are replaced when sampling has loaded the model and put back when it ends, also by an exception or a cancel. So another
branch of the graph, a bypass of the node or a later run finds the modules as they were, and nothing has to be reloaded:
ComfyUI compares neither patches lists nor these wrappers when it asks whether two models share their weights.

Three wrappers do it. Attaching has to wait until the model is loaded, because loading puts object patches of other
nodes in place; it cannot wait for the first step, because the text states go through the refiner before it. The forward
itself attaches what is missing: a multi-GPU clone has modules of its own, and a node may call a model without ComfyUI's
sampling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import comfy.patcher_extension
import torch

from . import adapt, run

KEY = "h3bw_attached"
SESSION = "h3bw_attached_now"  # transformer_options[SESSION]: the Session of the sampling run


class Attachment(Protocol):
    """What an entry of the list can do. ``begin`` and ``end`` are optional and run outside of any forward."""

    def replacements(self, dit: torch.nn.Module, record: run.Run | None) -> list[tuple[torch.nn.Module, Callable]]:
        """``(linear, make)`` for every linear of this entry; ``make(forward)`` returns the forward to use instead."""


class Session(contextlib.ExitStack):
    """What is attached for one sampling run, and to which model."""

    dit: torch.nn.Module | None = None


def entries(patcher_or_options) -> list[Attachment]:
    """The attachments of a ``ModelPatcher`` or of a ``transformer_options`` dict, in the order of the graph."""
    options = patcher_or_options
    if not isinstance(options, dict):
        options = patcher_or_options.model_options.get("transformer_options", {})
    return options.get("patches", {}).get(KEY, [])


def install(patcher, replaced: list[Attachment]) -> None:
    """Make ``replaced`` the attachments of a fresh clone and install the wrappers."""
    options = patcher.model_options.setdefault("transformer_options", {})
    options["patches"] = {**options.get("patches", {}), KEY: list(replaced)}
    table = options.setdefault("wrappers", {})
    kinds = comfy.patcher_extension.WrappersMP
    for kind, wrapper in (
        (kinds.OUTER_SAMPLE, _around_sampling),
        (kinds.PREPARE_SAMPLING, _after_loading),
        (kinds.DIFFUSION_MODEL, _around_forward),
    ):
        # Assigned, not appended: our nodes twice in a row must not wrap twice.
        table.setdefault(kind, {})[KEY] = [wrapper]


def attached(dit: torch.nn.Module, options: dict):
    """Context manager: the forwards of ``dit`` as the entries of ``options`` want them.

    One list for each linear, in the order of the entries, so that the first entry's forward lies innermost.
    """
    found: list[tuple[torch.nn.Module, Callable]] = []
    for entry in merged(entries(options)):
        found += entry.replacements(dit, options.get(run.RUN))
    return adapt.replacing_forwards(found)


def merged(found: list[Attachment]) -> list[Attachment]:
    """Entries of one kind that can act as one (two LoRAs: one update of y) put together at the first one's place.

    Also across an entry of another kind: what only watches must not change how LoRAs around it round.
    """
    out: list[Attachment] = []
    for entry in found:
        at = next((i for i, other in enumerate(out) if type(other) is type(entry) and hasattr(other, "joined")), None)
        if at is None:
            out.append(entry)
        else:
            out[at] = out[at].joined(entry)
    return out


def _around_sampling(executor, *args, **kwargs):
    guider = executor.class_obj
    options = guider.model_options.get("transformer_options", {})
    found = entries(options)
    with contextlib.ExitStack() as stack:
        for entry in found:
            if hasattr(entry, "begin"):
                entry.begin(guider.model_patcher)
                stack.callback(entry.end)
        options[SESSION] = stack.enter_context(Session())
        try:
            return executor(*args, **kwargs)
        finally:
            options.pop(SESSION).close()


def _after_loading(executor, model, *args, **kwargs):
    out = executor(model, *args, **kwargs)
    options = model.model_options.get("transformer_options", {})
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict) and "transformer_options" in value:
            options = value["transformer_options"]  # the guider's own copy
    session = options.get(SESSION)
    if session is not None:
        # A wrapper of another node may sample twice inside of ours; the forwards must not be wrapped twice.
        session.close()
        session.dit = model.model.diffusion_model
        session.enter_context(attached(session.dit, options))
    return out


def _around_forward(executor, *args, **kwargs):
    dit = executor.class_obj
    for options in (*args, *kwargs.values()):
        if isinstance(options, dict) and entries(options):
            if SESSION in options and options[SESSION].dit is dit:
                break
            with attached(dit, options):
                return executor(*args, **kwargs)
    return executor(*args, **kwargs)
