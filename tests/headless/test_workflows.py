"""Every shipped workflow against a real, headless ComfyUI: the files fit its nodes, convert, run and say what ran.

One server for the module, on the CPU. The selftest graphs run to the end through comfy-cli, in both formats. The graphs
for the real weights can only be validated: they must be refused for the missing files and for nothing else. The
benchmark graphs run on small sizes.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_workflows
import pytest
from comfy_server import PACK_FOLDER, PACK_ROOT, ComfyServer, clean_environment, make_base_directory
from conftest import comfyui_folder, pack_module

WORKFLOWS = PACK_ROOT / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
SELFTESTS = [name for name in NAMES if name.startswith("selftest_")]
BENCHES = [name for name in NAMES if name.startswith("bench_")]
CONVERSIONS = [name for name in NAMES if name.startswith("quantize_")]
LADDERS = [name for name in NAMES if name.startswith("parity_")]
DEPLOYMENTS = [name for name in NAMES if name.startswith("deployment_")]
FIRST = "first_proof"
REAL = [name for name in NAMES if name not in [*SELFTESTS, *BENCHES, *CONVERSIONS, *LADDERS, *DEPLOYMENTS, FIRST]]
UI_FORMAT_OF = "0.30."  # the ComfyUI whose saved form of the core nodes the files have
PATIENCE = "600"  # seconds without a word that comfy-cli allows a long node on a busy machine
UI_ONLY = {"MarkdownNote"}
FILE_INPUTS = {  # inputs that name a file, and the folder below the base directory where it is looked for
    ("H3BW_LoadNVFP4", "unet_name"): "models/diffusion_models",
    ("H3BW_QuantizeCheckpoint", "unet_name"): "models/diffusion_models",
    ("H3BW_LoraSideBranch", "lora_name"): "models/loras",
    ("CLIPLoader", "clip_name"): "models/text_encoders",
    ("VAELoader", "vae_name"): "models/vae",
    ("LoadImage", "image"): "input",
    ("LoadVideo", "file"): "input",
    ("LoadAudio", "audio"): "input",
}
SMALL_BENCH = {
    "bench_kernels": {"rows": 17, "columns": "small"},
    "bench_attention": {"rows": 17, "heads": 2},
    "bench_step": {"variants": "stock, pack, each half alone"},
    "bench_block": {"rows": 17},
    "bench_roofline": {"rows": 17},
}
OTHER_VERSIONS = {"SaveVideo": {"codec", "format.codec"}}  # one widget, named differently from 0.33 on
RUNGS = {
    "bf16": {"latents equal, bit for bit", "finite", "blocks fused"},
    "w4a4": {"latents equal, bit for bit", "finite", "blocks fused", "attention on the backend asked for"},
}
LONGEST_MESSAGE = 2000  # characters of an error that a person can still read

Api = dict[str, dict[str, Any]]


def ui_file(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / f"{name}.json").read_text("utf-8"))


def api_file(name: str) -> Api:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ComfyServer]:
    base = make_base_directory(tmp_path_factory.mktemp("workflows") / "base")
    with ComfyServer(comfyui_folder(), base, cpu=True) as running:
        yield running


@pytest.fixture(scope="module")
def object_info(server) -> dict[str, Any]:
    return server.object_info()


@pytest.fixture(scope="module")
def comfy_cli(server, tmp_path_factory):
    """Runs ``comfy run`` against the server with a home of its own; returns its NDJSON events."""
    if importlib.util.find_spec("comfy_cli") is None:
        pytest.skip("comfy-cli is not installed")
    home = tmp_path_factory.mktemp("home")
    quiet = dict.fromkeys(("DO_NOT_TRACK", "COMFY_NO_TELEMETRY", "COMFY_NO_UPDATE_CHECK"), "1")
    env = clean_environment({"HOME": str(home), "USERPROFILE": str(home), "COMFY_CLI_NO_REMOTE_REFRESH": "1", **quiet})

    def run(workflow: Path, *options: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "comfy_cli", "--skip-prompt", "run", "--workflow", str(workflow), "--json"]
        command += ["--where", "local", "--host", "127.0.0.1", "--port", str(server.port), *options]
        done = subprocess.run(
            command, env=env, cwd=home, capture_output=True, text=True, encoding="utf-8", timeout=900, check=False
        )
        trouble = f"comfy run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == 0, f"{trouble}\n{server.log_tail()}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


# ---------------------------------------------------------------- the files fit the nodes


def declared(inputs: dict[str, Any], given: dict[str, Any], above: str = "") -> Iterator[tuple[str, list, bool]]:
    """``(name, spec, required)`` of a node's inputs, the dynamic ones expanded for the values that are given."""
    for section in ("required", "optional"):
        for short, spec in inputs.get(section, {}).items():
            name = above + short
            if spec[0] == "COMFY_AUTOGROW_V3":
                template = spec[1]["template"]
                ((inner_section, inner),) = ((k, v) for k, v in template["input"].items() if v)
                (inner_spec,) = inner.values()
                for index in range(template["max"]):
                    needed = inner_section == "required" and index < template["min"]
                    yield f"{name}.{template['prefix']}{index}", inner_spec, needed
                continue
            yield name, spec, section == "required"
            if spec[0] == "COMFY_DYNAMICCOMBO_V3":
                for option in spec[1]["options"]:
                    if option["key"] == given.get(name):
                        yield from declared(option["inputs"], given, f"{name}.")


