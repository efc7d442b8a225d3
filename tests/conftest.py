"""What every test shares: the pack loaded as ComfyUI loads it, ComfyUI itself, and the skip of gpu tests.

    from conftest import pack_module
    nvfp4 = pack_module("kernels.nvfp4")     # needs no ComfyUI

    def test_nodes(pack): ...                # fixture: the pack, with ComfyUI importable; skipped without ComfyUI
    def test_core(comfy): ...                # fixture: ComfyUI's package `comfy`, on the CPU where there is no CUDA

Nothing heavy is imported while tests are collected. The pack's root is never on sys.path: its folder nodes/ would hide
ComfyUI's nodes.py.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from comfy_server import PACK_ROOT, make_base_directory

PACK_MODULE = "custom_nodes_h3bw"

# `python -m pytest` puts the working folder, the pack's root, on sys.path.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACK_ROOT]


def pack_module(dotted: str = "") -> ModuleType:
    """A module of the pack, by its dotted name inside it; the pack itself without a name.

    Loaded as ComfyUI does it: by file location, under a name that is no path on sys.path, so that only relative imports
    inside the pack work. `kernels` needs no ComfyUI; for `nodes` it is made importable first (the test is skipped where
    there is none).
    """
    if PACK_MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK_MODULE, PACK_ROOT / "__init__.py", submodule_search_locations=[str(PACK_ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[PACK_MODULE]
            raise
    if not dotted:
        return sys.modules[PACK_MODULE]
    if dotted.split(".")[0] == "nodes":
        use_comfyui()
    return importlib.import_module(f"{PACK_MODULE}.{dotted}")


def comfyui_folder() -> Path:
    """The ComfyUI under test; skips the test, or the module being collected, where there is none."""
    for variable in ("H3BW_COMFYUI", "COMFYUI_PATH"):
        named = os.environ.get(variable)
        if named and (Path(named) / "comfy").is_dir():
            return Path(named).resolve()
        if named:
            pytest.skip(f"{variable} is set, but holds no ComfyUI (no folder comfy)", allow_module_level=True)
    pytest.skip("no ComfyUI: set H3BW_COMFYUI, or run tests/sandbox.py test", allow_module_level=True)


def use_comfyui() -> ModuleType:
    """Makes ComfyUI importable, first on sys.path, and returns its package `comfy`.

    ComfyUI reads sys.argv while it is imported. It gets `--cpu` where torch sees no CUDA device, and a base directory
    of its own, so that no test writes into the ComfyUI folder.
    """
    folder = comfyui_folder()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        drop_folder_posing_as_nodes()
        import torch

        base = Path(tempfile.mkdtemp(prefix="h3bw-base-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        arguments = ["pytest", "--base-directory", str(make_base_directory(base, pack=None))]
        real, sys.argv = sys.argv, arguments + ([] if torch.cuda.is_available() else ["--cpu"])
        try:
            importlib.import_module("comfy.options").enable_args_parsing()
            importlib.import_module("comfy.cli_args")
        finally:
            sys.argv = real
    return importlib.import_module("comfy")


def drop_folder_posing_as_nodes(rather: ModuleType | None = None) -> None:
    """Takes the folder tests/nodes out of sys.modules, where pytest enters it as the package `nodes`.

    ComfyUI's `import nodes` would otherwise get that folder.
    """
    if hasattr(sys.modules.get("nodes"), "__path__"):
        del sys.modules["nodes"]
        if rather is not None and not hasattr(rather, "__path__"):
            sys.modules["nodes"] = rather


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    before = sys.modules.get("nodes")
    report = yield
    drop_folder_posing_as_nodes(rather=before)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"gpu: torch {torch.__version__} sees no CUDA device")


@pytest.fixture(scope="session")
def comfy() -> ModuleType:
    """ComfyUI's package `comfy`, importable like all of ComfyUI from then on."""
    return use_comfyui()


@pytest.fixture(scope="session")
def pack(comfy: ModuleType) -> ModuleType:
    """The pack as ComfyUI loads it, with ComfyUI importable."""
    return pack_module()
