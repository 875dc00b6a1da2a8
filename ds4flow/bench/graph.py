"""Cycles of the decode graph by context and number of drafts, on any model; Flash without a file.

Promise: drafting, verifying and committing are what a run does; only the cache holds zeros, which
cost the same, and how many drafts would be accepted is assumed and labelled so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ds4flow.bench.results import GraphResult
from ds4flow.bench.samples import Samples, interleave
from ds4flow.bench.settings import Say, Settings, quiet
from ds4flow.cache import KVCache
from ds4flow.gguf import TensorInfo
from ds4flow.graph import DecodeGraph
from ds4flow.model.trunk import Model
from ds4flow.traffic import selects, weight_traffic

ACCEPTANCE = 0.8
"""Assumed of every draft where no text is decoded."""


def measure_graph(
    model: Model,
    tensors: Iterable[TensorInfo],
    contexts: Sequence[int],
    drafts: Sequence[int],
    settings: Settings,
    *,
    eager: bool = False,
    say: Say = quiet,
) -> list[GraphResult]:
    """Seconds of cycles with each number of drafts at each context, interleaved by round."""
    tensors = list(tensors)
    bandwidth = copy_bandwidth(model.device)
    return [
        result
        for context in contexts
        for result in _at_context(model, tensors, context, drafts, settings, eager, bandwidth, say)
    ]


def _at_context(
    model: Model,
    tensors: list[TensorInfo],
    context: int,
    drafts: Sequence[int],
    settings: Settings,
    eager: bool,
    bandwidth: float | None,
    say: Say,
) -> list[GraphResult]:
    config, deepest = model.config, max(drafts)
    room = context + settings.tokens * (deepest + 1) + 1
    cache = KVCache(config, context=room, draft_max=deepest, chunk=1, device=model.device)
    graph = DecodeGraph(model, cache, eager=eager)
    hidden = torch.randn(config.streams, config.dim, device=model.device)

    def seconds(width: int) -> float:
        cache.length = context
        graph.start(1, hidden)
        began = settings.now()
        for _ in range(settings.tokens):
            graph.cycle(width)
        return (settings.now() - began) / settings.tokens

    cache.length = context
    say(f"context {context}: capturing")
    graph.capture(range(deepest + 1))
    arms = {str(width): partial(seconds, width) for width in dict.fromkeys((0, *drafts))}
    got = interleave(
        arms,
        repeats=settings.repeats,
        warmup=settings.warmup,
        say=lambda text: say(f"context {context}: {text}"),
    )
    times = {int(width): Samples(tuple(values)) for width, values in got.items()}
    read = weight_traffic(tensors, config, indexer=selects(config, context)).total
    share = None if bandwidth is None else read / times[0].median / bandwidth
    return [
        GraphResult(
            threads=torch.get_num_threads(),
            context=context,
            drafts=width,
            mode=graph.mode,
            seconds=times[width],
            ratio=times[width].over(times[0]),
            weight_bytes=read,
            acceptance=ACCEPTANCE,
            share=share if width == 0 else None,
        )
        for width in drafts
    ]


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes read and written per second by copies of 2 GiB on a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return 2 * source.numel() / best
