"""The deployment smoke test as a container's start would queue it: ready turns 200, and the file is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_server import PACK_ROOT, ComfyServer, make_base_directory
from conftest import comfyui_folder

Api = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ComfyServer]:
    base = make_base_directory(tmp_path_factory.mktemp("smoke") / "base")
    # The cache that keeps what the last prompt used, however little memory the machine has left.
    with ComfyServer(comfyui_folder(), base, cpu=True, args=("--cache-classic",)) as running:
        yield running


@pytest.fixture
def graph() -> Api:
    return json.loads((PACK_ROOT / "workflows" / "api" / "deployment_smoke.json").read_text("utf-8"))


def node(graph: Api, class_type: str) -> str:
    (key,) = (key for key, entry in graph.items() if entry["class_type"] == class_type)
    return key


def queue(server: ComfyServer, graph: Api) -> dict[str, Any]:
    status, answer = server.post_prompt(graph)
    assert status == 200, answer
    return server.wait(answer["prompt_id"])


def test_the_file_and_the_readiness(server, graph):
    import av

    assert server.request("/h3bw/ready")[0] == 503
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
