"""What really ran: one :class:`Run` per patched model, filled while it samples and read by ``H3BW_RuntimeReport``.

The run rides in the model's ``transformer_options``, so it follows the ``MODEL`` through later nodes and into the
forward, and disappears with it. Two wrappers feed it. They are put into ``transformer_options`` too, not into the
patcher's own table: ComfyUI compares that table to decide whether two models share their weights, and an A/B pair must
not be reloaded because one side has a recorder.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field

import comfy.patcher_extension
import torch

from . import status

RUN = "h3bw_run"  # transformer_options[RUN]: the Run of this model
DIT = "h3bw_dit"  # transformer_options[DIT]: the MiniMaxH3Model whose forward is running
FORWARD = (
    "h3bw_forward"  # transformer_options[FORWARD]: a dict that lives for one forward, for what is asked once in it
)
BLOCK = "block"  # transformer_options[FORWARD][BLOCK]: the block that is running, where a patch of ours saw it
WRAPPER_KEY = "h3bw"

log = logging.getLogger("h3bw")
_latest: dict | None = None


@dataclass
class Run:
    """Counts and reasons of the last sampling run of one model.

    Attributes:
        settings: what each of our nodes was set to, in the order of the graph.
        nodes: the id in the graph of the node that each entry of ``settings`` comes from, where there is a graph.
        state: ``"not started"``, ``"running"``, ``"finished"``, or ``"interrupted"`` (an exception or a cancel).
        steps: model evaluations so far (two a sampling step where a guider asks for a negative too).
        seconds: wall time of the run, host clock, sampling only.
        fused: block index -> calls that ran fused.
        fallbacks: ``(block index, reason)`` -> calls that ran in ComfyUI's own code.
        bf16_inputs: ``(linear, reason)`` -> times a linear of a fused block got bf16 instead of NVFP4.
        side: what a LoRA side branch was computed from -> calls.
        attention: backend that ran -> calls.
        attention_handed_on: reason -> calls handed to the next attention function.
        attention_dense: reason -> calls that ran exact although an approximate backend was asked for.
        attention_copies: ``(backend, what was copied and why)`` -> ``[calls, copies, bytes]`` made before its kernel.
        attention_choices: what ``auto`` chose, one line and the evidence for each kind of call.
        nonfinite: ``(evaluation, block)`` of the first block output with an Inf or a NaN, or None.
        peak_bytes: most device memory that torch held at once during the run, or None without CUDA.
    """

    settings: dict[str, dict] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    state: str = "not started"
    steps: int = 0
    seconds: float = 0.0
    blocks: int = 0
    device: str = ""
    fused: Counter = field(default_factory=Counter)
    fallbacks: Counter = field(default_factory=Counter)
    bf16_inputs: Counter = field(default_factory=Counter)
    side: Counter = field(default_factory=Counter)
    attention: Counter = field(default_factory=Counter)
    attention_handed_on: Counter = field(default_factory=Counter)
    attention_dense: Counter = field(default_factory=Counter)
    attention_copies: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    attention_choices: dict[str, dict] = field(default_factory=dict)
    nonfinite: tuple[int, int] | None = None
    peak_bytes: int | None = None
    _flags: torch.Tensor | None = field(default=None, repr=False)
    _extremes: torch.Tensor | None = field(default=None, repr=False)
    _of_patchers: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary, repr=False)
    _last: Run | None = field(default=None, repr=False)
    _started: float | None = field(default=None, repr=False)
    _channel: status.Channel | None = field(default=None, repr=False)

    def of(self, patcher) -> Run:
        """The run of one patcher: clones made by later nodes share ours, but each sampled one has its own record."""
        return self._of_patchers.setdefault(patcher, Run(settings=self.settings, nodes=self.nodes))

    def begin(self, device: torch.device, blocks: int) -> None:
        """Forget the last run and take what this one needs on the device (outside of any forward)."""
        self.__dict__.update(Run(settings=self.settings, nodes=self.nodes).__dict__)
        self.state, self.blocks, self.device = "running", blocks, str(device)
        self._started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._flags = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._extremes = torch.zeros(2, blocks, dtype=torch.bfloat16, device=device)
        self._channel = status.open_channel(device)
        if self._channel is not None:
            self._channel.tell(self)

    def elapsed(self) -> float:
        """Seconds of the run so far, or of the whole run once it has ended."""
        running = self.state == "running" and self._started is not None
        return time.perf_counter() - self._started if running else self.seconds

    def attended(self, plan) -> None:
        """Count a call that ran by ``plan`` (:class:`kernels.attention.Plan`); cheap, on every call."""
        name = plan.backend.name
        self.attention[name] += 1
        if plan.fixes.copies:
            seen = self.attention_copies.setdefault((name, "; ".join(plan.fixes.reasons)), [0, 0, 0])
            seen[0] += 1
            seen[1] += plan.fixes.copies
            seen[2] += plan.fixes.copied_bytes
        if plan.decision is not None and plan.decision.kind not in self.attention_choices:
            text = str(plan.decision)
            self.attention_choices[plan.decision.kind] = {
                "text": text, **plan.decision.as_dict(), "passed_over": dict(plan.passed_over),
            }  # fmt: skip

    def watch(self, block: int, out: torch.Tensor) -> None:
        """Note the extremes of a block's output on the device: one read of it, one launch, no wait, nothing kept."""
        extremes = self._extremes
        if extremes is None or not isinstance(out, torch.Tensor) or out.device != extremes.device or out.numel() == 0:
            return
        low, high = extremes[0, block], extremes[1, block]
        if out.dtype == extremes.dtype:
            torch.aminmax(out.detach(), out=(low, high))
        else:
            for kept, value in zip((low, high), torch.aminmax(out.detach()), strict=True):
                kept.copy_(value)

    def stepped(self) -> None:
        """A model evaluation has been issued: tell the browser, now and then, and look over the blocks' outputs.

        A block is marked whose output was not finite in this evaluation, where none was before.
        """
        if self._channel is not None:
            self._channel.tell_sometimes(self)
        flags, extremes = self._flags, self._extremes
        if flags is None:
            return
        bad = ~torch.isfinite(extremes).all(dim=0)
        flags.copy_(torch.where(bad & (flags == 0), self.steps, flags))
        extremes.zero_()

    def end(self, finished: bool) -> None:
        """Close the run: read the flags, take the time, log one line."""
        self.seconds = time.perf_counter() - self._started
        self.state = "finished" if finished else "interrupted"
        flags, self._flags, self._extremes = self._flags, None, None
        if finished and flags is not None:
            hits = [(step, block) for block, step in enumerate(flags.tolist()) if step]
            self.nonfinite = min(hits) if hits else None
        if flags is not None and flags.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(flags.device)
        log.info("H3 Blackwell: %s", self.headline())
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.tell(self)

    def headline(self) -> str:
        """One line: ``fused 47/50 blocks; 3 fell back: <reason>; attention sdpa x 150``."""
        parts = []
        if "FuseBlocks" in self.settings:
            whole = len(self.fused)
            parts.append(f"fused {whole}/{self.blocks} blocks")
            reasons: dict[str, set[int]] = {}
            for block, reason in self.fallbacks:
                reasons.setdefault(reason, set()).add(block)
            parts += [f"{len(blocks)} fell back: {reason}" for reason, blocks in reasons.items()]
            unseen = self.blocks - len(set(self.fused) | {block for block, _ in self.fallbacks})
            if unseen and self.steps:
                parts.append(f"{unseen} never called: another patch replaced those blocks after ours")
        if self.side:
            parts.append(f"LoRA side branches x {sum(self.side.values())}")
        parts += [f"attention {name} x {count}" for name, count in self.attention.items()]
        parts += [f"attention dense x {count}: {reason}" for reason, count in self.attention_dense.items()]
        parts += [f"attention handed on x {count}: {reason}" for reason, count in self.attention_handed_on.items()]
        if self.nonfinite:
            step, block = self.nonfinite
            parts.append(f"block {block} is the first with a non-finite output, in evaluation {step}")
        if self.state == "interrupted":
            parts.append("interrupted")
        return "; ".join(parts) or "nothing of this pack ran"

    def as_dict(self) -> dict:
        """The run as JSON-ready data."""
        return {
            "state": self.state,
            "headline": self.headline(),
            "settings": self.settings,
            "device": self.device,
            "steps": self.steps,
            "seconds": round(self.seconds, 4),
            "blocks": self.blocks,
            "fused_calls": {str(block): count for block, count in sorted(self.fused.items())},
            "fallbacks": [
                {"block": block, "reason": reason, "calls": count}
                for (block, reason), count in sorted(self.fallbacks.items())
            ],
            "bf16_inputs": [
                {"linear": linear, "reason": reason, "calls": count}
                for (linear, reason), count in sorted(self.bf16_inputs.items())
            ],
            "side_branches": dict(self.side),
            "attention": dict(self.attention),
            "attention_handed_on": dict(self.attention_handed_on),
            "attention_dense": dict(self.attention_dense),
            "attention_copies": [
                {"backend": backend, "why": why, "calls": calls, "copies": copies, "bytes": written}
                for (backend, why), (calls, copies, written) in sorted(self.attention_copies.items())
            ],
            "attention_choices": list(self.attention_choices.values()),
            "first_nonfinite": self.nonfinite and dict(zip(("step", "block"), self.nonfinite, strict=True)),
            "peak_bytes": self.peak_bytes,
        }


