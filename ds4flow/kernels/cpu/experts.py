"""Mixture of experts in one kernel call: router, selection, experts grouped by row, combination.

Rows that chose the same expert share the decoding of its weights.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.lanes import (
    copy,
    fma,
    get,
    get32,
    getf,
    lanes,
    larger,
    put,
    put_lanes,
    putf,
    root,
    smaller,
    softplus,
    spread,
)
from ds4flow.kernels.cpu.layout import (
    CONTEXT_ARENA,
    CONTEXT_DIM,
    CONTEXT_EXPERT_NORM,
    CONTEXT_EXPERT_SCALE,
    CONTEXT_EXPERTS,
    CONTEXT_USED,
    MATRIX_ROWS,
    MATRIX_SIZE,
    MOE_BIAS,
    MOE_CLAMP,
    MOE_CLAMP_SHARED,
    MOE_DOWN,
    MOE_GATE,
    MOE_ROUTER,
    MOE_SHARED_DOWN,
    MOE_SHARED_GATE,
    MOE_SHARED_UP,
    MOE_TABLE,
    MOE_UP,
    TASK_SIZE,
)
from ds4flow.kernels.cpu.library import helper
from ds4flow.kernels.cpu.products import aligned, run, task
from ds4flow.kernels.cpu.rows import silu

ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOWEST, HIGHEST = np.float32(-3.4e38), np.float32(3.4e38)
ROUTER_FLOOR = np.float32(6.103515625e-5)  # smallest normal half
NO_CLAMP = np.float32(1e-6)


@helper
def _choose(context: int, moe: int, gates: int, token: int, chosen: int, gains: int) -> bool:
    """Experts and weights of one row from its gate logits; False when a score is not finite."""
    count, used = get(context + CONTEXT_EXPERTS), get(context + CONTEXT_USED)
    for at in range(gates, gates + 4 * count, 64):
        put_lanes(at, root(softplus(lanes(at))))
    table, bias = get(moe + MOE_TABLE), get(moe + MOE_BIAS)
    if table:
        for j in range(used):
            put(chosen + 8 * j, get32(table + 4 * (token * used + j)))
    else:
        for e in range(count):
            score = getf(gates + 4 * e)
            if bias:
                score += getf(bias + 4 * e)
            if not (LOWEST <= score <= HIGHEST):
                return False
        for j in range(used):
            best, most = -1, ZERO
            for e in range(count):
                score = getf(gates + 4 * e)
                if bias:
                    score += getf(bias + 4 * e)
                if best >= 0 and score <= most:
                    continue
                taken = False
                for i in range(j):
                    taken = taken or get(chosen + 8 * i) == e
                if not taken:
                    best, most = e, score
            put(chosen + 8 * j, best)
    sum_ = ZERO
    for j in range(used):
        gain = getf(gates + 4 * get(chosen + 8 * j))
        putf(gains + 4 * j, gain)
        sum_ += gain
    scale = getf(context + CONTEXT_EXPERT_SCALE)
    for j in range(used):
        gain = getf(gains + 4 * j)
        if get(context + CONTEXT_EXPERT_NORM):
            gain = gain / max(sum_, ROUTER_FLOOR)
        putf(gains + 4 * j, gain * scale)
    return True


@helper
def _activate(gate: int, up: int, count: int, limit: np.float32) -> None:
    """`silu(gate) * up` into `gate`, both clamped when `limit` is a limit."""
    if limit > NO_CLAMP:
        most, least = spread(limit), spread(-limit)
        for at in range(0, 4 * count, 64):
            g = smaller(lanes(gate + at), most)
            u = larger(smaller(lanes(up + at), most), least)
            put_lanes(gate + at, silu(g) * u)
    else:
        for at in range(0, 4 * count, 64):
            put_lanes(gate + at, silu(lanes(gate + at)) * lanes(up + at))


@helper
def _group(chosen: int, pairs: int, counts: int, experts: int, order: int) -> None:
    """Sort the (row, choice) pairs by expert.

    `order` gets the pairs in sorted order, `counts [experts]` the end of each expert's part.
    """
    for e in range(experts + 1):
        put(counts + 8 * e, 0)
    for p in range(pairs):
        slot = counts + 8 * (get(chosen + 8 * p) + 1)
        put(slot, get(slot) + 1)
    for e in range(experts):
        put(counts + 8 * (e + 1), get(counts + 8 * (e + 1)) + get(counts + 8 * e))
    for p in range(pairs):  # the starts move up while places are given away
        slot = counts + 8 * get(chosen + 8 * p)
        put(order + 8 * get(slot), p)
        put(slot, get(slot) + 1)


def moe(context: int, moe: int, x: int, tokens: int, m: int, y: int, a: int, b: int, c: int) -> int:
    """Routed experts plus the shared expert, `y [m, dim]`; 1 + row when scores are not finite."""
    dim, used = 4 * get(context + CONTEXT_DIM), get(context + CONTEXT_USED)
    experts = get(context + CONTEXT_EXPERTS)
    inner = get(get(moe + MOE_GATE) + MATRIX_ROWS)
    shared = get(get(moe + MOE_SHARED_GATE) + MATRIX_ROWS)
    pairs = m * used
    tasks = get(context + CONTEXT_ARENA)
    chosen = tasks + TASK_SIZE * (2 * min(experts, pairs) + 3)
    order = chosen + 8 * pairs
    counts = order + 8 * pairs
    gains = counts + 8 * (experts + 1)
    padded = 4 * ((experts + 15) // 16 * 16)
    gates = aligned(gains + 4 * pairs)
    inputs = aligned(gates + padded * m)
    gate = inputs + dim * pairs
    up = gate + 4 * inner * pairs
    parts = up + 4 * inner * pairs
    shared_gate = parts + dim * pairs
    shared_up = shared_gate + 4 * shared * m
    for i in range(m):
        put_lanes(gates + padded * (i + 1) - 64, spread(ZERO))
    end = task(tasks, get(moe + MOE_ROUTER), x, dim, m, gates, padded)
    end = task(end, get(moe + MOE_SHARED_GATE), x, dim, m, shared_gate, 4 * shared)
    end = task(end, get(moe + MOE_SHARED_UP), x, dim, m, shared_up, 4 * shared)
    run(context, tasks, end)
    for i in range(m):
        row, gain = chosen + 8 * used * i, gains + 4 * used * i
        if not _choose(context, moe, gates + padded * i, get(tokens + 8 * i), row, gain):
            return 1 + i
    _group(chosen, pairs, counts, experts, order)
    size = 4 * inner
    end, first = tasks, 0
    for e in range(experts):
        last = get(counts + 8 * e)
        rows = last - first
        if rows > 0:
            source = x + dim * (get(order + 8 * first) // used)
            if rows > 1:  # rows of one expert side by side
                source = inputs + dim * first
                for place in range(first, last):
                    copy(inputs + dim * place, x + dim * (get(order + 8 * place) // used), dim)
            matrix, made = MATRIX_SIZE * e, size * first
            end = task(end, get(moe + MOE_GATE) + matrix, source, dim, rows, gate + made, size)
            end = task(end, get(moe + MOE_UP) + matrix, source, dim, rows, up + made, size)
        first = last
    run(context, tasks, end)
    _activate(gate, up, inner * pairs, getf(moe + MOE_CLAMP))
    _activate(shared_gate, shared_up, shared * m, getf(moe + MOE_CLAMP_SHARED))
    end, first = tasks, 0
    for e in range(experts):
        last = get(counts + 8 * e)
        if last > first:
            matrix = get(moe + MOE_DOWN) + MATRIX_SIZE * e
            part, made = gate + size * first, parts + dim * first
            end = task(end, matrix, part, size, last - first, made, dim)
        first = last
    end = task(end, get(moe + MOE_SHARED_DOWN), shared_gate, 4 * shared, m, y, dim)
    run(context, tasks, end)
    for place in range(pairs):
        put(chosen + 8 * get(order + 8 * place), place)
    for i in range(m):
        for j in range(used):
            p = i * used + j
            gain, part = spread(getf(gains + 4 * p)), parts + dim * get(chosen + 8 * p)
            for at in range(0, dim, 64):
                out = y + dim * i + at
                put_lanes(out, fma(gain, lanes(part + at), lanes(out)))
    return 0
