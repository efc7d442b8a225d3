"""The report says what ran, and fails when it should."""

import json
import os

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, fuse, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


def report(model, latent=None, reference=None, on_difference="report", prefix="h3bw/test"):
    return pack_module("nodes.report").RuntimeReport.execute(model, on_difference, prefix, latent, reference)


def saved(out):
    import folder_paths

    entry = out.ui["h3bw_report"][0]
    path = os.path.join(folder_paths.get_output_directory(), entry["subfolder"], entry["filename"])
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def test_a_whole_report():
    model, positive, latent = selftest()
    stock = sample(model, positive, latent)[0]
    patched = attend(fuse(model, emulate="w4a4"))
    out = report(patched, sample(patched, positive, latent)[0], stock)
    data = saved(out)
    assert data["schema"] == "h3bw-report/1"
    run = data["run"]
    assert run["state"] == "finished" and run["steps"] == 3 and run["device"] == "cpu" and run["seconds"] > 0
    assert run["fused_calls"] == {"0": 3, "1": 3, "2": 3} and run["attention"] == {"sdpa": 9}
    assert run["settings"]["FuseBlocks"]["emulate"] == "w4a4"
    assert run["settings"]["AttentionBackend"] == {"backend": "auto", "exact": True, "layout": "auto"}
    rungs = {rung["rung"]: rung for rung in data["rungs"]}
    assert rungs["latents equal, bit for bit"]["result"] == "failed"
    assert 0 < rungs["latents equal, bit for bit"]["numbers"]["video"]["max_abs"] < 10
    assert rungs["blocks fused"] == {
        "rung": "blocks fused",
        "result": "passed",
        "numbers": {"fused": 3, "blocks": 3, "steps": 3},
        "reason": None,
    }
    assert rungs["finite"]["result"] == "passed"
    assert set(data["latent_sha256"]) == {"video", "audio"}
    text = out.result[0]
    assert text == out.ui["text"][0]
    assert text.startswith("fused 3/3 blocks; attention sdpa x 9\n3 model evaluations on cpu, ")
    assert os.sep + "tmp" not in text


def test_on_difference_fail_stops_and_still_writes():
    model, positive, latent = selftest()
    stock = sample(model, positive, latent)[0]
    patched = fuse(model, emulate="w4a4")
    ours = sample(patched, positive, latent)[0]
    with pytest.raises(RuntimeError, match=r"latents equal.*video differs in \d+ of 2688 elements \(see .*\.json\)"):
        report(patched, ours, stock, "fail")
    assert report(patched, ours, ours, "fail").result[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t, None),
        (lambda t: t.index_fill(0, torch.tensor([0]), -0.0), "differs in 1 of 4"),
        (lambda t: t + torch.tensor([0.0, 0.0, 0.0, 1e-7]), "differs in 1 of 4"),
        (lambda t: t.double(), r"float64 against .* torch\.float32"),
        (lambda t: t[:3], r"\(3,\)"),
    ],
)
def test_bit_comparison(change, reason):
    base = torch.tensor([0.0, 1.0, 2.0, 1.0])
    rung = pack_module("nodes.report").compare_latents({"samples": change(base.clone())}, {"samples": base})
    if reason is None:
        assert rung["result"] == "passed" and rung["reason"] is None
    else:
        import re

        assert rung["result"] == "failed" and re.search(reason, rung["reason"])


def test_nan_equals_itself_and_is_not_finite():
    latent = {"samples": torch.tensor([1.0, float("nan")])}
    module = pack_module("nodes.report")
    assert module.compare_latents(latent, latent)["result"] == "passed"
    rung = module.finite_rung(latent, None)
    assert rung["result"] == "failed" and rung["numbers"] == {"nonfinite_video": 1}
    other = {"samples": torch.tensor([1.0, 2.0])}
    assert module.compare_latents(latent, other)["numbers"]["video"]["max_abs"] is None


