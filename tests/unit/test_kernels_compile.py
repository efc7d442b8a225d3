"""Every Triton kernel compiles for every target without a GPU, and its machine code is what the docs say.

Counted in the SASS: the hardware FP4 conversion on 10.0 and newer (and only there), 16-byte loads, no spills, and a
stated number of registers. Runs wherever Triton is installed; nothing is launched.
"""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import pack_module

triton = pytest.importorskip("triton", reason="Triton is not installed here")

TARGETS = {90: "sm_90a", 100: "sm_100a", 120: "sm_120a", 121: "sm_121a"}
POINTERS = {
    "x_ptr": "*i32", "y_ptr": "*i32", "weight_ptr": "*i32", "factor_ptr": "*i32", "offset_ptr": "*i32",
    "gate_ptr": "*i32", "index_ptr": "*i32", "amax_ptr": "*i32", "out_ptr": "*i32", "rstd_ptr": "*fp32",
    "decode_ptr": "*fp32", "codes_ptr": "*u8", "scales_ptr": "*u8", "scale_ptr": "*fp32", "shift_ptr": "*fp32",
    "eps": "fp32", "gate_up_ptr": "*bf16", "hidden_ptr": "*bf16", "low_rank_ptr": "*bf16", "z_ptr": "*bf16",
    "alpha": "fp32",
}  # fmt: skip
ALIGNED = (
    "F", "N", "rank", "hidden_stride", "low_rank_stride", "K", "x_stride", "y_stride", "head_stride", "scale_stride",
    "shift_stride",
)  # fmt: skip
HALF, SWIGLU_HALF, ROWS_HALF = 2688, 7168, 3584  # words of a row: H3's hidden, ffn and inner widths


def cases():
    """``name -> (kernel, constexprs, warps, converts to FP4, registers at most, has 16-byte loads)``."""
    modulate = pack_module("kernels.fused._modulate_triton")
    swiglu = pack_module("kernels.fused._swiglu_triton")
    gate = pack_module("kernels.fused._gate_triton")
    side = pack_module("kernels.fused._side_triton")
    m, q, a = modulate.MEASURE, modulate.QUANTISE, modulate.AMAX
    row_q, row_m, b = modulate.ROW_QUANTISE, modulate.ROW_MODULATE, modulate.MODULATE
    tail = modulate.tail_of
    tile = {"EVEN": True, "ASM": True}
    found = {
        "prepare": (modulate.prepare, {"FIRST": True, "BLOCK": 1024, "ASM": True}, 4, False, 64, False),
        "measure": (
            modulate.measure,
            {"AMAX": True, "HALF": HALF, "R": m.rows, "BLOCK": m.words, "TAIL": tail(HALF, m.words), "ASM": True},
            m.warps, False, 96, True,
        ),
        "amax": (modulate.amax_tiles, {"R": a.rows, "W": a.words, "ASM": True}, a.warps, False, 96, True),
        "modulate bf16": (
            modulate.modulate_quantise,
            {"NORM": False, "STATIC": False, "NVFP4": False, "R": b.rows, "W": b.words, **tile},
            b.warps, False, 96, True,
        ),
        "row bf16": (
            modulate.row_modulate,
            {"HALF": HALF, "R": row_m.rows, "W": row_m.words, "TAIL": tail(HALF, row_m.words),
             "ASM": True},
            row_m.warps, False, 96, True,
        ),
        "row static": (
            modulate.row_quantise,
            {"HALF": HALF, "R": row_q.rows, "W": row_q.words, "ASM": True},
            row_q.warps, True, 96, True,
        ),
        "swiglu bf16": (
            swiglu.swiglu_tiles,
            {"HALF": SWIGLU_HALF, "R": swiglu.ELEMENTWISE.rows, "W": swiglu.ELEMENTWISE.words, **tile},
            swiglu.ELEMENTWISE.warps, False, 96, True,
        ),
        "swiglu side": (
            side.swiglu_side_tiles,
            {"R": side.TILE_ROWS, "W": side.TILE_COLUMNS, "D": 32, "ASM": True},
            side.WARPS, False, 255, True,
        ),
        "low-rank add": (
            side.low_rank_add_tiles,
            {"R": side.ADD_ROWS, "W": side.ADD_COLUMNS, "D": 32},
            side.ADD_WARPS, False, 255, True,
        ),
        "gate": (
            gate.gate_tiles,
            {"HALF": HALF, "R": gate.TILE.rows, "W": gate.TILE.words, "EVEN": False, "ASM": True},
            gate.TILE.warps, False, 96, True,
        ),
    }  # fmt: skip
    for norm in (False, True):
        found[f"quantise norm={norm}"] = (
            modulate.modulate_quantise,
            {"NORM": norm, "STATIC": False, "NVFP4": True, "R": q.rows, "W": q.words, **tile},
            q.warps, True, 200, True,
        )  # fmt: skip
    for name, half, fused in (("swiglu", SWIGLU_HALF, True), ("rows", ROWS_HALF, False)):
        shared = {"HALF": half, "HEAD": half if fused else 64, "SWIGLU": fused, **tile}
        a, q = swiglu.AMAX, swiglu.QUANTISE
        found[f"{name} amax"] = (
            swiglu.amax_tiles, {"R": a.rows, "W": a.words, **shared}, a.warps, False, 96, True
        )  # fmt: skip
        found[f"{name} quantise"] = (
            swiglu.quantise_tiles, {"STATIC": False, "R": q.rows, "W": q.words, **shared}, q.warps, True, 128, True
        )  # fmt: skip
    return found


