"""The house rules that a machine can check, over every Python file that ships; each rule is shown to bite."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comfy_server import PACK_ROOT

MAX_LINES = 600
OWN = {"nodes", "kernels", "install", "tests", "conftest"}
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "node_helpers",
    "server",
}
HEAVY = {"triton", "cutlass", "flash_attn", "sageattention", "sageattn3"}  # only behind a load()
PROCESSES = {"system", "popen", "execv", "execve", "spawnl", "spawnv"}
# A file of the part on the left may import from the parts on the right.
ALLOWED = {"": {"nodes"}, "install": set(), "nodes": {"nodes", "kernels", "install"}, "kernels": {"kernels"}}
MACHINE_PATH = re.compile(r"(?<![\w.:/<>{}*-])/(?:home|root|work|workspace|tmp|usr|opt|mnt|Users)/\w|[A-Z]:\\\w")

Findings = Iterator[tuple[int, str]]


def python_files(*, tests: bool) -> list[str]:
    """Paths below the pack's root of its own Python files; what lies in hidden folders is not ours."""
    paths = (path.relative_to(PACK_ROOT) for path in PACK_ROOT.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in paths
        if not any(part.startswith(".") for part in path.parts) and (tests or path.parts[0] != "tests")
    )


def imports(tree: ast.AST, file: str) -> Iterator[tuple[int, int, str]]:
    """Every import, lazy ones too, as ``(line, level, dotted name)``; a relative one is resolved to the pack's root.

    ``from .. import a`` may name a module or an attribute; both are below the same part, which is what is asked.
    """
    package = Path(file).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, 0, node.module
        elif isinstance(node, ast.ImportFrom):
            above = node.level - 1
            if above > len(package):
                yield node.lineno, node.level, "<outside>"
                continue
            base = package[: len(package) - above]
            tails = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.lineno, node.level, ".".join((*base, tail))) for tail in tails)


DEVICE_CODE = re.compile(r"(^|/)_\w+_(triton|cute)\.py$")


def one_way(tree: ast.AST, file: str) -> Findings:
    """nodes -> kernels; kernels never see ComfyUI; install.py and the root stand alone; nothing imports tests."""
    part = "" if file == "__init__.py" else Path(file).with_suffix("").parts[0]
    for line, level, name in imports(tree, file):
        top = name.split(".")[0]
        if level == 0 and top in OWN:
            yield line, f"absolute import of {name}; inside the pack imports are relative"
        elif level and top not in ALLOWED.get(part, set()):
            yield line, f"{part or 'the root'} may not import {name}"
        elif level == 0 and part == "kernels" and top in COMFYUI:
            yield line, f"kernels may not import {name}"
        elif level == 0 and part in ("install", "") and top not in sys.stdlib_module_names:
            yield line, f"only the standard library may be imported here, not {name}"


def backends_apart(tree: ast.AST, file: str) -> Findings:
    """An attention backend never imports another one."""
    if file.startswith("kernels/attention/backends/"):
        for line, level, name in imports(tree, file):
            if level and name.startswith("kernels.attention.backends"):
                yield line, f"a backend may not import {name}"


def heavy_in_functions(tree: ast.AST, file: str) -> Findings:
    """triton and its like are imported when a kernel is loaded, never when the pack is.

    Files of device code (``_*_triton.py``, ``_*_cute.py``) import them at the top, since their functions are compiled
    from their globals; such a file may then be imported inside a function only, or by another one of its kind.
    """
    if DEVICE_CODE.search(file):
        return
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in inside:
            names = [alias.name for alias in node.names]
            named = [node.module, *names] if isinstance(node, ast.ImportFrom) and node.module else names
            for name in named:
                if name.split(".")[0] in HEAVY or DEVICE_CODE.search(f"{name}.py"):
                    yield node.lineno, f"{name} is imported with the module; import it inside a function"


def nothing_dangerous(tree: ast.AST, file: str) -> Findings:
    """What the registry's scanners refuse."""
    for line, _, name in imports(tree, file):
        if name.split(".")[0] in {"subprocess", "pickle"}:
            yield line, f"import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in PROCESSES:
                yield node.lineno, f"os.{node.attr}"
            if node.attr == "import_module":
                yield node.lineno, "import_module"
        elif isinstance(node, ast.ImportFrom) and any(
            alias.name in {"import_module", *PROCESSES} for alias in node.names
        ):
            yield node.lineno, "import of a name that starts processes or imports by text"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"eval", "exec"}:
                yield node.lineno, f"{node.func.id}()"
            if node.func.id == "__import__" and file != "install.py":
                yield node.lineno, "__import__ outside the probe"


def honest_errors(tree: ast.AST, file: str) -> Findings:
    """ComfyUI's cancel is a BaseException and must pass; python -O drops asserts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert; raise instead"
        elif isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in caught:
                if kind is None or (isinstance(kind, ast.Name) and kind.id in {"BaseException", "KeyboardInterrupt"}):
                    yield node.lineno, "except that swallows a cancel"


def no_exact_capability(tree: ast.AST, file: str) -> Findings:
    """A compute capability is compared with >=, or by family: a test for (12, 0) forgets 12.1."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for operator in node.ops:
            if isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) and any(map(names_capability, sides)):
                yield node.lineno, f"capability compared for equality: {ast.unparse(node)}"


