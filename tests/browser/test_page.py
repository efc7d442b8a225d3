"""The page itself: chromium on a real ComfyUI, driven by scenarios.mjs, with the frontend that ComfyUI pins.

Where a second frontend is named by H3BW_FRONTEND (the folder `static` of a newer comfyui_frontend_package), every test
runs with that one too. H3BW_PICTURES names a folder that gets the screenshots. Without node, chromium or
playwright-core (browser_tools.py says where they are looked for) the tests are skipped.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser_tools
import make_locales
import make_pictures
import make_workflows
import pytest
from comfy_server import PACK_FOLDER, PACK_ROOT, ComfyServer, clean_environment, make_base_directory
from conftest import comfyui_folder
from workflow_parts import fuse, sample, schedule

HERE = Path(__file__).resolve().parent
LIMIT_S = 240.0
WORDS = ["nvfp4", "fp4", "blackwell", "sage", "h3"]
FALLBACK = "the stream is on cpu and emulate is off"
RENDERERS = {"canvas": False, "vue": True}
NAMES = json.loads((PACK_ROOT / "node_list.json").read_text("utf-8"))


def tools() -> dict[str, str]:
    """Where node, chromium and playwright-core are; skips the tests where one is missing."""
    try:
        return browser_tools.find()
    except browser_tools.NotThere as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module", params=["pinned", "newer"])
def server(request, tmp_path_factory):
    tools()
    arguments = []
    if request.param == "newer":
        folder = os.environ.get("H3BW_FRONTEND")
        if not folder:
            pytest.skip("browser: H3BW_FRONTEND names no newer frontend")
        arguments = ["--front-end-root", folder]
    base = make_base_directory(tmp_path_factory.mktemp("page") / "base")
    with ComfyServer(comfyui_folder(), base, cpu=True, args=arguments) as running:
        running.frontend = request.param
        yield running


@pytest.fixture
def page(server, tmp_path) -> Callable[..., dict[str, Any]]:
    """Runs a scenario in a fresh browser and returns what it found; fails where the page complains of this pack."""

    def run(scenario: str, *, settings: dict | None = None, complaints: bool = False, **options: Any) -> dict:
        found = tools()
        chosen = {"Comfy.Locale": "en", "Comfy.ColorPalette": "dark", "Comfy.VueNodes.Enabled": False}
        chosen |= {"H3BW.StatusOnNodes": True, "H3BW.ReportsOnNodes": True} | (settings or {})
        asked = {"scenario": scenario, "url": server.url, "settings": chosen, **found, **options}
        if os.environ.get("H3BW_PICTURES"):
            pictures = Path(os.environ["H3BW_PICTURES"]) / server.frontend
            pictures.mkdir(parents=True, exist_ok=True)
            asked["pictures"] = str(pictures.absolute())
        command = [found["node"], str(HERE / "scenarios.mjs"), json.dumps(asked)]
        home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(
            command,
            env=clean_environment(home),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{server.log_tail()}"
        result = json.loads(done.stdout.splitlines()[-1])
        if not complaints:
            assert result["complaints"] == []
        return result

    return run


@pytest.fixture(scope="module")
def graph(server) -> dict[str, Any]:
    """The tiny H3 behind both patches, with the fused blocks left to a CPU that has none, sampled and reported."""
    graph = make_workflows.Graph("page", server.object_info())
    tiny = graph.add("H3BW_SelfTestModel", adaln="pruned", width=64, height=64, length=22, seed=0, reference="none")
    blocks = fuse(graph, "Blocks", tiny["MODEL"])
    attention = graph.add("H3BW_AttentionBackend", "Attention", model=blocks["MODEL"], backend="auto")
    scheduled = schedule(graph, tiny["MODEL"], 3, "euler")
    guider, latent = sample(graph, scheduled, attention["MODEL"], tiny["positive"], tiny["LATENT"])
    report = graph.add(
        "H3BW_RuntimeReport",
        "Report",
        model=attention["MODEL"],
        latent=latent["output"],
        on_difference="report",
        filename_prefix="h3bw/page",
    )
    note = graph.explain("What ran?")
    columns = [[tiny], [blocks, attention], [*scheduled], [guider, latent], [report, note]]
    graph.lay_out([make_workflows.Group("A run", columns)])
    return graph.ui()


def seeded(graph: dict[str, Any], name: str) -> dict[str, Any]:
    """The same workflow with a seed of its own: ComfyUI must not answer from the cache of another test's run."""
    found = copy.deepcopy(graph)
    noise = next(node for node in found["nodes"] if node["type"] == "RandomNoise")
    noise["widgets_values"][0] = zlib.crc32(name.encode())
    return found


