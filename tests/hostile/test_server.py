"""Hostile prompts, cancels and signals against a real, headless ComfyUI; after each the next good prompt must run.

Two starts for the module, on the CPU, with the self-test model and tiny files: the first is killed in the middle of a
conversion, the second serves all tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from comfy_server import ComfyServer, make_base_directory
from conftest import comfyui_folder, pack_module

MODEL = {"adaln": "pruned", "width": 32, "height": 32, "length": 5, "seed": 0, "reference": "none"}
FUSE = {
    "mode": "exact", "modulate": True, "swiglu": True, "attention_output": True, "elementwise": True,
    "scale_backend": "vortex", "emulate": "w4a4",
}  # fmt: skip
AUTO = {
    "backend": "auto", "backend.allow_approximate": False, "backend.max_error": 0.02, "backend.dense_steps": 0.0,
    "backend.dense_blocks": "", "layout": "auto",
}  # fmt: skip
LONGEST_MESSAGE = 2000
GIVE_UP_S = 120.0

Api = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base directory with a source that takes a second to convert, so that it can be stopped in the middle."""
    checkpoint = pack_module("kernels.checkpoint")
    made = make_base_directory(tmp_path_factory.mktemp("hostile") / "base")
    wide = {"blocks": 12, "hidden": 512, "heads": 4, "head_dim": 128, "ffn": 1536}
    checkpoint.write(made / "models/diffusion_models/big.safetensors", *checkpoint.tiny_h3(quantise=False, **wide))
    return made


@pytest.fixture(scope="module")
def left_by_the_killed(base) -> list[str]:
    """What lies in the folder after a SIGTERM, on which ComfyUI ends at once, in the middle of a conversion."""
    folder = base / "output/diffusion_models"
    with ComfyServer(comfyui_folder(), base, cpu=True) as running:
        queue(running, convert("killed", scale="adaptive"))
        deadline = time.monotonic() + GIVE_UP_S
        while not any(path.stat().st_size > 1 << 20 for path in folder.glob(".killed.*")):
            running.check_alive()
            assert time.monotonic() < deadline and not list(folder.glob("killed*"))
        os.kill(running.process.pid, signal.SIGTERM)
        running.process.wait(GIVE_UP_S)
    return [path.name for path in folder.iterdir()]


@pytest.fixture(scope="module")
def server(base, left_by_the_killed) -> Iterator[ComfyServer]:
    with ComfyServer(comfyui_folder(), base, cpu=True) as running:
        yield running


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def sampled(model: str, seed: int, steps: int, **patches: dict[str, Any]) -> Api:
    """The self-test model, `patches` and a sampler behind the node `model`."""
    return {
        "h3": node("H3BW_SelfTestModel", **MODEL),
        **patches,
        "noise": node("RandomNoise", noise_seed=seed),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("BasicScheduler", scheduler="simple", steps=steps, denoise=1.0, model=["h3", 0]),
        "guider": node("BasicGuider", model=[model, 0], conditioning=["h3", 1]),
        "sample": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["sigmas", 0], latent_image=["h3", 2],
        ),
    }  # fmt: skip


def fused(seed: int, steps: int = 2, backend: dict[str, Any] | None = None) -> Api:
    """Fused blocks and an attention backend, sampled, and the report of that run."""
    return {
        **sampled(
            "attention", seed, steps,
            fuse=node("H3BW_FuseBlocks", **FUSE, model=["h3", 0]),
            attention=node("H3BW_AttentionBackend", **(backend or AUTO), model=["fuse", 0]),
        ),
        "report": node(
            "H3BW_RuntimeReport", model=["attention", 0], latent=["sample", 0], on_difference="report",
            filename_prefix="hostile/good",
        ),
    }  # fmt: skip


def convert(name: str, **changed: Any) -> Api:
    inputs = {"scale": "amax", "keep_layers": "", "filename_prefix": "hostile/convert", **changed}
    return {"convert": node("H3BW_QuantizeCheckpoint", unet_name="big.safetensors", output_name=name, **inputs)}


def queue(server: ComfyServer, graph: Api) -> str:
    status, answer = server.post_prompt(graph)
    assert status == 200, answer
    return answer["prompt_id"]


