"""Wiring is checked when a pipeline is built; stages are closed however a run ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.pipeline import ALWAYS, FIELDS, Pipeline, Stage, State
from ds4flow.rundir import RunDir


@dataclass
class Probe(Stage):
    log: list[str] = field(default_factory=list)
    fail: BaseException | None = None

    def run(self, state: State) -> None:
        self.log.append("run")
        if self.fail is not None:
            raise self.fail

    def close(self, state: State) -> None:
        self.log.append("close")


class Ends(Probe):
    writes = ("done",)

    def run(self, state: State) -> None:
        super().run(state)
        if state.cycle == 3:
            state.done = "limit"


class NeedsModel(Probe):
    reads = ("model",)


class MakesModel(Probe):
    writes = ("model",)


class Misspelled(Probe):
    reads: ClassVar = ("modle",)


def state(tmp_path: Path) -> State:
    return State(run=RunDir.create(tmp_path / "run"), prompt="x")


def test_fields_with_a_value_from_the_start() -> None:
    assert {"run", "prompt", "drafts"} <= ALWAYS
    assert not {"model", "cache", "done", "verdict"} & ALWAYS
    assert set(FIELDS) > ALWAYS


def test_setup_once_then_cycles_until_done(tmp_path: Path) -> None:
    stages = {"a": Probe(), "b": Ends(), "c": Probe()}
    shared = state(tmp_path)
    Pipeline(stages, setup=["a"], cycle=["b"], observe=["c"]).run(shared)
    assert stages["a"].log == ["run", "close"]
    assert stages["b"].log == stages["c"].log == ["run"] * 3 + ["close"]
    assert set(shared.micros) == {"b", "c"}
    assert set(shared.total_micros) == {"a", "b", "c"}


def test_a_field_that_state_does_not_have() -> None:
    with pytest.raises(UsageError, match="'modle'") as caught:
        Pipeline({"x": Misspelled(), "e": Ends()}, setup=["x"], cycle=["e"])
    assert caught.value.fix == "did you mean model?"


def test_a_read_before_its_write_names_the_stage_to_move() -> None:
    stages = {"late": MakesModel(), "early": NeedsModel(), "e": Ends()}
    with pytest.raises(UsageError, match=r"stage early in pipeline\.setup reads model") as caught:
        Pipeline(stages, setup=["early", "late"], cycle=["e"])
    assert caught.value.fix == "put late before it"
    with pytest.raises(UsageError) as caught:
        Pipeline({"early": NeedsModel(), "e": Ends()}, setup=["early"], cycle=["e"])
    assert caught.value.fix == "add a stage that writes model to the pipeline"


def test_a_cycle_that_could_not_end_is_refused() -> None:
    with pytest.raises(UsageError, match="would not end"):
        Pipeline({"a": Probe()}, setup=[], cycle=["a"])
    with pytest.raises(UsageError, match="empty"):
        Pipeline({}, setup=[], cycle=[])


def test_a_promised_field_that_was_not_written(tmp_path: Path) -> None:
    stages = {"m": MakesModel(), "n": NeedsModel(), "e": Ends()}
    pipeline = Pipeline(stages, setup=["m", "n"], cycle=["e"])
    with pytest.raises(Ds4FlowError, match="stage n reads model, which has no value yet"):
        pipeline.run(state(tmp_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bug")])
def test_every_stage_is_closed_and_the_first_error_is_shown(
    tmp_path: Path, error: BaseException
) -> None:
    class FailsToClose(Probe):
        def close(self, state: State) -> None:
            super().close(state)
            raise Ds4FlowError("the disk is full")

    stages = {"a": FailsToClose(), "b": Ends(fail=error), "c": Probe()}
    with pytest.raises(type(error)):
        Pipeline(stages, setup=["a"], cycle=["b"], observe=["c"]).run(state(tmp_path))
    assert stages["c"].log == ["close"]
    calm = {"a": FailsToClose(), "b": Ends()}
    with pytest.raises(Ds4FlowError, match="disk is full"):
        Pipeline(calm, setup=["a"], cycle=["b"]).run(State(RunDir(tmp_path, {}), "x"))


class Shares(Probe):
    writes = ("model",)

    def share(self, state: State) -> None:
        self.log.append("share")
        state.model = "the model"  # type: ignore[assignment]


def test_what_is_shared_is_made_once_and_all_else_is_fresh(tmp_path: Path) -> None:
    shares, plain = Shares(), Probe()
    pipeline = Pipeline(
        {"shares": shares, "plain": plain, "ends": Ends()},
        setup=["shares", "plain"],
        cycle=["ends"],
    )
    first = state(tmp_path)
    pipeline.share(first)
    assert (shares.log, plain.log) == (["share"], [])
    first.tokens, first.cycle, first.mtp_off = [1, 2], 5, "why"
    run = RunDir.create(tmp_path / "other")
    second = first.share_with(run, "y")
    assert (second.model, second.prompt, second.run) == ("the model", "y", run)
    assert (second.tokens, second.cycle) == (None, 0)
    assert second.mtp_off == run.facts["mtp_off"] == "why"
    assert second.pieces is not first.pieces


def test_pipelines_share_when_the_stages_that_share_have_equal_keys() -> None:
    def key(**stages: Probe) -> object:
        wired = {**stages, "ends": Ends()}
        return Pipeline(wired, setup=list(stages), cycle=["ends"]).share_key()

    assert key(shares=Shares(), plain=Probe()) == key(shares=Shares(), plain=Probe(log=["x"]))
    assert key(shares=Shares()) != key(shares=Shares(log=["x"]))
    assert key(shares=Shares()) != key(plain=Probe())
