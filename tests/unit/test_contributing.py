"""CONTRIBUTING.md's worked examples: each file, written into a copy of the pack, is found and does what it says."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from comfy_server import PACK_ROOT

EXAMPLE = re.compile(r"^`(kernels/[\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_A_COPY = r"""
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch
attention, fused = importlib.import_module("kernels.attention"), importlib.import_module("kernels.fused")
generator = torch.Generator().manual_seed(0)
found = {"names": attention.names(), "ops": sorted(fused.OPS), "broken": dict(fused.BROKEN)}
if "plain" in found["names"]:
    # Views of one buffer, as H3 has them, and rows that nothing divides.
    q, k, v = torch.randn(1, 17, 3, 2, 64, generator=generator).bfloat16().permute(2, 0, 3, 1, 4)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    ours = attention.run("plain", q, k, v)
    found["error"] = float((ours.double() - exact).norm() / exact.norm())
    found["dtype"] = str(ours.dtype)
    long = torch.empty(1, 1, 20_000, 64, device="meta")
    found["refusal"] = attention.explain(attention.Call.of(long, long, long))["plain"]
    found["listed"] = [entry for entry in attention.list_backends("cpu") if entry[0] == "plain"]
if "scaled_add" in found["ops"]:
    x, y = (torch.randn(17, 80, generator=generator).bfloat16() for _ in range(2))
    expected = (x.double() + 0.3 * y.double()).bfloat16()
    ours = fused.scaled_add(x, y, 0.3)
    found["ulps"] = int((ours.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max())
    try:
        fused.scaled_add(x, y, 0.3, impl="triton")
    except fused.FusedRefused as refused:
        found["op_refusal"] = str(refused)
    try:
        fused.scaled_add(x, y[:3], 0.3)
    except ValueError as error:
        found["op_error"] = str(error)
print(json.dumps(found))
"""


def examples() -> dict[str, str]:
    return dict(EXAMPLE.findall((PACK_ROOT / "CONTRIBUTING.md").read_text("utf-8")))


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """What a process finds in a copy of ``kernels/`` without the examples, and with them."""
    copy = tmp_path_factory.mktemp("pack")
    shutil.copytree(PACK_ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))

    def run():
        command = [sys.executable, "-c", IN_A_COPY, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=copy)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    before = run()
    for path, text in examples().items():
        assert not (copy / path).exists(), f"{path} is an example and in the pack"
        (copy / path).write_text(text, encoding="utf-8")
    return before, run()


def test_there_is_one_example_of_each_kind():
    assert sorted(path.rpartition("/")[0] for path in examples()) == ["kernels/attention/backends", "kernels/fused"]


def test_the_backend_is_found_and_exact(used):
    before, after = used
    assert set(after["names"]) - set(before["names"]) == {"plain"}
    assert after["error"] < 5e-3 and after["dtype"] == "torch.bfloat16"
    assert after["listed"] == [["plain", True, None]]
    assert after["refusal"].startswith("writes 400000000 scores out")


def test_the_op_is_found_and_refuses_in_sentences(used):
    before, after = used
    assert set(after["ops"]) - set(before["ops"]) == {"scaled_add"} and not after["broken"]
    assert after["ulps"] <= 1
    assert "Triton kernels need a CUDA device, have cpu" in after["op_refusal"]
    assert after["op_error"] == "scaled_add: y must be (17, 80) torch.bfloat16 like x, have (3, 80) torch.bfloat16"


def test_the_examples_keep_the_house_rules(tmp_path):
    """Ruff, with the pack's own configuration."""
    for path, text in examples().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--config", str(PACK_ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
