"""Watch a run, write the scales, load the file, sample with it: the whole way of static scales."""

import json
import os

import pytest
import torch
from conftest import pack_module
from h3_lora import core_keys, factors, side_branch, write_lora
from h3_sampling import equal, finite, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")
NAMES = [f"blocks.{i}.{n}" for i in range(3) for n in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")]


@pytest.fixture
def tiny():
    return selftest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An output folder of this test's own."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def watch(model):
    return pack_module("nodes.calibrate").Calibrate.execute(model).result[0]


def save(model, latent, filename="static", **options):
    return pack_module("nodes.calibrate").SaveCalibration.execute(model, latent, filename, **options)


def load(path):
    return pack_module("nodes.load").load_h3(str(path), compute_dtype=torch.bfloat16)


def test_the_watched_model_is_the_same_model(tiny):
    model, positive, latent = tiny
    expected = sample(model, positive, latent)
    patched = watch(model)
    assert equal(sample(patched, positive, latent), expected)
    assert equal(sample(model, positive, latent), expected)
    assert patched.clone_has_same_weights(model) and model.clone_has_same_weights(patched)
    assert not [n for n, m in model.model.diffusion_model.named_modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("fused", ["", "before", "after"])
def test_it_sees_what_the_linears_get(tiny, fused):
    """On stock and on fused blocks: the maxima are those of the inputs that a hook sees."""
    model, positive, latent = tiny
    patched = watch(fuse(model) if fused == "before" else model)
    patched = fuse(patched) if fused == "after" else patched
    seen = {name: [] for name in NAMES}
    dit = model.model.diffusion_model
    handles = [
        dit.get_submodule(name).register_forward_pre_hook(
            lambda module, arguments, name=name: seen[name].append(float(arguments[0].abs().max()))
        )
        for name in NAMES
    ]
    try:
        sample(patched, positive, latent)
    finally:
        for handle in handles:
            handle.remove()
    statistics = pack_module("nodes.calibrate").watcher_of(patched).statistics
    assert list(statistics) == NAMES
    for name, found in statistics.items():
        assert found.calls == 3 and found.unseen == 0
        assert found.amax[:3].tolist() == seen[name]
    assert bool(run_of(patched) and run_of(patched).fused) == bool(fused)


def test_from_a_run_to_static_producers(tiny, folder):
    model, positive, latent = tiny
    patched = watch(model)
    out, _ = sample(patched, positive, latent)
    result = save(patched, out, headroom=1.0)
    text = result.result[0]
    path = folder / "diffusion_models" / "static.safetensors"
    static = load(path)
    dit = static.model.diffusion_model
    statistics = pack_module("nodes.calibrate").watcher_of(patched).statistics
    for name in NAMES:
        scale = dit.get_submodule(name).input_scale
        assert float(scale) == pytest.approx(float(statistics[name].amax.max()) / 2688, rel=1e-6)
    # The same model otherwise: tensors, metadata, and what it samples without four-bit activations.
    assert equal(sample(static, positive, latent), sample(model, positive, latent))
    expected = sample(fuse(static, mode="off", emulate="w4a4"), positive, latent)
    ours = fuse(static, mode="static", emulate="w4a4")
    assert finite(expected) and equal(sample(ours, positive, latent), expected)
    assert dict(run_of(ours).fused) == {0: 3, 1: 3, 2: 3} and not run_of(ours).bf16_inputs
    assert not equal(expected, sample(fuse(model, mode="off", emulate="w4a4"), positive, latent))
    with pytest.raises(ValueError, match="12 have none"):
        fuse(model, mode="static")

    assert text.startswith("static.safetensors: static activation scales from 3 calls of each linear")
    for kind in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"):
        assert f"{kind} x 3: maxima" in text
    (saved,) = result.ui["h3bw_calibration"]
    report = json.loads((folder / saved["subfolder"] / saved["filename"]).read_text("utf-8"))
    assert report["schema"] == "h3bw-calibration/1" and list(report["layers"]) == NAMES
    assert str(folder) not in json.dumps(report)
    for layer in report["layers"].values():
        # On its own run, with the true maximum, nothing clips and little is lost against dynamic scales.
        assert layer["clipped"] == 0 and layer["values"] > 1000
        assert layer["static_db"] > 15 and layer["dynamic_db"] - layer["static_db"] < 1.0


def test_clipping_is_reported(tiny, folder):
    model, positive, latent = tiny
    patched = watch(model)
    out, _ = sample(patched, positive, latent)
    statistics = pack_module("nodes.calibrate").watcher_of(patched).statistics
    next(iter(statistics.values())).unseen = 3
    result = save(patched, out, headroom=1.0, clip_percent=1.0)
    assert "3 calls had no float tensor" in result.result[0]
    (saved,) = result.ui["h3bw_calibration"]
    layers = json.loads((folder / saved["subfolder"] / saved["filename"]).read_text("utf-8"))["layers"]
    rates = [layer["clipped"] for layer in layers.values()]
    assert all(0 < rate <= 0.01 for rate in rates) and max(rates) > 0.005
    assert all(layer["static_db"] < layer["dynamic_db"] for layer in layers.values())


def test_a_second_run_starts_anew(tiny):
    model, positive, latent = tiny
    patched = watch(watch(model))
    sample(patched, positive, latent)
    sample(patched, positive, latent, steps=2)
    statistics = pack_module("nodes.calibrate").watcher_of(patched).statistics
    assert {found.calls for found in statistics.values()} == {2}
    assert all(found.amax.device.type == "cpu" for found in statistics.values())


@pytest.mark.parametrize("order", ["lora first", "watch first"])
def test_with_a_lora(tiny, folder, order):
    """What is watched is the model with its LoRA; what is written is the base file with scales for that use."""
    model, positive, latent = tiny
    name = write_lora("calibrated.safetensors", core_keys(factors(model, size=0.5)))
    expected = sample(side_branch(model, name), positive, latent)
    patched = watch(side_branch(model, name)) if order == "lora first" else side_branch(watch(model), name)
    out = sample(patched, positive, latent)
    assert equal(out, expected)
    plain = watch(model)
    sample(plain, positive, latent)
    watcher_of = pack_module("nodes.calibrate").watcher_of
    with_lora, without = watcher_of(patched).statistics, watcher_of(plain).statistics
    assert not torch.equal(with_lora["blocks.2.mlp.fc2"].amax, without["blocks.2.mlp.fc2"].amax)
    save(patched, out[0])
    static = side_branch(load(folder / "diffusion_models" / "static.safetensors"), name)
    again = sample(fuse(static, mode="off", emulate="w4a4"), positive, latent)
    assert equal(sample(fuse(static, mode="static", emulate="w4a4"), positive, latent), again)


def test_a_prefixed_file_keeps_its_prefix(tiny, folder, tmp_path):
    tiny_h3, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    tensors, metadata = tiny_h3.tiny_h3()
    source = tmp_path / "prefixed.safetensors"
    writer.write(str(source), {f"model.diffusion_model.{key}": value for key, value in tensors.items()}, metadata)
    _, positive, latent = tiny
    patched = watch(load(source))
    out, _ = sample(patched, positive, latent, steps=1)
    save(patched, out)
    header = pack_module("kernels.checkpoint").read_header(str(folder / "diffusion_models" / "static.safetensors"))
    assert "model.diffusion_model.blocks.0.mlp.fc1.input_scale" in header.tensors
    assert len(header.tensors) == len(tensors) + len(NAMES) and header.metadata == metadata
    assert float(
        load(folder / "diffusion_models" / "static.safetensors").model.diffusion_model.blocks[0].mlp.fc1.input_scale
    )


def test_an_existing_file_is_not_overwritten(tiny, folder):
    model, positive, latent = tiny
    patched = watch(model)
    out, _ = sample(patched, positive, latent, steps=1)
    save(patched, out)
    before = (folder / "diffusion_models" / "static.safetensors").stat()
    with pytest.raises(ValueError, match="static.safetensors exists already; choose another name"):
        save(patched, out, "static.safetensors")
    assert (folder / "diffusion_models" / "static.safetensors").stat() == before
    assert os.listdir(folder / "diffusion_models") == ["static.safetensors"]


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a\\b", ".hidden", "x" * 200, "a\0b", "C:x", "con", "a.", " ", "a\ud800b", "日" * 100]
)
def test_names_that_are_no_names(tiny, folder, name):
    with pytest.raises(ValueError, match="filename must be a plain name"):
        save(watch(tiny[0]), tiny[2], name)


def test_no_room_is_said_before_anything_is_written(tiny, folder, monkeypatch):
    module = pack_module("nodes.calibrate")
    model, positive, latent = tiny
    patched = watch(model)
    out, _ = sample(patched, positive, latent, steps=1)
    usage = module.shutil.disk_usage(str(folder))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match="GiB in the output folder"):
        save(patched, out)
    assert os.listdir(folder / "diffusion_models") == []


