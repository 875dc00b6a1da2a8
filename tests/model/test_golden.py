"""Agreement with two independent engines on the golden models: the table of bounds, as tests.

`ref` arrays are float64 evaluations on the exact dequantised weights; see tests/data/golden.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.gguf import GgufFile
from ds4flow.model.trunk import Model
from ds4flow.speculate import argmax
from tests import golden
from tests.golden import run

NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
LENGTHS = (16, 200, 700)
Loader = Callable[..., Model]


@pytest.fixture(scope="module")
def load(golden_dir: Path) -> Loader:
    """Load a golden model once per (name, layout, profile)."""
    kept: dict[tuple[str, str | None, str], Model] = {}

    def get(name: str, layout: str | None = None, profile: str = "plain") -> Model:
        key = (name, layout, profile)
        if key not in kept:
            main = GgufFile.open(golden_dir / f"{name}.gguf")
            mtp = GgufFile.open(golden_dir / f"{name}.{layout}.gguf") if layout else None
            kept[key] = Model.load(main, mtp, profile=profile)
        return kept[key]

    return get


@pytest.fixture(scope="module")
def arrays() -> Callable[[str], dict[str, np.ndarray]]:
    return golden.arrays


@pytest.fixture(scope="module")
def prefilled(load: Loader) -> Callable[[str, int], tuple[torch.Tensor, KVCache]]:
    """Streams and cache after a prompt of a golden model, made once; fork the cache to go on."""
    kept: dict[tuple[str, int], tuple[torch.Tensor, KVCache]] = {}

    def get(name: str, length: int) -> tuple[torch.Tensor, KVCache]:
        if (name, length) not in kept:
            tokens = golden.arrays(name)[f"tokens_{length}"].tolist()
            kept[name, length] = run(load(name), tokens)
        return kept[name, length]

    return get


def check_bounds(ours: np.ndarray, ref: np.ndarray, data: dict, length: int, rows) -> None:
    """The golden bounds: max, median and no flip where the reference's own top-2 gap is clear."""
    error = np.abs(ours - ref).max(-1)
    clear = np.minimum(
        data[f"ref_indexer_gap_{length}"].min(0), data[f"ref_router_gap_{length}"].min(0)
    )[rows]
    assert error[clear > 1e-4].max() <= 2e-3
    assert np.median(error) <= 1e-4
    top = np.sort(ref, axis=-1)
    wide = top[:, -1] - top[:, -2] > 1e-2
    flips = (ours.argmax(-1) != ref.argmax(-1)) & wide & (clear > 1e-4)
    assert not flips.any()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_match_the_float64_reference(name, length, load, arrays, prefilled):
    model, data = load(name), arrays(name)
    streams, _ = prefilled(name, length)
    check_bounds(
        model.logits(streams).numpy(), data[f"ref_logits_{length}"], data, length, slice(None)
    )


# The CPU backend goes on from all three by default: test_cpu_golden.py.
@pytest.mark.parametrize("length", [16, pytest.param(200, marks=pytest.mark.slow), 700])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_continues_with_the_same_64_tokens(name, length, load, arrays, prefilled):
    model, data = load(name), arrays(name)
    streams, before = prefilled(name, length)
    cache = before.fork()
    token = int(argmax(model.logits(streams[-1:]))[0])
    produced = [token]
    while len(produced) < 64:
        streams = model.forward([token], cache)
        cache.commit(1)
        token = int(argmax(model.logits(streams))[0])
        produced.append(token)
    assert produced == data[f"greedy_ref_tokens_{length}"].tolist()


def test_logits_match_at_2048_tokens_with_exact_angles(load, arrays):
    model, data = load("tiny-f32"), arrays("tiny-f32")
    streams, _ = run(model, data["tokens_2048"].tolist())
    rows = data["ref_positions_2048"].astype(int)
    ours = model.logits(streams[torch.from_numpy(rows)]).numpy()
    check_bounds(ours, data["ref_logits_2048"], data, 2048, rows)


@pytest.mark.parametrize("name", NAMES)
def test_residual_streams_match_layer_by_layer(name, load, arrays, monkeypatch):
    model, data = load(name), arrays(name)
    from ds4flow.model import trunk

    seen = []
    real = trunk.layer_forward

    def spy(*args):
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(trunk, "layer_forward", spy)
    cache = KVCache(model.config, context=16, draft_max=0, chunk=16)
    model.forward(data["tokens_16"].tolist(), cache)
    ref = data["ref_streams_16"]
    assert len(seen) == len(ref)
    for ours, wanted in zip(seen, ref, strict=True):
        assert np.abs(ours.numpy() - wanted).max() <= 1e-3 * wanted.std()


@pytest.mark.parametrize("length", [16, 200])
@pytest.mark.parametrize("name", NAMES)
def test_mtp_teacher_forced_in_both_layouts(name, length, load, arrays):
    data = arrays(name)
    tokens = data[f"tokens_{length}"].tolist()
    results = []
    for layout in ("mtp-support", "llama-mtp"):
        model = load(name, layout)
        streams, cache = run(model, tokens, chunk=len(tokens))
        shifted = torch.cat((torch.zeros_like(streams[:1]), streams[:-1]))
        logits, out = model.mtp.forward(shifted, tokens, 0, cache)
        results.append(logits)
        if length == 16:
            wanted = data["mtp_ref_out_streams_16"]
            assert np.abs(out.numpy() - wanted).max() <= 1e-3 * wanted.std()
    assert np.abs(results[0].numpy() - data[f"mtp_ref_logits_{length}"]).max() <= 2e-3
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("length", [16, 200])
@pytest.mark.parametrize("name", NAMES)
def test_mtp_chain_of_drafts(name, length, load, arrays):
    model, data = load(name, "mtp-support"), arrays(name)
    tokens = data[f"tokens_{length}"].tolist()
    streams, cache = run(model, tokens, chunk=len(tokens))
    model.mtp.follow(tokens, 0, None, streams, cache)
    token = int(argmax(model.logits(streams[-1:]))[0])
    chain, hidden = [token], streams[-1]
    for depth in range(4):
        logits, hidden = model.mtp.step(hidden, token, len(tokens) + depth, cache)
        wanted = data[f"mtp_ref_chain_logits_{length}"][depth]
        assert np.abs(logits.numpy() - wanted).max() <= 2e-3
        token = int(argmax(logits))
        chain.append(token)
    assert chain == data[f"mtp_ref_chain_tokens_{length}"].tolist()


@pytest.mark.parametrize(
    ("name", "length", "step"),
    [
        *((name, *at) for name in NAMES for at in ((16, 1), (200, 2))),
        ("tiny-f32", 700, 7),
        *(pytest.param(name, 700, 7, marks=pytest.mark.slow) for name in NAMES[1:]),
    ],
)
def test_official_profile_against_its_own_reference(name, length, step, load, arrays):
    model, data = load(name, profile="official"), arrays(name)
    streams, _ = run(model, data[f"tokens_{length}"].tolist())
    ours = model.logits(streams[::step]).numpy()
    error = np.abs(ours - data[f"refqat_logits_{length}"]).max(-1)
    assert np.median(error) <= 0.1
