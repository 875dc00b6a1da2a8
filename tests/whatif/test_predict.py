"""What-if against real runs: exact where it says so, within a stated tolerance elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ds4flow.stages.draft import MtpDrafter

from ds4flow.depth import DepthPolicy
from ds4flow.errors import Ds4FlowError
from ds4flow.pace import Prior
from ds4flow.runs.record import Run
from ds4flow.whatif.costs import CostModel
from ds4flow.whatif.predict import Prediction, Setting, predict
from ds4flow.whatif.traced import Traced
from tests.demo_runs import Demo
from tests.fakes import FakeModel, FakeMtp, chaotic, decode, fake, reciting

TOLERANCE = 0.2
"""Of estimated mean acceptance lengths, as a share of the real one."""

COUNTS = ("cycles", "num_draft_tokens", "num_accepted_draft_tokens", "relaxed_accepts")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Times are not looked at here, so they are taken once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4flow.trace.ROUNDS", (1, 1))
        yield


def counts(found: Prediction | None) -> tuple[float, ...]:
    assert found is not None
    return found.cycles, found.drafted, found.accepted, found.relaxed


def measured(summary: dict[str, Any]) -> tuple[float, ...]:
    return tuple(summary[name] for name in COUNTS)


# --- the demo model


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"), commit__max_tokens=96)


@pytest.fixture(scope="module")
def probed(demo: Demo) -> Traced:
    return Traced.read(demo.run(mtp__draft=8, mtp__probe=True, trace="full"))


@pytest.fixture(scope="module")
def used(demo: Demo) -> Traced:
    """A trace of cycles whose drafts were verified: fewer places, but all drafts judged."""
    return Traced.read(demo.run(mtp__draft=8, trace="full"))


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_exact_modes_are_predicted_exactly(
    demo: Demo, probed: Traced, used: Traced, depth: int, gate: float
) -> None:
    real = demo.run(mtp__draft=depth, mtp__gate=gate).summary
    found = predict(probed, Setting(depth, gate=gate), None)
    assert found is not None
    assert found.exact
    assert counts(found) == measured(real)
    assert found.acceptance == real["draft_acceptance_rate"]
    assert found.mean_length == real["mean_acceptance_length"]
    guess = predict(used, Setting(depth, gate=gate), None)
    assert guess is not None
    assert not guess.exact
    assert guess.mean_length == pytest.approx(real["mean_acceptance_length"], rel=TOLERANCE)


@pytest.mark.parametrize(("depth", "margin"), [(1, 0.5), (3, 0.5), (3, 0.8)])
def test_margins_are_estimated_within_the_tolerance(
    demo: Demo, probed: Traced, used: Traced, depth: int, margin: float
) -> None:
    real = demo.run(mtp__draft=depth, mtp__margin=margin).summary
    assert real["relaxed_accepts"] > 0
    for traced in (probed, used):
        found = predict(traced, Setting(depth, margin), None)
        assert found is not None
        assert not found.exact
        assert found.relaxed > 0
        assert found.mean_length == pytest.approx(real["mean_acceptance_length"], rel=TOLERANCE)
        assert found.tokens == real["output_tokens"]


def test_a_margin_that_never_accepts_another_token_is_exact(demo: Demo, probed: Traced) -> None:
    found = predict(probed, Setting(3, 0.999999), None)
    assert found is not None
    assert (found.exact, found.relaxed) == (True, 0)
    assert counts(found) == counts(predict(probed, Setting(3), None))


def test_a_used_trace_predicts_its_own_run_exactly(used: Traced) -> None:
    found = predict(used, Setting(8), None)
    assert found is not None
    assert found.exact
    assert counts(found) == measured(used.run.summary)


def test_what_was_not_traced_is_not_told(probed: Traced) -> None:
    assert predict(probed, Setting(9), None) is None
    assert predict(probed, Setting("auto"), None) is None  # needs costs
    costs = CostModel.of(probed)
    assert costs is not None
    automatic = predict(probed, Setting("auto"), costs)
    assert automatic is not None
    assert not automatic.exact
    assert automatic.tokens == 96
    assert 96 / 9 <= automatic.cycles <= 96
    assert automatic.cycles + automatic.accepted == 96
    assert predict(probed, Setting("auto", 0.5), costs) is None


def test_predictions_without_the_probe_know_less(used: Traced) -> None:
    costs = CostModel.of(used)
    assert costs is not None
    assert predict(used, Setting("auto"), costs) is None
    found = predict(used, Setting(2), costs)
    assert found is not None
    assert found.tokens_per_second is not None


# --- every way to end, on the fake model, exactly


class Varying(FakeMtp):
    """Gaps that differ from place to place."""

    def step(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.gap = 0.5 + (arguments[2] * 7 % 11) / 4
        return super().step(*arguments)


def varying(target: Callable[[tuple[int, ...]], int], wrong: Callable[[int], bool]) -> FakeModel:
    model = fake(target)
    model.mtp = Varying(model, wrong)
    model.mtp.own_rows = range(1000)
    return model


def traced_fake(folder: Path, target: Any, wrong: Any, **options: Any) -> Traced:
    knobs = {"depth": 6, "gate": 0.0, "probe": True, "margin": 1.0, "keep_accepted": False}
    knobs |= options
    decode(folder, varying(target, wrong), drafter=MtpDrafter, log={"trace": "full"}, **knobs)
    config = {
        "mtp.draft": knobs["depth"],
        "mtp.gate": knobs["gate"],
        "mtp.probe": knobs["probe"],
        "mtp.margin": knobs["margin"],
        "mtp.keep_accepted": knobs["keep_accepted"],
        "commit.max_tokens": options.get("max_tokens", 24),
    }
    facts = json.loads((folder / "run.json").read_text())
    facts |= {
        "choices": {"draft": "mtp"},
        "context_limit": options.get("context", 1000),
        "config": {key: {"value": value, "source": "cli"} for key, value in config.items()},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return Traced.read(Run.open(folder))


ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "limit": (chaotic(1), {"max_tokens": 37}),
    "context": (chaotic(2), {"context": 40, "max_tokens": 100}),
    "eos": (reciting("three words, and the end", 6), {"max_tokens": 100}),
    "stop": (reciting("one two three four five six", 6), {"max_tokens": 100, "stop": ["e f"]}),
    "past eos": (reciting("abc", 6), {"max_tokens": 30, "ignore_eos": True}),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_way_to_end_is_predicted_exactly(tmp_path: Path, end: str) -> None:
    target, options = ENDS[end]

    def wrong(position: int) -> bool:
        return position % 5 in (0, 3)

    traced = traced_fake(tmp_path / "trace", target, wrong, **options)
    for depth in (0, 1, 2, 3, 6):
        for gate in (0.0, 1.3, 2.4, 9.0):
            found = predict(traced, Setting(depth, gate=gate), None)
            real = decode(
                tmp_path / f"{depth}-{gate}", varying(target, wrong), depth=depth, gate=gate,
                drafter=MtpDrafter, **options,
            )  # fmt: skip
            assert real.summary["finish_reason"] == traced.run.summary["finish_reason"]
            assert found is not None
            assert found.exact
            assert counts(found) == measured(real.summary), (depth, gate)


def test_a_margin_that_accepts_anything_is_estimated(tmp_path: Path) -> None:
    traced = traced_fake(tmp_path / "a", chaotic(4), lambda position: position % 4 == 0)
    found = predict(traced, Setting(3, 0.001), None)
    assert found is not None
    assert (found.exact, found.acceptance) == (False, pytest.approx(1.0))
    assert found.relaxed > 0


def test_a_gate_below_the_traced_one_is_not_told(tmp_path: Path) -> None:
    traced = traced_fake(tmp_path / "a", chaotic(4), lambda position: False, gate=1.0)
    assert predict(traced, Setting(2, gate=0.5), None) is None
    assert predict(traced, Setting(2, gate=2.0), None) is not None


def test_rows_that_the_drafter_keeps_make_nothing_exact(tmp_path: Path) -> None:
    traced = traced_fake(tmp_path / "a", chaotic(4), lambda position: False, keep_accepted=True)
    found = predict(traced, Setting(2), None)
    assert found is not None
    assert not found.exact


@pytest.mark.parametrize("step", [2.0, 30.0, 90.0])
def test_the_auto_policy_is_played_as_a_real_run_plays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Times of a real run jitter; with the model's times given to it, it does what was told."""

    def wrong(position: int) -> bool:
        return position % 7 in (0, 4)

    target, count = chaotic(6), 110
    traced = traced_fake(tmp_path / "trace", target, wrong, depth=8, max_tokens=count)
    costs = CostModel(100.0, (100.0, 112.0, 125.0), (step,), step, commit=3.0, host=7.0)
    model = varying(target, wrong)
    costs = replace(costs, prior=Prior.of(model))  # type: ignore[arg-type]
    found = predict(traced, Setting("auto"), costs)
    observe = DepthPolicy.observe

    def observe_told(self: DepthPolicy, **seen: Any) -> None:
        drafting = costs.drafting(seen["steps"], 0)
        whole = costs.cycle(seen["drafted"], seen["steps"], 0)
        times = {"draft_s": drafting / 1e6, "verify_s": (whole - drafting) / 1e6}
        observe(self, **(seen | times))

    monkeypatch.setattr(DepthPolicy, "observe", observe_told)
    options = {"drafter": MtpDrafter, "depth": "auto", "max_tokens": count}
    real = decode(tmp_path / "real", model, **options)
    assert found is not None
    assert not found.exact
    assert counts(found) == measured(real.summary)
    assert (found.drafted > 0.5 * found.cycles) == (step < 90.0)


