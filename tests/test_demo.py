"""The embedded model: what is shipped, and that the engine computes what its trainer computed."""

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.config import compose
from ds4flow.gguf import GgufFile
from ds4flow.model.trunk import Model

FOLDER = Path(str(resources.files("ds4flow.demo")))
MAIN, MTP = FOLDER / "ds4flow-demo.gguf", FOLDER / "ds4flow-demo-mtp.gguf"


def test_the_files_are_small_and_have_the_digests_of_the_config_and_the_card() -> None:
    assert MAIN.stat().st_size + MTP.stat().st_size <= 16_000_000
    config = compose(["model=demo"]).model
    sums = dict(line.split()[::-1] for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    for path, digest in ((MAIN, config.sha256), (MTP, config.mtp_sha256)):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest == sums[path.name]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_engine_agrees_with_the_trainers_own_network(kernels: str, case: int) -> None:
    model = Model.load(GgufFile.open(MAIN), GgufFile.open(MTP), profile="plain", kernels=kernels)
    with np.load(Path(__file__).parent / "data" / "demo_reference.npz") as stored:
        tokens = stored[f"tokens_{case}"].tolist()
        logits, drafts = stored[f"logits_{case}"], stored[f"mtp_logits_{case}"]
    cache = KVCache(model.config, context=len(tokens), draft_max=0, chunk=len(tokens))
    streams = model.forward(tokens, cache)
    assert np.abs(model.logits(streams[-8:]).numpy() - logits).max() <= 1e-3
    assert model.mtp is not None
    before = torch.cat((torch.zeros_like(streams[:1]), streams[:-1]))
    ours, _ = model.mtp.forward(before, tokens, 0, cache)
    assert np.abs(ours[-8:].numpy() - drafts).max() <= 1e-3


def test_every_feature_is_on() -> None:
    model = Model.load(GgufFile.open(MAIN), profile="plain")
    config = model.config
    assert set(config.ratios[: config.layers]) == {0, 4, 128}
    assert config.streams == 4
    assert config.hash_layers == 1
    assert config.context_length >= 2048
    # the indexer selects: more rows than it may keep come to be within the context
    assert config.context_length // 4 > config.top_k
