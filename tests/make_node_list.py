"""Writes what is derived from the nodes' own schemas: node_list.json and the node table of README.md.

    python tests/make_node_list.py         with ComfyUI named by COMFYUI_PATH, in an environment that can import it

A test compares both with the code, so neither can drift.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comfy_server import PACK_ROOT
from conftest import pack_module, use_comfyui

BEGIN, END = "<!-- nodes: written by tests/make_node_list.py -->", "<!-- /nodes -->"


def schemas() -> list:
    """The schema of every node, in the order in which the pack registers them."""
    return [node.define_schema() for node in pack_module("nodes").NODES]


def node_list() -> str:
    """Content of node_list.json, as ComfyUI-Manager reads it: node id to description."""
    return json.dumps({schema.node_id: schema.description for schema in schemas()}, indent=2) + "\n"


def table() -> str:
    """The README's table, between its markers."""
    rows = ["| node | what it does | in | out |", "|---|---|---|---|"]
    for schema in schemas():
        taken = ", ".join(f"{item.id}{' (optional)' if item.optional else ''}" for item in schema.inputs) or "–"
        given = ", ".join(item.io_type for item in schema.outputs)
        rows.append(f"| **{schema.display_name}**<br>`{schema.node_id}` | {schema.description} | {taken} | {given} |")
    return "\n".join([BEGIN, *rows, END])


def with_table(readme: str) -> str:
    """README text with its table replaced; ValueError without the markers."""
    head, _, rest = readme.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"README.md must hold {BEGIN} and {END}")
    return head + table() + tail


def main() -> None:
    use_comfyui()
    (PACK_ROOT / "node_list.json").write_text(node_list(), encoding="utf-8")
    readme = PACK_ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
