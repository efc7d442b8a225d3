"""Where node, chromium and playwright-core are: for the page's tests and for the pictures made of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from comfy_server import PACK_ROOT

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class NotThere(RuntimeError):
    """What is missing, and what helps."""


def find() -> dict[str, str]:
    """Their paths; NotThere where one is missing.

    Chromium is looked for on the PATH or under H3BW_CHROMIUM; playwright-core (npm) below H3BW_PLAYWRIGHT or, as
    .ci/run installs it, below the sandbox's folder `browser`.
    """
    node = shutil.which("node")
    if node is None:
        raise NotThere("browser: node is not installed (apt-get install nodejs)")
    named = os.environ.get("H3BW_CHROMIUM")
    chromium = named or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        raise NotThere("browser: chromium is not installed (apt-get install chromium), nor named by H3BW_CHROMIUM")
    sandbox = Path(os.environ.get("H3BW_SANDBOX") or PACK_ROOT / ".sandbox")
    playwright = Path(os.environ.get("H3BW_PLAYWRIGHT") or sandbox / "browser").absolute()
    if not (playwright / "node_modules" / "playwright-core").is_dir():
        raise NotThere(
            "browser: playwright-core is not installed (npm install --prefix FOLDER playwright-core), or "
            "H3BW_PLAYWRIGHT does not name that folder"
        )
    return {"node": node, "chromium": chromium, "playwright": str(playwright)}
