"""The deployment smoke test as a container's start would queue it: ready turns 200, and the file is right."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_server import PACK_FOLDER, PACK_ROOT, ComfyServer, clean_environment, free_port, make_base_directory
from conftest import comfyui_folder, pack_module

DEPLOY = PACK_ROOT / "deploy"
WORKFLOW = PACK_ROOT / "workflows" / "api" / "deployment_smoke.json"
Api = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ComfyServer]:
    """ComfyUI as in the image: pack and models are found through ``deploy/paths.yaml``, and only through it."""
    root = tmp_path_factory.mktemp("smoke")
    base = make_base_directory(root / "base", pack=None)
    packs, models = root / "h3bw" / "custom_nodes", root / "models"
    packs.mkdir(parents=True)
    (packs / PACK_FOLDER).symlink_to(PACK_ROOT, target_is_directory=True)
    (models / "diffusion_models").mkdir(parents=True)
    checkpoint = pack_module("kernels.checkpoint")
    checkpoint.write(models / "diffusion_models" / "mounted.safetensors", *checkpoint.tiny_h3())
    text = (DEPLOY / "paths.yaml").read_text("utf-8")
    for there, here in (("base_path: /opt/h3bw", packs.parent), ("base_path: /models", models)):
        assert text.count(there) == 1
        text = text.replace(there, f"base_path: {here}")
    paths = root / "paths.yaml"
    paths.write_text(text, "utf-8")
    # The cache that keeps what the last prompt used, however little memory the machine has left.
    args = ("--cache-classic", "--extra-model-paths-config", str(paths))
    with ComfyServer(comfyui_folder(), base, cpu=True, args=args) as running:
        yield running


@pytest.fixture
def graph() -> Api:
    return json.loads(WORKFLOW.read_text("utf-8"))


def node(graph: Api, class_type: str) -> str:
    (key,) = (key for key, entry in graph.items() if entry["class_type"] == class_type)
    return key


def queue(server: ComfyServer, graph: Api) -> dict[str, Any]:
    status, answer = server.post_prompt(graph)
    assert status == 200, answer
    return server.wait(answer["prompt_id"])


def healthcheck(port: int) -> subprocess.CompletedProcess:
    """The command of the composition's healthcheck, with this Python and another port; a proxy must not be asked."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with ComfyUI")
    compose = yaml.safe_load((DEPLOY / "compose.spark.yml").read_text("utf-8"))
    _, python, flag, code = compose["services"]["comfyui"]["healthcheck"]["test"]
    assert (python, flag) == ("python", "-c") and code.count(":8188/") == 1
    environment = clean_environment({"http_proxy": f"http://127.0.0.1:{free_port()}", "NO_PROXY": "", "no_proxy": ""})
    command = [sys.executable, flag, code.replace(":8188/", f":{port}/")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def warm_up(port: int, workflow: Path, minutes: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DEPLOY / "warm_up.py"), f"http://127.0.0.1:{port}/", str(workflow), minutes]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False)


def test_the_image_finds_pack_and_models(server):
    loaders = server.object_info()["H3BW_LoadNVFP4"]["input"]["required"]["unet_name"]
    assert "mounted.safetensors" in json.dumps(loaders)


def test_the_script_that_warms_up_and_the_healthcheck(server, tmp_path):
    found = healthcheck(server.port)
    assert found.returncode == 1 and "503" in found.stderr

    broken = json.loads(WORKFLOW.read_text("utf-8"))
    broken[node(broken, "H3BW_Warmup")]["inputs"]["width"] = 336
    (tmp_path / "broken.json").write_text(json.dumps(broken), "utf-8")
    done = warm_up(server.port, tmp_path / "broken.json", "4")
    assert done.returncode == 1
    assert done.stdout.strip().endswith("H3BW_Warmup: width must be a positive multiple of 32, have 336")
    del broken[node(broken, "H3BW_Warmup")]
    (tmp_path / "refused.json").write_text(json.dumps(broken), "utf-8")
    done = warm_up(server.port, tmp_path / "refused.json", "4")
    assert done.returncode == 1 and "refused the workflow with status 400" in done.stdout
    assert healthcheck(server.port).returncode == 1

    done = warm_up(server.port, WORKFLOW, "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ready: warmed up in ") and done.stdout.strip().endswith("s on cpu")
    assert healthcheck(server.port).returncode == 0


