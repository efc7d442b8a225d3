"""The backends of the folder: which there are, which load, and why one does not take a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from .. import discover
from . import probe
from .contract import AUTO, AttentionRefused, Backend, Call
from .operands import INT32_ELEMENTS

FIRST = "sdpa"  # runs everywhere: what `auto` is where nothing can be measured


def names() -> list[str]:
    """Return the backends' names, exact ones first. Reads the folder and loads no backend."""
    return list(known()[0])


def backends() -> list[Backend]:
    """Return the backends' records in the order of :func:`names`."""
    return list(known()[0].values())


@functools.cache
def known() -> tuple[dict[str, Backend], dict[str, str]]:
    """Read ``backends/``: ``(name -> record, exact ones first; file -> why it is no backend)``."""
    from . import backends as folder

    modules, broken = discover.modules(folder)
    broken = dict(broken)
    records = {}
    for name, module in modules.items():
        single = getattr(module, "BACKEND", None)
        found = (single,) if single is not None else getattr(module, "BACKENDS", ())
        if found and all(isinstance(record, Backend) and belongs(record.name, name) for record in found):
            records.update((record.name, record) for record in found)
        else:
            broken[name] = f"{name}.py must hold BACKEND = Backend(name={name!r}, ...), has {single!r}"
    order = sorted(records.items(), key=lambda item: (not item[1].exact, item[0] != FIRST, item[0]))
    return dict(order), broken


def belongs(backend: str, file: str) -> bool:
    """Whether a backend of that name may come from that file."""
    return backend == file or backend.startswith(f"{file}_")


def list_backends(device: torch.device | str) -> list[tuple[str, bool, str | None]]:
    """Return ``(name, exact, why it cannot run on device or None)`` for every backend and every file that is broken.

    The question put to each is H3's own call: ``[1, 56, 512, 128]``, bfloat16, packed, no mask, default scale. Nothing
    is launched: a backend that has not been probed on the device yet counts as one that runs.
    """
    records, _ = known()
    shape, stride = (1, 56, 512, 128), (56 * 512 * 128, 512 * 128, 128, 1)
    call = Call(torch.device(device), torch.bfloat16, shape, shape, shape, stride, stride, stride)
    return [(name, name in records and records[name].exact, why) for name, why in explain(call).items()]


def explain(call: Call) -> dict[str, str | None]:
    """Return ``{name: reason, or None where the backend takes the call}``, broken backend files included."""
    records, broken = known()
    return {**{name: refusal(backend, call) for name, backend in records.items()}, **broken}


def refused(name: str, reason: str, call: Call) -> AttentionRefused:
    """The error for a name that does not run ``call``, with what can be asked for instead."""
    return AttentionRefused(name, reason, takers(call))


def named(name: str, call: Call) -> Backend:
    """The backend of that name; raises :class:`AttentionRefused` where there is none or it does not take the call."""
    records, broken = known()
    if name in records:
        reason = refusal(records[name], call)
        if reason is None:
            return records[name]
    elif name in broken:
        reason = broken[name]
    else:
        reason = f"this version has no attention backend of that name; it has {', '.join(records)}"
    raise refused(name, reason, call)


@functools.cache
def loaded(backend: Backend) -> tuple[Callable | None, str | None]:
    """Load a backend once per process: ``(function, None)`` or ``(None, reason)``."""
    try:
        return backend.load(), None
    except ModuleNotFoundError as error:
        return None, f"not installed ({discover.without_paths(str(error))})"
    except Exception as error:  # a probe: packages raise OSError, AssertionError and worse when they do not fit
        return None, f"does not load ({discover.reason(error)})"


def refusal(backend: Backend, call: Call) -> str | None:
    """Why a backend does not take a call, as far as is known without launching anything."""
    malformed = malformation(call)
    if malformed is not None:
        return malformed
    function, reason = loaded(backend)
    if function is None:
        return reason
    packed = max(math.prod(call.q_shape[1:]), math.prod(call.k_shape[1:]))
    if backend.int32_offsets and packed > INT32_ELEMENTS:
        return f"one batch entry must hold at most 2^31 elements, has {packed}; lower the length or the size"
    try:
        reason = backend.refuse(call)
    except Exception as error:  # a probe: the question itself may fail in a broken package
        return f"cannot be asked ({discover.reason(error)})"
    return reason or probe.known_refusal(backend, call.device)


def malformation(call: Call) -> str | None:
    """Why no backend here takes the call: what the functions' four arguments cannot express."""
    q, k, v = call.q_shape, call.k_shape, call.v_shape
    if call.mask:
        return "takes no mask, the call has one"
    if len(q) != 4 or len(k) != 4 or v != k or q[:2] != k[:2] or q[3] != k[3] or 0 in (*q, *k):
        return (
            "q must be [B, H, Sq, D] and k and v [B, H, Sk, D] with the same B, H and D and no empty dimension, "
            f"have {list(q)}, {list(k)} and {list(v)}"
        )
    if call.scale is not None and not math.isfinite(call.scale):
        return f"scale must be a finite number, have {call.scale}"
    return None


def takers(call: Call) -> tuple[str, ...]:
    """What can be asked for ``call``; ``"auto"`` last where an exact backend takes it."""
    found = [backend for backend in backends() if refusal(backend, call) is None]
    return (
        *(backend.name for backend in found if not backend.opt_in),
        *([AUTO] if any(backend.exact for backend in found) else []),
    )
