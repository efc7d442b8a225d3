"""LoRA files of MiniMax H3, in every key form in circulation, as low-rank branches of the model's own linears.

``delta W = scale * up @ down`` with ``down`` ``[r, K]``, ``up`` ``[N, r]`` and ``scale = alpha / r`` (1 without alpha).

=================================  =====================================================================
written by                         a key
=================================  =====================================================================
ai-toolkit, diffusion-pipe, core   ``diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight``
DiffSynth                          ``blocks.0.attn.qkv_proj.lora_A.default.weight``
musubi-tuner, kohya                ``lora_unet_blocks_0_attn_qkv_proj.lora_down.weight`` with ``.alpha``
diffusers, PEFT, LightX2V          ``transformer.transformer_blocks.0.attn.to_q.lora_A.weight``
PEFT around diffusers              ``base_model.model.transformer_blocks.0.ff.net.0.proj.lora_B.default.weight``
=================================  =====================================================================

Three things differ behind the names. diffusers splits the fused ``qkv_proj`` into three: their branches land on thirds
of its rows, in the order q, k, v. diffusers' ``ff.net.0.proj`` is [value; gate] where H3's ``fc1`` is [gate; value]:
the halves of ``up`` change places. And a fused ``qkv_proj`` is taken in ComfyUI's order, all of q, then k, then v, as
stock LoRA nodes take it. A base whose heads are interleaved would need other rows, and nothing in a LoRA file says so:
that is not checked.

alpha is a tensor beside the pair, or a number in the file's metadata (LightX2V, diffusers), or absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

# Prefixes may be doubled (`base_model.model.transformer.`), so they are taken off one by one until a name fits.
PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "model.",
    "net.",
)
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_", *(prefix.replace(".", "_") for prefix in PREFIXES))

_INFIX = r"(?:\.(?P<infix>[^.]+))?"
_ROLES = (
    ("down", re.compile(rf"(?:\.lora_(?:A|down){_INFIX}\.weight|\.lora_A|[._]lora(?:_linear_layer)?\.down\.weight)$")),
    ("up", re.compile(rf"(?:\.lora_(?:B|up){_INFIX}\.weight|\.lora_B|[._]lora(?:_linear_layer)?\.up\.weight)$")),
    ("alpha", re.compile(r"\.(?:lora_|network_)?alpha$")),
)
_REFUSED = (
    (re.compile(r"\.dora_scale$|\.lora_magnitude_vector(\.|$)"), "DoRA, which rescales the weight itself"),
    (re.compile(r"\.hada_[wt]"), "LoHa"),
    (re.compile(r"\.lokr_[wt]"), "LoKr"),
    (re.compile(r"\.(oft_|boft_)"), "OFT"),
    (re.compile(r"\.[ab][12]\.weight$"), "GLoRA"),
    (re.compile(r"\.lora_mid\.weight$"), "a LoRA with a middle factor (Tucker)"),
)
_ALPHA_METADATA = ("lora_alpha", "network_alpha", "alpha")
_MOST_ALPHA = torch.finfo(torch.float32).max
_ADAPTER_METADATA = ("lora_adapter_metadata", "adapter_config")

# Names of other trainers for the parts of a block; (name, part of the output rows that it covers).
_THIRDS = (("q", "third 0"), ("k", "third 1"), ("v", "third 2"))
_TAILS = {
    "attn.qkv_proj": (
        ("attn.qkv", "all"),
        ("attn.to_qkv", "all"),
        *((f"attn.to_{letter}", part) for letter, part in _THIRDS),
        *((f"attn.{letter}_proj", part) for letter, part in _THIRDS),
    ),
    "attn.out_proj": (("attn.to_out.0", "all"), ("attn.to_out", "all"), ("attn.o_proj", "all")),
    "mlp.fc1": (
        ("ff.net.0.proj", "swapped"),
        ("mlp.gate_up_proj", "all"),
        ("mlp.gate_proj", "half 0"),
        ("mlp.up_proj", "half 1"),
    ),
    "mlp.fc2": (("ff.net.2", "all"), ("mlp.down_proj", "all")),
}
_BLOCKS = {"token_refiner.blocks.": "token_refiner.refiner_blocks.", "blocks.": "transformer_blocks."}
_WHOLE = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
# Pruned and full H3 files differ in these, so a LoRA of the other form does not fit there and only there.
_FORM_DEPENDENT = ("adaln_proj.linear", "time_embedder.")


class LoraError(ValueError):
    """A LoRA file that cannot be used as it is.

    Attributes:
        code: ``"unmatched"``, ``"refused"``, ``"half"``, ``"shape"``, ``"value"`` or ``"empty"``.
        file: the file's name.
    """

    def __init__(self, code: str, file: str, message: str):
        self.code, self.file = code, file
        super().__init__(f"{file}: {message}" if file else message)


@dataclass(frozen=True)
class Branch:
    """``y[:, start:stop] += scale * (x @ down.T) @ up.T`` beside one linear.

    Attributes:
        down: ``[r, K]`` as in the file.
        up: ``[stop - start, r]``, rows in the order of H3's own linear.
        scale: alpha / r, alpha / sqrt(r) where the metadata says rsLoRA, or 1.
        start, stop: rows of the linear's weight, columns of its output.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    start: int
    stop: int


