"""What a record says about itself: source, command line, versions, machine. Nothing of it names a person or a host."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from .. import discover
from . import telemetry

ENV_PREFIXES = ("CUDA_", "TORCH_", "TRITON_", "PYTORCH_", "COMFY", "H3_")
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
WITHHELD = "<withheld>"
PACKAGES = (
    "torch", "triton", "comfy-kitchen", "numpy", "safetensors", "nvidia-cutlass-dsl", "quack-kernels",
    "sageattention", "flash-attn-4", "comfyui-frontend-package",
)  # fmt: skip
LIBRARIES = re.compile(r"lib(?:cuda|cublas|cudnn|nvrtc|nvidia|nccl|torch|c10)[\w+-]*\.so[\w.]*")


def plain(text: str) -> str:
    """Text without what names a machine: paths are cut to their last component, the host's name becomes ``<host>``."""
    text = discover.without_paths(text)
    node = platform.node()
    return text.replace(node, "<host>") if len(node) > 2 else text


def source() -> dict:
    """The pack's Python files by content.

    ``tree`` is the SHA-256 over one line ``<sha256>  <path>`` a file of ``kernels/`` and ``nodes/``, in the order of
    the paths. It says what ran even where there is no repository; being made from the very files it has nothing that
    could be dirty. A caller that can ask git passes ``commit``, ``dirty`` and ``diff_sha256`` instead.
    """
    root = Path(__file__).resolve().parents[2]
    found = (path for part in ("kernels", "nodes") for path in (root / part).rglob("*.py"))
    files = sorted(path.relative_to(root).as_posix() for path in found)
    lines = (f"{hashlib.sha256((root / file).read_bytes()).hexdigest()}  {file}\n" for file in files)
    tree = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"commit": None, "tree": tree, "dirty": False, "diff_sha256": None, "untracked": []}


def invocation() -> dict:
    """argv, cwd, allowed environment variables and Python. What looks like a secret is withheld."""
    return {
        "argv": arguments(sys.argv),
        "cwd": ".",
        "env": {
            name: WITHHELD if SECRET.search(name) else plain(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(ENV_PREFIXES)
        },
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def arguments(argv: list[str]) -> list[str]:
    """The command line, plain; the values of options that sound like secrets are withheld."""
    out: list[str] = []
    hide = False
    for item in argv:
        option, equals, _ = item.partition("=")
        if hide:
            out.append(WITHHELD)
        elif item.startswith("-") and equals and SECRET.search(option):
            out.append(f"{option}={WITHHELD}")
        else:
            out.append(plain(item))
        hide = item.startswith("-") and not equals and bool(SECRET.search(item))
    return out


def environment(image_digest: str | None = None) -> dict:
    """Operating system, container image (or None), package versions and the CUDA libraries in this process."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        versions["torch"] = str(torch.__version__)  # carries the build, "+cu130"
        versions["cuda of torch"] = torch.version.cuda
    if "comfyui_version" in sys.modules:
        versions["comfyui"] = sys.modules["comfyui_version"].__version__
    return {
        # Only the numbers of the kernel's release: what a build adds to them can name a place.
        "os": f"{platform.system()} {re.match(r'[0-9.]*', platform.release())[0]} {platform.machine()}",
        "image_digest": image_digest,
        "packages": versions,
        "libraries": libraries(),
    }


def libraries() -> list[str]:
    """File names of the CUDA and torch libraries that this process has loaded; empty where the system does not tell."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    names = (line.rpartition("/")[2].strip() for line in maps.splitlines() if "/" in line)
    return sorted({name for name in names if LIBRARIES.fullmatch(name)})


def hardware(device=None) -> dict:
    """The CPU, and the GPU in use.

    Args:
        device: a ``torch.device``; a CPU one, or None, gives an empty list of GPUs.

    Returns:
        ``cpu`` (name, cores) and ``gpus``, each with name, ``uuid_sha256`` (never the UUID), capability, memory,
        driver, power limit and clocks.
    """
    return {
        "cpu": {"name": cpu_name(), "cores": os.cpu_count()},
        "gpus": [] if device is None or device.type != "cuda" else [gpu(device)],
    }


def gpu(device) -> dict:
    """One CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    uuid = uuid_of(device)
    with telemetry.Gpu(uuid) as found:
        return {
            "name": properties.name,
            "uuid_sha256": None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": found.driver(),
            "power_limit_w": found.power_limit_w(),
            "clocks": found.clocks(),
        }


def uuid_of(device) -> str | None:
    """The device's UUID as the driver writes it, or None for a CPU or a torch that does not tell."""
    if device.type != "cuda":
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
