"""Break-even: from measured cycles to the acceptance that drafting needs."""

import pytest

from ds4flow.metrics import Costs


def costs(plain: int, drafting: int, depth: int) -> Costs:
    found = Costs()
    for _ in range(3):
        found.add(0, plain)
        found.add(depth, drafting)
    return found


@pytest.mark.parametrize(
    ("depth", "ratio", "acceptance"),
    [(1, 1.5, 0.5), (2, 1.75, 0.5), (3, 1.875, 0.5), (1, 2.0, 1.0)],
)
def test_break_even_solves_the_geometric_series(depth, ratio, acceptance):
    found = costs(1000, round(1000 * ratio), depth).break_even()
    assert found["acceptance"] == pytest.approx(acceptance, abs=1e-6)
    assert found["tokens_needed"] == ratio


def test_it_cannot_break_even_when_certain_drafts_cost_too_much():
    assert costs(1000, 2100, 1).break_even()["acceptance"] is None


def test_both_kinds_of_cycles_are_needed():
    found = Costs()
    found.add(2, 100)
    assert found.break_even() is None
    found.add(0, 50)
    assert found.break_even()["depth"] == 2


def test_the_commonest_depth_counts():
    found = costs(1000, 1400, 2)
    found.add(1, 1100)
    assert found.break_even()["depth"] == 2