def is_widget(spec: list) -> bool:
    return isinstance(spec[0], list) or spec[0] in make_workflows.WIDGET_TYPES


def fault(spec: list, value: Any) -> str | None:
    """Why a widget cannot hold a value, or None."""
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if kind == "COMFY_DYNAMICCOMBO_V3":
        choices = [option["key"] for option in options["options"]]
    else:
        choices = kind if isinstance(kind, list) else options.get("options")
    if choices is not None:
        return None if value in choices else f"{value!r} is not one of {choices}"
    wanted = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}[kind]
    if not isinstance(value, wanted) or (kind != "BOOLEAN" and isinstance(value, bool)):
        return f"{value!r} is no {kind}"
    if kind in ("INT", "FLOAT") and not options.get("min", -math.inf) <= value <= options.get("max", math.inf):
        return f"{value} is out of range"
    return None


def test_twins():
    assert sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json")) == NAMES
    assert len(SELFTESTS) == 2
    assert len(REAL) == 4
    assert len(BENCHES) == 5
    assert len(CONVERSIONS) == 1
    assert len(LADDERS) == 1
    assert len(DEPLOYMENTS) == 1


def test_files_are_what_the_generator_makes(server, object_info):
    """Also that UI and API twins come from one description."""
    version = server.get("/system_stats")["system"]["comfyui_version"]
    texts = make_workflows.files(make_workflows.build(object_info))
    assert {path.stem for path in texts} == set(NAMES)
    for path, text in texts.items():
        made, found = json.loads(text), json.loads(path.read_text("utf-8"))
        if path.parent.name == "api":
            # Titles that no description names are the core nodes' display names, which move between versions.
            for node in (*made.values(), *found.values()):
                del node["_meta"]
        elif not version.startswith(UI_FORMAT_OF):
            continue
        assert made == found, f"{path.name} differs; run tests/make_workflows.py"


@pytest.mark.parametrize("name", NAMES)
def test_api_fits_the_nodes(name, object_info):
    graph = api_file(name)
    for key, node in graph.items():
        where = f"{name}, node {key} ({node['class_type']})"
        specs = {
            n: (spec, must) for n, spec, must in declared(object_info[node["class_type"]]["input"], node["inputs"])
        }
        missing = [n for n, (_, must) in specs.items() if must and n not in node["inputs"]]
        assert missing == [], where
        unknown = set(node["inputs"]) - set(specs) - OTHER_VERSIONS.get(node["class_type"], set())
        assert unknown == set(), where
        for n, value in node["inputs"].items():
            if n not in specs:
                continue
            spec = specs[n][0]
            if isinstance(value, list):
                source, slot = value
                assert object_info[graph[source]["class_type"]]["output"][slot] == spec[0], f"{where}: {n}"
            elif (node["class_type"], n) in FILE_INPUTS:
                assert isinstance(value, str), f"{where}: {n}"
            else:
                assert is_widget(spec), f"{where}: {n} takes a connection"
                assert fault(spec, value) is None, f"{where}: {n}"


