"""Triton: norms, rotations and the simulated FP8 and FP4 caches, with the reference's arithmetic.

Divisions and roots are correctly rounded, because a last bit decides where a cached value rounds
to.
"""

# Triton reads annotations itself: arguments without one are pointers or scalars of the launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def root_mean_square(x, WIDTH: tl.constexpr, eps, BLOCK: tl.constexpr):
    """`sqrt(mean(x^2) + eps)` of `x [WIDTH]` in memory."""
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < WIDTH, other=0.0)
        squares += v * v
    return tl.sqrt_rn(tl.sum(squares, axis=0) / WIDTH + eps)


@triton.jit
def rotated(own, other, c, cos, sin, position, WIDTH: tl.constexpr,
            ROPE: tl.constexpr, SIGN: tl.constexpr):  # fmt: skip
    """Channels `c` of a row turned to `position`; `other` holds the channels `c ^ 1`.

    `cos` and `sin` are tables [positions, ROPE / 2]; SIGN -1 turns back.
    """
    turns = (c >= WIDTH - ROPE) & (c < WIDTH)
    at = position * (ROPE // 2) + tl.where(turns, c - (WIDTH - ROPE), 0) // 2
    k = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0) * SIGN
    odd = (c - (WIDTH - ROPE)) % 2 == 1
    return tl.where(turns, tl.where(odd, other * s + own * k, own * k - other * s), own)


@triton.jit
def _power_of_two(amax, LARGEST: tl.constexpr):
    """`2 ** ceil(log2(amax / LARGEST))` from the float's own bits; `amax` is normal and
    positive."""
    ratio = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.maximum(exponent, 1)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8(x):
    """E4M3 round trip of `x [blocks, 64]` with one power-of-two scale a block."""
    scale = _power_of_two(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4), 448.0)[:, None]
    y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    a = tl.minimum(tl.abs(y), 448.0)
    exponent = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    step = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    # adding and taking away 1.5 * 2**23 steps rounds to a whole step, ties to even
    magic = step * 12582912.0
    rounded = (a + magic) - magic
    return tl.where(y < 0, -rounded, rounded) * scale


@triton.jit
def fp4(x):
    """E2M1 round trip of `x [blocks, 32]` with one power-of-two scale a block."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 6.0 * 1.1754943508222875e-38)
    scale = _power_of_two(amax, 6.0)[:, None]
    y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    a = tl.minimum(tl.abs(y), 6.0)
    value = tl.where(a > 0.25, 0.5, 0.0)
    value = tl.where(a >= 0.75, 1.0, value)
    value = tl.where(a > 1.25, 1.5, value)
    value = tl.where(a >= 1.75, 2.0, value)
    value = tl.where(a > 2.5, 3.0, value)
    value = tl.where(a >= 3.5, 4.0, value)
    value = tl.where(a > 5.0, 6.0, value)
    return tl.where(y < 0, -value, value) * scale


@triton.jit
def hadamard(x, WIDTH: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr):
    """Walsh-Hadamard transform of `x [WIDTH]` (natural order), scaled by FACTOR."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (WIDTH // (2 << stage), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (WIDTH,))
    return x * FACTOR
