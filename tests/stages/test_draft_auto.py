"""mtp.draft=auto: greedy's text at every depth, decisions on record, and 0 where drafts miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ds4flow.stages import draft

from ds4flow.pace import AUTO_DEPTH_MAX
from tests.fakes import BOS_ID, FakeModel, Result, chaotic, decode, fake, fake_with_mtp, greedy

PROMPT = (BOS_ID, *range(40, 45))


class Clock:
    """Seconds that pass only when the machine works: `row` for each row after a pass's first."""

    def __init__(self, row: float, step: float) -> None:
        self.row, self.step, self.now = row, step, 0.0

    def perf_counter(self) -> float:
        return self.now

    def times(self, model: FakeModel) -> FakeModel:
        forward = model.forward

        def timed(tokens, cache):  # type: ignore[no-untyped-def]
            self.now += 1.0 + self.row * (len(tokens) - 1)
            return forward(tokens, cache)

        model.forward = timed  # type: ignore[method-assign]
        return model


def auto(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    right: Callable[[int, int], bool],
    *,
    row: float = 0.1,
    seed: int = 1,
    tokens: int = 150,
) -> Result:
    clock = Clock(row, 0.02)

    def slow(cycle: int, j: int) -> bool:
        clock.now += clock.step
        return right(cycle, j)

    monkeypatch.setattr(draft, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    model = clock.times(fake(chaotic(seed)))
    return decode(folder, model, depth="auto", right=slow, max_tokens=tokens)


@pytest.mark.parametrize(
    "right",
    [lambda cycle, j: True, lambda cycle, j: False, lambda cycle, j: (cycle + j) % 3 > 0],
    ids=["always", "never", "mixed"],
)
def test_the_text_is_greedys_and_every_decision_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: Callable[[int, int], bool]
) -> None:
    result = auto(tmp_path / "run", monkeypatch, right)
    assert result.state.output == greedy(chaotic(1), PROMPT, 150)
    left = 150
    for cycle in result.cycles:
        choice = cycle["depth_choice"]
        assert set(choice) == {"depth", "why", "expected"}
        assert choice["why"] in ("learn", "best", "off", "probe")
        assert cycle["drafted"] == choice["depth"] <= left - 1
        left -= len(cycle["tokens"])
    assert result.summary["identity"] == "exact"


def test_drafts_that_never_hit_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = auto(tmp_path / "run", monkeypatch, lambda cycle, j: False, row=0.5)
    late = result.cycles[60:]
    assert sum(cycle["drafted"] == 0 for cycle in late) > 0.85 * len(late)
    assert {c["draft_end"] for c in late if not c["drafted"]} <= {"auto", "room"}
    assert any(cycle["drafted"] for cycle in result.cycles[:40])  # it did try


def test_drafts_that_always_hit_are_made_as_deep_as_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = auto(tmp_path / "run", monkeypatch, lambda cycle, j: True, tokens=400)
    drafted = [cycle["drafted"] for cycle in result.cycles]
    assert max(drafted) == AUTO_DEPTH_MAX
    assert drafted[-6:-1].count(AUTO_DEPTH_MAX) >= 3  # the last cycle may lack room


def test_the_mtp_block_is_driven_by_the_same_choice(tmp_path: Path) -> None:
    """On the real clock, whatever it shows."""
    target = chaotic(3)
    model = fake_with_mtp(target, wrong=lambda position: position % 4 == 0)
    result = decode(tmp_path / "run", model, depth="auto", drafter=draft.MtpDrafter, max_tokens=80)
    assert result.state.output == greedy(target, PROMPT, 80)
    assert all(c["drafted"] <= c["depth_choice"]["depth"] for c in result.cycles)


def test_a_fixed_depth_records_no_choice(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(chaotic(4)), depth=2)
    assert all("depth_choice" not in cycle for cycle in result.cycles)
