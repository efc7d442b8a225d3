"""``out = softmax(q k^T * scale) v``: which implementation runs is chosen here, by name or by the word ``auto``.

Every file in ``backends/`` is one backend. A backend asked for by name runs or raises :class:`AttentionRefused` with
the reason and with the names that would have run; ``auto`` takes the first *exact* one that does not refuse. Exact
means full softmax attention with fp32 accumulation: such backends differ from one another by rounding only.

Tensors are ``[batch, heads, rows, head_dim]`` and may be strided views, for instance of H3's qkv buffer
``[1, rows, 3 * 56 * 128]``. There is no mask argument and no ``**kwargs``: what a backend cannot honour never reaches
it.

Nothing is imported, probed or set at import. No torch flag is touched.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import discover

AUTO = "auto"
LAYOUTS = ("auto", "contiguous")
ALIGNABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # 8-bit floats need a scale of their own
INT32_ELEMENTS = 2**31  # offsets at or past this do not fit a signed 32-bit number


class AttentionRefused(RuntimeError):
    """A backend cannot take a call.

    Attributes:
        name: what was asked for.
        reason: why it does not run.
        others: what can be asked for instead, ``"auto"`` last where it is among them.
    """

    def __init__(self, name: str, reason: str, others: tuple[str, ...] = ()):
        self.name, self.reason, self.others = name, reason, tuple(others)
        instead = f"; choose {' or '.join(self.others)}" if self.others else ""
        super().__init__(f"{name}: {reason}{instead}")


@dataclass(frozen=True)
class Call:
    """What is known about an attention call before it runs; made by :meth:`of` or by hand, to ask without tensors.

    Attributes:
        device: where the tensors are.
        dtype: the dtype it is computed and returned in, which is v's.
        q_shape, k_shape, v_shape: ``(batch, heads, rows, head_dim)``.
        q_stride, k_stride, v_stride: in elements.
        mask: whether the caller holds a mask.
        scale: factor on ``q k^T``; None means ``head_dim ** -0.5``.
    """

    device: torch.device
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    q_stride: tuple[int, ...]
    k_stride: tuple[int, ...]
    v_stride: tuple[int, ...]
    mask: bool = False
    scale: float | None = None

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: bool = False, scale: float | None = None):
        """Describe a call on these ``[B, H, S, D]`` tensors."""
        shapes = (tuple(tensor.shape) for tensor in (q, k, v))
        strides = (tuple(tensor.stride()) for tensor in (q, k, v))
        return cls(v.device, v.dtype, *shapes, *strides, mask=mask, scale=scale)

    @property
    def head_dim(self) -> int:
        """Length of one q, k or v row."""
        return self.q_shape[-1]


@dataclass(frozen=True)
class Backend:
    """What a file in ``backends/`` declares as ``BACKEND``.

    Attributes:
        name: also the file's name.
        exact: full softmax attention with fp32 accumulation.
        needs: what has to be installed, for people.
        load: imports what it needs and returns ``function(q, k, v, scale) -> out`` on ``[B, H, S, D]`` tensors of one
            dtype and device. May raise; the text becomes the reason, once per process.
        refuse: ``Call -> reason or None``, asked after ``load`` succeeded. It launches nothing.
        summary: one line for menus and tables.
        int32_offsets: its kernels may compute element offsets in 32 bits: tensors go through :func:`fit_int32` first.
    """

    name: str
    exact: bool
    needs: str
    load: Callable[[], Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]]
    refuse: Callable[[Call], str | None]
    summary: str
    int32_offsets: bool = False


def names() -> list[str]:
    """Return the backends' names, exact ones first. Reads the folder and loads no backend."""
    return list(_registry()[0])


def list_backends(device: torch.device | str) -> list[tuple[str, bool, str | None]]:
    """Return ``(name, exact, why it cannot run on device or None)`` for every backend and every file that is broken.

    The question put to each is H3's own call: ``[1, 56, 512, 128]``, bfloat16, packed, no mask, default scale.
    """
    known, _ = _registry()
    shape, stride = (1, 56, 512, 128), (56 * 512 * 128, 512 * 128, 128, 1)
    call = Call(torch.device(device), torch.bfloat16, shape, shape, shape, stride, stride, stride)
    return [(name, name in known and known[name].exact, why) for name, why in explain(call).items()]


def explain(call: Call) -> dict[str, str | None]:
    """Return ``{name: reason, or None where the backend takes the call}``, broken backend files included."""
    known, broken = _registry()
    return {**{name: _refusal(backend, call) for name, backend in known.items()}, **broken}


def choose(name: str, call: Call) -> tuple[Backend, dict[str, str]]:
    """Return the backend that runs ``call`` when ``name`` is asked for.

    Args:
        name: a backend's name, or ``"auto"`` for the first exact backend that does not refuse.
        call: the call to place.

    Returns:
        ``(backend, {backend passed over on the way: reason})``; the second is empty for a backend asked for by name.

    Raises:
        AttentionRefused: the backend cannot take the call, no exact one can, or there is none of that name.
    """
    known, broken = _registry()
    passed_over = {}
    if name == AUTO:
        for backend in (backend for backend in known.values() if backend.exact):
            reason = _refusal(backend, call)
            if reason is None:
                return backend, passed_over
            passed_over[backend.name] = reason
        reason = "no exact backend takes this call: " + "; ".join(f"{who}: {why}" for who, why in passed_over.items())
    elif name in known:
        reason = _refusal(known[name], call)
        if reason is None:
            return known[name], passed_over
    elif name in broken:
        reason = broken[name]
    else:
        reason = f"this version has no attention backend of that name; it has {', '.join(known)}"
    raise AttentionRefused(name, reason, _takers(call))


