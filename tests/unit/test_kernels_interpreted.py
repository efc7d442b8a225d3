"""The Triton kernels, executed by Triton's interpreter on the CPU, against the references."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    script = Path(__file__).with_name("interpret_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_bf16_results_are_equal(found):
    assert len(found["bf16"]) == 16
    assert {name: count for name, count in found["bf16"].items() if count} == {}


def test_codes_scales_and_padding(found):
    """Dynamic: equal. A product with a reciprocal in place of the reference's division moves a code at a tie by a step.

    On the GPU the comparison is with comfy-kitchen's CUDA quantiser, which uses the same reciprocals, and exact.
    """
    assert len(found["nvfp4"]) == 32
    for name, numbers in found["nvfp4"].items():
        assert numbers["scales"] == 0 and numbers["decode"] == 0 and not numbers["padding"], name
        assert numbers["far"] == 0 and numbers["codes"] <= max(1, numbers["elements"] // 100), name


def test_an_all_zero_tensor_gives_zeros(found):
    assert found["zeros"] is True