def message(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """What ComfyUI told of a run that ended by `kind`."""
    found = [fields for told, fields in entry["status"]["messages"] if told == kind]
    assert found, entry["status"]
    return found[0]


@pytest.fixture
def then_a_good_prompt_runs(server) -> Iterator[None]:
    """After the test a graph with a seed of its own, so that nothing of it is cached, must run fused."""
    yield
    entry = server.wait(queue(server, fused(seed=time.time_ns() % 2**32)), GIVE_UP_S)
    assert entry["status"]["status_str"] == "success", entry["status"]
    results = {rung["rung"]: rung["result"] for rung in entry["outputs"]["report"]["h3bw_rungs"]}
    assert results["blocks fused"] == results["finite"] == "passed"


LONG = "x" * 10_000_000
HOSTILE = {
    "keep_layers, 10 MB": (convert("never", keep_layers=LONG), "keep_layers has more than"),
    "keep_layers, half a character": (convert("never", keep_layers="blocks.\ud800"), "'blocks.\\ud800' is none of its"),
    "output_name, 10 MB": (convert(LONG), "output_name must be a file name"),
    "output_name, half a character": (convert("\ud800"), "output_name must be a file name"),
    "output_name, out of the folder": (convert("../out"), "output_name must be a file name"),
    "filename_prefix, half a character": (convert("never", filename_prefix="\ud800"), "half character"),
    "filename_prefix, out of the folder": (convert("never", filename_prefix="../out"), "leads out of the output"),
    "backend, 10 MB": (fused(1, backend={"backend": LONG}), "xxx...: this version has no attention backend"),
    "backend, half a character": (fused(1, backend={"backend": "\ud800"}), "\\ud800: this version has no attention"),
    "dense_blocks, 10 MB": (fused(1, backend={**AUTO, "backend.dense_blocks": LONG}), "is no block"),
    "dense_blocks, half a character": (fused(1, backend={**AUTO, "backend.dense_blocks": "\ud800"}), "is no block"),
}  # fmt: skip


@pytest.mark.usefixtures("then_a_good_prompt_runs")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_text_is_refused_in_words(case, server):
    """An error that a person can read, without the text again and without a path of the server."""
    graph, expected = HOSTILE[case]
    told = message(server.wait(queue(server, graph), GIVE_UP_S), "execution_error")["exception_message"]
    assert expected in told and len(told) < LONGEST_MESSAGE and str(server.base) not in told


CANCELLED = {
    "sampling": (fused(2, steps=10_000), "sample", "progress"),
    "calibrating": (
        {
            **sampled("watch", 3, 10_000, watch=node("H3BW_Calibrate", model=["h3", 0])),
            "save": node(
                "H3BW_SaveCalibration", model=["watch", 0], latent=["sample", 0], filename="stopped", headroom=1.25,
                clip_percent=0.0,
            ),
        },
        "sample",
        "progress",
    ),
    "converting": (convert("stopped", scale="adaptive"), "convert", "progress"),
    "warming up": (
        {
            "h3": node("H3BW_SelfTestModel", **MODEL),
            "warm": node("H3BW_Warmup", model=["h3", 0], width=512, height=512, frames=22, steps=50),
        },
        "warm",
        "executing",
    ),
    "climbing the ladder": (
        {
            "ladder": node(
                "H3BW_ParityLadder", width=512, height=512, length=22, emulate="auto", on_difference="report",
                filename_prefix="hostile/ladder",
            )
        },
        "ladder",
        "progress",
    ),
}  # fmt: skip


async def cancelled(server: ComfyServer, graph: Api, key: str, event: str) -> dict[str, Any]:
    """The history entry of a run that is cancelled when ComfyUI tells `event` of the node `key`."""
    address = f"{server.url}/ws?clientId=hostile"
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        status, answer = server.post_prompt(graph, client_id="hostile")
        assert status == 200, answer
        while True:
            told = await asyncio.wait_for(socket.receive(), GIVE_UP_S)
            if told.type == aiohttp.WSMsgType.TEXT:
                told = json.loads(told.data)
                assert told["type"] not in ("execution_error", "execution_success"), told
                if told["type"] == event and told["data"]["node"] == key:
                    break
        server.request("/interrupt", b"{}")
        return server.wait(answer["prompt_id"], GIVE_UP_S)


@pytest.mark.usefixtures("then_a_good_prompt_runs")
@pytest.mark.parametrize("what", CANCELLED)
def test_a_cancel_ends_the_run_as_cancelled_and_leaves_nothing(what, server):
    graph, key, event = CANCELLED[what]
    entry = asyncio.run(cancelled(server, graph, key, event))
    assert message(entry, "execution_interrupted")["node_id"] == key
    hidden = [path.name for folder in ("output", "temp") for path in (server.base / folder).rglob(".*")]
    assert not [name for name in hidden if not name.startswith(".killed")]
    assert not list((server.base / "output/diffusion_models").glob("*stopped*"))


def test_queued_prompts_with_different_settings_do_not_mix(server):
    """Three in the queue at once: each report has its own settings and counts."""
    graphs = [fused(seed=5 + number) for number in range(3)]
    graphs[1]["fuse"]["inputs"]["mode"] = "off"
    graphs[2]["attention"]["inputs"]["layout"] = "contiguous"
    found = []
    for number in [queue(server, graph) for graph in graphs]:
        (saved,) = server.wait(number, GIVE_UP_S)["outputs"]["report"]["h3bw_report"]
        found.append(json.loads((server.base / "output" / saved["subfolder"] / saved["filename"]).read_text("utf-8")))
    runs = [report["run"] for report in found]
    assert [run["settings"]["FuseBlocks"]["mode"] for run in runs] == ["exact", "off", "exact"]
    assert [len(run["fused_calls"]) for run in runs] == [3, 0, 3]
    assert [run["settings"]["AttentionBackend"]["layout"] for run in runs] == ["auto", "auto", "contiguous"]


def test_killed_in_the_middle_of_a_conversion(server, left_by_the_killed):
    """No file under the final name; the next start converts, and removes what was left."""
    (left,) = left_by_the_killed
    assert left.startswith(".killed.safetensors.") and left.endswith(".tmp")
    folder = server.base / "output/diffusion_models"
    entry = server.wait(queue(server, convert("killed", scale="adaptive")), GIVE_UP_S)
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert (folder / "killed.safetensors").exists() and not (folder / left).exists()
