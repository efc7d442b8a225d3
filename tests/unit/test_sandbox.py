"""The sandbox's machinery, without pip, torch or ComfyUI: a small HTTP server stands in for `main.py`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path

import comfy_server
import conftest
import pytest
import sandbox
import sandbox_install
from comfy_server import ComfyServer, ServerError, import_trouble, make_base_directory
from conftest import comfyui_folder
from sandbox_install import SandboxError, Stamps, run_logged

POSIX = pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX")

# Answers /system_stats on the port it is given, and starts a child that ignores SIGTERM, as a stuck worker would.
FAKE_MAIN = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
if os.environ.get("FAKE") == "dies":
    print("Traceback: no module named einops")
    sys.exit(3)
if os.environ.get("FAKE") == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stuck])
print("child", child.pid, flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/system_stats" else 404)
        self.end_headers()
        self.wfile.write(b'{"system": {}}')
if os.environ.get("FAKE") == "silent":
    import time; time.sleep(300)
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def fake_comfyui(folder: Path, version: str = "0.30.0") -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text(FAKE_MAIN)
    (folder / "nodes.py").write_text("")
    (folder / "requirements.txt").write_text("torch\n")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that its new parent has not reaped yet does not."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def make_archive(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def a_link(target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


class TestStamps:
    def steps(self, folder: Path, inputs: dict[str, object], ran: list[str], **holds: bool) -> list[str]:
        """One pass over a chain of three; returns what ran."""
        stamps, already = Stamps(folder), len(ran)
        for step in ("a", "b", "c"):
            stamps.run(step, inputs.get(step), lambda step=step: ran.append(step), holds.get(step, True))
        return ran[already:]

    def test_second_pass_runs_nothing(self, tmp_path):
        ran = []
        assert self.steps(tmp_path, {}, ran) == ["a", "b", "c"]
        assert self.steps(tmp_path, {}, ran) == []

    def test_a_change_redoes_the_step_and_those_after_it(self, tmp_path):
        ran = []
        self.steps(tmp_path, {"b": "torch==1"}, ran)
        assert self.steps(tmp_path, {"b": "torch==2"}, ran) == ["b", "c"]

    def test_a_lost_result_redoes_the_step_and_those_after_it(self, tmp_path):
        # The venv was deleted: its inputs are as before, yet what had been installed into it has gone too.
        ran = []
        self.steps(tmp_path, {}, ran)
        assert self.steps(tmp_path, {}, ran, a=False) == ["a", "b", "c"]

    def test_a_lost_result_is_still_known_after_an_interruption(self, tmp_path):
        ran = []
        self.steps(tmp_path, {}, ran)
        Stamps(tmp_path).run("a", None, lambda: None, holds=False)  # remade, then Ctrl-C before step b
        assert self.steps(tmp_path, {}, ran) == ["b", "c"]

    def test_a_failed_step_stays_undone(self, tmp_path):
        def fail():
            raise SandboxError("no network")

        Stamps(tmp_path).run("a", 1, lambda: None)
        with pytest.raises(SandboxError):
            Stamps(tmp_path).run("a", 2, fail)
        # Also for the old inputs: the half-done step has touched what they had made.
        assert Stamps(tmp_path).run("a", 1, lambda: None)


class TestDownload:
    def test_wrong_sha256_is_refused_and_deleted(self, tmp_path):
        file = tmp_path / "comfy.tar.gz"
        file.write_bytes(b"tampered")
        wanted = hashlib.sha256(b"true").hexdigest()
        with pytest.raises(
            SandboxError, match=rf"sha256 is {hashlib.sha256(b'tampered').hexdigest()}, wanted {wanted}"
        ):
            sandbox_install.check_sha256(file, wanted)
        assert not file.exists()

    def test_right_sha256_is_kept(self, tmp_path):
        file = tmp_path / "comfy.tar.gz"
        file.write_bytes(b"true")
        sandbox_install.check_sha256(file, hashlib.sha256(b"true").hexdigest())
        assert file.exists()

    def test_only_the_folder_is_extracted(self, tmp_path):
        archive = make_archive(
            tmp_path / "a.tar.gz", {"p/vendor/C/main.py": b"1", "p/vendor/C/comfy/x.py": b"2", "p/setup.py": b"3"}
        )
        assert sandbox_install.extract_folder(archive, "p/vendor/C", tmp_path / "C") == 2
        found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py"))
        assert found == ["C/comfy/x.py", "C/main.py"]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("p/C/../../evil.py", b"x"),
            ("p/C//etc/evil.py", b"x"),
            ("p/C/..\\evil.py", b"x"),
            ("p/C/C:/evil.py", b"x"),
            ("p/C/link", a_link("/etc/passwd")),
        ],
        ids=["dots", "absolute", "backslash", "drive", "link"],
    )
    def test_what_would_leave_the_folder_is_refused(self, tmp_path, name, content):
        archive = make_archive(tmp_path / "a.tar.gz", {"p/C/main.py": b"1", name: content})
        with pytest.raises(SandboxError, match="refused"):
            sandbox_install.extract_folder(archive, "p/C", tmp_path / "C")
        assert not (tmp_path / "C").exists()  # all or nothing
        assert not list(tmp_path.rglob("evil.py"))

    def test_an_archive_without_the_folder(self, tmp_path):
        archive = make_archive(tmp_path / "a.tar.gz", {"q/main.py": b"1"})
        with pytest.raises(SandboxError, match="no files under p/C"):
            sandbox_install.extract_folder(archive, "p/C", tmp_path / "C")


class TestFindComfyUI:
    def test_the_named_one_comes_first(self, tmp_path, monkeypatch):
        named = fake_comfyui(tmp_path / "named", "0.33.0")
        around = fake_comfyui(tmp_path / "around") / "custom_nodes" / "pack"
        monkeypatch.setenv("COMFYUI_PATH", str(named))
        folder, why = sandbox_install.find_comfyui(tmp_path / "cache", (around,))
        assert folder == named
        assert "0.33.0 from COMFYUI_PATH" in why

    @pytest.mark.parametrize(("version", "said"), [(None, "is no ComfyUI"), ("0.29.1", "found ComfyUI 0.29.1")])
    def test_a_named_one_that_will_not_do_is_an_error(self, tmp_path, monkeypatch, version, said):
        named = fake_comfyui(tmp_path / "named", version) if version else tmp_path
        monkeypatch.setenv("COMFYUI_PATH", str(named))
        with pytest.raises(SandboxError, match=said):
            sandbox_install.find_comfyui(tmp_path / "cache")

    def test_the_one_around_the_pack(self, tmp_path, monkeypatch):
        monkeypatch.delenv("COMFYUI_PATH", raising=False)
        around = fake_comfyui(tmp_path / "ComfyUI")
        folder, why = sandbox_install.find_comfyui(tmp_path / "cache", (around / "custom_nodes" / "pack",))
        assert folder == around
        assert "in which this pack lies" in why

    def test_one_that_is_too_old_is_passed_over_aloud(self, tmp_path, monkeypatch):
        monkeypatch.delenv("COMFYUI_PATH", raising=False)
        around = fake_comfyui(tmp_path / "ComfyUI", "0.3.60")
        folder, why = sandbox_install.find_comfyui(tmp_path / "cache", (around / "custom_nodes" / "pack",))
        assert folder == tmp_path / "cache"
        assert "0.3.60" in why

    def test_otherwise_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.delenv("COMFYUI_PATH", raising=False)
        folder, _ = sandbox_install.find_comfyui(tmp_path / "cache", (tmp_path / "pack",))
        assert folder == tmp_path / "cache"


@pytest.mark.parametrize(
    ("requirements", "wanted"),
    [
        ("av\ncomfy-kitchen==0.2.26\n", "comfy-kitchen==0.2.31"),
        ("comfy-kitchen==0.2.31", None),
        ("comfy-kitchen>=0.2.40\n", None),
        ("comfy-kitchen==0.10.0", None),  # numbers, not text
        ("torch\n", "comfy-kitchen==0.2.31"),
    ],
)
def test_kitchen_is_raised_but_never_lowered(requirements, wanted):
    assert sandbox_install.kitchen_requirement(requirements) == wanted


def test_hash_of_files_sees_contents_and_names(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = sandbox_install.hash_of_files(tmp_path, ("*.py",))
    (tmp_path / "a.py").write_text("2")
    second = sandbox_install.hash_of_files(tmp_path, ("*.py",))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    third = sandbox_install.hash_of_files(tmp_path, ("*.py",))
    assert len({first, second, third}) == 3


class TestBaseDirectory:
    def pack(self, folder: Path) -> Path:
        (folder / ".git").mkdir(parents=True)
        (folder / "__init__.py").write_text("version = 1")
        return folder

    def test_the_pack_is_linked_and_a_second_call_changes_nothing(self, tmp_path):
        pack = self.pack(tmp_path / "pack")
        for _ in range(2):
            base = make_base_directory(tmp_path / "base", pack)
        assert (base / "custom_nodes" / "h3-blackwell-runtime" / "__init__.py").read_text() == "version = 1"
        assert (base / "models" / "diffusion_models").is_dir()

    def test_a_link_to_another_pack_is_replaced(self, tmp_path):
        make_base_directory(tmp_path / "base", self.pack(tmp_path / "old"))
        new = self.pack(tmp_path / "new")
        base = make_base_directory(tmp_path / "base", new)
        assert (base / "custom_nodes" / "h3-blackwell-runtime").resolve() == new.resolve()

    def test_where_links_are_forbidden_it_is_copied_afresh(self, tmp_path, monkeypatch):
        def forbidden(*_, **__):
            raise OSError("privilege not held")

        pack = self.pack(tmp_path / "pack")
        monkeypatch.setattr(Path, "symlink_to", forbidden)
        make_base_directory(pack / "own-sandbox" / "base", pack)  # inside the pack: must not copy itself
        (pack / "__init__.py").write_text("version = 2")
        base = make_base_directory(pack / "own-sandbox" / "base", pack)
        copy = base / "custom_nodes" / "h3-blackwell-runtime"
        assert (copy / "__init__.py").read_text() == "version = 2"
        assert not (copy / ".git").exists()
        assert not (copy / "own-sandbox" / "base").exists()


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("   0.0 seconds (IMPORT FAILED): /b/custom_nodes/h3-blackwell-runtime", True),
        ("Cannot import /b/custom_nodes/h3-blackwell-runtime module for custom nodes: no module", True),
        ("Error while calling comfy_entrypoint in /b/custom_nodes/h3-blackwell-runtime: boom", True),
        ("comfy_entrypoint in /b/custom_nodes/h3-blackwell-runtime is not callable, skipping.", True),
        ("Skip /b/custom_nodes/h3-blackwell-runtime module for custom nodes due to the lack of", True),
        ("   0.1 seconds: /b/custom_nodes/h3-blackwell-runtime", False),
        ("   0.0 seconds (IMPORT FAILED): /h3-blackwell-runtime/.sandbox/base/custom_nodes/other", False),
    ],
)
def test_import_trouble_is_read_from_the_log(line, bad):
    line = line.replace("custom_nodes/", f"custom_nodes{os.sep}")
    assert import_trouble(f"Starting server\n{line}\n") == ([line.strip()] if bad else [])


@POSIX
class TestServer:
    def server(self, tmp_path: Path, fake: str = "", **options) -> ComfyServer:
        base = make_base_directory(tmp_path / "base", pack=None)
        return ComfyServer(fake_comfyui(tmp_path / "ComfyUI"), base, cpu=True, env={"FAKE": fake}, **options)

    def child(self, server: ComfyServer) -> int:
        return int(server.log_text().split("child ")[1].split()[0])

    def test_it_answers_and_leaves_nothing(self, tmp_path):
        with self.server(tmp_path) as server:
            assert server.get("/system_stats") == {"system": {}}
            pids = [server.process.pid, self.child(server)]
            assert all(alive(pid) for pid in pids)
            with pytest.raises(ServerError, match="answered 404"):
                server.object_info()
        assert all(gone(pid) for pid in pids)

    def test_an_exception_in_the_body_stops_it(self, tmp_path):
        pids = []

        def interrupted():
            with self.server(tmp_path) as server:
                pids.extend([server.process.pid, self.child(server)])
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert len(pids) == 2
        assert all(gone(pid) for pid in pids)

    def test_one_that_ignores_terminate_is_killed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(comfy_server.end_process, "__defaults__", (0.3,))
        with self.server(tmp_path, "stubborn") as server:
            pids = [server.process.pid, self.child(server)]
        assert all(gone(pid) for pid in pids)

    def test_one_that_dies_at_the_start(self, tmp_path):
        server = self.server(tmp_path, "dies")
        with pytest.raises(ServerError, match="exit code 3") as caught:
            server.start()
        assert "no module named einops" in comfy_server.tail(caught.value.log)
        assert server.process is None

    def test_one_that_never_answers(self, tmp_path):
        server = self.server(tmp_path, "silent", start_timeout_s=1.5)
        with pytest.raises(ServerError, match="did not answer within"):
            server.start()
        assert gone(self.child(server))


@POSIX
class TestRunLogged:
    def test_output_goes_to_the_log(self, tmp_path):
        run_logged([sys.executable, "-c", "print('installed')"], tmp_path / "logs" / "x.log", "it")
        assert "installed" in (tmp_path / "logs" / "x.log").read_text()

    def test_failure_names_the_code_and_the_log(self, tmp_path):
        with pytest.raises(SandboxError, match="it failed with exit code 4") as caught:
            run_logged([sys.executable, "-c", "raise SystemExit(4)"], tmp_path / "x.log", "it")
        assert caught.value.log == tmp_path / "x.log"

    def test_past_its_limit_it_is_ended_with_its_children(self, tmp_path):
        code = """
            import subprocess, sys, time
            print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
            time.sleep(300)
        """
        log = tmp_path / "x.log"
        with pytest.raises(SandboxError, match="did not end within"):
            run_logged([sys.executable, "-c", textwrap.dedent(code)], log, "it", limit_s=2.0)
        assert gone(int(log.read_text().splitlines()[-1]))


@POSIX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_leaves_no_process(tmp_path, number):
    """A script that serves as the sandbox does, interrupted from outside."""
    make_base_directory(tmp_path / "base", pack=None)
    code = f"""
        import signal, sys, time
        sys.path.insert(0, {str(comfy_server.PACK_ROOT / "tests")!r})
        from comfy_server import ComfyServer
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with ComfyServer({str(fake_comfyui(tmp_path / "ComfyUI"))!r}, {str(tmp_path / "base")!r}, cpu=True) as server:
            print(server.process.pid, server.log_text().split("child ")[1].split()[0], flush=True)
            time.sleep(300)
    """
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 2
    script.send_signal(number)
    script.communicate(timeout=30)
    assert all(gone(pid) for pid in pids)


def entry(
    kinds: dict[str, str], outputs: dict[str, object], status: str = "success", messages: tuple | list = ()
) -> dict:
    """A run as the server's history has it."""
    graph = {node: {"class_type": kind} for node, kind in kinds.items()}
    state = {"status_str": status, "completed": status == "success", "messages": list(messages)}
    return {"prompt": [0, "id", graph, {}, []], "outputs": outputs, "status": state}


