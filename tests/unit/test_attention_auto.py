"""``auto``: what is timed and how long, what is kept and when it is measured again; with a clock that is made up."""

# ruff: noqa: F811  (pytest fixtures are imported and named as arguments)
from __future__ import annotations

import contextlib
import json

import pytest
import torch
from attention_stand_ins import attention, certify, fresh, only, oracle, qkv, stand_in  # noqa: F401

auto, dispatch, probe = attention.auto, attention.dispatch, attention.probe
BF16 = torch.bfloat16


class Clock:
    """Time passes by what each backend is said to take; every call is counted with its number of heads."""

    def __init__(self):
        self.now_ms, self.calls = 0.0, []

    def backend(self, name, ms, **changes):
        def attend(q, k, v, scale):
            self.calls.append((name, q.shape[1]))
            self.now_ms += ms * q.shape[1] / 4
            noise = changes.get("noise", 0.0)
            out = oracle(q, k, v, scale)
            return (out + noise * out.std() * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).to(
                v.dtype
            )

        fields = {key: value for key, value in changes.items() if key not in ("noise", "fails")}
        if "fails" in changes:

            def attend(q, k, v, scale):  # noqa: F811
                raise changes["fails"]

        attend.__module__ = __name__
        return stand_in(lambda: attend, name=name, **{"exact": True, **fields})

    def event(self, enable_timing):
        clock = self

        class Event:
            def record(self):
                self.at = clock.now_ms

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at - self.at

        return Event()


