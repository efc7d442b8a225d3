"""Numbers, gates, table and picture of the parity ladder; no ComfyUI needed."""

import math

import pytest
import torch
from conftest import pack_module

ladder = pack_module("kernels.measure.ladder")
measure = pack_module("kernels.measure")


def test_numbers_of_a_difference():
    theirs = torch.tensor([3.0, 4.0, 0.0, 0.0])
    ours = torch.tensor([3.0, 4.5, 0.0, 0.0])
    found = ladder.compare(ours, theirs)
    assert found["elements"] == 4 and found["differing"] == 1 and found["max_abs"] == 0.5
    assert found["relative"] == pytest.approx(0.1) and found["sqnr_db"] == pytest.approx(20.0)
    assert ladder.in_words(found) == "1 of 4 elements differ, max abs 0.5, relative 1.00e-01, SQNR 20.0 dB"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_not_values(dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert ladder.compare(-zero, zero)["differing"] == 3
    nan = torch.full((3,), math.nan, dtype=dtype)
    assert ladder.compare(nan, nan.clone())["differing"] == 0


def test_what_is_not_finite_is_not_a_number_in_json():
    found = ladder.compare(torch.tensor([math.nan, 1.0]), torch.ones(2))
    assert found["differing"] == 1 and found["max_abs"] is None and found["relative"] is None
    assert "max abs not finite" in ladder.in_words(found)


def test_large_tensors_are_added_up_piece_by_piece(monkeypatch):
    monkeypatch.setattr(ladder, "_PIECE", 7)
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(5, 20, generator=generator)
    ours = theirs + 0.1 * torch.randn(5, 20, generator=generator)
    found = ladder.compare(ours, theirs)
    gap = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert found["relative"] == pytest.approx(float(gap))
    assert found["max_abs"] == pytest.approx(float((ours.double() - theirs.double()).abs().max()))


def test_other_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="wants tensors of one kind"):
        ladder.compare(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="wants tensors of one kind"):
        ladder.compare(torch.zeros(2), torch.zeros(2).half())


def test_rungs_become_gates_and_a_record_that_validates(tmp_path):
    with measure.Manifest(tmp_path / "record.json", "parity") as record:
        climb = ladder.Ladder(record)
        same = ladder.compare(torch.ones(2), torch.ones(2))
        other = ladder.compare(torch.zeros(2), torch.ones(2))
        assert climb.compared(ladder.REPEATS, "a", same).result == "passed"
        assert climb.compared(ladder.BLOCKS, "a", other, "block 7").result == "failed"
        assert climb.skipped(ladder.PEAK, "a", "no GPU").result == "skipped"
        assert climb.bounded(ladder.PEAK, "b", 5, 4, {}, "5 of 4").result == "failed"
    found = measure.read(tmp_path / "record.json")
    assert [gate["result"] for gate in found["gates"]] == ["passed", "failed", "skipped", "failed"]
    assert [rung.case for rung in climb.failed()] == ["a", "b"]
    text = ladder.as_text(climb.rungs, found)
    assert "1 passed, 2 failed, 1 skipped; the first that failed: 3 complete blocks, a: block 7: 2 of 2" in text
    assert "SKIPPED  a  no GPU" in text
    ladder.picture(climb.rungs, found, tmp_path / "a.png")
    from PIL import Image

    with Image.open(tmp_path / "a.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert set(ladder.COLOURS.values()) <= colours
