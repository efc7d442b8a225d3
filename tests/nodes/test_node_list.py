"""node_list.json and the README's node table are what the code says."""

import json

import make_node_list
import pytest
from comfy_server import PACK_ROOT

pytestmark = pytest.mark.usefixtures("pack")

# Ids are for ever: a workflow saved today must open in every later version.
IDS = [
    "H3BW_LoadNVFP4",
    "H3BW_QuantizeCheckpoint",
    "H3BW_FuseBlocks",
    "H3BW_AttentionBackend",
    "H3BW_LoraSideBranch",
    "H3BW_Calibrate",
    "H3BW_SaveCalibration",
    "H3BW_SelfTestModel",
    "H3BW_SelfTestDecode",
    "H3BW_RuntimeReport",
    "H3BW_MediaCheck",
    "H3BW_Environment",
    "H3BW_BenchKernels",
    "H3BW_BenchAttention",
    "H3BW_ParityLadder",
    "H3BW_BenchStep",
    "H3BW_Roofline",
    "H3BW_BenchBlock",
    "H3BW_Warmup",
]

# Saved workflows hold widget values by position: new widgets go to the end, and none moves.
WIDGETS = {
    "H3BW_LoadNVFP4": ["unet_name", "direct_read", "layout"],
    "H3BW_QuantizeCheckpoint": ["unet_name", "output_name", "scale", "keep_layers", "filename_prefix"],
    "H3BW_FuseBlocks": [
        "mode", "modulate", "swiglu", "attention_output", "elementwise", "scale_backend", "emulate"
    ],
    "H3BW_AttentionBackend": ["backend", "layout"],
    "H3BW_LoraSideBranch": ["lora_name", "strength"],
    "H3BW_Calibrate": [],
    "H3BW_SaveCalibration": ["filename", "headroom", "clip_percent"],
    "H3BW_SelfTestModel": ["adaln", "width", "height", "length", "seed", "reference"],
    "H3BW_SelfTestDecode": [],
    "H3BW_RuntimeReport": ["on_difference", "filename_prefix"],
    "H3BW_MediaCheck": ["filename_prefix"],
    "H3BW_Environment": [],
    "H3BW_BenchKernels": ["rows", "columns", "ops", "rounds", "filename_prefix"],
    "H3BW_BenchAttention": ["lengths", "rows", "heads", "backend", "rounds", "filename_prefix"],
    "H3BW_ParityLadder": ["width", "height", "length", "emulate", "on_difference", "filename_prefix"],
    "H3BW_BenchStep": ["size", "variants", "also_attention", "tau", "steps", "rounds", "filename_prefix"],
    "H3BW_Roofline": ["rows", "columns", "rounds", "filename_prefix"],
    "H3BW_BenchBlock": ["rows", "block", "rounds", "filename_prefix"],
    "H3BW_Warmup": ["width", "height", "frames", "steps"],
}  # fmt: skip

# The widgets of a menu's options follow it, so they keep their places too.
MENUS = {
    "auto": ["allow_approximate", "max_error", "dense_steps", "dense_blocks"],
    "sdpa": [],
    "fa4": [],
    "kitchen_int8": ["dense_steps", "dense_blocks"],
    "sage1": ["dense_steps", "dense_blocks"],
    "sage2": ["dense_steps", "dense_blocks"],
    "sage3": ["dense_steps", "dense_blocks"],
    "sol": ["dense_steps", "dense_blocks", "tau", "exact_conditioning"],
}


def test_ids_are_kept():
    assert [schema.node_id for schema in make_node_list.schemas()] == IDS


def test_widgets_keep_their_places():
    from comfy_api.latest import io

    for schema in make_node_list.schemas():
        widgets = [item.id for item in schema.inputs if isinstance(item, (io.WidgetInput, io.DynamicCombo.Input))]
        assert widgets[: len(WIDGETS[schema.node_id])] == WIDGETS[schema.node_id], schema.node_id


def test_widgets_of_menus_keep_their_places():
    schema = next(schema for schema in make_node_list.schemas() if schema.node_id == "H3BW_AttentionBackend")
    menu = next(item for item in schema.inputs if item.id == "backend")
    found = {option.key: [item.id for item in option.inputs] for option in menu.options}
    for name, widgets in MENUS.items():
        assert found[name][: len(widgets)] == widgets, name
    # A prompt saved before a widget was there has no value for it.
    assert all(item.optional for option in menu.options for item in option.inputs)


def test_node_list_json():
    written = (PACK_ROOT / "node_list.json").read_text(encoding="utf-8")
    assert written == make_node_list.node_list(), "run python tests/make_node_list.py"
    assert list(json.loads(written)) == IDS


def test_readme_table():
    readme = (PACK_ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == make_node_list.with_table(readme), "run python tests/make_node_list.py"


def test_a_readme_without_markers_is_an_error():
    with pytest.raises(ValueError, match="README.md must hold"):
        make_node_list.with_table("no table here")
