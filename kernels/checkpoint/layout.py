"""Which layers of a state dict are quantised and how, and bringing NVFP4 files into the form that ComfyUI loads.

A quantised linear ``L`` is ``L.weight`` with ``L.weight_scale`` and, for NVFP4, ``L.weight_scale_2``; optional are
``L.input_scale`` (static activation scale) and ``L.pre_quant_scale``. Its format is said in one of three ways:

* per layer: ``L.comfy_quant``, uint8 bytes of JSON such as ``{"format": "nvfp4"}``; nothing but NULs counts as absent;
* per file: the metadata entry ``_quantization_metadata``, JSON ``{"layers": {L: {"format": ...}}}``;
* not at all: a uint8 weight with both scales is then taken for NVFP4, an fp8 weight with ``weight_scale`` for scaled
  fp8.

The byte order within NVFP4 tensors cannot be seen in shapes. Markers and metadata mean ComfyUI's order (even element in
the high nibble, scales in 128x4 tiles); ``modelopt`` (low nibble, row-major scales) has to be declared.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .. import nvfp4
from .arrangement import evidence
from .dtypes import NAMES
from .header import CheckpointError, TensorInfo
from .writer import marker_tensor

PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.")
"""What may stand before the keys of the diffusion model in files ComfyUI loads."""
QUANT_METADATA = "_quantization_metadata"
MARKER = "comfy_quant"
MAX_MARKER_BYTES = 65536
DECLARATIONS = ("auto", "comfy", "modelopt")

# What ComfyUI asks for when it loads a layer of each format.
REQUIRED_SCALES = {
    "nvfp4": ("weight_scale", "weight_scale_2"),
    "float8_e4m3fn": ("weight_scale",),
    "float8_e5m2": ("weight_scale",),
    "mxfp8": ("weight_scale",),
    "int8_tensorwise": ("weight_scale",),
    "convrot_w4a4": ("weight_scale",),
    "asym_w4a8_int8": ("weight_scale",),
}
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", MARKER)


@dataclass(frozen=True)
class Layer:
    """A quantised linear.

    Attributes:
        format: a key of `REQUIRED_SCALES`.
        source: ``marker``, ``metadata`` or ``inferred``.
        conf: the marker's JSON object.
        static_input: it has an ``input_scale``.
    """

    format: str
    source: str
    conf: Mapping
    static_input: bool


def prefix_of(names: Iterable[str]) -> str | None:
    """The prefix of the H3 keys, or None where `names` are not those of a MiniMax H3 (ComfyUI's own test for it)."""
    names = set(names)
    for prefix in PREFIXES:
        if {f"{prefix}video_patch_proj.weight", f"{prefix}audio_patch_proj.weight"} <= names:
            return prefix
    return None


def is_h3(names: Iterable[str]) -> bool:
    """True for the key names of a MiniMax H3 diffusion model, with or without a prefix."""
    return prefix_of(names) is not None


def infos_of(state_dict: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """dtype and shape of tensors in memory, in the form a header has them; the offsets only give the size."""
    return {
        name: TensorInfo(
            NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), 0, tensor.numel() * tensor.element_size()
        )
        for name, tensor in state_dict.items()
    }


def find_layers(
    infos: Mapping[str, TensorInfo],
    metadata: Mapping[str, str] | None = None,
    markers: Mapping[str, bytes] | None = None,
    file: str = "",
) -> dict[str, Layer]:
    """The quantised layers by name, after checking that every scale has its weight and every weight its scales.

    Args:
        infos: dtype and shape by key, from a header or `infos_of`.
        metadata: the file's metadata. Its layer names may lack a prefix that the keys have, or the other way round.
        markers: content of the ``comfy_quant`` tensors by layer; one that is missing here counts as absent.
        file: name to put into errors.

    Raises:
        CheckpointError: ``scale_without_weight``, ``weight_without_scale``, ``scale_without_format``, ``bad_marker``,
            ``unknown_format``, ``layout_contradiction`` (marker and metadata differ), ``bad_metadata``.
    """
    confs = {}
    for layer, raw in (markers or {}).items():
        conf = _marker_conf(file, layer, raw)
        if conf is not None:
            confs[layer] = ("marker", conf)
    for layer, conf in _metadata_confs(file, infos, metadata or {}).items():
        known = confs.setdefault(layer, ("metadata", conf))
        if known[1]["format"] != conf["format"]:
            raise CheckpointError(
                "layout_contradiction",
                file,
                layer,
                f"its marker says {known[1]['format']}, the file's metadata {conf['format']}; repair the file",
            )
    for key in infos:
        layer, _, part = key.rpartition(".")
        if part in _COMPANIONS and f"{layer}.weight" not in infos:
            raise CheckpointError(
                "scale_without_weight", file, layer, f"has {part} but no weight; the file is incomplete"
            )

    layers = {}
    for key, info in infos.items():
        layer, _, part = key.rpartition(".")
        if part != "weight":
            continue
        present = [name for name in ("weight_scale", "weight_scale_2") if f"{layer}.{name}" in infos]
        source, conf = confs.get(layer, ("inferred", None))
        if conf is None and info.dtype == "U8" and len(info.shape) == 2:
            conf = {"format": "nvfp4"}
        if conf is None and info.dtype in FP8 and present == ["weight_scale"]:
            conf = {"format": FP8[info.dtype]}
        if conf is None:
            if present:
                raise CheckpointError(
                    "scale_without_format",
                    file,
                    layer,
                    f"has {present[0]} for a {info.dtype} weight, but nothing says its format; "
                    "ComfyUI would drop the scale",
                )
            continue
        missing = [name for name in REQUIRED_SCALES[conf["format"]] if name not in present]
        if missing:
            raise CheckpointError(
                "weight_without_scale",
                file,
                layer,
                f"is {conf['format']} but has no {' and no '.join(missing)}; the file is incomplete",
            )
        layers[layer] = Layer(conf["format"], source, conf, f"{layer}.input_scale" in infos)
    return layers


def normalise(
    state_dict: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    declared: str = "auto",
    file: str = "",
) -> tuple[dict[str, torch.Tensor], dict]:
    """Bring a state dict into the form that every ComfyUI from 0.30 loads: no prefix, a marker at each quantised layer.

    NVFP4 scales stored as uint8 are viewed as float8_e4m3fn, never converted. With ``declared="modelopt"`` the nibbles
    are swapped and the scales swizzled and padded. Values of NVFP4 layers are checked: block scales that are NaN or
    negative, decode and input scales that are not finite, positive numbers.

    On one layer of each kind the declaration is held against the bytes: see `arrangement.evidence`. Weights without any
    structure (independent, identically distributed) carry no evidence; then the declaration is trusted, and ``auto``
    means ComfyUI's order, which `info` calls an assumption.

    Args:
        state_dict: tensors by name, left as it is; unchanged tensors are shared with the result.
        declared: ``auto``, ``comfy`` or ``modelopt``.

    Returns:
        The new state dict, and `info`: ``prefix`` (removed from the keys), ``dropped`` (keys outside the prefix),
        ``layers`` (name to `Layer`), ``layout`` (``comfy``, ``modelopt`` or None without NVFP4 layers),
        ``layout_from`` (``marker``, ``declared``, ``evidence`` or ``assumption``), ``ignored_metadata`` (layers that
        the metadata names and the file lacks), ``metadata`` (to hand to ComfyUI: without `QUANT_METADATA`, now in
        markers).

    Raises:
        CheckpointError: those of `find_layers`, ``bad_scale``, ``bad_weight``, ``layout_contradiction``,
            ``layout_implausible``.
        ValueError: an unknown declaration.
    """
    if declared not in DECLARATIONS:
        raise ValueError(f"layout must be one of {', '.join(DECLARATIONS)}, is {declared!r}")
    metadata = dict(metadata or {})
    prefix = prefix_of(state_dict) or ""
    out = {key[len(prefix) :]: tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
    dropped = [key for key in state_dict if not key.startswith(prefix)]

    infos = infos_of(out)
    markers = {
        key.rpartition(".")[0]: marker_bytes(file, key, tensor)
        for key, tensor in out.items()
        if key.rpartition(".")[2] == MARKER
    }
    layers = find_layers(infos, metadata, markers, file)
    fp4 = {name: layer for name, layer in layers.items() if layer.format == "nvfp4"}
    said = next((name for name, layer in fp4.items() if layer.source != "inferred"), None)
    if said is not None and declared == "modelopt":
        raise CheckpointError(
            "layout_contradiction",
            file,
            said,
            "layout modelopt was asked for, but the file says ComfyUI's nvfp4; choose auto or comfy",
        )
    for name in fp4:
        _check_values(file, name, out, declared)
    found = _arrangement(file, fp4, out, declared, said is not None)
    for name in fp4:
        if declared == "modelopt":
            _from_modelopt(name, out)

    for key in [key for key in out if key.rpartition(".")[2] == MARKER]:
        del out[key]  # the absent ones too: ComfyUI would try to read their NULs as JSON
    for name, layer in layers.items():
        out[f"{name}.{MARKER}"] = marker_tensor(marker_text(layer.conf))
    layout_from = (
        "marker" if said is not None else "declared" if declared != "auto" else "evidence" if found else "assumption"
    )
    named = _metadata_layers(file, metadata)
    info = {
        "prefix": prefix,
        "dropped": dropped,
        "layers": layers,
        "layout": ("modelopt" if declared == "modelopt" else "comfy") if fp4 else None,
        "layout_from": layout_from if fp4 else None,
        "ignored_metadata": [name for name in named if _local_name(name, infos) is None],
        "metadata": {key: value for key, value in metadata.items() if key != QUANT_METADATA},
    }
    return out, info


def marker_text(conf: Mapping) -> bytes:
    """The bytes of a ``comfy_quant`` marker that says `conf`."""
    return json.dumps(dict(conf)).encode()


def marker_bytes(file: str, key: str, tensor: torch.Tensor) -> bytes:
    """The content of a ``comfy_quant`` tensor, refusing one that cannot be a marker before its bytes are copied."""
    check_marker(file, key, infos_of({key: tensor})[key])
    return bytes(tensor.flatten().tolist())


def check_marker(file: str, key: str, info: TensorInfo) -> None:
    """Refuse a ``comfy_quant`` entry of the wrong dtype or of a size that no marker has."""
    if info.dtype != "U8" or info.nbytes > MAX_MARKER_BYTES:
        raise CheckpointError(
            "bad_marker",
            file,
            key,
            f"is {info.dtype} of {info.nbytes} bytes; a marker is uint8 JSON of at most {MAX_MARKER_BYTES} bytes",
        )


def _marker_conf(file: str, layer: str, raw: bytes) -> dict | None:
    raw = raw.rstrip(b"\0")
    return _conf(file, layer, _json(file, f"{layer}.{MARKER}", "bad_marker", raw), "bad_marker") if raw else None


def _metadata_layers(file: str, metadata: Mapping[str, str]) -> dict:
    if QUANT_METADATA not in metadata:
        return {}
    parsed = _json(file, QUANT_METADATA, "bad_metadata", metadata[QUANT_METADATA])
    layers = parsed.get("layers") if isinstance(parsed, dict) else None
    if not isinstance(layers, dict):
        raise CheckpointError("bad_metadata", file, QUANT_METADATA, 'must be a JSON object with an object "layers"')
    return layers


def _metadata_confs(file: str, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> dict[str, dict]:
    named = _metadata_layers(file, metadata)
    confs = {name: _conf(file, name, conf, "bad_metadata") for name, conf in named.items()}
    return {local: confs[name] for name in named if (local := _local_name(name, infos)) is not None}


def _local_name(name: str, infos: Mapping[str, TensorInfo]) -> str | None:
    """The layer of `infos` that the metadata calls `name`: as it is, with a prefix less, or with one more."""
    bare = [name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)]
    for candidate in (name, *bare, *(prefix + name for prefix in PREFIXES)):
        if f"{candidate}.weight" in infos:
            return candidate
    return None


def _json(file: str, what: str, code: str, text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise CheckpointError(code, file, what, f"is not JSON ({type(error).__name__}); the file is damaged") from error


def _conf(file: str, layer: str, conf: object, code: str) -> dict:
    if not isinstance(conf, dict):
        raise CheckpointError(code, file, layer, 'its quantisation must be a JSON object with a "format"')
    name = conf.get("format")
    if not isinstance(name, str) or name not in REQUIRED_SCALES:
        raise CheckpointError(
            "unknown_format",
            file,
            layer,
            f"quantisation format {str(name)[:60]!r} is unknown; "
            f"known are {', '.join(REQUIRED_SCALES)}; update the pack",
        )
    return conf


def check_shapes(file: str, name: str, infos: Mapping[str, TensorInfo], declared: str) -> None:
    """Check dtypes and shapes of an NVFP4 layer from its header entries."""
    codes, scales = infos[f"{name}.weight"], infos[f"{name}.weight_scale"]
    if codes.dtype != "U8" or len(codes.shape) != 2:
        raise CheckpointError(
            "bad_weight", file, name, f"NVFP4 codes must be a uint8 matrix, are {codes.dtype} {list(codes.shape)}"
        )
    rows, cols = codes.shape[0], codes.shape[1] * 2
    if cols % nvfp4.BLOCK:
        raise CheckpointError("bad_weight", file, name, f"a row has {cols} codes, wanted a multiple of {nvfp4.BLOCK}")
    shapes = [nvfp4.scale_shape((rows, cols))]
    if declared == "modelopt":
        shapes.append((rows, cols // nvfp4.BLOCK))
    elif rows % nvfp4.ROW_MULTIPLE:
        raise CheckpointError(
            "bad_weight",
            file,
            name,
            f"has {rows} rows; ComfyUI's NVFP4 codes are padded to {nvfp4.ROW_MULTIPLE}; is it layout modelopt?",
        )
    if scales.dtype not in ("U8", "F8_E4M3") or scales.shape not in shapes:
        raise CheckpointError(
            "bad_scale",
            file,
            f"{name}.weight_scale",
            f"is {scales.dtype} {list(scales.shape)}; {rows}x{cols} codes want F8_E4M3 (or its bytes as U8) "
            f"{' or '.join(str(list(s)) for s in shapes)}",
        )
    for part in ("weight_scale_2", "input_scale"):
        info = infos.get(f"{name}.{part}")
        if info is not None and (math.prod(info.shape) != 1 or info.dtype not in ("F32", "F16", "BF16", "F64")):
            raise CheckpointError(
                "bad_scale",
                file,
                f"{name}.{part}",
                f"must be one floating point number, is {info.dtype} {list(info.shape)}",
            )


def check_number(file: str, key: str, number: float) -> None:
    """Refuse a decode or activation scale that no tensor can have. 0 is left to who knows the codes."""
    if not 0 <= number < float("inf"):
        raise CheckpointError("bad_scale", file, key, f"is {number}; wanted a finite number that is not negative")
    if number == 0 and key.endswith(".input_scale"):
        raise CheckpointError("bad_scale", file, key, "is 0; a static activation scale is amax/2688 and positive")


def bad_block_scales(file: str, key: str, count: int) -> CheckpointError:
    """The error for block scales that are NaN (0x7F, 0xFF) or negative (from 0x80 on)."""
    return CheckpointError(
        "bad_scale",
        file,
        key,
        f"has {count} block scales that are NaN or negative (bytes 0x7F to 0xFF); the file is damaged",
    )


def zero_decode_scale(file: str, key: str) -> CheckpointError:
    """The error for a layer that its scale turns into zeros though it has codes."""
    return CheckpointError("bad_scale", file, key, "is 0 though the layer has non-zero codes; the file is damaged")


def _check_values(file: str, name: str, out: dict[str, torch.Tensor], declared: str) -> None:
    """Check shapes and values of an NVFP4 layer; leave its scales as e4m3 and fp32 0-d in `out`."""
    parts = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    keys = [f"{name}.{part}" for part in parts if f"{name}.{part}" in out]
    check_shapes(file, name, infos_of({key: out[key] for key in keys}), declared)
    codes, scales = out[f"{name}.weight"], out[f"{name}.weight_scale"]
    raw = scales.view(torch.uint8)
    bad = int((raw >= 0x7F).sum())
    if bad:
        raise bad_block_scales(file, f"{name}.weight_scale", bad)
    out[f"{name}.weight_scale"] = raw.view(torch.float8_e4m3fn)

    decode = _scalar(file, f"{name}.weight_scale_2", out)
    if float(decode) == 0 and bool(codes.any()):
        raise zero_decode_scale(file, f"{name}.weight_scale_2")
    if f"{name}.input_scale" in out:
        _scalar(file, f"{name}.input_scale", out)


def _scalar(file: str, key: str, out: dict[str, torch.Tensor]) -> torch.Tensor:
    check_number(file, key, float(out[key]))
    out[key] = out[key].to(torch.float32).reshape(())
    return out[key]


def _arrangement(
    file: str, fp4: Mapping[str, Layer], out: Mapping[str, torch.Tensor], declared: str, marked: bool
) -> bool:
    """Hold the declared order of the scales against one layer of each kind.

    Returns:
        True where some layer shows the declared order and none the other; False without evidence, or with evidence both
        ways, which only weights of an unusual structure give.

    Raises:
        CheckpointError: ``layout_implausible`` where some layer shows the other order and none the declared one.
    """
    kinds = {}
    for name in fp4:
        kinds.setdefault(name.split(".")[-1], name)
    want = "row-major" if declared == "modelopt" else "swizzled"
    seen = {}
    for name in kinds.values():
        codes, scales = out[f"{name}.weight"], out[f"{name}.weight_scale"]
        rows, blocks = codes.shape[0], codes.shape[1] * 2 // nvfp4.BLOCK
        if tuple(scales.shape) == nvfp4.scale_shape((rows, blocks * nvfp4.BLOCK)):
            verdict, ratio = evidence(scales.view(torch.uint8), rows, blocks)
            if verdict is not None:
                seen.setdefault(verdict, (name, ratio))
    other = next((verdict for verdict in seen if verdict != want), None)
    if other is not None and want not in seen:
        name, ratio = seen[other]
        advice = "choose layout comfy or auto" if declared == "modelopt" else "choose layout modelopt"
        if marked:
            advice = "its markers are wrong: get another file"
        raise CheckpointError(
            "layout_implausible",
            file,
            name,
            f"layout {declared} means {want} block scales, but read as {other} ones they fit rows and columns "
            f"{ratio:.1f} times better; {advice}",
        )
    return want in seen and other is None


def _from_modelopt(name: str, out: dict[str, torch.Tensor]) -> None:
    """Swap the nibbles, swizzle the scales, pad both with zeros."""
    codes, scales = out[f"{name}.weight"], out[f"{name}.weight_scale"]
    rows, blocks = codes.shape[0], codes.shape[1] * 2 // nvfp4.BLOCK
    swapped = (codes << 4) | (codes >> 4)
    out[f"{name}.weight"] = torch.nn.functional.pad(swapped, (0, 0, 0, nvfp4.roundup(rows, nvfp4.ROW_MULTIPLE) - rows))
    out[f"{name}.weight_scale"] = nvfp4.swizzle(scales[:rows, :blocks])
