"""Photographs the page: workflows/NAME.jpg for the template browser, web/docs/ID.png for each node's docs.

    H3BW_PLAYWRIGHT=FOLDER COMFYUI_PATH=FOLDER python tests/make_pictures.py [NAME or ID ...]

In an environment that can import ComfyUI and Pillow, with node, chromium and playwright-core as for
browser/test_page.py. Without names it makes every picture that is missing; a picture named is made again. A node is
shown with its neighbours, in the first workflow that has it, or in a small graph of its own where none has it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_workflows
from browser_tools import NotThere, find
from comfy_server import PACK_ROOT, ComfyServer, make_base_directory
from conftest import comfyui_folder
from PIL import Image

WORKFLOWS, DOCS = PACK_ROOT / "workflows", PACK_ROOT / "web" / "docs"
THUMBNAIL = (640, 400)
THUMBNAIL_BYTES, PICTURE_BYTES = 60_000, 40_000
VIEW = {"width": 1600, "height": 1000}
ROOM = (1500, 1100)  # of the graph, around a node
RUN = ("first_proof", "selftest_t2va", "selftest_fl2va")  # queued first, so that the picture shows what comes out
MODEL_FOLDERS = ("diffusion_models", "text_encoders", "vae", "loras")


def calibration(object_info: dict[str, Any]) -> dict[str, Any]:
    """Both calibration nodes around a sampler: no workflow of the pack has them."""
    graph = make_workflows.Graph("calibration", object_info)
    tiny = graph.add("H3BW_SelfTestModel", adaln="pruned", width=64, height=64, length=22, seed=0, reference="none")
    watched = graph.add("H3BW_Calibrate", model=tiny["MODEL"])
    guider = graph.add("BasicGuider", model=watched["MODEL"], conditioning=tiny["positive"])
    latent = graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=42)["NOISE"],
        guider=guider["GUIDER"],
        sampler=graph.add("KSamplerSelect", sampler_name="euler")["SAMPLER"],
        sigmas=graph.add("BasicScheduler", model=watched["MODEL"], scheduler="simple", steps=4, denoise=1.0)["SIGMAS"],
        latent_image=tiny["LATENT"],
    )
    save = graph.add("H3BW_SaveCalibration", model=watched["MODEL"], latent=latent["output"])
    noise, sampler, sigmas = graph.nodes[3:6]
    note = graph.explain("Sample something typical; the ranges of that run become the file's activation scales.")
    columns = [[tiny, watched], [noise, sampler, sigmas], [guider, latent], [save, note]]
    graph.lay_out([make_workflows.Group("Calibration", columns)])
    return graph.ui()


def stand_ins(base: Path, graphs: dict[str, Any]) -> None:
    """Files under the names that the workflows ask for: a page that misses one draws the node in red."""
    for graph in graphs.values():
        for value in (value for node in graph["nodes"] for value in node.get("widgets_values", ())):
            if isinstance(value, str) and value.endswith(".safetensors"):
                for name in MODEL_FOLDERS:
                    (base / "models" / name).mkdir(parents=True, exist_ok=True)
                    (base / "models" / name / value).touch()
            elif isinstance(value, str) and value.endswith((".png", ".mp4", ".wav")) and "/" not in value:
                Image.new("RGB", (64, 64), "#4477aa").save(base / "input" / value, "PNG")


def around(graph: dict[str, Any], kind: str) -> list[int] | None:
    """The first node of a kind and its neighbours, as far as they fit into :data:`ROOM`; None where there is none."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    number = next((node["id"] for node in graph["nodes"] if node["type"] == kind), None)
    if number is None:
        return None
    linked = {end for link in graph["links"] if number in (link[1], link[3]) for end in (link[1], link[3])} - {number}
    x, y = nodes[number]["pos"]
    shown = [number]
    for other in sorted(linked, key=lambda at: abs(nodes[at]["pos"][0] - x) + abs(nodes[at]["pos"][1] - y)):
        corners = [(node["pos"], node["size"]) for node in (nodes[at] for at in (*shown, other))]
        room = [max(pos[k] + size[k] for pos, size in corners) - min(pos[k] for pos, _ in corners) for k in (0, 1)]
        if room[0] <= ROOM[0] and room[1] <= ROOM[1]:
            shown.append(other)
    return sorted(shown)


