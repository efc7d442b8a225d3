"""``quantize_file``: a bf16, fp32 or fp8 MiniMax H3 to an NVFP4 file that stock ComfyUI reads, tensor by tensor.

Quantised are the four large linears of each DiT block and nothing else: 19.3 of about 20 billion weights of a pruned
file. The AdaLN projections and their table, the patch projections, the embedders, the norms, the text refiner and the
output heads keep the bytes that they have.
"""

import fnmatch
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .. import nvfp4
from . import layout, pieces, reader, scales
from .dtypes import TORCH_DTYPES
from .header import CheckpointError, Header, read_header
from .inspection import verify
from .writer import NVFP4_MARKER, StreamWriter, layer_tensors, marker_tensor

SCHEMA = "h3bw-quantise/1"
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
_TARGET = re.compile(r"blocks\.\d+\.(?:" + "|".join(map(re.escape, LINEARS)) + r")")
_FLOATS = ("F32", "BF16", "F16")
# How files from before the markers name an fp8 layer's scales, and the tensor that says that it is such a file.
_OLD_SCALES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
_OLD_FLAG = "scaled_fp8"
_LONGEST_KEEP = 10_000  # characters of keep_layers in all


@dataclass
class _Layer:
    """One linear of the source that has a scale or will be quantised; keys are those in the source file."""

    name: str
    weight: str
    format: str | None
    conf: Mapping = field(default_factory=dict)
    source: str = ""
    companions: dict[str, str] = field(default_factory=dict)  # weight_scale and so on -> key


@dataclass
class _Plan:
    """What becomes of every tensor of the source."""

    prefix: str
    quantise: dict[str, _Layer] = field(default_factory=dict)  # by source key of the weight
    copies: dict[str, str] = field(default_factory=dict)  # source key -> target name
    markers: dict[str, bytes] = field(default_factory=dict)  # layer -> marker of a layer that stays as it is
    kept: list[str] = field(default_factory=list)  # layers that keep_layers names
    dropped: list[str] = field(default_factory=list)  # keys outside the model, and scales that no longer apply


