"""Products with activations rounded to 8 bits: integer dot products, exact on any CPU.

The integer sums are exact, so instructions for them and their portable form give the same bits;
what is float32 runs in one order. See `rounding` for the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir  # type: ignore[import-untyped]

from ds4flow.kernels.cpu import iq2_xxs
from ds4flow.kernels.cpu.emit import (
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    V16F,
    V16I,
    V64,
    Builder,
    Target,
    Value,
    Variables,
    bits_constant,
    call,
    constant,
    fma,
    half_to_float,
    load,
    loop,
    offset,
    opaque,
    room,
    shuffle,
    store,
    tree_sums,
    vector,
)
from ds4flow.kernels.cpu.formats import Format, half, mxfp4_scale, q4_k_scales
from ds4flow.kernels.cpu.rounding import CHUNK, Row
from ds4flow.kernels.cpu.tiles import fetch_ahead, function, groups

TOGETHER = 4  # weight rows whose sums are added up side by side
BATCH = 16  # weight rows that stay in the cache while several tiles of activations meet them
ROWS = (4, 3, 2, 1)  # activation rows of a tile


# --- codes of the formats -------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """64 weight codes with their scales by lanes of four codes (`<16 x float>`)."""

    codes: Value
    scales: Value
    signed: bool


Block = tuple[Value, Value]  # 32 signed codes and their scale
SmallDecoder = Callable[[Builder, Value, Value, Target], Block]
LargeDecoder = Callable[[Builder, Value, Target], tuple[Value, Iterator[Codes]]]


def _both(b: Builder, low: Value, high: Value) -> Value:
    return shuffle(b, low, high, range(2 * low.type.count))


def _spread(b: Builder, values: Value, lanes: Sequence[int]) -> Value:
    """One value for every four lanes, or every eight."""
    each = 16 // len(lanes)
    return shuffle(b, values, None, [lane for lane in lanes for _ in range(each)])


def _small_q8_0(b: Builder, block: Value, tables: Value, target: Target) -> Block:
    return load(b, block, vector(I8, 32), 2), half(b, block, 0, target)


MXFP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values


def _small_mxfp4(b: Builder, block: Value, tables: Value, target: Target) -> Block:
    packed = load(b, block, vector(I8), 1)
    low = b.and_(packed, constant(packed.type, 15))
    nibbles = _both(b, low, b.lshr(packed, constant(packed.type, 4)))

    values = ir.Constant(vector(I8), [I8(value) for value in MXFP4_CODES])
    if target.wide:
        both = shuffle(b, values, None, [*range(16), *range(16)])
        value = call(b, "llvm.x86.avx2.pshuf.b", nibbles.type, (both, nibbles))
    else:

        def number(value: int) -> Value:
            return constant(nibbles.type, value)

        code = b.and_(nibbles, number(7))
        value = code
        for bound, extra in ((4, 1), (5, 1), (6, 3)):
            beyond = b.icmp_signed(">", code, number(bound))
            value = b.add(value, b.select(beyond, number(extra), number(0)))
        value = b.select(b.icmp_signed(">", nibbles, number(7)), b.neg(value), value)
    exponent = b.zext(load(b, block, I8), I32)
    return value, b.fmul(mxfp4_scale(b, exponent), F32(0.5))


def _large_q4_k(b: Builder, block: Value, target: Target) -> tuple[Value, Iterator[Codes]]:
    """Minima of every 16 weights, negative, and the codes in the order FOURS."""
    both = half_to_float(b, load(b, block, vector(I16, 2)), target.native_half)
    units = shuffle(b, both, None, [0] * 8 + [1] * 8)
    signs = ir.Constant(V16F, [F32(1.0)] * 8 + [F32(-1.0)] * 8)
    scales = b.fmul(b.sitofp(q4_k_scales(b, block), V16F), b.fmul(units, signs))

    def chunks() -> Iterator[Codes]:
        for pair in range(2):
            packed = load(b, block, V64, 16 + CHUNK * pair)
            for nibble in range(2):
                codes = _field(b, packed, 4 * nibble, 15)
                lanes = (4 * pair + nibble, 4 * pair + nibble + 2)
                yield Codes(codes, _spread(b, scales, lanes), signed=False)

    return shuffle(b, scales, None, [8 + lane // 2 for lane in range(16)]), chunks()


def _field(b: Builder, packed: Value, start: int, mask: int) -> Value:
    """Some bits of every byte; bytes have no shift of their own, so pairs of them are moved."""
    if start:
        pairs = b.bitcast(packed, vector(I16, packed.type.count // 2))
        packed = b.bitcast(b.lshr(pairs, constant(pairs.type, start)), packed.type)
    return b.and_(packed, constant(packed.type, mask))


def _large_q2_k(b: Builder, block: Value, target: Target) -> tuple[Value, Iterator[Codes]]:
    """Minima of every 16 weights, negative, and the codes in the order EIGHTS."""
    both = half_to_float(b, load(b, block, vector(I16, 2), 80), target.native_half)
    packed = b.zext(load(b, block, vector(I8)), V16I)
    fine = b.sitofp(b.and_(packed, constant(V16I, 15)), V16F)
    coarse = b.sitofp(b.lshr(packed, constant(V16I, 4)), V16F)
    scale = b.fmul(fine, shuffle(b, both, None, [0] * 16))
    quads = load(b, block, V64, 16)

    def chunks() -> Iterator[Codes]:
        for part in range(4):
            lanes = (2 * part, 2 * part + 1, 2 * part + 8, 2 * part + 9)
            yield Codes(_field(b, quads, 2 * part, 3), _spread(b, scale, lanes), signed=False)

    return b.fmul(coarse, b.fneg(shuffle(b, both, None, [1] * 16))), chunks()


SMALL: dict[str, SmallDecoder] = {"Q8_0": _small_q8_0, "MXFP4": _small_mxfp4}
LARGE: dict[str, LargeDecoder] = {"Q4_K": _large_q4_k, "Q2_K": _large_q2_k}
ROUNDED = frozenset({*SMALL, *LARGE, "IQ2_XXS"})
"""Formats whose products can take rounded activations; the others always take float32."""


# --- products -------------------------------------------------------------------------------------


def _dot(b: Builder, target: Target, start: Value, unsigned: Value, signed: Value) -> Value:
    """`start` (`<16 x i32>`) plus the sums of four products of 64 unsigned and 64 signed bytes.

    Without dot instructions the unsigned ones must be 128 at most, so that two products fit into 16
    bits.
    """
    if target.vnni:
        wide = (b.bitcast(unsigned, V16I), b.bitcast(signed, V16I))
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, (start, *wide))
    if not target.pairs:
        return b.add(start, _portable_dot(b, unsigned, signed))
    # AVX-VNNI's dot products of 32 bytes were no faster than these two instructions
    words, made = vector(I16), []
    for half_ in range(2):
        bytes_ = range(32 * half_, 32 * half_ + 32)
        both = [shuffle(b, v, None, bytes_) for v in (unsigned, signed)]
        twos = call(b, "llvm.x86.avx2.pmadd.ub.sw", words, both)
        fours = (twos, constant(words, 1))
        made.append(call(b, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), fours))
    return b.add(start, _both(b, *made))


def _portable_dot(b: Builder, unsigned: Value, signed: Value) -> Value:
    words = vector(I16, CHUNK)
    left, right = b.zext(unsigned, words), b.sext(signed, words)
    pairs = None
    for parity in range(2):
        lanes = range(parity, CHUNK, 2)
        x = b.sext(shuffle(b, left, None, lanes), vector(I32, 32))
        y = b.sext(shuffle(b, right, None, lanes), vector(I32, 32))
        product = b.mul(x, y)
        pairs = product if pairs is None else b.add(pairs, product)
    even, odd = (shuffle(b, pairs, None, range(parity, 32, 2)) for parity in range(2))
    return b.add(even, odd)


def tile(b: Builder, form: Format, target: Target, rows: int) -> Value:
    """The tile function of some weight rows and `rows` rounded activation rows.

    Arguments (i64): weight row 0 and its stride, their number, activation row 0 and its stride, k,
    output (0, 0) and its row stride, the tables.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        _Tile(inner, form, target, rows, arguments).emit()

    return function(b, f"tile_int8_{form.name}_{rows}", 9, body)


