"""A dead drafter is explained: shifted by one position, or merely wrong."""

from pathlib import Path

import pytest
import torch
from ds4flow.stages.draft import Drafter

from ds4flow.diagnosis import Diagnosis, explain
from ds4flow.pipeline import State
from ds4flow.speculate import Draft
from tests.fakes import FakeModel, decode, greedy

PROMPT = (0, *range(40, 45))


def counting(context: tuple[int, ...]) -> int:
    """A target whose text never has one token twice in a row."""
    return 40 + len(context) % 20


TEXT = (*PROMPT, *greedy(counting, PROMPT, 220))


class Shifted(Drafter):
    """Proposes the token after the one asked for."""

    def propose(self, state: State, depth: int) -> None:
        super().propose(state, depth)
        if depth and state.cache.length + 2 < len(TEXT):
            state.drafts = (Draft(TEXT[state.cache.length + 2], 1.0),)
            state.draft_end = "depth"


def test_a_drafter_shifted_by_one_position_is_detected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = decode(
        tmp_path / "run",
        FakeModel(counting),
        depth=1,
        drafter=Shifted,
        tokens=PROMPT,
        max_tokens=90,
    )
    summary = result.summary
    assert summary["draft_dead"] is True
    assert summary["diagnosis"]["hits_by_offset"]["1"] > 0.9
    assert "1 after the one asked for: the drafter is shifted" in capsys.readouterr().err


def test_unrelated_drafts_are_not_called_shifted() -> None:
    found = Diagnosis()
    for position in range(10, 80):
        found.add(position, 7, torch.arange(9.0), -torch.arange(9.0), torch.ones(2, 3))
    summary = found.summary(list(range(100, 200)))
    assert summary["top5_overlap"] == pytest.approx(0.2)
    assert "shifted" not in explain(summary)
    assert "norm of the target's streams 2.45" in explain(summary)
