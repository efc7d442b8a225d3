"""The warm-up node and the state behind the routes, on a CPU with the tiny model: what is said, and when it stops."""

import asyncio
import gc
import json
import logging
import sys
import types
import weakref

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, fuse, run_of, selftest

pytestmark = pytest.mark.usefixtures("pack")
GIVEN = {"width": 64, "height": 64, "frames": 22, "steps": 1}


@pytest.fixture
def readiness(pack, monkeypatch):
    """The module as in a fresh process, with nothing loaded."""
    import comfy.model_management

    module, run = pack_module("nodes.readiness"), pack_module("nodes.run")
    comfy.model_management.unload_all_models()
    monkeypatch.setattr(module, "_now", module.WarmUp())
    monkeypatch.setattr(module, "_generation", 0)
    monkeypatch.setattr(run, "_latest", None)
    yield module
    comfy.model_management.interrupt_current_processing(False)


def warm(model, **changes):
    return pack_module("nodes.warmup").Warmup.execute(model, **{**GIVEN, **changes})


def patched():
    return attend(fuse(selftest()[0]))


def test_the_model_comes_out_as_it_went_in_and_the_text_says_what_ran(readiness):
    model = patched()
    before = dict(model.model_options["transformer_options"])
    out = warm(model)
    assert out.result[0] is model and out.result[1] == out.ui["text"][0]
    assert model.model_options["transformer_options"] == before
    text = out.result[1]
    assert "64x64, 22 frames, 1 steps, on cpu" in text and "fused 3/3 blocks; attention sdpa x" in text
    assert "NVFP4 here: right but slow" in text and "certification: not needed on cpu" in text
    told = readiness.ready()
    assert told["ready"] is True and told["reason"] is None and told["warm_up"]["state"] == "warmed"
    assert told["warm_up"]["shape"] == {"width": 64, "height": 64, "frames": 22, "steps": 1}
    assert told["warm_up"]["blocks"] == told["warm_up"]["blocks_fused"] == 3 and told["warm_up"]["fallbacks"] == []
    assert told["warm_up"]["seconds"] > 0 and told["warm_up"]["nvfp4"].startswith("right but slow")
    initial = told["attention"]["initial"]
    assert initial["asked"] == "auto" and initial["exact"] is True and set(initial["ran"]) == {"sdpa"}
    assert told["options"]["fusion"]["initial"]["mode"] == "exact"
    assert told["options"]["fusion"]["initial"]["emulate"] == "bf16"


def test_the_defaults_are_those_of_the_record(pack):
    schema = pack_module("nodes.warmup").Warmup.define_schema()
    assert {item.id: getattr(item, "default", None) for item in schema.inputs[1:]} == {
        "width": 320, "height": 192, "frames": 22, "steps": 2
    }  # fmt: skip


def test_a_model_without_a_patch_of_ours(readiness):
    """It is warmed up through a clone that notes what ran, and gets nothing itself."""
    model = selftest()[0]
    text = warm(model).result[1]
    assert run_of(model) is None and "attention: ComfyUI's choice, attention_" in text
    told = readiness.ready()
    assert told["ready"] and told["options"]["fusion"]["initial"] is None
    assert told["attention"]["initial"]["asked"] is None and told["attention"]["initial"]["ran"] == {}
    assert told["attention"]["current"]["comfyui"].startswith("attention_")
    assert told["warm_up"]["evaluations"] == 1 and told["warm_up"]["blocks"] == 3


def test_blocks_that_fell_back_are_told_with_the_reason(readiness):
    text = warm(fuse(selftest()[0], emulate="off")).result[1]
    if torch.cuda.is_available():
        pytest.skip("on a GPU the blocks run")
    assert "3 fell back: the stream is on cpu and emulate is off" in text
    told = readiness.ready()["warm_up"]
    assert told["fallbacks"] == [{"reason": "the stream is on cpu and emulate is off", "blocks": 3}]
    assert told["blocks_fused"] == 0


@pytest.mark.parametrize(("asked", "frames"), [(1, 5), (5, 5), (24, 39)])
def test_frames_are_snapped_with_a_message(readiness, asked, frames, caplog):
    caplog.set_level(logging.INFO, "h3bw")
    text = warm(selftest()[0], frames=asked).result[1]
    message = f"length {asked} is not on H3's grid of 17k + 5 frames; using {frames}"
    assert (message in text) is (message in caplog.text) is (asked != frames)
    assert readiness.ready()["warm_up"]["shape"]["frames"] == frames


