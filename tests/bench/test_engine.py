"""Starting points: rewinding gives the same bits again; filled contexts have the right shapes."""

import pytest
import torch

from ds4flow.bench.engine import Engine, greedy, prepare
from ds4flow.bench.fill import fill
from ds4flow.bench.settings import random_tokens
from ds4flow.errors import UsageError
from ds4flow.gguf import GgufFile


def test_a_start_can_be_rewound_again_and_again(engine: Engine) -> None:
    prompt = random_tokens(engine, 45, 0)
    start = prepare(engine.model, prompt, room=30, chunk=7)
    state = start.cache.state_hash()
    first = greedy(engine.model, start, 30)
    assert start.cache.length == 75
    start.rewind()
    assert start.cache.state_hash() == state
    assert greedy(engine.model, start, 30).tokens == first.tokens
    other = prepare(engine.model, prompt, room=5, chunk=64)
    assert other.next_token == start.next_token
    assert torch.equal(other.hidden, start.hidden)


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="empty"):
        prepare(engine.model, [], room=4)


def test_short_contexts_are_really_prefilled(engine: Engine) -> None:
    tokens = random_tokens(engine, 40, 0)
    start, how = fill(engine.model, tokens, 40, cap=100, room=4)
    assert how == "prefill"
    plain = prepare(engine.model, tokens, room=4, mtp=False)
    assert start.cache.state_hash(mtp=False) == plain.cache.state_hash(mtp=False)


def test_long_contexts_repeat_real_rows_and_say_so(engine: Engine) -> None:
    tokens = random_tokens(engine, 140, 0)
    start, how = fill(engine.model, tokens, 700, cap=140, room=8)
    assert how == "prefill of 140, rows copied"
    assert start.length == start.cache.length == 700
    for name, rows in start.cache.lanes(mtp=False).items():
        assert bool((rows != 0).any(-1).all()), name
    run = greedy(engine.model, start, 8)
    assert len(run.tokens) == 8
    assert start.cache.length == 708


def test_threads_must_be_positive(files: tuple) -> None:
    with pytest.raises(UsageError, match="threads=0"):
        Engine.load(GgufFile.open(files[0]), threads=0)


def test_draft_traffic_counts_the_block_and_one_head(engine: Engine) -> None:
    names = [info.name for info in engine.draft_tensors()]
    assert names.count("output.weight") == 1
    assert "mtp.0.e_proj.weight" in names
    assert not any(name.startswith("blk.") for name in names)
    assert not any(info.name.startswith("mtp.") for info in engine.trunk_tensors())
