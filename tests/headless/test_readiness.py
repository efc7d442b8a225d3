"""The two routes on a real ComfyUI server: nothing else was added, and ``/h3bw/ready`` never lies.

A pack that exists in this test only writes down the routes of the server that it is loaded into; one server has this
pack beside it and one has not.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_server import _DIRECT, PACK_FOLDER, PACK_ROOT, ComfyServer, make_base_directory
from conftest import comfyui_folder

READY, HEALTH = "/h3bw/ready", "/h3bw/health"
# Written when the server has entered all routes and is about to listen.
LISTS_ROUTES = """
import json, pathlib
from server import PromptServer

NODE_CLASS_MAPPINGS = {}

async def write(app):
    listed = []
    def walk(app, above):
        for resource in app.router.resources():
            inner = getattr(resource, "_app", None)
            if inner is not None:
                walk(inner, above)
                continue
            for route in resource:
                listed.append([route.method, above + resource.canonical])
    walk(app, "")
    (pathlib.Path(__file__).parent / "routes.json").write_text(json.dumps(listed))

PromptServer.instance.app.on_startup.append(write)
"""
# What ComfyUI itself serves of any pack that has such folders: files, for GET and HEAD.
SERVED_BY_COMFYUI = {f"/api/workflow_templates/{PACK_FOLDER}", f"/extensions/{PACK_FOLDER}"}


def server_with(base, pack) -> ComfyServer:
    make_base_directory(base, pack)
    place = base / "custom_nodes" / "lists_routes"
    place.mkdir()
    (place / "__init__.py").write_text(LISTS_ROUTES, "utf-8")
    # The cache that keeps what the last prompt used, however little memory the machine has left.
    return ComfyServer(comfyui_folder(), base, cpu=True, args=("--cache-classic",))


def routes_of(server: ComfyServer) -> list[tuple[str, str]]:
    text = (server.base / "custom_nodes" / "lists_routes" / "routes.json").read_text("utf-8")
    return sorted((method, path) for method, path in json.loads(text))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ComfyServer]:
    with server_with(tmp_path_factory.mktemp("ready") / "base", PACK_ROOT) as running:
        yield running


def asked(server: ComfyServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    """``(status, headers, text)`` of a request with any method."""
    request = urllib.request.Request(server.url + path, method=method)
    try:
        with _DIRECT.open(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode("utf-8", "replace")


def ready(server: ComfyServer) -> tuple[int, dict[str, Any]]:
    status, _, text = asked(server, READY)
    return status, json.loads(text)


def warm_up(server: ComfyServer, **changes: Any) -> dict[str, Any]:
    """Queue model, fused blocks, attention and warm-up; the history entry."""
    switches = dict.fromkeys(("modulate", "swiglu", "attention_output", "elementwise"), True)
    tiny = {"adaln": "pruned", "width": 64, "height": 64, "length": 22, "seed": 0, "reference": "none"}
    fused = {"model": ["1", 0], "mode": "exact", **switches, "scale_backend": "vortex", "emulate": "bf16"}
    warm = {"model": ["3", 0], "width": 64, "height": 64, "frames": 22, "steps": 2, **changes}
    status, answer = server.post_prompt(
        {
            "1": {"class_type": "H3BW_SelfTestModel", "inputs": tiny},
            "2": {"class_type": "H3BW_FuseBlocks", "inputs": fused},
            "3": {"class_type": "H3BW_AttentionBackend", "inputs": {"model": ["2", 0], "backend": "auto"}},
            "4": {"class_type": "H3BW_Warmup", "inputs": warm},
        }
    )
    assert status == 200, answer
    return server.wait(answer["prompt_id"])


def cached(entry: dict[str, Any]) -> list[str]:
    """The nodes of a run that ComfyUI did not run again."""
    return next(fields["nodes"] for kind, fields in entry["status"]["messages"] if kind == "execution_cached")


def free(server: ComfyServer, **what: bool) -> tuple[int, dict[str, Any]]:
    """POST /free, which ComfyUI carries out in its own time; the first answer after that is not 200."""
    status, _ = server.request("/free", json.dumps(what).encode())
    assert status == 200
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        server.check_alive()
        answer = ready(server)
        if answer[0] != 200:
            return answer
        time.sleep(0.05)
    raise AssertionError("/h3bw/ready still says 200 after /free")


def release(server: ComfyServer) -> None:
    """Drop every cached output, and come back when that has been done."""
    status, _ = server.request("/free", json.dumps({"free_memory": True}).encode())
    assert status == 200
    # The worker carries out a request after the prompt that it is at: behind two prompts it has been carried out.
    for seed in (0, 1):
        picture = {"width": 16, "height": 16, "batch_size": 1, "color": seed}
        graph = {
            "1": {"class_type": "EmptyImage", "inputs": picture},
            "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
        }
        status, answer = server.post_prompt(graph)
        assert status == 200, answer
        assert server.wait(answer["prompt_id"])["status"]["status_str"] == "success"


def test_two_routes_and_no_other_were_added(server, tmp_path):
    with server_with(tmp_path / "base", None) as without:
        before = routes_of(without)
        assert asked(without, READY)[0] == asked(without, HEALTH)[0] == 404
    after = routes_of(server)
    assert len(before) > 50 and not set(before) - set(after)
    assert ("POST", "/free") in before and ("GET", "/internal/logs") in before, "the list is whole"
    left = list(after)
    for route in before:
        left.remove(route)
    files = {route for route in left if route[1] in SERVED_BY_COMFYUI}
    assert {method for method, _ in files} <= {"GET", "HEAD"}
    ours = sorted(route for route in left if route not in files)
    # ComfyUI repeats every route under /api.
    assert ours == sorted(
        (method, above + path) for method in ("GET", "HEAD") for above in ("", "/api") for path in (READY, HEALTH)
    )


@pytest.mark.parametrize("path", [READY, HEALTH, "/api" + READY])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_other_methods_are_refused(path, method, server):
    status, headers, _ = asked(server, path, method)
    assert status == 405
    assert set(headers["Allow"].split(",")) == {"GET", "HEAD"}


def test_options_is_answered_by_comfyui_as_everywhere(server):
    """Its middleware answers OPTIONS itself, for paths that do not exist too."""
    nowhere = asked(server, "/h3bw/nowhere", "OPTIONS")
    for path in (READY, HEALTH):
        found = asked(server, path, "OPTIONS")
        assert found[0] == nowhere[0] and found[2] == nowhere[2]


def test_from_503_to_200_and_back(server):
    """The life of a deployment, in order: start, warm-up, unload, warm-up again, everything freed."""
    status, told = ready(server)
    assert (status, told["reason"]) == (503, "no warm-up has run in this process")
    assert asked(server, HEALTH)[0] == 200, "alive before it is warm"

    entry = warm_up(server)
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert "warmed up in" in entry["outputs"]["4"]["text"][0]
    status, told = ready(server)
    assert status == 200 and told["ready"] is True and told["reason"] is None
    assert told["attention"]["initial"]["asked"] == "auto" and told["attention"]["initial"]["ran"]["sdpa"] > 0
    assert told["attention"]["current"] == told["attention"]["initial"]
    assert told["options"]["fusion"]["initial"]["mode"] == "exact" and told["warm_up"]["blocks_fused"] == 3
    assert told["pack_version"] == "0.1.0" and told["certification"] == []
    assert "4" in cached(warm_up(server)), "nothing to do while the warm-up holds"

    status, told = free(server, unload_models=True)
    assert (status, told["ready"]) == (503, False)
    assert told["reason"] == "the model that was warmed up has been unloaded from cpu"
    assert asked(server, HEALTH)[0] == 200, "alive after an unload"

    # ComfyUI cannot always load quantised weights again that it unloaded in this way (its issue 15733): where it can,
    # the process is ready again, and where it cannot, it is not.
    entry = warm_up(server)
    assert "4" not in cached(entry) and "3" in cached(entry), "the same graph warms up again"
    success = entry["status"]["status_str"] == "success"
    status, told = ready(server)
    assert (status == 200) is told["ready"] is success
    assert success or told["reason"] == "the warm-up stopped with RuntimeError; its text is in ComfyUI's log"

    release(server)
    entry = warm_up(server)
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert "1" not in cached(entry) and ready(server)[0] == 200
    status, told = free(server, unload_models=True, free_memory=True)
    assert status == 503 and told["reason"].startswith("the model that was warmed up has been ")

    release(server)
    entry = warm_up(server)
    assert entry["status"]["status_str"] == "success", entry["status"]
    entry = warm_up(server, width=80)
    assert entry["status"]["status_str"] == "error"
    assert ready(server)[0] == 200, "it was refused before anything ran: what was warm still is"


def test_what_is_asked_beside_changes_nothing_and_is_not_repeated(server):
    for path in (READY, HEALTH):
        plain, odd = asked(server, path), asked(server, path + "?model=secret&warm=1&unload=true")
        assert plain[0] == odd[0] and plain[2] == odd[2]
        assert plain[1]["Content-Type"].startswith("application/json") and plain[1]["Cache-Control"] == "no-store"
        head = asked(server, path, "HEAD")
        assert head[0] == plain[0] and head[2] == ""


def test_nothing_private_is_told(server):
    warm_up(server, steps=1)
    told = asked(server, READY)[2] + asked(server, HEALTH)[2]
    assert "warmed" in told
    for private in (str(server.base), str(PACK_ROOT), str(comfyui_folder()), ".safetensors", ".py"):
        assert private not in told
    assert "/" not in told.replace("h3bw-ready/1", "")