def test_a_report_that_cannot_be_placed_is_said_before_the_file_is_written(tiny, folder):
    model, positive, latent = tiny
    patched = watch(model)
    out, _ = sample(patched, positive, latent, steps=1)
    (folder / "h3bw").write_text("a file where the report's folder belongs")
    with pytest.raises(ValueError, match="no file can be put there") as caught:
        save(patched, out)
    assert str(folder) not in str(caught.value)
    assert os.listdir(folder / "diffusion_models") == []


def test_messages(tiny, folder, tmp_path):
    tiny_h3, writer = pack_module("kernels.checkpoint.tiny"), pack_module("kernels.checkpoint.writer")
    model, positive, latent = tiny
    with pytest.raises(ValueError, match="was not watched"):
        save(model, latent)
    with pytest.raises(ValueError, match="must be finite numbers, are nan and 0.0"):
        save(watch(model), latent, headroom=float("nan"))
    with pytest.raises(ValueError, match="plain name") as caught:
        save(watch(model), latent, "x" * 10_000_000)
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match="was not sampled yet"):
        save(watch(model), latent)
    homeless = watch(model)
    homeless.cached_patcher_init = None
    with pytest.raises(ValueError, match="does not say which file"):
        save(homeless, latent)
    source = tmp_path / "bf16.safetensors"
    writer.write(str(source), *tiny_h3.tiny_h3(quantise=False))
    with pytest.raises(ValueError, match="nothing to calibrate"):
        watch(load(source))


def test_nothing_is_copied_to_the_host_while_sampling(tiny, monkeypatch):
    """No .item(), no .tolist(), no bool() in the forward: on a GPU each would wait for the device."""
    calibrate = pack_module("kernels.calibrate")
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    statistics = calibrate.Statistics(48, torch.device("cpu"))
    with Waits():
        statistics.watch(torch.randn(50, 48).bfloat16())
    assert seen == []
