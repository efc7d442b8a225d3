"""Writes what is derived from the code: node_list.json, and the tables of nodes and attention backends in README.md.

    python tests/make_node_list.py         with ComfyUI named by COMFYUI_PATH, in an environment that can import it

A test compares them with the code, so none can drift.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comfy_server import PACK_ROOT
from conftest import pack_module, use_comfyui

BEGIN, END = "<!-- nodes: written by tests/make_node_list.py -->", "<!-- /nodes -->"
BACKENDS_BEGIN = "<!-- attention backends: written by tests/make_node_list.py -->"
BACKENDS_END = "<!-- /attention backends -->"


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


def backends() -> str:
    """The README's table of attention backends, between its markers."""
    rows = ["| backend | | needs | what it is | run on hardware here |", "|---|---|---|---|---|"]
    for record in pack_module("kernels.attention").records():
        kind = "exact" if record.exact else "approximate"
        kind += ", by name only" if record.opt_in else ""
        run = "see the records" if record.run_here else "**not run**: tested against a stand-in with its signature"
        rows.append(f"| `{record.name}` | {kind} | {record.needs} | {record.summary} | {run} |")
    return "\n".join([BACKENDS_BEGIN, *rows, BACKENDS_END])


def with_table(readme: str) -> str:
    """README text with its tables replaced; ValueError without the markers."""
    for begin, end, text in ((BEGIN, END, table()), (BACKENDS_BEGIN, BACKENDS_END, backends())):
        head, _, rest = readme.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"README.md must hold {begin} and {end}")
        readme = head + text + tail
    return readme


def main() -> None:
    use_comfyui()
    (PACK_ROOT / "node_list.json").write_text(node_list(), encoding="utf-8")
    readme = PACK_ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
