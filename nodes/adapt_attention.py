"""What this pack knows of ComfyUI's attention calls: their arguments, their containers, and where an override goes.

ComfyUI calls ``transformer_options["optimized_attention_override"](function, q, k, v, heads, ...)`` wherever a model
asks for attention. From 0.33 on q, k and v may come in containers with one owner; an override that has a
``container_function`` gets those, may empty them, and is set by ``ModelPatcher.set_model_optimized_attention``, which
hands it no ``function``.

Known to hold for ComfyUI 0.30.0 and 0.33.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import comfy.ldm.minimax.model as h3
import comfy.ldm.modules.attention as core
import torch

from . import run

OVERRIDE = "optimized_attention_override"
# Arguments of ComfyUI's attention functions that say nothing about the result when they have these values.
NEUTRAL = {
    "transformer_options": None,
    "_inside_attn_wrapper": None,
    "attn_precision": None,
    "preferred_attention": None,
    "enable_gqa": (False, None),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONTAINER = getattr(core, "AttentionTensorContainer", ())  # 0.33 and newer; nothing is an instance of ()


class NotOurs(Exception):
    """The call is one that the override hands on; the text is the reason."""


def understand(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, *, exact: bool,
    **kwargs,
):  # fmt: skip
    """Turn a call of ComfyUI's into ``([q, k, v] as [B, H, S, D], scale, whether the output is reshaped)``.

    Args:
        q, k, v: tensors, or containers, which are looked into and left full.
        heads: number of heads.
        mask, attn_precision, skip_reshape, skip_output_reshape, kwargs: as ComfyUI's functions take them.
        exact: whether what will run is exact; a call may ask for full precision.

    Raises:
        NotOurs: an argument that cannot be honoured, with the reason.
    """
    if mask is not None:
        raise NotOurs("the call has a mask")
    if attn_precision is not None:
        raise NotOurs(f"the call asks for {attn_precision} inside")
    scale = kwargs.pop("scale", None)
    if kwargs.pop("low_precision_attention", True) is False and not exact:
        raise NotOurs("the call asks for full precision and the backend is approximate")
    for name, value in kwargs.items():
        if name not in NEUTRAL or (NEUTRAL[name] is not None and value not in NEUTRAL[name]):
            raise NotOurs(f"the call has an argument this version of the pack does not know: {name}")
    if isinstance(q, CONTAINER):
        q, k, v = (tensor.peek() if isinstance(tensor, CONTAINER) else tensor for tensor in (q, k, v))
    tensors = [q, k, v]
    # Written out: this runs in every call, and a short call takes little longer than a few loops.
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        raise NotOurs(f"q, k and v are {', '.join(type(tensor).__name__ for tensor in tensors)}, not tensors")
    if not (q.dtype in DTYPES and k.dtype in DTYPES and v.dtype in DTYPES):
        raise NotOurs(f"q, k and v are {', '.join(str(tensor.dtype) for tensor in tensors)}")
    if not skip_reshape:
        if heads < 1 or any(tensor.dim() != 3 or tensor.shape[-1] % heads for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise NotOurs(f"q, k and v are {shapes} with {heads} heads")
        tensors = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in tensors]
    return tensors, scale, not skip_output_reshape


def default_name() -> str:
    """What ComfyUI's default attention is called; another pack may have put something without a name there."""
    function = core.optimized_attention
    return getattr(function, "__name__", type(function).__name__)


def shaped(out: torch.Tensor, reshape: bool) -> torch.Tensor:
    """``[B, H, S, D]`` as ComfyUI wants it back: ``[B, S, H * D]``, or as it is."""
    return out.transpose(1, 2).flatten(2) if reshape else out


def empty(containers) -> None:
    """Take the tensors out: from then on the caller holds none of them."""
    for container in containers:
        if isinstance(container, CONTAINER):
            container.take()


def hand_on(previous, function, args, kwargs):
    """Call the override that was there before, else ComfyUI's function; containers are still full."""
    if previous is None:
        return function(*args, **kwargs)
    if args and isinstance(args[0], CONTAINER):
        if hasattr(previous, "container_function"):
            return previous.container_function(*args, **kwargs)
        args = (*(container.take() for container in args[:3]), *args[3:])
    return previous(function, *args, **kwargs)


class _Attention:
    """An override as ``set_model_optimized_attention`` wants it: called without ComfyUI's function.

    What is handed on then goes to ComfyUI's default: inside an override it runs itself, never the override again.
    """

    def __init__(self, override):
        self._override = override

    def __call__(self, *args, **kwargs):
        return self._override(core.optimized_attention, *args, **kwargs)

    container_function = __call__


