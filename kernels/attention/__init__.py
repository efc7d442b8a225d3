"""``out = softmax(q k^T * scale) v``: which implementation runs is chosen here, by name or by the word ``auto``.

Every file in ``backends/`` is one backend, or several of one family. A backend asked for by name runs or raises
:class:`AttentionRefused` with the reason and with the names that would have run; ``auto`` takes the *exact* one that
is fastest for the kind of call on the device, timed once (``auto.py``). Exact means full softmax attention with fp32
accumulation: such backends differ from one another by rounding only.

Tensors are ``[batch, heads, rows, head_dim]`` and may be strided views, for instance of H3's qkv buffer
``[1, rows, 3 * 56 * 128]``. There is no mask argument and no ``**kwargs``: what a backend cannot honour never reaches
it.

    contract   Backend, Call, Request, Option, AttentionRefused
    registry   the folder: what there is, what loads, what refuses
    operands   dtypes, layouts, alignment, 2^31: which copies are made, and how many bytes that is
    probe      a small call against double precision before a backend is used on a GPU
    auto       timing, and the decisions on disk
    dispatch   choose, run; plan_for and execute for callers that make many calls
    errors     distance from the reference

Nothing is imported, probed or set at import. No torch flag is touched.
"""

from . import auto, dispatch, errors, probe, registry
from .contract import AUTO, HND, LAYOUTS, NHD, AttentionRefused, Backend, Call, Option, Request
from .dispatch import Plan, choose, ensure, execute, forget, plan_for, run
from .operands import fit_int32
from .registry import backends as records
from .registry import explain, list_backends, names

__all__ = [
    "AUTO",
    "HND",
    "LAYOUTS",
    "NHD",
    "AttentionRefused",
    "Backend",
    "Call",
    "Option",
    "Plan",
    "Request",
    "auto",
    "choose",
    "dispatch",
    "ensure",
    "errors",
    "execute",
    "explain",
    "fit_int32",
    "forget",
    "list_backends",
    "names",
    "plan_for",
    "probe",
    "records",
    "registry",
    "run",
]