def compile_for(kernel, constants, warps, capability, folder):
    """``(SASS, registers)`` of a kernel for a target, with every pointer and row stride a multiple of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {**constants, **({"FP4": capability >= 100} if "FP4" in names else {})}
    assert constants.keys() <= set(names), constants.keys() - set(names)
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or (name in ALIGNED and name not in constants)
    }
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def tool(*command):
        done = subprocess.run([tools / command[0], *command[1:], file], capture_output=True, text=True, check=True)
        return done.stdout

    registers = re.search(r"REG:(\d+)", tool("cuobjdump", "-res-usage"))
    return tool("nvdisasm", "-c"), int(registers[1])


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Compile afresh: a cached kernel of another version proves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("capability", TARGETS, ids=TARGETS.values())
@pytest.mark.parametrize(
    "name",
    ["prepare", "measure", "amax", "modulate bf16", "row bf16", "row static", "swiglu bf16", "swiglu side", "gate",
     "quantise norm=False", "quantise norm=True", "swiglu amax", "swiglu quantise", "rows amax", "rows quantise"],
)  # fmt: skip
def test_machine_code(name, capability, tmp_path):
    kernel, constants, warps, converts, at_most, wide = cases()[name]
    sass, registers = compile_for(kernel, constants, warps, capability, tmp_path)
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", sass, re.M)
    assert len(operations) > 50
    assert not [op for op in operations if op.split(".")[0] in ("STL", "LDL")], "spills"
    assert registers <= at_most
    assert any("LDG" in op and "128" in op for op in operations) is wide
    in_hardware = [op for op in operations if "E2M1" in op]
    assert bool(in_hardware) is (converts and capability >= 100)


def test_the_cases_are_all_the_kernels():
    import ast

    folder = Path(pack_module("kernels.fused").__file__).parent
    launched = set()
    for file in sorted(folder.glob("_*_triton.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(node.func.value.id)
    assert launched == {kernel.fn.__name__ for kernel, *_ in cases().values()}


def test_targets_with_fp4_conversion():
    launch = pack_module("kernels.fused._launch")
    wanted = {(8, 0): False, (8, 9): False, (9, 0): False, (10, 0): True, (10, 3): True, (11, 0): True}
    wanted |= {(12, 0): True, (12, 1): True, (13, 0): True}
    assert {capability: launch.has_fp4_conversion(capability) for capability in wanted} == wanted
