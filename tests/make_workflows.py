"""Writes workflows/*.json (UI format) and workflows/api/*.json (API format), both from the one description in here.

    python tests/make_workflows.py OBJECT_INFO.json           # write
    python tests/make_workflows.py OBJECT_INFO.json --check   # write nothing; exit 1 if a file differs

OBJECT_INFO.json is the answer of ComfyUI's /object_info with this pack installed. It decides which inputs are sockets
and which are widgets, their order (saved widget values are positional) and the defaults of widgets that no graph names.
Take it from the oldest supported ComfyUI, 0.30: newer frontends open the older form of a node, not the other way round.

Standard library only. The same description and the same /object_info give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment_workflow import smoke
from measurement_workflows import MEASUREMENTS, SIZES
from workflow_notes import PROMPTS, QUANTIZE_NOTE, REAL_NOTE, SELFTEST_NOTE, TASK_NOTES, TURBO_NOTE
from workflow_parts import fuse, sample, schedule

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
REGISTRY_ID = "h3-blackwell-runtime"  # tells a frontend without this pack what to install
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
# Buttons and players that the frontend adds after a file's name, with the value it saves for each.
UPLOAD_WIDGETS = {"image_upload": ["image"], "video_upload": ["image"], "audio_upload": [None, None]}
OPTIONAL_SHAPE = 7  # LiteGraph's hollow circle

TITLE_BAR = 30  # LiteGraph draws it above a node's position
GAP_X, GAP_Y, MARGIN, GROUP_HEADER = 60, 30 + TITLE_BAR, 30, 50 + TITLE_BAR
WIDTHS = {
    "MiniMaxH3ImageToVideo": 440,
    "MiniMaxH3ReferenceToVideo": 440,
    "H3BW_RuntimeReport": 560,
    "H3BW_QuantizeCheckpoint": 640,
    "H3BW_Warmup": 560,
    **{name: width for name, (width, _) in SIZES.items()},
}
WIDE_LOADERS = ("H3BW_LoadNVFP4", "H3BW_LoraSideBranch", "CLIPLoader", "VAELoader")
# Room for what a node shows beside its sockets and widgets, in pixels.
EXTRA_HEIGHT = {
    "LoadImage": 320,
    "LoadVideo": 320,
    "SaveVideo": 420,
    "H3BW_MediaCheck": 420,
    "H3BW_RuntimeReport": 300,
    "H3BW_QuantizeCheckpoint": 620,
    "H3BW_Warmup": 220,
    # The lines of the status, once it ran.
    **dict.fromkeys(("H3BW_FuseBlocks", "H3BW_AttentionBackend", "H3BW_LoraSideBranch", "H3BW_Calibrate"), 110),
    "H3BW_LoadNVFP4": 150,
    **{name: height for name, (_, height) in SIZES.items()},
}
BLUE, GREEN, PURPLE, GREY = "#3f789e", "#88aa88", "#a1309b", "#999999"


@dataclass(frozen=True)
class Output:
    """One output slot of a node, as an input's value."""

    node: Node
    slot: int

    @property
    def type(self) -> str:
        return self.node.info["output"][self.slot]