@pytest.fixture
def clock(monkeypatch, tmp_path, fresh):
    """The CPU counts as a GPU whose events read a clock of our own; the cache is the test's."""
    clock = Clock()
    monkeypatch.setenv("H3BW_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "measurable", lambda device: True)
    monkeypatch.setattr(auto, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(auto, "wait", lambda device: None)
    monkeypatch.setattr(auto, "device_name", str)
    monkeypatch.setattr(certify, "needs", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    certify.clear()
    yield clock
    certify.clear()


def files(folder, schema=auto.SCHEMA):
    found = [json.loads(path.read_text()) for path in (folder / "certificates").glob("*.json")]
    return [document for document in found if document["schema"] == schema]


def decide(request=None, rows=300, **changes):
    request = attention.Request() if request is None else request
    plan = attention.plan_for(request, qkv(rows, 128, heads=4, dtype=BF16, **changes))
    return plan, plan.decision


def restart():
    """What a new process knows: the files."""
    certify.clear()
    attention.forget()


def test_the_fastest_exact_backend_is_kept(clock, only, tmp_path):
    only(clock.backend("sdpa", 9.0, measured=False), clock.backend("slow", 40.0), clock.backend("fast", 10.0),
         clock.backend("near", 11.0))  # fmt: skip
    plan, decision = decide()
    assert plan.backend.name == decision.chosen == "fast"
    assert set(decision.samples) == {"fast", "near"} and len(decision.samples["fast"]) == auto.ROUNDS
    assert decision.screened["slow"] == 40.0 and "4.00 times the fastest" in decision.dropped["slow"]
    assert set(decision.first_call_ms) == {"slow", "fast", "near"}
    assert decision.errors["fast"]["cosine"] > 0.9999
    stored = files(tmp_path)
    assert len(stored) == 1 and stored[0]["choice"]["chosen"] == "fast"
    assert {"device", "driver", "torch"} <= set(stored[0]["choice"]["environment"])
    assert str(decision).startswith("auto chose fast for bfloat16, 1 x 4 x 128, at most 512 rows (measured in ")


def test_a_later_run_measures_nothing(clock, only, tmp_path):
    only(clock.backend("one", 20.0), clock.backend("two", 10.0))
    decide()
    probes = len(files(tmp_path, certify.SCHEMA))
    assert probes == 2
    restart()
    clock.calls.clear()
    plan, decision = decide()
    assert plan.backend.name == "two" and decision.from_cache and clock.calls == []
    assert "(from the cache)" in str(decision)
    decide(rows=299)
    assert clock.calls == []  # same kind of call in the same process


@pytest.mark.parametrize("changed", ["driver", "torch", "device"])
def test_another_machine_measures_again(clock, only, tmp_path, monkeypatch, changed):
    only(clock.backend("one", 20.0), clock.backend("two", 10.0))
    decide()
    restart()
    real = certify.environment
    monkeypatch.setattr(certify, "environment", lambda device: {**real(device), changed: "another"})
    assert not decide()[1].from_cache and len(files(tmp_path)) == 2


def test_another_version_or_source_measures_again(clock, only, tmp_path, monkeypatch):
    only(clock.backend("one", 20.0, packages=("flash-attn-4",)), clock.backend("two", 10.0))
    decide()
    restart()
    with monkeypatch.context() as patch:
        patch.setattr(certify, "_version", lambda package: "5.0" if package == "flash-attn-4" else None)
        assert not decide()[1].from_cache
    restart()
    with monkeypatch.context() as patch:
        patch.setattr(certify, "_folder_digests", lambda folder: ("another",))
        assert not decide()[1].from_cache
    restart()
    assert decide()[1].from_cache and len(files(tmp_path)) == 3


def test_what_makes_another_kind_of_call(clock, only, tmp_path):
    only(clock.backend("one", 20.0), clock.backend("two", 10.0))
    kinds = [
        {}, {"rows": 600}, {"request": attention.Request(layout="contiguous")},
        {"request": attention.Request(scale=0.3)}, {"request": attention.Request(max_error=0.1)},
    ]  # fmt: skip
    for number, kind in enumerate(kinds, 1):
        decide(**kind)
        assert len(files(tmp_path)) == number
    attention.plan_for(attention.Request(), [t.contiguous() for t in qkv(300, 128, heads=4, dtype=BF16)])
    assert len(files(tmp_path)) == len(kinds) + 1


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(1, 64), (64, 64), (65, 128), (512, 512), (38_016, 65_536), (65_536, 65_536), (108_800, 131_072)]
)  # fmt: skip
def test_rows_fall_into_few_buckets(rows, bucket):
    assert auto.bucket(rows) == bucket


def test_the_cost_stays_under_two_percent_of_a_run(clock, only, monkeypatch):
    """20 steps x 50 blocks are 1,000 calls: choosing may take as long as 20 of them."""
    monkeypatch.setattr(auto, "SCREENING_FLOPS", 4 * 300 * 300 * 128)  # one head of four
    backends = [clock.backend(f"b{number}", 100.0 + number) for number in range(4)]
    only(*backends, clock.backend("far", 180.0), clock.backend("sdpa", 1.0, measured=False))
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    _, decision = decide()
    assert len(decision.samples) == auto.FINALISTS
    assert clock.now_ms <= auto.BUDGET_CALLS * 100.0
    assert ("far", 4) not in clock.calls  # never at full size


def test_samples_rotate(clock, only, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("a", 10.0), clock.backend("b", 10.1), clock.backend("c", 10.2))
    decide()
    timed = [name for name, _ in clock.calls][-9:]
    assert timed == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_short_calls_are_timed_in_groups(clock, only, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("a", 0.1), clock.backend("b", 0.01))
    assert decide()[1].chosen == "b"
    assert sum(name == "b" for name, _ in clock.calls) <= 3 + auto.ROUNDS * auto.MOST_CALLS + 2 * auto.MOST_CALLS


@pytest.mark.parametrize(
    ("flash", "other", "chosen"),
    [
        (10.0, 9.9, "sdpa_flash"),  # within 2 %: ComfyUI's own choice stays
        (10.0, 9.7, "fa4"),
        (0.05, 0.047, "sdpa_flash"),  # short calls are bound by the host: within 10 %
        (0.05, 0.04, "fa4"),
        (10.0, 12.0, "sdpa_flash"),
    ],
)
def test_comfyuis_own_choice_is_left_for_a_clear_gain_only(clock, only, monkeypatch, flash, other, chosen):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("fa4", other), clock.backend("sdpa_cudnn", 1.2 * flash), clock.backend("sdpa_flash", flash))
    assert decide()[1].chosen == chosen


