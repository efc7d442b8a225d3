"""The measuring nodes on a GPU, at real widths and small sizes: they run, and what they promise of bits holds.

Times are not asserted: a shared machine would make a test of them flaky. The bars stand in the records as gates.
"""

import pytest
import torch
from conftest import pack_module

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]


def failed(record, *about):
    """Gates that failed, of those whose name holds one of the words."""
    return [
        (gate["name"], gate["observed"], gate["reason"])
        for gate in record["gates"]
        if gate["result"] == "failed" and any(word in gate["name"] for word in about)
    ]


@pytest.fixture(scope="module")
def drawn():
    """Two blocks and one refiner block of H3's widths, drawn on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    return pack_module("nodes.random_model").random_h3(device, blocks=2, refiner_blocks=1, seed=0)


def test_the_random_model_is_finite_and_moves(drawn):
    sampling = pack_module("nodes.sampling")
    positive, latent = sampling.prompt(drawn, "T2VA", 320, 192, 22)
    out = sampling.sample(drawn, positive, latent, 2)
    video, audio = sampling.parts(out["samples"])
    assert bool(torch.isfinite(video).all()) and bool(torch.isfinite(audio).all()) and float(video.std()) > 0.1


def test_the_ladder(drawn, tmp_path):
    report = pack_module("nodes.parity_ladder").climb(drawn, out_path=tmp_path / "ladder.json")
    ladder = pack_module("kernels.measure.ladder")
    wrong = [rung for rung in report.rungs if rung.result == "failed" and rung.name != ladder.PEAK]
    assert wrong == [], report.text
    passed = {rung.name for rung in report.rungs if rung.result == "passed"}
    assert set(ladder.RUNGS) - {ladder.PEAK} <= passed, report.text


def test_the_step(drawn, tmp_path):
    module = pack_module("nodes.bench_step")
    size = (768, 448, 22)  # 320x192 is too short for blocks in bf16
    report = module.run(None, (size,), ("pack", "attention", "fuse"), 2, tmp_path / "step.json", model=drawn, rounds=2)
    record = pack_module("kernels.measure").read(tmp_path / "step.json")
    assert failed(record, "latent differs", "passes differ", "first and last") == [], report.text
    assert all(line.seconds > 0 and line.peak_bytes > 0 for line in report.lines)
    assert "2/2 fused" in report.lines[1].ran and record["cases"][0]["calls"] == 2
    assert {case["comparison"]["verdict"] for case in record["cases"] if case["comparison"]} <= {
        "accept", "reject", "inconclusive"
    }  # fmt: skip


def test_the_block(drawn, tmp_path):
    module = pack_module("nodes.bench_block")
    report = module.run(rows=2048, rounds=10, out_path=tmp_path / "block.json", model=drawn, block=1)
    record = pack_module("kernels.measure").read(tmp_path / "block.json")
    assert failed(record, "differs") == [], report.text
    assert [line.ran.split(",")[0] for line in report.lines][2:] == ["fused", "fused"]


def test_the_roofline(tmp_path):
    module = pack_module("kernels.measure.gemm_roofline")
    report = module.run("cuda", rows=2048, rounds=4, out_path=tmp_path / "roofline.json")
    record = pack_module("kernels.measure").read(tmp_path / "roofline.json")
    assert failed(record, "relative") == [], report.text
    assert {line.variant for line in report.lines} >= {"bf16", "dequantised", "auto"}
    assert all(0 < line.share < 1.5 for line in report.lines if line.tflops is not None), report.text
