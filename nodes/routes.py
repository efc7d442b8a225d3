"""``GET /h3bw/ready`` and ``GET /h3bw/health`` on ComfyUI's server: read-only, no parameters, no side effects.

They are entered into the server's route table while ComfyUI loads its packs, before it starts to listen. ComfyUI
answers HEAD beside GET and 405 to any other method, and repeats every route of its table under ``/api``. A query string
is not read.
"""

from __future__ import annotations

import logging

from . import readiness
from .status import running_server

READY, HEALTH = "/h3bw/ready", "/h3bw/health"

log = logging.getLogger("h3bw")


def register() -> bool:
    """Add both routes to the running server, once; returns whether they were added.

    Without a server (a script, a test, another program) nothing is imported and nothing happens. A second copy of the
    pack leaves the first one's routes in place: two of one path would end the server.
    """
    server = running_server()
    if server is None:
        return False
    if {READY, HEALTH} & {getattr(route, "path", None) for route in server.routes}:
        log.warning("H3 Blackwell: %s is taken; is the pack installed twice?", READY)
        return False
    server.routes.get(READY)(ready)
    server.routes.get(HEALTH)(health)
    return True


async def ready(request):
    """200 while a model is warmed up and loaded, else 503; the body says what and why."""
    told = readiness.ready()
    return answer(told, 200 if told["ready"] else 503)


async def health(request):
    """200: the process answers, warmed up or not."""
    return answer(readiness.health(), 200)


def answer(told: dict, status: int):
    """A JSON answer that no proxy keeps."""
    from aiohttp import web

    return web.json_response(told, status=status, headers={"Cache-Control": "no-store"})
