"""Triton: 16 activation rows times a tile of stored weight rows, decoded in registers.

Promise: the sum over a row runs in one fixed order of steps, whatever the number of live rows, and
every product is exact: quants are small integers, scales are applied to the float32 sums outside
the dot.
"""

# Triton reads annotations itself: arguments without one are pointers or scalars of the launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 16  # rows of every product tile; unused rows are masked and cost no weight traffic


@triton.jit
def _dot(x, w, DOT: tl.constexpr, WIDE: tl.constexpr):
    """`x [16, k] @ w [k, n]` in float32; `w` fits bfloat16 exactly unless WIDE.

    DOT is "ieee" (plain float32, for the interpreter, whose bfloat16 dot is wrong), "split" (the
    tensor cores see x as the exact sum of three bfloat16 parts) or "split-rocm" (the same, where
    the compiler has no threefold tf32 for the wide types).
    """
    if DOT == "ieee":
        product = tl.dot(x, w, input_precision="ieee")
    elif WIDE and DOT == "split":
        product = tl.dot(x, w, input_precision="tf32x3")
    elif WIDE:  # "split-rocm"
        product = tl.dot(x, w, input_precision="ieee")
    else:
        narrow = w.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(low, narrow)
        product = tl.dot(middle, narrow, product)
        product = tl.dot(high, narrow, product)
    return product