@pytest.mark.parametrize("name", NAMES)
def test_ui_widgets_fit_the_nodes(name, object_info):
    """Saved widget values are positional: one too many or too few shifts every later one."""
    for node in ui_file(name)["nodes"]:
        if node["type"] in UI_ONLY:
            continue
        where = f"{name}, node {node['id']} ({node['type']})"
        left = list(node["widgets_values"])
        given: dict[str, Any] = {}
        for n, spec, _ in declared(object_info[node["type"]]["input"], given):  # given grows while we read
            options = spec[1] if len(spec) > 1 else {}
            if not is_widget(spec) or options.get("hidden"):
                continue
            assert left, f"{where}: no value for {n}"
            given[n] = left.pop(0)
            if (node["type"], n) not in FILE_INPUTS:
                assert fault(spec, given[n]) is None, f"{where}: {n}"
            if options.get("control_after_generate", n in ("seed", "noise_seed")):
                assert left.pop(0) in ("fixed", "increment", "decrement", "randomize"), f"{where}: after {n}"
            for flag, extra in make_workflows.UPLOAD_WIDGETS.items():
                if options.get(flag):
                    assert left[: len(extra)] == extra, where
                    del left[: len(extra)]
        assert left == [], where


@pytest.mark.parametrize("name", NAMES)
def test_ui_links(name, object_info):
    graph = ui_file(name)
    nodes = {node["id"]: node for node in graph["nodes"]}
    for node in nodes.values():
        if node["type"] in UI_ONLY:
            continue
        outputs = object_info[node["type"]]["output"]
        assert [slot["type"] for slot in node["outputs"]] == outputs[: len(node["outputs"])]
        specs = {n: spec for n, spec, _ in declared(object_info[node["type"]]["input"], {})}
        for slot in node["inputs"]:
            assert specs[slot["name"]][0] == slot["type"]
    for number, source, out_slot, target, in_slot, kind in graph["links"]:
        origin, end = nodes[source]["outputs"][out_slot], nodes[target]["inputs"][in_slot]
        assert number in origin["links"]
        assert end["link"] == number
        assert origin["type"] == end["type"] == kind
        assert nodes[source]["order"] < nodes[target]["order"]
    numbers = [link[0] for link in graph["links"]]
    assert len(set(numbers)) == len(numbers)
    assert sorted(x for node in nodes.values() for slot in node["outputs"] for x in slot["links"]) == sorted(numbers)
    assert sorted(s["link"] for node in nodes.values() for s in node["inputs"] if s["link"]) == sorted(numbers)


@pytest.mark.parametrize("name", NAMES)
def test_ui_layout(name):
    """Nothing overlaps, and every node lies in exactly one group."""
    graph = ui_file(name)
    bar = make_workflows.TITLE_BAR
    boxes = [(*node["pos"], *node["size"], node["id"]) for node in graph["nodes"]]
    nodes = [(x, y - bar, x + w, y + h, number) for x, y, w, h, number in boxes]
    groups = [(x, y, x + w, y + h, group["title"]) for group in graph["groups"] for x, y, w, h in [group["bounding"]]]
    for boxes in (nodes, groups):
        for a, b in itertools.combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], f"{a[4]} and {b[4]} overlap"
    for x, y, right, bottom, number in nodes:
        around = [g for g in groups if g[0] <= x and g[1] <= y and right <= g[2] and bottom <= g[3]]
        assert len(around) == 1, f"node {number} is in {len(around)} groups"


def test_templates_in_the_menu(server):
    """ComfyUI offers the UI files, and only them, under the pack's name."""
    listed = server.get("/workflow_templates")[PACK_FOLDER]
    assert sorted(listed) == NAMES
    for name in NAMES:
        assert server.get(f"/api/workflow_templates/{PACK_FOLDER}/{name}.json") == ui_file(name)