def wanted(names: list[str], graphs: dict[str, Any], nodes: list[str]) -> list[dict[str, Any]]:
    """What is to be photographed: a workflow, the nodes to show (None: all), the file for the raw picture."""
    found = []
    for name in graphs:
        target = WORKFLOWS / f"{name}.jpg"
        if (WORKFLOWS / f"{name}.json").is_file() and (name in names or (not names and not target.is_file())):
            found.append({"workflow": name, "ids": None, "path": f"{name}.png", "target": str(target)})
    for node in nodes:
        target = DOCS / f"{node}.png"
        if node in names or (not names and not target.is_file()):
            name, ids = next((name, ids) for name, graph in graphs.items() if (ids := around(graph, node)))
            found.append({"workflow": name, "ids": ids, "path": f"{node}.png", "target": str(target)})
    return sorted(found, key=lambda entry: entry["workflow"])


def thumbnail(picture: Image.Image) -> bytes:
    """A JPEG of the template browser's size."""
    small = picture.convert("RGB").resize(THUMBNAIL, Image.Resampling.LANCZOS)
    for quality in (88, 80, 70, 60):
        out = io.BytesIO()
        small.save(out, "JPEG", quality=quality, optimize=True)
        if out.tell() <= THUMBNAIL_BYTES:
            return out.getvalue()
    raise ValueError("the thumbnail stays above its limit at the lowest quality")


def docs_picture(picture: Image.Image) -> bytes:
    """A PNG with few colours, as large as its limit allows."""
    for width, colours in ((960, 64), (800, 64), (720, 48), (640, 32), (560, 24), (480, 16), (400, 16)):
        small = picture.convert("RGB").resize(
            (width, width * picture.height // picture.width), Image.Resampling.LANCZOS
        )
        out = io.BytesIO()
        small.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= PICTURE_BYTES:
            return out.getvalue()
    raise ValueError("the picture stays above its limit at the smallest size")


def main(names: list[str]) -> int:
    try:
        tools = find()
    except NotThere as missing:
        print(missing, file=sys.stderr)
        return 1
    # Those that are run come first: a node is shown with what it said.
    files = sorted(WORKFLOWS.glob("*.json"), key=lambda path: (path.stem not in RUN, path.stem))
    graphs = {path.stem: json.loads(path.read_text("utf-8")) for path in files}
    nodes = list(json.loads((PACK_ROOT / "node_list.json").read_text("utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        base = make_base_directory(Path(folder) / "base")
        stand_ins(base, graphs)
        with ComfyServer(comfyui_folder(), base, cpu=True) as server:
            graphs["calibration"] = calibration(server.object_info())
            shots = wanted(names, graphs, nodes)
            settings = {"Comfy.VueNodes.Enabled": True, "Comfy.ColorPalette": "dark", "Comfy.Locale": "en"}
            asked = {"url": server.url, "settings": settings, "viewport": VIEW, "folder": folder, **tools}
            asked |= {"wanted": shots, "workflows": {shot["workflow"]: graphs[shot["workflow"]] for shot in shots}}
            asked["run"] = RUN
            request = Path(folder) / "request.json"
            request.write_text(json.dumps(asked), encoding="utf-8")
            subprocess.run([tools["node"], str(HERE / "browser" / "pictures.mjs"), str(request)], check=True)
        for shot in shots:
            with Image.open(Path(folder) / shot["path"]) as picture:
                make = thumbnail if shot["target"].endswith(".jpg") else docs_picture
                Path(shot["target"]).write_bytes(make(picture))
            print(Path(shot["target"]).relative_to(PACK_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
