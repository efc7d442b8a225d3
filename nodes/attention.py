"""``H3BW_AttentionBackend``: an attention backend by name or ``auto``, as a patch on a cloned MODEL.

The override takes the calls it can honour to the last word and hands every other one to the override that was there
before, or to ComfyUI's own function, with the reason counted in the run.
"""

from __future__ import annotations

import dataclasses
import math
import re

import comfy.model_management
import torch
from comfy_api.latest import io

from ..kernels import attention
from . import adapt_attention, run
from .fuse import BlockPatch

NotOurs = adapt_attention.NotOurs
SOL_DENSE_PERCENT = 20.0
MOST_BLOCKS = 10_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the node was set to.

    Attributes:
        backend: a name or ``auto``.
        layout: one of ``attention.LAYOUTS``.
        max_error: bound on the relative error of approximate backends that ``auto`` may take, or None.
        options: ``((name, value), ...)`` for the backend.
        exact_conditioning: text, keyframe and reference rows are sinks (backends with ``sink_rows``).
        dense_steps: share of the steps, from the first, in which an approximate backend is replaced by ``auto``.
        dense_blocks: blocks in which it is.
    """

    backend: str = attention.AUTO
    layout: str = "auto"
    max_error: float | None = None
    options: tuple[tuple[str, float], ...] = ()
    exact_conditioning: bool = False
    dense_steps: float = 0.0
    dense_blocks: frozenset[int] = frozenset()

    @property
    def exact(self) -> bool:
        """Whether nothing approximate can run."""
        return self.max_error is None and exact(self.backend)

    def as_dict(self) -> dict:
        """JSON-ready, what is off left out."""
        told = {"backend": self.backend, "exact": self.exact, "layout": self.layout}
        if not self.exact:
            told |= {
                **dict(self.options),
                "max_error": self.max_error,
                "exact_conditioning": self.exact_conditioning,
                "dense_steps": self.dense_steps,
                "dense_blocks": sorted(self.dense_blocks),
            }
        return told


def cancel() -> None:
    """Raise when the user has cancelled."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class AttentionOverride:
    """ComfyUI's override protocol around :mod:`kernels.attention`; holds settings only, never a tensor."""

    def __init__(self, settings: Settings | str, previous=None):
        self.settings = Settings(settings) if isinstance(settings, str) else settings
        self.previous = previous
        self.exact = self.settings.exact
        self._requests: dict[tuple, attention.Request] = {}

    def __call__(self, function, *args, **kwargs):
        """Run the call on the chosen backend, or hand it on unchanged."""
        options = kwargs.get("transformer_options") or {}
        recorder = options.get(run.RUN)
        try:
            tensors, scale, reshape = adapt_attention.understand(*args, **kwargs, exact=self.exact)
            dense = None if self.exact else self._dense(options)
            request = self._request(scale, dense is not None, options, tensors[0].shape[2])
            plan = attention.plan_for(request, tensors, cancel)
        except NotOurs as why:
            return self._hand_on(function, str(why), recorder, args, kwargs)
        except attention.AttentionRefused as why:
            return self._hand_on(function, f"{why.name}: {why.reason}", recorder, args, kwargs)
        adapt_attention.empty(args[:3])
        out = attention.execute(plan, tensors)
        if recorder is not None:
            recorder.attended(plan)
            if dense is not None:
                recorder.attention_dense[dense] += 1
        return adapt_attention.shaped(out, reshape)

    def _hand_on(self, function, reason, recorder, args, kwargs):
        if recorder is not None:
            recorder.attention_handed_on[reason] += 1
        return adapt_attention.hand_on(self.previous, function, args, kwargs)

    def _dense(self, options: dict) -> str | None:
        """Why this call runs exact although an approximate backend was asked for, or None."""
        settings = self.settings
        if settings.dense_blocks:
            if run.FORWARD not in options:
                return "the forward does not say which block this is"
            if adapt_attention.block_of(options) in settings.dense_blocks:
                return "a block that is kept dense"
        if settings.dense_steps > 0:
            behind = adapt_attention.progress(options)
            if behind is None:
                return "ComfyUI does not say which step this is"
            if behind < settings.dense_steps - 1e-9:
                return f"one of the first {settings.dense_steps:.0%} of the steps"
        return None

    def _request(self, scale, dense: bool, options: dict, rows: int) -> attention.Request:
        """The request of a call; made once for each scale and number of conditioning rows."""
        sinks = 0
        if self.settings.exact_conditioning and not dense:
            sinks = adapt_attention.conditioning_rows(options, rows)
        key = scale, dense, sinks
        found = self._requests.get(key)
        if found is None:
            settings = self.settings
            if dense:
                found = attention.Request(attention.AUTO, settings.layout, scale)
            else:
                sunk = (("sink_rows", sinks),) if settings.exact_conditioning else ()
                asked = tuple(sorted((*settings.options, *sunk)))
                found = attention.Request(settings.backend, settings.layout, scale, asked, settings.max_error)
            self._requests[key] = found
        return found


