"""What of this pack runs on this machine, and the command for what is missing. Installs nothing.

ComfyUI-Manager runs this file after it has installed the dependencies of ``pyproject.toml``; people run it by hand::

    python install.py             # a report
    python install.py --json      # the same as JSON, the only thing on stdout
    python install.py --no-import # versions only: no package is imported, no GPU is asked

Standard library only, so that it works before anything else does. It exits 0 whatever it finds: a missing optional
package must not make the Manager call the installation failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

KITCHEN_MINIMUM = "0.2.26"
KITCHEN_NAMES = ("quantize_nvfp4", "dequantize_nvfp4", "scaled_mm_nvfp4")
COMFYUI_MINIMUM = "0.30.0"
TORCH_CUDA_MINIMUM = "13.0"  # ComfyUI switches comfy-kitchen's CUDA backend off below


@dataclass(frozen=True)
class Package:
    """One package the report looks at: what pip calls it, what Python calls it, and what it is for.

    ``requirement`` is what pip is given; "" means that PyPI does not have it, and ``note`` says where it comes from.
    What needs a new build for each torch carries pip's option for that.
    """

    name: str
    module: str
    requirement: str
    use: str
    needed: bool = False
    note: str = ""


PACKAGES = (
    Package("comfy-kitchen", "comfy_kitchen", f"comfy-kitchen>={KITCHEN_MINIMUM}", "NVFP4 tensors and GEMMs", True),
    Package("safetensors", "safetensors", "safetensors>=0.4.2", "checkpoints", True),
    Package("numpy", "numpy", "numpy>=1.25.0", "arrays for media", True),
    Package("pillow", "PIL", "pillow>=9.5.0", "images", True),
    Package("av", "av", "av>=16.0.0", "video and audio files", True),
    Package("triton", "triton", "triton", "compiled kernels on NVIDIA GPUs"),
    Package(
        "sageattention",
        "sageattention",
        "sageattention>=1.0.6",
        "attention backends sage1 (1.0.6) and sage2 (2.2, built from source)",
    ),
    Package(
        "sageattn3",
        "sageattn3",
        "",
        "attention backend sage3, by name only",
        note="not on PyPI; built from the folder sageattention3_blackwell of github.com/thu-ml/SageAttention",
    ),
    Package(
        "flash-attn",
        "flash_attn",
        "flash-attn --no-build-isolation",
        "attention backend flash",
        note="compiles for a long time where no wheel fits",
    ),
    Package("flash-attn-4", "flash_attn.cute", "flash-attn-4>=4.0.0b27", "attention backend fa4"),
    Package("nvidia-cutlass-dsl", "cutlass", "nvidia-cutlass-dsl>=4.6.2", "what flash-attn-4 is compiled with"),
)


def probe(*, import_packages: bool = True) -> dict:
    """Look at this machine and return a report that ``json.dumps`` takes.

    Args:
        import_packages: also import every package, torch included, and ask the GPUs. Without it ``imports`` is None
            everywhere and ``gpus`` is empty.

    Returns:
        ``python``, ``executable``, ``platform``, ``comfyui`` and ``driver`` (a version or None), ``torch``, ``gpus``,
        ``default_path`` (what runs without a GPU), ``packages`` (by pip name: version, imports, reason, needed, use,
        install, note) and ``warnings``. Memory is in bytes.
    """
    report = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "comfyui": comfyui_version(),
        "driver": driver_version(),
        "torch": _torch(import_packages),
        "gpus": [],
        "default_path": describe_capability(None),
        "packages": {package.name: _package(package, import_packages) for package in PACKAGES},
    }
    if report["torch"]["imports"]:
        try:
            report["gpus"] = _gpus(sys.modules["torch"])
        except Exception as error:  # a probe: a driver that does not answer is a finding
            report["torch"]["reason"] = f"the GPUs do not answer ({type(error).__name__}: {error})"
    report["warnings"] = _warnings(report)
    return report


def describe_capability(cc: tuple[int, int] | str | None, hip: bool = False) -> dict[str, str]:
    """Say how NVFP4 weights are multiplied on a GPU of compute capability ``cc``.

    Args:
        cc: ``(12, 1)`` or ``"12.1"``; None where there is no CUDA device.
        hip: the device is an AMD one (its capability says nothing about FP4).

    Returns:
        ``{"path": "fp4_gemm" | "dequantised" | "reference", "reason": text}``.
    """
    if hip:
        return {"path": "reference", "reason": "AMD (HIP) device: this version has no FP4 path for it"}
    if cc is None:
        return {"path": "reference", "reason": "no CUDA device: PyTorch's own operations, slow"}
    found = re.fullmatch(r"(\d+)\.(\d+)", cc if isinstance(cc, str) else ".".join(map(str, cc)))
    if found is None:
        return {"path": "reference", "reason": f"compute capability {cc!r} is not understood"}
    major, minor = int(found[1]), int(found[2])
    if (major, minor) < (10, 0):
        return {
            "path": "dequantised",
            "reason": f"compute capability {major}.{minor} has no FP4 tensor cores (10.0 and newer do): "
            "the weights stay NVFP4 in memory and are dequantised before each GEMM",
        }
    families = {10: "B200 and B300", 11: "Thor", 12: "RTX 50, RTX PRO Blackwell and GB10"}
    family = families.get(major, "newer than this version knows, taken by the rule 'at least 10.0'")
    return {"path": "fp4_gemm", "reason": f"compute capability {major}.{minor} (sm_{major}x family: {family})"}


def comfyui_version() -> str | None:
    """Return the version of the ComfyUI that runs this, else of the one named by COMFYUI_PATH or around this file."""
    places = [Path(entry) for entry in sys.path if entry]
    if os.environ.get("COMFYUI_PATH"):
        places.append(Path(os.environ["COMFYUI_PATH"]))
    places.extend(Path(__file__).parents)
    for place in places:
        with contextlib.suppress(OSError):
            found = re.search(
                r"__version__\s*=\s*[\"']([^\"']+)", (place / "comfyui_version.py").read_text(encoding="utf-8")
            )
            if found:
                return found[1]
    return None


def driver_version() -> str | None:
    """Ask NVML for the NVIDIA driver's version; None without one."""
    library = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != 0:
            return None
        text = ctypes.create_string_buffer(80)
        status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return text.value.decode() if status == 0 else None