@dataclass
class Node:
    """A node of the description: what it is and what goes in, before either format."""

    id: int
    class_type: str
    info: dict[str, Any]
    inputs: dict[str, Any]
    title: str | None
    position: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)

    def __getitem__(self, output: str) -> Output:
        return Output(self, self.info["output_name"].index(output))

    def specs(self) -> list[tuple[str, list, bool]]:
        """``(name, spec, optional)`` of every declared input, in the node's own order."""
        declared = []
        for section in ("required", "optional"):
            for name in self.info["input_order"].get(section, []):
                declared.append((name, self.info["input"][section][name], section == "optional"))
        return declared

    def sockets(self) -> list[dict[str, Any]]:
        """The input slots as the frontend saves them: connections only, a widget has none until it is linked."""
        slots = []
        for name, spec, optional in self.specs():
            kind = socket_type(spec)
            if kind == "COMFY_AUTOGROW_V3":
                slots += self._grown(name, spec[1]["template"])
            elif kind not in WIDGET_TYPES:
                slot = {"name": name, "type": kind, "link": None}
                slots.append({**slot, "shape": OPTIONAL_SHAPE} if optional else slot)
        return slots

    def _grown(self, name: str, template: dict[str, Any]) -> list[dict[str, Any]]:
        """The slots of an Autogrow input: those in use and a spare one, named ``input.prefixN``."""
        (spec,) = template["input"]["required"].values()
        used = sum(key.startswith(f"{name}.") for key in self.inputs)
        labels = [f"{template['prefix']}{index}" for index in range(min(used + 1, template["max"]))]
        slot = {"type": socket_type(spec), "shape": OPTIONAL_SHAPE, "link": None}
        return [{"label": label, "name": f"{name}.{label}", **slot} for label in labels]

    def widgets(self) -> dict[str, Any]:
        """Every widget's value by name: the description's, or else the schema's default."""
        values = {}
        for name, spec, _ in self.specs():
            if socket_type(spec) in WIDGET_TYPES:
                values[name] = self.inputs[name] if name in self.inputs else default(self.class_type, name, spec)
            if socket_type(spec) == "COMFY_DYNAMICCOMBO_V3":
                values |= self._of_option(name, spec, values[name])
        return values

    def _of_option(self, name: str, spec: list, chosen: str) -> dict[str, Any]:
        """The widgets that a dynamic menu has under the chosen option, named ``menu.widget``; they follow the menu."""
        values = {}
        option = next(option for option in spec[1]["options"] if option["key"] == chosen)
        for section in ("required", "optional"):
            for inner, inner_spec in option["inputs"].get(section, {}).items():
                key = f"{name}.{inner}"
                values[key] = self.inputs[key] if key in self.inputs else default(self.class_type, key, inner_spec)
        return values

    def widgets_values(self) -> list[Any]:
        """The widget values by position, with the extra ones that the frontend saves."""
        values = []
        specs = {name: spec for name, spec, _ in self.specs()}
        for name, value in self.widgets().items():
            values.append(value)
            options = specs[name][1] if len(specs.get(name, ())) > 1 else {}
            if options.get("control_after_generate", name in ("seed", "noise_seed")):
                values.append("fixed")
            for flag, extra in UPLOAD_WIDGETS.items():
                values += extra if options.get(flag) else []
        return values

    def api(self) -> dict[str, Any]:
        """The node in API format; inputs that only other versions of it have come last."""
        inputs = self.widgets()
        for name, value in self.inputs.items():
            inputs[name] = [str(value.node.id), value.slot] if isinstance(value, Output) else value
        title = self.title or self.info["display_name"] or self.class_type
        return {"inputs": inputs, "class_type": self.class_type, "_meta": {"title": title}}


@dataclass
class Group:
    """A titled box around columns of nodes."""

    title: str
    columns: list[list[Node]]
    colour: str = BLUE
    bounding: list[int] = field(default_factory=list)


def socket_type(spec: list) -> str:
    """The type name of an input's spec; the older form of a combo holds its options there."""
    return "COMBO" if isinstance(spec[0], list) else spec[0]


def default(class_type: str, name: str, spec: list) -> Any:
    """A widget's default; ValueError where only the description can decide."""
    options = spec[1] if len(spec) > 1 else {}
    if "default" in options:
        return options["default"]
    raise ValueError(f"{class_type}.{name}: the schema has no default; name the value in the description")