def ids(graph: dict[str, Any], kind: str) -> list[str]:
    return [str(node["id"]) for node in graph["nodes"] if node["type"] == kind]


def test_the_words_people_use_find_our_nodes(page, server):
    """Among what the search box shows without scrolling."""
    titles = {info["display_name"] for name, info in server.object_info().items() if name in NAMES}
    found = page("search", words=WORDS)["found"]
    assert {word: [title for title in titles if title in found[word][:8]] != [] for word in WORDS} == dict.fromkeys(
        WORDS, True
    ), found


def test_nodes_are_added_connected_and_queued(page):
    result = page("build")
    assert result["links"] == result["wanted"]
    assert result["ended"] == "success", result["detail"]
    assert len(result["report"]) == 1 and result["report"][0].startswith("Nothing was sampled with this model yet")


@pytest.mark.parametrize(("renderer", "palette"), [("canvas", "dark"), ("vue", "light")])
def test_a_run_is_shown_while_it_goes_on_and_after(page, graph, renderer, palette):
    result = page(
        "run",
        workflow=seeded(graph, renderer),
        picture=f"run-{renderer}-{palette}",
        settings={"Comfy.VueNodes.Enabled": RENDERERS[renderer], "Comfy.ColorPalette": palette},
    )
    assert result["ended"] == "success", result["detail"]
    assert result["idle"]["state"] == "nothing ran yet"
    assert result["states"] == ["running", "finished"]
    states = [message["state"] for message in result["messages"]]
    assert states[0] == "running" and states[-1] == "finished" and set(states[:-1]) == {"running"}
    panel = result["panel"]
    assert panel["state"] == "finished"
    assert panel["sections"]["Fallbacks"] == [f"3 blocks × 9 | {FALLBACK}"]
    assert panel["sections"]["Fused blocks"] == ["fused | 0/3", "mode | exact"]
    assert "ran | sdpa × 9" in panel["sections"]["Attention"]
    assert panel["sections"]["Last run"][:2] == ["device | cpu", "model evaluations | 3"]
    assert panel["sections"]["Certification"] == ["nothing needs it on cpu"]
    assert "Attention | on" in panel["sections"]["In this graph"]
    assert result["overflow"] <= 0
    (fused,), (attention,), (report,) = (
        ids(graph, kind) for kind in ("H3BW_FuseBlocks", "H3BW_AttentionBackend", "H3BW_RuntimeReport")
    )
    shown = result["onNodes"]
    assert set(shown) == {fused, attention, report}
    assert shown[fused][0].splitlines()[1:] == ["fused: 0/3", "mode: exact", f"3 blocks × 9: {FALLBACK}"]
    assert shown[attention][0].splitlines()[1:] == ["asked for: auto", "ran: sdpa × 9"]
    assert shown[report][0].startswith("fused 0/3 blocks; 3 fell back: the stream is on cpu")
    assert result["messages"][-1]["nodes"] == {"FuseBlocks": fused, "AttentionBackend": attention}
    saved = result["saved"]
    assert saved["before"] == saved["after"] == saved["again"]


def test_the_settings_switch_the_text_on_nodes_off(page, graph):
    off = {"H3BW.StatusOnNodes": False, "H3BW.ReportsOnNodes": False}
    assert page("quiet", workflow=seeded(graph, "off"), settings=off) | {"outside": []} == {
        "ended": "success", "onNodes": [], "complaints": [], "outside": [],
    }  # fmt: skip
    on = page("quiet", workflow=seeded(graph, "on"))["onNodes"]
    assert len(on) == 3 and any(FALLBACK in text for text in on)


def test_a_workflow_of_an_older_version_opens_with_its_values(page):
    """Saved when the attention menu had no inputs of its own and there was no layout."""
    older = json.loads((HERE / "older" / "selftest_t2va_0.1.0a.json").read_text("utf-8"))
    result = page("open", workflow=older, picture="older")
    assert result["missing"] == []
    assert result["links"] == len(older["links"])
    values = {node["id"]: node["widgets_values"] for node in older["nodes"]}
    for number in ids(older, "H3BW_FuseBlocks"):
        assert list(result["widgets"][number].values())[:7] == values[int(number)]
    for number in ids(older, "H3BW_AttentionBackend"):
        widgets = result["widgets"][number]
        assert widgets["backend"] == "auto" and widgets["layout"] == "auto"
        assert widgets["backend.allow_approximate"] is False and widgets["backend.max_error"] == 0.02
    for number in ids(older, "H3BW_RuntimeReport"):
        assert list(result["widgets"][number].values())[:2] == values[int(number)]