@dataclass(frozen=True)
class Reading:
    """What a LoRA file holds for one model.

    Attributes:
        branches: linear of the model -> its branches.
        used: keys of the file that are in `branches`, alphas included.
        left_out: key -> why it has no place in this model.
        ranks: every rank that occurs.
        alpha: ``"tensors"``, ``"metadata"``, or ``"none"`` (scale 1).
    """

    branches: Mapping[str, tuple[Branch, ...]]
    used: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    alpha: str = "none"


def read(
    tensors: Mapping[str, torch.Tensor],
    linears: Mapping[str, tuple[int, int]],
    metadata: Mapping[str, str] | None = None,
    file: str = "",
) -> Reading:
    """Map the keys of a LoRA file to branches of a model's linears.

    Args:
        tensors: the file's tensors; values are checked to be finite, nothing is copied but swapped halves.
        linears: name -> (out, in) of every linear that may have a branch, named as ComfyUI's H3 names them.
        metadata: the file's metadata, for an alpha that is not among the tensors.
        file: name to put into errors.

    Raises:
        LoraError: no key fits (two keys of each side are shown); another kind of adapter; a factor without its other
            half; shapes that do not multiply or do not fit; values that are not finite; alphas by layer in the
            metadata. A pair for a linear whose shape depends on the form of the H3 file (pruned or full AdaLN) is left
            out instead.
    """
    if not tensors:
        raise LoraError("empty", file, "holds no tensors; download it again")
    _refuse_others(tensors, file)
    pairs, left_out = _pairs(tensors)
    aliases = _aliases(linears)
    flat = {name.replace(".", "_"): target for name, target in aliases.items()}
    metadata_alpha, root = _metadata_alpha(metadata or {}, file)
    branches: dict[str, list[Branch]] = {}
    used: list[str] = []
    alpha_from = "none"
    for (name, _), keys in pairs.items():
        own = [key for key in keys.values() if key is not None]
        target = _find(name, aliases, flat)
        if target is None:
            left_out.update(dict.fromkeys(own, "the model has no such linear"))
            continue
        linear, part = target
        if keys["down"] is None or keys["up"] is None:
            raise LoraError(
                "half",
                file,
                f"{own[0]} has no other half; a LoRA is a pair of A and B (down and up); download it again",
            )
        down, up = _matrix(tensors, keys["down"], file), _matrix(tensors, keys["up"], file)
        reason = _shape_reason(down, up, linears[linear], part)
        if reason is not None:
            if not any(word in linear for word in _FORM_DEPENDENT):
                raise LoraError("shape", file, f"{keys['up']}: {reason}; the LoRA is for another model")
            left_out.update(dict.fromkeys(own, f"{reason} (a LoRA of the other form, pruned or full)"))
            continue
        scale = 1.0
        if keys["alpha"] is not None:
            scale, alpha_from = _alpha(tensors, keys["alpha"], file) / down.shape[0], "tensors"
        elif metadata_alpha is not None:
            scale = metadata_alpha / (math.sqrt(down.shape[0]) if root else down.shape[0])
            alpha_from = "metadata" if alpha_from == "none" else alpha_from
        branches.setdefault(linear, []).append(_branch(down, up, scale, linears[linear][0], part))
        used += own
    if not branches:
        raise LoraError("unmatched", file, _unmatched(tensors, left_out, linears))
    return Reading(
        {name: tuple(found) for name, found in branches.items()},
        tuple(used),
        left_out,
        tuple(sorted({branch.down.shape[0] for found in branches.values() for branch in found})),
        alpha_from,
    )


