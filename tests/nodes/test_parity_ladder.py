"""The parity ladder on a tiny H3: it passes where all is equal, and each kind of difference is found and named."""

import os

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, fuse, selftest

pytestmark = pytest.mark.usefixtures("pack")

SMALL = {"width": 64, "height": 64, "length": 5}


def climb(tmp_path, model=None, **options):
    return pack_module("nodes.parity_ladder").climb(model, out_path=tmp_path / "ladder.json", **{**SMALL, **options})


def of(report, name):
    return [rung for rung in report.rungs if rung.name == getattr(pack_module("kernels.measure.ladder"), name)]


@pytest.fixture
def short(monkeypatch):
    """One prompt and three steps in place of twelve, for tests of what is found and not of the whole climb."""
    monkeypatch.setattr(pack_module("nodes.sampling"), "TASKS", ("T2VA",))
    monkeypatch.setattr(pack_module("nodes.ladder_rungs"), "STEPS_CHECKSUM", 3)


def test_the_whole_climb(tmp_path):
    report = climb(tmp_path)
    ladder, measure = pack_module("kernels.measure.ladder"), pack_module("kernels.measure")
    record = measure.read(tmp_path / "ladder.json")
    assert record["kind"] == "parity" and record["status"] == "finished"
    assert {rung.name for rung in report.rungs} == set(ladder.RUNGS)
    assert not [rung for rung in report.rungs if rung.result == "failed"]
    for name in ("REPEATS", "BLOCKS", "ALL_BLOCKS", "TWO_STEPS", "CHECKSUMS"):
        cases = [rung.case for rung in of(report, name)]
        assert {case.split(",")[0] for case in cases} == {"T2VA", "FL2VA"} and len(cases) == 4
        if not torch.cuda.is_available():
            assert {rung.result for rung in of(report, name)} == {"passed"}
    assert all(rung.reason for rung in report.rungs if rung.result == "skipped")
    # Twelve steps really moved, differently for each prompt and each way to run the linears.
    sums = {entry["name"]: entry["sha256"] for entry in record["outputs"]}
    assert len(sums) == 8 and len(set(sums.values())) == 4
    assert all(sums[name] == sums[name.replace("patched", "stock")] for name in sums)
    assert (tmp_path / "ladder.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_first_block_that_differs_is_named_with_its_numbers(tmp_path, monkeypatch, short):
    adapt = pack_module("nodes.adapt")
    model, _, _ = selftest()
    real, second = adapt.fused_forward, model.model.diffusion_model.blocks[1]

    def wrong(block, *arguments):
        out = real(block, *arguments)
        if block is second:
            out[3, 5] += 0.5
        return out

    monkeypatch.setattr(adapt, "fused_forward", wrong)
    report = climb(tmp_path, model, emulate="bf16")
    (alone,), (chained,), (steps,) = of(report, "BLOCKS"), of(report, "ALL_BLOCKS"), of(report, "TWO_STEPS")
    assert [alone.result, chained.result, steps.result] == ["failed"] * 3
    assert alone.reason.startswith("block 1 is the first that differs: 1 of ")
    assert chained.numbers["block"] == 1 and chained.numbers["differing"] == 1
    assert 0.4 < chained.numbers["max_abs"] < 0.6 and chained.numbers["sqnr_db"] > 20
    assert 0 < chained.numbers["relative"] < 0.1
    assert steps.reason.startswith("step 1, x0, video is the first that differs")
    assert {rung.result for rung in of(report, "REPEATS")} == {"passed"}, "stock has none of it"
    assert "the first that failed: 3 complete blocks" in report.text
    gates = {gate["name"]: gate for gate in report.record["gates"]}
    assert gates[f"{chained.name}: {chained.case}"]["observed"] == 1


def test_a_wrong_producer_fails_at_the_projections(tmp_path, monkeypatch, short):
    """The references are broken here, so only a CPU run sees it."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels; tests/gpu breaks one of those")
    nvfp4 = pack_module("kernels.nvfp4")
    real = nvfp4.quantize

    def swapped(x, decode_scale=None):
        q = real(x, decode_scale)
        return nvfp4.NVFP4(((q.codes >> 4) | (q.codes << 4)).to(torch.uint8), q.block_scale, q.decode_scale, q.shape)

    model, _, _ = selftest()
    monkeypatch.setattr(nvfp4, "quantize", swapped)
    report = climb(tmp_path, model, emulate="w4a4")
    assert {rung.result for rung in of(report, "PROJECTIONS")} == {"failed"}
    assert all(rung.numbers["codes"] and rung.numbers["products"] for rung in of(report, "PROJECTIONS"))
    assert {rung.result for rung in of(report, "ALL_BLOCKS")} == {"failed"}
    assert "failed" in {rung.result for rung in of(report, "KERNELS")}


def test_the_patched_side_is_as_wired(tmp_path, short):
    model, positive, latent = selftest()
    wired = attend(fuse(model, emulate="w4a4", swiglu=False))
    before = dict(wired.model_options["transformer_options"]["patches_replace"]["dit"])
    report = climb(tmp_path, wired, positive=positive, latent=latent)
    assert {rung.result for rung in report.rungs} <= {"passed", "skipped"}
    assert {rung.case.split(",")[0] for rung in of(report, "CHECKSUMS")} == {"as connected"}
    assert any("FuseBlocks as wired" in note and "swiglu False" in note for note in report.record["notes"])
    assert any(entry["what"].endswith("attention") for entry in report.record["dispatch"]["ran"])
    assert wired.model_options["transformer_options"]["patches_replace"]["dit"] == before


def test_stock_is_the_model_without_the_blocks_and_with_everything_else(pack):
    sides, run = pack_module("nodes.sides"), pack_module("nodes.run")
    model, _, _ = selftest()
    bare = sides.without_fused_blocks(fuse(model))
    options = bare.model_options["transformer_options"]
    assert not options["patches_replace"]["dit"] and run.RUN not in options
    assert not any(run.WRAPPER_KEY in wrappers for wrappers in options["wrappers"].values())
    kept = sides.without_fused_blocks(attend(fuse(model)))
    assert pack_module("nodes.adapt_attention").installed(kept.model_options["transformer_options"]) is not None
    assert run.find_settings(kept).keys() == {"AttentionBackend"}
    foreign = model.clone()
    theirs = lambda arguments, extra: extra["original_block"](arguments)  # noqa: E731
    foreign.set_model_patch_replace(theirs, "dit", "double_block", 1)
    table = sides.without_fused_blocks(fuse(foreign)).model_options["transformer_options"]["patches_replace"]["dit"]
    assert table == {("double_block", 1): theirs}


def test_nothing_fused_is_skipped_and_never_passed(tmp_path, short):
    if torch.cuda.is_available():
        pytest.skip("a GPU fuses")
    model, _, _ = selftest()
    report = climb(tmp_path, model, emulate="off")
    for name in ("BLOCKS", "ALL_BLOCKS", "TWO_STEPS", "CHECKSUMS", "PEAK"):
        (rung,) = of(report, name)
        assert rung.result == "skipped" and "the stream is on cpu and emulate is off" in rung.reason


def test_a_later_node_that_owns_the_blocks(tmp_path, short):
    model, _, _ = selftest()
    patched = fuse(model)
    patched.set_model_patch_replace(lambda a, e: e["original_block"](a), "dit", "double_block", 2)
    report = climb(tmp_path, patched)
    (rung,) = of(report, "ALL_BLOCKS")
    assert rung.result == "skipped" and "a later node owns 1 blocks, the first is 2" in rung.reason


def test_the_node(monkeypatch, short):
    import folder_paths

    module = pack_module("nodes.parity_ladder")
    model, positive, latent = selftest()
    given = {**SMALL, "emulate": "bf16", "on_difference": "fail", "filename_prefix": "h3bw/ladder"}
    out = module.ParityLadder.execute(model=model, **given)
    assert out.result[0] == out.ui["text"][0] and ", 0 failed, " in out.result[0]
    saved = out.ui["images"][0]
    assert os.path.isfile(os.path.join(folder_paths.get_output_directory(), saved["subfolder"], saved["filename"]))
    with pytest.raises(ValueError, match="positive and latent belong together"):
        module.ParityLadder.execute(model=model, positive=positive, **given)
    adapt = pack_module("nodes.adapt")
    real = adapt.fused_forward
    monkeypatch.setattr(adapt, "fused_forward", lambda *arguments: real(*arguments).neg_())
    with pytest.raises(module.ParityFailed, match=r"the first that failed: 3 complete blocks.*see ladder_0000"):
        module.ParityLadder.execute(model=model, **given)
    assert module.ParityLadder.fingerprint_inputs() != module.ParityLadder.fingerprint_inputs()


def test_padding_is_not_compared_and_all_else_is(pack):
    """130 rows of 80 columns: codes are padded to 144 rows, scales to 256 rows of 8."""
    rungs, nvfp4 = pack_module("nodes.ladder_rungs"), pack_module("kernels.nvfp4")
    q = nvfp4.quantize(torch.randn(130, 80, generator=torch.Generator().manual_seed(0)))

    def other(byte=None, row=None):
        codes, scales = q.codes.clone(), q.block_scale.view(torch.uint8).clone()
        if byte is not None:
            scales.view(-1)[byte] ^= 1
        if row is not None:
            codes[row, 0] ^= 1
        return nvfp4.NVFP4(codes, scales.view(torch.float8_e4m3fn), q.decode_scale, q.shape)

    assert rungs.difference(other(), q) == (0, "equal")
    assert rungs.difference(other(row=130), q) == rungs.difference(other(byte=256 * 8 - 1), q) == (0, "equal")
    assert rungs.difference(other(row=129), q) == (1, "1 codes")
    assert rungs.difference(other(byte=0), q) == (1, "1 scales")
