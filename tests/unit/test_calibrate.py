"""Scales, clipping rates and errors of a watched run, against the same things written out."""

import math

import pytest
import torch
from conftest import pack_module

calibrate = pack_module("kernels.calibrate")
nvfp4 = pack_module("kernels.nvfp4")
CPU = torch.device("cpu")


def watch(inputs, columns):
    statistics = calibrate.Statistics(columns, CPU)
    for x in inputs:
        statistics.watch(x)
    return statistics


def inputs(calls=3, rows=50, columns=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, columns, generator=generator) * (1 + call)).bfloat16() for call in range(calls)]


def test_scale_of_the_largest_value_of_the_run():
    runs = inputs()
    runs[1][7, 5] = -40.0
    choice = calibrate.choose(watch(runs, 48))
    assert choice.amax == 40.0 and choice.least_amax == float(runs[0].abs().max())
    assert choice.input_scale == float(torch.tensor(40.0 / 2688, dtype=torch.float32))
    assert choice.clipped == 0.0 and choice.calls == 3 and choice.values == 3 * 50 * 48
    wide = calibrate.choose(watch(runs, 48), headroom=2.0)
    assert wide.input_scale == pytest.approx(2 * choice.input_scale, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 5, 63, 64, 65, 129])
def test_the_maximum_is_over_all_rows_and_the_count_over_some(rows):
    x = torch.zeros(rows, 16, dtype=torch.bfloat16)
    x[-1, -1] = 7.0
    statistics = watch([x], 16)
    assert float(statistics.amax[0]) == 7.0
    assert int(statistics.histogram.sum()) % 16 == 0 and 0 < int(statistics.histogram.sum()) <= 64 * 16


def test_clipping_rate_and_quantile():
    """Of 48 x 50 values 24 are large: a quantile of 1 % takes the largest of the others, and exactly 24 clip."""
    x = torch.full((50, 48), 1.5, dtype=torch.bfloat16)
    x[::2, 0] = -96.0
    x = x[:48]
    count = 48 * 48
    statistics = watch([x], 48)
    exact = calibrate.choose(statistics)
    assert exact.clipped == 0 and exact.input_scale == pytest.approx(96 / 2688)
    share = calibrate.choose(statistics, clip=24 / count)
    assert share.input_scale == pytest.approx(1.5 / 2688) and share.clipped == 24 / count
    less = calibrate.choose(statistics, clip=23 / count)
    assert less.input_scale == pytest.approx(96 / 2688)


def test_errors_are_those_of_the_kept_rows():
    runs = inputs(calls=2, rows=4)
    choice = calibrate.choose(watch(runs, 48))

    def db(scales):
        signal = sum(float(x.double().square().sum()) for x in runs)
        error = sum(
            float((nvfp4.dequantize(nvfp4.quantize(x, scale)).double() - x.double()).square().sum())
            for x, scale in zip(runs, scales, strict=True)
        )
        return 10 * math.log10(signal / error)

    assert choice.dynamic_db == pytest.approx(db([nvfp4.default_decode_scale(x) for x in runs]), rel=1e-9)
    assert choice.static_db == pytest.approx(db([choice.input_scale] * 2), rel=1e-9)
    assert 15 < choice.static_db < 30 and abs(choice.static_db - choice.dynamic_db) < 1.5


def test_clipping_costs_what_the_error_says():
    runs = inputs(calls=1, rows=4)
    statistics = watch(runs, 48)
    assert calibrate.choose(statistics, clip=0.2).static_db < calibrate.choose(statistics).static_db - 3


def test_rows_are_kept_of_the_latest_calls():
    runs = inputs(calls=30, rows=9)
    statistics = watch(runs, 48)
    kept = calibrate.ROWS // 3  # nine rows at distance three are three rows a call
    assert statistics.calls == 30 and sorted(set(statistics.call_of_row) - {-1}) == list(range(30 - 24, 30))
    assert sum(call >= 0 for call in statistics.call_of_row) >= kept // 2
    for at, call in enumerate(statistics.call_of_row):
        if call >= 6:
            assert any(torch.equal(statistics.rows[at], row) for row in runs[call])


def test_dtypes_and_leading_axes():
    x = inputs(calls=1)[0]
    for variant in (x.float(), x.half(), x[None], x.reshape(5, 10, 48)):
        statistics = watch([variant], 48)
        assert statistics.calls == 1 and float(statistics.amax[0]) == float(x.abs().max())
    statistics = watch([x.double(), torch.zeros(0, 48), x.to("meta")], 48)
    assert statistics.calls == 0 and statistics.unseen == 3


def test_zeros_take_any_scale():
    choice = calibrate.choose(watch([torch.zeros(4, 16, dtype=torch.bfloat16)], 16))
    assert choice.input_scale > 0 and choice.dynamic_db is None and choice.static_db is None and choice.clipped == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_an_error(value):
    x = inputs(calls=1)[0]
    x[3, 3] = value
    with pytest.raises(calibrate.CalibrationError, match="blocks.0.mlp.fc1: its input held Inf or NaN"):
        calibrate.choose(watch([x], 48), name="blocks.0.mlp.fc1")


def test_nothing_seen_is_an_error():
    with pytest.raises(calibrate.CalibrationError, match="x: no input was seen"):
        calibrate.choose(calibrate.Statistics(16, CPU), name="x")


def test_more_calls_than_places():
    statistics = calibrate.Statistics(16, CPU)
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    for call in range(calibrate.CALLS + 3):
        statistics.watch(x * (1 + call))
    choice = calibrate.choose(statistics)
    assert choice.calls == calibrate.CALLS + 3 and choice.amax == float((x * (calibrate.CALLS + 3)).max())