# ---------------------------------------------------------------- keys


def _refuse_others(tensors: Mapping[str, torch.Tensor], file: str) -> None:
    for key in tensors:
        for pattern, kind in _REFUSED:
            if pattern.search(key):
                raise LoraError(
                    "refused",
                    file,
                    f"is {kind} ({key}); a side branch adds B(Ax) beside the linear and can do nothing else; use "
                    "ComfyUI's own LoRA loader for this file, or a plain LoRA",
                )


def _pairs(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[tuple[str, str], dict[str, str | None]], dict[str, str]]:
    """``{(name, infix): {"down", "up", "alpha": key or None}}`` and the keys that are no part of a LoRA pair.

    Two adapters of one file differ in the infix; an alpha has none and belongs to each of its name.
    """
    pairs: dict[tuple[str, str], dict[str, str | None]] = {}
    alphas: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for key in tensors:
        for role, pattern in _ROLES:
            match = pattern.search(key)
            if match is None:
                continue
            name = key[: match.start()]
            if role == "alpha":
                first = alphas.setdefault(name, key)
            else:
                infix = match.groupdict().get("infix") or ""
                pair = pairs.setdefault((name, infix), {"down": None, "up": None, "alpha": None})
                first = pair[role] = pair[role] or key
            if first != key:
                left_out[key] = f"another name of {first}"
            break
        else:
            left_out[key] = "not a part of a low-rank pair"
    for (name, _), keys in pairs.items():
        keys["alpha"] = alphas.get(name)
    names = {name for name, _ in pairs}
    left_out.update({key: "an alpha without its pair" for name, key in alphas.items() if name not in names})
    return pairs, left_out


def _aliases(linears: Mapping[str, tuple[int, int]]) -> dict[str, tuple[str, str]]:
    """Every name that a trainer may use -> (H3's own name, part of its rows)."""
    return {alias: (name, part) for name in linears for alias, part in _names_of(name)}


def _names_of(name: str) -> Iterator[tuple[str, str]]:
    yield name, "all"
    if name in _WHOLE:
        yield _WHOLE[name], "all"
    for own, other in _BLOCKS.items():
        match = re.match(rf"{re.escape(own)}\d+\.", name)
        if match is None:
            continue
        tail = name[match.end() :]
        for head in (match.group(), match.group().replace(own, other)):
            yield head + tail, "all"
            yield from ((head + alias, part) for alias, part in _TAILS.get(tail, ()))


def _find(name: str, aliases: dict, flat: dict) -> tuple[str, str] | None:
    """The linear that a key's name means, prefixes or not; None where it means none of the model's."""
    for table, prefixes in ((aliases, PREFIXES), (flat, FLAT_PREFIXES)):
        rest = name
        while rest not in table:
            prefix = next((prefix for prefix in prefixes if rest.startswith(prefix)), None)
            if prefix is None:
                break
            rest = rest[len(prefix) :]
        else:
            return table[rest]
    return None


def _unmatched(tensors: Mapping[str, torch.Tensor], left_out: Mapping[str, str], linears: Mapping) -> str:
    theirs, ours = list(tensors)[:2], list(linears)[:2]
    reasons = list(dict.fromkeys(left_out.values()))
    return (
        f"none of its {len(tensors)} keys fits this model ({'; '.join(reasons)}). The file has {', '.join(theirs)}; "
        f"the model has {', '.join(ours)}. Choose a LoRA made for MiniMax H3"
    )


