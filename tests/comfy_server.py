"""A headless ComfyUI of one's own: started on loopback, asked over HTTP, stopped with all it started.

Standard library only. `sandbox.py` uses it for the demo, the headless tests use it inside pytest:

    with ComfyServer(comfyui, make_base_directory(tmp_path / "base", PACK_ROOT), cpu=True) as server:
        status, answer = server.post_prompt(graph)
        entry = server.wait(answer["prompt_id"])

Nothing is written outside the base directory and the log: models, custom_nodes, input, output, temp and user lie under
the base, the database is in memory. Not checked: that nobody else takes the free port between its choice and the
server's bind; the server then ends at once and the error shows its log.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

PACK_ROOT = Path(__file__).resolve().parent.parent
PACK_FOLDER = "h3-blackwell-runtime"  # the folder name that a user gets from the registry; hyphens are part of the test
BASE_FOLDERS = ("custom_nodes", "models/diffusion_models", "input", "output", "temp", "user")
NOT_COPIED = (".git", ".sandbox", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
# What ComfyUI logs when a pack did not come up; it goes on without the pack, and --quick-test-for-ci exits 0.
IMPORT_TROUBLE = ("IMPORT FAILED", "Cannot import", "Error while calling comfy_entrypoint", "Skip ", "skipping.")

# urllib honours http_proxy; a proxy must never see a request to loopback.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A ComfyUI that did not start, died or did not answer.

    Attributes:
        reason: what happened, one line.
        log: path of the server's log, or None.
    """

    def __init__(self, reason: str, log: Path | None = None):
        super().__init__(reason)
        self.reason = reason
        self.log = log


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without what would leak another Python into the child.

    PYTHONPATH and PYTHONHOME would bring in foreign packages; PYTHONSAFEPATH would keep `main.py` from finding its own
    modules. Loopback is exempt from any proxy.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env.update(PYTHONUNBUFFERED="1", PYTHONUTF8="1", NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
    env.update(extra or {})
    return env


def free_port(wanted: int = 0) -> int:
    """A TCP port that was free on loopback a moment ago: the wanted one if it was."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            if wanted == 0:
                raise
            return free_port()
        return probe.getsockname()[1]


def read_log(path: Path | None) -> str:
    """A log without its terminal colours, or an empty string if there is none."""
    if path is None or not path.is_file():
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", path.read_text("utf-8", "replace"))


def tail(path: Path | None, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(read_log(path).splitlines()[-lines:])


def make_base_directory(base: Path, pack: Path | None = PACK_ROOT, folder: str = PACK_FOLDER) -> Path:
    """Lays out a ComfyUI base directory and links the pack in as a user has it.

    Args:
        base: made if missing; a second call on the same base is harmless.
        pack: the pack's root, or None for a ComfyUI without it.
        folder: the pack's folder name under custom_nodes.

    Returns:
        `base`, absolute. Where links are not allowed (Windows without developer mode) the pack is copied, afresh at
        each call so that an old copy is never what runs.
    """
    base = base.absolute()
    for name in BASE_FOLDERS:
        (base / name).mkdir(parents=True, exist_ok=True)
    if pack is None:
        return base
    place = base / "custom_nodes" / folder
    if place.is_symlink():
        if place.resolve() == pack.resolve():
            return base
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    try:
        place.symlink_to(pack.resolve(), target_is_directory=True)
    except OSError:
        # Also by path: a sandbox with a name of its own inside the pack would copy itself for ever.
        inside = {base.resolve(), base.resolve().parent}

        def skipped(where: str, names: list[str]) -> list[str]:
            return [n for n in names if n in NOT_COPIED or (Path(where) / n).resolve() in inside]

        shutil.copytree(pack, place, ignore=skipped)
    return base


def import_trouble(log_text: str, folder: str = PACK_FOLDER) -> list[str]:
    """The log's lines that say the pack in `folder` did not load; empty when all is well."""
    place = str(Path("custom_nodes") / folder)
    return [
        line.strip() for line in log_text.splitlines() if place in line and any(word in line for word in IMPORT_TROUBLE)
    ]


def has_cuda(python: str | Path = sys.executable) -> bool:
    """Whether the torch of that interpreter sees a CUDA device. Raises ServerError if torch cannot be imported."""
    probe = subprocess.run(
        [str(python), "-c", "import torch; print(torch.cuda.is_available())"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if probe.returncode != 0:
        said = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServerError(f"torch cannot be imported by {Path(python).name}: {said}")
    return probe.stdout.strip().endswith("True")


def end_process(process: subprocess.Popen, patience_s: float = 10.0) -> None:
    """Ends a process started with `start_new_session=True` and its whole group: terminate, wait, kill.

    The group is killed even when the leader has gone by itself: its children may live on. An exception while waiting
    (a second Ctrl-C) kills at once and passes.
    """
    try:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    finally:
        _signal_group(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        if process.poll() is None:
            process.kill()
        process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> None:
    if not hasattr(os, "killpg"):
        if process.poll() is None:
            process.terminate()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended by itself
        os.killpg(process.pid, number)


class ComfyServer:
    """One ComfyUI process, as a context manager.

    Args:
        comfyui: the folder with `main.py`.
        base: a base directory from `make_base_directory`.
        args: further arguments of `main.py`.
        env: variables added to the clean environment.
        python: the interpreter, by default the running one.
        cpu: True adds `--cpu`; None asks that interpreter's torch and adds it where there is no CUDA device.
        log: where stdout and stderr go, by default `comfyui.log` in the base; truncated at the start.
        port: by default a free one.
        start_timeout_s: seconds until the server must answer.
    """

    def __init__(
        self,
        comfyui: str | Path,
        base: str | Path,
        *,
        args: tuple[str, ...] | list[str] = (),
        env: dict[str, str] | None = None,
        python: str | Path = sys.executable,
        cpu: bool | None = None,
        log: str | Path | None = None,
        port: int | None = None,
        start_timeout_s: float = 180.0,
    ):
        self.comfyui = Path(comfyui).absolute()
        self.base = Path(base).absolute()
        self.args = list(args)
        self.env = dict(env or {})
        self.python = str(python)
        self.cpu = cpu
        self.log = Path(log) if log else self.base / "comfyui.log"
        self.port = port
        self.start_timeout_s = start_timeout_s
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self) -> list[str]:
        """The command line; decides the port and, if left open, the device."""
        if self.port is None:
            self.port = free_port()
        if self.cpu is None:
            self.cpu = not has_cuda(self.python)
        command = [self.python, str(self.comfyui / "main.py"), "--base-directory", str(self.base)]
        command += ["--listen", "127.0.0.1", "--port", str(self.port)]
        # The default database lies in the ComfyUI folder, which may be the user's own, and is locked by one process.
        command += ["--database-url", "sqlite:///:memory:", "--disable-auto-launch", "--disable-api-nodes"]
        return command + (["--cpu"] if self.cpu else []) + self.args

    def start(self) -> None:
        """Starts the process and returns when `/system_stats` answers; otherwise stops it and raises ServerError."""
        if self.process is not None:
            raise ServerError("this server is already started; stop it first", self.log)
        command = self.command()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                cwd=self.comfyui,
                env=clean_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own group: stopped as a whole, and Ctrl-C reaches us first
            )
        try:
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    def _await_answer(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                self.get("/system_stats", timeout_s=5.0)
                return
            except ServerError:
                time.sleep(0.2)
        self.check_alive()
        raise ServerError(f"ComfyUI did not answer within {self.start_timeout_s:.0f} s", self.log)

    def check_alive(self) -> None:
        """Raises ServerError with the exit code if the process has ended."""
        if self.process is None:
            raise ServerError("ComfyUI is not started", self.log)
        if self.process.poll() is not None:
            raise ServerError(f"ComfyUI ended with exit code {self.process.returncode}", self.log)

    def stop(self) -> None:
        """Ends the process and everything in its group; harmless when it never ran."""
        if self.process is not None:
            end_process(self.process)
            self.process = None

    def log_text(self) -> str:
        return read_log(self.log)

    def log_tail(self, lines: int = 20) -> str:
        return tail(self.log, lines)

    def request(self, path: str, body: bytes | None = None, timeout_s: float = 60.0) -> tuple[int, str]:
        """GET, or POST when there is a body. Returns (HTTP status, text), also for 4xx and 5xx."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with _DIRECT.open(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
            raise ServerError(f"no answer from ComfyUI at {path}: {error}", self.log) from error

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """The JSON behind a path; ServerError for any other status than 200."""
        status, text = self.request(path, timeout_s=timeout_s)
        if status != 200:
            raise ServerError(f"ComfyUI answered {status} at {path}: {text[:200]}", self.log)
        return json.loads(text)

    def object_info(self) -> dict[str, Any]:
        """Every node the server knows, by id."""
        return self.get("/object_info")

    def post_prompt(self, prompt: dict | bytes, **extra: Any) -> tuple[int, Any]:
        """Queues an API graph.

        Args:
            prompt: the graph; or bytes, sent as the whole body unchanged (for malformed requests).
            **extra: further fields beside `prompt`, e.g. `extra_data`.

        Returns:
            (status, answer): 200 with `prompt_id`, or 400 with `error` and `node_errors`; text if it is not JSON.
        """
        body = prompt if isinstance(prompt, bytes) else json.dumps({"prompt": prompt, **extra}).encode()
        status, text = self.request("/prompt", body)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def history(self, prompt_id: str | None = None) -> dict[str, Any]:
        """Finished runs by id; with `prompt_id` that run's entry, or an empty dict while it is not there."""
        if prompt_id is None:
            return self.get("/history")
        return self.get(f"/history/{prompt_id}").get(prompt_id, {})

    def wait(self, prompt_id: str, timeout_s: float = 300.0) -> dict[str, Any]:
        """The history entry of a run once it has ended, well or badly."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            entry = self.history(prompt_id)
            if entry.get("status"):
                return entry
            time.sleep(0.1)
        raise ServerError(f"prompt {prompt_id} did not end within {timeout_s:.0f} s", self.log)