class TestReport:
    PASSED = {
        "rung": "latents",
        "result": "passed",
        "numbers": {"video": {"differing": 0, "max_abs": 0.0}},
        "reason": None,
    }
    SKIPPED = {"rung": "fused", "result": "skipped", "numbers": {"blocks": 2}, "reason": "no CUDA device"}
    FAILED = {"rung": "finite", "result": "failed", "numbers": {"sqnr_db": 12.34567}, "reason": "block 1"}

    def write(self, base: Path, rungs: object) -> Path:
        path = base / "output" / "h3bw" / "report_00001_.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rungs": rungs}))
        return path

    def test_the_file_that_the_history_names_is_read(self, tmp_path):
        path = self.write(tmp_path, [self.PASSED, self.SKIPPED])
        (tmp_path / "output" / "clip.mp4").write_bytes(b"")
        saved = {"filename": path.name, "subfolder": "h3bw", "type": "output"}
        media = {"rung": "media", "result": "passed", "numbers": {"frames": 22}, "reason": None}
        clip = {"filename": "clip.mp4", "subfolder": "", "type": "output"}
        outputs = {
            "1": {"h3bw_report": [saved], "h3bw_rungs": [self.PASSED]},
            "2": {"images": [clip], "h3bw_rungs": [media]},
        }
        kinds = {"1": "H3BW_RuntimeReport", "2": "H3BW_MediaCheck"}
        run = sandbox.collect("t2va", entry(kinds, outputs), tmp_path, [])
        assert run.reports == [path]
        assert run.videos == [tmp_path / "output" / "clip.mp4"]
        assert run.rows == [
            ("report", "latents", "passed", "video.differing=0  video.max_abs=0"),
            ("report", "fused", "skipped", "blocks=2  no CUDA device"),
            ("MediaCheck", "media", "passed", "frames=22"),
        ]
        assert run.trouble() is None

    def test_a_new_file_that_no_node_names_is_found_too(self, tmp_path):
        path = self.write(tmp_path, [self.PASSED])
        run = sandbox.collect("t2va", entry({"1": "H3BW_RuntimeReport"}, {}), tmp_path, [path])
        assert run.reports == [path]

    @pytest.mark.parametrize("kind", ["H3BW_RuntimeReport", "H3BW_MediaCheck"])
    def test_a_node_that_left_nothing_is_an_error(self, tmp_path, kind):
        with pytest.raises(SandboxError, match=f"{kind} ran, but left no"):
            sandbox.collect("t2va", entry({"1": kind}, {}), tmp_path, [])

    def test_a_failed_rung_fails_the_run(self, tmp_path):
        path = self.write(tmp_path, [self.PASSED, self.FAILED])
        run = sandbox.collect("t2va", entry({"1": "H3BW_RuntimeReport"}, {}), tmp_path, [path])
        assert run.trouble() == "t2va: 1 of 2 rungs failed: finite"
        assert run.rows[1] == ("report", "finite", "failed", "sqnr_db=12.35  block 1")

    def test_all_skipped_shows_nothing(self, tmp_path):
        path = self.write(tmp_path, [self.SKIPPED])
        run = sandbox.collect("t2va", entry({"1": "H3BW_RuntimeReport"}, {}), tmp_path, [path])
        assert "every rung was skipped" in run.trouble()

    @pytest.mark.parametrize(
        "rungs", [[], {}, None, [{"rung": "a", "result": "ok"}], [{"result": "passed"}], ["passed"]]
    )
    def test_a_malformed_report_is_an_error(self, tmp_path, rungs):
        path = self.write(tmp_path, rungs)
        with pytest.raises(SandboxError, match="rung"):
            sandbox.collect("t2va", entry({"1": "H3BW_RuntimeReport"}, {}), tmp_path, [path])

    def test_table_is_in_columns(self):
        rows = [sandbox.Row("t2va", "a long name", "passed", "x=1"), sandbox.Row("MediaCheck", "b", "skipped", "")]
        assert sandbox.table(rows).splitlines() == [
            "  from        rung         result   numbers",
            "  t2va        a long name  passed   x=1",
            "  MediaCheck  b            skipped",
        ]

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (123456789, "123456789"), (1.0, "1"), (0.000123456, "0.0001235"), (True, "true"), ("bf16", "bf16")]
        + [(None, "null"), ([1, 2], "[1, 2]"), (float("inf"), "inf"), (float("nan"), "nan")],
    )
    def test_numbers_are_short_and_true(self, value, text):
        assert sandbox.number(value) == text

    def test_the_failing_node_is_named(self):
        message = ["execution_error", {"node_type": "KSampler", "exception_message": "head_dim must be 64\n"}]
        run = entry({}, {}, "error", [["execution_start", {}], message])
        assert sandbox.failure(run) == "KSampler: head_dim must be 64"
        assert sandbox.failure(entry({}, {})) is None