@pytest.mark.parametrize("changes", [{"width": 80}, {"height": 0}])
def test_a_canvas_off_the_grid_is_refused_before_anything_runs(readiness, changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name} must be a positive multiple of 32, have {value}"):
        warm(selftest()[0], **changes)
    assert readiness.ready()["reason"] == "no warm-up has run in this process"


def test_another_model_is_refused(readiness):
    other = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    with pytest.raises(pack_module("nodes.adapt").NotH3, match="patches MiniMax H3"):
        warm(other)
    assert readiness.ready()["ready"] is False


# ---------------------------------------------------------------- what ends a warm-up


def while_sampling(monkeypatch, act):
    """Call ``act`` in the middle of the warm-up: after its first step."""
    sampling = pack_module("nodes.sampling")
    real = sampling.sample

    def sample(*args, **kwargs):
        return real(*args, **kwargs, on_step=lambda step, x, x0: act())

    monkeypatch.setattr(sampling, "sample", sample)


def test_a_cancel_in_the_middle_leaves_it_not_warmed(readiness, monkeypatch):
    import comfy.model_management

    seen = []

    def act():
        seen.append(readiness.ready())
        comfy.model_management.interrupt_current_processing(True)

    while_sampling(monkeypatch, act)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        warm(patched(), steps=3)
    assert len(seen) == 1 and seen[0]["ready"] is False and seen[0]["reason"] == "the warm-up is running"
    told = readiness.ready()
    assert told["ready"] is False and told["warm_up"]["state"] == "not warmed"
    assert told["reason"] == "the warm-up was cancelled" and told["warm_up"]["seconds"] is None


def test_an_exception_leaves_it_not_warmed_even_after_a_good_one(readiness, monkeypatch, caplog):
    model = patched()
    warm(model)
    assert readiness.ready()["ready"]

    def act():
        raise OSError("cannot read /home/somebody/secret_prompt.safetensors")

    while_sampling(monkeypatch, act)
    with pytest.raises(OSError, match="secret_prompt"):
        warm(model)
    told = readiness.ready()
    assert told["ready"] is False
    assert told["reason"] == "the warm-up stopped with OSError; its text is in ComfyUI's log"
    assert "secret_prompt" not in json.dumps(told) and "secret_prompt" in caplog.text


def test_an_output_that_is_not_finite_is_no_warm_up(readiness, monkeypatch):
    adapt = pack_module("nodes.adapt")
    real, index = adapt.fused_forward, []

    def broken(*arguments):
        index.append(1)
        return real(*arguments) * (float("nan") if len(index) == 2 else 1.0)

    monkeypatch.setattr(adapt, "fused_forward", broken)
    with pytest.raises(pack_module("nodes.warmup").WarmupError, match="block 1 is the first with a non-finite output"):
        warm(patched())
    assert readiness.ready()["reason"] == "the warm-up stopped with WarmupError; its text is in ComfyUI's log"


# ---------------------------------------------------------------- what ends readiness


def test_an_unload_ends_it_and_a_load_of_the_same_weights_brings_it_back(readiness):
    import comfy.model_management

    model = patched()
    warm(model)
    assert readiness.why_not() is None
    comfy.model_management.unload_all_models()
    assert readiness.why_not() == "the model that was warmed up has been unloaded from cpu"
    told = readiness.ready()
    assert told["ready"] is False and told["warm_up"]["state"] == "warmed" and told["reason"].endswith("from cpu")
    other = selftest(seed=3)[0]
    comfy.model_management.load_models_gpu([other])
    assert readiness.why_not() is not None, "another model's weights are not the ones that were warmed up"
    comfy.model_management.load_models_gpu([model.clone()])
    assert readiness.why_not() is None


def test_nothing_keeps_the_model_alive(readiness):
    model = patched()
    warm(model)
    alive = weakref.ref(model.model)
    del model
    gc.collect()
    assert alive() is None
    assert readiness.why_not() == "the model that was warmed up has been freed"
    assert readiness.ready()["ready"] is False


