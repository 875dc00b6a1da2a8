"""Triton: matrix products, dense and over chosen experts, and the embedding look-up.

Promise: launch shapes follow the weights only, rows never share a sum, and a kernel is never
compiled for a particular number of rows: a specialised M = 1 could sum in another order than M = 3.
"""

# Triton reads annotations itself: arguments without one are pointers or scalars of the launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ds4flow.kernels.gpu.tiles import accumulate


@triton.jit(do_not_specialize=["M"])
def linear(x, codes, scales, factors, grid, y, M, x_stride, N: tl.constexpr, K: tl.constexpr,
           UNITS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr,
           DOT: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """`y [SPLITS, M, GROUPS*N]`: group g of `x [M, GROUPS*K]` times weight rows `g*N ..`.

    Grid: tiles of N, SPLITS * GROUPS, tiles of 16 rows. With SPLITS > 1 each part of the row is its
    own partial sum; `add_splits` adds them in order.
    """
    group, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    ok, n_ok = m < M, n < N
    offset = m.to(tl.int64) * x_stride + group * K
    row = (group * N + n).to(tl.int64)
    acc = tl.zeros((ROWS, BN), dtype=tl.float32)
    each: tl.constexpr = (UNITS + SPLITS - 1) // SPLITS
    first = split * each
    for unit in range(first, tl.minimum(first + each, UNITS)):
        acc = accumulate(
            acc, x, offset, ok, codes, scales, factors, grid, row, n_ok, unit, K, TYPE, DOT
        )
    place = (split * M + m).to(tl.int64) * (GROUPS * N) + group * N
    tl.store(y + place[:, None] + n[None, :], acc, mask=ok[:, None] & n_ok[None, :])


@triton.jit
def add_splits(parts, y, COUNT, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """`y [COUNT]` = the sum of `parts [SPLITS, COUNT]` in order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < COUNT
    total = tl.load(parts + i, mask=ok, other=0.0)
    at = parts + i
    for _ in range(1, SPLITS):
        at += COUNT
        total += tl.load(at, mask=ok, other=0.0)
    tl.store(y + i, total, mask=ok)


@triton.jit
def _leads(ids, tile, expert, pair, M, USED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """True for the first (row, slot) pair of a tile that chose `expert`."""
    q = tl.arange(0, PAIRS)
    there = (q < pair) & (tile * ROWS + q // USED < M)
    other = tl.load(ids + tile * ROWS * USED + q, mask=there, other=-1)
    return tl.sum((there & (other == expert)).to(tl.int32), axis=0) == 0


@triton.jit
def _slot_of(ids, m, ok, expert, USED: tl.constexpr, ROWS: tl.constexpr):
    """Per row the first slot that holds `expert`, -1 for rows that did not choose it."""
    slot = tl.full((ROWS,), -1, dtype=tl.int32)
    for s in tl.static_range(USED):
        hit = tl.load(ids + m * USED + s, mask=ok, other=-1) == expert
        slot = tl.where(hit & (slot < 0), s, slot)
    return slot


@triton.jit
def _store_slots(y, value, ids, m, ok, expert, n, n_ok, N: tl.constexpr, USED: tl.constexpr):
    """Write row m of `value [16, n]` to every slot of `y [M, USED, N]` that holds `expert`."""
    for s in tl.static_range(USED):
        hit = ok & (tl.load(ids + m * USED + s, mask=ok, other=-1) == expert)
        place = (m * USED + s).to(tl.int64) * N
        tl.store(y + place[:, None] + n[None, :], value, mask=hit[:, None] & n_ok[None, :])


@triton.jit(do_not_specialize=["M"])
def experts_in(x, ids, g_codes, g_scales, g_factors, u_codes, u_scales, u_factors, grid, h, M,
               clamp, N: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, USED: tl.constexpr,
               PAIRS: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, DOT: tl.constexpr,
               BN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """`h [M, USED, N]` = silu(gate x) * up x of the experts in `ids [M, USED]`, `x [M, K]`.

    Grid: tiles of N, (row, slot) pairs of a tile, tiles of 16 rows. Only the first pair that names
    an expert reads it, for all rows of the tile; the others leave at once, and pairs of rows that
    do not exist are never launched into a read. A negative id is no expert: it lies elsewhere.
    """
    pair, tile = tl.program_id(1), tl.program_id(2)
    if tile * ROWS + pair // USED < M:
        expert = tl.load(ids + tile * ROWS * USED + pair)
        if (expert >= 0) & _leads(ids, tile, expert, pair, M, USED, PAIRS, ROWS):
            m = tile * ROWS + tl.arange(0, ROWS)
            ok = m < M
            chosen = ok & (_slot_of(ids, m, ok, expert, USED, ROWS) >= 0)
            n = tl.program_id(0) * BN + tl.arange(0, BN)
            n_ok = n < N
            row = expert.to(tl.int64) * N + n
            offset = m.to(tl.int64) * K
            g = tl.zeros((ROWS, BN), dtype=tl.float32)
            u = tl.zeros((ROWS, BN), dtype=tl.float32)
            for unit in range(0, UNITS):
                g = accumulate(
                    g, x, offset, chosen, g_codes, g_scales, g_factors, grid, row, n_ok, unit, K,
                    GATE, DOT,
                )  # fmt: skip
                u = accumulate(
                    u, x, offset, chosen, u_codes, u_scales, u_factors, grid, row, n_ok, unit, K,
                    UP, DOT,
                )  # fmt: skip
            _store_slots(h, gated(g, u, clamp), ids, m, ok, expert, n, n_ok, N, USED)


@triton.jit
def gated(g, u, clamp):
    """SwiGLU: gate clamped from above, up from both sides (clamp 0: not at all); NaN stays NaN."""
    low = tl.where(g > clamp, clamp, g)
    both = tl.where(u > clamp, clamp, tl.where(u < -clamp, -clamp, u))
    g = tl.where(clamp > 1e-6, low, g)
    u = tl.where(clamp > 1e-6, both, u)
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def swiglu(g, u, h, COUNT, clamp, BLOCK: tl.constexpr):
    """`h [COUNT]` from gate and up of the shared expert."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < COUNT
    value = gated(tl.load(g + i, mask=ok, other=0.0), tl.load(u + i, mask=ok, other=0.0), clamp)
    tl.store(h + i, value, mask=ok)


@triton.jit(do_not_specialize=["M"])
def experts_out(h, ids, codes, scales, factors, grid, parts, M, N: tl.constexpr, K: tl.constexpr,
                UNITS: tl.constexpr, USED: tl.constexpr, PAIRS: tl.constexpr, TYPE: tl.constexpr,
                DOT: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """`parts [M, USED, N]` = down projection of `h [M, USED, K]`; grid and reads as
    `experts_in`."""
    pair, tile = tl.program_id(1), tl.program_id(2)
    if tile * ROWS + pair // USED < M:
        expert = tl.load(ids + tile * ROWS * USED + pair)
        if (expert >= 0) & _leads(ids, tile, expert, pair, M, USED, PAIRS, ROWS):
            m = tile * ROWS + tl.arange(0, ROWS)
            ok = m < M
            slot = _slot_of(ids, m, ok, expert, USED, ROWS)
            n = tl.program_id(0) * BN + tl.arange(0, BN)
            n_ok = n < N
            row = expert.to(tl.int64) * N + n
            offset = (m * USED + tl.maximum(slot, 0)).to(tl.int64) * K
            acc = tl.zeros((ROWS, BN), dtype=tl.float32)
            for unit in range(0, UNITS):
                acc = accumulate(
                    acc, h, offset, ok & (slot >= 0), codes, scales, factors, grid, row, n_ok, unit,
                    K, TYPE, DOT,
                )  # fmt: skip
            _store_slots(parts, acc, ids, m, ok, expert, n, n_ok, N, USED)


@triton.jit
def add_experts(shared, parts, weights, y, D: tl.constexpr, USED: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """`y [M, D]` = shared expert plus the weighted `parts [M, USED, D]` in the order of the
    slots."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    total = tl.load(shared + m * D + c, mask=ok, other=0.0)
    for s in tl.static_range(USED):
        part = tl.load(parts + (m * USED + s) * D + c, mask=ok, other=0.0)
        total += tl.load(weights + m * USED + s) * part
    tl.store(y + m * D + c, total, mask=ok)


@triton.jit
def embed(tokens, codes, scales, y, D: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `tokens [M]` of a table of width D: `y [M, D]` float32."""
    m = tl.program_id(0)
    token = tl.load(tokens + m).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    value = tl.load(codes + token * D + c, mask=ok, other=0).to(tl.float32)
    if TYPE == "Q8_0":
        scale = tl.load(scales + token * (D // 32) + c // 32, mask=ok, other=0.0)
        value = scale.to(tl.float32) * value
    tl.store(y + m.to(tl.int64) * D + c, value, mask=ok)