@pytest.mark.parametrize(
    ("config", "summary", "problem"),
    [
        ({}, {"identity": "exact"}, "did not record its config"),
        ({"mtp.draft": 2}, {}, "left no summary"),
        ({"mtp.draft": 2}, {"identity": "relaxed"}, "is relaxed"),
        ({"mtp.draft": 2}, {"identity": "sampled"}, "is sampled"),
        ({"mtp.draft": "auto"}, {"identity": "exact"}, "a depth of its own"),
        ({"mtp.draft": 2}, {"identity": "exact"}, "drafted nothing"),
    ],
)
def test_runs_that_cannot_tell_are_refused(
    tmp_path: Path, config: dict[str, Any], summary: dict[str, Any], problem: str
) -> None:
    keys = {key: {"value": value, "source": "cli"} for key, value in config.items()}
    (tmp_path / "run.json").write_text(json.dumps({"status": "complete", "config": keys}))
    (tmp_path / "cycles.jsonl").write_text("")
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(Ds4FlowError, match=problem) as error:
        Traced.read(Run.open(tmp_path))
    assert "mtp.probe=true" in error.value.fix
    (tmp_path / "cycles.jsonl").unlink()
    if "mtp.draft" in config:
        with pytest.raises(Ds4FlowError, match="trace=off"):
            Traced.read(Run.open(tmp_path))