def test_the_node_is_cached_while_the_warm_up_holds(readiness, monkeypatch):
    import comfy.model_management

    node = pack_module("nodes.warmup").Warmup
    model = patched()
    first = node.fingerprint_inputs(**GIVEN)
    assert node.fingerprint_inputs(**GIVEN) == first
    warm(model)
    assert node.fingerprint_inputs(**GIVEN) == first
    warm(model)  # a second warm-up in one graph
    assert node.fingerprint_inputs(**GIVEN) == first
    comfy.model_management.unload_all_models()
    second = node.fingerprint_inputs(**GIVEN)
    assert second != first
    with monkeypatch.context() as patch:
        while_sampling(patch, lambda: comfy.model_management.interrupt_current_processing(True))
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            warm(model, steps=3)
    third = node.fingerprint_inputs(**GIVEN)
    assert third not in (first, second)
    warm(model)
    assert node.fingerprint_inputs(**GIVEN) == third


def test_current_is_what_ran_last(readiness):
    model, positive, latent = selftest()
    warm(attend(fuse(model), "sdpa_math"))
    pack_module("nodes.sampling").sample(attend(fuse(model, mode="off")), positive, latent, 1)
    told = readiness.ready()
    assert told["attention"]["initial"]["asked"] == "sdpa_math" and set(told["attention"]["initial"]["ran"]) == {
        "sdpa_math"
    }
    assert told["attention"]["current"]["asked"] == "auto" and set(told["attention"]["current"]["ran"]) == {"sdpa"}
    assert told["options"]["fusion"]["initial"]["mode"] == "exact"
    assert told["options"]["fusion"]["current"]["mode"] == "off"


# ---------------------------------------------------------------- what is told


def test_the_variables_are_those_that_the_pack_reads_and_foreign_values_stay_here(readiness, monkeypatch):
    records = pack_module("kernels.attention").records()
    read = {
        "H3_DISABLE_MMAP", "H3_NVFP4_SCALE_BACKEND", *pack_module("nodes.fuse").VARIABLES.values(),
        *(record.layout_variable for record in records if record.layout_variable),
    }  # fmt: skip
    assert set(readiness.VARIABLES) == read | {"H3_NVFP4_SCALE_VERSION"} and len(readiness.VARIABLES) == 8
    for name in readiness.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert set(readiness.environment().values()) == {None}
    monkeypatch.setenv("H3_NVFP4_SWIGLU_FUSION", "0")
    monkeypatch.setenv("H3_NVFP4_SCALE_BACKEND", "/home/somebody/x")
    monkeypatch.setenv("H3_NVFP4_SCALE_VERSION", "2")
    told = readiness.environment()
    assert told["H3_NVFP4_SWIGLU_FUSION"] == "0"
    unknown = "(a value that this pack does not know)"
    assert told["H3_NVFP4_SCALE_BACKEND"] == told["H3_NVFP4_SCALE_VERSION"] == unknown


def test_a_lora_is_told_without_its_name(readiness):
    record = pack_module("nodes.run").Run(
        settings={"LoraSideBranch": {"loras": [{"file": "my_secret.safetensors", "strength": 1.0}]}}
    )
    record.fallbacks[0, "kernel: /opt/thing/x.so is missing"] += 1
    record.attention_handed_on["sage2: /opt/thing/y.so is missing"] += 2
    told = readiness.what_ran(record.as_dict())
    assert told["lora_branches"] == 1
    assert told["fallbacks"] == [{"reason": "kernel: x.so is missing", "blocks": 1}]
    assert told["attention"]["handed_on"] == {"sage2: y.so is missing": 2}
    assert "secret" not in json.dumps(told) and "/opt" not in json.dumps(told)


def test_asking_probes_nothing_reads_no_certificate_and_asks_no_device(readiness, monkeypatch):
    certify, discover = pack_module("kernels.certify"), pack_module("kernels.discover")
    device = torch.device("cuda", 0)
    refused = certify.Certificate("swiglu", "triton", certify.REFUSED, discover.without_paths("/a/b: no kernel"))
    monkeypatch.setattr(certify, "_known", {("swiglu", "triton", device): refused})
    for name in ("_probe", "_read", "_write", "_key", "_oracle", "environment", "status", "ensure", "refusal"):
        monkeypatch.setattr(certify, name, lambda *given, name=name: pytest.fail(f"{name} was called"))
    for name in ("is_available", "_lazy_init", "current_device", "get_device_name", "mem_get_info", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name: pytest.fail(f"cuda.{name} was called"))
    import comfy.model_management

    for name in ("get_torch_device", "load_models_gpu", "free_memory", "unload_all_models"):
        monkeypatch.setattr(comfy.model_management, name, lambda *given, name=name: pytest.fail(f"{name} was called"))
    told = readiness.ready()
    monkeypatch.undo()
    assert told["certification"] == [
        {"device": "cuda:0", "op": "swiglu", "implementation": "triton", "state": "refused", "reason": "b: no kernel"}
    ]


