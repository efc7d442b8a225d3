"""The attention benchmark on a CPU: a table that says what it is, errors, gates, and a record that validates."""

import os
import sys

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.usefixtures("pack")

SMALL = {"lengths": "rows", "rows": 33, "heads": 2, "backend": "all", "rounds": 2, "filename_prefix": "h3bw/bench"}


def bench(**changes):
    return pack_module("nodes.bench_attention").BenchAttention.execute(**{**SMALL, **changes})


def record_of(out):
    import folder_paths

    entry = out.ui["h3bw_record"][0]
    path = os.path.join(folder_paths.get_output_directory(), entry["subfolder"], entry["filename"])
    return pack_module("kernels.measure").read(path)


def test_a_whole_run_on_the_cpu():
    out = bench()
    text, record = out.result[0], record_of(out)
    assert text == out.ui["text"][0] and "CPU, not a measurement" in text and "host clock" in text
    assert record["kind"] == "attention" and record["status"] == "finished"
    assert {(case["group"], case["variant"]) for case in record["cases"]} == {
        ("33 rows", name) for name in ("stock", "stock (A/A)", "sdpa", "sdpa_math", "auto")
    }
    assert all(case["shape"] == [1, 2, 33, 128] and case["comparison"] is None for case in record["cases"])
    errors = [gate for gate in record["gates"] if "relative error" in gate["name"]]
    assert len(errors) == 4 and {gate["result"] for gate in errors} == {"passed"}
    assert all(0 < gate["observed"] < 2**-7 for gate in errors)
    skipped = [gate for gate in record["gates"] if gate["result"] == "skipped"]
    assert len(skipped) == 4 and {gate["reason"] for gate in skipped} == {"a CPU is not measured"}
    ran = {entry["what"]: entry["implementation"] for entry in record["dispatch"]["ran"]}
    assert ran["33 rows / stock"] == "sdpa_math" and ran["33 rows / auto"] == "sdpa"
    refused = {entry["asked"] for entry in record["dispatch"]["fallbacks"]}
    names = [item.name for item in pack_module("kernels.attention").records() if not item.opt_in]
    assert refused == set(names) - {"sdpa", "sdpa_math"}


def test_one_backend():
    record = record_of(bench(backend="sdpa_math"))
    assert {case["variant"] for case in record["cases"]} == {"stock", "stock (A/A)", "sdpa_math", "auto"}


def test_one_that_breaks_does_not_end_the_run(monkeypatch):
    kernels = pack_module("kernels.attention")

    def breaks(q, k, v, scale):
        raise RuntimeError("misaligned address")

    real = kernels.registry.known()
    record = kernels.Backend("sdpa_broken", True, "", lambda: breaks, lambda call: None, "")
    monkeypatch.setattr(kernels.registry, "known", lambda: ({**real[0], "sdpa_broken": record}, real[1]))
    out = bench()
    assert "33 rows / sdpa_broken: RuntimeError: misaligned address" in out.result[0]
    assert record_of(out)["status"] == "finished"


def test_a_wrong_backend_fails_its_gate(monkeypatch):
    kernels = pack_module("kernels.attention")
    real = kernels.registry.known()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wrong = kernels.Backend(
        "sdpa_wrong", True, "", lambda: lambda q, k, v, scale: 1.1 * sdpa(q, k, v), lambda call: None, ""
    )
    monkeypatch.setattr(kernels.registry, "known", lambda: ({**real[0], "sdpa_wrong": wrong}, real[1]))
    out = bench()
    assert "FAILED: 33 rows / sdpa_wrong: relative error: 0.1" in out.result[0]
    failed = [gate["name"] for gate in record_of(out)["gates"] if gate["result"] == "failed"]
    assert failed == ["33 rows / sdpa_wrong: relative error"]


def test_one_that_is_not_finite_fails_and_is_written():
    errors = pack_module("kernels.attention.errors")
    found = errors.compare(torch.full((1, 1, 2, 2), float("nan")), torch.ones(1, 1, 2, 2))
    assert found.as_dict() == {"relative": None, "cosine": 0.0, "worst_channel": None, "max_relative": None}


def test_errors_are_what_they_say():
    errors = pack_module("kernels.attention.errors")
    ref = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    ref[0, 0, :, :] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out = ref.clone()
    out[0, 0, 0, 3] += 0.4
    found = errors.compare(out, ref)
    assert found.relative == pytest.approx(0.4 / (4 * (1 + 4 + 9 + 16)) ** 0.5)
    assert found.worst_channel == pytest.approx(0.4 / 5.0)  # the columns' norms are 2, 4, 6, 8
    assert found.max_relative == pytest.approx(0.1)
    assert 0.999 < found.cosine < 1.0
    assert errors.compare(ref, ref).relative == 0.0


def test_the_slice_is_the_reference_at_its_rows():
    errors = pack_module("kernels.attention.errors")
    q, k, v = (torch.randn(2, 6, 300, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    whole = errors.reference(q, k, v, 0.2)
    part = errors.Slice(q, k, v, 0.2)
    assert part.reference.shape == (1, 4, 128, 16) and part.rows[0] == 0 and part.rows[-1] == 299
    assert torch.equal(part.reference, whole[:1, part.heads][:, :, part.rows])
    assert part.errors(whole.float()).relative < 1e-7


def test_the_user_is_told_what_is_wrong():
    module = pack_module("kernels.measure.attention_bench")
    with pytest.raises(module.BenchError, match="backends: xformers asked for; choose all or of sdpa"):
        module.run("cpu", (16,), backends="xformers", out_path="never.json")
    with pytest.raises(module.BenchError, match="whole numbers from 1, have"):
        module.run("cpu", (0,), out_path="never.json")
    with pytest.raises(module.BenchError, match="only CUDA devices and the CPU are timed"):
        module.run("meta", (16,), out_path="never.json")


def test_a_cancel_leaves_an_aborted_record(monkeypatch, tmp_path):
    import json

    module = pack_module("kernels.measure.attention_bench")

    class Cancelled(BaseException):
        pass

    def between():
        raise Cancelled

    with pytest.raises(Cancelled):
        module.run("cpu", (16,), out_path=tmp_path / "record.json", between=between)
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "aborted"


def test_a_plot_where_matplotlib_is(tmp_path):
    report = pack_module("kernels.measure.attention_report")
    line = report.Line(128, "auto", "exact", 1.0, 0.1, 100.0, 1.5, 1e-3, 0.9999, 1e-2, 2**20, "accept")
    record = {"hardware": {"gpus": [{"name": "a GPU"}]}}
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert report.plot([line], record, tmp_path / "plot.png") is None
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    report = pack_module("kernels.measure.attention_report")
    assert report.plot([], {}, tmp_path / "plot.png").startswith("no plot: ")
