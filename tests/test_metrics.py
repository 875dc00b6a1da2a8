"""Counts that add up, repeated text, and break-even from measured cycles."""

import random

import pytest

from ds4flow.metrics import REPEATS, Costs, Counts, repeated, repetition


def counted(seed: int, cycles: int) -> Counts:
    chance, counts = random.Random(seed), Counts()
    for _ in range(cycles):
        drafted = chance.randrange(4)
        committed = chance.randrange(drafted + 2)
        relaxed = chance.randrange(2)
        end = chance.choice(["room", "gate"])
        counts.add(drafted=drafted, committed=committed, relaxed=relaxed, draft_end=end)
    return counts


@pytest.mark.parametrize("cycles", [0, 1, 40])
def test_counts_can_be_read_back_from_a_summary(cycles):
    counts = counted(3, cycles)
    again = Counts.of({**counts.summary(), "output_tokens": counts.output})
    assert again.summary() == counts.summary()


def test_merged_counts_are_those_of_all_cycles():
    together = counted(1, 20)
    together.merge(counted(2, 30))
    parts = [counted(1, 20), counted(2, 30)]
    assert together.cycles == 50
    assert together.drafted == sum(part.drafted for part in parts)
    assert together.accepted == sum(part.accepted for part in parts)
    rate = sum(part.accepted for part in parts) / sum(part.drafted for part in parts)
    assert together.summary()["draft_acceptance_rate"] == rate


def test_repeated_text():
    assert repeated(list(range(100)), 10) == 0
    assert repeated([1, 2, 3] * 20, 0) == 60 - 3 - REPEATS + 1
    assert repeated([1, 2, 3] * 20, 50) == 10
    prompt = list(range(30))
    assert repeated([*prompt, *prompt], 30) == 30 - REPEATS + 1  # recites its prompt
    assert repeated(prompt[:5], 0) == 0
    assert repetition(5, 10) == []
    assert "6 of 10 tokens repeat" in repetition(6, 10)[0]


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