class Graph:
    """A workflow under construction.

    Args:
        name: file name without ending.
        object_info: the answer of /object_info.
    """

    def __init__(self, name: str, object_info: dict[str, Any]):
        self.name = name
        self.object_info = object_info
        self.nodes: list[Node] = []
        self.groups: list[Group] = []
        self.note: Node | None = None

    def add(self, class_type: str, title: str | None = None, /, **inputs: Any) -> Node:
        """Adds a node; inputs are widget values or outputs of earlier nodes, dotted names included."""
        if class_type not in self.object_info:
            raise ValueError(
                f"{self.name}: /object_info has no node {class_type}; start ComfyUI >= 0.30 with this pack"
            )
        node = Node(len(self.nodes) + 1, class_type, self.object_info[class_type], inputs, title)
        self.nodes.append(node)
        return node

    def explain(self, text: str) -> Node:
        """Adds the note, a node that only the UI has."""
        info = {"input": {}, "input_order": {}, "output": [], "output_name": []}
        self.note = Node(len(self.nodes) + 1, "MarkdownNote", info, {"text": text}, None, size=(560, 640))
        return self.note

    def lay_out(self, *strips: list[Group]) -> None:
        """Places groups: strips from left to right, the groups of a strip from top to bottom."""
        x = 0
        for strip in strips:
            y, right = 0, x
            for group in strip:
                group.bounding = place(group, x, y)
                right = max(right, x + group.bounding[2])
                y += group.bounding[3] + GAP_Y
                self.groups.append(group)
            x = right + GAP_X

    def api(self) -> dict[str, Any]:
        """The graph as ``/prompt`` takes it."""
        return {str(node.id): node.api() for node in self.nodes}

    def ui(self) -> dict[str, Any]:
        """The graph as the frontend saves it."""
        nodes, links = [], []
        outgoing: dict[tuple[int, int], list[int]] = {}
        for order, node in enumerate([*self.nodes, self.note]):
            sockets = node.sockets()
            names = [socket["name"] for socket in sockets]
            for name, value in node.inputs.items():
                if isinstance(value, Output):
                    slot = names.index(name)
                    link = [len(links) + 1, value.node.id, value.slot, node.id, slot, value.type]
                    links.append(link)
                    sockets[slot]["link"] = link[0]
                    outgoing.setdefault((value.node.id, value.slot), []).append(link[0])
            nodes.append(self._ui_node(node, order, sockets))
        for entry in nodes:
            for slot, output in enumerate(entry["outputs"]):
                output["links"] = outgoing.get((entry["id"], slot), [])
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{REGISTRY_ID}/{self.name}")),
            "revision": 0,
            "last_node_id": self.note.id,
            "last_link_id": len(links),
            "nodes": nodes,
            "links": links,
            "groups": [
                {"id": index, "title": group.title, "bounding": group.bounding, "color": group.colour, "flags": {}}
                for index, group in enumerate(self.groups, 1)
            ],
            "config": {},
            "extra": {"ds": {"scale": 0.5, "offset": [60, 120]}},
            "version": 0.4,
        }

    def _ui_node(self, node: Node, order: int, sockets: list[dict[str, Any]]) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": node.id,
            "type": node.class_type,
            "pos": list(node.position),
            "size": list(node.size),
            "flags": {},
            "order": order,
            "mode": 0,
            "inputs": sockets,
            "outputs": [
                {"name": name, "type": kind, "links": []}
                for name, kind in zip(node.info["output_name"], node.info["output"], strict=True)
            ],
        }
        if node.title:
            entry["title"] = node.title
        if node is self.note:
            return entry | {
                "properties": {},
                "widgets_values": [node.inputs["text"]],
                "color": "#222",
                "bgcolor": "#000",
            }
        home = REGISTRY_ID if node.class_type.startswith("H3BW_") else "comfy-core"
        properties = {"cnr_id": home, "Node name for S&R": node.class_type}
        return entry | {"properties": properties, "widgets_values": node.widgets_values()}


def place(group: Group, x: int, y: int) -> list[int]:
    """Gives every node of a group its position and size; returns the box ``[x, y, width, height]``."""
    left, bottom = x + MARGIN, y
    for column in group.columns:
        top = y + GROUP_HEADER
        for node in column:
            node.size = node.size if any(node.size) else estimated_size(node)
            node.position = (left, top)
            top += node.size[1] + GAP_Y
        left += max(node.size[0] for node in column) + GAP_X
        bottom = max(bottom, top - GAP_Y)
    return [x, y, left - GAP_X + MARGIN - x, bottom + MARGIN - y]