@pytest.mark.parametrize("file", sandbox.SHIPPED_WORKFLOWS)
def test_the_demo_shows_parity_and_media(file):
    graph = json.loads((comfy_server.PACK_ROOT / file).read_text("utf-8"))
    assert {"H3BW_RuntimeReport", "H3BW_MediaCheck"} <= {node["class_type"] for node in graph.values()}


class TestStages:
    def test_seconds_a_heartbeat_and_the_end(self):
        out = io.StringIO()
        stages = sandbox.Stages(2, out, beat_s=0.05)
        with stages.stage("torch") as notes:
            time.sleep(0.2)
            notes.append("installed")
        assert "[1/2] torch ... 0 s so far\n" in out.getvalue()
        last = out.getvalue().splitlines()[-1]
        assert last.startswith("[1/2] torch ... 0.")
        assert last.endswith("s (installed)")

    def test_a_failed_stage_says_so(self):
        out = io.StringIO()
        stages = sandbox.Stages(2, out)
        with pytest.raises(SandboxError), stages.stage("torch"):
            raise SandboxError("no room")
        assert "[1/2] torch ... failed after" in out.getvalue()
        assert stages.title == "torch"


def test_unknown_command_and_help(capsys):
    assert sandbox.main(["dmeo"]) == 2
    assert "there is no command dmeo" in capsys.readouterr().err
    assert sandbox.main(["--help"]) == 0
    assert "COMFYUI_PATH" in capsys.readouterr().out


