"""The number that a search maximises: a metric, and below all of them what is out of bounds."""

from __future__ import annotations

import pytest

from ds4flow.objective import score

SUMMARY = {
    "tokens_per_second": 120.0,
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": None,
    "output_tokens": 200,
    "relaxed_accepts": 6,
}


def test_it_is_the_metric() -> None:
    assert score(SUMMARY, "tokens_per_second", None) == 120.0
    assert score(SUMMARY, "mean_acceptance_length", None) == 2.5


def test_a_run_without_the_metric_has_none() -> None:
    assert score(SUMMARY, "draft_acceptance_rate", 0.0) is None
    assert score({}, "tokens_per_second", None) is None


@pytest.mark.parametrize(("bound", "value"), [(1.0, 120.0), (0.03, 120.0), (0.02, -0.03)])
def test_too_many_lossy_tokens_score_below_everything(bound: float, value: float) -> None:
    assert score(SUMMARY, "tokens_per_second", bound) == value


def test_an_exact_run_is_within_every_bound() -> None:
    assert score({**SUMMARY, "relaxed_accepts": 0}, "tokens_per_second", 0.0) == 120.0
