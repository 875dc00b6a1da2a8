"""The CPU backend on the golden models: the same bounds as the reference backend meets."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.gguf import GgufFile
from ds4flow.model.trunk import Model
from ds4flow.speculate import argmax
from tests.golden import arrays, run

NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
Loader = Callable[..., Model]


@pytest.fixture(scope="module")
def load(golden_dir: Path) -> Loader:
    """Load a golden model with its MTP block once per (name, layout, profile)."""
    kept: dict[tuple[str, str, str], Model] = {}

    def get(name: str, layout: str = "mtp-support", profile: str = "plain") -> Model:
        key = (name, layout, profile)
        if key not in kept:
            main = GgufFile.open(golden_dir / f"{name}.gguf")
            mtp = GgufFile.open(golden_dir / f"{name}.{layout}.gguf")
            kept[key] = Model.load(main, mtp, profile=profile, kernels="cpu")
        return kept[key]

    return get


@pytest.mark.parametrize("length", [16, 200, 700])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name, length, load):
    model, data = load(name), arrays(name)
    streams, cache = run(model, data[f"tokens_{length}"].tolist())
    ours, wanted = model.logits(streams).numpy(), data[f"ref_logits_{length}"]
    error = np.abs(ours - wanted).max(-1)
    gaps = data[f"ref_indexer_gap_{length}"].min(0), data[f"ref_router_gap_{length}"].min(0)
    clear = np.minimum(*gaps) > 1e-4
    assert error[clear].max() <= 2e-3
    assert np.median(error) <= 1e-4
    produced = [int(ours[-1].argmax())]
    while len(produced) < 64:
        streams = model.forward(produced[-1:], cache)
        cache.commit(1)
        produced.append(int(argmax(model.logits(streams))[0]))
    assert produced == data[f"greedy_ref_tokens_{length}"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_mtp_in_both_layouts(name, load):
    data = arrays(name)
    tokens = data["tokens_200"].tolist()
    results = []
    for layout in ("mtp-support", "llama-mtp"):
        model = load(name, layout)
        streams, cache = run(model, tokens)
        model.mtp.follow(tokens, 0, None, streams, cache)
        token, hidden = int(argmax(model.logits(streams[-1:]))[0]), streams[-1]
        chain, drafts = [token], []
        for depth in range(4):
            logits, hidden = model.mtp.step(hidden, token, len(tokens) + depth, cache)
            drafts.append(logits)
            token = int(argmax(logits))
            chain.append(token)
        assert chain == data["mtp_ref_chain_tokens_200"].tolist()
        results.append(torch.stack(drafts))
    assert np.abs(results[0].numpy() - data["mtp_ref_chain_logits_200"]).max() <= 2e-3
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", NAMES)
def test_official_profile_against_its_own_reference(name, load):
    model, data = load(name, profile="official"), arrays(name)
    streams, _ = run(model, data["tokens_200"].tolist())
    ours = model.logits(streams[::2]).numpy()  # every second position is stored
    error = np.abs(ours - data["refqat_logits_200"]).max(-1)
    assert np.median(error) <= 0.1


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_give_the_same_bits_and_state(name, load):
    model = load(name, profile="official")
    tokens = torch.randint(0, model.config.vocab, (150,), generator=torch.Generator()).tolist()
    wanted, state = None, None
    for chunk in (150, 64, 5):
        streams, cache = run(model, tokens, chunk=chunk)
        hashes = cache.state_hash(mtp=False)
        if wanted is None:
            wanted, state = streams, hashes
        assert torch.equal(streams, wanted)
        assert hashes == state
