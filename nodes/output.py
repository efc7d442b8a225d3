"""Where the pack's nodes put their files: under ComfyUI's output folder, numbered, never over an older one."""

from __future__ import annotations

import os

import folder_paths

LONGEST_PREFIX = 200  # characters; file systems end at 255 for a name, and a number and an ending follow


def place(prefix: str, ending: str, width: int = 0, height: int = 0) -> tuple[str, dict]:
    """Choose a new file under the output folder, as ComfyUI's own save nodes do.

    Args:
        prefix: what the user typed; may hold folders and ComfyUI's ``%date%``-like words.
        ending: such as ``"json"``.
        width, height: for ``%width%`` and ``%height%``.

    Returns:
        ``(full path, {"filename", "subfolder", "type"})``; the second is what may go to a browser.

    Raises:
        ValueError: a prefix that is empty, too long, not a file name, or leads out of the output folder.
    """
    if not prefix or len(prefix) > LONGEST_PREFIX or "\0" in prefix:
        raise ValueError(f"filename_prefix must have 1 to {LONGEST_PREFIX} characters and no NUL, has {len(prefix)}")
    root = folder_paths.get_output_directory()
    try:
        inside = os.path.commonpath([os.path.abspath(os.path.join(root, prefix)), os.path.abspath(root)])
    except ValueError:  # another drive
        inside = None
    if inside != os.path.abspath(root):
        raise ValueError(f"filename_prefix {prefix!r} leads out of the output folder; give a name below it")
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root, width, height)
    file = f"{name}_{counter:05}_.{ending}"
    return os.path.join(folder, file), {"filename": file, "subfolder": subfolder, "type": "output"}
