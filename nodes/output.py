"""Where the pack's nodes put their files: under ComfyUI's output folder, numbered, never over an older one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import folder_paths

LONGEST_PREFIX = 200  # characters
LONGEST_FILE = 255  # bytes: where file systems end
LONGEST_STEM = 220  # bytes, of a name that gets an ending, and a temporary one while it is written
# Names that Windows gives to devices, whatever the ending.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)", re.IGNORECASE)
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character, as JSON may hold it; no file name
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]')


def plain_name(stem: str, longest: int) -> bool:
    """Whether a name, without its ending, is a plain file name on every system: no folder, drive, ``..`` or device."""
    return not (
        not stem
        or len(stem) > longest
        or _FORBIDDEN.search(stem)
        or stem[0] == "."
        or stem[-1] in ". "
        or _DEVICES.match(stem)
        or len(stem.encode()) > LONGEST_STEM
    )


def folder(name: str) -> str:
    """The folder ``name`` of the output folder, made where it is missing; ValueError, without the path, if not."""
    path = os.path.join(folder_paths.get_output_directory(), name)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder output/{name} cannot be made: {error.strerror or error}") from error
    return path


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """While open, the new file ``path`` is written.

    An exception or a cancel leaves nothing of it, and an OSError becomes a ValueError that names the file, not its
    folder.
    """
    keep = False
    try:
        yield
        keep = True
    except OSError as error:
        keep = isinstance(error, FileExistsError)  # then it is somebody else's
        raise ValueError(f"{os.path.basename(path)} cannot be written: {error.strerror or error}") from error
    finally:
        if not keep:
            with contextlib.suppress(OSError):
                os.unlink(path)


def place(prefix: str, ending: str, width: int = 0, height: int = 0) -> tuple[str, dict]:
    """Choose a new file under the output folder, as ComfyUI's own save nodes do.

    Args:
        prefix: what the user typed; may hold folders and ComfyUI's ``%date%``-like words.
        ending: such as ``"json"``.
        width, height: for ``%width%`` and ``%height%``.

    Returns:
        ``(full path, {"filename", "subfolder", "type"})``; the second is what may go to a browser.

    Raises:
        ValueError: a prefix that is empty, too long, not a file name, or leads out of the output folder; a folder that
            cannot be made.
    """
    if not prefix or len(prefix) > LONGEST_PREFIX or "\0" in prefix or _SURROGATE.search(prefix):
        raise ValueError(
            f"filename_prefix must have 1 to {LONGEST_PREFIX} characters and no NUL or half character, "
            f"has {len(prefix)}"
        )
    root = folder_paths.get_output_directory()
    try:
        inside = os.path.commonpath([os.path.abspath(os.path.join(root, prefix)), os.path.abspath(root)])
    except ValueError:  # another drive
        inside = None
    if inside != os.path.abspath(root):
        raise ValueError(f"filename_prefix {prefix!r} leads out of the output folder; give a name below it")
    try:
        where, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root, width, height)
    except OSError as error:
        raise ValueError(f"filename_prefix {prefix!r}: no file can be put there: {error.strerror or error}") from error
    file = f"{name}_{counter:05}_.{ending}"
    if len(file.encode()) > LONGEST_FILE:
        raise ValueError(f"filename_prefix: {name[:40]!r} and so on is too long for a file name; shorten it")
    return os.path.join(where, file), {"filename": file, "subfolder": subfolder, "type": "output"}