def test_where_nothing_answers(tmp_path):
    port = free_port()
    done = warm_up(port, WORKFLOW, "0.001")
    assert (done.returncode, done.stdout.strip()) == (1, "not ready: an answer of /h3bw/health did not happen in time")
    assert healthcheck(port).returncode == 1
    done = warm_up(port, tmp_path / "absent.json", "0.001")
    assert done.returncode == 1 and done.stdout.startswith("not ready: ")


def test_the_file_and_the_readiness(server, graph):
    import av

    entry = queue(server, graph)
    assert entry["status"]["status_str"] == "success", entry["status"]
    status, text = server.request("/h3bw/ready")
    assert status == 200
    warm_up = json.loads(text)["warm_up"]
    assert warm_up["shape"] == {"width": 320, "height": 192, "frames": 22, "steps": 2} and warm_up["blocks"] == 3
    (rung,) = entry["outputs"][node(graph, "H3BW_MediaCheck")]["h3bw_rungs"]
    assert rung["result"] == "passed" and rung["reason"] is None, "no warning either: the sound is not silent"
    numbers = rung["numbers"]
    assert (numbers["width"], numbers["height"], numbers["frames"], numbers["fps"]) == (320, 192, 22, 24.0)
    (file,) = entry["outputs"][node(graph, "H3BW_MediaCheck")]["images"]
    path = server.base / "output" / file["subfolder"] / file["filename"]
    with av.open(str(path)) as clip:  # looked at once more, without the node
        video, sound = clip.streams.video[0], clip.streams.audio[0]
        assert (video.codec_context.name, video.width, video.height) == ("h264", 320, 192)
        assert (sound.codec_context.name, sound.rate, sound.codec_context.channels) == ("aac", 32000, 2)
        assert abs(float(video.duration * video.time_base) - 22 / 24) <= 1 / 24
        assert abs(float(sound.duration * sound.time_base) - 22 / 24) <= 1 / 24
        assert sum(1 for _ in clip.decode(video)) == 22
    report = entry["outputs"][node(graph, "H3BW_RuntimeReport")]
    assert {rung["rung"]: rung["result"] for rung in report["h3bw_rungs"]}["finite"] == "passed"


def test_the_warm_model_goes_on_to_the_sampler(graph):
    """What is warmed up is what samples, with every patch before it."""
    warm = node(graph, "H3BW_Warmup")
    for user in ("BasicGuider", "BasicScheduler", "H3BW_RuntimeReport"):
        assert graph[node(graph, user)]["inputs"]["model"] == [warm, 0]
    assert graph[warm]["inputs"]["model"] == [node(graph, "H3BW_AttentionBackend"), 0]


@pytest.mark.parametrize(
    ("class_type", "name", "value", "finding"),
    [
        ("CreateVideo", "fps", 25.0, "fps is 25, must be 24"),
        ("CreateVideo", "audio", None, "there is no audio track"),
        ("CreateVideo", "images", "wrong size", "width is 64, must be 320"),
    ],
)
def test_a_wrong_clip_stops_the_run(class_type, name, value, finding, server, graph):
    graph = copy.deepcopy(graph)
    inputs = graph[node(graph, class_type)]["inputs"]
    if name == "images":
        picture = {"width": 64, "height": 192, "batch_size": 22, "color": 255}
        graph["picture"] = {"class_type": "EmptyImage", "inputs": picture}
        inputs["images"] = ["picture", 0]
    elif value is None:
        del inputs[name]
    else:
        inputs[name] = value
    entry = queue(server, graph)
    assert entry["status"]["status_str"] == "error"
    error = next(fields for kind, fields in entry["status"]["messages"] if kind == "execution_error")
    assert error["node_type"] == "H3BW_MediaCheck" and finding in error["exception_message"]
