"""Number formats, files and kernels of the pack: torch is allowed here; comfy, folder_paths and server are not."""