def test_templates_have_pictures_and_open(page):
    names = sorted(path.stem for path in (PACK_ROOT / "workflows").glob("*.json"))
    result = page("templates", pack=PACK_FOLDER, names=names, opened="first_proof", kind="H3BW_Environment")
    assert result["pictures"] == dict.fromkeys(names, make_pictures.THUMBNAIL[0])
    wanted = json.loads((PACK_ROOT / "workflows" / "first_proof.json").read_text("utf-8"))["nodes"]
    assert sorted(result["nodes"]) == sorted(node["type"] for node in wanted)


@pytest.mark.parametrize(("language", "heading"), [("en", "When to use it"), ("zh", "何时使用")])
def test_docs_open_from_the_node(page, graph, language, heading):
    settings = {"Comfy.Locale": language}
    result = page("help", workflow=graph, kind="H3BW_FuseBlocks", settings=settings, complaints=True)
    # The page asks for ID/en.md before it takes ID.md, which serves every language without docs of its own.
    assert [line for line in result["complaints"] if "/docs/H3BW_FuseBlocks/en.md" not in line] == []
    definition = make_locales.read(language, "nodeDefs")["H3BW_FuseBlocks"]
    assert heading in result["text"] and definition["description"] in result["text"]
    assert result["picture"] > 400


def test_the_page_speaks_chinese(page, graph):
    settings = {"Comfy.Locale": "zh", "Comfy.VueNodes.Enabled": True}
    result = page("run", workflow=seeded(graph, "zh"), picture="run-zh", settings=settings)
    texts = make_locales.read("zh", "main")["h3bw"]
    assert result["idle"]["state"] == texts["nothing_ran"] and result["panel"]["state"] == texts["state_finished"]
    assert result["panel"]["sections"][texts["section_fused"]][0] == f"{texts['fused_blocks']} | 0/3"
    (fused,) = ids(graph, "H3BW_FuseBlocks")
    assert f"{texts['mode']}: exact" in result["onNodes"][fused][0]
    names = make_locales.read("zh", "nodeDefs")
    assert result["labels"]["H3BW_FuseBlocks"][0] == names["H3BW_FuseBlocks"]["inputs"]["mode"]["name"]
    assert result["labels"]["H3BW_AttentionBackend"][0] == names["H3BW_AttentionBackend"]["inputs"]["backend"]["name"]


def test_names_with_html_are_text(page, graph):
    html = '<img src=x onerror="window.h3bwPwned=1"><b>bold</b>'
    (fused,), (attention,) = (ids(graph, kind) for kind in ("H3BW_FuseBlocks", "H3BW_AttentionBackend"))
    message = {
        "schema": "h3bw-status/1", "prompt_id": html, "state": "finished", "device": html, "steps": 1, "seconds": 1.0,
        "nodes": {"FuseBlocks": fused, "AttentionBackend": attention, "LoraSideBranch": html},
        "settings": {
            "FuseBlocks": {"mode": html, "emulate": html, "forced_off_by_environment": [html]},
            "AttentionBackend": {"backend": html},
            "LoraSideBranch": {"loras": [{"file": html, "strength": html, "linears": html}]},
        },
        "blocks": 3, "fused": 0, "fallbacks": [{"reason": html, "blocks": 3, "first": 0, "calls": 9}],
        "bf16_inputs": [{"linear": html, "reason": html, "calls": 1}],
        "side_branches": [{"name": html, "calls": 1}], "attention": [{"name": html, "calls": 1}],
        "attention_handed_on": [{"name": html, "calls": 1}], "attention_dense": [{"name": html, "calls": 1}],
        "attention_choices": [html], "first_nonfinite": {"step": html, "block": html}, "peak_bytes": 1,
        "certification": {
            "needed": True, "certified": 1, "refused": [{"op": html, "implementation": html, "reason": html}],
        },
    }  # fmt: skip
    result = page("hostile", workflow=graph, message=message)
    assert result["pwned"] is None and result["elements"] == 0
    assert result["html"] == html and result["panel"].count(html) >= 15
    assert len(result["onNodes"]) == 3 and all(html in text for text in result["onNodes"])


def test_foreign_events_are_left_alone(page):
    result = page("foreign")
    assert result["before"] == result["after"]
    assert result["after"]["state"] == "nothing ran yet"


def test_complaints_are_seen(page):
    found = page("complains", complaints=True)["complaints"]
    assert any("a test of the watch" in line for line in found) and any("none.js" in line for line in found)
