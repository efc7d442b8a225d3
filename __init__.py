"""H3 Blackwell Runtime: MiniMax H3 in NVFP4 on NVIDIA Blackwell, inside ComfyUI.

ComfyUI reads two names from this file: ``WEB_DIRECTORY`` and ``comfy_entrypoint``. There is no
``NODE_CLASS_MAPPINGS`` on purpose, because its presence would switch the entry point off. Nothing is imported here,
so the file also imports where there is no ComfyUI.
"""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Return the extension that lists this pack's nodes (called once by ComfyUI at start)."""
    from .nodes import H3BlackwellExtension

    return H3BlackwellExtension()
