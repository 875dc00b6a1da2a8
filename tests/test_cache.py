"""Rewinding moves a cursor: against a plain twin that never wraps and never drafts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import Ds4FlowError
from ds4flow.gguf import GgufFile
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.trunk import Model


class PlainTwin(KVCache):
    """Buffers as long as the context, grown by `cat`, NaN where nothing is committed.

    A read of a row that should not be visible turns the logits into NaN, which the model refuses.
    """

    def __init__(self, config, *, context: int, chunk: int = 64) -> None:
        super().__init__(config, context=context, draft_max=0, chunk=chunk)
        self._committed = [self._split(rows) for rows in [*self.layers, self.mtp]]
        self._lay_out()

    @staticmethod
    def _split(rows: LayerRows) -> dict[str, torch.Tensor]:
        lanes = {"window": rows.window[:0]}
        for name, part in (("compressed", rows.compressed), ("index", rows.index)):
            if part is not None:
                lanes[f"{name} values"] = part.values[:0]
                lanes[f"{name} scores"] = part.scores[:0]
                lanes[f"{name} pool"] = part.pool[:0]
        return lanes

    def _lay_out(self) -> None:
        def whole(lane: torch.Tensor, capacity: int) -> torch.Tensor:
            rest = torch.full((capacity - lane.shape[0], lane.shape[1]), torch.nan)
            return torch.cat((lane, rest))

        for rows, lanes in zip([*self.layers, self.mtp], self._committed, strict=True):
            rows.window = whole(lanes["window"], self.context)
            for name in ("compressed", "index"):
                part: CompressedRows | None = getattr(rows, name)
                if part is not None:
                    part.values = whole(lanes[f"{name} values"], self.context)
                    part.scores = whole(lanes[f"{name} scores"], self.context)
                    part.pool = whole(lanes[f"{name} pool"], self.context // part.ratio)

    def commit(self, rows: int) -> None:
        before = self.length
        super().commit(rows)
        for layer, lanes in zip([*self.layers, self.mtp], self._committed, strict=True):
            for key in lanes:
                group, _, lane = key.partition(" ")
                buffer = layer.window if group == "window" else getattr(getattr(layer, group), lane)
                ratio = getattr(layer, group).ratio if lane == "pool" else 1
                new = buffer[before // ratio : self.length // ratio]
                lanes[key] = torch.cat((lanes[key], new))
        self._lay_out()


@pytest.fixture(scope="module")
def model(golden_dir: Path) -> Model:
    main = GgufFile.open(golden_dir / "tiny-f32.gguf")
    return Model.load(
        main, GgufFile.open(golden_dir / "tiny-f32.mtp-support.gguf"), profile="plain"
    )


def same_state(ours: KVCache, twin: KVCache, *, mtp: bool = False) -> None:
    left, right = ours.state_hash(mtp=mtp), twin.state_hash(mtp=mtp)
    assert left.keys() == right.keys()
    assert [lane for lane in left if left[lane] != right[lane]] == []


def prefill(model: Model, cache: KVCache, tokens: list[int], chunk: int) -> torch.Tensor:
    parts = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        parts.append(model.forward(part, cache))
        cache.commit(len(part))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.slow), 7, 64, 129])
def test_the_bits_do_not_depend_on_the_prefill_chunk(model, chunk):
    length = 140 if chunk == 1 else 270  # beyond a block of 128, or two
    tokens = np.random.default_rng(0).integers(0, 320, length).tolist()
    whole = KVCache(model.config, context=300, draft_max=4, chunk=length)
    ours = KVCache(model.config, context=300, draft_max=4, chunk=chunk)
    assert torch.equal(
        prefill(model, whole, tokens, length)[-8:], prefill(model, ours, tokens, chunk)[-8:]
    )
    same_state(ours, whole)


def speculate_at_random(model: Model, start: int, draft_max: int, seed: int, passes: int) -> None:
    """Passes with random tails, each rolled back to a random length; the twin decodes plainly."""
    draws = np.random.default_rng(seed)
    prompt = draws.integers(0, 320, start).tolist()
    context = start + (draft_max + 1) * passes
    ours = KVCache(model.config, context=context, draft_max=draft_max, chunk=32)
    twin = PlainTwin(model.config, context=context, chunk=64)
    prefill(model, ours, prompt, 32)
    prefill(model, twin, prompt, 64)
    for _ in range(passes):
        rows = draws.integers(0, 320, draft_max + 1).tolist()
        kept = int(draws.integers(1, draft_max + 2))
        streams = model.forward(rows, ours)
        ours.commit(kept)
        for row in range(kept):
            plain = model.forward([rows[row]], twin)
            twin.commit(1)
            assert torch.equal(plain[0], streams[row])
        same_state(ours, twin)


@pytest.mark.parametrize(
    ("start", "draft_max"),
    [
        pytest.param(start, draft_max, marks=[] if draft_max in quick else pytest.mark.slow)
        for start, quick in ((30, (8,)), (125, (1, 4, 16)), (128, (4, 8)))
        for draft_max in (1, 4, 8, 16)
    ],
)
def test_random_rollbacks_leave_the_state_of_plain_decoding(model, start, draft_max):
    speculate_at_random(model, start, draft_max, seed=start + draft_max, passes=6)


@pytest.mark.slow
@pytest.mark.parametrize("draft_max", range(1, 17))
@pytest.mark.parametrize("start", [*range(124, 133), *range(252, 260)])
def test_random_rollbacks_everywhere(model, start, draft_max):
    speculate_at_random(model, start, draft_max, seed=start * 17 + draft_max, passes=12)


@pytest.mark.parametrize(
    "start",
    [126, 128, *(pytest.param(s, marks=pytest.mark.slow) for s in (127, 251, 255)), 253],
)
def test_every_accepted_length_of_one_pass(model, start):
    """All lengths 0..16 of a pass of 17 rows, around block boundaries of both compressors."""
    draws = np.random.default_rng(start)
    prompt, rows = draws.integers(0, 320, start).tolist(), draws.integers(0, 320, 17).tolist()
    ours = KVCache(model.config, context=start + 20, draft_max=16, chunk=32)
    twin = KVCache(model.config, context=start + 20, draft_max=0, chunk=64)
    prefill(model, ours, prompt, 32)
    prefill(model, twin, prompt, 64)
    for kept in range(18):
        model.forward(rows, ours)
        ours.length = start + kept
        same_state(ours, twin)
        ours.length = start
        if kept < 17:
            model.forward([rows[kept]], twin)
            twin.commit(1)


def test_two_sequences_of_one_model_do_not_touch_each_other(model):
    tokens = np.random.default_rng(2).integers(0, 320, 140).tolist()
    alone = KVCache(model.config, context=160, draft_max=4)
    prefill(model, alone, tokens, 64)
    one = KVCache(model.config, context=160, draft_max=4)
    other = KVCache(model.config, context=160, draft_max=4)
    for first in range(0, 140, 20):
        part = tokens[first : first + 20]
        model.forward(part, one)
        one.commit(20)
        model.forward(part[::-1], other)
        other.commit(7)
        model.forward([1, 2, 3], other)  # and only this one goes back
        other.commit(0)
    same_state(one, alone)


def test_mtp_rows_of_chunks_equal_those_of_one_pass(model):
    tokens = np.random.default_rng(3).integers(0, 320, 100).tolist()
    whole = KVCache(model.config, context=100, draft_max=0, chunk=100)
    model.mtp.follow(tokens, 0, None, prefill(model, whole, tokens, 100), whole)
    ours = KVCache(model.config, context=100, draft_max=2, chunk=16)
    previous = None
    for first in range(0, 100, 16):
        part = tokens[first : first + 16]
        streams = model.forward(part, ours)
        model.mtp.follow(part, first, previous, streams, ours)
        previous = streams[-1]
        ours.commit(len(part))
    same_state(ours, whole, mtp=True)


@pytest.mark.parametrize("length", [3, 127, 140])
def test_a_fork_goes_on_alone_and_with_the_same_bits(model, length):
    tokens = np.random.default_rng(length).integers(0, 320, length).tolist()
    ours = KVCache(model.config, context=200, draft_max=4)
    prefill(model, ours, tokens, 64)
    model.forward([7, 8, 9], ours)  # not committed, so not taken along
    other = ours.fork()
    same_state(other, ours, mtp=True)
    before = ours.state_hash()
    alone = KVCache(model.config, context=200, draft_max=4)
    prefill(model, alone, tokens, 64)
    for token in range(5, 25):
        assert torch.equal(model.forward([token], other), model.forward([token], alone))
        other.commit(1)
        alone.commit(1)
    same_state(other, alone)
    assert ours.state_hash() == before
    assert ours.length == length


def resident() -> int:
    """Bytes of this process that lie in memory."""
    import resource  # where /proc is, this is too

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_grows_with_the_text_and_not_with_the_context(model):
    # room for 2 M tokens is about 1.3 GB, far above what the rest of this test moves
    start = resident()
    cache = KVCache(model.config, context=1 << 21, draft_max=4)
    assert cache.nbytes > 1_000_000_000
    cache.fork()
    assert resident() - start < 200_000_000
    rows = cache.layers[2].compressed.pool
    assert rows.data_ptr() % 64 == 0
    place = rows.data_ptr()
    rows[:1000] = 1.0
    assert rows.data_ptr() == place


def test_the_bytes_of_a_token_are_those_of_the_account(model):
    config = model.config
    sizes = [
        KVCache(config, context=context, draft_max=4, device=torch.device("meta")).nbytes
        for context in (1 << 14, 1 << 15)
    ]
    assert sizes[1] - sizes[0] == 4 * config.cache_growth * (1 << 14)


@pytest.mark.parametrize("gap", [0, 1])
def test_stale_rows_of_the_block_go_with_the_step_or_before_it(model, gap):
    """With the step when they end at it; the bits are those of writing them first."""
    tokens = np.random.default_rng(5).integers(0, 320, 40).tolist()
    found = []
    for together in (True, False):
        cache = KVCache(model.config, context=60, draft_max=4)
        streams = prefill(model, cache, tokens, 64)
        model.mtp.follow(tokens, 0, None, streams, cache)
        first = 36 - gap
        stale = (first, tokens[first : 40 - gap], streams[first - 1 : 39 - gap])
        if not together:
            model.mtp.warm(stale[2], stale[1], stale[0], cache)
        given = stale if together else None
        logits, out = model.mtp.step(streams[-1], 7, 40, cache, given)
        found.append((logits, out, cache.mtp.window))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_block_remembers_of_a_token_has_the_bits_of_looking_again(model):
    block = model.mtp
    for tokens in ([5], [7, 5, 7], [5, 8], list(range(300)), [299, 5]):
        with torch.inference_mode():
            assert torch.equal(block._embedded(tokens), block._project(tokens))


def test_a_pass_beyond_the_context_or_the_rings_is_refused(model: Model):
    cache = KVCache(model.config, context=10, draft_max=2, chunk=4)
    with pytest.raises(Ds4FlowError, match="a pass of 5 rows"):
        model.forward([1] * 5, cache)
    for _ in range(2):
        model.forward([1] * 4, cache)
        cache.commit(4)
    with pytest.raises(Ds4FlowError, match="exceeds the context of 10"):
        model.forward([1] * 3, cache)
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(3)