class TestConftest:
    def test_the_packs_root_is_not_on_sys_path(self):
        assert comfy_server.PACK_ROOT not in [Path(entry or ".").resolve() for entry in sys.path]

    def test_kernels_need_no_comfyui(self):
        code = "import sys, conftest; conftest.pack_module('kernels.nvfp4'); sys.exit('comfy' in sys.modules)"
        tests = comfy_server.PACK_ROOT / "tests"
        env = comfy_server.clean_environment({"H3BW_COMFYUI": "", "COMFYUI_PATH": ""})
        subprocess.run([sys.executable, "-c", code], cwd=tests, env=env, check=True, timeout=300)

    def test_import_nodes_is_comfyuis_and_not_the_folder_of_tests(self, comfy):
        import nodes

        assert Path(nodes.__file__).parent == comfyui_folder()

    def test_comfyui_writes_into_a_base_of_its_own(self, comfy):
        import folder_paths

        output = Path(folder_paths.get_output_directory())
        assert output.is_dir()
        assert comfyui_folder() not in output.parents

    def test_a_gpu_test_is_skipped_with_the_reason_where_there_is_none(self, monkeypatch):
        import torch

        class Marked:
            def get_closest_marker(self, name):
                return name == "gpu"

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(pytest.skip.Exception, match="sees no CUDA device"):
            conftest.pytest_runtest_setup(Marked())
