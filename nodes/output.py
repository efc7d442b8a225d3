"""Where the pack's nodes put their files: under ComfyUI's output folder, numbered, never over an older one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator

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
def writing(path: str) -> Iterator[str]:
    """Gives a temporary name beside the new file ``path``; what is written there is moved to it, whole, at the end.

    An exception or a cancel leaves nothing, a killed process leaves nothing under the final name, and a file that is
    there by then stays. An OSError becomes a ValueError that names the file, not its folder. Where nothing was written
    nothing is moved.
    """
    temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(6)}{os.path.splitext(path)[1]}")
    try:
        yield temporary
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if os.path.lexists(temporary):
            os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{os.path.basename(path)} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def with_picture(text: str, path: str, saved: dict, draw: Callable[[str], str | None]) -> tuple[str, dict]:
    """Draw the picture of a measurement beside its record.

    Args:
        text: of the measurement.
        path, saved: of its record, from :func:`place`.
        draw: writes a PNG under a name, or says why it does not.

    Returns:
        The text, with the reason where there is no picture (the measurement must not be lost for it), and the node's
        ``ui``.
    """
    picture = os.path.splitext(path)[0] + ".png"
    try:
        with writing(picture) as temporary:
            missing = draw(temporary)
    except ValueError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        missing = f"no plot: {error}"
    if missing is not None:
        text = f"{text}\n{missing}"
        return text, {"text": (text,), "h3bw_record": [saved]}
    return text, {
        "text": (text,), "h3bw_record": [saved], "images": [{**saved, "filename": os.path.basename(picture)}],
    }  # fmt: skip


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
