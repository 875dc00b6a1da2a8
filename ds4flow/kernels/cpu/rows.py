"""Operations on single rows of float32: norms, rotary pairs, the simulated quantisations.

A row is an address and a width that is a multiple of 16. Formulas: `ds4flow.kernels.numerics`.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.lanes import (
    absolute,
    block_scale,
    butterfly,
    doubled,
    e2m1,
    e4m3,
    exp,
    fma,
    get,
    getf,
    lanes,
    larger,
    largest,
    put,
    put_lanes,
    putd,
    root1,
    rotate_pairs,
    smaller,
    spread,
    total,
)
from ds4flow.kernels.cpu.layout import CONTEXT_EPS
from ds4flow.kernels.cpu.library import helper

ZERO, ONE = np.float32(0.0), np.float32(1.0)
MINUS_INFINITY = np.float32(-np.inf)
E4M3_MOST, E4M3_FLOOR = np.float32(448.0), np.float32(1e-4)
E2M1_MOST, E2M1_FLOOR = np.float32(6.0), np.float32(6.0 * 2.0**-126)


@helper
def mean_square(x: int, width: int) -> np.float32:
    """Mean of the squares of a row."""
    even, odd = spread(ZERO), spread(ZERO)
    for at in range(x, x + 4 * width - 64, 128):
        first, second = lanes(at), lanes(at + 64)
        even = fma(first, first, even)
        odd = fma(second, second, odd)
    if width % 32:
        last = lanes(x + 4 * width - 64)
        even = fma(last, last, even)
    return total(even + odd) / np.float32(width)


@helper
def inverse_rms(x: int, width: int, eps: np.float32) -> np.float32:
    """`1 / sqrt(mean(x**2) + eps)`."""
    return ONE / root1(mean_square(x, width) + eps)


@helper
def norm(x: int, width: int, eps: np.float32, weight: int, y: int) -> None:
    """Root-mean-square norm of a row into `y` (may be `x`); `weight` 0 for none."""
    factor = spread(inverse_rms(x, width, eps))
    if weight:
        for at in range(0, 4 * width, 64):
            put_lanes(y + at, lanes(x + at) * factor * lanes(weight + at))
    else:
        for at in range(0, 4 * width, 64):
            put_lanes(y + at, lanes(x + at) * factor)


@helper
def logistic(x):  # type: ignore[no-untyped-def]
    """Logistic function of 16 lanes."""
    one = spread(ONE)
    return one / (one + exp(spread(ZERO) - x))


@helper
def silu(x):  # type: ignore[no-untyped-def]
    """`x * logistic(x)` of 16 lanes."""
    return x / (spread(ONE) + exp(spread(ZERO) - x))


@helper
def turn(row: int, width: int, turned: int, rope: int, position: int, sign: np.float32) -> None:
    """Rotate the last `turned` channels of a row by a position; `sign` -1 rotates back.

    `rope` holds the address of a list of (cosines, sines) of blocks of 256 positions.
    """
    block = get(rope) + 16 * (position >> 8)
    row_offset = (position & 255) * 2 * turned  # turned / 2 pairs of 4 bytes
    cosines, sines = get(block) + row_offset, get(block + 8) + row_offset
    start = row + 4 * (width - turned)
    for at in range(0, 4 * turned, 64):
        cos, sin = doubled(cosines + at // 2), doubled(sines + at // 2) * spread(sign)
        put_lanes(start + at, rotate_pairs(lanes(start + at), cos, sin))


@helper
def round_e4m3(row: int, width: int) -> None:
    """E4M3 round trip in place: blocks of 64 channels with power-of-two scales."""
    for at in range(row, row + 4 * width, 256):
        most = spread(ZERO)
        for i in range(at, at + 256, 64):
            most = larger(absolute(lanes(i)), most)
        scale = block_scale(max(largest(most), E4M3_FLOOR), E4M3_MOST)
        up, down = spread(scale), spread(ONE / scale)
        for i in range(at, at + 256, 64):
            put_lanes(i, e4m3(lanes(i) * down) * up)


@helper
def round_e2m1(row: int, width: int) -> None:
    """E2M1 round trip in place: blocks of 32 channels with power-of-two scales."""
    for at in range(row, row + 4 * width, 128):
        first, second = lanes(at), lanes(at + 64)
        most = largest(larger(absolute(first), absolute(second)))
        scale = spread(block_scale(max(most, E2M1_FLOOR), E2M1_MOST))
        put_lanes(at, e2m1(first / scale) * scale)
        put_lanes(at + 64, e2m1(second / scale) * scale)


@helper
def hadamard(row: int, width: int) -> None:
    """Orthonormal Walsh-Hadamard transform in place; `width` a power of two, at least 16."""
    for at in range(row, row + 4 * width, 64):
        v = lanes(at)
        for span in (1, 2, 4, 8):
            v = butterfly(v, span)
        put_lanes(at, v)
    span = 64
    while span < 4 * width:
        for start in range(row, row + 4 * width, 2 * span):
            for at in range(start, start + span, 64):
                low, high = lanes(at), lanes(at + span)
                put_lanes(at, low + high)
                put_lanes(at + span, low - high)
        span *= 2
    factor = spread(ONE / root1(np.float32(width)))
    for at in range(row, row + 4 * width, 64):
        put_lanes(at, lanes(at) * factor)


# --- kernels --------------------------------------------------------------------------------------


def rms_norm(
    context: int, x: int, m: int, width: int, weight: int, y: int, a: int, b: int, c: int
) -> int:
    """Root-mean-square norm of `m` rows; `weight` 0 for none."""
    eps = getf(context + CONTEXT_EPS)
    for i in range(m):
        norm(x + 4 * width * i, width, eps, weight, y + 4 * width * i)
    return 0


@helper
def _two_of(top: np.float32, next_: np.float32, value: np.float32) -> tuple[np.float32, np.float32]:
    """The two largest of two ordered numbers and a third."""
    if value > top:
        return value, top
    return top, max(next_, value)


@helper
def top_two(x: int, m: int, count: int, results: int) -> None:
    """Of each row of `x [m, count]`: the first place of its largest entry, and the gap to the next.

    `results` are m int64 places, then m float64 differences; 128 bytes behind them are room.
    """
    gaps = results + 8 * m
    room = gaps + 8 * m
    for i in range(m):
        row, whole = x + 4 * count * i, count // 16 * 16
        first, second = spread(MINUS_INFINITY), spread(MINUS_INFINITY)
        for at in range(row, row + 4 * whole, 64):
            entries = lanes(at)
            second = larger(second, smaller(first, entries))
            first = larger(first, entries)
        put_lanes(room, first)
        put_lanes(room + 64, second)
        top, next_ = MINUS_INFINITY, MINUS_INFINITY
        for at in range(room, room + 128, 4):
            top, next_ = _two_of(top, next_, getf(at))
        for at in range(row + 4 * whole, row + 4 * count, 4):
            top, next_ = _two_of(top, next_, getf(at))
        at, end = row, row + 4 * whole
        while at < end and largest(lanes(at)) != top:
            at += 64
        while getf(at) != top:
            at += 4
        put(results + 8 * i, (at - row) // 4)
        putd(gaps + 8 * i, np.float64(top) - np.float64(next_))