@pytest.mark.parametrize(
    ("state", "cuda", "hip", "kind"),
    [
        ("CPU", "13.0", None, "cpu"),
        ("MPS", None, None, "mps"),
        ("GPU", "13.0", None, "cuda"),
        ("GPU", None, "6.4", "rocm"),
        ("GPU", None, None, "gpu"),
    ],
)
def test_health(readiness, monkeypatch, state, cuda, hip, kind):
    import comfy.model_management
    import comfyui_version

    monkeypatch.setattr(comfy.model_management, "cpu_state", comfy.model_management.CPUState[state])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert readiness.health() == {
        "alive": True, "pack_version": "0.1.0", "comfyui_version": comfyui_version.__version__, "device": kind
    }  # fmt: skip


# ---------------------------------------------------------------- the routes


class Table(list):
    """A route table as aiohttp's: ``get(path)`` returns a decorator."""

    def get(self, path):
        def enter(handler):
            self.append(types.SimpleNamespace(path=path, handler=handler))
            return handler

        return enter


def with_server(monkeypatch, instance):
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)


def test_the_routes_are_added_once_and_only_to_a_server(monkeypatch, caplog):
    routes = pack_module("nodes.routes")
    monkeypatch.delitem(sys.modules, "server", raising=False)
    assert routes.register() is False and "server" not in sys.modules
    monkeypatch.setitem(sys.modules, "server", types.ModuleType("server"))  # another program's module of that name
    assert routes.register() is False
    table = Table([types.SimpleNamespace(path="/x"), object()])
    with_server(monkeypatch, types.SimpleNamespace(routes=table))
    assert routes.register() is True
    assert [route.path for route in table[2:]] == ["/h3bw/ready", "/h3bw/health"]
    assert routes.register() is False and len(table) == 4
    assert "is the pack installed twice?" in caplog.text


def test_loading_the_extension_registers_them(monkeypatch):
    table = Table()
    with_server(monkeypatch, types.SimpleNamespace(routes=table))
    extension = asyncio.run(pack_module().comfy_entrypoint())
    assert table == []
    asyncio.run(extension.on_load())
    assert len(table) == 2


def test_the_answers(readiness):
    routes = pack_module("nodes.routes")
    answer = asyncio.run(routes.ready(None))  # the request is not looked at
    assert answer.status == 503 and json.loads(answer.text)["ready"] is False
    assert answer.headers["Cache-Control"] == "no-store"
    model = patched()
    warm(model)
    answer = asyncio.run(routes.ready(None))
    assert answer.status == 200 and json.loads(answer.text)["ready"] is True
    answer = asyncio.run(routes.health(None))
    assert answer.status == 200 and json.loads(answer.text)["alive"] is True


def test_ready_does_not_lie_after_an_unload_that_raised(readiness, monkeypatch):
    """ComfyUI takes an entry out of its list after all of them were unloaded; one that raises leaves it there."""
    import comfy.model_management

    model = patched()
    warm(model)
    real = comfy.model_management.LoadedModel.model_unload

    def unload(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise RuntimeError("halfway")

    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_management.LoadedModel, "model_unload", unload)
        with pytest.raises(RuntimeError, match="halfway"):
            comfy.model_management.unload_all_models()
    assert readiness.why_not() == "the model that was warmed up has been unloaded from cpu"
    comfy.model_management.current_loaded_models.clear()


def test_a_default_attention_without_a_name(readiness, monkeypatch):
    """Another pack may put anything callable there."""
    import functools

    import comfy.ldm.modules.attention as core

    monkeypatch.setattr(core, "optimized_attention", functools.partial(core.optimized_attention))
    warm(patched())
    assert readiness.ready()["attention"]["initial"]["comfyui"] == "partial"
