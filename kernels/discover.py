"""Find and load the files of a package folder, so that a file dropped in is a file used.

ComfyUI names a pack by the path of its folder, so a package here can be called ``C:/ComfyUI/custom_nodes/My-Pack_x_v2``
with ``.kernels.fused`` after it. The modules are loaded under exactly that dotted name, which keeps their relative
imports and their identity: there is one copy, whoever imports it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import re
import sys
from types import ModuleType

_POSIX_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"():,;]+/)+([^\s/'\"():,;]+)/?")
# Windows folder names often hold spaces; only the last component ends at one.
_WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:[\\/](?:[^\\/:*?\"<>|\r\n']+[\\/])*([^\s\\/:*?\"<>|'(),;]*)")

_found: dict[ModuleType, tuple[dict[str, ModuleType], dict[str, str]]] = {}


def modules(package: ModuleType) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Load every module of ``package``'s folder whose name does not start with ``_``.

    The folder is read once per package object; later calls return the same two dicts.

    Args:
        package: an imported package (it may still be running its ``__init__``).

    Returns:
        ``(name -> module, name -> error text)``, both in alphabetical order. A file that raises at import is in the
        second one, is not left in ``sys.modules``, and does not stop the files after it.
    """
    if package not in _found:
        loaded, broken = {}, {}
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
            if info.name.startswith("_"):
                continue
            try:
                loaded[info.name] = _load(package, info)
            except Exception as error:  # a probe: whatever the file raises is its own affair
                broken[info.name] = reason(error)
        _found[package] = loaded, broken
    return _found[package]


def reason(error: BaseException) -> str:
    """Return ``ExceptionType: message`` with every absolute path in the message cut down to its file name."""
    text = str(error).strip()
    return f"{type(error).__name__}: {without_paths(text)}" if text else type(error).__name__


def without_paths(text: str) -> str:
    """Replace absolute POSIX and Windows paths in ``text`` by their last component: what may go to a browser.

    Not caught: a POSIX path after a folder name that holds a space, and paths relative to something.
    """
    return _POSIX_PATH.sub(r"\1", _WINDOWS_PATH.sub(r"\1", text))


def _load(package: ModuleType, info: pkgutil.ModuleInfo) -> ModuleType:
    name = f"{package.__name__}.{info.name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = info.module_finder.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        undo.pop_all()
    setattr(package, info.name, module)
    return module
