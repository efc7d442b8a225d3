"""The probe: what it finds, what it advises, and that nothing it meets stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

install = pack_module("install")

NOWHERE = install.Package("no-such-thing", "no_such_thing", "no-such-thing>=1", "nothing", note="made up")
KINDS = (ImportError, OSError, AssertionError, RuntimeError, SyntaxError)


class Raising:
    """A meta-path finder under which importing ``module`` raises ``kind``."""

    def __init__(self, module, kind):
        self.module, self.kind = module, kind

    def find_spec(self, name, path=None, target=None):
        if name == self.module or name.startswith(f"{self.module}."):
            raise self.kind(f"{name} is broken")


@pytest.fixture
def broken(monkeypatch):
    """Make the import of a package raise, also where it was imported before."""

    def break_(module, kind):
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Raising(module, kind), *sys.meta_path])

    return break_


def script(*arguments, python=("-I",)):
    # -S in `python` leaves site-packages out: the standard library alone.
    command = [sys.executable, *python, str(PACK_ROOT / "install.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


# ---------------------------------------------------------------- capability table

CAPABILITIES = [
    ("8.0", False, "dequantised", "no FP4 tensor cores"),
    ("8.6", False, "dequantised", "no FP4 tensor cores"),
    ("8.9", False, "dequantised", "no FP4 tensor cores"),
    ("9.0", False, "dequantised", "no FP4 tensor cores"),
    ("10.0", False, "fp4_gemm", "sm_10x family: B200"),
    ("10.3", False, "fp4_gemm", "sm_10x family: B200 and B300"),
    ("11.0", False, "fp4_gemm", "sm_11x family: Thor"),
    ("12.0", False, "fp4_gemm", "sm_12x family: RTX 50"),
    ("12.1", False, "fp4_gemm", "and GB10"),
    ("13.0", False, "fp4_gemm", "newer than this version knows"),
    (None, False, "reference", "no CUDA device"),
    ("gfx1201", False, "reference", "'gfx1201' is not understood"),
    ("", False, "reference", "not understood"),
    ("9.4", True, "reference", "AMD (HIP)"),
    ("12.0", True, "reference", "AMD (HIP)"),
    (None, True, "reference", "AMD (HIP)"),
]


@pytest.mark.parametrize(("cc", "hip", "path", "reason"), CAPABILITIES)
def test_capability_table(cc, hip, path, reason):
    found = install.describe_capability(cc, hip=hip)
    assert found["path"] == path
    assert reason in found["reason"]


def test_capability_as_a_pair_says_the_same():
    for cc, hip, _, _ in CAPABILITIES:
        if cc and cc[0].isdigit():
            pair = tuple(int(number) for number in cc.split("."))
            assert install.describe_capability(pair, hip=hip) == install.describe_capability(cc, hip=hip)


def test_gpus_are_described_one_by_one():
    cards = [("GB10", 12, 1, 128 << 30), ("H200", 9, 0, 141 << 30)]
    fields = ("name", "major", "minor", "total_memory")
    cuda = SimpleNamespace(
        device_count=lambda: len(cards),
        get_device_properties=lambda index: SimpleNamespace(**dict(zip(fields, cards[index], strict=True))),
    )
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    first, second = install._gpus(torch)
    assert (first["name"], first["capability"], first["memory_bytes"]) == ("GB10", "12.1", 128 << 30)
    assert (first["path"], second["path"]) == ("fp4_gemm", "dequantised")
    torch.version.hip = "6.2"
    assert {gpu["path"] for gpu in install._gpus(torch)} == {"reference"}


# ---------------------------------------------------------------- packages


def test_probe_is_json_and_complete():
    report = install.probe()
    assert json.loads(json.dumps(report)) == report
    assert list(report["packages"]) == [package.name for package in install.PACKAGES]
    assert report["packages"]["comfy-kitchen"]["imports"]
    assert report["torch"]["imports"]
    assert report["default_path"]["path"] == "reference"


def test_a_missing_package_has_its_command():
    found = install._package(NOWHERE, True)
    assert (found["version"], found["imports"]) == (None, False)
    assert found["reason"] == "not installed (No module named 'no_such_thing')"
    assert found["install"].endswith('-m pip install "no-such-thing>=1"')
    assert found["note"] == "made up"
    assert install._package(NOWHERE, False)["reason"] == "not installed"


@pytest.mark.parametrize("package", install.PACKAGES, ids=lambda package: package.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_raises_is_a_reason(broken, package, kind):
    broken(package.module.split(".")[0], kind)
    found = install._package(package, True)
    assert found["imports"] is False
    assert found["reason"] == f"{kind.__name__}: {package.module.split('.')[0]} is broken"
    assert (found["install"] is None) == (package.requirement == "")


def test_a_broken_installed_package_is_put_there_again(broken):
    broken("av", OSError)
    command = install._package(next(package for package in install.PACKAGES if package.name == "av"), True)["install"]
    assert command.endswith('-m pip install --force-reinstall --no-deps "av>=16.0.0"')


def test_no_import_imports_nothing(broken):
    broken("av", OSError)
    report = install.probe(import_packages=False)
    assert {package["imports"] for package in report["packages"].values()} == {None}
    assert report["packages"]["av"]["reason"] is None
    assert report["torch"]["version"]
    assert report["gpus"] == []


def test_pip_commands_run_in_a_shell(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/py/bin/python3")
    assert install.pip_command("av>=16.0.0") == '/opt/py/bin/python3 -m pip install "av>=16.0.0"'
    monkeypatch.setattr(sys, "executable", r"C:\Program Files\py\python.exe")
    assert install.pip_command("av") == r'"C:\Program Files\py\python.exe" -m pip install av'


def test_triton_is_the_one_torch_asks_for(monkeypatch):
    wanted = ["filelock", "triton-extra==1", 'triton==3.8.0; platform_system == "Linux"']
    monkeypatch.setattr(install.metadata, "requires", lambda name: wanted[2:])
    assert install._triton_requirement() == "triton==3.8.0"
    monkeypatch.setattr(install.metadata, "requires", lambda name: wanted[:1])
    assert install._triton_requirement() in ("triton", "triton-windows")


# ---------------------------------------------------------------- versions and warnings


def report(**changes):
    """A report without warnings, with changes."""
    base = {
        "comfyui": "0.33.0",
        "driver": "580.95.05",
        "torch": {"version": "2.14.1+cu130", "cuda": "13.0", "hip": None, "imports": True, "reason": None},
        "packages": {"comfy-kitchen": {"version": "0.2.26", "needed": True, "reason": None, "install": None}},
    }
    return {**base, **changes}


def torch_facts(**changes):
    return {**report()["torch"], **changes}


def test_nothing_to_warn_about(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", SimpleNamespace(**dict.fromkeys(install.KITCHEN_NAMES)))
    assert install._warnings(report()) == []


@pytest.mark.parametrize(
    ("cuda", "warned"), [("11.8", True), ("12.8", True), ("12.9", True), ("13.0", False), ("13.1", False)]
)
def test_torch_for_an_old_cuda(cuda, warned):
    warnings = install._warnings(report(torch=torch_facts(version=f"2.9.1+cu{cuda}", cuda=cuda)))
    assert any(f"built for CUDA {cuda}" in text and "slower than bf16" in text for text in warnings) == warned


def test_torch_without_cuda_beside_a_driver():
    cpu = torch_facts(version="2.14.1+cpu", cuda=None)
    assert any("built without CUDA" in text and "580.95.05" in text for text in install._warnings(report(torch=cpu)))
    assert install._warnings(report(torch=cpu, driver=None)) == []
    assert install._warnings(report(torch={**cpu, "hip": "6.2"})) == []


def test_old_comfyui():
    assert "ComfyUI 0.29.1 does not know MiniMax H3" in install._warnings(report(comfyui="0.29.1"))[0]
    assert install._warnings(report(comfyui="0.30.0")) == []
    assert install._warnings(report(comfyui=None)) == []


def test_torch_that_does_not_import():
    facts = torch_facts(imports=False, reason="OSError: libcudart.so.13")
    assert "torch: OSError: libcudart.so.13" in install._warnings(report(torch=facts))[0]


def test_a_needed_package_that_is_missing():
    missing = {"version": None, "needed": True, "reason": "not installed", "install": "pip install av"}
    packages = {**report()["packages"], "av": missing, "sageattn3": {**missing, "needed": False}}
    assert install._warnings(report(packages=packages)) == ["av is needed: not installed; run: pip install av"]


@pytest.mark.parametrize("version", ["0.2.25", "0.2.3", "0.1.99"])
def test_old_kitchen_names_both_versions(version):
    (text,) = install._kitchen_warnings(version, None)
    assert f"comfy-kitchen {version} is installed, 0.2.26 or newer is needed" in text
    assert text.endswith('-m pip install --upgrade "comfy-kitchen>=0.2.26"')


def test_new_kitchen_without_a_name():
    module = SimpleNamespace(**dict.fromkeys(install.KITCHEN_NAMES[1:]))
    (text,) = install._kitchen_warnings("0.9.0", module)
    assert text.startswith(f"comfy-kitchen 0.9.0 has no {install.KITCHEN_NAMES[0]}, which 0.2.26 has")


def test_the_installed_kitchen_has_the_names():
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    assert install._kitchen_warnings(install._version("comfy-kitchen"), kitchen) == []


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.14.1+cu130", (2, 14, 1)), ("0.2.26", (0, 2, 26)), ("13.0", (13, 0)), ("4.0.0b27", (4, 0, 0)), ("dev", ())],
)
def test_versions_compare_by_number(version, numbers):
    assert install._release(version) == numbers


def test_comfyui_is_found_around_the_pack(monkeypatch, tmp_path):
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "My-Pack.v2"
    pack.mkdir(parents=True)
    monkeypatch.setattr(install, "__file__", str(pack / "install.py"))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert install.comfyui_version() is None
    (tmp_path / "ComfyUI" / "comfyui_version.py").write_text('# generated\n__version__ = "0.31.2"\n')
    assert install.comfyui_version() == "0.31.2"


def test_a_driver_that_does_not_answer_is_a_finding(monkeypatch):
    def gpus(torch):
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(install, "_gpus", gpus)
    found = install.probe()
    assert found["gpus"] == []
    assert found["torch"]["reason"] == "the GPUs do not answer (RuntimeError: CUDA unknown error)"
    assert any("the GPUs do not answer" in text for text in found["warnings"])


# ---------------------------------------------------------------- the text and the script


def test_text_shows_gpus_reasons_and_commands(broken):
    broken("av", OSError)
    found = install.probe()
    gpu = {"index": 0, "name": "NVIDIA GB10", "capability": "12.1", "memory_bytes": 120 << 30}
    text = install.text({**found, "gpus": [{**gpu, **install.describe_capability("12.1")}]})
    assert "GPU 0: NVIDIA GB10, cc 12.1, 120.0 GiB" in text
    assert "fp4_gemm: compute capability 12.1" in text
    assert "needed: video and audio files): OSError: av is broken" in text
    assert found["packages"]["av"]["install"] in text
    assert "av is needed: OSError: av is broken; run: " in text


def test_script_prints_json_alone():
    done = script("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["packages"]["comfy-kitchen"]["imports"] is True


def test_script_runs_on_the_standard_library_alone():
    done = script("--json", python=("-I", "-S"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {package["imports"] for package in found["packages"].values()} == {False}
    assert found["torch"] == {"version": None, "cuda": None, "hip": None, "imports": False, "reason": "not installed"}
    needed = [package.name for package in install.PACKAGES if package.needed]
    assert len([text for text in found["warnings"] if "is needed" in text]) == len(needed)
    done = script(python=("-I", "-S"))
    assert done.returncode == 0, done.stderr
    assert "Warnings" in done.stdout


def test_script_without_imports_is_quick():
    done = script("--no-import")
    assert done.returncode == 0, done.stderr
    assert "GPUs: not asked (--no-import)" in done.stdout


# ---------------------------------------------------------------- the node


@pytest.fixture
def environment(pack):
    return pack_module("nodes.environment")


def test_node_shows_the_probe_and_the_backends(environment):
    output = environment.Environment.execute()
    (text,) = output.args
    assert output.ui.as_dict() == {"text": (text,)}
    assert "H3 Blackwell Runtime: environment" in text
    assert "Attention on cpu\n  sdpa (exact): runs\n" in text
    assert "\n  kitchen_int8 (approximate): needs a CUDA device" in text


def test_node_shows_no_path(environment, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/secret/bin/python3")
    text = environment.describe()
    assert "python3 -m pip install" in text
    assert "/opt" not in text


def test_node_is_not_cached_and_has_tooltips(environment):
    first, second = (environment.Environment.fingerprint_inputs() for _ in range(2))
    assert first != second
    schema = environment.Environment.define_schema()
    assert schema.node_id == "H3BW_Environment"
    assert schema.category == "H3 Blackwell/diagnostics"
    assert schema.is_output_node
    assert all(output.tooltip for output in schema.outputs)