def estimated_size(node: Node) -> tuple[int, int]:
    """Width and height in pixels, on the generous side: nothing may overlap in any frontend's drawing."""
    rows = max(len(node.sockets()), len(node.info["output"]))
    height = 20 + 24 * rows + 34 * len(node.widgets_values()) + EXTRA_HEIGHT.get(node.class_type, 0)
    if any(len(spec) > 1 and spec[1].get("multiline") for _, spec, _ in node.specs()):
        height += 180
    width = WIDTHS.get(node.class_type, 460 if node.class_type in WIDE_LOADERS else 340)
    return width, height


def selftest(name: str, object_info: dict[str, Any], adaln: str, keyframes: bool) -> Graph:
    """The tiny H3 through stock ComfyUI and through this pack, twice, compared bit for bit, and a checked clip."""
    graph = Graph(name, object_info)
    frames, pictures = {}, []
    if keyframes:
        for key, title, colour in (("first_frame", "First frame", 0xE07A1F), ("last_frame", "Last frame", 0x1F6FE0)):
            picture = graph.add("EmptyImage", title, width=64, height=64, batch_size=1, color=colour)
            pictures.append(picture)
            frames[key] = picture["IMAGE"]
    tiny = graph.add(
        "H3BW_SelfTestModel", adaln=adaln, width=64, height=64, length=22, seed=0, reference="none", **frames
    )
    shifted = graph.add("MiniMaxH3SigmaShift", model=tiny["MODEL"], shift_video=12.0, shift_audio=3.0)
    scheduled = schedule(graph, shifted["MODEL"], 4)

    def sampled(title: str, model: Output) -> tuple[Node, Node]:
        return sample(graph, scheduled, model, tiny["positive"], tiny["LATENT"], title)

    def patched(title: str, mode: str) -> tuple[Node, Node, Node, Node]:
        blocks = fuse(graph, f"Blocks {title}", shifted["MODEL"], mode=mode, emulate="w4a4")
        attention = graph.add("H3BW_AttentionBackend", f"Attention {title}", model=blocks["MODEL"], backend="auto")
        return blocks, attention, *sampled(title, attention["MODEL"])

    def report(title: str, model: Output, latent: Output, reference: Output, suffix: str) -> Node:
        return graph.add(
            "H3BW_RuntimeReport",
            title,
            model=model,
            latent=latent,
            reference=reference,
            on_difference="fail",
            filename_prefix=f"h3bw/{name}_{suffix}",
        )

    # A and B keep ComfyUI's own attention. The exact backends differ from it by rounding, so C and D both choose one.
    guider_a, latent_a = sampled("A", shifted["MODEL"])
    blocks_b = fuse(graph, "Blocks B", shifted["MODEL"], emulate="bf16")
    guider_b, latent_b = sampled("B", blocks_b["MODEL"])
    blocks_c, attention_c, guider_c, latent_c = patched("C", "off")
    blocks_d, attention_d, guider_d, latent_d = patched("D", "exact")
    report_b = report("B equals A?", blocks_b["MODEL"], latent_b["output"], latent_a["output"], "bf16")
    report_d = report("D equals C?", attention_d["MODEL"], latent_d["output"], latent_c["output"], "w4a4")
    decode = graph.add("H3BW_SelfTestDecode", latent=latent_d["output"])
    clip = graph.add("CreateVideo", images=decode["IMAGE"], fps=24.0, audio=decode["AUDIO"], bit_depth=8)
    check = graph.add(
        "H3BW_MediaCheck", video=clip["VIDEO"], latent=latent_d["output"], filename_prefix=f"video/{name}"
    )
    note = graph.explain(SELFTEST_NOTE.format(name=name, task="FL2VA" if keyframes else "T2VA", adaln=adaln))

    graph.lay_out(
        [Group("Read me", [[note]], GREY)],
        [
            Group("Tiny H3", [*([pictures] if pictures else []), [tiny, shifted]]),
            Group("Shared by all four", [[*scheduled]]),
        ],
        [
            Group("A: stock ComfyUI", [[guider_a], [latent_a]], GREY),
            Group("B: fused blocks, bf16", [[blocks_b], [guider_b], [latent_b]], GREEN),
            Group("C: stock blocks, four bits", [[blocks_c], [attention_c, guider_c], [latent_c]], GREY),
            Group("D: fused blocks, four bits", [[blocks_d], [attention_d, guider_d], [latent_d]], GREEN),
        ],
        [
            Group("Equal, bit for bit?", [[report_b, report_d]], PURPLE),
            Group("A clip, checked on disk", [[decode, clip], [check]], PURPLE),
        ],
    )
    return graph