# ---------------------------------------------------------------- conversion and runs, through comfy-cli


@pytest.mark.parametrize("name", NAMES)
def test_ui_converts_to_its_api_twin(name, comfy_cli):
    events = comfy_cli(WORKFLOWS / f"{name}.json", "--print-prompt")
    (converted,) = (event["prompt"] for event in events if event["type"] == "prompt_preview")
    twin = api_file(name)
    assert converted.keys() == twin.keys()
    for key, node in twin.items():
        found = converted[key]
        assert found["class_type"] == node["class_type"]
        if node["class_type"] in OTHER_VERSIONS:
            absent = OTHER_VERSIONS[node["class_type"]] - found["inputs"].keys()
            assert len(absent) == 1
            del node["inputs"][absent.pop()]
        assert found["inputs"] == node["inputs"], f"node {key} ({node['class_type']})"


@pytest.mark.parametrize("name", SELFTESTS)
@pytest.mark.parametrize("form", ["api", "ui"])
def test_selftest_runs(name, form, server, comfy_cli):
    """``comfy run --wait`` on the very file succeeds; the history has every rung passed and the files are there."""
    path = WORKFLOWS / "api" / f"{name}.json" if form == "api" else WORKFLOWS / f"{name}.json"
    events = comfy_cli(path, "--wait")
    assert events[-1]["type"] == "envelope"
    assert events[-1]["ok"] is True
    entry = server.history(events[-1]["data"]["prompt_id"])
    assert entry["status"]["status_str"] == "success"
    rungs, clips = {}, []
    for output in entry["outputs"].values():
        for file in output.get("h3bw_report", []):
            kind = file["filename"].removeprefix(f"{name}_").split("_")[0]
            rungs[kind] = output["h3bw_rungs"]
            report = json.loads((server.base / "output" / file["subfolder"] / file["filename"]).read_text("utf-8"))
            assert report["rungs"] == output["h3bw_rungs"]
        clips += [file for file in output.get("images", []) if file["filename"].endswith(".mp4")]
        rungs.update({"media": output["h3bw_rungs"]} if "images" in output else {})
    assert rungs.keys() == {"bf16", "w4a4", "media"}
    for kind, passed in {**RUNGS, "media": {"media"}}.items():
        assert {rung["rung"]: rung["result"] for rung in rungs[kind]} == dict.fromkeys(passed, "passed"), rungs[kind]
    for kind in RUNGS:
        numbers = {rung["rung"]: rung["numbers"] for rung in rungs[kind]}
        assert numbers["blocks fused"] == {"fused": 3, "blocks": 3, "steps": 4}
        assert numbers["latents equal, bit for bit"]["video"] == {"elements": 2688, "differing": 0, "max_abs": 0.0}
    (clip,) = clips
    data = (server.base / "output" / clip["subfolder"] / clip["filename"]).read_bytes()
    assert data[4:8] == b"ftyp"


@pytest.mark.parametrize("name", BENCHES)
def test_bench_runs(name, server, comfy_cli, tmp_path):
    """The shipped graph with small sizes, through comfy-cli: a table, and a record of a finished run."""
    graph = api_file(name)
    (bench,) = graph.values()
    bench["inputs"].update(SMALL_BENCH[name])
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(graph), "utf-8")
    events = comfy_cli(path, "--wait")
    assert events[-1]["ok"] is True
    (output,) = server.history(events[-1]["data"]["prompt_id"])["outputs"].values()
    assert "CPU, not a measurement" in output["text"][0]
    (file,) = output["h3bw_record"]
    record = json.loads((server.base / "output" / file["subfolder"] / file["filename"]).read_text("utf-8"))
    assert record["status"] == "finished"
    # What is promised of times is skipped on a CPU; what is promised of numbers holds there too.
    assert {gate["result"] for gate in record["gates"] if gate["reason"] != "a CPU is not measured"} == {"passed"}
    assert str(server.base) not in json.dumps(record)


