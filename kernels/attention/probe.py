"""No attention backend is used on a GPU before a small call has given the right numbers there.

Cases: q, k and v as H3 has them, strided views of one buffer, 129 rows and 128; the same with an offset of 50 on each
channel of k, which an approximate kernel without smoothing does not survive; another scale, where a backend takes one.
An exact backend must be within bf16 rounding of the reference, an approximate one at cosine 0.999 or better and at a
relative error of 0.1 or less, since a result of the wrong size has the right cosine (a sparse one under options that
keep everything). The outcome is a certificate like those of the fused kernels, in the same files.

A backend that is known to crash processes (``opt_in``) is probed only when somebody asks for it, and leaves a note
before: the process after a crash refuses it instead of crashing too.
"""

from __future__ import annotations

import torch

from .. import certify
from .contract import Backend, Call
from .errors import compare, reference
from .operands import fixes_for, layout_of

SCHEMA = "h3bw-attention-probe/2"
EXACT_RELATIVE = 2**-7  # bf16 rounds to 2^-9; the probabilities are rounded too
APPROXIMATE_RELATIVE = 0.1
EXACT_COSINE, APPROXIMATE_COSINE = 0.9999, 0.999
ROWS, HEADS, HEAD_DIM = (129, 128), 4, 128
ALWAYS = "sdpa"  # PyTorch's own choice: taken unprobed where a probe cannot run
ORACLE = "softmax(q k^T) v in double precision"
CRASHED = (
    "its last probe on this device never came back, so it may have ended the process; to try again, delete the "
    "certificates or set H3BW_CACHE to an empty folder"
)


def known_refusal(backend: Backend, device: torch.device) -> str | None:
    """Why a backend failed its probe on a device, if that is in memory; never probes."""
    if not certify.needs(device) or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    certificate = certify.known(certify.ATTENTION, backend.name, device)
    return None if certificate is None or certificate.reason is None else failed(device, certificate.reason)


def refusal(backend: Backend, function, device: torch.device) -> str | None:
    """Why a backend is not to be used on a device, or None; reads memory, then the file, then probes.

    While a CUDA graph is captured or torch.compile traces, nothing is probed: then only what has been is used, and
    PyTorch's own choice.
    """
    if not certify.needs(device):
        return None
    device = certify.indexed(device)
    certificate = certify.known(certify.ATTENTION, backend.name, device)
    if certificate is None:
        busy = certify.busy(device)
        if busy:
            return None if backend.name == ALWAYS else f"not probed on {device} yet, and {busy}; run it once before"
        certificate = certify.settle(
            certify.ATTENTION,
            backend.name,
            device,
            lambda: key_of(backend, device),
            lambda: guarded(backend, function, device),
        )
    return None if certificate.reason is None else failed(device, certificate.reason)


def failed(device: torch.device, reason: str) -> str:
    """The reason of a failed probe as a refusal."""
    return f"failed its probe on {device}: {reason}"


def key_of(backend: Backend, device: torch.device) -> str:
    """Name of the certificate's file."""
    texts = (SCHEMA, backend.name, repr(backend.probe_options))
    return certify.key_of(*texts, functions=(probe, backend.load), packages=backend.packages, device=device)


def guarded(backend: Backend, function, device: torch.device) -> tuple[str | None, str]:
    """Probe; with a note on disk while it lasts for a backend that may not come back."""
    if backend.opt_in:
        key = key_of(backend, device)
        if (certify.kept(key) or {}).get("probing") == backend.name:
            return CRASHED, ORACLE
        certify.keep(key, {"probing": backend.name})
    return probe(backend, function, device), ORACLE


def probe(backend: Backend, function, device: torch.device) -> str | None:
    """Run the cases; None when all are right, else what was wrong."""
    ran, last = 0, None
    for text, q, k, v, scale in cases(device):
        last = backend.refuse(Call.of(q, k, v, scale=scale))
        if last is not None:
            continue
        ran += 1
        tensors = [q, k, v]
        fixes_for(backend, layout_of(backend, "native"), (q, k, v), v.dtype).apply(tensors)
        before = [tensor.clone() for tensor in tensors]
        out = function(*tensors, scale, **dict(backend.probe_options))
        if out.shape != q.shape:
            return f"{text}: returned shape {tuple(out.shape)}, expected {tuple(q.shape)}"
        if not all(map(torch.equal, tensors, before)):
            return f"{text}: it wrote into its inputs"
        found = compare(out, reference(q, k, v, scale))
        good = found.cosine >= (EXACT_COSINE if backend.exact else APPROXIMATE_COSINE)
        if not good or found.relative > (EXACT_RELATIVE if backend.exact else APPROXIMATE_RELATIVE):
            return f"{text}: {found}"
    return None if ran else f"it takes none of the probe's calls: {last}"


def cases(device: torch.device):
    """``(words, q, k, v, scale)``: bf16, ``[1, 4, rows, 128]``, views of one buffer."""
    generator = torch.Generator().manual_seed(0)
    offset = 50.0 * torch.randn(HEADS * HEAD_DIM, generator=generator).sign()

    def views(buffer):
        return [part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in buffer.to(device).chunk(3, -1)]

    for rows in ROWS:
        buffer = torch.randn(1, rows, 3 * HEADS * HEAD_DIM, generator=generator).to(torch.bfloat16)
        yield (f"{rows} rows", *views(buffer), None)
        shifted = buffer.clone()
        middle = slice(HEADS * HEAD_DIM, 2 * HEADS * HEAD_DIM)
        shifted[..., middle] = (shifted[..., middle].float() + offset).to(torch.bfloat16)
        yield (f"{rows} rows, k offset by 50", *views(shifted), None)
        yield (f"{rows} rows, scale 0.05", *views(buffer), 0.05)