def run(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    layout: str = "auto",
) -> torch.Tensor:
    """Compute ``softmax(q k^T * scale) v`` with the backend ``name``.

    Args:
        name: a backend's name or ``"auto"``.
        q: ``[B, H, Sq, D]``, any strides.
        k, v: ``[B, H, Sk, D]``, any strides. q and k may have another floating dtype than v (H3's q and k leave an fp32
            norm): the computation runs in v's dtype.
        scale: factor on ``q k^T``; None means ``D ** -0.5``.
        layout: ``"auto"`` hands the tensors on as they are and copies only one that the kernel cannot address;
            ``"contiguous"`` packs all three first.

    Returns:
        ``[B, H, Sq, D]`` in v's dtype, on the tensors' device, which is also the device the kernel is launched on.

    Raises:
        AttentionRefused: see :func:`choose`; also tensors on different devices, and q or k in integers or 8 bits.
    """
    if layout not in LAYOUTS:
        raise AttentionRefused(name, f"layout must be {' or '.join(LAYOUTS)}, have {layout!r}")
    if not q.device == k.device == v.device:
        raise AttentionRefused(name, f"q, k and v must be on one device, have {q.device}, {k.device} and {v.device}")
    if q.dtype not in ALIGNABLE or k.dtype not in ALIGNABLE:
        raise AttentionRefused(name, f"q and k must be plain floating point, have {q.dtype} and {k.dtype}")
    backend, _ = choose(name, Call.of(q, k, v, scale=scale))
    function, _ = _loaded(backend)
    q, k = q.to(v.dtype), k.to(v.dtype)
    if layout == "contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    elif backend.int32_offsets:
        q, k, v = fit_int32(q), fit_int32(k), fit_int32(v)
    # Triton and most extensions launch on the current device, whatever device their arguments are on.
    with torch.cuda.device(v.device) if v.device.type == "cuda" else contextlib.nullcontext():
        out = function(q, k, v, scale)
    if out.shape != q.shape:
        raise AttentionRefused(backend.name, f"returned shape {tuple(out.shape)}, expected {tuple(q.shape)}")
    return out.to(v.dtype)


def fit_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a packed copy when one batch entry reaches past 2^31 elements from its start.

    The offset counted is that of the last element along heads, rows and columns, from the real strides: a view of
    H3's qkv buffer (row stride 21,504) passes it at 99,866 rows although the view itself holds a third of that. The
    batch is left out, since these kernels step over it in 64 bits. A copy costs the view's size in memory.
    """
    if _reach(tensor.shape, tensor.stride()) < INT32_ELEMENTS:
        return tensor
    return tensor.contiguous()


def _reach(shape, stride) -> int:
    """Offset in elements of the last element of one batch entry."""
    return sum((size - 1) * step for size, step in zip(shape[1:], stride[1:], strict=True))


@functools.cache
def _registry() -> tuple[dict[str, Backend], dict[str, str]]:
    """Read ``backends/``: ``(name -> record, exact ones first; file -> why it is no backend)``."""
    from . import backends

    modules, broken = discover.modules(backends)
    broken = dict(broken)
    records = {}
    for name, module in modules.items():
        record = getattr(module, "BACKEND", None)
        if isinstance(record, Backend) and record.name == name:
            records[name] = record
        else:
            broken[name] = f"{name}.py must hold BACKEND = Backend(name={name!r}, ...), has {record!r}"
    return dict(sorted(records.items(), key=lambda item: not item[1].exact)), broken


@functools.cache
def _loaded(backend: Backend) -> tuple[Callable | None, str | None]:
    """Load a backend once per process: ``(function, None)`` or ``(None, reason)``."""
    try:
        return backend.load(), None
    except ModuleNotFoundError as error:
        return None, f"not installed ({discover.without_paths(str(error))})"
    except Exception as error:  # a probe: packages raise OSError, AssertionError and worse when they do not fit
        return None, f"does not load ({discover.reason(error)})"


def _refusal(backend: Backend, call: Call) -> str | None:
    malformed = _malformed(call)
    if malformed is not None:
        return malformed
    function, reason = _loaded(backend)
    if function is None:
        return reason
    packed = max(math.prod(call.q_shape[1:]), math.prod(call.k_shape[1:]))
    if backend.int32_offsets and packed > INT32_ELEMENTS:
        return f"one batch entry must hold at most 2^31 elements, has {packed}; lower the length or the size"
    try:
        return backend.refuse(call)
    except Exception as error:  # a probe: the question itself may fail in a broken package
        return f"cannot be asked ({discover.reason(error)})"


def _malformed(call: Call) -> str | None:
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


def _takers(call: Call) -> tuple[str, ...]:
    known, _ = _registry()
    takers = [backend for backend in known.values() if _refusal(backend, call) is None]
    return (*(backend.name for backend in takers), *([AUTO] if any(backend.exact for backend in takers) else []))
