"""Sol-Attn, sparse attention without training: comfy-kitchen's compiled kernel, else the Sol-Attn pack's in Triton.

Each block of 64 queries attends exactly to the key blocks whose proxy score stands ``tau`` deviations out, to its own,
and to the ``sink`` blocks; every other block counts as one pooled key.

Read from comfy-kitchen 0.2.40: ``sol_attn(q, k, v, tau=1.0, scale=None, sink_blocks=None, sink_q=None, ...)`` and
``sol_attn_is_available(device)`` (from 0.2.33 on); from the pack (Saganaki22/ComfyUI-sol-attn at
930a4d6e432ff8b8ed5e30ff2f72519b92d69bdf): ``sol_kernel.sol_attn(q, k, v, *, scale=None, tau=1.0, ..., sink_blocks=(0,
0), sink_q=(0, 0))``. Both take ``[B, S, H, 128]`` with strides, last dimension dense, addresses and strides in
multiples of 16 bytes.

The pack's kernel was not run on hardware by this project: it is tested against a stand-in with that signature.
"""

from __future__ import annotations

import sys
from importlib import metadata

import torch

from .. import NHD, Backend, Call, Option

BLOCK = 64
HEAD_DIM = 128
KITCHEN_NAMES = ("sol_attn", "sol_attn_is_available")


def load():
    """Return the adapter around comfy-kitchen's ``sol_attn`` or, where that is missing, the pack's.

    Raises:
        ImportError: neither is there.
    """
    kernel = kitchen_kernel() or pack_kernel()
    if kernel is None:
        raise ImportError(
            f"comfy-kitchen {version()} has no sol_attn (0.2.33 and newer have it), and the Sol-Attn pack is not "
            "loaded; update comfy-kitchen"
        )

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *, tau: float, sink_rows: float
    ) -> torch.Tensor:
        """Sparse attention on ``[B, H, S, 128]`` views; the kernel sees ``[B, S, H, 128]`` with their strides.

        Args:
            q, k, v: tensors of one shape.
            scale: factor on the scores.
            tau: deviations above which a key block is attended exactly.
            sink_rows: rows at the start whose blocks every query attends exactly (H3: text and conditioning).
        """
        blocks = -(-int(sink_rows) // BLOCK)
        total = -(-k.shape[2] // BLOCK)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return kernel(q, k, v, tau=float(tau), scale=scale, sink_blocks=(0, min(blocks, total))).transpose(1, 2)

    return attend


def kitchen_kernel():
    """comfy-kitchen's ``sol_attn``, or None where it is missing."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    if not all(hasattr(comfy_kitchen, name) for name in KITCHEN_NAMES):
        return None
    return comfy_kitchen.sol_attn


def pack_kernel():
    """``sol_attn`` of the Sol-Attn pack, if ComfyUI has loaded it (under the path of its folder)."""
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2] == "sol_kernel" and callable(getattr(module, "sol_attn", None)):
            return module.sol_attn
    return None


def refuse(call: Call) -> str | None:
    """Refuse what both kernels raise for, and devices that the one that is there does not run on."""
    if call.device.type != "cuda":
        return f"needs a CUDA device, have {call.device}"
    if call.head_dim != HEAD_DIM:
        return f"head_dim must be {HEAD_DIM}, have {call.head_dim}"
    if call.q_shape != call.k_shape:
        return f"q and k must have the same rows, have {call.q_shape[2]} and {call.k_shape[2]}"
    if kitchen_kernel() is not None:
        import comfy_kitchen

        if call.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype must be bfloat16 or float16, have {call.dtype}"
        if not comfy_kitchen.sol_attn_is_available(call.device):
            return f"comfy-kitchen {version()} cannot run it on {call.device} (compute capability 8.0 or newer)"
        return None
    if call.dtype != torch.bfloat16:
        return f"dtype must be bfloat16, have {call.dtype}"
    return None  # the pack knows its devices (8.6, 8.9, 9.0, 10.0, 12.0, 12.1) and raises: its probe says so


def version() -> str:
    """Return the installed version of comfy-kitchen, for messages."""
    try:
        return metadata.version("comfy-kitchen")
    except metadata.PackageNotFoundError:
        return "(not installed)"


BACKEND = Backend(
    name="sol",
    exact=False,
    needs="comfy-kitchen >= 0.2.33, or the Sol-Attn pack",
    load=load,
    refuse=refuse,
    summary="Sol-Attn: sparse, exact on the blocks that matter most",
    packages=("comfy-kitchen", "triton"),
    int32_offsets=False,
    align_elements=8,
    dense_last=True,
    order=NHD,
    layout="native",
    layout_variable="H3_SOL_QKV_LAYOUT",
    options=(
        Option("tau", 1.3, 0.0, 4.0, 0.05, "Higher attends to fewer blocks exactly: faster, further from exact."),
        Option("sink_rows", 0, 0, 1_000_000, 1, "Rows at the start that every query attends to exactly."),
    ),
    # Every block a sink: then it must give what full attention gives.
    probe_options=(("tau", 1.0), ("sink_rows", 1_000_000)),
    measured=False,  # how far it is from exact is a matter of taste (tau): by name only
)