@pytest.mark.parametrize("name", LADDERS)
def test_ladder_runs(name, server, comfy_cli):
    """The very file: no rung failed, every rung is there for both tasks, and what was skipped says why."""
    events = comfy_cli(WORKFLOWS / "api" / f"{name}.json", "--wait", "--timeout", PATIENCE)
    assert events[-1]["ok"] is True
    (output,) = server.history(events[-1]["data"]["prompt_id"])["outputs"].values()
    assert " passed, 0 failed, " in output["text"][0]
    (file,) = output["h3bw_record"]
    record = json.loads((server.base / "output" / file["subfolder"] / file["filename"]).read_text("utf-8"))
    assert record["status"] == "finished" and record["kind"] == "parity"
    assert {gate["name"][0] for gate in record["gates"]} == set("01234567")
    (picture,) = output["images"]
    assert (server.base / "output" / picture["subfolder"] / picture["filename"]).read_bytes()[:4] == b"\x89PNG"


def test_first_proof_runs(server, comfy_cli):
    """The very file: all five parts in one queue, equal latents, no rung failed."""
    events = comfy_cli(WORKFLOWS / "api" / f"{FIRST}.json", "--wait", "--timeout", PATIENCE)
    assert events[-1]["ok"] is True
    outputs = server.history(events[-1]["data"]["prompt_id"])["outputs"]
    found = {api_file(FIRST)[key]["class_type"]: output for key, output in outputs.items()}
    assert "Fused kernels on cpu" in found["H3BW_Environment"]["text"][0]
    assert "passed: latents equal, bit for bit" in found["H3BW_RuntimeReport"]["text"][0]
    assert " passed, 0 failed, " in found["H3BW_ParityLadder"]["text"][0]
    for name in ("H3BW_BenchKernels", "H3BW_BenchAttention"):
        assert "not a measurement" in found[name]["text"][0]


@pytest.mark.parametrize("form", ["api", "ui"])
def test_conversion_runs(form, server, comfy_cli):
    """The very file, with a tiny bf16 H3 under the name it asks for: an NVFP4 file, a report, a picture; once."""
    checkpoint = pack_module("kernels.checkpoint")
    (name,) = CONVERSIONS
    (node,) = api_file(name).values()
    source = server.base / "models/diffusion_models" / node["inputs"]["unet_name"]
    made = server.base / "output/diffusion_models" / f"{source.stem}_nvfp4.safetensors"
    checkpoint.write(source, *checkpoint.tiny_h3(quantise=False), overwrite=True)
    try:
        path = WORKFLOWS / "api" / f"{name}.json" if form == "api" else WORKFLOWS / f"{name}.json"
        events = comfy_cli(path, "--wait")
        assert events[-1]["ok"] is True
        (output,) = server.history(events[-1]["data"]["prompt_id"])["outputs"].values()
        assert "12 layers to NVFP4, scales adaptive" in output["text"][0]
        (file,) = output["h3bw_report"]
        report = json.loads((server.base / "output" / file["subfolder"] / file["filename"]).read_text("utf-8"))
        assert len(report["layers"]) == 12 and str(server.base) not in json.dumps(report)
        (picture,) = output["images"]
        assert (server.base / "output" / picture["subfolder"] / picture["filename"]).read_bytes()[:4] == b"\x89PNG"
        assert checkpoint.inspect(made)["formats"]["mlp.fc1"] == {"nvfp4": 3}
        status, answer = server.post_prompt(api_file(name))
        assert status == 200, answer
        failed = error_of(server.wait(answer["prompt_id"]))
        assert failed["exception_message"].startswith(f"{made.name}: exists already")
        loaders = server.object_info()["UNETLoader"]["input"]["required"]["unet_name"]
        assert made.name in json.dumps(loaders), "the new file is in the loaders' list at once"
    finally:
        source.unlink()
        made.unlink(missing_ok=True)


# ---------------------------------------------------------------- posted graphs


def find(graph: Api, class_type: str) -> str:
    """The id of the first node of a class."""
    return next(key for key, node in graph.items() if node["class_type"] == class_type)


