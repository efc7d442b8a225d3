"""Every workflow has a thumbnail and every node a picture, of the right kind and small; make_pictures.py makes them."""

from __future__ import annotations

import json

import make_pictures
import pytest
from comfy_server import PACK_ROOT
from PIL import Image

WORKFLOWS = sorted(path.stem for path in make_pictures.WORKFLOWS.glob("*.json"))
NODES = sorted(json.loads((PACK_ROOT / "node_list.json").read_text("utf-8")))
LEAST_COLOURS = 12  # a page that had not drawn yet has fewer


@pytest.mark.parametrize("name", WORKFLOWS)
def test_thumbnail(name):
    path = make_pictures.WORKFLOWS / f"{name}.jpg"
    assert path.is_file(), f"run tests/make_pictures.py {name}"
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and picture.size == make_pictures.THUMBNAIL
        assert len(picture.getcolors(maxcolors=1 << 20)) > 1000
    assert path.stat().st_size <= make_pictures.THUMBNAIL_BYTES


@pytest.mark.parametrize("node", NODES)
def test_picture_of_a_node(node):
    path = make_pictures.DOCS / f"{node}.png"
    assert path.is_file(), f"run tests/make_pictures.py {node}"
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width >= 400 and picture.height >= 150
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) >= LEAST_COLOURS
    assert path.stat().st_size <= make_pictures.PICTURE_BYTES


def test_no_thumbnail_is_left_over():
    assert sorted(path.stem for path in make_pictures.WORKFLOWS.glob("*.jpg")) == WORKFLOWS


def graph(*boxes, links=()):
    nodes = [{"id": at, "type": kind, "pos": pos, "size": size} for at, (kind, pos, size) in enumerate(boxes, 1)]
    return {"nodes": nodes, "links": [[0, a, 0, b, 0, "MODEL"] for a, b in links]}


def test_a_node_is_shown_with_the_neighbours_that_fit():
    near, far = ("Near", [400, 0], [300, 300]), ("Far", [9000, 0], [300, 300])
    found = graph(("Ours", [0, 0], [300, 300]), near, far, ("Other", [0, 400], [9, 9]), links=[(1, 2), (1, 3)])
    assert make_pictures.around(found, "Ours") == [1, 2]
    assert make_pictures.around(found, "Near") == [1, 2]
    assert make_pictures.around(found, "None") is None


def test_pictures_keep_their_limits():
    noise = Image.effect_noise((1600, 1000), 90).convert("RGB")
    with pytest.raises(ValueError, match="limit"):
        make_pictures.docs_picture(noise)
    flat = Image.new("RGB", (1600, 1000), "#204060")
    assert len(make_pictures.docs_picture(flat)) < make_pictures.PICTURE_BYTES
    assert len(make_pictures.thumbnail(flat)) < make_pictures.THUMBNAIL_BYTES
