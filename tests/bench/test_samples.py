"""Rounds, medians and ratios."""

import gc
import math
import random

import pytest

from ds4flow.bench.samples import Samples, interleave, samples


def test_samples_summarise_their_values() -> None:
    values = Samples((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (values.median, values.low, values.high) == (3.0, 2.0, 4.0)
    assert values.spread == pytest.approx(2 / 3)
    few = Samples((2.0, 1.0))
    assert (few.median, few.low, few.high) == (1.5, 1.0, 2.0)
    with pytest.raises(ValueError, match="no samples"):
        Samples(())


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (20, 6, 0.9586)],
)
def test_the_interval_of_a_median_by_order_statistics(
    count: int, rank: int, coverage: float
) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(1).shuffle(values)
    found = Samples(tuple(values)).interval()
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.coverage == pytest.approx(coverage, abs=1e-4)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    chance = random.Random(7)
    draws = [
        Samples(tuple(chance.expovariate(1.0) for _ in range(9))).interval() for _ in range(2000)
    ]
    held = sum(one.low <= math.log(2) <= one.high for one in draws) / 2000
    assert held == pytest.approx(0.961, abs=0.015)


def test_ratios_are_taken_round_by_round() -> None:
    assert Samples((2.0, 9.0)).over(Samples((1.0, 3.0))).values == (2.0, 3.0)
    with pytest.raises(ValueError, match="zip"):
        Samples((1.0,)).over(Samples((1.0, 2.0)))


def test_every_round_runs_every_arm_once_and_starts_with_another() -> None:
    order: list[str] = []
    arms = {name: (lambda n=name: order.append(n) or n) for name in "abc"}
    got = interleave(arms, repeats=3, warmup=1)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(part) == list("abc") for part in rounds)
    assert {part[0] for part in rounds[1:]} == set("abc")
    assert got == {name: [name] * 3 for name in "abc"}


def test_no_garbage_collection_inside_an_arm() -> None:
    assert interleave({"a": gc.isenabled}, repeats=1) == {"a": [False]}
    assert gc.isenabled()


def test_garbage_collection_comes_back_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 // 0}, repeats=1)
    assert gc.isenabled()


def test_one_figure_of_each_result() -> None:
    assert samples(["a", "bbb"], len).values == (1.0, 3.0)
