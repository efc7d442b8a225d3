"""What runs, told to the browser that queued it: one small event over ComfyUI's own websocket.

    {"type": "h3bw.status", "data": {"schema": "h3bw-status/1", "state": "running", "nodes": {"FuseBlocks": "12"}, ...}}

Sent when sampling begins, at most twice a second while it goes on, and when it ends. It holds what the recorder of the
run (:mod:`.run`) has counted on the host by then: nothing here reads from the GPU or waits for it, so the seconds are
the host's clock. Nothing is kept and nothing can be asked for; without a server (a script, a test) nothing happens.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable

import torch
from comfy_execution.utils import get_executing_context

from ..kernels import certify

EVENT = "h3bw.status"
SCHEMA = "h3bw-status/1"
LEAST_GAP_S = 0.5
MOST_ENTRIES = 20  # of a list: the event stays small whatever went wrong
LONGEST_TEXT = 500

log = logging.getLogger("h3bw")


def executing() -> tuple[str | None, str | None]:
    """``(prompt id, node id)`` of what ComfyUI executes now; None each outside of a queue."""
    context = get_executing_context()
    return (context.prompt_id, context.node_id) if context is not None else (None, None)


def running_server():
    """ComfyUI's server object, or None. Looked up, not imported: importing it would make one where there is none."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


class Channel:
    """The way from one sampling run to the browser; made when it begins, dropped when it ends."""

    def __init__(self, server, device: torch.device):
        self._server = server
        self._device = device
        self._client = getattr(server, "client_id", None)
        self._prompt, _ = executing()
        self._certification = certification(device)
        self._sent_at = 0.0

    def tell(self, run) -> None:
        """Send the state of ``run`` now. What goes wrong is logged: sampling must not end for a message."""
        self._sent_at = time.perf_counter()
        try:
            data = {"prompt_id": self._prompt, **message(run, self._device), "certification": self._certification}
            self._server.send_sync(EVENT, data, self._client)
        except Exception as error:
            log.debug("H3 Blackwell: no status was sent: %s", error)

    def tell_sometimes(self, run) -> None:
        """Send it when the last one is :data:`LEAST_GAP_S` old."""
        if time.perf_counter() - self._sent_at >= LEAST_GAP_S:
            self.tell(run)


def open_channel(device: torch.device) -> Channel | None:
    """A channel for a run on ``device``, or None where nobody listens."""
    server = running_server()
    return Channel(server, device) if server is not None else None


def certification(device: torch.device) -> dict:
    """How many implementations are certified on a device, and which are refused and why; never probes."""
    certified, refused = certify.tally(device)
    return {
        "needed": certify.needs(device),
        "certified": certified,
        "refused": few({name: short(entry[name]) for name in ("op", "implementation", "reason")} for entry in refused),
    }


def message(run, device: torch.device) -> dict:
    """The counts and reasons of a :class:`run.Run`, shortened."""
    reasons: dict[str, dict] = {}
    for (block, reason), calls in list(run.fallbacks.items()):
        entry = reasons.setdefault(reason, {"reason": short(reason), "blocks": 0, "first": block, "calls": 0})
        entry["blocks"] += 1
        entry["first"] = min(entry["first"], block)
        entry["calls"] += calls
    whole = set(run.fused) - {block for block, _ in run.fallbacks}
    bf16 = [
        {"linear": linear, "reason": short(reason), "calls": calls}
        for (linear, reason), calls in list(run.bf16_inputs.items())
    ]
    return {
        "schema": SCHEMA,
        "state": run.state,
        "nodes": dict(run.nodes),
        "settings": {name: shortened(settings) for name, settings in run.settings.items()},
        "device": run.device,
        "steps": run.steps,
        "seconds": round(run.elapsed(), 3),
        "blocks": run.blocks,
        "fused": len(whole),
        "fallbacks": few(reasons.values()),
        "bf16_inputs": few(bf16),
        "side_branches": counts(run.side),
        "attention": counts(run.attention),
        "attention_handed_on": counts(run.attention_handed_on),
        "attention_dense": counts(run.attention_dense),
        "attention_choices": few(short(choice["text"]) for choice in list(run.attention_choices.values())),
        "first_nonfinite": run.nonfinite and dict(zip(("step", "block"), run.nonfinite, strict=True)),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def counts(counter) -> list[dict]:
    """``name -> calls`` as a list to read in order."""
    return few({"name": short(name), "calls": calls} for name, calls in list(counter.items()))


def few(entries: Iterable) -> list:
    """The first :data:`MOST_ENTRIES`."""
    return list(entries)[:MOST_ENTRIES]


def short(text) -> str:
    """A text that a panel can show."""
    text = str(text)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def shortened(value):
    """JSON-ready data with its texts and lists cut."""
    if isinstance(value, dict):
        return {short(key): shortened(item) for key, item in list(value.items())[:MOST_ENTRIES]}
    if isinstance(value, list | tuple | set | frozenset):
        return few(shortened(item) for item in value)
    return value if isinstance(value, bool | int | float) or value is None else short(value)
