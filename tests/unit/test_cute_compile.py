"""The CuTe DSL kernel compiles for every target without a GPU, and its machine code is what the docs say.

Skipped where the package nvidia-cutlass-dsl is absent (the pack's extra `cute`). Nothing is launched.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import pack_module

pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed here (the pack's extra 'cute')")
triton = pytest.importorskip("triton", reason="Triton, whose tools read the machine code, is not installed here")

TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a", (12, 1): "sm_121a"}
SHARED_PER_SM = {(9, 0): 233472, (10, 0): 233472, (12, 0): 102400, (12, 1): 102400}
H3 = 5376
# Instructions an element that a lane carries, without hardware FP4 and with it.
AT_MOST = {"static": (19, 13.5), "measure": (9, 9), "quantise": (17, 11.5)}
ROW_SPILLS = 16  # instructions of a row's 2,000 to 3,000 that may keep addresses in local memory


@pytest.fixture
def device_code(monkeypatch):
    def compiled(columns, mode, capability, folder):
        """``(SASS instructions, registers)``."""
        from cutlass import cute
        from cutlass.base_dsl.compiler import DumpDir

        # CuTe DSL asks the driver which GPU is there, unless this says so.
        monkeypatch.setenv("CUTE_DSL_ARCH", TARGETS[capability])
        folder.mkdir(exist_ok=True)
        host = pack_module("kernels.fused.norm_modulate_nvfp4__cute")
        host.build(
            columns, mode, capability, SHARED_PER_SM[capability], (cute.KeepCUBIN(True), DumpDir(str(folder)))
        )  # fmt: skip
        (file,) = folder.glob("*.cubin")
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

        def tool(*command):
            done = subprocess.run([tools / command[0], *command[1:], file], capture_output=True, text=True, check=True)
            return done.stdout

        return tool("nvdisasm", "-c"), int(re.search(r"REG:(\d+)", tool("cuobjdump", "-res-usage"))[1])

    return compiled


def instructions(sass):
    """``([opcode], [opcodes of a loop])``: loops of 200 instructions and more, first the one in front."""
    found, labels, loops = [], {}, []
    for line in sass.splitlines():
        label = re.match(r"\.(L_x_\d+):", line)
        if label:
            labels[label[1]] = len(found)
        code = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*)", line)
        if code:
            found.append(code[1])
            target = re.search(r"`\(\.(L_x_\d+)\)", code[2])
            if code[1].startswith("BRA") and target and len(found) - labels.get(target[1], len(found)) >= 200:
                loops.append(found[labels[target[1]] :])
    return found, loops


@pytest.mark.parametrize("mode", ["static", "measure", "quantise"])
@pytest.mark.parametrize("capability", TARGETS, ids=TARGETS.values())
def test_machine_code_at_h3_width(mode, capability, device_code, tmp_path):
    sass, registers = device_code(H3, mode, capability, tmp_path)
    found, loops = instructions(sass)
    fp4 = capability >= (10, 0)
    host = pack_module("kernels.fused.norm_modulate_nvfp4__cute")
    warps, ctas = host.shape_of(H3)
    assert registers <= min(255, 65536 // (32 * warps * ctas))
    blocks = -(-H3 // 512)
    # Without hardware FP4 there is a second body, for decode scales that are out of the ordinary.
    assert len(loops) == (2 if mode != "measure" and not fp4 else 1)
    assert len(loops[0]) / (blocks * 16) <= AT_MOST[mode][fp4]
    assert sum(op.split(".")[0] in ("STL", "LDL") for op in loops[0]) <= ROW_SPILLS
    assert sum("LDG" in op and "128" in op for op in loops[0]) == blocks * 6  # x, factor, offset: two a block each
    assert not [op for op in loops[0] if op.startswith("LDG") and "128" not in op and ".64" in op]
    assert sum("E2M1" in op for op in found) == (blocks * 8 if fp4 and mode != "measure" else 0)


@pytest.mark.parametrize("columns", [16, 512, 528, 1024, 8192])
def test_other_widths_compile(columns, device_code, tmp_path):
    sass, registers = device_code(columns, "static", (9, 0), tmp_path)
    assert registers <= 255 and "LDG.E.128" in sass


def test_variable_is_left_alone(device_code, tmp_path, monkeypatch):
    """The target is an argument of the compiler; the user's CUTE_DSL_ARCH stays what it was."""
    import os

    device_code(16, "static", (12, 0), tmp_path)
    assert os.environ["CUTE_DSL_ARCH"] == "sm_120a"


def test_what_is_refused():
    host = pack_module("kernels.fused.norm_modulate_nvfp4__cute")
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    weight, table = x[0], torch.zeros(1, 32)
    given = (x, weight, 1e-5, table, table, [(0, 2, 0)], None)
    assert host.accepts(*given, "fused") is None
    assert "norm of its own" in host.accepts(*given, "aten")
    wide = torch.zeros(1, host.MAX_COLUMNS + 16, dtype=torch.bfloat16)
    assert "columns" in host.accepts(wide, wide[0], 1e-5, wide.float(), wide.float(), [], None, "fused")
    assert "CUDA" in host.refuse(torch.device("cpu"))
    assert host.package_refusal() is None
