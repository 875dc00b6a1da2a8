"""Speed and cost of passes: prefill and decode by context, verify by width, products by kind.

Nothing here knows a backend: an engine is whatever `Engine.load` was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ds4flow.bench.engine import Engine, Start, greedy
from ds4flow.bench.fill import fill
from ds4flow.bench.results import ContextResult, MatmulResult, WidthResult
from ds4flow.bench.samples import Clock, Samples, interleave, samples
from ds4flow.bench.settings import Say, Settings, check_context, quiet, random_tokens
from ds4flow.errors import UsageError
from ds4flow.model.weights import LayerWeights
from ds4flow.quants import QTensor
from ds4flow.speculate import argmax
from ds4flow.traffic import kv_traffic, selects, weight_traffic

LARGE = 1 << 18  # bytes from which on a matrix counts as large
STREAMED = 1 << 26  # bytes that one sample of a kind of product reads at least


def measure_contexts(
    engine: Engine,
    contexts: Sequence[int],
    settings: Settings,
    *,
    bandwidth: Samples | None = None,
    say: Say = quiet,
) -> list[ContextResult]:
    """Prefill and decode speed with `contexts` tokens in the cache, one context after another."""
    return [_measure_context(engine, context, settings, bandwidth, say) for context in contexts]


def _measure_context(
    engine: Engine, context: int, settings: Settings, bandwidth: Samples | None, say: Say
) -> ContextResult:
    check_context(engine, context + settings.tokens + settings.chunk)
    say(f"filling a context of {context}")
    tokens = random_tokens(engine, min(context, settings.fill_cap), settings.seed)
    room = settings.tokens + settings.chunk + 1
    start, filled = fill(
        engine.model, tokens, context, cap=settings.fill_cap, room=room, chunk=settings.chunk
    )
    prompt = random_tokens(engine, settings.chunk, settings.seed + 1)
    got = interleave(
        {
            "prefill": lambda: _pass_seconds(engine, start, prompt, settings.now),
            "decode": lambda: _decode_seconds(engine, start, settings),
        },
        repeats=settings.repeats,
        warmup=settings.warmup,
        say=lambda text: say(f"context {context}: {text}"),
    )
    decode = samples(got["decode"], lambda seconds: settings.tokens / seconds)
    config = engine.model.config
    indexer = selects(config, context)
    step = weight_traffic(engine.trunk_tensors(), config, indexer=indexer).total
    kv = kv_traffic(config, context)
    share = None if bandwidth is None else decode.median * (step + kv) / bandwidth.median
    return ContextResult(
        threads=engine.threads,
        context=context,
        filled=filled,
        fill_seconds=start.seconds,
        chunk=settings.chunk,
        prefill=samples(got["prefill"], lambda seconds: settings.chunk / seconds),
        decode=decode,
        weight_bytes=step,
        kv_bytes=kv,
        cache_bytes=start.cache.nbytes,
        share=share,
    )


def measure_widths(
    engine: Engine,
    widths: Sequence[int],
    settings: Settings,
    *,
    context: int,
    say: Say = quiet,
) -> list[WidthResult]:
    """Cost of verify passes of `widths` rows (width 1 is always measured) after `context` tokens.

    The rows are random tokens, the same ones for every width up to its own, and other ones in
    each round.
    """
    every = sorted({1, *widths})
    if every[0] < 1:
        raise UsageError(f"a pass of {every[0]} rows is not one", "use widths of 1 or more")
    check_context(engine, context + every[-1])
    tokens = random_tokens(engine, min(context, settings.fill_cap), settings.seed)
    start, _ = fill(
        engine.model, tokens, context, cap=settings.fill_cap, room=every[-1], chunk=settings.chunk
    )
    drawn = random_tokens(engine, 64 * every[-1], settings.seed + 2)
    passes = {width: 0 for width in every}

    def run(width: int) -> float:
        passes[width] += 1
        at = (passes[width] * every[-1]) % (len(drawn) - every[-1])
        return _pass_seconds(engine, start, drawn[at : at + width], settings.now)

    got = interleave(
        {str(width): partial(run, width) for width in every},
        repeats=settings.repeats,
        warmup=settings.warmup,
        say=lambda text: say(f"verify passes: {text}"),
    )
    config = engine.model.config
    indexer = selects(config, context)
    tensors = engine.trunk_tensors()
    one = weight_traffic(tensors, config, indexer=indexer).total
    base = Samples(tuple(got["1"]))
    return [
        WidthResult(
            threads=engine.threads,
            context=context,
            width=width,
            seconds=Samples(tuple(got[str(width)])),
            ratio=Samples(tuple(got[str(width)])).over(base),
            byte_ratio=weight_traffic(tensors, config, rows=width, indexer=indexer).total / one,
        )
        for width in every
    ]


def _pass_seconds(engine: Engine, start: Start, tokens: Sequence[int], clock: Clock) -> float:
    """One pass with logits and argmax of every row; nothing is committed."""
    cache = start.rewind()
    begun = clock()
    argmax(engine.model.logits(engine.model.forward(tokens, cache))).tolist()
    return clock() - begun


def _decode_seconds(engine: Engine, start: Start, settings: Settings) -> float:
    return greedy(engine.model, start, settings.tokens, clock=settings.now).seconds


def measure_matmuls(
    engine: Engine,
    settings: Settings,
    *,
    rows: int = 1,
    bandwidth: Samples | None = None,
    say: Say = quiet,
) -> list[MatmulResult]:
    """Bytes of weights per second of each kind of large product, and of the experts' operation.

    A kind is a storage type and shape. One sample goes over all weights of its kind, so that they
    come from memory and not from a cache, if there are enough of them.
    """
    model = engine.model
    kinds: dict[str, list[QTensor]] = {}
    for weight in model.matrices():
        if len(weight.shape) == 2 and weight.nbytes >= LARGE:
            key = f"{weight.type} {weight.shape[0]}x{weight.shape[1]}"
            kinds.setdefault(key, []).append(weight)
    arms: dict[str, Callable[[], float]] = {}
    sizes: dict[str, int] = {}
    generator = torch.Generator().manual_seed(settings.seed)
    for key, weights in kinds.items():
        x = torch.randn(rows, weights[0].shape[1], generator=generator)
        arms[key], sizes[key] = _product_arm(engine, weights, x, settings.now)
    layers = model.weights.layers
    x = torch.randn(rows, model.config.dim, generator=generator)
    arms["experts"], sizes["experts"] = _experts_arm(engine, layers, x, settings)
    got = interleave(
        arms,
        repeats=settings.repeats,
        warmup=settings.warmup,
        say=lambda text: say(f"products: {text}"),
    )
    results = []
    for key, seconds in got.items():
        rate = Samples(tuple(sizes[key] / value for value in seconds))
        share = None if bandwidth is None else rate.median / bandwidth.median
        results.append(MatmulResult(engine.threads, key, rows, sizes[key], rate, share))
    return results


def _product_arm(
    engine: Engine, weights: Sequence[QTensor], x: torch.Tensor, clock: Clock
) -> tuple[Callable[[], float], int]:
    once = sum(weight.nbytes for weight in weights)
    times = max(1, -(-STREAMED // once))

    def arm() -> float:
        begun = clock()
        for _ in range(times):
            for weight in weights:
                engine.model.kernels.linear(x, weight)
        return clock() - begun

    return arm, once * times


def _experts_arm(
    engine: Engine, layers: Iterable[LayerWeights], x: torch.Tensor, settings: Settings
) -> tuple[Callable[[], float], int]:
    """Router, routed and shared experts of every layer; routed bytes are those expected."""
    config, rows = engine.model.config, x.shape[0]
    layers, clock = list(layers), settings.now
    tokens = random_tokens(engine, rows, settings.seed)
    tensors = [info for info in engine.trunk_tensors() if ".ffn_" in info.name]
    once = int(weight_traffic(tensors, config, rows=rows).total)
    times = max(1, -(-STREAMED // once))

    def arm() -> float:
        begun = clock()
        for _ in range(times):
            for layer in layers:
                engine.model.kernels.moe(x, tokens, layer)
        return clock() - begun

    return arm, once * times
