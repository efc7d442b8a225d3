"""The files of deploy/, parsed: variables, pins, healthcheck, mounts, and that no weights can get in.

There is no Docker engine here, so nothing is built. What of it runs without one (the healthcheck's command, the warm-up
script, the extra paths) is run against a real ComfyUI in ``headless/test_deployment_smoke.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

yaml = pytest.importorskip("yaml", reason="PyYAML comes with ComfyUI")

DEPLOY = PACK_ROOT / "deploy"
BASE = "ghcr.io/aeon-7/comfyui-aeon-spark:slim"
READY = "/h3bw/ready"
# As the record has them.
VARIABLES = {
    "H3_DISABLE_MMAP": "1",
    "H3_NVFP4_SCALE_BACKEND": "vortex",
    "H3_NVFP4_SCALE_VERSION": "1",
    "H3_FUSED_ELEMENTWISE": "1",
    "H3_NVFP4_MODULATE_FUSION": "1",
    "H3_NVFP4_SWIGLU_FUSION": "1",
    "H3_SAGE_QKV_LAYOUT": "strided_nhd",
    "H3_SOL_QKV_LAYOUT": "native",
}
PINS = {
    "COMFY_KITCHEN": "0.2.31",
    "CUTLASS_DSL": "4.6.2",
    "FLASH_ATTN_4": "4.0.0b27",
    "QUACK_KERNELS": "0.6.4",
    "SOL_ATTN_COMMIT": "930a4d6e432ff8b8ed5e30ff2f72519b92d69bdf",
    "SAGE_ATTENTION_COMMIT": "d1a57a546c3d395b1ffcbeecc66d81db76f3b4b5",
}
INSTALLED = {
    "COMFY_KITCHEN": "comfy-kitchen==${COMFY_KITCHEN}",
    "CUTLASS_DSL": "nvidia-cutlass-dsl[cu13]==${CUTLASS_DSL}",
    "FLASH_ATTN_4": "flash-attn-4==${FLASH_ATTN_4}",
    "QUACK_KERNELS": "quack-kernels==${QUACK_KERNELS}",
    "SOL_ATTN_COMMIT": 'https://github.com/Saganaki22/ComfyUI-sol-attn.git "${SOL_ATTN_COMMIT}"',
    "SAGE_ATTENTION_COMMIT": "git+https://github.com/thu-ml/SageAttention.git@${SAGE_ATTENTION_COMMIT}",
}
PACK_IN_IMAGE = "/opt/h3bw/custom_nodes/h3-blackwell-runtime/"
COPIED = [(".", PACK_IN_IMAGE), ("deploy/paths.yaml deploy/warm_up.py", "/opt/h3bw/")]
WEIGHTS = re.compile(r"huggingface|hf_hub|civitai|download_models|\.safetensors|\.gguf|\.ckpt|/models\b|weights/", re.I)


def text(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


# ---------------------------------------------------------------- small parsers


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """``(INSTRUCTION, rest)`` of a Dockerfile: comments dropped, continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


def of(parsed: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in parsed if name == word]


def environment(parsed: list[tuple[str, str]]) -> dict[str, str]:
    pairs = (pair.partition("=") for rest in of(parsed, "ENV") for pair in shlex.split(rest))
    return {name: value for name, _, value in pairs}


