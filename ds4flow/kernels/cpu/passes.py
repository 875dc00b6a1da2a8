"""Whole passes in one call each, because what runs between two calls finds cold caches.

The order of operations is that of `ds4flow.model.trunk`, `ds4flow.model.mtp` and
`ds4flow.model.head`.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.hyper import STREAMS
from ds4flow.kernels.cpu.lanes import (
    copy,
    fma,
    get,
    getd,
    getf,
    invoke,
    lanes,
    put,
    put_lanes,
    spread,
    total,
)
from ds4flow.kernels.cpu.layout import (
    CHAIN_RESULTS,
    CONTEXT_ARENA,
    CONTEXT_DIM,
    CONTEXT_EPS,
    CONTEXT_HC_HEAD,
    CONTEXT_HC_PRE,
    CONTEXT_KV_ROWS,
    CONTEXT_STACK,
    CONTEXT_TABLES,
    DRAFT_COUNT,
    DRAFT_EMBEDDING,
    DRAFT_END,
    DRAFT_FIRST,
    DRAFT_FORCED,
    DRAFT_GATE,
    DRAFT_HYPER,
    DRAFT_IDS,
    DRAFT_LAYER,
    DRAFT_LOGITS,
    DRAFT_LOOKUP,
    DRAFT_MADE,
    DRAFT_NORM,
    DRAFT_OUT,
    DRAFT_OUTPUT,
    DRAFT_PROJECTION,
    DRAFT_RESULTS,
    DRAFT_ROOM,
    DRAFT_ROWS,
    DRAFT_SPARE,
    DRAFT_STALE,
    DRAFT_STREAMS,
    DRAFT_STRIDE,
    DRAFT_TOKEN_NORM,
    DRAFT_TOKEN_PROJECTION,
    DRAFT_TOKENS,
    DRAFT_WRITTEN,
    LAYER_ATTENTION,
    LAYER_HC_ATTN,
    LAYER_ROPE,
    LAYER_ROWS,
    MATRIX_ROWS,
    ROWS_SLOTS,
    ROWS_WINDOW,
    TRUNK_COUNT,
    TRUNK_HYPER,
    TRUNK_LAYERS,
    TRUNK_LOOKUP,
    TRUNK_OUTPUT,
    TRUNK_ROWS,
    TRUNK_STRIDE,
)
from ds4flow.kernels.cpu.library import helper
from ds4flow.kernels.cpu.products import run, task
from ds4flow.kernels.cpu.rows import norm, top_two

ZERO = np.float32(0.0)


def trunk(
    context: int, model: int, ids: int, m: int, start: int, y: int, room: int, a: int, b: int
) -> int:
    """Streams `y [m, 4, dim]` of the tokens with the numbers `ids`; the result is `stack`'s."""
    return _trunk(context, model, ids, m, start, y, room)


