"""Whole passes in one call against the same operations one by one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import NumericsError
from ds4flow.gguf import GgufFile
from ds4flow.model.trunk import Model
from ds4flow.speculate import top_two

CONTEXT = 300


class OneByOne:
    """A backend without its whole passes."""

    passes = None

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@pytest.fixture(scope="module", params=["cpu", "cpu-int8"])
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    main = GgufFile.open(golden_dir / "tiny-iq2.gguf")
    mtp = GgufFile.open(golden_dir / "tiny-iq2.mtp-support.gguf")
    return Model.load(main, mtp, kernels=request.param)


@pytest.fixture
def by_operations(model: Model) -> Model:
    other = Model(
        model.config, model.weights, model.mtp.weights, model.profile, OneByOne(model.kernels)
    )
    assert other.kernels.passes is None
    return other


def tokens_of(model: Model, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, model.config.vocab, (count,), generator=generator).tolist()


def generate(model: Model) -> tuple[list[torch.Tensor], dict[str, str]]:
    """Everything that prefill, passes of several widths and draft steps give."""
    cache = KVCache(model.config, context=CONTEXT, draft_max=7, chunk=64)
    tokens, seen, previous = tokens_of(model, 280), [], None
    at = 0
    for width in (64, 64, 64, 50, 1, 2, 3, 4, 5, 1):
        part = tokens[at : at + width]
        streams = model.forward(part, cache)
        model.mtp.follow(part, at, previous, streams, cache)
        cache.commit(width)
        seen += [streams, model.logits(streams)]
        previous = streams[-1]
        at += width
    stale = (at - 2, tokens[at - 2 : at], streams.new_zeros(2, *streams.shape[1:]))
    for pairs in (None, stale):
        hidden = previous
        for place in range(2):
            pending = pairs if place == 0 else None
            logits, hidden = model.mtp.step(hidden, tokens[at], at + place, cache, pending)
            seen += [logits, hidden]
    return seen, cache.state_hash()


def test_passes_give_the_bits_of_the_operations(model, by_operations):
    whole, state = generate(model)
    steps, same = generate(by_operations)
    assert len(whole) == len(steps)
    for left, right in zip(whole, steps, strict=True):
        assert left.shape == right.shape
        assert torch.equal(left, right)
    assert state == same


def test_logits_that_are_not_finite_name_the_row(model):
    streams = torch.ones(3, model.config.streams, model.config.dim)
    streams[1, 0, 7] = float("nan")
    with pytest.raises(NumericsError, match=r"output head .*row 1"):
        model.logits(streams)
    cache = KVCache(model.config, context=CONTEXT, draft_max=7, chunk=64)
    with pytest.raises(NumericsError):
        model.mtp.step(streams[1], 5, 1, cache)


def test_a_token_beyond_the_vocabulary_is_refused(model):
    cache = KVCache(model.config, context=CONTEXT, draft_max=7, chunk=64)
    for token in (-1, model.config.vocab):
        with pytest.raises(IndexError):
            model.forward([1, token], cache)


def prefilled(model: Model) -> tuple[KVCache, torch.Tensor, list[int]]:
    """A cache after 60 tokens, the last streams, and tokens to go on with."""
    cache = KVCache(model.config, context=CONTEXT, draft_max=7, chunk=64)
    tokens = tokens_of(model, 80)
    streams = model.forward(tokens[:60], cache)
    model.mtp.follow(tokens[:60], 0, None, streams, cache)
    cache.commit(60)
    return cache, streams[-1], tokens


def test_a_decision_is_a_pass_and_its_logits(model, by_operations):
    for rows in (1, 2, 5):
        cache, _, tokens = prefilled(model)
        streams = model.forward(tokens[60 : 60 + rows], cache)
        wanted = streams, model.logits(streams)
        before = cache.state_hash()
        for one in (model, by_operations):
            again, _, _ = prefilled(one)
            found = one.decide(tokens[60 : 60 + rows], again)
            assert all(map(torch.equal, found, wanted))
            assert again.state_hash() == before


@pytest.mark.parametrize("stale", [None, 58, 50])
@pytest.mark.parametrize("forced", [None, (3, 1, 4, 1, 5)])
def test_a_chain_is_its_steps(model, by_operations, stale, forced):
    """With rows that end at the first step, rows that end before it, and none."""
    for one, other in ((model, by_operations), (by_operations, model)):
        cache, hidden, tokens = prefilled(one)
        pairs = None
        if stale is not None:
            pairs = (stale, tokens[stale : stale + 2], hidden.expand(2, *hidden.shape).clone())
        made = one.mtp.chain(hidden, tokens[60], 60, cache, pairs, count=5, forced=forced)
        again, streams, _ = prefilled(other)
        token, waiting = tokens[60], pairs
        for i in range(5):
            logits, streams = other.mtp.step(streams, token, 60 + i, again, waiting)
            waiting = None
            best, gap = top_two(logits)
            token = best if forced is None else forced[i]
            assert (made.tokens[i], made.gaps[i]) == (token, gap)
            assert torch.equal(made.logits[i], logits)
        assert len(made.tokens) == len(made.gaps) == len(made.logits) == 5
        assert cache.state_hash() == again.state_hash()


def test_a_chain_ends_at_the_gate_and_at_the_end(model, by_operations):
    for one in (model, by_operations):
        cache, hidden, tokens = prefilled(one)
        whole = one.mtp.chain(hidden, tokens[60], 60, cache, count=6)
        low = min(range(6), key=lambda i: whole.gaps[i])
        gated = one.mtp.chain(hidden, tokens[60], 60, cache, count=6, gate=whole.gaps[low] + 1e-9)
        assert gated.tokens == whole.tokens[: low + 1]
        assert one.mtp.chain(
            hidden, tokens[60], 60, cache, count=6, gate=whole.gaps[low]
        ).tokens == (whole.tokens)
        end = whole.tokens[3]
        ended = one.mtp.chain(hidden, tokens[60], 60, cache, count=6, end=end)
        assert ended.tokens == whole.tokens[: whole.tokens.index(end) + 1]


def test_a_chain_over_values_that_are_not_finite_says_where(model):
    cache, hidden, tokens = prefilled(model)
    hidden = hidden.clone()
    hidden[1, 3] = float("inf")
    with pytest.raises(NumericsError, match="layer 6"):
        model.mtp.chain(hidden, tokens[60], 60, cache, count=3)
