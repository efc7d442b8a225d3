"""No kernel is used on a GPU before it has shown there that it gives the right bits.

The first time that an implementation other than the reference is wanted on a device, the op's cases run through it and
through an oracle (``parity``): a few milliseconds after compilation, once per op, implementation and device. The answer
stays in memory, so that each later call costs a dict lookup, and in a file, so that the next process does not probe
again. A kernel that fails, or that raises whatever it raises (no code for this GPU, a `ptxas` that is too old, no
Triton), is not used; the reason is kept and shown, with what helps.

Public surface::

    refusal(op, implementation, device)   None when certified, else the reason; probes when it has to
    ensure(device)                        probe everything now: at patch time, so that sampling only reads
    has_run(device)                       whether everything has been probed; never probes
    norm_of(device)                       "fused" where the kernel's RMSNorm equals ATen's in every bit, else "aten"
    status(device)                        what is known, for reports; never probes
    clear()                               forget what is in memory (the files stay)
    tally(device)                         of that: how many are certified, and which are refused
    remembered()                          what is in memory; reads no file and asks no device
    settle, known, key_of, keep, kept     the same memory, files and keys for other probes (attention)

The file. One JSON a certificate, in the folder ``h3-blackwell-runtime`` of the user's cache, or in the folder that
``H3BW_CACHE`` names; ``H3BW_CACHE=off`` writes and reads none. Its name is a SHA-256 over the sources of the
implementation, of the reference and of the probe, over the device, its capability, the driver, and the versions of
torch, Triton and comfy-kitchen: whatever changes one of them makes the probe run again. A file that is damaged, or that
is not what its name says, counts as absent; a folder that cannot be written to costs a probe a process.

Not covered: a kernel that writes outside its buffers, one that is wrong for large tensors only, and a launch that
breaks the CUDA context (nothing works in that process any more; the refusal is on disk for the next one).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from . import discover, parity

SCHEMA = "h3bw-certificate/1"
CACHE_VARIABLE = "H3BW_CACHE"
CERTIFIED, REFUSED, NOT_RUN = "certified", "refused", "not_run"
NORM = "rms_norm"  # the name under which the comparison of the two norms is listed; not an op
ATTENTION = "attention"  # likewise for the attention backends, which kernels.attention probes
NORM_OPS = ("norm_modulate", "norm_modulate_nvfp4")
_TRITON_NAMES = ("triton", "pytorch-triton", "triton-windows")
_MAX_REASON = 600

# Words of an exception -> what helps. The first that fits is used.
HELP = (
    (
        ("ptxas", "is not defined for option 'gpu-name'", "unsupported .version", "unsupported gpu architecture"),
        "set the environment variable TRITON_PTXAS_PATH (for compute capability 10.0 and newer, in newer Triton, "
        "TRITON_PTXAS_BLACKWELL_PATH) to the ptxas of a CUDA toolkit that knows this GPU",
    ),
    (
        ("no kernel image", "no binary for gpu"),
        "an installed package has no code for this GPU: install the torch and Triton builds made for it",
    ),
    (("no module named 'triton'",), "install triton (triton-windows on Windows)"),
    (("out of memory",), "free device memory and queue again"),
)


@dataclass(frozen=True)
class Certificate:
    """The outcome of one probe.

    Attributes:
        op, implementation: what was probed.
        state: ``"certified"``, ``"refused"``, or ``"not_run"``.
        reason: why it is refused or was not run, else None.
        oracle: what the outcome was compared with.
        probe_ms: wall time of the probe, compilation included.
        key: name of the file; "" when none belongs to it.
        from_cache: read from a file.
        lasting: False for a refusal that may pass (no memory): kept out of the file, and :func:`ensure` tries again.
    """

    op: str
    implementation: str
    state: str
    reason: str | None
    oracle: str = ""
    probe_ms: float = 0.0
    key: str = ""
    from_cache: bool = False
    lasting: bool = True

    def as_dict(self) -> dict:
        """The certificate as JSON-ready data."""
        fields = asdict(self)
        del fields["lasting"]
        return fields


_known: dict[tuple[str, str, torch.device], Certificate] = {}
_lock = threading.RLock()


def needs(device: torch.device) -> bool:
    """Whether implementations have to be certified on a device: on every one but the CPU, where none but tests run."""
    return device.type != "cpu"


def refusal(op, implementation: str, device) -> str | None:
    """Why ``implementation`` of ``op`` is not to be used on ``device``, or None when it is certified there.

    Reads memory; where that knows nothing, reads the file or probes. While a CUDA graph is captured or torch.compile
    traces, it does not probe, and that is the reason.

    Args:
        op: an ``Op`` or the name of one.
        implementation: the name of one of its implementations.
        device: a ``torch.device`` or its text.
    """
    device = indexed(device)
    if not needs(device):
        return None
    name = op if isinstance(op, str) else op.name
    known = _known.get((name, implementation, device))
    if known is None:
        why_not_now = busy(device)
        if why_not_now:
            return f"not certified on {device} yet, and {why_not_now}; run it once before"
        known = _certificate(_op(op), implementation, device)
    return None if known.state == CERTIFIED else f"not certified on {device}: {known.reason}"


def ensure(device) -> None:
    """Probe what ``auto`` may take on ``device``, and the norm; what is known is not probed again."""
    device = indexed(device)
    if not needs(device):
        return
    with _lock:
        for at, known in list(_known.items()):
            if at[2] == device and not known.lasting:
                del _known[at]
    for op, item in _implementations(device):
        refusal(op, item.name, device)
    norm_of(device)


def has_run(device) -> bool:
    """Whether :func:`ensure` would have nothing to do on ``device``; cheap, and never probes."""
    device = indexed(device)
    if not needs(device):
        return True
    wanted = [(op.name, item.name, device) for op, item in _implementations(device)]
    return all(at in _known for at in wanted) and any(at[0] == NORM and at[2] == device for at in list(_known))


def norm_of(device) -> str:
    """The norm that the modulation ops are to use on ``device``.

    Returns:
        ``"fused"`` when the implementations that ``auto`` takes give the same bytes with their own norm as with
        ATen's, on this torch and this device; else ``"aten"``, with the reason in :func:`status`.
    """
    device = indexed(device)
    if not needs(device):
        return "aten"
    chosen, reason = _norm_implementations(device)
    if reason is not None:
        _known[NORM, "", device] = Certificate(NORM, "", NOT_RUN, reason, lasting=False)
        return "aten"
    label = _norm_label(chosen)
    known = _known.get((NORM, label, device))
    if known is None:
        if busy(device):
            return "aten"
        known = _norm_certificate(chosen, label, device)
    return "fused" if known.state == CERTIFIED else "aten"


def status(device) -> list[dict]:
    """What is known about every implementation on ``device``; reads memory and files and never probes.

    Returns:
        A dict an implementation, see :class:`Certificate`, and one for the norm (op ``"rms_norm"``) once
        :func:`norm_of` was asked. An implementation that does not run on the device at all is ``not_run`` with that
        reason.
    """
    device = indexed(device)
    entries = []
    for op in _ops().values():
        for item in op.implementations:
            reason = item.refuse(device)
            known = _known.get((op.name, item.name, device))
            if reason is None and known is None and needs(device):
                known = _read(_key(op, item, device), op.name, item.name)
            if reason is None and known is None:
                reason = "not probed yet" if needs(device) else f"nothing is certified on {device.type}"
            entries.append(known or Certificate(op.name, item.name, NOT_RUN, reason))
    entries += [
        item for (name, _, where), item in list(_known.items()) if name in (NORM, ATTENTION) and where == device
    ]
    return [item.as_dict() for item in entries]


def clear() -> None:
    """Forget what is in memory; the next use reads the files or probes again."""
    with _lock:
        _known.clear()


# ---------------------------------------------------------------- probing


def _certificate(op, implementation: str, device: torch.device) -> Certificate:
    item = {entry.name: entry for entry in op.implementations}[implementation]

    def compare() -> tuple[str | None, str]:
        cases = item.cases or op.cases or _cases().CASES.get(op.name)
        if cases is None:
            return "the op brings no cases to be certified with", ""
        oracle = ""
        for case in cases(device):
            if item.accepts(*case.arguments) is None:
                oracle = "its reference, every bit" if case.chain is None else _oracle(device)
                reason = parity.case_reason(case, op.reference, item.run)
                if reason is not None:
                    return reason, oracle
        return (None if oracle else "it accepts none of the cases it would be certified with"), oracle

    return settle(op.name, implementation, device, lambda: _key(op, item, device), compare)


def _norm_certificate(chosen: dict, label: str, device: torch.device) -> Certificate:
    def key() -> str:
        keys = [_key(op, item, device) for op, item in chosen.values()]
        return _digest(NORM, *keys) if all(keys) else ""

    def compare() -> tuple[str | None, str]:
        oracle = "torch.nn.functional.rms_norm, every bit"
        for name, text, arguments in _cases().norms(device):
            run = chosen[name][1].run
            reason = parity.equal_reason(run(*arguments, "fused"), run(*arguments, "aten"))
            if reason is not None:
                return f"norm='fused' of {name}, {text}: {reason}", oracle
        return None, oracle

    return settle(NORM, label, device, key, compare)


def known(name: str, implementation: str, device) -> Certificate | None:
    """The certificate that is in memory, or None; never reads a file and never probes."""
    return _known.get((name, implementation, indexed(device)))


def tally(device) -> tuple[int, list[dict]]:
    """How many implementations are certified on a device, and the entries of :func:`status` that are refused there."""
    entries = status(device) if needs(indexed(device)) else []
    return sum(entry["state"] == CERTIFIED for entry in entries), [e for e in entries if e["state"] == REFUSED]


def remembered() -> list[tuple[torch.device, dict]]:
    """Every certificate that is in memory, with its device; never reads a file, asks a device or probes."""
    return [(device, item.as_dict()) for (_, _, device), item in list(_known.items())]


def settle(name: str, implementation: str, device, key: Callable[[], str], compare: Callable) -> Certificate:
    """The certificate from memory, from its file, or from running ``compare``; one thread at a time.

    Args:
        name, implementation: what is certified.
        device: with its index.
        key: gives the file's name, see :func:`key_of`.
        compare: ``() -> (reason or None, oracle in words)``; what it raises becomes the reason.
    """
    with _lock:
        known = _known.get((name, implementation, device))
        if known is None:
            at = key()
            known = _read(at, name, implementation) or _probe(name, implementation, device, at, compare)
            _known[name, implementation, device] = known
        return known


def _probe(name: str, implementation: str, device, key: str, compare: Callable) -> Certificate:
    lasting, oracle = True, ""
    started = time.perf_counter()
    try:
        with _undisturbed(device):
            reason, oracle = compare()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:  # a probe: whatever a kernel, a compiler or a driver raises is the reason
        reason = _told(error)
        lasting = not (isinstance(error, MemoryError) or "out of memory" in str(error).lower())
    elapsed = (time.perf_counter() - started) * 1000
    state = CERTIFIED if reason is None else REFUSED
    certificate = Certificate(name, implementation, state, reason, oracle, round(elapsed, 3), key, lasting=lasting)
    if lasting:
        _write(certificate, device)
    return certificate


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients off, ``device`` current, and random states as they were afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng([device.index] if device.type == "cuda" else []))
        yield


def _told(error: Exception) -> str:
    """An exception in one line, without paths, and with what helps where that is known."""
    text = " ".join(discover.reason(error).split())
    if len(text) > _MAX_REASON:
        text = text[:_MAX_REASON] + " ..."
    words = f"{type(error).__name__}: {error}".lower()
    for marks, help_text in HELP:
        if any(mark in words for mark in marks):
            return f"{text}; {help_text}"
    return text


def busy(device: torch.device) -> str | None:
    """Why this is no moment to probe on a device, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def indexed(device) -> torch.device:
    """``device`` with its index: "cuda" is the current one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# ---------------------------------------------------------------- the registry of ops (imports this file)


def _ops() -> dict:
    from . import fused

    return fused.OPS


def _op(op):
    return _ops()[op] if isinstance(op, str) else op


def _cases():
    from .fused import _cases

    return _cases


def _implementations(device: torch.device) -> list[tuple]:
    return [
        (op, item)
        for op in _ops().values()
        for item in op.implementations
        if not item.by_name and item.refuse(device) is None
    ]


def _norm_implementations(device: torch.device) -> tuple[dict, str | None]:
    """``{op name: (op, implementation)}`` that ``auto`` takes for the modulation ops, or why one of them has none."""
    chosen = {}
    for name in NORM_OPS:
        op = _ops().get(name)
        usable = (
            item
            for item in (op.implementations if op else ())
            if not item.by_name and item.refuse(device) is None and refusal(op, item.name, device) is None
        )
        item = next(usable, None)
        if item is None:
            return {}, f"{name} runs as its reference"
        chosen[name] = op, item
    return chosen, None


def _norm_label(chosen: dict) -> str:
    return "+".join(dict.fromkeys(item.name for _, item in chosen.values()))


# ---------------------------------------------------------------- keys and files


def _key(op, item, device: torch.device) -> str:
    """SHA-256 over everything the outcome depends on; "" where a source cannot be read (then nothing is kept)."""
    sources = _sources(item.run, op.reference)
    if sources is None:
        return ""
    text = json.dumps([_function(item.run), _function(op.reference), sources, environment(device)], sort_keys=True)
    return _digest(SCHEMA, op.name, item.name, text)


def key_of(*texts: str, functions: tuple[Callable, ...], packages: tuple[str, ...], device: torch.device) -> str:
    """Name of a file: SHA-256 over texts, the sources beside ``functions``, versions, and :func:`environment`.

    "" where a source cannot be read (then nothing is kept).
    """
    sources = _sources(*functions)
    if sources is None:
        return ""
    versions = {package: _version(package) for package in packages}
    return _digest(*texts, json.dumps([sources, versions, environment(device)], sort_keys=True))


def environment(device: torch.device) -> dict:
    """The device and the versions that a certificate holds for."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_cuda else None,
        "driver": driver() if on_cuda and driver is not None else None,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": next(filter(None, map(_version, _TRITON_NAMES)), None),
        "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"),
        "comfy-kitchen": _version("comfy-kitchen"),
        "oracle": _oracle(device),
        "ptxas": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TRITON_PTXAS")},
    }


