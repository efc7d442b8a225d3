"""The Turbo workflow, headless, with the tiny H3 and a tiny LoRA in place of the real files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_server import PACK_ROOT, ComfyServer, make_base_directory
from conftest import comfyui_folder, pack_module

LORA = "tiny_turbo.safetensors"
Api = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ComfyServer]:
    import torch

    base = make_base_directory(tmp_path_factory.mktemp("lora") / "base")
    tiny, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    whole, _ = tiny.tiny_h3(quantise=False)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, weight in whole.items():
        name = key.removesuffix(".weight")
        if key.startswith("blocks.") and name.endswith(tiny.QUANTISED):
            tensors[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(weight.shape[0], 4, generator=generator)
            tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(0.02)
    folder = base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    writer.write(str(folder / LORA), tensors)
    with ComfyServer(comfyui_folder(), base, cpu=True) as running:
        yield running


@pytest.fixture
def turbo() -> Api:
    """The shipped graph up to its report, with the tiny model for the loader, the text encoder and the VAEs."""
    whole = json.loads((PACK_ROOT / "workflows" / "api" / "h3_t2va_turbo.json").read_text("utf-8"))
    ids = {node["class_type"]: key for key, node in whole.items()}
    tiny = {"adaln": "pruned", "width": 64, "height": 64, "length": 22, "seed": 0, "reference": "none"}
    whole["tiny"] = {"class_type": "H3BW_SelfTestModel", "inputs": tiny}
    replaced = {
        (ids["H3BW_LoadNVFP4"], 0): 0,
        (ids["MiniMaxH3ImageToVideo"], 0): 1,
        (ids["MiniMaxH3ImageToVideo"], 1): 2,
    }
    graph: Api = {}

    def keep(key: str) -> None:
        if key in graph:
            return
        graph[key] = copy.deepcopy(whole[key])
        for name, value in graph[key]["inputs"].items():
            if isinstance(value, list):
                if tuple(value) in replaced:
                    value = graph[key]["inputs"][name] = ["tiny", replaced[tuple(value)]]
                keep(value[0])

    keep(ids["H3BW_RuntimeReport"])
    assert not {"CLIPLoader", "VAELoader", "H3BW_LoadNVFP4"} & {node["class_type"] for node in graph.values()}
    graph[ids["H3BW_LoraSideBranch"]]["inputs"]["lora_name"] = LORA
    graph[ids["H3BW_FuseBlocks"]]["inputs"]["emulate"] = "w4a4"
    return graph


def node_of(graph: Api, class_type: str) -> dict[str, Any]:
    return next(node for node in graph.values() if node["class_type"] == class_type)


def run(server: ComfyServer, graph: Api) -> tuple[dict[str, Any], str]:
    """The report as JSON and as text."""
    status, answer = server.post_prompt(graph)
    assert status == 200, answer
    entry = server.wait(answer["prompt_id"])
    assert entry["status"]["status_str"] == "success", entry["status"]
    key = next(key for key, node in graph.items() if node["class_type"] == "H3BW_RuntimeReport")
    output = entry["outputs"][key]
    (file,) = output["h3bw_report"]
    path = server.base / "output" / file["subfolder"] / file["filename"]
    return json.loads(path.read_text("utf-8")), output["text"][0]


def test_turbo_runs_with_the_lora_beside_fused_blocks(server, turbo):
    report, text = run(server, turbo)
    assert report["run"]["steps"] == 8
    assert report["run"]["side_branches"] == {"rows of the producer": 3 * 4 * 8}
    assert {int(block) for block in report["run"]["fused_calls"]} == {0, 1, 2}
    (entry,) = report["run"]["settings"]["LoraSideBranch"]["loras"]
    assert entry["linears"] == 12 and entry["keys_used"] == 36 and entry["keys_left_out"] == 0
    assert f"LoRA {LORA} at 1: beside 12 linears, rank 4, alpha from the file's tensors" in text
    assert report["stock_lora"] is None
    assert {rung["result"] for rung in report["rungs"]} == {"passed"}

    # Off: the model without it; half: something else again; on again: the same bytes.
    hashes = {1.0: report["latent_sha256"]}
    for strength in (0.0, 0.5, 1.0):
        again = copy.deepcopy(turbo)
        node_of(again, "H3BW_LoraSideBranch")["inputs"]["strength"] = strength
        found = run(server, again)[0]["latent_sha256"]
        assert hashes.setdefault(strength, found) == found
    without = copy.deepcopy(turbo)
    node_of(without, "MiniMaxH3SigmaShift")["inputs"]["model"] = ["tiny", 0]
    assert run(server, without)[0]["latent_sha256"] == hashes[0.0]
    assert len({tuple(value.values()) for value in hashes.values()}) == 3


def test_two_in_a_row_and_unfused(server, turbo):
    """Stacked, and bypassing Fuse H3 Blocks gives the same latents as mode off."""
    key = next(key for key, node in turbo.items() if node["class_type"] == "H3BW_LoraSideBranch")
    turbo["second"] = copy.deepcopy(turbo[key])
    turbo["second"]["inputs"].update(model=[key, 0], strength=0.5)
    node_of(turbo, "MiniMaxH3SigmaShift")["inputs"]["model"] = ["second", 0]
    fused, text = run(server, turbo)
    assert len(fused["run"]["settings"]["LoraSideBranch"]["loras"]) == 2 and "at 0.5: beside 12 linears" in text
    off = copy.deepcopy(turbo)
    node_of(off, "H3BW_FuseBlocks")["inputs"]["mode"] = "off"
    unfused, _ = run(server, off)
    assert unfused["run"]["side_branches"] == {"its own input": 3 * 4 * 8}
    assert unfused["latent_sha256"] == fused["latent_sha256"]


def test_a_lora_for_another_model_stops_the_run_with_both_sides_keys(server, turbo):
    import torch

    other = server.base / "models" / "loras" / "other.safetensors"
    tensors = {f"double_blocks.{i}.img_attn.qkv.lora_A.weight": torch.zeros(4, 4) for i in range(3)}
    pack_module("kernels.checkpoint.writer").write(str(other), tensors)
    key = next(key for key, node in turbo.items() if node["class_type"] == "H3BW_LoraSideBranch")
    turbo[key]["inputs"]["lora_name"] = "other.safetensors"
    status, answer = server.post_prompt(turbo)
    assert status == 200, answer
    messages = server.wait(answer["prompt_id"])["status"]["messages"]
    failed = next(fields for kind, fields in messages if kind == "execution_error")
    assert failed["node_id"] == key
    text = failed["exception_message"]
    assert "none of its 3 keys fits this model" in text and "double_blocks.0." in text and "video_patch_proj" in text
    assert str(server.base) not in text
