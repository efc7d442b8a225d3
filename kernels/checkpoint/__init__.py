"""Safetensors files: strict reading, NVFP4 layouts, direct loading, atomic writing; failures are `CheckpointError`s."""

from .header import CheckpointError, Header, TensorInfo, read_header
from .inspection import inspect, summary, verify
from .layout import find_layers, is_h3, normalise
from .quantize import quantize_file
from .reader import load
from .tiny import tiny_h3
from .writer import StreamWriter, nvfp4_tensors, write

__all__ = [
    "CheckpointError",
    "Header",
    "StreamWriter",
    "TensorInfo",
    "find_layers",
    "inspect",
    "is_h3",
    "load",
    "normalise",
    "nvfp4_tensors",
    "quantize_file",
    "read_header",
    "summary",
    "tiny_h3",
    "verify",
    "write",
]