def real(name: str, object_info: dict[str, Any], model: str, task: str, turbo: str | None = None) -> Graph:
    """A generation with the real weights: 1344x768, 124 frames at 24 fps, 20 steps; 8 with a Turbo LoRA."""
    graph = Graph(name, object_info)
    steps = 8 if turbo else 20
    unet = graph.add("H3BW_LoadNVFP4", unet_name=model, direct_read=False, layout="auto")
    chain = [unet]
    if turbo:
        chain.append(graph.add("H3BW_LoraSideBranch", model=unet["MODEL"], lora_name=turbo, strength=1.0))
    shifted = graph.add("MiniMaxH3SigmaShift", model=chain[-1]["MODEL"], shift_video=12.0, shift_audio=3.0)
    blocks = fuse(graph, None, shifted["MODEL"])
    attention = graph.add("H3BW_AttentionBackend", model=blocks["MODEL"], backend="auto")
    clip = graph.add(
        "CLIPLoader", clip_name="qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", type="minimax", device="default"
    )
    vae = graph.add("VAELoader", "Load video VAE", vae_name="minimax_h3_video_vae_fp16.safetensors")
    audio_vae = graph.add("VAELoader", "Load audio VAE", vae_name="minimax_h3_audio_vae_fp32.safetensors")

    common = {
        "clip": clip["CLIP"],
        "vae": vae["VAE"],
        "prompt": PROMPTS[task],
        "width": 1344,
        "height": 768,
        "length": 124,
    }
    sources = []
    if task == "ref2va":
        image = graph.add("LoadImage", "Reference picture", image="reference.png")
        movie = graph.add("LoadVideo", "Reference video", file="reference.mp4")
        parts = graph.add("GetVideoComponents", video=movie["VIDEO"])
        sound = graph.add("LoadAudio", "Reference sound", audio="reference.wav")
        references = {
            "ref_images.ref_image_0": image["IMAGE"],
            "ref_videos.ref_video_0": parts["images"],
            "ref_video_audios.ref_video_audio_0": parts["audio"],
            "ref_audios.ref_audio_0": sound["AUDIO"],
        }
        positive = graph.add(
            "MiniMaxH3ReferenceToVideo", **common, audio_vae=audio_vae["VAE"], ref_image_size="match", **references
        )
        sources = [Group("References", [[image, sound], [movie, parts]])]
    elif task == "fl2va":
        first = graph.add("LoadImage", "First frame", image="first_frame.png")
        last = graph.add("LoadImage", "Last frame", image="last_frame.png")
        positive = graph.add("MiniMaxH3ImageToVideo", **common, first_frame=first["IMAGE"], last_frame=last["IMAGE"])
        sources = [Group("Keyframes", [[first], [last]])]
    else:
        positive = graph.add("MiniMaxH3ImageToVideo", **common)

    scheduled = schedule(graph, attention["MODEL"], steps)
    guider, latent = sample(graph, scheduled, attention["MODEL"], positive["positive"], positive["LATENT"])
    frames = graph.add("VAEDecode", samples=latent["output"], vae=vae["VAE"])
    track = graph.add("VAEDecodeAudio", samples=latent["output"], vae=audio_vae["VAE"])
    movie_out = graph.add("CreateVideo", images=frames["IMAGE"], fps=24.0, audio=track["AUDIO"], bit_depth=8)
    # The codec's widget is `codec` in 0.30 and `format.codec` from 0.33 on; each version ignores the other's name.
    codec = {"codec": "auto", "format.codec": "auto"}
    save = graph.add("SaveVideo", video=movie_out["VIDEO"], filename_prefix=f"video/{name}", format="auto", **codec)
    report = graph.add(
        "H3BW_RuntimeReport",
        model=attention["MODEL"],
        latent=latent["output"],
        on_difference="report",
        filename_prefix=f"h3bw/{name}",
    )
    text = REAL_NOTE.format(model=model, steps=steps) + TASK_NOTES[task]
    note = graph.explain(text + (TURBO_NOTE.format(lora=turbo) if turbo else ""))

    graph.lay_out(
        [Group("Read me", [[note]], GREY)],
        [
            Group("Model", [[*chain, shifted], [blocks, attention]], GREEN),
            Group("Text encoder and VAEs", [[clip], [vae, audio_vae]]),
        ],
        *([sources] if sources else []),
        [Group("Conditioning", [[positive]])],
        [Group("Sampling", [[*scheduled], [guider, latent]])],
        [Group("Decode and save", [[frames, track, movie_out], [save]]), Group("What ran", [[report]], PURPLE)],
    )
    return graph


