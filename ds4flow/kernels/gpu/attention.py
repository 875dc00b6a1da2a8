"""Triton: compressor, indexer and sink attention, by absolute position.

Promise: keys are split at fixed places that follow from the row's own position, and the parts are
joined in order, so neither the number of rows nor the capacity of the cache changes a bit.
"""

# Triton reads annotations itself: arguments without one are pointers or scalars of the launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ds4flow.kernels.gpu.rounding import rotated


@triton.jit
def compress_write(values, scores, ape, ring_values, ring_scores, position, SLOTS,
                   RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write a position's projections to its ring slot, the scores with their position embedding."""
    m = tl.program_id(0)
    at = tl.load(position) + m
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < WIDTH
    source, slot = m.to(tl.int64) * WIDTH + c, (at % SLOTS) * WIDTH + c
    tl.store(ring_values + slot, tl.load(values + source, mask=ok, other=0.0), mask=ok)
    score = tl.load(scores + source, mask=ok, other=0.0)
    score += tl.load(ape + (at % RATIO) * WIDTH + c, mask=ok, other=0.0)
    tl.store(ring_scores + slot, score, mask=ok)


@triton.jit(do_not_specialize=["M"])
def pool_blocks(ring_values, ring_scores, rows, position, M, SLOTS, RATIO: tl.constexpr,
                WIDTH: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Softmax pooling per channel of the blocks this pass completes: `rows [blocks, WIDTH]`.

    Grid: blocks it can complete, tiles of WIDTH. With OVERLAP a ring row has two halves, and the
    first halves of the block before belong to the pool, except for block 0.
    """
    start = tl.load(position)
    block = start // RATIO + tl.program_id(0)
    if block < (start + M) // RATIO:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = c < WIDTH
        line: tl.constexpr = 2 * WIDTH if OVERLAP else WIDTH
        first = block * RATIO
        if OVERLAP:
            first = tl.maximum(first - RATIO, 0)
        last = (block + 1) * RATIO
        top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for p in range(first, last):
            at = (p % SLOTS) * line + c
            if OVERLAP:
                at += tl.where(p >= block * RATIO, WIDTH, 0)
            top = tl.maximum(top, tl.load(ring_scores + at, mask=ok, other=0.0))
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        pooled = tl.zeros((BLOCK,), dtype=tl.float32)
        for p in range(first, last):
            at = (p % SLOTS) * line + c
            if OVERLAP:
                at += tl.where(p >= block * RATIO, WIDTH, 0)
            e = tl.exp(tl.load(ring_scores + at, mask=ok, other=0.0) - top)
            total += e
            pooled += e * tl.load(ring_values + at, mask=ok, other=0.0)
        tl.store(rows + tl.program_id(0).to(tl.int64) * WIDTH + c, pooled / total, mask=ok)


@triton.jit
def index_scores(q, gains, pool, scores, position, CAPACITY, factor, RATIO: tl.constexpr,
                 HEADS: tl.constexpr, WIDTH: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr,
                 DC: tl.constexpr, TOP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """`scores [M, CAPACITY]` of the visible blocks where there are more than TOP of them.

    Grid: rows, tiles of the capacity; tiles beyond the row's own position leave at once.
    """
    m = tl.program_id(0)
    visible = (tl.load(position) + m + 1) // RATIO
    first = tl.program_id(1) * BT
    if (visible > TOP) & (first < visible):
        j = first + tl.arange(0, BT)
        h = tl.arange(0, HP)
        h_ok, j_ok = h < HEADS, j < visible
        dots = tl.zeros((HP, BT), dtype=tl.float32)
        for part in tl.static_range(0, WIDTH, DC):
            c = part + tl.arange(0, DC)
            own = q + (m * HEADS + h[:, None]).to(tl.int64) * WIDTH + c[None, :]
            a = tl.load(own, mask=h_ok[:, None], other=0.0)
            keys = pool + j[None, :].to(tl.int64) * WIDTH + c[:, None]
            b = tl.load(keys, mask=j_ok[None, :], other=0.0)
            dots = tl.dot(a, b, dots, input_precision=DOT)
        gain = tl.load(gains + m * HEADS + h, mask=h_ok, other=0.0) * factor
        score = tl.sum(gain[:, None] * tl.maximum(dots, 0.0), axis=0)
        tl.store(scores + m.to(tl.int64) * CAPACITY + j, score, mask=j_ok)


@triton.jit
def _ordered(score):
    """Integers that sort as the floats do; both zeros become one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def select_blocks(scores, chosen, counts, position, CAPACITY, RATIO: tl.constexpr,
                  TOP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The TOP best visible blocks of a row, ascending: `chosen [M, TOP]`, `counts [M]`.

    The smallest key that is still selected is found bit by bit; of equal keys the lower blocks win.
    """
    m = tl.program_id(0)
    visible = ((tl.load(position) + m + 1) // RATIO).to(tl.int32)
    out = chosen + m.to(tl.int64) * TOP
    lane = tl.arange(0, BLOCK)
    if visible <= TOP:
        for first in range(0, TOP, BLOCK):
            j = first + lane
            tl.store(out + j, j, mask=j < visible)
        tl.store(counts + m, visible)
    else:
        own = scores + m.to(tl.int64) * CAPACITY
        # the largest threshold that at least TOP keys reach; -2^31 is reached by all
        limit = tl.full((), -2147483648, dtype=tl.int64)
        for bit in range(0, 32):
            trial = limit + (tl.full((), 1, dtype=tl.int64) << (31 - bit))
            reached = tl.zeros((BLOCK,), dtype=tl.int32)
            for first in range(0, visible, BLOCK):
                j = first + lane
                key = _ordered(tl.load(own + j, mask=j < visible, other=0.0)).to(tl.int64)
                reached += ((j < visible) & (key >= trial)).to(tl.int32)
            limit = tl.where(tl.sum(reached, axis=0) >= TOP, trial, limit)
        above = tl.zeros((BLOCK,), dtype=tl.int32)
        for first in range(0, visible, BLOCK):
            j = first + lane
            key = _ordered(tl.load(own + j, mask=j < visible, other=0.0)).to(tl.int64)
            above += ((j < visible) & (key > limit)).to(tl.int32)
        ties_left = TOP - tl.sum(above, axis=0)
        written = tl.zeros((), dtype=tl.int32)
        for first in range(0, visible, BLOCK):
            j = first + lane
            key = _ordered(tl.load(own + j, mask=j < visible, other=0.0)).to(tl.int64)
            tie = ((j < visible) & (key == limit)).to(tl.int32)
            keep = (j < visible) & (
                (key > limit) | ((tie == 1) & (tl.cumsum(tie, axis=0) <= ties_left))
            )
            kept = keep.to(tl.int32)
            tl.store(out + written + tl.cumsum(kept, axis=0) - 1, j, mask=keep)
            written += tl.sum(kept, axis=0)
            ties_left -= tl.sum(tie * kept, axis=0)
        tl.store(counts + m, tl.full((), TOP, dtype=tl.int32))


@triton.jit
def attend_parts(q, window, pool, chosen, counts, parts, tops, totals, position, SLOTS, TOP, SPLITS,
                 scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
                 WINDOW_SPLITS: tl.constexpr, RATIO: tl.constexpr, LISTED: tl.constexpr,
                 BH: tl.constexpr, BT: tl.constexpr, DC: tl.constexpr,
                 DOT: tl.constexpr):  # fmt: skip
    """One tile of BT keys for 16 heads of one row: unnormalised values, largest score, weight sum.

    Grid: rows, tiles of heads, SPLITS tiles of keys: first those of the window, by distance from
    the row's own position, then those of the compressed rows. An empty tile only says so.
    """
    m, split = tl.program_id(0), tl.program_id(2)
    at = tl.load(position) + m
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    h_ok = h < HEADS
    t = tl.arange(0, BT)
    place = (m * HEADS + h).to(tl.int64) * SPLITS + split
    if split < WINDOW_SPLITS:
        k = split * BT + t
        p = at - WINDOW + 1 + k
        t_ok = (k < WINDOW) & (p >= 0)
        base = window
        row = tl.where(t_ok, p, 0) % SLOTS
    else:
        k = (split - WINDOW_SPLITS) * BT + t
        base = pool
        row = k.to(tl.int64)
        t_ok = k < 0
        if RATIO > 0:
            if LISTED:
                t_ok = k < tl.load(counts + m)
                row = tl.load(chosen + m.to(tl.int64) * TOP + k, mask=t_ok, other=0).to(tl.int64)
            else:
                t_ok = k < (at + 1) // RATIO
    if tl.sum(t_ok.to(tl.int32), axis=0) == 0:
        tl.store(tops + place, tl.full((BH,), float("-inf"), dtype=tl.float32), mask=h_ok)
    else:
        score = tl.zeros((BH, BT), dtype=tl.float32)
        for first in range(0, WIDTH, DC):
            c = first + tl.arange(0, DC)
            c_ok = c < WIDTH
            own = q + (m * HEADS + h[:, None]).to(tl.int64) * WIDTH + c[None, :]
            a = tl.load(own, mask=h_ok[:, None] & c_ok[None, :], other=0.0)
            keys = base + row[None, :] * WIDTH + c[:, None]
            b = tl.load(keys, mask=t_ok[None, :] & c_ok[:, None], other=0.0)
            score = tl.dot(a, b, score, input_precision=DOT)
        score = tl.where(t_ok[None, :], score * scale, float("-inf"))
        top = tl.max(score, axis=1)
        weight = tl.exp(score - top[:, None])
        tl.store(tops + place, top, mask=h_ok)
        tl.store(totals + place, tl.sum(weight, axis=1), mask=h_ok)
        for first in range(0, WIDTH, DC):
            c = first + tl.arange(0, DC)
            c_ok = c < WIDTH
            keys = base + row[:, None] * WIDTH + c[None, :]
            b = tl.load(keys, mask=t_ok[:, None] & c_ok[None, :], other=0.0)
            value = tl.dot(weight, b, input_precision=DOT)
            to = parts + place[:, None] * WIDTH + c[None, :]
            tl.store(to, value, mask=h_ok[:, None] & c_ok[None, :])


@triton.jit
def attend_join(parts, tops, totals, sinks, counts, cos, sin, y, position, SPLITS,
                HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                WINDOW_SPLITS: tl.constexpr, RATIO: tl.constexpr, LISTED: tl.constexpr,
                BT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Join the parts of a head in order, add the sink, turn back: `y [M, HEADS, WIDTH]`."""
    m, h = tl.program_id(0), tl.program_id(1)
    at = tl.load(position) + m
    live = tl.full((), WINDOW_SPLITS, dtype=tl.int64)
    if RATIO > 0:
        keys = (at + 1) // RATIO
        if LISTED:
            keys = tl.load(counts + m).to(tl.int64)
        live += (keys + BT - 1) // BT
    base = (m * HEADS + h).to(tl.int64) * SPLITS
    sink = tl.load(sinks + h)
    top = sink
    for split in range(0, live):
        top = tl.maximum(top, tl.load(tops + base + split))
    total = tl.exp(sink - top)
    c = tl.arange(0, BLOCK)
    ok = c < WIDTH
    own = tl.zeros((BLOCK,), dtype=tl.float32)
    other = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(0, live):
        largest = tl.load(tops + base + split)
        if largest != float("-inf"):
            weight = tl.exp(largest - top)
            total += weight * tl.load(totals + base + split)
            part = parts + (base + split) * WIDTH
            own += weight * tl.load(part + c, mask=ok, other=0.0)
            other += weight * tl.load(part + (c ^ 1), mask=ok, other=0.0)
    turned = rotated(own / total, other / total, c, cos, sin, at, WIDTH, ROPE, -1)
    tl.store(y + (m * HEADS + h).to(tl.int64) * WIDTH + c, turned, mask=ok)