def install(patcher, override) -> None:
    """Put an override into a clone, through ComfyUI's own way where it has one."""
    options = patcher.model_options.setdefault("transformer_options", {})
    if hasattr(patcher, "set_model_optimized_attention"):
        patcher.set_model_optimized_attention(_Attention(override))
        options[OVERRIDE].h3bw_override = override  # the function that ComfyUI made for it
    else:
        options[OVERRIDE] = override


def installed(options: dict):
    """What is in charge in ``transformer_options``: our override object, somebody else's function, or None."""
    found = options.get(OVERRIDE)
    return getattr(found, "h3bw_override", found)


# ---------------------------------------------------------------- where in a run a call is


@contextlib.contextmanager
def in_block(arguments: dict, index: int) -> Iterator[None]:
    """While open, the forward that these arguments belong to says which block runs; the arguments stay as they are."""
    forward = arguments.get("transformer_options", {}).get(run.FORWARD)
    if forward is None:
        yield
        return
    before = forward.get(run.BLOCK)
    forward[run.BLOCK] = index
    try:
        yield
    finally:
        forward[run.BLOCK] = before


def block_of(options: dict) -> int | None:
    """Index of the block that is running, where a patch of this pack saw it."""
    return options.get(run.FORWARD, {}).get(run.BLOCK)


class BlockMark:
    """A replacement of one ``double_block`` that only tells the attention override which block runs."""

    def __init__(self, index: int, previous):
        self.index = index
        self.previous = previous

    def __call__(self, arguments: dict, extra: dict) -> dict:
        """ComfyUI's calling convention: ``({"img", ...}, {"original_block"}) -> {"img"}``."""
        with in_block(arguments, self.index):
            if self.previous is not None:
                return self.previous(arguments, extra)
            return extra["original_block"](arguments)


def mark_blocks(patcher, indices, knows: type) -> None:
    """Mark blocks on a clone; patches of class ``knows`` mark their block themselves."""
    table = patcher.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
    for index in indices:
        previous = table.get(("double_block", index))
        if not isinstance(previous, (knows, BlockMark)):
            patcher.set_model_patch_replace(BlockMark(index, previous), "dit", "double_block", index)


def block_count(patcher) -> int | None:
    """Blocks of an H3, or None for any other model."""
    dit = getattr(patcher.model, "diffusion_model", None)
    return len(dit.blocks) if isinstance(dit, h3.MiniMaxH3Model) else None


def progress(options: dict) -> float | None:
    """Share of the sampling steps that lie behind the current one, 0 in the first; None where ComfyUI does not say.

    Read from the device once a forward.
    """

    def ask() -> float | None:
        now, schedule = options.get("sigmas"), options.get("sample_sigmas")
        return None if now is None or schedule is None else step_share(now, schedule)

    return run.once_a_forward(options, "progress", ask)


def step_share(now: torch.Tensor, schedule: torch.Tensor) -> float | None:
    """The step that sigma ``now`` belongs to over the number of steps; sigmas between two steps are the earlier's."""
    steps = schedule.numel() - 1
    if steps < 1 or now.numel() < 1:
        return None
    # A little slack: the sampler may have rounded the sigma to another dtype.
    index = int((schedule[:-1].double() >= now.flatten()[0].to(schedule.device).double() * (1 - 1e-4)).sum()) - 1
    return min(max(index, 0), steps) / steps


def conditioning_rows(options: dict, rows: int) -> int:
    """Rows of H3's packed sequence before the audio and video that are sampled: text, keyframes, references.

    0 where the forward does not say (another model, the refiner, a sequence that does not fit).
    """
    latents = options.get(run.FORWARD, {}).get("latents")
    target = run.once_a_forward(options, "target_rows", lambda: target_rows(options.get(run.DIT), latents))
    return rows - target if target is not None and rows > target else 0


def target_rows(dit, latents) -> int | None:
    """Rows of the video and the audio latent of a forward, or None where it is no H3's."""
    if not isinstance(dit, h3.MiniMaxH3Model) or not isinstance(latents, (list, tuple)) or len(latents) < 2:
        return None
    video, audio = latents[0], latents[1]
    sizes = zip(video.shape[2:], dit.patch_size, strict=True)
    frames, height, width = (-(-size // patch) for size, patch in sizes)
    return frames * height * width + 2 * audio.shape[-1]