def test_fallbacks_are_listed_with_their_reason():
    model, positive, latent = selftest()
    patched = fuse(model, emulate="off")
    out = report(patched, sample(patched, positive, latent)[0])
    data = saved(out)
    assert [entry["calls"] for entry in data["run"]["fallbacks"]] == [3, 3, 3]
    rung = next(rung for rung in data["rungs"] if rung["rung"] == "blocks fused")
    assert rung["result"] == "skipped" and "emulate is off" in rung["reason"]


def test_a_fallback_under_emulation_is_a_failure(monkeypatch):
    """Otherwise a self-test in which nothing was fused would compare stock with stock and pass."""
    model, positive, latent = selftest()
    stock = sample(model, positive, latent)[0]
    monkeypatch.setattr(pack_module("nodes.adapt"), "class_reason", lambda block_class: "unknown block")
    patched = fuse(model, emulate="bf16")
    with pytest.raises(RuntimeError, match=r"blocks fused: fused 0/3 blocks; 3 fell back: unknown block"):
        report(patched, sample(patched, positive, latent)[0], stock, "fail")


def test_clones_behind_our_nodes_have_records_of_their_own():
    model, positive, latent = selftest()
    base = fuse(model)
    left, right = base.clone(), base.clone()
    right.set_model_patch_replace(lambda a, extra: extra["original_block"](a), "dit", "double_block", 2)
    ours = sample(left, positive, latent, steps=3)[0]
    sample(right, positive, latent, steps=2)
    of_left, of_right = report(left, ours), report(right)
    assert "fused 3/3 blocks" in of_left.result[0] and "3 model evaluations" in of_left.result[0]
    assert "fused 2/3 blocks" in of_right.result[0] and "2 model evaluations" in of_right.result[0]
    assert "later clone" not in of_left.result[0] + of_right.result[0]
    # The model in front of the clones was not sampled itself: the last of them is shown, and that is said.
    assert "fused 2/3 blocks" in report(base).result[0]
    assert "the last sampling was of a later clone of this model" in report(base).result[0]


def test_before_sampling_and_without_patches():
    model, _, _ = selftest()
    assert "has no patch of this pack" in report(model).result[0]
    assert "Nothing was sampled" in report(fuse(model)).result[0]


def test_reports_do_not_overwrite_one_another():
    model, _, _ = selftest()
    names = {report(model).ui["h3bw_report"][0]["filename"] for _ in range(3)}
    assert len(names) == 3


def test_it_is_never_cached(pack):
    node = pack_module("nodes.report").RuntimeReport
    first, second = (node.fingerprint_inputs(model=None) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("", "1 to 200 characters"),
        ("x" * 201, "has 201"),
        ("a\0b", "no NUL"),
        ("../outside", "leads out of the output folder"),
        ("/etc/passwd", "leads out of the output folder"),
        ("a/../../b", "leads out of the output folder"),
    ],
)
def test_a_prefix_that_is_no_place_for_a_file(prefix, text):
    import folder_paths

    model, _, _ = selftest()
    with pytest.raises(ValueError, match=text) as caught:
        report(model, prefix=prefix)
    assert folder_paths.get_output_directory() not in str(caught.value) and len(str(caught.value)) < 400


def test_names_with_html_stay_text():
    """What a user typed comes back as it was, in the field that the frontend shows as text."""
    model, positive, latent = selftest()
    patched = fuse(model, emulate="off")
    record = pack_module("nodes.run").find(patched)
    record.settings["FuseBlocks"]["forced_off_by_environment"] = ["<img src=x onerror=alert(1)>"]
    out = report(patched, sample(patched, positive, latent, steps=1)[0], prefix="h3bw/<b>bold")
    assert out.ui.keys() == {"text", "h3bw_report", "h3bw_rungs"}
    assert "<img src=x onerror=alert(1)>=0 in the environment" in out.ui["text"][0]
    assert out.ui["h3bw_report"][0]["filename"].startswith("<b>bold_")
