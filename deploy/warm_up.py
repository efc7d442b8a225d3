"""Queue a workflow on a ComfyUI that is starting and wait until it is warm: ``warm_up.py URL WORKFLOW [MINUTES]``.

Waits until ``/h3bw/health`` answers, posts the workflow (API format, with an *H3 Warm-up* in it), waits for its end,
and asks ``/h3bw/ready``. Exit code 0: the workflow succeeded and ComfyUI is ready. 1: it is not; the last line says
why. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
EVERY_S = 1.0


class NotWarm(RuntimeError):
    """Why ComfyUI is not warm."""


def ask(url: str, body: dict | None = None) -> tuple[int, dict]:
    """``(status, answer)`` of a GET, or of a POST with a body; status 0 while nothing answers.

    An answer that is not a JSON object, such as a proxy's page, is an empty one.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with DIRECT.open(request, timeout=30) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    except (OSError, http.client.HTTPException):
        return 0, {}
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    return status, told if isinstance(told, dict) else {}


def until(found, deadline: float, what: str):
    """What ``found()`` returns once it is true; NotWarm at the deadline."""
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(EVERY_S)
    raise NotWarm(f"{what} did not happen in time")


def warm_up(url: str, workflow: dict, minutes: float) -> dict:
    """Do it all; returns the answer of ``/h3bw/ready``."""
    deadline = time.monotonic() + minutes * 60
    until(lambda: ask(f"{url}/h3bw/health")[0] == 200, deadline, "an answer of /h3bw/health")
    status, told = ask(f"{url}/prompt", {"prompt": workflow})
    if status != 200:
        raise NotWarm(f"ComfyUI refused the workflow with status {status}: {json.dumps(told)[:2000]}")
    prompt = told["prompt_id"]
    entry = until(lambda: ask(f"{url}/history/{prompt}")[1].get(prompt), deadline, "the end of the workflow")
    if entry["status"]["status_str"] != "success":
        errors = [fields for kind, fields in entry["status"]["messages"] if kind == "execution_error"]
        words = "; ".join(f"{error['node_type']}: {error['exception_message'].strip()}" for error in errors)
        raise NotWarm(f"the workflow failed: {words or entry['status']['status_str']}")
    status, told = ask(f"{url}/h3bw/ready")
    if status != 200:
        raise NotWarm(f"/h3bw/ready says {status}: {told.get('reason')}")
    return told


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__.partition("\n")[0])
        return 2
    try:
        with open(arguments[1], encoding="utf-8") as file:
            workflow = json.load(file)
        told = warm_up(arguments[0].rstrip("/"), workflow, float(arguments[2]) if len(arguments) == 3 else 30.0)
    except (NotWarm, OSError, ValueError) as error:
        print(f"not ready: {error}")
        return 1
    print(f"ready: warmed up in {told['warm_up']['seconds']} s on {told['warm_up']['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