def quantize_file(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    scale: str = "adaptive",
    keep_layers: Iterable[str] = (),
    device: str | torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write an NVFP4 version of an H3 checkpoint.

    The source may be bf16, fp16, fp32 or fp8 (scaled in either of ComfyUI's key forms, or plain), pruned or full, with
    a prefix or without; layers that are NVFP4 already are copied. An fp8 weight is multiplied by its scale first. fp8
    layers that are not quantised keep their bytes and get today's keys. The result has no prefix.

    Memory: one tensor of the source, its codes, and pieces of a few MB (256 MB on a GPU).

    Args:
        src: the checkpoint.
        dst: the new file; its folder must exist, it must not.
        scale: ``adaptive`` or ``amax``, see `scales`.
        keep_layers: layers to leave as they are, for a mixed file: names (``blocks.0.mlp.fc1``), blocks
            (``blocks.0``), kinds (``mlp.fc2``) or patterns (``blocks.4?.attn.*``).
        device: where the arithmetic runs; None takes CUDA where there is some. Both give the same bytes but for blocks
            whose candidates tie to within fp32 rounding.
        progress: ``progress(done_bytes, total_bytes)`` of the source, several times a second; may raise to cancel.

    Returns:
        A report that JSON can hold: ``schema``, ``source``, ``target`` (name, bytes), ``scale``, ``device``,
        ``seconds``, ``layers`` (name, kind, shape, dtype, relative_error), ``relative_error`` (mean, max, and by kind),
        ``kept``, ``copied``, ``dropped``.

    Raises:
        CheckpointError: those of `read_header` and `inspection.verify`; ``not_h3``, ``unsupported_source``,
            ``nothing_to_quantise``, ``bad_keep_layers``, ``nonfinite_weight``, ``bad_scale``; those of `StreamWriter`.
            No file is left then, and none after an exception of `progress`.
        ValueError: an unknown `scale`.
    """
    src, dst = os.fspath(src), os.fspath(dst)
    if scale not in scales.CHOICES:
        raise ValueError(f"scale must be one of {', '.join(scales.CHOICES)}, is {scale!r}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    started = time.monotonic()
    header = read_header(src)
    file = os.path.basename(src)
    plan = _plan(src, file, header, list(keep_layers))
    total = sum(header.tensors[key].nbytes for key in (*plan.quantise, *plan.copies))
    entries, errors, done = [], [], 0
    target = StreamWriter(dst, _kinds(file, header, plan), _metadata(header, file, scale, plan))
    with target as out, pieces.File(src) as source:
        for layer, marker in plan.markers.items():
            out.put(f"{layer}.{layout.MARKER}", marker_tensor(marker))
        # in the order of the file, so that a disk reads it once from end to end
        for key in sorted((*plan.quantise, *plan.copies), key=lambda key: header.tensors[key].begin):
            size = header.tensors[key].nbytes

            def tick(share: float, size: int = size, before: int = done) -> None:
                if progress is not None:
                    progress(before + int(share * size), total)

            tick(0.0)
            if key in plan.copies:
                out.put(plan.copies[key], reader.read_tensor(source, header, key))
            else:
                layer = plan.quantise[key]
                weight = _weight(source, header, layer, file, device)
                q, error = scales.quantize(weight, scale, tick, name=layer.name, file=file)
                del weight
                for name, tensor in layer_tensors(layer.name, q).items():
                    out.put(name, tensor.cpu())
                info = header.tensors[key]
                kind = layer.name.split(".", 2)[2]
                entries.append({
                    "name": layer.name, "kind": kind, "shape": list(info.shape), "dtype": info.dtype,
                    "relative_error": error,
                })  # fmt: skip
                errors.append((kind, error))
            done += size
            tick(0.0, 0, done)
    by_kind = {kind: [error for other, error in errors if other == kind] for kind, _ in errors}
    entries.sort(key=lambda entry: [int(part) if part.isdigit() else part for part in entry["name"].split(".")])
    return {
        "schema": SCHEMA,
        "source": {"name": file, "bytes": header.file_bytes},
        "target": {"name": os.path.basename(dst), "bytes": os.path.getsize(dst)},
        "scale": scale,
        "device": device.type,
        "seconds": round(time.monotonic() - started, 3),
        "layers": entries,
        "relative_error": {
            "mean": sum(error for _, error in errors) / len(errors),
            "max": max(error for _, error in errors),
            "by_kind": {kind: sum(found) / len(found) for kind, found in by_kind.items()},
        },
        "kept": plan.kept,
        "copied": len(plan.copies),
        "dropped": plan.dropped,
    }


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    source, target, error = report["source"], report["target"], report["relative_error"]
    lines = [
        f"{source['name']} ({source['bytes'] / 2**30:.2f} GiB) to {target['name']} "
        f"({target['bytes'] / 2**30:.2f} GiB): {len(report['layers'])} layers to NVFP4, scales {report['scale']}, "
        f"{report['seconds']:.0f} s on {report['device']}",
        f"relative weight error: mean {error['mean']:.4f}, largest {error['max']:.4f}",
        *(f"  {kind}: {value:.4f}" for kind, value in sorted(error["by_kind"].items())),
        f"left as they are: {report['copied']} tensors"
        + (f", among them {len(report['kept'])} layers of keep_layers" if report["kept"] else ""),
    ]
    if report["dropped"]:
        lines.append(f"left out: {len(report['dropped'])} tensors, the first is {report['dropped'][0]}")
    return "\n".join(lines)


def _plan(src: str, file: str, header: Header, keep: list[str]) -> _Plan:
    """Decide about every tensor; refuses before anything is written."""
    prefix = layout.prefix_of(header.tensors)
    if prefix is None:
        raise CheckpointError(
            "not_h3", file, "",
            "has no video_patch_proj and audio_patch_proj, so it is no MiniMax H3 diffusion model; choose an H3 file",
        )  # fmt: skip
    plan = _Plan(prefix)
    known = verify(src, header)
    layers: dict[str, _Layer] = {}
    rest: dict[str, str] = {}
    for key in header.tensors:
        if not key.startswith(prefix):
            plan.dropped.append(key)
            continue
        name = key[len(prefix) :]
        layer, _, part = name.rpartition(".")
        part = _OLD_SCALES.get(part, part)
        has_weight = f"{prefix}{layer}.weight" in header.tensors
        if name == _OLD_FLAG or part == layout.MARKER:
            continue  # said again by markers of the target
        if part in ("weight_scale", "weight_scale_2", "input_scale") and has_weight:
            layers.setdefault(layer, _Layer(layer, f"{prefix}{layer}.weight", None)).companions[part] = key
        elif part == "weight" and (_TARGET.fullmatch(layer) or f"{prefix}{layer}" in known):
            layers.setdefault(layer, _Layer(layer, key, None))
        else:
            rest[key] = name
    plan.copies = rest
    full_precision = _old_full_precision(header, prefix)
    for layer in layers.values():
        found = known.get(prefix + layer.name)
        dtype = header.tensors[layer.weight].dtype
        if found is not None:
            layer.format, layer.conf, layer.source = found.format, found.conf, found.source
        elif dtype in layout.FP8 and "weight_scale" in layer.companions:
            layer.format = layout.FP8[dtype]
            layer.conf = {"format": layer.format, **full_precision}
        elif layer.companions:
            raise CheckpointError(
                "scale_without_format", file, layer.name,
                f"has a scale for a {dtype} weight, but nothing says its format; the file is damaged",
            )  # fmt: skip
    kept = _kept(file, [name for name in layers if _TARGET.fullmatch(name)], keep)
    for layer in layers.values():
        target = _TARGET.fullmatch(layer.name) and layer.name not in kept and layer.format != "nvfp4"
        if target:
            _refuse_unsupported(file, header, layer)
            plan.quantise[layer.weight] = layer
            plan.dropped += [key for part, key in layer.companions.items() if part == "input_scale"]
            continue
        if layer.format == "nvfp4" and layer.source == "inferred":
            raise CheckpointError(
                "unsupported_source", file, layer.name,
                "is NVFP4 already and nothing says in which byte order; start from the bf16 or fp8 file",
            )  # fmt: skip
        plan.copies[layer.weight] = f"{layer.name}.weight"
        plan.copies |= {key: f"{layer.name}.{part}" for part, key in layer.companions.items()}
        if layer.format is not None:
            plan.markers[layer.name] = NVFP4_MARKER if layer.format == "nvfp4" else layout.marker_text(layer.conf)
    plan.kept = sorted(kept)
    if not plan.quantise:
        raise CheckpointError(
            "nothing_to_quantise", file, "",
            "has no bf16, fp16, fp32 or fp8 linear left to quantise: all are NVFP4 already, or keep_layers names them",
        )  # fmt: skip
    return plan


def _old_full_precision(header: Header, prefix: str) -> dict:
    """What ComfyUI reads from a ``scaled_fp8`` tensor of two elements."""
    info = header.tensors.get(prefix + _OLD_FLAG)
    return {"full_precision_matrix_mult": True} if info is not None and info.shape == (2,) else {}


def _refuse_unsupported(file: str, header: Header, layer: _Layer) -> None:
    info = header.tensors[layer.weight]
    if (layer.format is not None and layer.format not in layout.FP8.values()) or (
        info.dtype not in _FLOATS and info.dtype not in layout.FP8
    ):
        raise CheckpointError(
            "unsupported_source", file, layer.name,
            f"is {layer.format or info.dtype}; NVFP4 is made from bf16, fp16, fp32 or fp8, whose weights are nearer to "
            "the original: start from one of those files, or name the layer in keep_layers",
        )  # fmt: skip
    if len(info.shape) != 2 or info.shape[1] % nvfp4.BLOCK or info.shape[0] % nvfp4.ROW_MULTIPLE:
        raise CheckpointError(
            "bad_weight", file, layer.name,
            f"has shape {list(info.shape)}; wanted a matrix with a multiple of {nvfp4.BLOCK} rows and columns",
        )  # fmt: skip


def _kept(file: str, names: list[str], patterns: list[str]) -> set[str]:
    """The layers that the patterns name; a pattern that names none is a typing error."""
    if sum(map(len, patterns)) > _LONGEST_KEEP:
        # matching takes time and cannot be cancelled
        raise CheckpointError(
            "bad_keep_layers", file, "", f"keep_layers has more than {_LONGEST_KEEP} characters; use patterns"
        )
    kept: set[str] = set()
    for pattern in patterns:
        found = [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
        ]
        if not found:
            raise CheckpointError(
                "bad_keep_layers", file, "",
                f"keep_layers: {pattern[:80]!r} is none of its {len(names)} linears, for example "
                f"{names[0] if names else 'blocks.0.mlp.fc1'}",
            )  # fmt: skip
        kept.update(found)
    return kept


def _kinds(file: str, header: Header, plan: _Plan) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of everything in the target."""
    kinds = {}
    for key, name in plan.copies.items():
        info = header.tensors[key]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError("dtype_unsupported", file, key, f"dtype {info.dtype} cannot be copied by this torch")
        kinds[name] = (TORCH_DTYPES[info.dtype], info.shape)
    for layer, marker in plan.markers.items():
        kinds[f"{layer}.{layout.MARKER}"] = (torch.uint8, (len(marker),))
    for key, layer in plan.quantise.items():
        shape = header.tensors[key].shape
        kinds[f"{layer.name}.weight"] = (torch.uint8, nvfp4.code_shape(shape))
        kinds[f"{layer.name}.weight_scale"] = (torch.float8_e4m3fn, nvfp4.scale_shape(shape))
        kinds[f"{layer.name}.weight_scale_2"] = (torch.float32, ())
        kinds[f"{layer.name}.{layout.MARKER}"] = (torch.uint8, (len(NVFP4_MARKER),))
    return kinds


def _metadata(header: Header, file: str, scale: str, plan: _Plan) -> dict[str, str]:
    metadata = {key: text for key, text in header.metadata.items() if key != layout.QUANT_METADATA}
    return metadata | {
        "h3bw_quantised_from": file,
        "h3bw_quantised_as": f"nvfp4, {scale} scales, {len(plan.quantise)} layers",
    }


def _weight(source: pieces.File, header: Header, layer: _Layer, file: str, device: torch.device) -> scales.Weight:
    """The layer's weight with its fp8 scale."""
    factor = None
    if "weight_scale" in layer.companions:
        key = layer.companions["weight_scale"]
        factor = reader.read_tensor(source, header, key).to(torch.float32)
        rows = header.tensors[layer.weight].shape[0]
        if factor.numel() not in (1, rows) or not bool((torch.isfinite(factor) & (factor > 0)).all()):
            raise CheckpointError(
                "bad_scale", file, key,
                f"must be one finite number above zero, or one for each of {rows} rows, is {list(factor.shape)}",
            )  # fmt: skip
        factor = factor.reshape(()) if factor.numel() == 1 else factor.reshape(rows, 1)
    return scales.Weight(reader.read_tensor(source, header, layer.weight), factor, device)
