"""Costs learned from cycles: ratios that neither one interruption nor a slower machine changes."""

from __future__ import annotations

import pytest

from ds4flow.depth import Experience
from ds4flow.pace import COLD, KEPT, WARMING, Costs, Pace, Prior

BYTES = Prior((1.0, 1.19, 1.37, 1.55, 1.72, 1.88, 2.03, 2.18, 2.33), 0.09)


def warmed() -> Pace:
    pace = Pace(BYTES)
    for _ in range(WARMING):
        pace.plain(50.0)
    return pace


def test_costs_are_those_of_the_bytes_until_they_are_measured() -> None:
    pace = warmed()
    assert pace.cycles == 0
    assert pace.cost(0) == 1.0
    assert pace.cost(3) == pytest.approx(1.55 + 3 * 0.09)


def test_what_was_not_measured_is_as_steep_as_what_was() -> None:
    pace = warmed()
    pace.plain(2.0)
    pace.plain(2.0)
    for _ in range(2 * KEPT):
        for _ in range(COLD + 2):
            pace.drafted(2, 1, 0.4, 2.76, 0.0)  # 1.38 and 0.2 of a pass: twice the bytes
        pace.plain(2.0)
    assert pace.knows(1)
    assert not pace.knows(2)
    assert pace.deepest == 1
    assert pace.cost(1) == pytest.approx(1.58, rel=0.01)
    assert pace.cost(3) == pytest.approx(1 + 2 * 0.55 + 0.6, rel=0.02)


def test_interruptions_decide_nothing() -> None:
    costs = Costs()
    for value in (9.0, 1.0, 1.1, 1.0, 8.0, 1.0):
        costs.add(value)
    assert costs.value < 1.1
    assert costs.count == 6


def test_a_first_pass_that_was_interrupted_makes_no_draft_cheap() -> None:
    pace = warmed()
    pace.plain(9.0)
    pace.plain(1.0)
    pace.drafted(2, 1, 0.1, 1.2, 0.0)
    pace.drafted(2, 1, 0.1, 1.2, 0.0)
    assert pace.cost(1) == pytest.approx(1.3, rel=0.02)


def test_a_machine_that_slows_down_as_a_whole_changes_no_cost() -> None:
    pace = warmed()
    for factor in (1.0, 3.0, 0.5, 2.0):
        for _ in range(8):
            pace.plain(factor)
        for _ in range(40):
            pace.drafted(3, 2, 0.2 * factor, 1.4 * factor, 0.0)
    assert pace.cost(2) == pytest.approx(1.6, rel=0.02)
    assert pace.unit == pytest.approx(2.0, rel=0.02)


def test_costs_that_change_for_one_width_are_learned_anew() -> None:
    pace = warmed()
    for width_cost in (1.2, 2.0):
        for _ in range(12):
            pace.plain(1.0)
            for _ in range(COLD):
                pace.drafted(2, 1, 0.1, 9.0, 0.0)
            pace.drafted(2, 1, 0.1, width_cost, 0.0)
    assert pace.cost(1) == pytest.approx(2.1, rel=0.02)


def test_a_refresh_after_a_pause_is_a_cost_of_its_own() -> None:
    pace = warmed()
    pace.plain(1.0)
    pace.plain(1.0)
    assert pace.backlog_cost == 1.0
    pace.drafted(2, 1, 0.1, 1.2, 0.4)
    assert pace.backlog_cost == pytest.approx(0.4)
    assert pace.cost(1) < 1.4


def test_a_gated_cycle_counts_the_steps_it_took() -> None:
    pace = warmed()
    pace.plain(1.0)
    for _ in range(COLD + 2):
        pace.drafted(1, 1, 0.5, 1.0, 0.0)
    assert pace.cost(0, 1) == pytest.approx(1.5, rel=0.02)


def test_a_prior_counts_bytes() -> None:
    class Block:
        def weight_bytes(self) -> float:
            return 50.0

    class Counted:
        mtp = Block()

        def weight_bytes(self, rows: int) -> float:
            return 100.0 + 10.0 * rows

    prior = Prior.of(Counted(), 3)  # type: ignore[arg-type]
    row = 0.02
    bytes_read = (1.0, 120 / 110 + row, 130 / 110 + 2 * row, 140 / 110 + 3 * row)
    assert prior.passes == pytest.approx(bytes_read)
    assert prior.step == pytest.approx(50 / 110)
    assert prior.width(6) == pytest.approx(160 / 110 + 5 * row)
    whole = prior.whole()
    assert whole.step == 0.0
    assert whole.width(3) == pytest.approx(prior.width(3) + 2 * prior.step)


def test_a_model_that_reads_everything_for_one_row_is_no_division_by_zero() -> None:
    class Whole:
        mtp = None

        def weight_bytes(self, rows: int) -> float:
            return 100.0

    pace = Experience.of(Whole()).pace  # type: ignore[arg-type]
    assert pace.cost(8) == pytest.approx(1.16)
    assert Pace(Prior((1.0, 1.0), 0.0)).cost(4) == 1.0


def test_what_was_learned_goes_with_the_model() -> None:
    class Loaded:
        mtp = None

        def weight_bytes(self, rows: int) -> float:
            return 100.0 * rows

    one, other = Loaded(), Loaded()
    first = Experience.of(one)  # type: ignore[arg-type]
    assert Experience.of(one) is first  # type: ignore[arg-type]
    assert Experience.of(one, whole=True) is not first  # type: ignore[arg-type]
    assert Experience.of(other) is not first  # type: ignore[arg-type]
