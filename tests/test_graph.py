"""The decode graph without capture: the same tokens, state and acceptance as the ordinary path."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import Ds4FlowError, NumericsError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.graph import DecodeGraph
from ds4flow.model.trunk import Model
from ds4flow.speculate import argmax, verify

DATA = Path(__file__).parent / "data" / "golden"
DRAFT_MAX = 4


@pytest.fixture(scope="module", params=["tiny-q4k", "tiny-f32"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, golden_dir: Path) -> Model:
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    mtp = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    return Model.load(main, mtp, profile="plain")


def prefilled(
    model: Model, tokens: list[int], context: int, draft_max: int = DRAFT_MAX
) -> tuple[KVCache, int, torch.Tensor]:
    """A cache after the prompt (MTP rows too), the next token and the last streams."""
    cache = KVCache(model.config, context=context, draft_max=draft_max, chunk=64)
    previous = None
    for first in range(0, len(tokens), 64):
        part = tokens[first : first + 64]
        streams = model.forward(part, cache)
        model.mtp.follow(part, first, previous, streams, cache)
        previous = streams[-1]
        cache.commit(len(part))
    return cache, int(argmax(model.logits(streams[-1:]))[0]), streams[-1]


def ordinary(model: Model, prompt: list[int], widths: list[int], context: int):
    """The reference path: drafts, verdicts and committed tokens, cycle by cycle."""
    cache, token, hidden = prefilled(model, prompt, context)
    cycles = []
    for width in widths:
        n, drafts, streams, last = cache.length, [], hidden, token
        for depth in range(width):
            logits, streams = model.mtp.step(streams, last, n + depth, cache)
            last = int(argmax(logits))
            drafts.append(last)
        rows = [token, *drafts]
        out = model.forward(rows, cache)
        verdict = verify(model.logits(out), drafts)
        kept = rows[: verdict.accepted + 1]
        model.mtp.follow(kept, n, hidden, out[: len(kept)], cache)
        cache.commit(len(kept))
        cycles.append((tuple(kept), verdict))
        token, hidden = verdict.next_token, out[verdict.accepted]
    return cycles, cache


def graph_run(model: Model, prompt: list[int], widths: list[int], context: int):
    cache, token, hidden = prefilled(model, prompt, context)
    graph = DecodeGraph(model, cache)
    graph.start(token, hidden)
    return [graph.cycle(width) for width in widths], cache, graph


def test_cycles_equal_those_of_the_ordinary_path(model, name):
    """Tokens, drafts' fate, ratios and gaps of widths 0..4, across block boundaries of both
    compressors."""
    prompt = np.load(DATA / f"{name}.npz")["tokens_200"].tolist()[:124]
    widths = [2, 0, 4, 1, 3, 4]
    wanted, plain = ordinary(model, prompt, widths, 300)
    got, cache, graph = graph_run(model, prompt, widths, 300)
    assert graph.mode == "eager"
    assert cache.length == plain.length == int(graph.buffers.position)
    assert cache.length >= 128
    for cycle, (tokens, verdict) in zip(got, wanted, strict=True):
        assert cycle.tokens == tokens
        assert cycle.next_token == verdict.next_token
        assert cycle.accepted == verdict.accepted
        looked_at = len(verdict.ratios)
        assert cycle.ratios[:looked_at] == pytest.approx(verdict.ratios, rel=1e-3)
        assert cycle.gaps == pytest.approx(verdict.gaps, abs=1e-3)
    for (lane, left), right in zip(plain.lanes().items(), cache.lanes().values(), strict=True):
        assert left.shape == right.shape, lane
        assert torch.allclose(left, right, rtol=1e-3, atol=1e-3), lane


def test_the_width_never_changes_text_or_state(model, name):
    """Bits: after the same number of tokens the state of every width equals that of width 0."""
    prompt = np.load(DATA / f"{name}.npz")["tokens_16"].tolist()
    plain, base, _ = graph_run(model, prompt, [0] * 16, 60)
    text = [cycle.tokens[0] for cycle in plain]
    for width in (1, 4):
        cache, token, hidden = prefilled(model, prompt, 60)
        graph = DecodeGraph(model, cache)
        graph.start(token, hidden)
        tokens: list[int] = []
        while len(tokens) < 16:
            tokens += graph.cycle(min(width, 16 - len(tokens) - 1)).tokens
        assert tokens == text
        assert cache.state_hash() == base.state_hash()


def test_greedy_tokens_are_the_golden_ones(model, name):
    data = np.load(DATA / f"{name}.npz")
    cache, token, hidden = prefilled(model, data["tokens_16"].tolist(), 100)
    graph = DecodeGraph(model, cache)
    graph.start(token, hidden)
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += graph.cycle(3).tokens
    assert tokens[:40] == data["greedy_ref_tokens_16"].tolist()[:40]


def test_the_official_profile_too(name, golden_dir):
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    mtp = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    model = Model.load(main, mtp, profile="official")
    prompt = np.load(DATA / f"{name}.npz")["tokens_200"].tolist()[:60]
    widths = [3, 1, 4, 0]
    wanted, _ = ordinary(model, prompt, widths, 100)
    got, _, _ = graph_run(model, prompt, widths, 100)
    assert [cycle.tokens for cycle in got] == [tokens for tokens, _ in wanted]


def test_nothing_in_a_cycle_reads_a_value_back(model, monkeypatch):
    """No operation that a capture forbids: reading a value, or a shape that depends on one."""
    cache, token, hidden = prefilled(model, [1, 2, 3, 4, 5], 60)
    graph = DecodeGraph(model, cache)
    graph.start(token, hidden)
    graph.cycle(3)

    def refuse(*_args, **_kwargs):
        raise AssertionError("a value was read back inside the cycle")

    for read in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, read, refuse)
    monkeypatch.setattr(torch, "nonzero", refuse)
    monkeypatch.setattr(torch.Tensor, "nonzero", refuse)
    graph._step(3)


def test_misuse_is_refused(model):
    cache, token, hidden = prefilled(model, [1, 2, 3], 8)
    graph = DecodeGraph(model, cache)
    with pytest.raises(ValueError, match="start"):
        graph.cycle(0)
    graph.start(token, hidden)
    with pytest.raises(UsageError, match=r"outside 0\.\.4"):
        graph.cycle(5)
    graph.cycle(0)
    cache.commit(0)
    with pytest.raises(Ds4FlowError, match="context of 8"):
        graph.cycle(4)
    cache.length -= 1
    with pytest.raises(ValueError, match="the cursor moved"):
        graph.cycle(0)


def test_drafts_need_mtp_weights(golden_dir, name):
    bare = Model.load(GgufFile.open(golden_dir / f"{name}.gguf"), profile="plain")
    cache = KVCache(bare.config, context=20, draft_max=2)
    streams = bare.forward([1, 2], cache)
    cache.commit(2)
    graph = DecodeGraph(bare, cache)
    graph.start(3, streams[-1])
    with pytest.raises(UsageError, match="need MTP weights"):
        graph.cycle(1)
    assert len(graph.cycle(0).tokens) == 1


def test_a_logit_that_is_not_finite_is_an_error_and_commits_nothing(model):
    cache, token, hidden = prefilled(model, [1, 2, 3], 30)
    graph = DecodeGraph(model, cache)
    graph.start(token, torch.full_like(hidden, torch.nan))
    with pytest.raises(NumericsError, match="not finite in the cycle at position 3"):
        graph.cycle(1)
    assert cache.length == 3


def test_any_width_after_any_other_in_any_order(model, name):
    """Widths 0..8 in random order: each is made ready once, and text and state are greedy's."""
    prompt = np.load(DATA / f"{name}.npz")["tokens_16"].tolist()
    order = [*np.random.default_rng(3).permutation(9).tolist(), 8, 0]
    cache, token, hidden = prefilled(model, prompt, 300, draft_max=8)
    graph = DecodeGraph(model, cache)
    graph.start(token, hidden)
    graph.capture(range(4))
    tokens = [token for width in order for token in graph.cycle(width).tokens]
    assert sorted(graph.usage.built) == list(range(9))
    assert graph.usage.replays == dict.fromkeys(range(9), 1) | {0: 2, 8: 2}
    cache, token, hidden = prefilled(model, prompt, 300, draft_max=8)
    plain = DecodeGraph(model, cache)
    plain.start(token, hidden)
    assert [plain.cycle(0).tokens[0] for _ in tokens] == tokens
    assert cache.state_hash() == graph.cache.state_hash()


