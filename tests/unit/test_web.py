"""The house rules of the page's code: text only, no hook into ComfyUI's classes, nothing asked for on a clock."""

from __future__ import annotations

import re

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

WEB = PACK_ROOT / "web"
SOURCES = sorted(path.name for path in WEB.glob("*.js"))
FORBIDDEN = {
    "HTML from text": r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|srcdoc|DOMParser)\b|document\.write",
    "code from text": r"\beval\s*\(|\bnew Function\b",
    "a patched class": r"\.prototype\b|\bbeforeRegisterNodeDef\b",
    "polling": r"\bset(?:Interval|Timeout)\b|\brequestAnimationFrame\b",
    "a request of its own": r"\bfetch(?:Api)?\s*\(|\bXMLHttpRequest\b|\bWebSocket\b|https?://",
    "something kept": r"\b(?:local|session)Storage\b|\bindexedDB\b|document\.cookie",
}


def findings(source: str) -> list[str]:
    return [why for why, pattern in FORBIDDEN.items() if re.search(pattern, source)]


def test_the_files():
    assert SOURCES == ["describe.js", "h3bw.js", "node_view.js", "panel.js", "texts.js"]
    assert pack_module().WEB_DIRECTORY == "./web"


@pytest.mark.parametrize("name", SOURCES)
def test_rules(name):
    source = (WEB / name).read_text("utf-8")
    assert findings(source) == []
    assert len(source.splitlines()) < 600
    for imported in re.findall(r'from "(.+?)"', source):
        assert imported == "../../scripts/app.js" or (WEB / imported).is_file(), imported


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("a.innerHTML = b", "HTML from text"),
        ("new Function('x')", "code from text"),
        ("LGraphNode.prototype.draw = f", "a patched class"),
        ("setInterval(f, 100)", "polling"),
        ("await fetch(url)", "a request of its own"),
        ("const a = 'https://example.org'", "a request of its own"),
        ("localStorage.x = 1", "something kept"),
    ],
)
def test_rules_bite(source, why):
    assert findings(source) == [why]


def test_colours_come_from_the_theme():
    """Of colours of its own the sheet has the three of the states."""
    sheet = (WEB / "h3bw.css").read_text("utf-8")
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", sheet)) == {"#3b82f6", "#22a55b", "#d97706"}
    assert "url(" not in sheet and "@import" not in sheet
