"""`git clone` into custom_nodes of a ComfyUI is an installation: no sandbox, no build step, any folder name."""

import json
import shutil
import subprocess

import pytest
from comfy_server import PACK_ROOT, ComfyServer, import_trouble, make_base_directory
from conftest import comfyui_folder

FOLDER = "My-Pack.v2"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if shutil.which("git") is None or not (PACK_ROOT / ".git").exists():
        pytest.skip("the pack is not a git checkout here")
    base = make_base_directory(tmp_path_factory.mktemp("clone") / "base", pack=None)
    place = base / "custom_nodes" / FOLDER
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(PACK_ROOT), str(place)], check=True)
    with ComfyServer(comfyui_folder(), base, cpu=True) as running:
        yield running


def test_every_node_is_there_and_nothing_failed_to_import(server):
    assert not import_trouble(server.log_text(), FOLDER)
    listed = json.loads((server.base / "custom_nodes" / FOLDER / "node_list.json").read_text("utf-8"))
    known = server.object_info()
    assert listed.keys() <= known.keys() and len(listed) >= 8
    for name in listed:
        assert known[name]["category"].startswith("H3 Blackwell/")


def test_the_self_test_runs_in_the_clone(server):
    workflow = server.base / "custom_nodes" / FOLDER / "workflows" / "api" / "selftest_t2va.json"
    status, answer = server.post_prompt(json.loads(workflow.read_text("utf-8")))
    assert status == 200, answer
    entry = server.wait(answer["prompt_id"])
    assert entry["status"]["status_str"] == "success", entry["status"]
    results = [rung["result"] for output in entry["outputs"].values() for rung in output.get("h3bw_rungs", [])]
    assert results and set(results) == {"passed"}


def test_the_probe_runs_from_the_clone(server):
    import sys

    place = server.base / "custom_nodes" / FOLDER
    done = subprocess.run(
        [sys.executable, str(place / "install.py"), "--json", "--no-import"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"python", "torch", "packages"} <= json.loads(done.stdout).keys()
