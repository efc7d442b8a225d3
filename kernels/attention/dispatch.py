"""From a request and tensors to a result: choose, fix what the kernel cannot read, launch on the tensors' device.

All of that is decided once for a request, shapes, strides, dtypes and device; a later call like it costs a lookup.
Nothing here keeps a tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import certify
from . import auto, probe, registry
from .contract import AUTO, LAYOUTS, AttentionRefused, Backend, Call, Request
from .operands import ALIGNABLE, Fixes, address, fixes_for, layout_of

MOST_PLANS = 512
NOWHERE = contextlib.nullcontext()
ALIGNMENT = 64  # bytes: the largest that a backend asks for


@dataclass(frozen=True)
class Plan:
    """How calls of one shape run.

    Attributes:
        backend: its record.
        function: ``function(q, k, v, scale, **options)``.
        scale: for it.
        options: for it.
        layout: the layout that was resolved.
        fixes: what is copied before each call.
        decision: what ``auto`` measured, or None.
        passed_over: backend that ``auto`` would rather have taken -> why not.
    """

    backend: Backend
    function: Callable
    scale: float | None
    options: dict
    layout: str
    fixes: Fixes
    decision: auto.Decision | None = None
    passed_over: tuple[tuple[str, str], ...] = ()


_plans: dict[tuple, Plan] = {}


def forget() -> None:
    """Forget every plan and decision in memory (files and certificates stay)."""
    _plans.clear()
    auto.forget()


def nothing() -> None:
    """What runs between timed calls when the caller has nothing to check."""


def choose(name: str, call: Call) -> tuple[Backend, dict[str, str]]:
    """Return the backend that runs ``call`` when ``name`` is asked for and nothing has been measured.

    Args:
        name: a backend's name, or ``"auto"`` for the first exact backend that does not refuse.
        call: the call to place.

    Returns:
        ``(backend, {backend passed over on the way: reason})``; the second is empty for a backend asked for by name.

    Raises:
        AttentionRefused: the backend cannot take the call, no exact one can, or there is none of that name.
    """
    if name != AUTO:
        return registry.named(name, call), {}
    passed_over = {}
    for backend in registry.backends():
        if backend.exact and not backend.opt_in:
            reason = registry.refusal(backend, call)
            if reason is None:
                return backend, passed_over
            passed_over[backend.name] = reason
    reason = "no exact backend takes this call: " + "; ".join(f"{who}: {why}" for who, why in passed_over.items())
    raise registry.refused(name, reason, call)


def run(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    layout: str = "auto",
    **options: float,
) -> torch.Tensor:
    """Compute ``softmax(q k^T * scale) v`` with the backend ``name``.

    Args:
        name: a backend's name or ``"auto"``.
        q: ``[B, H, Sq, D]``, any strides.
        k, v: ``[B, H, Sk, D]``, any strides. q and k may have another floating dtype than v (H3's q and k leave an fp32
            norm): the computation runs in v's dtype.
        scale: factor on ``q k^T``; None means ``D ** -0.5``.
        layout: ``"auto"``, ``"strided_nhd"`` and ``"native"`` hand the tensors on as they are and copy only one that
            the kernel cannot address; ``"contiguous"`` packs all three in the kernel's own order first.
        options: for a backend that takes some (``tau`` of ``sol``); an unknown one is refused.

    Returns:
        ``[B, H, Sq, D]`` in v's dtype, on the tensors' device, which is also the device the kernel is launched on.

    Raises:
        AttentionRefused: see :func:`choose`; also tensors on different devices, and q or k in integers or 8 bits.
    """
    request = Request(name, layout, scale, tuple(sorted(options.items())))
    tensors = [q, k, v]
    return execute(plan_for(request, tensors), tensors)


def plan_for(request: Request, tensors: list[torch.Tensor], between: Callable[[], None] = nothing) -> Plan:
    """How a call runs, for callers that make many: a lookup, except for the first of its kind.

    Args:
        request: what is wanted.
        tensors: ``[q, k, v]``.
        between: called between timed calls when ``auto`` has to measure; raises to cancel.

    Raises:
        AttentionRefused: see :func:`run`.
    """
    q, k, v = tensors
    key = (
        request, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.shape, k.shape, v.shape,
        q.stride(), k.stride(), v.stride(),
        address(q) % ALIGNMENT, address(k) % ALIGNMENT, address(v) % ALIGNMENT,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan, lasting = make_plan(request, (q, k, v), between)
        if lasting:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def execute(plan: Plan, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Run a call by the plan that :func:`plan_for` gave for it.

    The list is emptied: a caller that holds no other reference frees each tensor as soon as the kernel, or the copy
    that is made for it, no longer needs it.
    """
    shape, dtype, device = tensors[0].shape, tensors[2].dtype, tensors[2].device
    if plan.fixes.copies:
        plan.fixes.apply(tensors)
    tensors.reverse()
    # Triton and most extensions launch on the current device, whatever device their arguments are on.
    with torch.cuda.device(device) if device.type == "cuda" else NOWHERE:
        if plan.options:
            out = plan.function(tensors.pop(), tensors.pop(), tensors.pop(), plan.scale, **plan.options)
        else:
            # Without ** the interpreter moves the arguments into the function's frame: what it deletes is freed.
            out = plan.function(tensors.pop(), tensors.pop(), tensors.pop(), plan.scale)
    if out.shape != shape:
        raise AttentionRefused(plan.backend.name, f"returned shape {tuple(out.shape)}, expected {tuple(shape)}")
    return out if out.dtype == dtype else out.to(dtype)