def names_capability(node: ast.AST) -> bool:
    """``(12, 0)``, ``"sm_120"``, or a collection that holds one."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        if len(values) == 2 and all(type(value) is int for value in values):
            return isinstance(node, ast.Tuple) and 7 <= values[0] <= 19 and 0 <= values[1] <= 9
        return any(map(names_capability, node.elts))
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(re.fullmatch(r"sm_\d+a?", node.value))
    )


RULES: tuple[Callable[[ast.AST, str], Findings], ...] = (
    one_way,
    backends_apart,
    heavy_in_functions,
    nothing_dangerous,
    honest_errors,
    no_exact_capability,
)


def findings(file: str, source: str) -> list[str]:
    """All findings of all rules on one file, as lines to read."""
    tree = ast.parse(source)
    # A candidate is loaded as if it lay among the ops (kernels/measure/candidate.py).
    judged_as = re.sub(r"^research/candidates/", "kernels/fused/", file)
    found = [f"{file}:{line}: {text}" for rule in RULES for line, text in rule(tree, judged_as)]
    for number, line in enumerate(source.splitlines(), 1):
        if MACHINE_PATH.search(line):
            found.append(f"{file}:{number}: path of one machine: {line.strip()}")
    return found


@pytest.mark.parametrize("file", python_files(tests=False))
def test_shipped_file_keeps_the_rules(file):
    assert findings(file, (PACK_ROOT / file).read_text(encoding="utf-8")) == []


def test_files_are_short():
    lengths = {
        file: len((PACK_ROOT / file).read_text(encoding="utf-8").splitlines()) for file in python_files(tests=True)
    }
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_the_walk_sees_the_pack():
    files = python_files(tests=False)
    assert {"__init__.py", "install.py", "nodes/__init__.py", "kernels/attention/backends/sdpa.py"} <= set(files)
    assert not any(file.startswith(("tests/", ".")) for file in files)


BACKEND = "kernels/attention/backends/mine.py"
BAD = [
    ("kernels/nvfp4.py", "def f():\n    import comfy.ops", "may not import comfy.ops"),
    ("kernels/nvfp4.py", "import folder_paths", "may not import folder_paths"),
    ("kernels/fused/op.py", "from ...nodes import adapt", "kernels may not import nodes"),
    ("kernels/fused/op.py", "from ... import install", "kernels may not import install"),
    ("kernels/nvfp4.py", "from .... import x", "may not import <outside>"),
    ("kernels/nvfp4.py", "import kernels.discover", "absolute import"),
    ("nodes/load.py", "from nodes import adapt", "absolute import"),
    ("nodes/load.py", "from ..tests import conftest", "nodes may not import tests"),
    ("install.py", "from .kernels import discover", "install may not import kernels"),
    ("install.py", "import torch", "only the standard library"),
    ("__init__.py", "from .kernels import nvfp4", "the root may not import kernels"),
    (BACKEND, "def load():\n    from .sdpa import attend", "a backend may not import"),
    (BACKEND, "def load():\n    from . import sdpa", "a backend may not import"),
    (BACKEND, "import triton.language as tl", "inside a function"),
    (
        "nodes/load.py",
        "try:\n    from flash_attn.cute import x\nexcept ImportError:\n    x = None",
        "inside a function",
    ),
    ("nodes/load.py", "import subprocess", "import of subprocess"),
    ("nodes/load.py", "def f():\n    from pickle import loads", "import of pickle"),
    ("nodes/load.py", "import os\nos.system('x')", "os.system"),
    ("nodes/load.py", "from os import system", "starts processes"),
    ("nodes/load.py", "eval('1')", "eval()"),
    ("nodes/load.py", "exec('1')", "exec()"),
    ("nodes/load.py", "import importlib\nimportlib.import_module('x')", "import_module"),
    ("nodes/load.py", "__import__('x')", "__import__ outside"),
    ("nodes/load.py", "assert True", "assert; raise"),
    ("nodes/load.py", "try:\n    f()\nexcept:\n    pass", "swallows a cancel"),
    ("nodes/load.py", "try:\n    f()\nexcept (ValueError, BaseException):\n    pass", "swallows a cancel"),
    ("nodes/load.py", "ok = cc == (12, 0)", "compared for equality"),
    ("nodes/load.py", "ok = cc in {(12, 0), (12, 1)}", "compared for equality"),
    ("nodes/load.py", "ok = arch != 'sm_120'", "compared for equality"),
    ("nodes/load.py", "model = '/home/me/models/x'", "path of one machine"),
    ("research/candidates/_mine_triton.py", "from ...nodes import adapt", "kernels may not import nodes"),
    ("research/candidates/mine.py", "import triton", "inside a function"),
    ("research/other.py", "from . import kernels", "may not import"),
    ("nodes/load.py", r"model = 'D:\models'", "path of one machine"),
]


@pytest.mark.parametrize(("file", "source", "expected"), BAD, ids=[f"{file}-{text}" for file, _, text in BAD])
def test_rule_bites(file, source, expected):
    assert any(expected in found for found in findings(file, source))


GOOD = [
    ("kernels/attention/backends/mine.py", "from .. import Backend\ndef load():\n    import triton"),
    ("nodes/load.py", "import comfy.ops\nfrom ..kernels import nvfp4\nfrom .. import install\nfrom . import adapt"),
    ("nodes/load.py", "model.eval()\nos.path.join(a, b)\nspec.loader.exec_module(module)"),
    ("nodes/load.py", "try:\n    f()\nexcept Exception as error:\n    text = str(error)"),
    ("nodes/load.py", "ok = cc >= (10, 0)\nsame = tensor.shape == (64, 16)\nfew = x in (1, 2, 3)"),
    ("nodes/load.py", "url = 'https://example.org/home/x'\nratio = 'a/b'"),
    ("install.py", "__import__('x')"),
    ("research/candidates/_mine_triton.py", "import triton\nfrom . import _launch\nfrom ._words_triton import ASM"),
]


@pytest.mark.parametrize(("file", "source"), GOOD)
def test_rule_spares(file, source):
    assert findings(file, source) == []