def upstream(graph: Api, end: str, into: Api | None = None) -> Api:
    """A copy of a node and of everything that it depends on."""
    into = {} if into is None else into
    if end not in into:
        into[end] = copy.deepcopy(graph[end])
        for value in graph[end]["inputs"].values():
            if isinstance(value, list):
                upstream(graph, value[0], into)
    return into


@pytest.fixture
def small() -> Api:
    """The stock and the fused branch of the selftest and their report."""
    graph = api_file("selftest_t2va")
    return upstream(graph, find(graph, "H3BW_RuntimeReport"))


def clip_of_nothing() -> Api:
    """A clip from an empty latent, up to Create Video: no sampling."""
    graph = api_file("selftest_t2va")
    graph[find(graph, "H3BW_SelfTestDecode")]["inputs"]["latent"] = [find(graph, "H3BW_SelfTestModel"), 2]
    return upstream(graph, find(graph, "CreateVideo"))


def error_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The execution error of a run that failed."""
    assert entry["status"]["status_str"] == "error"
    return next(fields for kind, fields in entry["status"]["messages"] if kind == "execution_error")


def succeed(server: ComfyServer, graph: Api) -> dict[str, Any]:
    """The history entry of a graph that must run to its end."""
    status, answer = server.post_prompt(graph)
    assert status == 200, answer
    entry = server.wait(answer["prompt_id"])
    assert entry["status"]["status_str"] == "success", entry["status"]
    return entry


def report_of(server: ComfyServer, graph: Api) -> dict[str, Any]:
    """The JSON report of a graph that must run to its end."""
    (file,) = succeed(server, graph)["outputs"][find(graph, "H3BW_RuntimeReport")]["h3bw_report"]
    return json.loads((server.base / "output" / file["subfolder"] / file["filename"]).read_text("utf-8"))


@pytest.fixture
def then_a_good_prompt_works(server, small) -> Iterator[None]:
    """After the test, the unchanged graph must run and be equal, bit for bit."""
    good = copy.deepcopy(small)
    yield
    assert {rung["result"] for rung in report_of(server, good)["rungs"]} == {"passed"}


@pytest.mark.parametrize("name", REAL)
def test_real_graph_lacks_its_files_and_nothing_else(name, server):
    graph = api_file(name)
    files = {
        (key, n): server.base / FILE_INPUTS[node["class_type"], n] / value
        for key, node in graph.items()
        for n, value in node["inputs"].items()
        if (node["class_type"], n) in FILE_INPUTS
    }
    status, answer = server.post_prompt(graph)
    assert status == 400
    refused = {
        (key, error["extra_info"]["input_name"]): error["type"]
        for key, node in answer["node_errors"].items()
        for error in node["errors"]
    }
    assert refused.keys() == files.keys()
    assert set(refused.values()) <= {"value_not_in_list", "custom_validation_failed"}

    # With files of those names the graph is accepted, and the run gets as far as the first that is no such file.
    try:
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(16))
        status, answer = server.post_prompt(graph)
        assert status == 200, answer
        failed = error_of(server.wait(answer["prompt_id"]))
        assert failed["node_type"] in {class_type for class_type, _ in FILE_INPUTS} | {"GetVideoComponents"}
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)


def test_save_video_of_the_real_graphs_runs(server):
    """Its codec's widget has another name in each version; the file's inputs must do in all."""
    graph = clip_of_nothing()
    real = api_file(REAL[0])
    save = real[find(real, "SaveVideo")]
    graph["save"] = {**save, "inputs": {**save["inputs"], "video": [find(graph, "CreateVideo"), 0]}}
    (file,) = succeed(server, graph)["outputs"]["save"]["images"]
    assert (server.base / "output" / file["subfolder"] / file["filename"]).suffix == ".mp4"


@pytest.mark.usefixtures("then_a_good_prompt_works")
def test_a_difference_stops_the_run(server, small):
    """The selftest's verdict can fail: against the empty latent it does, by name, with the JSON written first."""
    report = find(small, "H3BW_RuntimeReport")
    small[report]["inputs"].update(reference=[find(small, "H3BW_SelfTestModel"), 2], filename_prefix="h3bw/different")
    status, answer = server.post_prompt(small)
    assert status == 200, answer
    failed = error_of(server.wait(answer["prompt_id"]))
    assert failed["node_id"] == report
    assert failed["exception_message"].startswith("latents equal, bit for bit: video differs in 2688 of 2688 elements")
    (written,) = (server.base / "output" / "h3bw").glob("different_*.json")
    assert json.loads(written.read_text("utf-8"))["rungs"][0]["result"] == "failed"


