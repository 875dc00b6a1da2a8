"""Long contexts for timing: real rows up to a cap, copies beyond it, and a label saying so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds4flow.bench.engine import Start, prepare
from ds4flow.cache import KVCache
from ds4flow.model.trunk import Model
from ds4flow.speculate import argmax


def fill(
    model: Model, tokens: Sequence[int], length: int, *, cap: int, room: int, chunk: int = 64
) -> tuple[Start, str]:
    """A sequence of `length` tokens, and how it was made: `prefill` or `prefill of N, rows copied`.

    Up to `cap` tokens are really prefilled, taken from `tokens` in turn. Beyond it the cache rows
    of those are repeated: the same shapes, bytes and selections of the same size, for timing
    only.
    """
    real = min(length, max(cap, 1))
    prompt = [tokens[i % len(tokens)] for i in range(real)]
    start = prepare(model, prompt, room=room, chunk=chunk, mtp=False, length=length)
    if real == length:
        return start, "prefill"
    _repeat_rows(start.cache, real, length)
    start.length = start.cache.length = length
    # a token of this state, so that what is decoded follows from what is in the cache
    logits = model.logits(model.forward([start.next_token], start.cache))
    start.next_token = int(argmax(logits)[0])
    return start, f"prefill of {real}, rows copied"


def _repeat_rows(cache: KVCache, real: int, length: int) -> None:
    for rows, written, wanted in _buffers(cache, real, length):
        if written and wanted > written:
            take = torch.arange(written, wanted, device=rows.device) % written
            rows[written:wanted] = rows[take]


def _buffers(cache: KVCache, real: int, length: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Every buffer with the rows written and the rows that a longer context would have written."""
    for layer in cache.layers:
        yield layer.window, min(real, len(layer.window)), min(length, len(layer.window))
        for compressed in (layer.compressed, layer.index):
            if compressed is None:
                continue
            for ring in (compressed.values, compressed.scores):
                yield ring, min(real, len(ring)), min(length, len(ring))
            yield compressed.pool, real // compressed.ratio, length // compressed.ratio