def test_a_cleared_cache_is_as_a_new_one(model, name):
    """Every buffer, at its old address, also after a pass that was not committed."""
    prompt = np.load(DATA / f"{name}.npz")["tokens_16"].tolist()
    cache, token, hidden = prefilled(model, prompt, 60)
    graph = DecodeGraph(model, cache)
    graph.start(token, hidden)
    graph.cycle(4)
    graph.step(4)
    places = [rows.data_ptr() for rows in buffers(cache)]
    assert any(bool(rows.any()) for rows in buffers(cache))
    cache.clear()
    assert cache.length == 0
    assert [rows.data_ptr() for rows in buffers(cache)] == places
    assert not any(bool(rows.any()) for rows in buffers(cache))


def buffers(cache: KVCache) -> list[torch.Tensor]:
    found = [layer.window for layer in (*cache.layers, cache.mtp)]
    for layer in cache.layers:
        for rows in (layer.compressed, layer.index):
            found += [] if rows is None else [rows.values, rows.scores, rows.pool]
    return found


def test_two_sequences_on_one_model_do_not_meet(model, name):
    """Cycles of two graphs in turn, the second with rejected drafts, equal those of each alone."""
    data = np.load(DATA / f"{name}.npz")
    prompts = data["tokens_16"].tolist(), data["tokens_200"].tolist()[:9]
    alone = [graph_run(model, prompt, [2, 3, 0, 1], 60)[0] for prompt in prompts]
    starts = [prefilled(model, prompt, 60) for prompt in prompts]
    graphs = [DecodeGraph(model, cache) for cache, _, _ in starts]
    for graph, (_, token, hidden) in zip(graphs, starts, strict=True):
        graph.start(token, hidden)
    turns = [[graph.cycle(width) for graph in graphs] for width in (2, 3, 0, 1)]
    assert [list(cycles) for cycles in zip(*turns, strict=True)] == alone