def exact(backend: str) -> bool:
    """Whether a backend name stands for exact attention (``auto`` chooses among exact ones unless told otherwise)."""
    return backend == attention.AUTO or any(record.name == backend and record.exact for record in attention.records())


def rung(record: run.Run) -> dict:
    """The report's rung on attention: passed when every call ran on the backend that was asked for."""
    handed_on = sum(record.attention_handed_on.values())
    ran = sum(record.attention.values())
    reasons = "; ".join(record.attention_handed_on)
    copies = list(record.attention_copies.values())
    return {
        "rung": "attention on the backend asked for",
        "result": "passed" if ran and not handed_on else "skipped",
        "numbers": {
            **record.attention,
            "handed_on": handed_on,
            "dense": sum(record.attention_dense.values()),
            "copies": sum(entry[1] for entry in copies),
            "copied_bytes": sum(entry[2] for entry in copies),
        },
        "reason": reasons or (None if ran else "no call reached the override: another node replaced it"),
    }


def lines(record: dict) -> list[str]:
    """What the report says of attention beside its headline; ``record`` is :meth:`run.Run.as_dict`."""
    told = [choice["text"] for choice in record["attention_choices"]]
    for entry in record["attention_copies"]:
        told.append(
            f"{entry['backend']}: {entry['copies']} copies, {entry['bytes'] / 2**20:.1f} MiB, in {entry['calls']} "
            f"calls: {entry['why']}"
        )
    if record["attention"] and not record["attention_copies"]:
        told.append("attention: no copy of q, k or v was made for a kernel")
    return told


def parse_blocks(text: str, count: int | None = None) -> frozenset[int]:
    """``"0, 49, 10-12"`` as block numbers.

    Raises:
        ValueError: no such list, or a block that the model does not have.
    """
    found: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", re.sub(r"\s*-\s*", "-", text.strip()))):
        span = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f"dense_blocks: {part[:40]!r} is no block; write numbers and spans, such as 0, 49, 10-12")
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    if count is not None and found and max(found) >= count:
        raise ValueError(f"dense_blocks: the model has blocks 0 to {count - 1}, {max(found)} was asked for")
    return frozenset(found)


def choices() -> list:
    """The backend menu: a name, and the inputs that only it has."""
    dense = [
        io.Float.Input(
            "dense_steps", default=0.0, min=0.0, max=100.0, step=5.0, optional=True,
            tooltip="Percent of the steps, from the first, that run exact attention instead.",
        ),
        io.String.Input(
            "dense_blocks", default="", optional=True,
            tooltip="Blocks that run exact attention instead, such as: 0, 49, 10-12. MiniMax H3 only.",
        ),
    ]  # fmt: skip
    allow = [
        io.Boolean.Input(
            "allow_approximate", default=False, optional=True,
            tooltip="Let auto take an approximate backend if it is faster and within max_error.",
        ),
        io.Float.Input(
            "max_error", default=0.02, min=0.0, max=1.0, step=0.005, optional=True,
            tooltip="Largest relative error against fp32 on your own q, k and v; 8-bit kernels are at about 0.015.",
        ),
    ]  # fmt: skip
    menu = [io.DynamicCombo.Option(attention.AUTO, [*allow, *dense])]
    for record in attention.records():
        inputs = [] if record.exact else list(dense)
        if record.options:
            inputs[0] = io.Float.Input(
                "dense_steps", default=SOL_DENSE_PERCENT, min=0.0, max=100.0, step=5.0, optional=True,
                tooltip=dense[0].tooltip,
            )  # fmt: skip
        for option in record.options:
            if option.name == "sink_rows":
                inputs.append(
                    io.Boolean.Input(
                        "exact_conditioning", default=True, optional=True,
                        tooltip="Every query attends exactly to the text, keyframe and reference rows of H3.",
                    )
                )  # fmt: skip
            else:
                inputs.append(
                    io.Float.Input(
                        option.name, default=option.default, min=option.least, max=option.most, step=option.step,
                        optional=True, tooltip=option.text,
                    )
                )  # fmt: skip
        menu.append(io.DynamicCombo.Option(record.name, inputs))
    return menu


