"""Whole passes in one call against the same operations one by one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import NumericsError
from ds4flow.gguf import GgufFile
from ds4flow.model.trunk import Model

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
