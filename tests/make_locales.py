"""Writes what is derived from the schemas for the page: locales/en/nodeDefs.json and the head of each node's docs.

    python tests/make_locales.py                with ComfyUI named by COMFYUI_PATH, in an environment that can import it
    python tests/make_locales.py --translated   also: zh was brought up to date with the English texts as they are now

A new node needs, beside this: its entry in locales/zh/nodeDefs.json, and below the heads of web/docs/ID.md and
web/docs/ID/zh.md when to use it and what its messages mean. tests/unit/test_locales.py says what is missing and which
Chinese texts are older than their English ones (tests/translated.json holds what they were translated from).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comfy_server import PACK_ROOT
from conftest import pack_module, use_comfyui

LANGUAGES = ("en", "zh")
END = "<!-- the lines above are written by tests/make_locales.py -->"
TRANSLATED = PACK_ROOT / "tests" / "translated.json"
WORDS = {
    "en": {"inputs": "Inputs", "outputs": "Outputs", "input": "input", "output": "output", "does": "what it is"},
    "zh": {"inputs": "输入", "outputs": "输出", "input": "输入", "output": "输出", "does": "说明"},
}


def inputs_of(items: list, above: str = "") -> Iterator[tuple[str, Any]]:
    """``(name, input)`` of a schema's inputs; those of a menu's options are named ``menu.input``, each once."""
    for item in items:
        yield above + item.id, item
        inner = {}
        for option in getattr(item, "options", None) or ():
            for name, found in inputs_of(getattr(option, "inputs", ()), f"{above}{item.id}."):
                inner.setdefault(name, found)
        yield from inner.items()


def english(schema) -> dict[str, Any]:
    """A node's entry of nodeDefs.json; dots in an input's name are underscores there."""
    entry: dict[str, Any] = {"display_name": schema.display_name, "description": schema.description}
    found = {
        name.replace(".", "_"): {"name": name.split(".")[-1], "tooltip": item.tooltip}
        for name, item in inputs_of(schema.inputs)
    }
    if found:
        entry["inputs"] = found
    entry["outputs"] = {
        str(at): {"name": item.display_name or item.io_type, "tooltip": item.tooltip}
        for at, item in enumerate(schema.outputs)
    }
    return entry


def node_definitions() -> dict[str, Any]:
    """Content of locales/en/nodeDefs.json."""
    schemas = [node.define_schema() for node in pack_module("nodes").NODES]
    return {schema.node_id: english(schema) for schema in schemas}


def read(language: str, name: str) -> dict[str, Any]:
    return json.loads((PACK_ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))


def docs_path(node: str, language: str) -> Path:
    """Where ComfyUI's page looks for a node's docs: ``ID/LANGUAGE.md``, then ``ID.md``."""
    folder = PACK_ROOT / "web" / "docs"
    return folder / f"{node}.md" if language == "en" else folder / node / f"{language}.md"


def head(node: str, entry: dict[str, Any], language: str) -> str:
    """The derived part of a node's docs: what it does, its picture, inputs and outputs."""
    words = WORDS[language]
    lines = [f"# {entry['display_name']}", "", entry["description"], "", f"![{entry['display_name']}]({node}.png)", ""]
    for section, word in (("inputs", "input"), ("outputs", "output")):
        if entry.get(section):
            lines += [f"## {words[section]}", "", f"| {words[word]} | {words['does']} |", "|---|---|"]
            lines += [f"| **{cell(i['name'])}** | {cell(i['tooltip'])} |" for i in entry[section].values()] + [""]
    return "\n".join([*lines, END])


def cell(text: str) -> str:
    """A text in a table."""
    return text.replace("|", "\\|").replace("*", "\\*")


def with_head(text: str, node: str, entry: dict[str, Any], language: str) -> str:
    """A docs file with its derived part as it has to be."""
    _, found, rest = text.partition(END)
    return head(node, entry, language) + (rest if found else f"\n\n{text}")


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """``(path, text)`` of every text in a locale file."""
    for key, inner in value.items():
        at = f"{path}/{key}" if path else key
        if isinstance(inner, dict):
            yield from texts(inner, at)
        else:
            yield at, inner


def fingerprints() -> dict[str, str]:
    """Of every English text: what a translation was made from."""
    found = {}
    for name in ("nodeDefs", "settings", "main"):
        for path, text in texts(node_definitions() if name == "nodeDefs" else read("en", name)):
            found[f"{name}/{path}"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return found


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> None:
    use_comfyui()
    definitions = {"en": node_definitions(), "zh": read("zh", "nodeDefs")}
    path = PACK_ROOT / "locales" / "en" / "nodeDefs.json"
    path.write_text(as_json(definitions["en"]), encoding="utf-8")
    for language, entries in definitions.items():
        for node in definitions["en"]:
            file = docs_path(node, language)
            if file.is_file() and node in entries:
                text = file.read_text("utf-8")
                file.write_text(with_head(text, node, entries[node], language), encoding="utf-8")
    if "--translated" in arguments:
        TRANSLATED.write_text(as_json(fingerprints()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
