"""check=state: silent on every honest run, and a word on which lane of which layer is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ds4flow.stages.check import StateCheck
from ds4flow.stages.draft import MtpDrafter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError
from ds4flow.overrides import quoted
from ds4flow.pipeline import Stage, State
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline
from tests.fakes import BOS_ID, Result, chaotic, decode, fake, fake_with_mtp, greedy

PROMPT = (BOS_ID, *range(40, 45))
CYCLE = ("draft", "check", "verify", "commit", "check")


@dataclass
class Sabotage(Stage):
    """Does `harm` to the state in one cycle, where a mistake of the cache would."""

    at: int
    harm: Callable[[State], None]

    def run(self, state: State) -> None:
        if state.cycle == self.at:
            self.harm(state)


def checked(folder: Path, model: object, **options: object) -> tuple[Result, StateCheck]:
    check = StateCheck(keep_accepted=bool(options.get("keep_accepted", False)))
    extra = {"check": check, **options.pop("extra", {})}  # type: ignore[dict-item]
    cycle = options.pop("cycle", CYCLE)
    result = decode(folder, model, extra=extra, cycle=cycle, **options)  # type: ignore[arg-type]
    return result, check


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(0, 8),
    share=st.floats(0, 1),
    max_tokens=st.integers(1, 30),
    mtp=st.booleans(),
    keep_accepted=st.booleans(),
)
def test_any_script_passes(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    depth: int,
    share: float,
    max_tokens: int,
    mtp: bool,
    keep_accepted: bool,
) -> None:
    def right(*place: int) -> bool:
        return np.random.default_rng([seed, *place]).random() < share

    target = chaotic(seed)
    model = fake_with_mtp(target, wrong=lambda position: not right(position))
    options = {"drafter": MtpDrafter, "keep_accepted": keep_accepted}
    if not mtp:
        model, options = fake(target), {"right": right}
    elif keep_accepted:
        model.mtp.own_rows = range(1000)  # type: ignore[union-attr]
    folder = tmp_path_factory.mktemp("runs") / "run"
    result, check = checked(folder, model, depth=depth, max_tokens=max_tokens, **options)
    assert result.state.output == greedy(target, PROMPT, max_tokens)
    assert result.run.facts["check"] == {"states_compared": check.states, "different": []}
    drafting = sum(bool(cycle["drafts"]) for cycle in result.cycles)
    assert check.states == result.state.cycle + (drafting if mtp and not keep_accepted else 0)


def test_a_changed_row_is_named_by_its_layer(tmp_path: Path) -> None:
    def harm(state: State) -> None:
        state.cache.rows[7] += 1  # type: ignore[attr-defined]

    with pytest.raises(
        Ds4FlowError, match=r"after \d+ tokens \(cycle 3\).* in layer 0\n"
    ) as caught:
        checked(
            tmp_path / "run",
            fake(chaotic(1)),
            depth=2,
            extra={"sabotage": Sabotage(3, harm)},
            cycle=("draft", "verify", "commit", "sabotage", "check"),
        )
    assert "pipeline=parity" in caught.value.fix


def test_an_uncommitted_row_may_be_anything(tmp_path: Path) -> None:
    """What lies beyond the cursor is invisible: a check that saw it would cry wolf."""

    def harm(state: State) -> None:
        state.cache.rows[state.cache.length + 3] = 99  # type: ignore[attr-defined]

    extra = {"sabotage": Sabotage(3, harm)}
    cycle = ("draft", "verify", "commit", "sabotage", "check")
    result, _ = checked(tmp_path / "run", fake(chaotic(1)), depth=2, extra=extra, cycle=cycle)
    assert result.state.output == greedy(chaotic(1), PROMPT, 24)


def test_a_drafters_row_that_was_not_refreshed_is_the_mtp_lane(tmp_path: Path) -> None:
    def harm(state: State) -> None:
        _, stream, token = state.cache.mtp[6]  # type: ignore[attr-defined]
        state.cache.mtp[6] = ("drafter", stream, token)  # type: ignore[attr-defined]

    model = fake_with_mtp(chaotic(2), wrong=lambda position: position % 4 == 0)
    with pytest.raises(Ds4FlowError, match=r"cycle 4\).* in mtp\n"):
        checked(
            tmp_path / "run",
            model,
            depth=3,
            drafter=MtpDrafter,
            extra={"sabotage": Sabotage(4, harm)},
            cycle=("draft", "sabotage", "check", "verify", "commit", "check"),
        )


@pytest.mark.parametrize(
    ("lane", "of"),
    [
        ("layer 0 window", lambda cache: cache.layers[0].window),
        ("layer 3 window", lambda cache: cache.layers[3].window),
        ("layer 2 compressor values", lambda cache: cache.layers[2].compressed.values),
        ("layer 2 compressor rows", lambda cache: cache.layers[2].compressed.pool),
        ("layer 2 indexer scores", lambda cache: cache.layers[2].index.scores),
        ("layer 2 indexer rows", lambda cache: cache.layers[2].index.pool),
        ("mtp window", lambda cache: cache.mtp.window),
    ],
)
def test_every_lane_of_a_real_cache_is_watched(
    tmp_path: Path, golden_dir: Path, lane: str, of: Callable
) -> None:
    """One bit of one lane is flipped in cycle 2; the run stops and names that lane alone."""
    config = compose(
        [
            *("model=file", "model.chat=raw", "model.profile=official", "log=quiet", "check=state"),
            f"model.path={quoted(str(golden_dir / 'tiny-f32.gguf'))}",
            f"model.mtp_path={quoted(str(golden_dir / 'tiny-f32.mtp-support.gguf'))}",
            *("runtime.kernels=reference", "mtp.draft=1", "prompt=QQQQQQQQ"),
            *("commit.max_tokens=6", "commit.ignore_eos=true"),
        ]
    )
    pipeline = build_pipeline(config)
    where = "draft" if lane.startswith("mtp") else "commit"
    stage = pipeline.stages[where]
    run = stage.run

    def harmful(state: State) -> None:
        run(state)
        if state.cycle == 2:
            row = of(state.cache)[4 if "rows" not in lane else 0]
            row[:1] += 1.0

    stage.run = harmful  # type: ignore[method-assign]
    record = RunDir.create(tmp_path / "run")
    with pytest.raises(Ds4FlowError, match=rf"cycle 2\).* in {lane}\n"):
        pipeline.run(State(run=record, prompt=str(config.prompt)))
    assert record.facts["check"]["different"] == [lane]