def latest() -> dict | None:
    """:meth:`Run.as_dict` of the last run that ended in this process, whatever its model; holds no model."""
    return _latest


def find(patcher) -> Run | None:
    """The run of a ``MODEL``, or None when none of our nodes patched it.

    When this very patcher was not sampled but a later clone of it was, the last of those.
    """
    shared = patcher.model_options.get("transformer_options", {}).get(RUN)
    if shared is None:
        return None
    return shared._of_patchers.get(patcher) or shared._last or shared


def find_settings(patcher) -> dict[str, dict]:
    """The settings of our nodes on a ``MODEL`` so far; empty without any."""
    shared = patcher.model_options.get("transformer_options", {}).get(RUN)
    return shared.settings if shared is not None else {}


def sampled_with(patcher, run: Run) -> bool:
    """Whether ``run`` is of this very patcher, or of none yet."""
    shared = patcher.model_options.get("transformer_options", {}).get(RUN)
    return run is shared or shared._of_patchers.get(patcher) is run


def attach(patcher, name: str, settings: dict) -> Run:
    """Give a fresh clone a run of its own that remembers the settings of our nodes so far, and install the wrappers."""
    before = patcher.model_options.get("transformer_options", {}).get(RUN)
    options = patcher.model_options.setdefault("transformer_options", {})
    run = Run(
        settings={**(before.settings if before else {}), name: settings},
        nodes=dict(before.nodes) if before else {},
    )
    _, node = status.executing()
    if node is not None:
        run.nodes[name] = node
    options[RUN] = run
    table = options.setdefault("wrappers", {})
    kinds = comfy.patcher_extension.WrappersMP
    for kind, wrapper in ((kinds.OUTER_SAMPLE, _around_sampling), (kinds.DIFFUSION_MODEL, _around_forward)):
        # Assigned, not appended: our node twice in a row must not wrap twice.
        table.setdefault(kind, {})[WRAPPER_KEY] = [wrapper]
    return run