def make_plan(request: Request, tensors: tuple[torch.Tensor, ...], between) -> tuple[Plan, bool]:
    """Decide how calls like this one run; False beside it for a plan that the next call should make again."""
    q, k, v = tensors
    name = request.name
    if request.layout not in LAYOUTS:
        raise AttentionRefused(name, f"layout must be {' or '.join(LAYOUTS)}, have {request.layout!r}")
    if not q.device == k.device == v.device:
        raise AttentionRefused(name, f"q, k and v must be on one device, have {q.device}, {k.device} and {v.device}")
    if q.dtype not in ALIGNABLE or k.dtype not in ALIGNABLE:
        raise AttentionRefused(name, f"q and k must be plain floating point, have {q.dtype} and {k.dtype}")
    call = Call.of(q, k, v, scale=request.scale)
    if name != AUTO:
        backend = registry.named(name, call)
        reason = probe.refusal(backend, registry.loaded(backend)[0], call.device)
        if reason is not None:
            raise registry.refused(name, reason, call)
        return planned(request, backend, tensors), True
    return plan_auto(request, call, tensors, between)


def plan_auto(request: Request, call: Call, tensors, between) -> tuple[Plan, bool]:
    """The plan of the fastest candidate, or of the first exact one where nothing may be measured."""
    fallback, passed_over = choose(AUTO, call)
    if not auto.measurable(call.device):
        return planned(request, fallback, tensors, passed_over=passed_over), True
    candidates, passed_over = {}, {}
    for backend in registry.backends():
        if backend.opt_in or not backend.measured or not (backend.exact or request.max_error is not None):
            continue
        reason = registry.refusal(backend, call) or probe.refusal(backend, registry.loaded(backend)[0], call.device)
        if reason is None:
            candidates[backend.name] = backend, launcher(planned(request, backend, tensors))
        else:
            passed_over[backend.name] = reason
    decision = auto.decide(request, tensors, candidates, between) if candidates else None
    if decision is None:
        busy = certify.busy(certify.indexed(call.device)) is not None  # then it is measured another time
        return planned(request, fallback, tensors, passed_over=passed_over), not busy
    backend = candidates[decision.chosen][0]
    return planned(request, backend, tensors, decision, passed_over), True


def launcher(plan: Plan) -> Callable:
    """``function(q, k, v)`` that runs a plan on tensors like the ones it was made for, copies included."""

    def launch(q, k, v):
        tensors = [q, k, v]
        plan.fixes.apply(tensors)
        return plan.function(*tensors, plan.scale, **plan.options)

    return launch


def planned(request: Request, backend: Backend, tensors, decision=None, passed_over=None) -> Plan:
    """The plan for one backend."""
    layout = layout_of(backend, request.layout)
    fixes = fixes_for(backend, layout, tensors, tensors[2].dtype)
    options = options_for(backend, request)
    function = registry.loaded(backend)[0]
    return Plan(backend, function, request.scale, options, layout, fixes, decision, tuple((passed_over or {}).items()))


def options_for(backend: Backend, request: Request) -> dict:
    """The backend's options: what was asked, else the defaults.

    ``auto`` hands each candidate those of the options that it takes.
    """
    asked = dict(request.options)
    known = {option.name: option for option in backend.options}
    unknown = sorted(asked.keys() - known.keys())
    if unknown and request.name != AUTO:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise AttentionRefused(backend.name, f"has no option {', '.join(unknown)}; {takes}")
    for name in asked.keys() & known.keys():
        option, value = known[name], asked[name]
        if not (isinstance(value, (int, float)) and math.isfinite(value) and option.least <= value <= option.most):
            raise AttentionRefused(
                backend.name, f"{name} must be from {option.least:g} to {option.most:g}, have {value!r}"
            )
    return {name: asked.get(name, option.default) for name, option in known.items()}


def ensure(device: torch.device | str, names: list[str] | None = None) -> None:
    """Probe backends on a device now, at patch time, so that sampling only reads.

    Args:
        device: any; a CPU needs no probe.
        names: those; None probes every exact one that ``auto`` may take.
    """
    device = certify.indexed(device)
    if not certify.needs(device):
        return
    for backend in registry.backends():
        wanted = backend.name in names if names is not None else backend.exact and not backend.opt_in
        function, _ = registry.loaded(backend) if wanted else (None, None)
        if function is not None:
            probe.refusal(backend, function, device)
