"""Everything this pack knows about ComfyUI's call signatures, in one file.

ComfyUI's H3 forwards change from version to version, so nothing here copies one. The fused block calls the block's own
modules and slips NVFP4 tensors in where they would have quantised themselves: an ``NVFP4`` linear whose input already
is a ``QuantizedTensor`` skips its own quantisation. Attention runs through ``block.attn`` itself, whatever that does in
this version; only the input of its ``out_proj`` is replaced, by a forward pre-hook that lives for one call.

Whether the composition still computes what the class in front of us computes is not assumed: :func:`class_reason`
builds a tiny block of that very class, runs both on the CPU and compares the bits, once per process.

Known to hold for ComfyUI 0.30.0 and 0.33.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import comfy.ldm.minimax.model as h3
import comfy.model_management
import comfy.ops
import comfy.quant_ops
import torch

from ..kernels import fused, nvfp4

NVFP4_LAYOUT = "TensorCoreNVFP4Layout"
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
SIDE_RANK_MULTIPLE = 16  # ranks that the kernel of fused.swiglu_side takes
# On an H200 at 38,016 rows the update inside SwiGLU paid at rank 32, and cost 2 to 3 ms at rank 128 (research/records).
SIDE_MOST_RANK = 64
BLOCK_PARAMETERS = ("self", "x", "t_emb", "mod_segments", "rope_freqs")
# What core hands to a "double_block" replacement. `layout` (newer versions) informs patches; the block never sees it.
REPLACE_ARGUMENTS = {"img", "t_emb", "mod_segments", "rope_freqs", "transformer_options", "layout"}


class NotH3(ValueError):
    """The model handed to a node is not a MiniMax H3."""


def h3_model(patcher) -> torch.nn.Module:
    """Return the ``MiniMaxH3Model`` inside a ``ModelPatcher``; raises :class:`NotH3` for any other model."""
    module = getattr(patcher.model, "diffusion_model", None)
    if not isinstance(module, h3.MiniMaxH3Model):
        raise NotH3(
            f"this node patches MiniMax H3 models, the model connected is {type(patcher.model).__name__}; "
            "connect the output of 'Load MiniMax H3 (NVFP4)' or of a loader with an H3 file"
        )
    return module


@dataclass(frozen=True)
class Sites:
    """What a fused block does at each place where it can do something.

    Attributes:
        modulate, swiglu, attention_output: write NVFP4 there when the linear that follows takes it.
        elementwise: run the bf16 ops through the registry (False: ComfyUI's own expressions, which the references are).
        emulate_w4a4: run the four linears by dequantising both sides.
        impl: implementation asked of the registry.
        norm: "aten" (ComfyUI's own) or "fused", where that one is known to give the same bits.
        beside: write NVFP4 for a linear that has a side branch too: from bf16 rows, which the branch needs as well.
        side_swiglu: add fc1's side branch inside SwiGLU where fc2 takes codes, if `elementwise` is on too: the bits
            that ``fused.low_rank_add_`` and SwiGLU give one after the other.
    """

    modulate: bool = True
    swiglu: bool = True
    attention_output: bool = True
    elementwise: bool = True
    emulate_w4a4: bool = False
    impl: str = "auto"
    norm: str = "aten"
    beside: bool = True
    side_swiglu: bool = True


# ---------------------------------------------------------------- guards


def foreign_forward(module: torch.nn.Module) -> bool:
    """True when somebody else replaced ``module.forward`` on the instance or put a forward hook on it.

    ComfyUI leaves the stock bound method in the instance after it takes an object patch off; that one is not foreign.
    """
    own = module.__dict__.get("forward")
    if isinstance(own, SideForward):
        own = own.forward
    stock = own is None or isinstance(own, _EmulatedForward) or getattr(own, "__func__", None) is type(module).forward
    return not stock or bool(module._forward_hooks or module._forward_pre_hooks)


def block_reason(block: torch.nn.Module, arguments: dict) -> str | None:
    """Why this call of this block must run in ComfyUI's own code, or None.

    Cheap enough for every call: attribute reads only, never the device.
    """
    x = arguments.get("img")
    if not isinstance(x, torch.Tensor):
        return f"the stream is a {type(x).__name__}, not a tensor"
    if x.dtype != torch.bfloat16:
        return f"the stream is {str(x.dtype).removeprefix('torch.')}, not bfloat16"
    if x.dim() != 2:
        return f"the stream has {x.dim()} axes, not 2"
    unknown = sorted(name for name, value in arguments.items() if name not in REPLACE_ARGUMENTS and value is not None)
    if unknown:
        return f"the block is called with an argument this version of the pack does not know: {', '.join(unknown)}"
    if comfy.model_management.in_training:
        return "training"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing the block"
    modules = (block, block.attn, block.mlp, block.adaln_proj, block.norm1, block.norm2)
    if any(foreign_forward(module) for module in modules):
        return "another patch owns the forward of the block or of one of its parts"
    if type(block.mlp).forward is not h3.MLP.forward or not all(map(_is_stock_norm, (block.norm1, block.norm2))):
        return "another patch replaced the mlp or a norm of the block by a module of its own"
    for module in (block.norm1, block.norm2):
        if module.weight_function or module.bias_function:
            return "a weight patch on a norm runs during the forward"
    return None


def _is_stock_norm(module: torch.nn.Module) -> bool:
    """Whether a norm computes what ``comfy.ops`` RMSNorm does (the fused block calls its weight, not its forward)."""
    stock = comfy.ops.disable_weight_init.RMSNorm
    return (
        getattr(type(module), "forward", None) is stock.forward
        and getattr(type(module), "forward_comfy_cast_weights", None) is stock.forward_comfy_cast_weights
    )


def weight_reason(linear: torch.nn.Module) -> str | None:
    """Why this linear's weight, as loaded and patched, is not multiplied in FP4, or None.

    Mirrors the condition under which ``mixed_precision_ops.Linear.forward`` quantises its input, so that feeding it
    codes and letting it make them are the same thing.
    """
    weight = linear.weight
    if getattr(weight, "_layout_cls", None) != NVFP4_LAYOUT:
        return "its weight is not NVFP4"
    if getattr(linear, "pre_quant_scale", None) is not None:
        return "it has a pre_quant_scale that is not folded in"
    if linear.weight_function or linear.bias_function:
        return "a weight patch (LoRA in low VRAM) runs during its forward"
    if getattr(linear, "comfy_force_cast_weights", False):
        return "ComfyUI casts its weight"
    if getattr(linear, "_full_precision_mm_config", False):
        return "its file asks for full precision"
    return None


def fp4_reason(linear: torch.nn.Module, emulated: bool = False) -> str | None:
    """Why this linear must get a bf16 input, or None when it takes an NVFP4 one.

    Args:
        linear: one of the block's four linears.
        emulated: the W4A4 emulation replaces its forward, so the device need not support FP4.
    """
    reason = weight_reason(linear)
    if reason is not None:
        return reason
    if foreign_forward(linear):
        return "another patch owns its forward"
    if not emulated and linear._full_precision_mm:
        return "this device has no FP4 matrix multiply (compute capability 10.0 or newer has)"
    return None


def attributes_reason(block_class: type) -> str | None:
    """Why the class's signature is not one this pack can stand in for, or None."""
    try:
        parameters = inspect.signature(block_class.forward).parameters
    except (TypeError, ValueError) as error:
        return f"the signature of {block_class.__name__}.forward cannot be read ({error})"
    names = tuple(parameters)
    if names[: len(BLOCK_PARAMETERS)] != BLOCK_PARAMETERS:
        return f"{block_class.__name__}.forward takes {', '.join(names)}"
    required = [
        name
        for name, parameter in parameters.items()
        if name not in BLOCK_PARAMETERS
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if required:
        return f"{block_class.__name__}.forward needs {', '.join(required)}"
    return None


def class_reason(block_class: type) -> str | None:
    """Why blocks of this class are left alone, or None when the fused composition gives its bits.

    Probed once for each state of the functions that the composition stands in for: a pack that patches one of them on
    its class later makes the next call probe again, see the difference, and leave the blocks to it.
    """
    return _class_reason(
        block_class,
        block_class.forward,
        h3.MLP.forward,
        h3._mod_scale_shift,
        h3._mod_gate,
        comfy.ops.linear_input_act,
        comfy.ops.INPUT_ACT_EAGER.get("swiglu"),
        comfy.ops.disable_weight_init.RMSNorm.forward,
    )


@functools.lru_cache(maxsize=32)
def _class_reason(block_class: type, *stood_in_for) -> str | None:
    """:func:`class_reason` for one state of those functions, which are the key.

    A block of 32 channels is built from ``block_class`` with fixed weights; the class's own forward and
    :func:`fused_forward` with reference ops run on the CPU over int and LongTensor segments; every bit must agree.
    """
    reason = attributes_reason(block_class)
    if reason is not None:
        return f"this ComfyUI's block is not one this pack knows: {reason}"
    try:
        expected, found = _probe(block_class)
    except Exception as error:  # a probe: whatever the unknown class raises is the reason
        return f"this ComfyUI's block could not be probed: {type(error).__name__}: {error}"
    if not torch.equal(expected, found):
        return "this ComfyUI's block computes something else than this pack knows; please report the version"
    return None


def _probe(block_class: type) -> tuple[torch.Tensor, torch.Tensor]:
    rows, hidden, heads, head_dim, t_dim = 13, 32, 2, 16, 8
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    block = block_class(
        hidden, heads, head_dim, 48, t_dim, 1e-5, 1e-5, apply_silu=False, adaln_dtype=torch.float32,
        dtype=torch.bfloat16, device=torch.device("cpu"), operations=comfy.ops.manual_cast,
    ).requires_grad_(False)  # fmt: skip
    with torch.inference_mode():
        for parameter in block.parameters():
            parameter.copy_(random(*parameter.shape) * 0.2)
        x, t_emb = random(rows, hidden), random(2, t_dim, dtype=torch.float32)
        table = h3.rope_rotation_table(random(rows, 12, dtype=torch.float32), torch.bfloat16)
        # Indexing a table by LongTensor came with noise masks; older versions accept it too.
        segments = [(0, 2, 1), (2, 3, 4), (3, 3, 0), (3, 7, 2), (7, 13, torch.tensor([0, 3, 5, 0, 3, 5]))]
        expected = block(x.clone(), t_emb, segments, table)
        found = fused_forward(block, x.clone(), t_emb, segments, table, {}, Sites(impl="reference"))
    return expected, found


# ---------------------------------------------------------------- the block


def quantized_tensor(q: nvfp4.NVFP4, dtype: torch.dtype):
    """Wrap :class:`nvfp4.NVFP4` as the ``QuantizedTensor`` that ComfyUI's linear takes in place of a bf16 input."""
    layout = comfy.quant_ops.get_layout_class(NVFP4_LAYOUT)
    parameters = layout.Params(
        scale=q.decode_scale, orig_dtype=dtype, orig_shape=tuple(q.shape), block_scale=q.block_scale
    )
    return comfy.quant_ops.QuantizedTensor(q.codes, NVFP4_LAYOUT, parameters)


@contextlib.contextmanager
def cast_weight(module: torch.nn.Module, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The module's weight on ``like``'s device and in its dtype, through ComfyUI's offload and prefetch machinery.

    Every cast is given back, also when an exception passes.
    """
    weight, bias, stream = comfy.ops.cast_bias_weight(module, like, offloadable=True)
    try:
        yield weight
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


@contextlib.contextmanager
def feeding(module: torch.nn.Module, produce: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While open, ``module(x)`` receives ``produce(x)``; nothing stays on the module afterwards."""
    handle = module.register_forward_pre_hook(lambda _, arguments: (produce(arguments[0]), *arguments[1:]))
    try:
        yield
    finally:
        handle.remove()


def input_scale(linear: torch.nn.Module, device: torch.device) -> torch.Tensor | None:
    """The layer's static activation scale on ``device`` as fp32, or None (dynamic), as ComfyUI's linear reads it."""
    scale = getattr(linear, "input_scale", None)
    return None if scale is None else comfy.model_management.cast_to_device(scale, device, None).float().reshape(())


def fused_forward(block, x, t_emb, mod_segments, rope_freqs, transformer_options: dict, sites: Sites) -> torch.Tensor:
    """One H3 block with the producers between its GEMMs replaced; writes into ``x`` and returns it.

    Args:
        block: a ``DiTBlock`` that passed :func:`block_reason` and whose class passed :func:`class_reason`.
        x: ``[S, hidden]`` bf16 residual stream, changed in place as ComfyUI does.
        t_emb: ``[M, t_dim]`` time embeddings, fp32 in pruned checkpoints, the stream's dtype in full ones.
        mod_segments: ``(start, stop, row)``, row an int or a LongTensor.
        rope_freqs: ``[1, S, 1, rot/2, 2, 2]``.
        transformer_options: handed on to attention.
        sites: what to fuse.
    """
    emulated = sites.emulate_w4a4
    bf16_impl = sites.impl if sites.elementwise else "reference"
    bf16_norm = "aten" if bf16_impl == "reference" else sites.norm  # a reference's own norm is not ATen's to the bit

    def takes_codes(linear, side):
        return fp4_reason(linear, emulated) is None and (side is None or sites.beside)

    def codes_of(rows, linear, side):
        """Codes of bf16 rows that are there anyway, or that the side branch needs; its share is taken on the way."""
        if side is not None:
            side.take(rows)
        q = fused.rows_nvfp4(rows, decode_scale=input_scale(linear, rows.device), impl=sites.impl)
        return quantized_tensor(q, rows.dtype)

    def modulated(norm, scale, shift, linear):
        side = side_forward(linear)
        with cast_weight(norm, x) as weight:
            if sites.modulate and takes_codes(linear, side):
                if side is not None:
                    rows = fused.norm_modulate(
                        x, weight, norm.eps, scale, shift, mod_segments, impl=sites.impl, norm=sites.norm
                    )
                    return codes_of(rows, linear, side)
                q = fused.norm_modulate_nvfp4(
                    x, weight, norm.eps, scale, shift, mod_segments,
                    decode_scale=input_scale(linear, x.device), impl=sites.impl, norm=sites.norm,
                )  # fmt: skip
                return quantized_tensor(q, x.dtype)
            return fused.norm_modulate(x, weight, norm.eps, scale, shift, mod_segments, impl=bf16_impl, norm=bf16_norm)

    def attention_rows(linear):
        def produce(out):
            if isinstance(out, comfy.quant_ops.QuantizedTensor) or out.dim() != 2 or out.dtype != x.dtype:
                return out
            return codes_of(out, linear, side_forward(linear))

        return feeding(linear, produce)

    shift1, scale1, gate1, shift2, scale2, gate2 = block.adaln_proj(t_emb)

    h = modulated(block.norm1, scale1, shift1, block.attn.qkv_proj)
    out_proj = block.attn.out_proj
    fuse_rows = sites.attention_output and takes_codes(out_proj, side_forward(out_proj))
    with attention_rows(out_proj) if fuse_rows else contextlib.nullcontext():
        y = block.attn(h, rope_freqs=rope_freqs, transformer_options=transformer_options)
    del h
    fused.gate_residual_(x, gate1, y, mod_segments, impl=bf16_impl)
    del y

    h = modulated(block.norm2, scale2, shift2, block.mlp.fc1)
    fc2 = block.mlp.fc2
    if getattr(fc2.weight, "_layout_cls", None) not in (None, NVFP4_LAYOUT):
        y = block.mlp(h)  # another quantised format has a fused activation of its own in core
    else:
        side, side1 = side_forward(fc2), side_forward(block.mlp.fc1)
        fc2_codes = sites.swiglu and takes_codes(fc2, side)
        apart = fc2_codes and sites.beside and sites.side_swiglu and sites.elementwise and side1 is not None
        with side1.apart(h) if apart else contextlib.nullcontext((None, None)) as (gate_up, update):
            if update is not None:
                z = codes_of(fused.swiglu_side(gate_up, *update, impl=sites.impl), fc2, side)
            else:
                gate_up = block.mlp.fc1(h) if gate_up is None else gate_up
                if fc2_codes and side is None:
                    q = fused.swiglu_nvfp4(gate_up, decode_scale=input_scale(fc2, x.device), impl=sites.impl)
                    z = quantized_tensor(q, x.dtype)
                else:
                    z = fused.swiglu(gate_up, impl=sites.impl if fc2_codes else bf16_impl)
                    z = codes_of(z, fc2, side) if fc2_codes else z
        del gate_up
        y = fc2(z)
        del z
    del h
    return fused.gate_residual_(x, gate2, y, mod_segments, impl=bf16_impl)


# ---------------------------------------------------------------- low-rank branches beside a linear


@dataclass(frozen=True)
class Pair:
    """One LoRA's branches of one linear, as modules that ComfyUI moves and offloads.

    Attributes:
        down: linear ``[R, K]``, the ranks of all its parts in a row, so that x is read once.
        ups: ``(linear [n, r], columns of down's output, columns of y, alpha / rank)`` of each part.
        strength: of the node.
    """

    down: torch.nn.Module
    ups: tuple[tuple[torch.nn.Module, slice, slice, float], ...]
    strength: float


class SideForward:
    """``linear.forward`` with branches beside it: ``y = linear(x); y += strength * scale * up(down(x))``, in x's dtype.

    The update is one GEMM that accumulates into y (4 bytes an element of y: read and written once), however many LoRAs
    there are; the weight is never read. Where the linear is handed NVFP4 codes, :meth:`take` has seen the bf16 rows
    that they were made of and kept ``down(rows)``, a few columns; codes that come without are dequantised.
    """

    def __init__(self, linear: torch.nn.Module, forward: Callable, pairs: tuple[Pair, ...], counts):
        self.linear = linear
        self.forward = forward
        self.pairs = pairs
        self.counts = counts
        self.taken = None

    def around(self, forward: Callable) -> SideForward:
        """The same branches beside another forward."""
        return SideForward(self.linear, forward, self.pairs, self.counts)

    def take(self, rows: torch.Tensor) -> None:
        """Compute ``down(rows)`` of the rows [M, K] that the linear is about to get as codes."""
        self.taken = self._down(rows)

    def __call__(self, x, *args, **kwargs):
        hidden = self._take_taken()
        y = self.forward(x, *args, **kwargs)
        return self._add(y, self._down_of(x) if hidden is None else hidden)

    @contextlib.contextmanager
    def apart(self, x) -> Iterator[tuple]:
        """``(y, None)`` with the update in y, or ``(y, (hidden, low_rank, alpha))`` for a consumer that adds it.

        The second where nothing else has a hand in the linear and the update is one of all its columns, of a small rank
        that a tensor core divides: ``y + alpha * hidden @ low_rank.T`` is then what the linear returns.
        """
        whole = (0, self.linear.out_features)
        found = self._parts(self.taken).get(whole, []) if self.taken is not None else []
        rank = sum(part.shape[1] for _, part, _ in found)
        all_of_it = rank > 0 and len(found) == sum(len(pair.ups) for pair in self.pairs)
        inside = rank % SIDE_RANK_MULTIPLE == 0 and rank <= SIDE_MOST_RANK
        if not all_of_it or not inside or foreign_forward(self.linear):
            yield self.linear(x), None
            return
        hidden = self._take_taken()
        y = self.forward(x)
        with self._update(self._parts(hidden)[whole], y) as update:
            yield y, update

    def _take_taken(self) -> torch.Tensor | None:
        hidden, self.taken = self.taken, None
        if hidden is not None:
            self.counts["rows of the producer"] += 1
        return hidden

    def _down_of(self, x) -> torch.Tensor:
        codes = isinstance(x, comfy.quant_ops.QuantizedTensor)
        self.counts["dequantised codes" if codes else "its own input"] += 1
        return self._down(x.dequantize() if codes else x)

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as casts:
            weights = [casts.enter_context(cast_weight(pair.down, x)) for pair in self.pairs]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), weight)

    def _parts(self, hidden: torch.Tensor) -> dict[tuple[int, int], list]:
        """``{columns of y: [(up, its columns of hidden, factor)]}``."""
        parts: dict[tuple[int, int], list] = {}
        first = 0
        for pair in self.pairs:
            for up, columns, target, scale in pair.ups:
                part = hidden[:, first + columns.start : first + columns.stop]
                parts.setdefault((target.start, target.stop), []).append((up, part, scale * pair.strength))
            first += pair.down.weight.shape[0]
        return parts

    @contextlib.contextmanager
    def _update(self, found: list, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """``(hidden, low_rank, alpha)`` of several LoRAs as one, while their factors are on the device."""
        with contextlib.ExitStack() as casts:
            ups = [casts.enter_context(cast_weight(up, like)) for up, _, _ in found]
            if len(found) == 1:
                yield found[0][1].to(like.dtype), ups[0], found[0][2]
                return
            scaled = [up * scale for up, (_, _, scale) in zip(ups, found, strict=True)]
            yield torch.cat([part.to(like.dtype) for _, part, _ in found], dim=1), torch.cat(scaled, dim=1), 1.0

    def _add(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        # A foreign forward may hand out a tensor that it keeps; the stock one hands out a fresh one.
        own = getattr(self.forward, "__func__", None) is type(self.linear).forward
        fresh = (own or isinstance(self.forward, _EmulatedForward)) and y.is_contiguous() and not y.requires_grad
        y = y if fresh else y.clone(memory_format=torch.contiguous_format)
        rows = y.view(-1, y.shape[-1])
        for (start, stop), found in self._parts(hidden).items():
            with self._update(found, rows) as (part, low_rank, alpha):
                fused.low_rank_add_(rows[:, start:stop], part, low_rank, alpha)
        return y


def side_forward(linear: torch.nn.Module) -> SideForward | None:
    """The linear's side branches that are attached now, or None."""
    own = linear.__dict__.get("forward")
    return own if isinstance(own, SideForward) else None


@contextlib.contextmanager
def replacing_forwards(replacements: list[tuple[torch.nn.Module, Callable]]) -> Iterator[None]:
    """While open, each module's forward is ``make(forward as it was)``; afterwards the instances are as before."""
    before: list[tuple[torch.nn.Module, Callable | None]] = []
    try:
        for module, make in replacements:
            own = module.__dict__.get("forward")
            before.append((module, own))
            module.forward = make(own or module.forward)
        yield
    finally:
        for module, own in reversed(before):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own


# ---------------------------------------------------------------- W4A4 by dequantising both sides


class _EmulatedForward:
    """``linear.forward`` that quantises its input as stock does and multiplies dequantised operands in bf16."""

    def __init__(self, linear: torch.nn.Module, forward: Callable):
        self.linear = linear
        self.forward = forward

    def __call__(self, x, *args, **kwargs):
        linear = self.linear
        if weight_reason(linear) is not None:
            return self.forward(x, *args, **kwargs)
        comfy.ops.run_every_op()
        leading = x.shape[:-1]
        if not isinstance(x, comfy.quant_ops.QuantizedTensor):
            rows = x.reshape(-1, x.shape[-1])
            x = comfy.quant_ops.QuantizedTensor.from_float(rows, NVFP4_LAYOUT, scale=input_scale(linear, x.device))
        weight, bias, stream = comfy.ops.cast_bias_weight(
            linear, x, offloadable=True, compute_dtype=x.dtype, want_requant=True
        )
        try:
            dense = weight.dequantize() if isinstance(weight, comfy.quant_ops.QuantizedTensor) else weight
            out = torch.nn.functional.linear(x.dequantize(), dense.to(x.dtype), bias)
            return out.reshape(*leading, out.shape[-1])
        finally:
            comfy.ops.uncast_bias_weight(linear, weight, bias, stream)


@contextlib.contextmanager
def emulating_w4a4(block: torch.nn.Module) -> Iterator[None]:
    """While open, the block's NVFP4 linears multiply 4-bit by 4-bit operands on any device (for parity work, slow)."""
    linears = [block.get_submodule(name) for name in LINEARS]
    before = [(linear, linear.__dict__.get("forward")) for linear in linears if not foreign_forward(linear)]
    try:
        for linear, own in before:
            if isinstance(own, SideForward):  # the branch goes beside the emulated linear
                linear.forward = own.around(_EmulatedForward(linear, own.forward))
            else:
                linear.forward = _EmulatedForward(linear, own or linear.forward)
        yield
    finally:
        for linear, own in before:
            linear.__dict__.pop("forward", None)
            if own is not None:
                linear.forward = own