# ---------------------------------------------------------------- values


def _matrix(tensors: Mapping[str, torch.Tensor], key: str, file: str) -> torch.Tensor:
    """A factor as a matrix; convolutions of size 1 are matrices too."""
    tensor = tensors[key]
    if not tensor.is_floating_point():
        raise LoraError("value", file, f"{key} is {tensor.dtype}; a factor is floating point")
    if tensor.dim() > 2 and all(size == 1 for size in tensor.shape[2:]):
        tensor = tensor.flatten(1)
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise LoraError("shape", file, f"{key} is {list(tensor.shape)}; a factor of a linear is a matrix")
    # in bf16, as it will be added: the largest numbers of fp32 and fp64 round to Inf there, and fp8 has no isfinite
    if not bool(torch.isfinite(tensor.to(torch.bfloat16)).all()):
        raise LoraError("value", file, f"{key} has values that are not finite in bfloat16; the file is damaged")
    return tensor


def _alpha(tensors: Mapping[str, torch.Tensor], key: str, file: str) -> float:
    single = tensors[key].numel() == 1 and not tensors[key].is_complex()
    value = float(tensors[key].float()) if single else math.nan
    if not math.isfinite(value):
        raise LoraError("value", file, f"{key} must be one finite number, has shape {list(tensors[key].shape)}")
    return value


def _metadata_alpha(metadata: Mapping[str, str], file: str) -> tuple[float | None, bool]:
    """alpha from the metadata, and whether it is divided by the root of the rank (rsLoRA) instead of the rank.

    A number under a name of its own, or in the adapter's JSON as PEFT writes it. PEFT's alphas for single layers are
    refused: which layers its patterns mean depends on the names in the trainer's model.
    """
    root, patterns = False, False
    found = [metadata[name] for name in _ALPHA_METADATA if name in metadata]
    for name in _ADAPTER_METADATA:
        try:
            config = json.loads(metadata.get(name, "{}"))
        except ValueError:
            continue
        if isinstance(config, dict):
            own = [(key.rpartition(".")[2], value) for key, value in config.items()]
            found += [value for key, value in own if key == "lora_alpha"]
            root |= any(key == "use_rslora" and bool(value) for key, value in own)
            patterns |= any(key == "alpha_pattern" and bool(value) for key, value in own)
    try:
        values = {float(value) for value in found}
    except (TypeError, ValueError):
        values = {math.nan}
    if not values:
        return None, False
    if patterns:
        raise LoraError(
            "refused",
            file,
            "its metadata gives single layers an alpha of their own (alpha_pattern), which is not read; save it again "
            "with alpha tensors beside the factors",
        )
    if len(values) > 1 or not all(abs(value) <= _MOST_ALPHA for value in values):
        raise LoraError(
            "value", file, f"its metadata gives alpha as {', '.join(map(str, found))}; one number is wanted"
        )
    return values.pop(), root


def _shape_reason(down: torch.Tensor, up: torch.Tensor, shape: tuple[int, int], part: str) -> str | None:
    rows, columns = shape
    kind, _, _ = part.partition(" ")
    rows //= {"third": 3, "half": 2}.get(kind, 1)
    if down.shape[0] != up.shape[1]:
        return f"A is {list(down.shape)} and B {list(up.shape)}, their ranks differ"
    if down.shape[1] != columns or up.shape[0] != rows:
        return f"B A is [{up.shape[0]}, {down.shape[1]}], the model's weight there [{rows}, {columns}]"
    return None


def _branch(down: torch.Tensor, up: torch.Tensor, scale: float, rows: int, part: str) -> Branch:
    kind, _, number = part.partition(" ")
    if kind == "swapped":  # [value; gate] -> [gate; value]
        value, gate = up.chunk(2)
        return Branch(down, torch.cat((gate, value)), scale, 0, rows)
    size = rows // {"third": 3, "half": 2}.get(kind, 1)
    start = size * int(number or 0)
    return Branch(down, up, scale, start, start + size)