def arguments(parsed: list[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, _, value in (rest.partition("=") for rest in of(parsed, "ARG"))}


def healthcheck(parsed: list[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """``(options, command)`` of the one HEALTHCHECK, whose command is a JSON list."""
    (rest,) = of(parsed, "HEALTHCHECK")
    head, _, command = rest.partition("CMD ")
    return dict(re.findall(r"--([\w-]+)=(\S+)", head)), json.loads(command)


def in_context(path: str, patterns: list[str]) -> bool:
    """Whether a .dockerignore lets a file in: the last pattern that fits it or a folder above it decides."""
    inside = True
    above = [path, *(str(parent) for parent in PurePosixPath(path).parents if str(parent) != ".")]
    for pattern in patterns:
        keep, bare = pattern.startswith("!"), pattern.removeprefix("!")
        depth = bare.count("/")
        for candidate in above:
            name = candidate.rsplit("/", 1)[-1] if bare.startswith("**/") else candidate
            same_depth = bare.startswith("**/") or candidate.count("/") == depth
            if same_depth and fnmatch(name, bare.removeprefix("**/")):
                inside = keep
    return inside


def ignore_patterns() -> list[str]:
    lines = (line.strip() for line in text("Dockerfile.spark.dockerignore").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


# ---------------------------------------------------------------- what is wrong with a deployment


def faults(dockerfile: str, compose_text: str) -> list[str]:
    """Everything that breaks a promise of deploy/README.md; empty for the files as they are."""
    parsed, compose = instructions(dockerfile), yaml.safe_load(compose_text)
    return [*faults_of_image(parsed), *faults_of_compose(compose, healthcheck(parsed)[1])]


def faults_of_image(parsed: list[tuple[str, str]]):
    if of(parsed, "FROM") != [BASE]:
        yield f"base is {of(parsed, 'FROM')}"
    given, steps = arguments(parsed), " ".join(of(parsed, "RUN"))
    installing = " ".join(step for step in of(parsed, "RUN") if "pip install" in step or "git init" in step)
    for name, value in PINS.items():
        if given.get(name) != value:
            yield f"pin {name} is {given.get(name)}"
        if INSTALLED[name] not in installing:
            yield f"pin {name} is not what is installed"
    unused = [name for name in given if f"${{{name}}}" not in steps]
    if unused:
        yield f"arguments without use: {unused}"
    found = environment(parsed)
    for name, value in VARIABLES.items():
        if found.get(name) != value:
            yield f"image: {name} is {found.get(name)}"
    options, command = healthcheck(parsed)
    yield from faults_of_check("image", command, options.get("start-period"))
    copies = [tuple(rest.rsplit(" ", 1)) for rest in of(parsed, "COPY")]
    if copies != COPIED or of(parsed, "ADD"):
        yield f"copies are {copies} {of(parsed, 'ADD')}"
    for word, rest in parsed:
        if word != "LABEL" and WEIGHTS.search(rest.replace("SKIP_MODEL_DOWNLOAD", "")):
            yield f"weights: {word} {rest}"
    if found.get("SKIP_MODEL_DOWNLOAD") != "1":
        yield "weights: the base would download models"


def faults_of_check(where: str, command: list[str], start: str | None):
    words = " ".join(command)
    if f"127.0.0.1:8188{READY}'" not in words or command[:2] != ["python", "-c"] or len(command) != 3:
        yield f"{where}: healthcheck is {command}"
    if not start or int(start.rstrip("s")) < 60:
        yield f"{where}: start period is {start}"


def faults_of_compose(compose: dict, image_check: list[str]):
    service = compose["services"]["comfyui"]
    for name, value in VARIABLES.items():
        if service["environment"].get(name) != value:
            yield f"compose: {name} is {service['environment'].get(name)}"
    first, *check = service["healthcheck"]["test"]
    if first != "CMD" or check != image_check:
        yield "compose: another healthcheck than the image's"
    yield from faults_of_check("compose", check, service["healthcheck"].get("start_period"))
    for port in service["ports"]:
        if not re.fullmatch(r"127\.0\.0\.1:\$\{H3_PORT:-8188\}:8188", str(port)):
            yield f"port {port} is not bound to loopback"
    models = [volume for volume in service["volumes"] if re.search(r":/models(?::|$)", volume)]
    if len(models) != 1 or not models[0].endswith(":/models:ro") or not models[0].startswith("${H3_MODELS:?"):
        yield f"models are mounted as {models}"
    for name, each in compose["services"].items():
        loose = {"privileged", "network_mode", "ipc", "pid", "cap_add", "devices"} & each.keys()
        if loose or "no-new-privileges:true" not in each.get("security_opt", ()):
            yield f"{name} has more rights than it needs: {sorted(loose)}"
    if service["build"] != {"context": "..", "dockerfile": "deploy/Dockerfile.spark"}:
        yield f"built from {service['build']}"


def test_the_files_keep_their_promises():
    assert faults(text("Dockerfile.spark"), text("compose.spark.yml")) == []


BROKEN_IMAGE = [
    ("spark:slim\n\nSHELL", "spark:full\n\nSHELL", "base is"),
    ("COMFY_KITCHEN=0.2.31", "COMFY_KITCHEN=0.2.40", "pin COMFY_KITCHEN is 0.2.40"),
    ("FLASH_ATTN_4=4.0.0b27", "FLASH_ATTN_4=4.0.0", "pin FLASH_ATTN_4"),
    ('"quack-kernels==${QUACK_KERNELS}"\n\n', '"quack-kernels"\n\n', "pin QUACK_KERNELS is not what is installed"),
    ("ARG MAX_JOBS=4", "ARG MAX_JOBS=4\nARG OTHER=1", "arguments without use: ['OTHER']"),
    ("git@${SAGE_ATTENTION_COMMIT}", "git@main", "pin SAGE_ATTENTION_COMMIT is not what is installed"),
    ("H3_NVFP4_SCALE_VERSION=1", "H3_NVFP4_SCALE_VERSION=2", "image: H3_NVFP4_SCALE_VERSION is 2"),
    ("    H3_NVFP4_SWIGLU_FUSION=1 \\\n", "", "image: H3_NVFP4_SWIGLU_FUSION is None"),
    ("8188/h3bw/ready", "8188/h3bw/health", "image: healthcheck is"),
    ('["python", "-c", "import urllib', '["curl", "-f", "import urllib', "image: healthcheck is"),
    ("--start-period=900s", "--start-period=5s", "image: start period is 5s"),
    ("EXPOSE 8188", "COPY models /models", "copies are"),
    ("EXPOSE 8188", "RUN hf_hub_download x", "weights: RUN"),
    ("EXPOSE 8188", "ADD https://example.org/h3.safetensors /x", "weights: ADD"),
    ("SKIP_MODEL_DOWNLOAD=1", "SKIP_MODEL_DOWNLOAD=0", "the base would download"),
]
BROKEN_COMPOSE = [
    ("H3_DISABLE_MMAP: \"1\"", "H3_DISABLE_MMAP: \"0\"", "compose: H3_DISABLE_MMAP is 0"),
    ("      H3_SOL_QKV_LAYOUT: native\n", "", "compose: H3_SOL_QKV_LAYOUT is None"),
    ("8188/h3bw/ready", "8188/system_stats", "another healthcheck than the image's"),
    ("start_period: 900s", "start_period: 1s", "compose: start period is 1s"),
    ("127.0.0.1:${H3_PORT", "0.0.0.0:${H3_PORT", "not bound to loopback"),
    ("127.0.0.1:${H3_PORT:-8188}:8188", "8188:8188", "not bound to loopback"),
    (":/models:ro", ":/models", "models are mounted as"),
    ("    restart: unless-stopped", "    privileged: true", "more rights than it needs: ['privileged']"),
    ("    restart: unless-stopped", "    network_mode: host", "more rights than it needs"),
    ("dockerfile: deploy/Dockerfile.spark", "dockerfile: Dockerfile", "built from"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "fault"), BROKEN_IMAGE, ids=lambda value: str(value)[:30])
def test_a_broken_image_is_noticed(old, new, fault):
    whole = text("Dockerfile.spark")
    assert old in whole
    found = faults(whole.replace(old, new, 1), text("compose.spark.yml"))
    assert any(fault in each for each in found), found


@pytest.mark.parametrize(("old", "new", "fault"), BROKEN_COMPOSE, ids=lambda value: str(value)[:30])
def test_a_broken_composition_is_noticed(old, new, fault):
    whole = text("compose.spark.yml")
    assert old in whole
    found = faults(text("Dockerfile.spark"), whole.replace(old, new, 1))
    assert any(fault in each for each in found), found


def test_the_variables_mean_something_to_the_pack(comfy):
    known = pack_module("nodes.readiness").VARIABLES
    assert known.keys() == VARIABLES.keys()
    assert [name for name, value in VARIABLES.items() if value not in known[name]] == []
    assert pack_module("nodes.routes").READY == READY


def test_comfyui_takes_the_flags(comfy):
    from comfy.cli_args import parser

    flags = environment(instructions(text("Dockerfile.spark")))["COMFYUI_FLAGS"]
    found = parser.parse_args(shlex.split(flags))
    assert (found.listen, found.port) == ("0.0.0.0", 8188)
    assert found.extra_model_paths_config == [["/opt/h3bw/paths.yaml"]]
    assert not found.use_sage_attention, "the workflow's node chooses attention"


def test_paths_fit_together():
    paths = yaml.safe_load(text("paths.yaml"))
    packs = paths["h3bw"]
    assert PACK_IN_IMAGE.startswith(f"{packs['base_path']}/{packs['custom_nodes']}/")
    assert paths["models"]["base_path"] == "/models"
    service = yaml.safe_load(text("compose.spark.yml"))["services"]["warm-up"]
    assert service["entrypoint"] == ["python", "/opt/h3bw/warm_up.py"]
    url, workflow = service["command"]
    assert url == "http://comfyui:8188"
    assert (PACK_ROOT / workflow.removeprefix(PACK_IN_IMAGE)).is_file()
    assert service["read_only"] is True and service["healthcheck"] == {"disable": True}


def test_only_what_the_nodes_need_gets_into_the_image():
    patterns = ignore_patterns()
    assert patterns[0] == "*", "everything is left out that is not named"
    files = (path.relative_to(PACK_ROOT).as_posix() for path in PACK_ROOT.rglob("*") if path.is_file())
    inside = {path for path in files if in_context(path, patterns)}
    tops = {path.split("/")[0] for path in inside}
    assert tops <= {
        "__init__.py", "install.py", "pyproject.toml", "node_list.json", "README.md", "CHANGELOG.md", "LICENSE",
        "nodes", "kernels", "workflows", "web", "locales", "deploy",
    }  # fmt: skip
    needed = {"__init__.py", "pyproject.toml", "nodes/warmup.py", "kernels/certify.py", "deploy/warm_up.py"}
    assert needed | {"workflows/api/deployment_smoke.json", "deploy/paths.yaml"} <= inside


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("nodes/warmup.py", True),
        ("kernels/attention/backends/sol.py", True),
        ("models/diffusion_models/h3.safetensors", False),
        ("nodes/h3.safetensors", False),
        ("kernels/deep/er/h3.gguf", False),
        ("weights/h3.bin", False),
        ("tests/conftest.py", False),
        (".git/config", False),
        ("research/records/run.json", False),
        ("nodes/__pycache__/load.cpython-312.pyc", False),
        ("nodes.txt", False),
    ],
)
def test_the_context(path, inside):
    assert in_context(path, ignore_patterns()) is inside


def test_the_readme_says_what_was_not_done():
    words = " ".join(text("README.md").split())
    assert "Not built" in words and "digest" in words and "docker inspect" in words
    for value in (*PINS.values(), *VARIABLES, READY):
        assert value in words, value