def settings_of(backend: str | dict, layout: str, blocks: int | None) -> Settings:
    """The widgets as :class:`Settings`.

    Args:
        backend: the name, or what ComfyUI makes of the menu: ``{"backend": name, its inputs...}``.
        layout: a layout.
        blocks: how many the model has, or None when that is not known.

    Raises:
        ValueError: a name, a layout, a number or blocks that are none.
    """
    given = {k: v for k, v in backend.items() if v is not None} if isinstance(backend, dict) else {"backend": backend}
    name = given.get("backend")
    if not isinstance(name, str):
        raise ValueError(f"backend must be the name of a backend, is {_short(name)}")
    if layout not in attention.LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(attention.LAYOUTS)}, is {_short(layout)}")
    record = next((record for record in attention.records() if record.name == name), None)

    def number(key: str, default: float, most: float) -> float:
        try:
            value = float(given.get(key, default))
        except (TypeError, ValueError):
            raise ValueError(f"{key} must be a number, is {_short(given[key])}") from None
        if not (math.isfinite(value) and 0 <= value <= most):
            raise ValueError(f"{key} must be from 0 to {most:g}, have {value}")
        return value

    taken = record.options if record is not None else ()
    dense_blocks = parse_blocks(str(given.get("dense_blocks", "")), blocks)
    if dense_blocks and blocks is None:
        raise ValueError("dense_blocks: only a MiniMax H3 says which block runs; leave it empty for this model")
    return Settings(
        backend=name,
        layout=layout,
        max_error=number("max_error", 0.02, 1.0) if name == attention.AUTO and given.get("allow_approximate") else None,
        options=tuple(
            (option.name, number(option.name, option.default, option.most))
            for option in taken
            if option.name != "sink_rows"
        ),
        exact_conditioning=any(option.name == "sink_rows" for option in taken)
        and bool(given.get("exact_conditioning", True)),
        dense_steps=number("dense_steps", SOL_DENSE_PERCENT if taken else 0.0, 100.0) / 100,
        dense_blocks=dense_blocks,
    )


def _short(value) -> str:
    """A widget's value for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class AttentionBackend(io.ComfyNode):
    """Choose the attention backend of a model."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_AttentionBackend",
            display_name="H3 Attention Backend (Sage, Flash)",
            category="H3 Blackwell/model",
            description=(
                "Chooses the attention backend. auto times the exact ones (full softmax attention with fp32 "
                "accumulation) once for each kind of call on this GPU and keeps the fastest. A backend asked for by "
                "name runs, or the node stops with the reason; calls it cannot take, for instance with a mask, go to "
                "the exact path and are counted in the Runtime Report."
            ),
            search_aliases=["attention", "sage", "flash", "sdpa", "int8", "sol", "fa4", "h3", "blackwell", "speed"],
            inputs=[
                io.Model.Input("model", tooltip="Any model; made for MiniMax H3."),
                io.DynamicCombo.Input(
                    "backend",
                    options=choices(),
                    tooltip=" ".join(
                        f"{record.name}: {'exact' if record.exact else 'approximate'}, {record.summary}."
                        for record in attention.records()
                    ),
                ),
                io.Combo.Input(
                    "layout",
                    options=list(attention.LAYOUTS),
                    default="auto",
                    optional=True,
                    tooltip=(
                        "How q, k and v reach the kernel. strided_nhd, native: the views of the qkv buffer as they "
                        "are, copied only where the kernel cannot read them. contiguous: packed first. auto: "
                        "H3_SAGE_QKV_LAYOUT or H3_SOL_QKV_LAYOUT for those backends, else as they are."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="A clone with the override; the input model is unchanged.")],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, backend=None, layout="auto") -> io.NodeOutput:
        if backend is None:
            # ComfyUI drops a menu's value that is none of its options, for instance from another version's workflow.
            backend = asked_in_prompt(cls.hidden)
        settings = settings_of(backend, layout, adapt_attention.block_count(model))
        names = [settings.backend] if settings.backend != attention.AUTO else None
        for device in {part.load_device for part in (model, *model.get_additional_models_with_key("multigpu"))}:
            # Here and not in the first step: a probe may compile.
            attention.ensure(device, names)
            if not settings.exact:
                attention.ensure(device)
            refuse_here(settings.backend, device)
        patched = model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        previous = adapt_attention.installed(options)
        if isinstance(previous, AttentionOverride):
            previous = previous.previous  # ours again: replace it, never stack
        else:
            previous = options.get(adapt_attention.OVERRIDE)
        adapt_attention.install(patched, AttentionOverride(settings, previous))
        if settings.dense_blocks:
            adapt_attention.mark_blocks(patched, sorted(settings.dense_blocks), BlockPatch)
        run.attach(patched, "AttentionBackend", settings.as_dict())
        return io.NodeOutput(patched)


def asked_in_prompt(hidden) -> str:
    """The backend's value as it stands in the queued prompt, as text for an error."""
    prompt, at = getattr(hidden, "prompt", None), getattr(hidden, "unique_id", None)
    value = ((prompt or {}).get(str(at)) or {}).get("inputs", {}).get("backend")
    return value if isinstance(value, str) else "the linked value" if isinstance(value, list) else "nothing"


def refuse_here(backend: str, device: torch.device) -> None:
    """Stop before sampling when a backend asked for by name cannot run on the model's device at all."""
    if backend == attention.AUTO:
        return
    reasons = {name: reason for name, _, reason in attention.list_backends(device)}
    if backend not in reasons:
        reason = "this version has no attention backend of that name"
        raise attention.AttentionRefused(backend, reason, ("auto", *reasons))
    if reasons[backend] is not None:
        others = tuple(name for name, reason in reasons.items() if reason is None)
        raise attention.AttentionRefused(backend, reasons[backend], (*others, "auto"))