def quantize_checkpoint(object_info: dict[str, Any]) -> Graph:
    """A bf16 file to NVFP4: one node."""
    graph = Graph("quantize_checkpoint", object_info)
    node = graph.add(
        "H3BW_QuantizeCheckpoint",
        unet_name="minimax_h3_fl2va_pruned_bf16.safetensors",
        filename_prefix="h3bw/quantize_checkpoint",
    )
    note = graph.explain(QUANTIZE_NOTE)
    graph.lay_out([Group("Read me", [[note]], GREY)], [Group("To NVFP4", [[node]], GREEN)])
    return graph


def build(object_info: dict[str, Any]) -> list[Graph]:
    """Every workflow of the pack."""
    return [
        selftest("selftest_t2va", object_info, adaln="pruned", keyframes=False),
        selftest("selftest_fl2va", object_info, adaln="full", keyframes=True),
        real("h3_t2va_nvfp4", object_info, "minimax_h3_fl2va_pruned_nvfp4.safetensors", "t2va"),
        real("h3_fl2va_nvfp4", object_info, "minimax_h3_fl2va_pruned_nvfp4.safetensors", "fl2va"),
        real("h3_ref2va_nvfp4", object_info, "minimax_h3_ref2va_pruned_nvfp4.safetensors", "ref2va"),
        real(
            "h3_t2va_turbo",
            object_info,
            "minimax_h3_fl2va_pruned_nvfp4.safetensors",
            "t2va",
            turbo="minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors",
        ),
        *(fill(Graph(name, object_info), Group) for name, fill in MEASUREMENTS.items()),
        quantize_checkpoint(object_info),
        smoke(Graph("deployment_smoke", object_info), Group),
    ]


def files(graphs: list[Graph]) -> dict[Path, str]:
    """Path to text of every file that the graphs make."""
    texts = {}
    for graph in graphs:
        texts[WORKFLOWS / f"{graph.name}.json"] = as_json(graph.ui())
        texts[WORKFLOWS / "api" / f"{graph.name}.json"] = as_json(graph.api())
    return texts


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("object_info", type=Path, help="JSON file with the answer of /object_info, from ComfyUI 0.30")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args(arguments)
    differing = 0
    for path, text in files(build(json.loads(options.object_info.read_text("utf-8")))).items():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        differing += 1
        print(path.relative_to(WORKFLOWS.parent))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", newline="\n")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