@triton.jit
def _x(x, offset, ok, column):
    return tl.load(x + offset[:, None] + column[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def _plain(acc, x, offset, ok, codes, row, row_ok, unit, K: tl.constexpr, DOT: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    k = unit * 32 + tl.arange(0, 32)
    w = tl.load(codes + row[None, :] * K + k[:, None], mask=row_ok[None, :], other=0.0)
    return acc + _dot(_x(x, offset, ok, k), w.to(tl.float32), DOT, WIDE)


@triton.jit
def _q8_0(acc, x, offset, ok, codes, scales, row, row_ok, unit, K: tl.constexpr,
          DOT: tl.constexpr):  # fmt: skip
    k = unit * 32 + tl.arange(0, 32)
    q = tl.load(codes + row[None, :] * K + k[:, None], mask=row_ok[None, :], other=0)
    d = tl.load(scales + row * (K // 32) + unit, mask=row_ok, other=0.0).to(tl.float32)
    return acc + _dot(_x(x, offset, ok, k), q.to(tl.float32), DOT, False) * d[None, :]


@triton.jit
def _mxfp4(acc, x, offset, ok, codes, scales, row, row_ok, unit, K: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    block = row * (K // 32) + unit
    lane = tl.arange(0, 32)
    where = codes + block[None, :] * 16 + (lane % 16)[:, None]
    pair = tl.load(where, mask=row_ok[None, :], other=0).to(tl.int32)
    code = (pair >> (4 * (lane // 16))[:, None]) & 15
    place = code & 7  # 0 1 2 3 4 6 8 12: the doubled E2M1 values
    value = tl.where(place < 5, place, tl.where(place == 7, 12, 2 * place - 4)).to(tl.float32)
    w = tl.where(code > 7, -value, value)
    e = tl.load(scales + block, mask=row_ok, other=0).to(tl.int32)
    # half of 2 ** (e - 127), which is subnormal below e = 2
    bits = tl.where(e < 2, 0x200000 << tl.minimum(e, 1), (tl.maximum(e, 1) - 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)
    return acc + _dot(_x(x, offset, ok, unit * 32 + lane), w, DOT, False) * scale[None, :]


@triton.jit
def _q4_k(acc, x, offset, ok, codes, scales, factors, row, row_ok, unit, K: tl.constexpr,
          DOT: tl.constexpr):  # fmt: skip
    block = row * (K // 256) + unit // 4
    step = tl.load(factors + block * 2, mask=row_ok, other=0.0).to(tl.float32)
    least = tl.load(factors + block * 2 + 1, mask=row_ok, other=0.0).to(tl.float32)
    lane = tl.arange(0, 32)
    where = codes + block[None, :] * 128 + 32 * (unit % 4) + lane[:, None]
    pair = tl.load(where, mask=row_ok[None, :], other=0).to(tl.int32)
    for half in tl.static_range(2):
        s = 2 * (unit % 4) + half
        at = scales + block * 12 + s % 4
        first = tl.load(at, mask=row_ok, other=0).to(tl.int32)
        second = tl.load(at + 4, mask=row_ok, other=0).to(tl.int32)
        third = tl.load(at + 8, mask=row_ok, other=0).to(tl.int32)
        a = tl.where(s < 4, first & 63, (third & 15) | ((first >> 2) & 48))
        b = tl.where(s < 4, second & 63, (third >> 4) | ((second >> 2) & 48))
        q = (pair >> (4 * half)) & 15
        part = _x(x, offset, ok, unit * 64 + 32 * half + lane)
        scaled = _dot(part, q.to(tl.float32), DOT, False) * (step * a.to(tl.float32))[None, :]
        acc += scaled - tl.sum(part, axis=1)[:, None] * (least * b.to(tl.float32))[None, :]
    return acc


@triton.jit
def _q2_k(acc, x, offset, ok, codes, scales, factors, row, row_ok, unit, K: tl.constexpr,
          DOT: tl.constexpr):  # fmt: skip
    block = row * (K // 256) + unit // 2
    step = tl.load(factors + block * 2, mask=row_ok, other=0.0).to(tl.float32)
    least = tl.load(factors + block * 2 + 1, mask=row_ok, other=0.0).to(tl.float32)
    lane = tl.arange(0, 16)
    for s in tl.static_range(2):
        where = codes + block[None, :] * 64 + (32 * (unit % 2) + 16 * s) + lane[:, None]
        quad = tl.load(where, mask=row_ok[None, :], other=0).to(tl.int32)
        for shift in tl.static_range(4):
            at = scales + block * 16 + (8 * (unit % 2) + 2 * shift + s)
            scale = tl.load(at, mask=row_ok, other=0).to(tl.int32)
            a, b = (scale & 15).to(tl.float32), (scale >> 4).to(tl.float32)
            q = (quad >> (2 * shift)) & 3
            part = _x(x, offset, ok, unit * 128 + (32 * shift + 16 * s) + lane)
            scaled = _dot(part, q.to(tl.float32), DOT, False) * (step * a)[None, :]
            acc += scaled - tl.sum(part, axis=1)[:, None] * (least * b)[None, :]
    return acc


@triton.jit
def _iq2_xxs(acc, x, offset, ok, codes, factors, grid, row, row_ok, unit, K: tl.constexpr,
             DOT: tl.constexpr):  # fmt: skip
    d = tl.load(factors + row * (K // 256) + unit // 8, mask=row_ok, other=0.0).to(tl.float32)
    lane = tl.arange(0, 32)
    octet, place = (lane // 8)[:, None], (lane % 8)[:, None]
    words = codes + (row * (K // 32) + unit) * 2
    which = tl.load(words, mask=row_ok, other=0)
    signs = tl.load(words + 1, mask=row_ok, other=0)
    entry = (which[None, :] >> (8 * octet)) & 255
    value = tl.load(grid + entry * 8 + place).to(tl.float32)
    seven = (signs[None, :] >> (7 * octet)) & 127
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1  # the eighth sign makes the number of minus signs even
    minus = ((seven | (odd << 7)) >> place) & 1
    w = tl.where(minus == 1, -value, value)
    scale = d * (0.5 + ((signs >> 28) & 15).to(tl.float32)) * 0.25
    return acc + _dot(_x(x, offset, ok, unit * 32 + lane), w, DOT, False) * scale[None, :]


@triton.jit
def accumulate(acc, x, offset, ok, codes, scales, factors, grid, row, row_ok, unit, K: tl.constexpr,
               TYPE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Add step `unit` of the product to `acc [16, n]`.

    `offset [16]` are the row starts in `x` (float32), `row [n]` (int64) the weight rows.
    """
    if TYPE == "Q8_0":
        acc = _q8_0(acc, x, offset, ok, codes, scales, row, row_ok, unit, K, DOT)
    elif TYPE == "MXFP4":
        acc = _mxfp4(acc, x, offset, ok, codes, scales, row, row_ok, unit, K, DOT)
    elif TYPE == "Q4_K":
        acc = _q4_k(acc, x, offset, ok, codes, scales, factors, row, row_ok, unit, K, DOT)
    elif TYPE == "Q2_K":
        acc = _q2_k(acc, x, offset, ok, codes, scales, factors, row, row_ok, unit, K, DOT)
    elif TYPE == "IQ2_XXS":
        acc = _iq2_xxs(acc, x, offset, ok, codes, factors, grid, row, row_ok, unit, K, DOT)
    elif TYPE == "BF16":
        acc = _plain(acc, x, offset, ok, codes, row, row_ok, unit, K, DOT, False)
    else:
        tl.static_assert(TYPE == "F16" or TYPE == "F32")
        acc = _plain(acc, x, offset, ok, codes, row, row_ok, unit, K, DOT, True)
    return acc
