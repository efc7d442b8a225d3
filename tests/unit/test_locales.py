"""Every node, input, output and setting has its texts and its docs in both languages, and none is left over."""

from __future__ import annotations

import json
import re

import make_locales
import pytest
from comfy_server import PACK_ROOT

WEB, DOCS = PACK_ROOT / "web", PACK_ROOT / "web" / "docs"
OTHERS = [language for language in make_locales.LANGUAGES if language != "en"]
NODES = sorted(json.loads((PACK_ROOT / "node_list.json").read_text("utf-8")))


@pytest.fixture(scope="module")
def definitions(comfy):
    return make_locales.node_definitions()


def keys(value) -> set[str]:
    return {path for path, _ in make_locales.texts(value)}


def test_english_is_what_the_schemas_say(definitions):
    assert make_locales.read("en", "nodeDefs") == definitions, "run tests/make_locales.py"


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", ["nodeDefs", "settings", "main"])
def test_nothing_is_missing_or_left_over(language, name, definitions):
    ours, english = keys(make_locales.read(language, name)), keys(make_locales.read("en", name))
    assert {"missing": english - ours, "left over": ours - english} == {"missing": set(), "left over": set()}


@pytest.mark.parametrize("language", make_locales.LANGUAGES)
@pytest.mark.parametrize("name", ["nodeDefs", "settings", "main"])
def test_texts_can_be_shown(language, name):
    """vue-i18n reads ``{}``, ``@`` and ``|`` in a message; the section h3bw is filled in by our own page code."""
    for path, text in make_locales.texts(make_locales.read(language, name)):
        assert isinstance(text, str) and text.strip() == text != "", path
        if not path.startswith("h3bw/"):
            assert not re.search(r"[{}@|]", text), path


def test_chinese_texts_are_of_the_english_ones_as_they_are(comfy):
    """After a change of an English text: mend zh, then run tests/make_locales.py --translated."""
    noted = json.loads(make_locales.TRANSLATED.read_text("utf-8"))
    now = make_locales.fingerprints()
    assert sorted(path for path in now.keys() | noted.keys() if now.get(path) != noted.get(path)) == []


def test_chinese_is_chinese():
    for path, text in make_locales.texts(make_locales.read("zh", "nodeDefs")):
        if path.endswith(("/tooltip", "/description")):
            assert re.search(r"[\u4e00-\u9fff]", text), path


@pytest.mark.parametrize("language", OTHERS)
def test_placeholders_are_the_same(language):
    english, ours = (make_locales.read(name, "main")["h3bw"] for name in ("en", language))
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", ours[key])), key


def test_the_page_asks_for_texts_that_there_are():
    """And for every text that there is: none is left over."""
    source = "\n".join(path.read_text("utf-8") for path in sorted(WEB.glob("*.js")))
    asked = set(re.findall(r'text\(\s*"(\w+)"', source)) | {"one_block", "some_blocks", "seconds", "seconds_each"}
    asked |= {f"node_{state}" for state in ("on", "muted", "bypassed")}
    asked |= {f"state_{state}" for state in ("not_started", "running", "finished", "interrupted")}
    assert asked == set(make_locales.read("en", "main")["h3bw"])


def test_every_setting_of_the_page_is_named():
    source = (WEB / "h3bw.js").read_text("utf-8")
    ids = {name.replace(".", "_") for name in re.findall(r'"(H3BW\.\w+)"', source)}
    assert ids == set(make_locales.read("en", "settings")) and len(ids) == 2


def test_every_category_is_named(pack):
    from conftest import pack_module

    schemas = [node.define_schema() for node in pack_module("nodes").NODES]
    parts = {part for schema in schemas for part in schema.category.split("/")}
    assert parts == set(make_locales.read("en", "main")["nodeCategories"])


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("language", make_locales.LANGUAGES)
def test_docs(node, language):
    path = make_locales.docs_path(node, language)
    assert path.is_file(), f"write {path.relative_to(PACK_ROOT).as_posix()}, then run tests/make_locales.py"
    text = path.read_text("utf-8")
    entry = make_locales.read(language, "nodeDefs")[node]
    assert make_locales.with_head(text, node, entry, language) == text, "run tests/make_locales.py"
    own = text.partition(make_locales.END)[2]
    assert own.count("\n## ") == 2 and own.count("\n| ") >= 2, "when to use it, and its messages"
    assert not re.search(r"<(?!!--)\w", own), "no HTML"


def test_no_docs_are_left_over():
    expected = {make_locales.docs_path(node, language) for node in NODES for language in make_locales.LANGUAGES}
    expected |= {DOCS / f"{node}.png" for node in NODES}
    assert {path for path in DOCS.rglob("*") if path.is_file()} == expected


def test_a_head_is_replaced_and_what_is_below_it_kept():
    entry = {
        "display_name": "A",
        "description": "Does a.",
        "inputs": {"x": {"name": "x", "tooltip": "one | two"}},
        "outputs": {"0": {"name": "MODEL", "tooltip": "b"}},
    }
    first = make_locales.with_head("## When\n\nthen\n", "H3BW_A", entry, "en")
    assert first.startswith("# A\n\nDoes a.\n\n![A](H3BW_A.png)\n") and "one \\| two" in first
    again = make_locales.with_head(first, "H3BW_A", {**entry, "description": "Does b."}, "en")
    assert again.endswith("\n\n## When\n\nthen\n") and "Does a" not in again and again.count("# A") == 1