def once_a_forward(options: dict, key, ask: Callable):
    """``ask()``, once in a forward for each ``key``; each time where no wrapper of ours says that one is running.

    Args:
        options: transformer_options of the call.
        key: hashable; names what is asked, and with what.
    """
    forward = options.get(FORWARD)
    if forward is None:
        return ask()
    if key not in forward:
        forward[key] = ask()
    return forward[key]


def _around_sampling(executor, *args, **kwargs):
    global _latest
    guider = executor.class_obj
    options = guider.model_options.get("transformer_options", {})
    shared, patcher = options.get(RUN), getattr(guider, "model_patcher", None)
    if shared is None or patcher is None:
        return executor(*args, **kwargs)
    # The options are the guider's own copy for this sampling: the patches find this patcher's record in them.
    run = options[RUN] = shared._last = shared.of(patcher)
    blocks = getattr(getattr(patcher.model, "diffusion_model", None), "blocks", ())
    run.begin(patcher.load_device, len(blocks) if isinstance(blocks, Sized) else 0)
    finished = False
    try:
        out = executor(*args, **kwargs)
        finished = True
        return out
    finally:
        run.end(finished)
        _latest = run.as_dict()


def _around_forward(executor, *args, **kwargs):
    """Tell the patches which module is running (a multi-GPU clone has its own) and count the step."""

    forward: dict = {}

    def with_model(options):
        return {**options, DIT: executor.class_obj, FORWARD: forward}

    def ours(value):
        return isinstance(value, dict) and RUN in value

    run = next((value[RUN] for value in (*args, *kwargs.values()) if ours(value)), None)
    if run is not None:
        run.steps += 1
    forward["latents"] = args[0] if args else None
    args = [with_model(value) if ours(value) else value for value in args]
    kwargs = {name: with_model(value) if ours(value) else value for name, value in kwargs.items()}
    try:
        out = executor(*args, **kwargs)
        if run is not None:
            run.stepped()
        return out
    finally:
        forward.clear()  # it must not keep a latent alive
