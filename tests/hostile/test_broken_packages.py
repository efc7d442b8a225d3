"""A package that raises when it is imported costs a reason in the report, and no node.

One child process does the loading, by ComfyUI's own loader: first undisturbed, then once for every package and kind of
error, from a folder with a plain name and from one called ``My-Pack.v2``. ComfyUI itself imports some of the packages
(comfy_kitchen, av), so it is imported before they break.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_server import PACK_ROOT
from conftest import comfyui_folder, use_comfyui

# Module that breaks -> the name under which install.py reports it.
PACKAGES = {
    "sageattention": "sageattention",
    "sageattn3": "sageattn3",
    "flash_attn": "flash-attn",
    "triton": "triton",
    "av": "av",
    "comfy_kitchen": "comfy-kitchen",
}
KINDS = (ImportError, OSError, AssertionError, RuntimeError)
FOLDERS = ("h3-blackwell-runtime", "My-Pack.v2")
CASES = [(folder, module, kind.__name__) for folder in FOLDERS for module in PACKAGES for kind in KINDS]


class Broken:
    """A meta-path finder under which importing ``module``, or anything below it, raises ``kind``."""

    def __init__(self, module: str, kind: type[Exception]):
        self.module, self.kind = module, kind

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.module:
            raise self.kind(f"{name} does not fit this machine")


def load(nodes, folder: Path) -> dict:
    """Load the pack in ``folder`` as at a start of ComfyUI; return its node ids and what its probe says of packages."""
    name = str(folder).replace(".", "_x_")
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]
    before = dict(nodes.NODE_CLASS_MAPPINGS)
    nodes.NODE_CLASS_MAPPINGS.clear()
    try:
        loaded = asyncio.run(nodes.load_custom_node(str(folder)))
        ids = sorted(nodes.NODE_CLASS_MAPPINGS)
    finally:
        nodes.NODE_CLASS_MAPPINGS.clear()
        nodes.NODE_CLASS_MAPPINGS.update(before)
    packages = importlib.import_module(f"{name}.install").probe()["packages"]
    attention = importlib.import_module(f"{name}.kernels.attention")
    return {
        "loaded": loaded,
        "ids": ids,
        "reasons": {package: facts["reason"] for package, facts in packages.items()},
        "attention": {backend: reason for backend, _, reason in attention.list_backends("cpu")},
    }


def child(custom_nodes: Path) -> dict:
    """Everything the tests look at: ``{"undisturbed": {folder: result}, "folder module kind": result}``."""
    use_comfyui()
    nodes = importlib.import_module("nodes")
    results = {"undisturbed": {folder: load(nodes, custom_nodes / folder) for folder in FOLDERS}}
    for folder, module, kind in CASES:
        gone = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == module}
        finder = Broken(module, next(known for known in KINDS if known.__name__ == kind))
        sys.meta_path.insert(0, finder)
        try:
            results[f"{folder} {module} {kind}"] = load(nodes, custom_nodes / folder)
        finally:
            sys.meta_path.remove(finder)
            sys.modules.update(gone)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = comfyui_folder()
    custom_nodes = tmp_path_factory.mktemp("custom_nodes")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns(".*", "__pycache__", "tests")
        shutil.copytree(PACK_ROOT, custom_nodes / name, ignore=ignore)
    out = custom_nodes / "results.json"
    environment = {**os.environ, "COMFYUI_PATH": str(folder), "PYTHONPATH": str(PACK_ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, __file__, str(custom_nodes), str(out)],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
    if not out.exists():
        pytest.fail(f"the child ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def expected_ids(results):
    """The nodes of an undisturbed start, checked against node_list.json where the pack has one."""
    ids = results["undisturbed"][FOLDERS[0]]["ids"]
    listed = PACK_ROOT / "node_list.json"
    if listed.exists():
        assert set(json.loads(listed.read_text(encoding="utf-8"))) == set(ids)
    return ids


def test_both_folders_load_undisturbed(results, expected_ids):
    assert "H3BW_Environment" in expected_ids
    assert len(expected_ids) > 1
    for folder in FOLDERS:
        assert results["undisturbed"][folder]["loaded"]
        assert results["undisturbed"][folder]["ids"] == expected_ids
        assert results["undisturbed"][folder]["reasons"]["av"] is None


@pytest.mark.parametrize(("folder", "module", "kind"), CASES)
def test_every_node_registers_and_the_reason_is_kept(results, expected_ids, folder, module, kind):
    result = results[f"{folder} {module} {kind}"]
    assert result["loaded"]
    assert result["ids"] == expected_ids
    undisturbed = results["undisturbed"][folder]["reasons"]
    broken = PACKAGES[module]
    assert result["reasons"][broken] == f"{kind}: {module} does not fit this machine"
    others = {name for name in undisturbed if name not in (broken, "flash-attn-4", "comfy-kitchen")}
    assert {name: result["reasons"][name] for name in others} == {name: undisturbed[name] for name in others}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_a_broken_kitchen_leaves_sdpa(results, folder, kind):
    backends = results[f"{folder} comfy_kitchen {kind}"]["attention"]
    assert backends["sdpa"] is None
    assert backends["kitchen_int8"] == f"does not load ({kind}: comfy_kitchen does not fit this machine)"


if __name__ == "__main__":
    found = child(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
