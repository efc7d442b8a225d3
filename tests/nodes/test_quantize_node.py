"""The quantiser as a node: its files sample in stock ComfyUI, its names stay in their folder, it can be cancelled."""

import json
import os

import pytest
import torch
from conftest import pack_module
from h3_sampling import finite, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


@pytest.fixture
def folders(pack, tmp_path, monkeypatch):
    """``(models/diffusion_models, output/diffusion_models)`` of this test alone, known to ComfyUI as in main.py."""
    import folder_paths

    models, output = tmp_path / "diffusion_models", tmp_path / "output"
    models.mkdir()
    monkeypatch.setattr(folder_paths, "output_directory", str(output))
    made = output / "diffusion_models"
    known = {**folder_paths.folder_names_and_paths}
    known["diffusion_models"] = ([str(models), str(made)], known["diffusion_models"][1])
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return models, made


@pytest.fixture
def source(folders):
    """A function that writes a tiny unquantised H3 and returns its name."""
    checkpoint = pack_module("kernels.checkpoint")

    def put(edit=None, adaln="pruned"):
        tensors, metadata = checkpoint.tiny_h3(adaln, quantise=False)
        checkpoint.write(folders[0] / "h3.safetensors", edit(tensors) if edit else tensors, metadata, overwrite=True)
        return "h3.safetensors"

    return put


def run(name, output_name="", scale="amax", keep="", prefix="h3bw/quantize"):
    return pack_module("nodes.quantize").QuantizeCheckpoint.execute(name, output_name, scale, keep, prefix)


def stock(name):
    import nodes

    return nodes.UNETLoader().load_unet(name, "default")[0]


def ours(name):
    return pack_module("nodes.load").LoadNVFP4.execute(name, True, "auto").result[0]


def result(model):
    _, positive, latent = selftest()
    return sample(model, positive, latent, steps=2)


def prefixed(tensors):
    return {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}


def fp32(tensors):
    return {name: tensor.float() for name, tensor in tensors.items()}


def scaled_fp8(tensors):
    """ComfyUI's older form, with a scale for each block linear."""
    out = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if name.startswith("blocks.") and layer.endswith(("qkv_proj", "out_proj", "fc1", "fc2")):
            scale = tensor.float().abs().max() / 448
            out[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            out[f"{layer}.scale_weight"] = scale
        else:
            out[name] = tensor
    return out


@pytest.mark.parametrize(
    ("edit", "adaln", "scale", "keep"),
    [
        (None, "pruned", "adaptive", ""),
        (None, "full", "amax", ""),
        (prefixed, "full", "adaptive", "blocks.0, mlp.fc2"),
        (fp32, "pruned", "amax", ""),
        (scaled_fp8, "pruned", "adaptive", "blocks.1.attn.*"),
    ],
)
def test_stock_comfyui_loads_and_samples_the_file(source, folders, edit, adaln, scale, keep):
    """Without a missing or unexpected key, through UNETLoader, and near to what the source samples."""
    name = source(edit, adaln)
    before = result(stock(name))
    run(name, scale=scale, keep=keep)
    model = stock("h3_nvfp4.safetensors")
    formats = [getattr(block.mlp.fc1, "quant_format", None) for block in model.model.diffusion_model.blocks]
    assert formats[1:] == ["nvfp4"] * 2 and (formats[0] == "nvfp4") is not keep.startswith("blocks.0")
    after = result(model)
    assert finite(before) and finite(after)
    video, reference = after[0]["samples"].unbind()[0], before[0]["samples"].unbind()[0]
    assert torch.nn.functional.cosine_similarity(video.flatten(), reference.flatten(), dim=0) > 0.9
    own = ours("h3_nvfp4.safetensors").model.diffusion_model.state_dict()
    theirs = model.model.diffusion_model.state_dict()
    assert own.keys() == theirs.keys()
    for key, tensor in theirs.items():
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (own[key], tensor))
        assert torch.equal(a, b), key


def test_report_picture_and_text(source, folders):
    import folder_paths

    out = run(source(), prefix="h3bw/mine")
    text = out.result[0]
    assert out.ui["text"] == (text,) and "12 layers to NVFP4, scales amax" in text
    ((file,), (picture,)) = out.ui["h3bw_report"], out.ui["images"]
    root = folder_paths.get_output_directory()
    with open(os.path.join(root, file["subfolder"], file["filename"]), encoding="utf-8") as written:
        report = json.load(written)
    assert len(report["layers"]) == 12 and str(root) not in json.dumps(report)
    assert file["filename"].startswith("mine_") and picture["filename"].endswith(".png")
    assert os.path.getsize(os.path.join(root, picture["subfolder"], picture["filename"])) > 1000


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "a\\b", "..", ".", ".hidden", "C:x", "nul", "COM1.x", "x" * 151, "a\0b", "a\nb", "x.", "a:b", "a?",
     "a\ud800b", "é🎉" * 60],
)  # fmt: skip
def test_a_name_that_leaves_the_folder_is_refused(source, folders, name):
    with pytest.raises(ValueError, match="output_name must be a file name") as caught:
        run(source(), name)
    assert len(str(caught.value)) < 300
    assert not folders[1].exists() or os.listdir(folders[1]) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("", "h3_nvfp4"),
        ("  ", "h3_nvfp4"),
        ("mine", "mine"),
        ("mine.safetensors", "mine"),
        ("a b (1).v2", "a b (1).v2"),
    ],
)
def test_names(folders, name, file):
    path = pack_module("nodes.quantize").target_path(name, "sub/h3.safetensors")
    assert path == str(folders[1] / f"{file}.safetensors")


def test_an_existing_file_stops_the_node(source, folders):
    name = source()
    run(name, "once")
    before = (folders[1] / "once.safetensors").read_bytes()
    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError, match=r"^once.safetensors: exists already"):
        run(name, "once")
    assert (folders[1] / "once.safetensors").read_bytes() == before


def test_cancel_leaves_nothing_and_progress_moves(source, folders, monkeypatch):
    import comfy.model_management
    import comfy.utils

    seen = []

    class Bar:
        def __init__(self, total):
            assert total == 100

        def update_absolute(self, value, total):
            seen.append(value)
            if value >= 50 and cancel:
                comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
    name, cancel = source(), False
    run(name)
    assert seen[0] == 0 and seen[-1] == 100 and seen == sorted(set(seen))
    seen.clear()
    cancel = True
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(name, "other")
    comfy.model_management.interrupt_current_processing(False)
    assert os.listdir(folders[1]) == ["h3_nvfp4.safetensors"]


def test_the_error_names_the_file_and_no_folder(source, folders):
    def damaged(tensors):
        tensors["blocks.1.mlp.fc2.weight"][0, 0] = float("nan")
        return tensors

    with pytest.raises(pack_module("kernels.checkpoint").CheckpointError) as caught:
        run(source(damaged))
    assert str(caught.value).startswith("h3.safetensors: blocks.1.mlp.fc2: has 0 Inf and 1 NaN")
    assert str(folders[0]) not in str(caught.value)
