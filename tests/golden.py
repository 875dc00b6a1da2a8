"""The reference arrays of the golden models, and the prefill that tests hold against them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ds4flow.cache import KVCache
from ds4flow.model.trunk import Model

ARRAYS = Path(__file__).parent / "data" / "golden"


def arrays(name: str) -> dict[str, np.ndarray]:
    """All arrays of a golden model, by name."""
    with np.load(ARRAYS / f"{name}.npz") as stored:
        return {key: stored[key] for key in stored.files}


def run(model: Model, tokens: list[int], chunk: int = 64) -> tuple[torch.Tensor, KVCache]:
    """Streams `[len(tokens), N, D]` of a chunked prefill and the cache it leaves."""
    cache = KVCache(model.config, context=len(tokens) + 80, draft_max=4, chunk=chunk)
    parts = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        parts.append(model.forward(part, cache))
        cache.commit(len(part))
    return torch.cat(parts), cache
