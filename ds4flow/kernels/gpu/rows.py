"""Triton: what happens to one row at a time: norms, hyper-connections, queries, cache rows,
routing, top-2.

One program (or one per head) handles one row, so rows cannot influence each other.
"""

# Triton reads annotations itself: arguments without one are pointers or scalars of the launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ds4flow.kernels.gpu.rounding import fp4, fp8, hadamard, root_mean_square, rotated


@triton.jit
def rms_norm(x, weight, y, eps, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Root-mean-square norm of the rows of `x [.., WIDTH]`."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    root = root_mean_square(x + row, WIDTH, eps, BLOCK)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        ok = c < WIDTH
        v = tl.load(x + row + c, mask=ok, other=0.0)
        v = tl.div_rn(v, tl.broadcast_to(root, v.shape))
        if WEIGHTED:
            v = v * tl.load(weight + c, mask=ok, other=0.0)
        tl.store(y + row + c, v, mask=ok)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sinkhorn(scores, ITERATIONS: tl.constexpr, eps):
    """Doubly stochastic matrix of `scores [old, new]`: softmax, then columns and rows in turn."""
    e = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    mix = e / tl.sum(e, axis=1)[:, None] + eps
    mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, axis=1)[:, None] + eps)
        mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
    return mix


@triton.jit
def hc_in(streams, mix, base, scale, norm, x, post, comb, eps, eps_hc, S: tl.constexpr,
          D: tl.constexpr, ITERATIONS: tl.constexpr, HEAD: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Hyper-connection input of one row: normalised `x [D]`, and outside a head `post` and `comb`.

    `mix` is the projection of the flat streams before the division by their root mean square.
    """
    row = tl.program_id(0).to(tl.int64)
    root = root_mean_square(streams + row * S * D, S * D, eps, BLOCK)
    s = tl.arange(0, S)
    width: tl.constexpr = S if HEAD else (2 + S) * S
    own = mix + row * width
    pre = tl.load(own + s) / root * tl.load(scale) + tl.load(base + s)
    pre = _sigmoid(pre) + eps_hc
    if not HEAD:
        out = tl.load(own + S + s) / root * tl.load(scale + 1) + tl.load(base + S + s)
        tl.store(post + row * S + s, 2.0 * _sigmoid(out))
        at = 2 * S + s[:, None] * S + s[None, :]
        scores = tl.load(own + at) / root * tl.load(scale + 2) + tl.load(base + at)
        mixing = _sinkhorn(scores, ITERATIONS, eps_hc)
        tl.store(comb + row * S * S + s[:, None] * S + s[None, :], mixing)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, D, BLOCK):
        total = _weighted(streams + row * S * D, pre, first, S, D, BLOCK)
        squares += total * total
    root = tl.sqrt_rn(tl.sum(squares, axis=0) / D + eps)
    for first in range(0, D, BLOCK):
        total = _weighted(streams + row * S * D, pre, first, S, D, BLOCK)
        c = first + tl.arange(0, BLOCK)
        ok = c < D
        v = tl.div_rn(total, tl.broadcast_to(root, total.shape))
        tl.store(x + row * D + c, v * tl.load(norm + c, mask=ok, other=0.0), mask=ok)


@triton.jit
def _weighted(streams, pre, first, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Channels `first ..` of the sum of the streams, in their order."""
    c = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(S):
        gain = tl.sum(tl.where(tl.arange(0, S) == k, pre, 0.0), axis=0)
        total += gain * tl.load(streams + k * D + c, mask=c < D, other=0.0)
    return total


@triton.jit
def hc_out(block, streams, post, comb, y, S: tl.constexpr, D: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """New streams: `post_j * block + sum_i comb[i, j] * stream_i`. Grid: rows, tiles of D."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    out = tl.load(block + row * D + c, mask=ok, other=0.0)
    for j in tl.static_range(S):
        total = tl.load(post + row * S + j) * out
        for i in tl.static_range(S):
            gain = tl.load(comb + row * S * S + i * S + j)
            total += gain * tl.load(streams + (row * S + i) * D + c, mask=ok, other=0.0)
        tl.store(y + (row * S + j) * D + c, total, mask=ok)


@triton.jit
def queries(q, cos, sin, position, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
            ROPE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Norm and rotate the heads of `q [M, HEADS, WIDTH]` in place. Grid: rows, heads."""
    m = tl.program_id(0)
    head = q + (m * HEADS + tl.program_id(1)).to(tl.int64) * WIDTH
    c = tl.arange(0, BLOCK)
    ok = c < WIDTH
    own = tl.load(head + c, mask=ok, other=0.0)
    other = tl.load(head + (c ^ 1), mask=ok, other=0.0)
    root = tl.sqrt_rn(tl.sum(own * own, axis=0) / WIDTH + eps)
    own = tl.div_rn(own, tl.broadcast_to(root, own.shape))
    other = tl.div_rn(other, tl.broadcast_to(root, other.shape))
    turned = rotated(own, other, c, cos, sin, tl.load(position) + m, WIDTH, ROPE, 1)
    tl.debug_barrier()  # partners were read by other threads than those that write them
    tl.store(head + c, turned, mask=ok)


@triton.jit
def _cache_row(source, weight, cos, sin, position, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr,
               BLOCKS: tl.constexpr, ROUND: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Norm, rotation and FP8 round trip of `source [WIDTH]`: a tile [BLOCKS, 64] of channels."""
    c = tl.arange(0, BLOCKS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    ok = c < WIDTH
    own = tl.load(source + c, mask=ok, other=0.0)
    other = tl.load(source + (c ^ 1), mask=ok, other=0.0)
    root = root_mean_square(source, WIDTH, eps, NORM)
    own = tl.div_rn(own, tl.broadcast_to(root, own.shape))
    other = tl.div_rn(other, tl.broadcast_to(root, other.shape))
    own = own * tl.load(weight + c, mask=ok, other=0.0)
    other = other * tl.load(weight + (c ^ 1), mask=ok, other=0.0)
    own = rotated(own, other, c, cos, sin, position, WIDTH, ROPE, 1)
    if ROUND:
        own = tl.where(c < WIDTH - ROPE, fp8(own), own)
    return own, c, ok


@triton.jit
def kv_rows(rows, weight, cos, sin, position, window, SLOTS, eps, WIDTH: tl.constexpr,
            ROPE: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr,
            NORM: tl.constexpr):  # fmt: skip
    """Finish the projected KV row of each position and write it to its slot of the window ring."""
    m = tl.program_id(0)
    at = tl.load(position) + m
    source = rows + m.to(tl.int64) * WIDTH
    own, c, ok = _cache_row(source, weight, cos, sin, at, eps, WIDTH, ROPE, BLOCKS, ROUND, NORM)
    tl.store(window + (at % SLOTS) * WIDTH + c, own, mask=ok)


@triton.jit(do_not_specialize=["M"])
def pooled_rows(rows, weight, cos, sin, position, pool, M, eps, RATIO: tl.constexpr,
                WIDTH: tl.constexpr, ROPE: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr,
                NORM: tl.constexpr):  # fmt: skip
    """Finish the pooled rows of the blocks that this pass completes. Grid: blocks it can
    complete."""
    start = tl.load(position)
    block = start // RATIO + tl.program_id(0)
    if block < (start + M) // RATIO:
        source = rows + tl.program_id(0).to(tl.int64) * WIDTH
        own, c, ok = _cache_row(
            source, weight, cos, sin, block * RATIO, eps, WIDTH, ROPE, BLOCKS, ROUND, NORM
        )
        tl.store(pool + block * WIDTH + c, own, mask=ok)


@triton.jit
def _index_row(own, other, c, cos, sin, position, WIDTH: tl.constexpr, ROPE: tl.constexpr,
               STAGES: tl.constexpr, FACTOR: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    own = rotated(own, other, c, cos, sin, position, WIDTH, ROPE, 1)
    if ROUND:
        own = hadamard(own, WIDTH, STAGES, FACTOR)
        own = tl.reshape(fp4(tl.reshape(own, (WIDTH // 32, 32))), (WIDTH,))
    return own


@triton.jit
def index_queries(q, cos, sin, position, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                  ROPE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
                  ROUND: tl.constexpr):  # fmt: skip
    """Rotate and round the indexer heads of `q [M, HEADS, WIDTH]` in place. Grid: rows, heads."""
    m = tl.program_id(0)
    head = q + (m * HEADS + tl.program_id(1)).to(tl.int64) * WIDTH
    c = tl.arange(0, WIDTH)
    own, other = tl.load(head + c), tl.load(head + (c ^ 1))
    at = tl.load(position) + m
    turned = _index_row(own, other, c, cos, sin, at, WIDTH, ROPE, STAGES, FACTOR, ROUND)
    tl.debug_barrier()  # partners were read by other threads than those that write them
    tl.store(head + c, turned)


@triton.jit(do_not_specialize=["M"])
def index_rows(rows, weight, cos, sin, position, pool, M, eps, RATIO: tl.constexpr,
               WIDTH: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
               ROUND: tl.constexpr):  # fmt: skip
    """Finish the indexer's pooled rows, as `pooled_rows` does the attention's."""
    start = tl.load(position)
    block = start // RATIO + tl.program_id(0)
    if block < (start + M) // RATIO:
        source = rows + tl.program_id(0).to(tl.int64) * WIDTH
        c = tl.arange(0, WIDTH)
        root = root_mean_square(source, WIDTH, eps, WIDTH)
        own, other = tl.load(source + c), tl.load(source + (c ^ 1))
        own = tl.div_rn(own, tl.broadcast_to(root, own.shape)) * tl.load(weight + c)
        other = tl.div_rn(other, tl.broadcast_to(root, own.shape)) * tl.load(weight + (c ^ 1))
        own = _index_row(own, other, c, cos, sin, block * RATIO, WIDTH, ROPE, STAGES, FACTOR, ROUND)
        tl.store(pool + block * WIDTH + c, own)


@triton.jit
def _not_finite(x):
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def route(logits, bias, table, tokens, ids, weights, scale, floor, E: tl.constexpr,
          USED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr,
          HASHED: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    """Experts and weights of one row: the largest biased gates, the lower id on ties, or the
    table's.

    A score that is not finite makes all weights NaN, so that it cannot pass unnoticed.
    """
    m = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    ok = c < E
    z = tl.load(logits + m * E + c, mask=ok, other=0.0)
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    small = u == 1.0
    log1p = tl.where(small, e, tl.log(u) * e / tl.where(small, 1.0, u - 1.0))
    gates = tl.sqrt_rn(tl.where(z > 20.0, z, log1p))
    score = gates
    if BIASED:
        score = gates + tl.load(bias + c, mask=ok, other=0.0)
    broken = tl.sum((ok & _not_finite(score)).to(tl.int32), axis=0) > 0
    score = tl.where(ok, score, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.float32)
    token = tl.load(tokens + m).to(tl.int64)
    for s in tl.static_range(USED):
        if HASHED:
            expert = tl.load(table + token * USED + s).to(tl.int32)
        else:
            best = tl.max(score, axis=0)
            expert = tl.minimum(tl.min(tl.where(score == best, c, BLOCK), axis=0), E - 1)
            score = tl.where(c == expert, float("-inf"), score)
        tl.store(ids + m * USED + s, expert)
        gate = tl.sum(tl.where(c == expert, gates, 0.0), axis=0)
        chosen = tl.where(slot == s, gate, chosen)
    if NORMED:
        chosen = chosen / tl.maximum(tl.sum(chosen, axis=0), floor)
    chosen = tl.where(broken, float("nan"), chosen * scale)
    tl.store(weights + m * USED + slot, chosen, mask=slot < USED)


@triton.jit
def top2_parts(logits, first, index, second, bad, V, PARTS, BLOCK: tl.constexpr):
    """Largest entry, its lowest index, the next one and a flag of every tile of V. Grid: rows,
    tiles."""
    m, part = tl.program_id(0), tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    ok = c < V
    v = tl.load(logits + m.to(tl.int64) * V + c, mask=ok, other=float("-inf"))
    top = tl.max(v, axis=0)
    at = tl.min(tl.where(v == top, c, V), axis=0)
    place = m * PARTS + part
    tl.store(first + place, top)
    tl.store(index + place, at)
    tl.store(second + place, tl.max(tl.where(c == at, float("-inf"), v), axis=0))
    tl.store(bad + place, tl.sum((ok & _not_finite(v)).to(tl.int32), axis=0))


@triton.jit
def top2_join(first, index, second, bad, token, top, gap, flag, V, PARTS, BLOCK: tl.constexpr):
    """`token [M]` (lowest id on ties), its logit, its lead, and the number of entries not
    finite."""
    m = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < PARTS
    tops = tl.load(first + m * PARTS + i, mask=ok, other=float("-inf"))
    places = tl.load(index + m * PARTS + i, mask=ok, other=V)
    best = tl.max(tops, axis=0)
    at = tl.minimum(tl.min(tl.where(tops == best, places, V), axis=0), V - 1)
    others = tl.load(second + m * PARTS + i, mask=ok, other=float("-inf"))
    next_best = tl.max(tl.where(places == at, others, tops), axis=0)
    tl.store(token + m, at.to(tl.int64))
    tl.store(top + m, best)
    tl.store(gap + m, best - next_best)
    tl.store(flag + m, tl.sum(tl.load(bad + m * PARTS + i, mask=ok, other=0), axis=0))