def test_prompt_without_meta(server, small):
    for node in small.values():
        del node["_meta"]
    assert {rung["result"] for rung in report_of(server, small)["rungs"]} == {"passed"}


@pytest.mark.usefixtures("then_a_good_prompt_works")
def test_missing_combo_value(server, small):
    fuse = find(small, "H3BW_FuseBlocks")
    del small[fuse]["inputs"]["mode"]
    status, answer = server.post_prompt(small)
    assert status == 400
    errors = [(error["type"], error["extra_info"]["input_name"]) for error in answer["node_errors"][fuse]["errors"]]
    assert errors == [("required_input_missing", "mode")]


@pytest.mark.usefixtures("then_a_good_prompt_works")
@pytest.mark.parametrize("value", ["fastest", "", None, 3, {"mode": "exact"}])
def test_value_that_the_combo_does_not_have(value, server, small):
    fuse = find(small, "H3BW_FuseBlocks")
    small[fuse]["inputs"]["mode"] = value
    status, answer = server.post_prompt(small)
    assert status == 400
    assert [error["type"] for error in answer["node_errors"][fuse]["errors"]] == ["value_not_in_list"]


@pytest.mark.usefixtures("then_a_good_prompt_works")
def test_nan_for_a_float(server, small):
    """ComfyUI's range check lets NaN pass. The run must end in an error that names a node, never in a clip."""
    small[find(small, "MiniMaxH3SigmaShift")]["inputs"]["shift_video"] = math.nan
    status, answer = server.post_prompt(small)
    if status == 400:
        return
    failed = error_of(server.wait(answer["prompt_id"]))
    assert failed["node_id"] in small
    assert 0 < len(failed["exception_message"]) < LONGEST_MESSAGE


@pytest.mark.usefixtures("then_a_good_prompt_works")
@pytest.mark.parametrize("value", ["false", 0, False])
def test_other_values_for_a_boolean(value, server, small):
    """ComfyUI converts with ``bool()`` before a node sees the value, so the text "false" switches on.

    No node can tell; what the pack owes is that the report shows the value it ran with.
    """
    small[find(small, "H3BW_FuseBlocks")]["inputs"]["swiglu"] = value
    report = report_of(server, small)
    assert report["run"]["settings"]["FuseBlocks"]["swiglu"] is bool(value)
    assert {rung["result"] for rung in report["rungs"]} == {"passed"}


@pytest.mark.usefixtures("then_a_good_prompt_works")
@pytest.mark.parametrize("class_type", ["H3BW_RuntimeReport", "H3BW_MediaCheck"])
def test_ten_megabytes_of_file_name(class_type, server, small):
    """A 400 or an error to read: not the ten megabytes again, and no path of the server."""
    graph = small
    if class_type == "H3BW_MediaCheck":
        graph, whole = clip_of_nothing(), api_file("selftest_t2va")
        check = whole[find(whole, class_type)]
        check["inputs"].update(video=[find(graph, "CreateVideo"), 0], latent=[find(graph, "H3BW_SelfTestModel"), 2])
        graph["check"] = check
    graph[find(graph, class_type)]["inputs"]["filename_prefix"] = "x" * 10_000_000
    status, answer = server.post_prompt(graph)
    if status == 400:
        (error,) = answer["node_errors"][find(graph, class_type)]["errors"]
        message = error["message"] + error["details"]
    else:
        failed = error_of(server.wait(answer["prompt_id"]))
        assert failed["node_type"] == class_type
        message = failed["exception_message"]
    assert len(message) < LONGEST_MESSAGE, message[:200]
    assert str(server.base) not in message
