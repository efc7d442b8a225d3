"""What the registry, the Manager and ComfyUI read from the files at the pack's root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")

PROJECT = tomllib.loads((PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def specifiers(requirements):
    """``name -> version part`` of simple requirements."""
    parts = (re.fullmatch(r"([A-Za-z0-9-]+)(.*)", requirement) for requirement in requirements)
    return {part[1]: part[2] for part in parts}


def test_project_fields():
    project = PROJECT["project"]
    assert project["name"] == "h3-blackwell-runtime"
    assert project["version"] == "0.1.0"
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert project["requires-python"] == ">=3.10"
    assert 20 < len(project["description"]) < 200


def test_registry_fields():
    comfy = PROJECT["tool"]["comfy"]
    assert comfy["DisplayName"] == "H3 Blackwell Runtime"
    assert comfy["requires-comfyui"] == ">=0.30.0"
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]+", comfy["PublisherId"])


def test_dependencies_are_lower_bounds_of_what_comfyui_brings():
    needed = specifiers(PROJECT["project"]["dependencies"])
    assert list(needed) == ["comfy-kitchen", "safetensors", "numpy", "pillow", "av"]
    assert needed["comfy-kitchen"] == ">=0.2.26"
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"sage", "fa4", "cute", "plots"}
    optional = specifiers(requirement for extra in extras.values() for requirement in extra)
    for name, bound in {**needed, **optional}.items():
        assert re.fullmatch(r">=\d[\d.b]*", bound), f"{name}{bound}"
        assert name not in ("torch", "torchvision", "torchaudio")


def test_the_probe_advises_what_the_project_declares():
    install = pack_module("install")
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *extras["sage"], *extras["fa4"], *extras["cute"]]
    advised = [package.requirement for package in install.PACKAGES]
    assert set(declared) <= set(advised)
    assert [package.requirement for package in install.PACKAGES if package.needed] == PROJECT["project"]["dependencies"]
    assert PROJECT["tool"]["comfy"]["requires-comfyui"] == f">={install.COMFYUI_MINIMUM}"


def test_dependencies_do_not_ask_for_more_than_the_oldest_comfyui(comfy):
    """Installing the pack must not move a package that ComfyUI has chosen."""
    requirements = Path(comfy.__path__[0]).parent / "requirements.txt"
    theirs = dict(re.findall(r"^([A-Za-z-]+)[>=]=([\d.]+)", requirements.read_text(encoding="utf-8"), re.MULTILINE))
    for name, bound in specifiers(PROJECT["project"]["dependencies"]).items():
        if name in theirs:
            ours, chosen = ([int(part) for part in text.split(".")] for text in (bound[2:], theirs[name]))
            assert ours <= chosen, f"{name}: the pack wants {bound}, ComfyUI brings {theirs[name]}"


def test_changelog_has_the_version():
    text = (PACK_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\] - (\S+)$", text, re.MULTILINE)
    assert versions[0][0] == PROJECT["project"]["version"]
    assert re.fullmatch(r"Unreleased|\d{4}-\d{2}-\d{2}", versions[0][1])


def test_license_is_the_full_text():
    text = (PACK_ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.count("\n") > 190


# ---------------------------------------------------------------- the archive

LEFT_OUT = [
    "tests/conftest.py",
    "tests/unit/test_packaging.py",
    ".ci/run",
    ".sandbox/venv/pyvenv.cfg",
    "research/records/run.json",
    "research/experiments.json",
    "research/candidates/_rows_backwards_triton.py",
    "deploy/Dockerfile.spark",  # built from a checkout, never from the archive
    ".gitignore",
    "nodes/__pycache__/load.cpython-311.pyc",
]
KEPT = [
    "__init__.py",
    "install.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "node_list.json",
    "nodes/load.py",
    "kernels/attention/backends/sdpa.py",
    "workflows/selftest.json",
    "workflows/api/selftest.json",
    "web/docs/H3BW_LoadNVFP4.md",
    "locales/en/nodeDefs.json",
]


def test_comfyignore_leaves_out_what_does_not_run():
    pathspec = pytest.importorskip("pathspec", reason="pathspec comes with comfy-cli")
    lines = (PACK_ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    ignored = pathspec.PathSpec.from_lines("gitwildmatch", lines)
    assert [path for path in LEFT_OUT if not ignored.match_file(path)] == []
    assert [path for path in KEPT if ignored.match_file(path)] == []


@pytest.fixture
def comfy_cli(tmp_path):
    """Run comfy-cli on a copy of the pack, with a home of its own and its telemetry off."""
    beside = Path(sys.executable).with_name("comfy.exe" if os.name == "nt" else "comfy")
    command = str(beside) if beside.exists() else shutil.which("comfy")
    if command is None:
        pytest.skip("comfy-cli is not installed")
    copy = tmp_path / "pack"
    ignore = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(PACK_ROOT, copy, ignore=ignore)
    shutil.copy(PACK_ROOT / ".comfyignore", copy)
    environment = {**os.environ, "HOME": str(tmp_path), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}

    def run(*arguments):
        whole = [command, "--skip-prompt", "--no-enable-telemetry", *arguments]
        done = subprocess.run(
            whole, cwd=copy, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_comfy_node_validate_passes(comfy_cli):
    code, output = comfy_cli("node", "validate")
    assert code == 0, output
    assert "All validation checks passed successfully" in output
    assert "Warning" not in output


def test_comfyui_reads_the_project_file(comfy):
    from comfy_config import config_parser

    found = config_parser.extract_node_configuration(str(PACK_ROOT))
    assert found.project.name == "h3-blackwell-runtime"
    assert found.project.version == "0.1.0"
    assert found.project.license.text == "Apache-2.0"
    assert found.project.supported_comfyui_version == ">=0.30.0"
    assert found.project.supported_accelerators == ["GPU :: NVIDIA CUDA"]
    assert found.tool_comfy.display_name == "H3 Blackwell Runtime"