@functools.lru_cache(maxsize=64)
def _oracle(device: torch.device) -> str:
    try:
        with _undisturbed(device):
            return parity.oracle_of(device)
    except Exception as error:  # a probe: without it the certificate still names what was found
        return discover.reason(error)


@functools.lru_cache(maxsize=16)
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _function(function: Callable) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{getattr(function, '__qualname__', '')}"


def _sources(*functions: Callable) -> list[str] | None:
    """Digests of the probe's sources and of every Python file beside those that define ``functions``."""
    folders = [Path(__file__).parent]
    for function in functions:
        path = getattr(sys.modules.get(getattr(function, "__module__", None)), "__file__", None)
        if path is None:
            return None
        folders.append(Path(path).parent)
    try:
        return [digest for folder in dict.fromkeys(folders) for digest in _folder_digests(folder)]
    except OSError:
        return None


@functools.lru_cache(maxsize=16)
def _folder_digests(folder: Path) -> tuple[str, ...]:
    return tuple(_digest(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py")))


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(b"%d:" % len(encoded) + encoded)
    return digest.hexdigest()


def cache_folder() -> Path | None:
    """Folder of the certificates, or None when ``H3BW_CACHE`` is ``off`` or no folder can be named."""
    named = os.environ.get(CACHE_VARIABLE, "").strip()
    if named.lower() == "off":
        return None
    if named:
        return Path(named) / "certificates"
    try:
        home = Path.home()
    except RuntimeError:  # no HOME and no entry for this user
        return None
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "h3-blackwell-runtime" / "certificates"


def kept(key: str) -> dict | None:
    """What a file of the cache holds, or None when there is none that is a JSON object."""
    folder = cache_folder()
    if folder is None or not key:
        return None
    try:
        stored = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) else None


def keep(key: str, document: dict) -> None:
    """Write a file of the cache: beside its name, then moved there, so that a reader never sees half of it."""
    folder = cache_folder()
    if folder is None or not key:
        return
    text = json.dumps(document, indent=1)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a probe, nothing else
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(path, folder / f"{key}.json")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _read(key: str, name: str, implementation: str) -> Certificate | None:
    """The certificate of a key, or None when there is no file that holds just that."""
    stored = kept(key)
    if stored is None:
        return None
    try:
        fields = stored["certificate"]
        found = Certificate(**{field: fields[field] for field in Certificate("", "", "", None).as_dict()})
        right = (stored["schema"], found.key, found.op, found.implementation) == (SCHEMA, key, name, implementation)
        outcome = (found.state == CERTIFIED and found.reason is None) or (
            found.state == REFUSED and isinstance(found.reason, str)
        )
        shown = isinstance(found.oracle, str) and isinstance(found.probe_ms, (int, float))
        return replace(found, from_cache=True) if right and outcome and shown else None
    except (KeyError, TypeError):
        return None


def _write(certificate: Certificate, device: torch.device) -> None:
    """Keep a certificate with the environment that it holds for."""
    keep(
        certificate.key,
        {"schema": SCHEMA, "certificate": certificate.as_dict(), "environment": environment(device)},
    )
