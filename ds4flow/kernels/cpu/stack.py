"""A stack of layers in one call: the kernels of one layer after the other, by address.

The order is the one of `ds4flow.model.layer`; only the check for finite streams is computed here.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.lanes import fma, get, invoke, lanes, spread, total
from ds4flow.kernels.cpu.layout import (
    CONTEXT_ATTEND,
    CONTEXT_ATTENTION_OUTPUT,
    CONTEXT_COMPRESS,
    CONTEXT_DIM,
    CONTEXT_HC_POST,
    CONTEXT_HC_PRE,
    CONTEXT_HEAD_DIM,
    CONTEXT_HEADS,
    CONTEXT_INDEX_TOPK,
    CONTEXT_KV_ROWS,
    CONTEXT_MOE,
    CONTEXT_Q_RANK,
    CONTEXT_QUERIES,
    CONTEXT_TOP_K,
    LAYER_ATTENTION,
    LAYER_COMPRESSOR,
    LAYER_HC_ATTN,
    LAYER_HC_FFN,
    LAYER_INDEX_COMPRESSOR,
    LAYER_INDEX_POOL,
    LAYER_INDEXER,
    LAYER_MOE,
    LAYER_ROPE,
    LAYER_ROWS,
    LAYER_SIZE,
    POOL_RATIO,
    ROWS_POOL,
    ROWS_SLOTS,
    ROWS_WINDOW,
)
from ds4flow.kernels.cpu.library import helper

ZERO = np.float32(0.0)
ROUTER = 1 << 62  # added to the result when it was the router that saw a value that is not finite


@helper
def _first_bad_row(x: int, m: int, width: int) -> int:
    """The first row that holds a value that is not finite, -1 for none."""
    for i in range(m):
        sum_ = spread(ZERO)
        for at in range(x + 4 * width * i, x + 4 * width * (i + 1), 64):
            sum_ = fma(lanes(at), spread(ZERO), sum_)
        if total(sum_) != ZERO:
            return i
    return -1


@helper
def _attention(
    context: int,
    layer: int,
    x: int,
    m: int,
    start: int,
    y: int,
    q: int,
    low: int,
    heads: int,
    table: int,
) -> None:
    """Attention sublayer of `x [m, dim]` into `y`; the other addresses are room for temporaries."""
    weights, rope, rows = (
        get(layer + LAYER_ATTENTION),
        get(layer + LAYER_ROPE),
        get(layer + LAYER_ROWS),
    )
    invoke(get(context + CONTEXT_QUERIES), (context, weights, x, m, start, rope, q, low, 0))
    window, slots, pool = get(rows + ROWS_WINDOW), get(rows + ROWS_SLOTS), get(rows + ROWS_POOL)
    invoke(get(context + CONTEXT_KV_ROWS), (context, weights, x, m, start, rope, window, slots, 0))
    selection = 0
    compress = get(context + CONTEXT_COMPRESS)
    compressor, indexer = get(layer + LAYER_COMPRESSOR), get(layer + LAYER_INDEXER)
    if compressor:
        invoke(compress, (context, compressor, pool, x, m, start, rope, 0, 0))
    if indexer:
        index = get(layer + LAYER_INDEX_POOL)
        made = get(layer + LAYER_INDEX_COMPRESSOR)
        invoke(compress, (context, made, index, x, m, start, rope, 1, 0))
        if (start + m) // get(index + POOL_RATIO) > get(context + CONTEXT_TOP_K):
            selection = table
            invoke(
                get(context + CONTEXT_INDEX_TOPK),
                (context, indexer, index, x, low, m, start, rope, table),
            )
    invoke(
        get(context + CONTEXT_ATTEND), (context, weights, rows, q, m, start, rope, selection, heads)
    )
    invoke(get(context + CONTEXT_ATTENTION_OUTPUT), (context, weights, heads, m, y, 0, 0, 0, 0))


def stack(
    context: int,
    layers: int,
    count: int,
    streams: int,
    m: int,
    start: int,
    tokens: int,
    room: int,
    unused: int,
) -> int:
    """Run `count` layers on `streams [m, 4, dim]` in place.

    0, or where a value was not finite: `1 + row + 2**32 * layer`, plus ROUTER if the router saw it.
    """
    dim = 4 * get(context + CONTEXT_DIM)
    size = 4 * get(context + CONTEXT_HEADS) * get(context + CONTEXT_HEAD_DIM)
    between = room
    x = between + 4 * dim * m
    y = x + dim * m
    q = y + dim * m
    heads = q + size * m
    low = heads + size * m
    comb = low + 4 * get(context + CONTEXT_Q_RANK) * m
    post = comb + 64 * m
    table = post + 16 * m
    hc_pre, hc_post = get(context + CONTEXT_HC_PRE), get(context + CONTEXT_HC_POST)
    for number in range(count):
        layer = layers + LAYER_SIZE * number
        invoke(hc_pre, (context, get(layer + LAYER_HC_ATTN), streams, m, x, post, comb, 0, 0))
        _attention(context, layer, x, m, start, y, q, low, heads, table)
        invoke(hc_post, (context, y, streams, post, comb, m, between, 0, 0))
        invoke(hc_pre, (context, get(layer + LAYER_HC_FFN), between, m, x, post, comb, 0, 0))
        bad = invoke(
            get(context + CONTEXT_MOE), (context, get(layer + LAYER_MOE), x, tokens, m, y, 0, 0, 0)
        )
        if bad:
            return bad + (number << 32) + ROUTER
        invoke(hc_post, (context, y, between, post, comb, m, streams, 0, 0))
        bad = 1 + _first_bad_row(streams, m, dim)
        if bad:
            return bad + (number << 32)
    return 0