def test_one_that_fails_is_dropped_with_its_reason(clock, only, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(
        clock.backend("broken", 1.0, fails=RuntimeError("no kernel image is available")),
        clock.backend("full", 1.0, fails=torch.cuda.OutOfMemoryError("CUDA out of memory")),
        clock.backend("good", 10.0),
    )
    plan, decision = decide()
    assert plan.backend.name == "good"
    assert decision.dropped["broken"] == "RuntimeError: no kernel image is available"
    assert "out of memory" in decision.dropped["full"]


def test_one_whose_result_is_not_finite_is_no_choice(clock, only, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("overflows", 1.0, noise=float("inf")), clock.backend("good", 10.0))
    plan, decision = decide()
    assert plan.backend.name == "good"
    assert decision.dropped["overflows"] == "its result is not finite on these tensors, where the reference is"


def test_one_that_fails_its_probe_is_no_candidate(clock, only):
    only(clock.backend("wrong", 1.0, noise=0.2), clock.backend("good", 10.0))
    plan, decision = decide()
    assert plan.backend.name == "good" and "wrong" not in decision.first_call_ms
    assert "failed its probe on cpu: 129 rows: relative error" in dict(plan.passed_over)["wrong"]


def test_approximate_ones_join_only_within_the_bound(clock, only):
    only(
        clock.backend("exact", 20.0),
        clock.backend("rough", 5.0, exact=False, noise=0.03),
        clock.backend("crash", 1.0, exact=False, opt_in=True),
        clock.backend("sparse", 1.0, exact=False, measured=False),
    )
    plan, decision = decide()
    assert plan.backend.name == "exact" and {name for name, _ in clock.calls} == {"exact"}
    plan, decision = decide(attention.Request(max_error=0.01))
    assert plan.backend.name == "exact"
    assert decision.dropped["rough"].startswith("relative error 2.99") and decision.dropped["rough"].endswith(
        "bound 0.01"
    )
    plan, decision = decide(attention.Request(max_error=0.05))
    assert plan.backend.name == "rough" and 0.02 < decision.errors["rough"]["relative"] < 0.04
    assert {name for name, _ in clock.calls} == {"exact", "rough"}


def test_a_cancel_passes_and_nothing_is_kept(clock, only, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("a", 10.0), clock.backend("b", 11.0))

    class Cancelled(BaseException):
        pass

    asked = []

    def between():
        asked.append(1)
        if len(asked) > 5:
            raise Cancelled

    with pytest.raises(Cancelled):
        attention.plan_for(attention.Request(), qkv(300, 128, heads=4, dtype=BF16), between)
    assert not files(tmp_path) and not auto.decisions() and not dispatch._plans
    assert decide()[1].chosen == "a"


@pytest.mark.parametrize("why", ["torch.compile is tracing", "a CUDA graph is being captured"])
def test_never_while_tracing_or_capturing(clock, only, monkeypatch, why):
    only(clock.backend("sdpa", 30.0, measured=False), clock.backend("fast", 10.0))
    with monkeypatch.context() as patch:
        patch.setattr(certify, "busy", lambda device: why)
        plan, decision = decide()
        assert plan.backend.name == "sdpa" and decision is None and not dispatch._plans
        assert f"not probed on cpu yet, and {why}" in dict(plan.passed_over)["fast"]
        assert not clock.calls
    assert decide()[0].backend.name == "fast"
    clock.calls.clear()
    attention.dispatch._plans.clear()
    with monkeypatch.context() as patch:
        patch.setattr(certify, "busy", lambda device: why)
        assert decide()[0].backend.name == "fast"  # decided before: used
    assert not clock.calls


def test_on_a_cpu_nothing_is_timed(fresh, monkeypatch):
    def never(*arguments):
        raise RuntimeError("timed")

    monkeypatch.setattr(auto, "measure", never)
    plan, decision = decide()
    assert plan.backend.name == "sdpa" and decision is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d | {"schema": "other"},
        lambda d: d | {"key": "0" * 64},
        lambda d: d | {"choice": {}},
        lambda d: d | {"choice": d["choice"] | {"chosen": "gone"}},
        lambda d: d | {"choice": d["choice"] | {"samples": {"one": ["x"]}}},
        lambda d: d | {"choice": d["choice"] | {"samples": []}},
        lambda d: [],
    ],
)
def test_a_damaged_file_counts_as_absent(clock, only, tmp_path, damage):
    only(clock.backend("one", 20.0), clock.backend("two", 10.0))
    decide()
    stored = (tmp_path / "certificates").glob("*.json")
    path = next(path for path in stored if json.loads(path.read_text())["schema"] == auto.SCHEMA)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    restart()
    assert decide()[1].from_cache is False


