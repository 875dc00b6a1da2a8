"""Hyper-connections of four streams: input mix, Sinkhorn, output mix, head (one kernel call each).

A 4 x 4 mixing matrix is one vector: lane 4i + j belongs to old stream i and new stream j.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.lanes import (
    exp,
    fma,
    get,
    getf,
    lanes,
    larger,
    partners,
    put_lanes,
    putf,
    spread,
)
from ds4flow.kernels.cpu.layout import (
    CONTEXT_ARENA,
    CONTEXT_DIM,
    CONTEXT_EPS,
    CONTEXT_EPS_HC,
    CONTEXT_SINKHORN,
    HYPER_BASE,
    HYPER_MATRIX,
    HYPER_NORM,
    HYPER_SCALE,
    TASK_SIZE,
)
from ds4flow.kernels.cpu.library import helper
from ds4flow.kernels.cpu.products import aligned, run, task
from ds4flow.kernels.cpu.rows import inverse_rms, logistic, norm

STREAMS = 4
MIX = 2 * STREAMS + STREAMS * STREAMS
ZERO, TWO = np.float32(0.0), np.float32(2.0)


@helper
def sinkhorn(scores, iterations: int, eps: np.float32):  # type: ignore[no-untyped-def]
    """Doubly stochastic matrix of 4 x 4 scores: row softmax, then columns and rows in turn."""
    top = larger(partners(scores, 1), scores)
    top = larger(partners(top, 2), top)
    mix = exp(scores - top)
    least = spread(eps)
    rows = mix + partners(mix, 1)
    mix = mix / (rows + partners(rows, 2)) + least
    for i in range(iterations):
        if i > 0:
            rows = mix + partners(mix, 1)
            mix = mix / (rows + partners(rows, 2) + least)
        columns = mix + partners(mix, 4)
        mix = mix / (columns + partners(columns, 8) + least)
    return mix


@helper
def _collapse(flat: int, dim: int, pre: int, y: int) -> None:
    """`sum_s pre[s] * streams[s]` into `y`."""
    p0, p1 = spread(getf(pre)), spread(getf(pre + 4))
    p2, p3 = spread(getf(pre + 8)), spread(getf(pre + 12))
    for at in range(0, 4 * dim, 64):
        s = p0 * lanes(flat + at)
        s = fma(p1, lanes(flat + 4 * dim + at), s)
        s = fma(p2, lanes(flat + 8 * dim + at), s)
        put_lanes(y + at, fma(p3, lanes(flat + 12 * dim + at), s))


def hc_pre(
    context: int, hyper: int, streams: int, m: int, x: int, post: int, comb: int, a: int, b: int
) -> int:
    """Block input `[m, dim]`, `post [m, 4]`, `comb [m, 4, 4]` of `streams [m, 4, dim]`."""
    dim = get(context + CONTEXT_DIM)
    eps, eps_hc = getf(context + CONTEXT_EPS), getf(context + CONTEXT_EPS_HC)
    gates = get(context + CONTEXT_ARENA)
    tasks = gates + 64
    mix = aligned(tasks + TASK_SIZE)
    end = task(tasks, get(hyper + HYPER_MATRIX), streams, 16 * dim, m, mix, 4 * MIX)
    run(context, tasks, end)
    for i in range(m):
        flat, row = streams + 16 * dim * i, mix + 4 * MIX * i
        factor = spread(inverse_rms(flat, STREAMS * dim, eps))
        scale, base = get(hyper + HYPER_SCALE), get(hyper + HYPER_BASE)
        first = fma(lanes(row) * factor, lanes(scale), lanes(base))
        last = fma(lanes(row + 32) * factor, lanes(scale + 32), lanes(base + 32))
        put_lanes(gates, logistic(first))
        for s in range(STREAMS):
            putf(gates + 4 * s, getf(gates + 4 * s) + eps_hc)
            putf(post + 16 * i + 4 * s, TWO * getf(gates + 16 + 4 * s))
        put_lanes(comb + 64 * i, sinkhorn(last, get(context + CONTEXT_SINKHORN), eps_hc))
        _collapse(flat, dim, gates, x + 4 * dim * i)
        norm(x + 4 * dim * i, dim, eps, get(hyper + HYPER_NORM), x + 4 * dim * i)
    return 0


def hc_head(
    context: int, hyper: int, streams: int, m: int, x: int, a: int, b: int, c: int, d: int
) -> int:
    """Collapsed and normalised streams `[m, dim]` for an output head."""
    dim = get(context + CONTEXT_DIM)
    eps, eps_hc = getf(context + CONTEXT_EPS), getf(context + CONTEXT_EPS_HC)
    gates = get(context + CONTEXT_ARENA)
    tasks = gates + 64
    mix = aligned(tasks + TASK_SIZE)  # rows of 64 bytes, of which a head uses 16
    end = task(tasks, get(hyper + HYPER_MATRIX), streams, 16 * dim, m, mix, 64)
    run(context, tasks, end)
    for i in range(m):
        flat = streams + 16 * dim * i
        for s in range(STREAMS, 16):
            putf(mix + 64 * i + 4 * s, ZERO)
        factor = spread(inverse_rms(flat, STREAMS * dim, eps))
        scale, base = lanes(get(hyper + HYPER_SCALE)), lanes(get(hyper + HYPER_BASE))
        put_lanes(gates, logistic(fma(lanes(mix + 64 * i) * factor, scale, base)) + spread(eps_hc))
        _collapse(flat, dim, gates, x + 4 * dim * i)
        norm(x + 4 * dim * i, dim, eps, get(hyper + HYPER_NORM), x + 4 * dim * i)
    return 0


def hc_post(
    context: int, block: int, streams: int, post: int, comb: int, m: int, y: int, a: int, b: int
) -> int:
    """New streams: stream j gets `post_j * block` plus the old streams by column j of `comb`."""
    dim = get(context + CONTEXT_DIM)
    for i in range(m):
        row, flat, out = block + 4 * dim * i, streams + 16 * dim * i, y + 16 * dim * i
        for j in range(STREAMS):
            gain = spread(getf(post + 16 * i + 4 * j))
            column = comb + 64 * i + 4 * j
            c0, c1 = spread(getf(column)), spread(getf(column + 16))
            c2, c3 = spread(getf(column + 32)), spread(getf(column + 48))
            for at in range(0, 4 * dim, 64):
                s = gain * lanes(row + at)
                s = fma(c0, lanes(flat + at), s)
                s = fma(c1, lanes(flat + 4 * dim + at), s)
                s = fma(c2, lanes(flat + 8 * dim + at), s)
                put_lanes(out + 4 * dim * j + at, fma(c3, lanes(flat + 12 * dim + at), s))
    return 0
