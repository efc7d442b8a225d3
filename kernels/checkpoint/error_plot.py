"""A picture of what quantising cost: the relative weight error of every layer, one line for each kind of linear."""

import os
from collections.abc import Mapping

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 1000, 560
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 70, 90
COLOURS = ("#3f789e", "#c03020", "#4f8f4f", "#a1309b")
INK, GRID = "#202020", "#d8d8d8"


def draw(report: Mapping, path: str | os.PathLike) -> None:
    """Write a PNG of ``report["layers"]`` as `quantize.quantize_file` returns it: block across, error upwards."""
    kinds: dict[str, list[tuple[int, float]]] = {}
    for layer in report["layers"]:
        kinds.setdefault(layer["kind"], []).append((int(layer["name"].split(".")[1]), layer["relative_error"]))
    last = max(block for points in kinds.values() for block, _ in points)
    top = max(error for points in kinds.values() for _, error in points) * 1.1 or 1.0
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default()

    def place(block: float, error: float) -> tuple[float, float]:
        across = block / max(last, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - error / top * (HEIGHT - TOP - BOTTOM)

    pen.text((LEFT, 14), f"{report['target']['name']}: relative weight error, scales {report['scale']}", INK, font)
    for step in range(6):
        error = top * step / 5
        y = place(0, error)[1]
        pen.line((LEFT, y, WIDTH - RIGHT, y), GRID)
        pen.text((LEFT - 12, y), f"{error:.4f}", INK, font, anchor="rm")
    for block in range(0, last + 1, max(1, last // 10)):
        x = place(block, 0)[0]
        pen.text((x, HEIGHT - BOTTOM + 10), str(block), INK, font, anchor="mt")
    pen.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 32), "block", INK, font, anchor="mt")
    for place_in_key, (kind, points) in enumerate(kinds.items()):
        colour = COLOURS[place_in_key % len(COLOURS)]
        line = [place(*point) for point in sorted(points)]
        if len(line) > 1:
            pen.line(line, colour, 2)
        for x, y in line:
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), colour)
        x = LEFT + place_in_key * 220
        pen.rectangle((x, 44, x + 14, 54), colour)
        mean = sum(error for _, error in points) / len(points)
        pen.text((x + 22, 49), f"{kind}, mean {mean:.4f}", INK, font, anchor="lm")
    image.save(path, format="PNG")