def test_a_single_candidate_is_not_timed(clock, only, monkeypatch):
    monkeypatch.setattr(probe, "refusal", lambda *arguments: None)
    only(clock.backend("lone", 10.0))
    plan, decision = decide()
    assert plan.backend.name == "lone" and decision.samples == {} and len(clock.calls) == 1


# ---------------------------------------------------------------- the probe


def test_the_probe_catches_what_smoothing_is_for(clock, only):
    def attend(q, k, v, scale):
        k = (k.float() / k.abs().amax() * 127).round() / 127 * k.abs().amax()  # INT8, one scale, no smoothing
        return oracle(q, k, v, scale).to(v.dtype)

    record = stand_in(lambda: attend, exact=False)
    reason = probe.probe(record, attend, torch.device("cpu"))
    assert reason.startswith("129 rows, k offset by 50: relative error")

    def smoothed(q, k, v, scale):
        return attend(q, k - k.mean(2, keepdim=True), v, scale)

    assert probe.probe(record, smoothed, torch.device("cpu")) is None


def test_the_probe_catches_a_kernel_that_writes_into_k(clock):
    def attend(q, k, v, scale):
        out = oracle(q, k, v, scale).to(v.dtype)
        k -= k.mean(2, keepdim=True)
        return out

    assert "wrote into its inputs" in probe.probe(stand_in(lambda: attend), attend, torch.device("cpu"))


def test_the_probe_catches_a_scale_that_is_ignored(clock):
    def attend(q, k, v, scale):
        return oracle(q, k, v).to(v.dtype)

    assert probe.probe(stand_in(lambda: attend), attend, torch.device("cpu")).startswith("129 rows, scale 0.05")


def test_every_backend_that_runs_here_passes_its_probe():
    for name in ("sdpa", "sdpa_math"):
        record = next(record for record in attention.records() if record.name == name)
        assert probe.probe(record, attention.registry.loaded(record)[0], torch.device("cpu")) is None


def test_one_that_may_crash_leaves_a_note_first(clock, only, tmp_path):
    noted = []

    def attend(q, k, v, scale):
        noted.append(files_with_notes(tmp_path))
        return oracle(q, k, v, scale).to(v.dtype)

    attend.__module__ = __name__
    record = stand_in(lambda: attend, name="risky", exact=False, opt_in=True)
    only(record, clock.backend("sdpa", 1.0))
    attention.ensure("cpu")
    assert not noted  # not asked for
    attention.ensure("cpu", ["risky"])
    assert noted[0] == ["risky"] and files_with_notes(tmp_path) == []
    # The process died in the probe: the note is all there is.
    key = probe.key_of(record, torch.device("cpu"))
    certify.keep(key, {"probing": "risky"})
    restart()
    count = len(noted)
    with pytest.raises(attention.AttentionRefused, match="its last probe on this device never came back"):
        attention.run("risky", *qkv(16, 128, dtype=BF16))
    assert len(noted) == count


def files_with_notes(folder):
    found = [json.loads(path.read_text()) for path in (folder / "certificates").glob("*.json")]
    return [document["probing"] for document in found if "probing" in document]