# --- times


def test_the_time_of_a_run_is_the_sum_of_its_cycles(tmp_path: Path) -> None:
    traced = traced_fake(tmp_path / "a", chaotic(4), lambda position: position % 3 == 0)
    costs = CostModel(100.0, (100.0, 130.0, 150.0), (20.0, 25.0), 20.0, commit=3.0, host=7.0)
    assert costs.verify(5) == 190.0  # as steep as the last ones
    assert costs.drafting(2, 3) == 2 * 20.0 + 15.0
    assert costs.drafting(0, 3) == 0.0
    plain = predict(traced, Setting(0), costs)
    assert plain is not None
    assert plain.micros == pytest.approx(24 * 110.0)
    assert plain.tokens_per_second == pytest.approx(1e6 / 110.0)
    one = predict(traced, Setting(1), costs)
    assert one is not None
    cycles = one.cycles
    refreshed = sum_of_refreshes(traced)
    wide, narrow = one.drafted, cycles - one.drafted
    expected = wide * (130 + 20 + 10) + narrow * 110 + 5 * refreshed
    assert one.micros == pytest.approx(expected)


def sum_of_refreshes(traced: Traced) -> int:
    """Cycles at depth 1 that draft after a cycle that accepted: one row each to refresh."""
    index, stale, found = 0, 0, 0
    while index < len(traced.output):
        drafts = traced.by_index[index].drafts[:1]
        found += bool(drafts) and stale
        stale = int(bool(drafts) and traced.output[index + 1 : index + 2] == drafts)
        index += 1 + stale
    return found


def test_costs_come_from_the_run(probed: Traced, used: Traced) -> None:
    for traced in (probed, used):
        costs = CostModel.of(traced)
        assert costs is not None
        assert len(costs.passes) == 9
        assert min(*costs.passes, *costs.first, costs.next, costs.plain, costs.commit) > 0
        own = Setting(0) if traced is probed else Setting(8)
        found = predict(traced, own, costs)
        assert found is not None
        assert found.micros is not None
