"""``H3BW_AttentionBackend``: an attention backend by name or ``auto``, as a patch on a cloned MODEL.

ComfyUI calls ``transformer_options["optimized_attention_override"](function, q, k, v, heads, ...)`` wherever a model
asks for attention. The override here takes the calls it can honour to the last word and hands every other one to the
override that was there before, or to ComfyUI's own function, with the reason counted in the run.
"""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..kernels import attention
from . import run

# Arguments of ComfyUI's attention functions that say nothing about the result when they have these values.
NEUTRAL = {
    "transformer_options": None,
    "_inside_attn_wrapper": None,
    "attn_precision": None,
    "preferred_attention": None,
    "enable_gqa": (False, None),
}


class AttentionOverride:
    """ComfyUI's override protocol around :mod:`kernels.attention`; holds names only, never a tensor."""

    def __init__(self, backend: str, previous=None):
        self.backend = backend
        self.previous = previous

    def __call__(self, function, *args, **kwargs):
        """Run the call on the chosen backend, or hand it on unchanged."""
        recorder = (kwargs.get("transformer_options") or {}).get(run.RUN)
        try:
            q, k, v, shape_out, scale = self._understand(*args, **kwargs)
            chosen, _ = attention.choose(self.backend, attention.Call.of(q, k, v, scale=scale))
        except NotOurs as why:
            return self._hand_on(function, str(why), recorder, args, kwargs)
        except attention.AttentionRefused as why:
            return self._hand_on(function, f"{why.name}: {why.reason}", recorder, args, kwargs)
        out = attention.run(chosen.name, q, k, v, scale=scale)
        if recorder is not None:
            recorder.attention[chosen.name] += 1
        return shape_out(out)

    def _hand_on(self, function, reason, recorder, args, kwargs):
        if recorder is not None:
            recorder.attention_handed_on[reason] += 1
        if self.previous is not None:
            return self.previous(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _understand(
        self, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
    ):
        """Turn a call of ComfyUI's into ``[B, H, S, D]`` tensors, or raise :class:`NotOurs` with the reason."""
        if mask is not None:
            raise NotOurs("the call has a mask")
        if attn_precision is not None:
            raise NotOurs(f"the call asks for {attn_precision} inside")
        scale = kwargs.pop("scale", None)
        if kwargs.pop("low_precision_attention", True) is False and not exact(self.backend):
            raise NotOurs("the call asks for full precision and the backend is approximate")
        for name, value in kwargs.items():
            if name not in NEUTRAL or (NEUTRAL[name] is not None and value not in NEUTRAL[name]):
                raise NotOurs(f"the call has an argument this version of the pack does not know: {name}")
        if not all(isinstance(tensor, torch.Tensor) for tensor in (q, k, v)):
            raise NotOurs(f"q, k and v are {type(q).__name__}, not tensors")
        if not all(tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) for tensor in (q, k, v)):
            raise NotOurs(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}")
        if not skip_reshape:
            shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
            if any(len(shape) != 3 or shape[-1] % heads for shape in shapes):
                raise NotOurs(f"q, k and v are {', '.join(map(str, shapes))} with {heads} heads")
            q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))

        def shape_out(out):
            return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

        return q, k, v, shape_out, scale


class NotOurs(Exception):
    """The call is one that the override hands on; the text is the reason."""


def exact(backend: str) -> bool:
    """Whether a backend name stands for exact attention (``auto`` chooses among exact ones only)."""
    return backend == attention.AUTO or any(name == backend and is_exact for name, is_exact, _ in _listed())


def _listed():
    return attention.list_backends(torch.device("cpu"))


def rung(record: run.Run) -> dict:
    """The report's rung on attention: passed when every call ran on the backend that was asked for."""
    handed_on = sum(record.attention_handed_on.values())
    ran = sum(record.attention.values())
    reasons = "; ".join(record.attention_handed_on)
    return {
        "rung": "attention on the backend asked for",
        "result": "passed" if ran and not handed_on else "skipped",
        "numbers": {**record.attention, "handed_on": handed_on},
        "reason": reasons or (None if ran else "no call reached the override: another node replaced it"),
    }


class AttentionBackend(io.ComfyNode):
    """Choose the attention backend of a model."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_AttentionBackend",
            display_name="H3 Attention Backend",
            category="H3 Blackwell/model",
            description=(
                "Chooses the attention backend. auto takes an exact one (full softmax attention with fp32 "
                "accumulation). A backend asked for by name runs, or the node stops with the reason; calls it cannot "
                "take, for instance with a mask, go to the exact path and are counted in the Runtime Report."
            ),
            search_aliases=["attention", "sage", "flash", "sdpa", "int8", "h3", "blackwell", "speed"],
            inputs=[
                io.Model.Input("model", tooltip="Any model; made for MiniMax H3."),
                io.Combo.Input(
                    "backend",
                    options=[attention.AUTO, *attention.names()],
                    default=attention.AUTO,
                    tooltip="auto, sdpa: exact. kitchen_int8: comfy-kitchen's INT8 kernel, approximate.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="A clone with the override; the input model is unchanged.")],
        )

    @classmethod
    def validate_inputs(cls, backend):
        """Answer for a name that this version does not have, as a workflow made elsewhere may hold one."""
        known = [attention.AUTO, *attention.names()]
        if backend is None or backend in known:  # None: it comes through a link and is judged when it arrives
            return True
        return f"{backend}: this version has no attention backend of that name; choose {' or '.join(known)}"

    @classmethod
    def execute(cls, model, backend) -> io.NodeOutput:
        refuse_here(backend, model.load_device)
        patched = model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        previous = options.get("optimized_attention_override")
        if isinstance(previous, AttentionOverride):
            previous = previous.previous  # ours again: replace it, never stack
        options["optimized_attention_override"] = AttentionOverride(backend, previous)
        run.attach(patched, "AttentionBackend", {"backend": backend, "exact": exact(backend)})
        return io.NodeOutput(patched)


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
