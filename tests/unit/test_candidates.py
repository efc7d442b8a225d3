"""Candidates under research/candidates: loadable, compiled for every target, and right when interpreted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

triton = pytest.importorskip("triton", reason="Triton is not installed here")

from unit.test_kernels_compile import ROWS_HALF, TARGETS, compile_for

FILES = sorted((PACK_ROOT / "research" / "candidates").glob("*.py"))
BACKWARDS = next(path for path in FILES if path.name == "_rows_backwards_triton.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_candidate_says_what_it_is(path):
    module = pack_module("kernels.measure.candidate").load(path)
    assert module.__package__ == pack_module("kernels.fused").__name__
    assert callable(module.run) and module.TITLE.strip()
    assert pack_module("kernels.measure.experiments").NUMBER.search(module.HYPOTHESIS)


@pytest.mark.parametrize("capability", TARGETS, ids=TARGETS.values())
@pytest.mark.parametrize("static", [False, True])
def test_machine_code_of_the_larger_tiles(static, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    module = pack_module("kernels.measure.candidate").load(BACKWARDS)
    constants = {"HALF": ROWS_HALF, "HEAD": 64, "STATIC": static, "EVEN": True, "ASM": True}
    tile = {"R": module.TILE.rows, "W": module.TILE.words}
    sass, registers = compile_for(
        module.backwards_tiles, {**constants, **tile}, module.TILE.warps, capability, tmp_path
    )
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", sass, re.M)
    assert not [op for op in operations if op.split(".")[0] in ("STL", "LDL")], "spills"
    assert registers <= 64
    if static and capability == 90:  # what its docstring says
        elements = 2 * module.TILE.rows * module.TILE.words
        assert len(operations) * 32 * module.TILE.warps / elements <= 14
    assert any("LDG" in op and "128" in op for op in operations)
    assert any("E2M1" in op for op in operations) is (capability >= 100)


def test_larger_tiles_interpreted_give_the_shipped_bytes(tmp_path):
    script = Path(__file__).with_name("interpret_candidates.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(BACKWARDS), "rows_nvfp4"], env=env, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"ran": ["rows, dynamic", "rows, static", "heads, dynamic"], "differ": []}