@helper
def _trunk(context: int, model: int, ids: int, m: int, start: int, y: int, room: int) -> int:
    size = 4 * get(context + CONTEXT_DIM)
    rows, stride = get(model + TRUNK_ROWS), get(model + TRUNK_STRIDE)
    tables = get(context + CONTEXT_TABLES)
    invoke(get(model + TRUNK_LOOKUP), (ids, m, size // 64, rows, stride, room, tables, 0, 0))
    for i in range(m):
        for s in range(STREAMS):
            copy(y + size * (STREAMS * i + s), room + size * i, size)
    layers, count = get(model + TRUNK_LAYERS), get(model + TRUNK_COUNT)
    return invoke(get(context + CONTEXT_STACK), (context, layers, count, y, m, start, ids, room, 0))


def decide(
    context: int,
    model: int,
    ids: int,
    m: int,
    start: int,
    y: int,
    logits: int,
    room: int,
    results: int,
) -> int:
    """`trunk`, then the trunk's `head` on all rows, whose failures are negative."""
    bad = _trunk(context, model, ids, m, start, y, room)
    if bad:
        return bad
    hyper, matrix = get(model + TRUNK_HYPER), get(model + TRUNK_OUTPUT)
    return -_head(context, hyper, matrix, y, m, logits, room, results)


def head(
    context: int,
    hyper: int,
    matrix: int,
    streams: int,
    m: int,
    y: int,
    room: int,
    results: int,
    a: int,
) -> int:
    """Logits `y [m, rows of the matrix]` of `streams [m, 4, dim]`; `room` holds `[m, dim]`.

    0, and in `results` what `top_two` finds; or 1 + the first row that has a value not finite.
    """
    return _head(context, hyper, matrix, streams, m, y, room, results)


@helper
def _head(
    context: int, hyper: int, matrix: int, streams: int, m: int, y: int, room: int, results: int
) -> int:
    size = 4 * get(context + CONTEXT_DIM)
    invoke(get(context + CONTEXT_HC_HEAD), (context, hyper, streams, m, room, 0, 0, 0, 0))
    tasks = get(context + CONTEXT_ARENA)
    vocab = get(matrix + MATRIX_ROWS)
    run(context, tasks, task(tasks, matrix, room, size, m, y, 4 * vocab))
    for i in range(m):
        row, whole = y + 4 * vocab * i, vocab // 16 * 16
        sum_ = spread(ZERO)
        for at in range(row, row + 4 * whole, 64):
            sum_ = fma(lanes(at), spread(ZERO), sum_)
        rest = total(sum_)
        for at in range(row + 4 * whole, row + 4 * vocab, 4):
            rest += getf(at) * ZERO
        if rest != ZERO:
            return 1 + i
    top_two(y, m, vocab, results)
    return 0


@helper
def _join(context: int, draft: int, m: int, normed: int, y: int) -> None:
    """Input streams `y [m, 4, dim]`: the projected streams plus the token's part."""
    size, eps = 4 * get(context + CONTEXT_DIM), getf(context + CONTEXT_EPS)
    streams, tokens = get(draft + DRAFT_STREAMS), get(draft + DRAFT_TOKENS)
    for i in range(STREAMS * m):
        norm(streams + size * i, size // 4, eps, get(draft + DRAFT_NORM), normed + size * i)
    tasks = get(context + CONTEXT_ARENA)
    matrix = get(draft + DRAFT_PROJECTION)
    run(context, tasks, task(tasks, matrix, normed, size, STREAMS * m, y, size))
    for i in range(m):
        for s in range(STREAMS):
            row = y + size * (STREAMS * i + s)
            for at in range(0, size, 64):
                put_lanes(row + at, lanes(tokens + size * i + at) + lanes(row + at))


def draft(context: int, draft: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """A pass of the MTP block over the pairs that the record `draft` describes.

    Of the first `written` pairs only the window rows are made; the others' streams and logits
    follow, if there are others. The result is `stack`'s, negative if it is `head`'s.
    """
    return _draft(context, draft)


@helper
def _draft(context: int, draft: int) -> int:
    size = 4 * get(context + CONTEXT_DIM)
    m, written, first = (
        get(draft + DRAFT_ROWS),
        get(draft + DRAFT_WRITTEN),
        get(draft + DRAFT_FIRST),
    )
    joined = get(draft + DRAFT_ROOM)
    room = joined + STREAMS * size * m
    _join(context, draft, m, room, joined)
    layer = get(draft + DRAFT_LAYER)
    if written:
        comb, post, x = room, room + 64 * written, room + 128 * written
        pre, rows = get(layer + LAYER_HC_ATTN), get(layer + LAYER_ROWS)
        invoke(get(context + CONTEXT_HC_PRE), (context, pre, joined, written, x, post, comb, 0, 0))
        window, slots = get(rows + ROWS_WINDOW), get(rows + ROWS_SLOTS)
        attention, rope = get(layer + LAYER_ATTENTION), get(layer + LAYER_ROPE)
        invoke(
            get(context + CONTEXT_KV_ROWS),
            (context, attention, x, written, first, rope, window, slots, 0),
        )
    rest = m - written
    if rest == 0:
        return 0
    y = get(draft + DRAFT_OUT)
    copy(y, joined + STREAMS * size * written, STREAMS * size * rest)
    ids = get(draft + DRAFT_IDS) + 8 * written
    stack = get(context + CONTEXT_STACK)
    bad = invoke(stack, (context, layer, 1, y, rest, first + written, ids, room, 0))
    if bad:
        return bad
    hyper, matrix = get(draft + DRAFT_HYPER), get(draft + DRAFT_OUTPUT)
    results = get(draft + DRAFT_RESULTS)
    return -_head(context, hyper, matrix, y, rest, get(draft + DRAFT_LOGITS), room, results)


def chain(context: int, draft: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """Passes of the MTP block, each on what the one before proposed and on its streams.

    The streams of the last pair of the first pass lie apart from those of the pairs before. Ends
    after `count` passes, after one whose two largest logits are less than the gate apart, and after
    one that proposes the end. The result is that of the last `draft`.
    """
    size, made = 4 * get(context + CONTEXT_DIM), 0
    stale = get(draft + DRAFT_WRITTEN)
    if stale:
        both = get(draft + DRAFT_SPARE) + size * (1 + stale)
        copy(both, get(draft + DRAFT_STALE), STREAMS * size * stale)
        last_ = both + STREAMS * size * stale
        copy(last_, get(draft + DRAFT_STREAMS), STREAMS * size)
        put(draft + DRAFT_STREAMS, both)
    _embed(context, draft, 1 + stale)
    vocab = get(get(draft + DRAFT_OUTPUT) + MATRIX_ROWS)
    forced = get(draft + DRAFT_FORCED)
    while True:
        bad = _draft(context, draft)
        made += 1
        put(draft + DRAFT_MADE, made)
        results = get(draft + DRAFT_RESULTS)
        token = get(results)
        gap = getd(results + 8)
        if forced:
            token = get(forced + 8 * (made - 1))
        last = made == get(draft + DRAFT_COUNT) or token == get(draft + DRAFT_END)
        if bad or last or gap < getd(draft + DRAFT_GATE):
            return bad
        put(draft + DRAFT_FIRST, get(draft + DRAFT_FIRST) + get(draft + DRAFT_ROWS))
        put(draft + DRAFT_ROWS, 1)
        put(draft + DRAFT_WRITTEN, 0)
        put(draft + DRAFT_STREAMS, get(draft + DRAFT_OUT))
        put(draft + DRAFT_OUT, get(draft + DRAFT_OUT) + STREAMS * size)
        put(draft + DRAFT_LOGITS, get(draft + DRAFT_LOGITS) + 4 * vocab)
        put(draft + DRAFT_RESULTS, results + CHAIN_RESULTS)
        put(get(draft + DRAFT_IDS), token)
        _embed(context, draft, 1)


@helper
def _embed(context: int, draft: int, m: int) -> None:
    """The tokens' part of the next input: their embeddings, normed and projected."""
    size, rows = 4 * get(context + CONTEXT_DIM), get(draft + DRAFT_SPARE)
    normed, tables = get(draft + DRAFT_ROOM), get(context + CONTEXT_TABLES)
    first, stride = get(draft + DRAFT_EMBEDDING), get(draft + DRAFT_STRIDE)
    lookup, ids = get(draft + DRAFT_LOOKUP), get(draft + DRAFT_IDS)
    invoke(lookup, (ids, m, size // 64, first, stride, normed, tables, 0, 0))
    eps, weight = getf(context + CONTEXT_EPS), get(draft + DRAFT_TOKEN_NORM)
    for at in range(normed, normed + size * m, size):
        norm(at, size // 4, eps, weight, at)
    tasks = get(context + CONTEXT_ARENA)
    matrix = get(draft + DRAFT_TOKEN_PROJECTION)
    run(context, tasks, task(tasks, matrix, normed, size, m, rows, size))
    put(draft + DRAFT_TOKENS, rows)
