"""The oracle: exact rates, honest cost, and never a change of the text."""

import pytest
import torch

from ds4flow.bench.drafters import OracleDrafter, OwnDrafter
from ds4flow.bench.engine import Engine, greedy, prepare, same_bits, speculative
from ds4flow.bench.settings import random_tokens
from ds4flow.depth import DepthPolicy
from ds4flow.errors import UsageError
from ds4flow.model.mtp import step_by_step
from ds4flow.oracle import Oracle

COUNT = 22


class CountingBlock:
    """Stands in for the MTP block: counts the steps, answers with rising logits."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, int]] = []

    def step(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: object,
        stale: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fed.append((token, position))
        return torch.arange(10.0), streams

    chain = step_by_step


class Cursor:
    """Stands in for the cache: the cursor is all that the oracle reads."""

    length = 0


def propose(rates: tuple[float, ...], cycles: int) -> list[list[bool]]:
    """Which drafts of each cycle are right, when every cycle starts at the next position."""
    recorded = [i % 10 for i in range(cycles + 10)]
    oracle = OracleDrafter(Oracle(recorded, 0, rates, vocab=10))
    oracle.begin()
    cache, found = Cursor(), []
    for position in range(cycles):
        cache.length = position
        block = CountingBlock()
        drafts = oracle.propose(block, torch.zeros(1), recorded[position], len(rates), cache)
        assert [at for _, at in block.fed] == list(range(position, position + len(rates)))
        right = [draft == recorded[position + 1 + j] for j, draft in enumerate(drafts)]
        found.append(right)
    return found


@pytest.mark.parametrize("rates", [(0.8, 0.5), (1.0, 0.0), (0.0, 1.0), (0.3, 0.9), (0.7,)])
def test_acceptance_is_exactly_the_rate_at_every_place(rates: tuple[float, ...]) -> None:
    found = propose(rates, 200)
    reached = [True] * len(found)
    for place, rate in enumerate(rates):
        cases = [right[place] for right, on in zip(found, reached, strict=True) if on]
        assert abs(sum(cases) - rate * len(cases)) < 1.0
        reached = [on and right[place] for right, on in zip(found, reached, strict=True)]


def test_the_pattern_starts_anew_with_every_run() -> None:
    recorded = list(range(10))
    oracle = OracleDrafter(Oracle(recorded, 0, (0.5,), vocab=10))
    runs = []
    for _ in range(2):
        oracle.begin()
        runs.append(
            [oracle.propose(CountingBlock(), torch.zeros(1), 0, 1, Cursor()) for _ in range(5)]
        )
    assert runs[0] == runs[1]


def test_the_oracle_stops_where_the_recording_ends() -> None:
    oracle = OracleDrafter(Oracle([1, 2, 3], 0, (1.0,), vocab=10))
    assert len(oracle.propose(CountingBlock(), torch.zeros(1), 0, 5, Cursor())) == 2


def test_rates_must_be_probabilities() -> None:
    for rates in ((), (1.2,), (-0.1,)):
        with pytest.raises(UsageError, match="not probabilities"):
            Oracle([], 0, rates, 10)


def test_no_drafter_changes_a_bit(engine: Engine) -> None:
    start = prepare(engine.model, random_tokens(engine, 20, 0), room=COUNT + 12)
    recorded = greedy(engine.model, start, COUNT + 5).tokens
    vocab = engine.model.config.vocab
    for drafter, depth in (
        (OwnDrafter(), 1),
        (OwnDrafter(), DepthPolicy(3)),
        (OracleDrafter(Oracle(recorded, start.length, (0.8, 0.5, 0.5), vocab)), 3),
        (OracleDrafter(Oracle(recorded, start.length, (0.0,), vocab)), 2),
    ):
        found = same_bits(engine.model, start, COUNT - 10, drafter, depth)
        assert found == (True, True, True)


def test_counts_add_up(engine: Engine) -> None:
    start = prepare(engine.model, random_tokens(engine, 20, 0), room=COUNT + 12)
    recorded = greedy(engine.model, start, COUNT + 5).tokens
    vocab = engine.model.config.vocab
    right = OracleDrafter(Oracle(recorded, start.length, (1.0,), vocab))
    run = speculative(engine.model, start, 15, right, 2)
    assert run.tokens == recorded[: len(run.tokens)]
    assert (len(run.tokens), run.cycles, run.drafted, run.accepted) == (15, 5, 10, 10)
    assert (run.acceptance, run.mean_length, run.depths) == (1.0, 3.0, {2: 5})
    wrong = OracleDrafter(Oracle(recorded, start.length, (0.0,), vocab))
    run = speculative(engine.model, start, 5, wrong, 2)
    assert (len(run.tokens), run.cycles, run.drafted, run.accepted) == (5, 5, 10, 0)
    assert run.seconds > 0.0


def test_drafting_without_a_block_is_refused(engine_without_mtp: Engine) -> None:
    start = prepare(engine_without_mtp.model, [5, 6], room=8)
    with pytest.raises(UsageError, match="no MTP weights"):
        speculative(engine_without_mtp.model, start, 4, OwnDrafter(), 1)