def pip_command(requirement: str, *options: str) -> str:
    """Return the shell command that installs ``requirement`` into the Python that runs this."""
    executable = sys.executable or "python"
    python = f'"{executable}"' if " " in executable else executable
    quoted = f'"{requirement}"' if re.search(r"[<>=]", requirement) else requirement
    return " ".join([python, "-m", "pip", "install", *options, quoted])


def text(report: dict) -> str:
    """Render a report for people."""
    torch = report["torch"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"HIP {torch['hip']}" if torch["hip"] else "no CUDA"
    lines = [
        "H3 Blackwell Runtime: environment",
        f"  Python {report['python']} on {report['platform']}",
        f"  ComfyUI {report['comfyui'] or 'not found'}",
        f"  torch {torch['version'] or '-'} ({torch['reason'] or build})",
        f"  NVIDIA driver {report['driver'] or 'none'}",
    ]
    for gpu in report["gpus"]:
        memory_gib = gpu["memory_bytes"] / 2**30
        lines.append(f"  GPU {gpu['index']}: {gpu['name']}, cc {gpu['capability']}, {memory_gib:.1f} GiB")
        lines.append(f"    {gpu['path']}: {gpu['reason']}")
    if torch["imports"] is None:
        lines.append("  GPUs: not asked (--no-import)")
    elif not report["gpus"]:
        lines.append(f"  no GPU; {report['default_path']['path']}: {report['default_path']['reason']}")
    lines.append("Packages")
    for name, package in report["packages"].items():
        state = {True: "ok", False: package["reason"], None: package["reason"] or "not imported"}[package["imports"]]
        kind = "needed" if package["needed"] else "optional"
        lines.append(f"  {name} {package['version'] or '-'} ({kind}: {package['use']}): {state}")
        if package["install"] or package["note"]:
            hint = [part for part in (package["install"], package["note"]) if part]
            lines.append(f"    to install: {'; '.join(hint)}")
    lines.append("Warnings" if report["warnings"] else "No warnings")
    lines.extend(f"  {warning}" for warning in report["warnings"])
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _import(module: str) -> str | None:
    """Import ``module``; None, or why it does not import. Packages built for another machine raise all sorts here."""
    try:
        __import__(module)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _package(package: Package, import_packages: bool) -> dict:
    version = _version(package.name)
    reason = None if version else "not installed"
    imports = None
    if import_packages:
        error = _import(package.module)
        imports = error is None
        if imports:
            # A build under another pip name (triton-windows) has no metadata here; the module knows its version.
            reason = None
            version = version or getattr(sys.modules[package.module], "__version__", None)
        elif version or not error.startswith("ModuleNotFoundError"):
            reason = error
        else:
            reason = f"not installed ({error.partition(': ')[2]})"
    missing = reason is not None
    # Installed and yet not importable: pip has to be told to put the same version there again.
    options = ("--force-reinstall", "--no-deps") if version else ()
    requirement = _triton_requirement() if package.name == "triton" else package.requirement
    return {
        "version": version,
        "imports": imports,
        "reason": reason,
        "needed": package.needed,
        "use": package.use,
        "install": pip_command(requirement, *options) if missing and requirement else None,
        "note": package.note if missing else "",
    }


def _triton_requirement() -> str:
    """The Triton that the installed torch asks for: another version breaks torch.compile."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("torch") or []:
            if re.match(r"triton\b", requirement):
                return requirement.partition(";")[0].strip()
    return "triton-windows" if os.name == "nt" else "triton"


def _torch(import_packages: bool) -> dict:
    """Versions from ``torch/version.py``, which can be read also where torch itself does not import."""
    facts = {"version": _version("torch"), "cuda": None, "hip": None, "imports": None, "reason": None}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {**facts, "imports": False if import_packages else None, "reason": "not installed"}
    with contextlib.suppress(OSError):
        source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        for key in ("cuda", "hip"):
            found = re.search(rf"^{key}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
            facts[key] = found[1] if found else None
    if import_packages:
        facts["reason"] = _import("torch")
        facts["imports"] = facts["reason"] is None
    return facts


def _gpus(torch) -> list[dict]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        cc = (properties.major, properties.minor)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{cc[0]}.{cc[1]}",
                "memory_bytes": properties.total_memory,
                **describe_capability(cc, hip=torch.version.hip is not None),
            }
        )
    return gpus


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: "2.14.1+cu130" is (2, 14, 1)."""
    return tuple(int(number) for number in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if number)


def _warnings(report: dict) -> list[str]:
    warnings = []
    comfyui, torch, kitchen = report["comfyui"], report["torch"], report["packages"]["comfy-kitchen"]
    if comfyui and _release(comfyui) < _release(COMFYUI_MINIMUM):
        warnings.append(f"ComfyUI {comfyui} does not know MiniMax H3; update it to {COMFYUI_MINIMUM} or newer")
    if torch["cuda"] and _release(torch["cuda"]) < _release(TORCH_CUDA_MINIMUM):
        warnings.append(
            f"torch {torch['version']} is built for CUDA {torch['cuda']}; below {TORCH_CUDA_MINIMUM} ComfyUI switches "
            "comfy-kitchen's CUDA backend off and NVFP4 runs slower than bf16; install a torch built for CUDA 13 "
            "(pytorch.org/get-started)"
        )
    if report["driver"] and torch["version"] and not torch["cuda"] and not torch["hip"]:
        warnings.append(
            f"torch {torch['version']} is built without CUDA, and an NVIDIA driver ({report['driver']}) is here; "
            "install a torch built for CUDA 13 (pytorch.org/get-started)"
        )
    if torch["reason"]:
        warnings.append(f"torch: {torch['reason']}; ComfyUI brings torch, repair or install it the way ComfyUI says")
    if kitchen["version"]:
        warnings.extend(_kitchen_warnings(kitchen["version"], sys.modules.get("comfy_kitchen")))
    for name, package in report["packages"].items():
        if package["needed"] and package["reason"]:
            warnings.append(f"{name} is needed: {package['reason']}; run: {package['install']}")
    return warnings


def _kitchen_warnings(version: str, module) -> list[str]:
    """Compare comfy-kitchen with what this pack was written against; ``module`` is None where it is not imported."""
    update = f"run: {pip_command(f'comfy-kitchen>={KITCHEN_MINIMUM}', '--upgrade')}"
    if _release(version) < _release(KITCHEN_MINIMUM):
        return [f"comfy-kitchen {version} is installed, {KITCHEN_MINIMUM} or newer is needed; {update}"]
    missing = [name for name in KITCHEN_NAMES if module is not None and not hasattr(module, name)]
    if missing:
        return [
            f"comfy-kitchen {version} has no {', '.join(missing)}, which {KITCHEN_MINIMUM} has; this pack does not "
            f"know version {version}: report it, or go back to a version that has the name"
        ]
    return []


def main(arguments: list[str] | None = None) -> int:
    """Print the report; returns 0."""
    parser = argparse.ArgumentParser(description="What of the H3 Blackwell Runtime runs here. Installs nothing.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-import", action="store_true", help="import no package and ask no GPU")
    options = parser.parse_args(arguments)
    # Some packages print while they are imported; stdout carries the report alone.
    with contextlib.redirect_stdout(sys.stderr):
        report = probe(import_packages=not options.no_import)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