class _Tile:
    """Weight rows times some rounded rows: integer sums by lane, float32 sums over blocks."""

    def __init__(
        self, b: Builder, form: Format, target: Target, rows: int, arguments: Sequence[Value]
    ) -> None:
        self.b, self.form, self.target = b, form, target
        self.weights, self.stride, self.count, x, stride, self.k, *rest = arguments
        self.y, self.y_stride, self.tables = rest
        self.rows = [b.add(x, b.mul(stride, I64(m))) if m else x for m in range(rows)]
        self.row = Row(b, self.k)
        self.sums = Variables(b, V16F, rows, constant(V16F, 0.0))
        self.kept = room(b, 64 * TOGETHER * rows + 64)

    def emit(self) -> None:
        """All weight rows: their lanes' sums first, then the totals of a few at once."""
        b = self.b
        kept = b.and_(b.add(self.kept, I64(63)), I64(-64))
        if self.form.name == "IQ2_XXS":
            multiply = self._columns if self.target.bytes else self._octets
        else:
            multiply = self._small if self.form.name in SMALL else self._large
        with loop(b, I64(0), self.count, TOGETHER) as first:
            rest = b.sub(self.count, first)
            whole = b.icmp_signed(">=", rest, I64(TOGETHER))
            with loop(b, I64(0), b.select(whole, I64(TOGETHER), rest)) as i:
                for m in range(len(self.rows)):
                    self.sums[m] = constant(V16F, 0.0)
                multiply(b.add(self.weights, b.mul(b.add(first, i), self.stride)))
                for m in range(len(self.rows)):
                    store(b, self.sums[m], b.add(kept, b.shl(i, I64(6))), 64 * TOGETHER * m)
            out = b.add(self.y, b.shl(first, I64(2)))
            with b.if_else(whole) as (all_, some):
                with all_:
                    self._totals(kept, out, TOGETHER)
                with some, loop(b, I64(0), rest) as i:
                    self._totals(b.add(kept, b.shl(i, I64(6))), b.add(out, b.shl(i, I64(2))), 1)

    def _totals(self, kept: Value, out: Value, count: int) -> None:
        b = self.b
        for m in range(len(self.rows)):
            lanes = [load(b, kept, V16F, 64 * (TOGETHER * m + i)) for i in range(count)]
            store(b, tree_sums(b, lanes), b.add(out, b.mul(self.y_stride, I64(m))))

    def _add(self, m: int, dots: Value, scale: Value) -> None:
        """Add integer sums times the scales of both sides."""
        b = self.b
        self.sums[m] = fma(b, b.sitofp(dots, V16F), scale, self.sums[m])

    def _chunk(self, codes: Codes, first: Value) -> None:
        """Add the products of 64 codes with the activations at place `first` of their order."""
        b, target = self.b, self.target
        start, minus, unsigned = constant(V16I, 0), None, codes.codes
        raise_ = codes.signed and target.vnni
        if raise_:  # activations are raised by 128 to be unsigned: take that off again
            raised = bits_constant(V64, 0x80)
            start = b.neg(_dot(b, target, start, raised, codes.codes))
        elif codes.signed:  # the activations take the signs of the codes
            minus = b.icmp_signed("<", codes.codes, constant(V64, 0))
            unsigned = b.select(minus, b.neg(codes.codes), codes.codes)
        for m, row in enumerate(self.rows):
            at = b.add(row, first)
            if raise_:
                values = load(b, b.add(at, self.row.raised), V64)
                dots = _dot(b, target, start, values, codes.codes)
            else:
                values = load(b, at, V64)
                if minus is not None:
                    values = b.select(minus, b.neg(values), values)
                dots = _dot(b, target, start, unsigned, values)
            spread = load(b, b.add(at, self.row.spread), V16F)
            self._add(m, dots, b.fmul(codes.scales, spread))

    def _small(self, weights: Value) -> None:
        """Blocks of 32, two at a time; an odd last one meets zeros."""
        b, size = self.b, self.form.size
        decode = SMALL[self.form.name]
        pairs = b.lshr(self.k, I64(6))

        def run(index: Value, blocks: int) -> None:
            block = b.add(weights, b.mul(index, I64(2 * size)))
            fetch_ahead(b, block, blocks * size)
            codes, scale = decode(b, block, self.tables, self.target)
            if blocks == 2:
                more, other = decode(b, offset(b, block, size), self.tables, self.target)
            else:
                more, other = constant(codes.type, 0), F32(0.0)
            pair = ir.Constant(vector(F32, 2), ir.Undefined)
            for place, value in enumerate((scale, other)):
                pair = b.insert_element(pair, value, I32(place))
            made = Codes(_both(b, codes, more), _spread(b, pair, (0, 1)), signed=True)
            self._chunk(made, b.shl(index, I64(6)))

        with loop(b, I64(0), pairs) as index:
            run(index, 2)
        odd = b.icmp_signed("!=", b.and_(self.k, I64(32)), I64(0))
        with b.if_then(odd):
            run(pairs, 1)

    def _large(self, weights: Value) -> None:
        """Blocks of 256, whose minima meet the sums of 16 activations."""
        b = self.b
        with loop(b, I64(0), b.lshr(self.k, I64(8))) as index:
            block = b.add(weights, b.mul(index, I64(self.form.size)))
            fetch_ahead(b, block, self.form.size)
            minima, chunks = LARGE[self.form.name](b, block, self.target)
            sums = b.add(self.row.sums, b.shl(index, I64(6)))
            for m, row in enumerate(self.rows):
                self.sums[m] = fma(b, minima, load(b, b.add(row, sums), V16F), self.sums[m])
            for number, codes in enumerate(chunks):
                self._chunk(codes, offset(b, b.shl(index, I64(8)), CHUNK * number))

    # IQ2_XXS: two blocks at a time, one group of 32 weights a lane; a block that stands in for a
    # missing one meets zeros.

    def _pairs(self, weights: Value) -> Iterator[tuple[iq2_xxs.Pair, Value]]:
        """Pairs of blocks, and where their activations begin."""
        b = self.b
        for pair in iq2_xxs.pairs(b, weights, b.lshr(self.k, I64(8)), self.target):
            fetch_ahead(b, pair.blocks[0], 128)
            yield pair, b.shl(pair.first, I64(8))

    def _scaled(self, pair: iq2_xxs.Pair, first: Value, dots: Sequence[Value]) -> None:
        b = self.b
        at = b.add(self.row.scales, b.lshr(first, I64(3)))
        for m, row in enumerate(self.rows):
            self._add(m, dots[m], b.fmul(pair.scales, load(b, b.add(row, at), V16F)))

    def _columns(self, weights: Value) -> None:
        """By columns: weight j of every octet in one vector, so a lane of four bytes is a group."""
        b, zero = self.b, constant(V64, 0)
        pairs16 = vector(I16, 32)
        levels = iq2_xxs.table(b, self.tables, iq2_xxs.LEVELS, 1)[0]
        for pair, first in self._pairs(weights):
            tables = opaque(b, self.tables)
            signs = iq2_xxs.table(b, tables, iq2_xxs.SIGNS, 2)
            indices = pair.indices(b)
            bits = iq2_xxs.look_up_bytes(b, signs, iq2_xxs.sign_fields(b, pair.signs))
            dots = [constant(V16I, 0)] * len(self.rows)
            for plane in range(2):
                codes = iq2_xxs.look_up_bytes(
                    b, iq2_xxs.table(b, tables, iq2_xxs.QUADS + 256 * plane, 4), indices
                )
                for number in range(4):
                    moved = b.lshr(b.bitcast(codes, pairs16), constant(pairs16, 2 * number))
                    # a table of 64 that repeats every four needs no mask
                    level = call(
                        b, "llvm.x86.avx512.permvar.qi.512", V64, (levels, b.bitcast(moved, V64))
                    )
                    column = 4 * plane + number
                    bit = b.and_(bits, bits_constant(V64, 1 << column))
                    minus = b.icmp_signed("!=", bit, zero)
                    for m, row in enumerate(self.rows):
                        at = offset(b, b.add(row, first), CHUNK * column)
                        values = load(b, at, V64)
                        signed = b.select(minus, b.sub(zero, values), values)
                        dots[m] = _dot(b, self.target, dots[m], level, signed)
            self._scaled(pair, first, dots)

    def _octets(self, weights: Value) -> None:
        """The same sums from the octets as they lie, two groups at a time."""
        b = self.b
        bits = room(b, 64)
        for pair, first in self._pairs(weights):
            store(b, iq2_xxs.sign_bits(b, pair.signs), bits)
            dots = [constant(V16I, 0)] * len(self.rows)
            for number in range(8):
                block, group = pair.blocks[number // 4], number % 4 * 2
                octets = [iq2_xxs.group_octets(b, block, self.tables, group + i) for i in range(2)]
                codes = b.bitcast(_both(b, *octets), V64)
                minus = b.bitcast(load(b, bits, I64, 8 * number), vector(I1, CHUNK))
                for m, row in enumerate(self.rows):
                    at = offset(b, b.add(b.add(row, self.row.raised), first), CHUNK * number)
                    values = load(b, at, V64)
                    signed = b.select(minus, b.neg(values), values)
                    lanes = _dot(b, self.target, constant(V16I, 0), codes, signed)
                    for distance in (4, 2, 1):
                        partners = [lane ^ distance for lane in range(16)]
                        lanes = b.add(lanes, shuffle(b, lanes, None, partners))
                    both = [2 * number, 2 * number + 1]
                    places = [16 + 8 * (i - both[0]) if i in both else i for i in range(16)]
                    dots[m] = shuffle(b, dots[m], lanes, places)
            self._scaled(pair, first, dots)


def emit_product(b: Builder, form: Format, target: Target, arguments: Sequence[Value]) -> None:
    """Output columns `first .. last-1` of `y [m, n] = x [m, k] @ weights.T` for rounded rows x.

    Arguments as of `tiles.emit_product`; `x` and its stride are those of the rounded rows.
    """
    weights, stride, k, x, x_stride, count, y, y_stride, first, last, _, tables = arguments
    with loop(b, first, last, BATCH) as n:
        row = b.add(weights, b.mul(n, stride))
        out = b.add(y, b.shl(n, I64(2)))
        rest = b.sub(last, n)
        here = b.select(b.icmp_signed("<", rest, I64(BATCH)), rest, I64(BATCH))

        def run(size: int, m: Value) -> None:
            start = b.add(x, b.mul(m, x_stride))
            place = b.add(out, b.mul(m, y_stride))
            shared = (start, x_stride, k, place, y_stride, tables)
            b.call(tile(b, form, target, size), (row, stride, here, *shared))

        groups(b, count, ROWS, run)
