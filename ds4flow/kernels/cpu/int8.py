"""Products with activations rounded to 8 bits: integer dot products, exact on any CPU.

A row of activations is rounded in blocks of 32 with one float32 scale each, from that row alone.
Block by block the integer sums are exact, so instructions for them and their portable form give the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir  # type: ignore[import-untyped]

from ds4flow.kernels.cpu.emit import (
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    MAGIC,
    V16F,
    V16I,
    Builder,
    Value,
    Variables,
    bits_constant,
    call,
    constant,
    fma,
    load,
    loop,
    offset,
    room,
    shuffle,
    splat,
    store,
    tree_sum,
    vector,
)
from ds4flow.kernels.cpu.formats import (
    Format,
    Target,
    half,
    iq2_xxs_octets,
    iq2_xxs_signs,
    iq2_xxs_steps,
    mxfp4_scale,
    q4_k_scales,
    unsigned,
)
from ds4flow.kernels.cpu.tiles import fetch_ahead, function, groups

CHUNK = 64  # codes of one step: two blocks of activations, 16 sums of four products
V64 = vector(I8, CHUNK)


# A rounded row of k activations holds, one after the other: k signed codes, k codes + 128, k / 32
# scales, k / 32 sums of 32 activations and k / 16 sums of 16 (all float32), padded to whole cache
# lines.


# --- rounding of a row ----------------------------------------------------------------------------


def _reduce(b: Builder, v: Value, join: Callable[[Value, Value], Value]) -> Value:
    while v.type.count > 1:
        part = v.type.count // 2
        low = shuffle(b, v, None, range(part))
        v = join(low, shuffle(b, v, None, range(part, 2 * part)))
    return b.extract_element(v, I32(0))


def emit_round(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """Round a row of `k` float32 (address x) to 8 bits (address y); `k` a multiple of 32.

    The largest magnitude of a block is found on the bit patterns, so that a value that is not a
    number makes the scale, and with it every product, not a number.
    """
    x, k, y = arguments
    scales = b.add(y, b.shl(k, I64(1)))
    sums = b.add(scales, b.lshr(k, I64(3)))
    part_sums = b.add(sums, b.lshr(k, I64(3)))

    def most(left: Value, right: Value) -> Value:
        return b.select(b.icmp_signed(">", left, right), left, right)

    with loop(b, I64(0), b.lshr(k, I64(5))) as block:
        parts = [load(b, b.add(x, b.shl(block, I64(7))), V16F, 64 * i) for i in range(2)]
        mask = bits_constant(V16I, 0x7FFFFFFF)
        sizes = [b.and_(b.bitcast(part, V16I), mask) for part in parts]
        largest = b.bitcast(_reduce(b, most(*sizes), most), F32)
        scale = b.fdiv(largest, F32(127.0))
        none = b.fcmp_ordered("==", largest, F32(0.0))
        inverse = b.select(none, F32(0.0), b.fdiv(F32(127.0), largest))
        codes = b.add(y, b.shl(block, I64(5)))
        total = I32(0)
        for i, part in enumerate(parts):
            moved = fma(b, part, splat(b, inverse), constant(V16F, MAGIC))
            whole = b.sub(b.bitcast(moved, V16I), b.bitcast(constant(V16F, MAGIC), V16I))
            narrow = b.trunc(whole, vector(I8))
            store(b, narrow, codes, 16 * i)
            raised = b.xor(narrow, bits_constant(narrow.type, 0x80))
            store(b, raised, b.add(codes, k), 16 * i)
            sum_ = _reduce(b, whole, b.add)
            total = b.add(total, sum_)
            weighted = b.fmul(b.sitofp(sum_, F32), scale)
            store(b, weighted, b.add(part_sums, b.shl(block, I64(3))), 4 * i)
        at = b.shl(block, I64(2))
        store(b, scale, b.add(scales, at))
        store(b, b.fmul(b.sitofp(total, F32), scale), b.add(sums, at))


# --- codes of the formats -------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """64 weight codes and their scales (`<2 x float>` or `<4 x float>`, one per 32 or 16 codes)."""

    codes: Value
    scales: Value
    signed: bool


Minima = Value  # `<8 x float>` or `<16 x float>`: what 32 or 16 weights subtract per activation
SmallDecoder = Callable[[Builder, Value, Value, Target], tuple[Value, Value]]
LargeDecoder = Callable[[Builder, Value, Value, Target], tuple[Minima | None, Iterator[Codes]]]


def _both(b: Builder, low: Value, high: Value) -> Value:
    return shuffle(b, low, high, range(2 * low.type.count))


def _two(b: Builder, first: Value, second: Value) -> Value:
    pair = b.insert_element(ir.Constant(vector(F32, 2), ir.Undefined), first, I32(0))
    return b.insert_element(pair, second, I32(1))


def _small_q8_0(b: Builder, block: Value, tables: Value, target: Target) -> tuple[Value, Value]:
    return load(b, block, vector(I8, 32), 2), half(b, block, 0, target)


MXFP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values


def _small_mxfp4(b: Builder, block: Value, tables: Value, target: Target) -> tuple[Value, Value]:
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


def _large_q4_k(
    b: Builder, block: Value, tables: Value, target: Target
) -> tuple[Minima | None, Iterator[Codes]]:
    codes = b.sitofp(q4_k_scales(b, block), V16F)
    scale = b.fmul(shuffle(b, codes, None, range(8)), splat(b, half(b, block, 0, target), 8))
    minima = shuffle(b, codes, None, range(8, 16))

    def chunks() -> Iterator[Codes]:
        for pair in range(4):
            packed = load(b, block, vector(I8, 32), 16 + 32 * pair)
            low = b.and_(packed, constant(packed.type, 15))
            codes = _both(b, low, b.lshr(packed, constant(packed.type, 4)))
            yield Codes(codes, shuffle(b, scale, None, (2 * pair, 2 * pair + 1)), signed=False)

    return b.fmul(minima, splat(b, half(b, block, 2, target), 8)), chunks()


def _large_q2_k(
    b: Builder, block: Value, tables: Value, target: Target
) -> tuple[Minima | None, Iterator[Codes]]:
    packed = load(b, block, vector(I8))
    fine = unsigned(b, b.and_(packed, constant(packed.type, 15)))
    coarse = unsigned(b, b.lshr(packed, constant(packed.type, 4)))
    scale = b.fmul(fine, splat(b, half(b, block, 80, target)))

    def chunks() -> Iterator[Codes]:
        for chunk in range(4):
            quads = load(b, block, vector(I8, 32), 16 + 32 * (chunk // 2))
            parts = []
            for shift in (4 * (chunk % 2), 4 * (chunk % 2) + 2):
                moved = b.lshr(quads, constant(quads.type, shift)) if shift else quads
                parts.append(b.and_(moved, constant(quads.type, 3)))
            four = shuffle(b, scale, None, range(4 * chunk, 4 * chunk + 4))
            yield Codes(_both(b, *parts), four, signed=False)

    return b.fmul(coarse, splat(b, half(b, block, 82, target))), chunks()


def _large_iq2_xxs(
    b: Builder, block: Value, tables: Value, target: Target
) -> tuple[Minima | None, Iterator[Codes]]:
    words = load(b, block, V16I, 2)
    signs = shuffle(b, words, None, range(1, 16, 2))
    scales = b.fmul(iq2_xxs_steps(b, signs), splat(b, half(b, block, 0, target), 8))
    masks = room(b, 32)
    store(b, iq2_xxs_signs(b, signs), masks)

    def chunks() -> Iterator[Codes]:
        for pair in range(4):
            octets = [iq2_xxs_octets(b, block, tables, 2 * pair + g) for g in range(2)]
            codes = b.bitcast(_both(b, *octets), V64)
            negative = b.bitcast(load(b, masks, I64, 8 * pair), vector(I1, CHUNK))
            codes = b.select(negative, b.neg(codes), codes)
            yield Codes(codes, shuffle(b, scales, None, (2 * pair, 2 * pair + 1)), signed=True)

    return None, chunks()


SMALL: dict[str, SmallDecoder] = {"Q8_0": _small_q8_0, "MXFP4": _small_mxfp4}
LARGE: dict[str, LargeDecoder] = {
    "Q4_K": _large_q4_k,
    "Q2_K": _large_q2_k,
    "IQ2_XXS": _large_iq2_xxs,
}
ROUNDED = frozenset({*SMALL, *LARGE})
"""Formats whose products can take rounded activations; the others always take float32."""


# --- products -------------------------------------------------------------------------------------


def _dot(b: Builder, target: Target, start: Value, raised: Value, signed: Value) -> Value:
    """`start` (`<16 x i32>`) plus the sums of four products of unsigned and signed bytes."""
    if target.vnni:
        wide = (b.bitcast(raised, V16I), b.bitcast(signed, V16I))
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, (start, *wide))
    words = vector(I16, CHUNK)
    left, right = b.zext(raised, words), b.sext(signed, words)
    pairs = None
    for parity in range(2):
        lanes = range(parity, CHUNK, 2)
        x = b.sext(shuffle(b, left, None, lanes), vector(I32, 32))
        y = b.sext(shuffle(b, right, None, lanes), vector(I32, 32))
        product = b.mul(x, y)
        pairs = product if pairs is None else b.add(pairs, product)
    even, odd = (shuffle(b, pairs, None, range(parity, 32, 2)) for parity in range(2))
    return b.add(start, b.add(even, odd))


def tile(b: Builder, form: Format, target: Target, rows: int) -> Value:
    """The tile function of one weight row and `rows` rounded activation rows.

    Arguments (i64): the weight row, activation row 0 and its stride, k, output 0 and its row
    stride, the tables.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        _Tile(inner, form, target, rows, arguments).emit()

    return function(b, f"tile_int8_{form.name}_{rows}", 7, body)


class _Tile:
    """One weight row times some rounded rows: integer sums by chunk, float32 sums over chunks."""

    def __init__(
        self, b: Builder, form: Format, target: Target, rows: int, arguments: Sequence[Value]
    ) -> None:
        self.b, self.form, self.target = b, form, target
        self.weights, x, stride, self.k, self.y, self.y_stride, self.tables = arguments
        self.rows = [b.add(x, b.mul(stride, I64(m))) if m else x for m in range(rows)]
        self.sums = Variables(b, V16F, rows, constant(V16F, 0.0))
        self.scales = b.shl(self.k, I64(1))  # byte offsets inside a rounded row
        self.block_sums = b.add(self.scales, b.lshr(self.k, I64(3)))
        self.part_sums = b.add(self.block_sums, b.lshr(self.k, I64(3)))

    def add(self, codes: Codes, first: Value, blocks: int = 2) -> None:
        """Add the products of 64 codes with the activations from number `first` on."""
        b = self.b
        start = constant(V16I, 0)
        if codes.signed:  # activations are raised by 128 to be unsigned: take that off again
            raised = bits_constant(V64, 0x80)
            start = b.neg(_dot(b, self.target, start, raised, codes.codes))
        per = 16 // codes.scales.type.count
        spread = [lane // per for lane in range(16)]
        halves = [lane // 8 for lane in range(16)]
        scale = shuffle(b, codes.scales, None, spread)
        for m, row in enumerate(self.rows):
            at = b.add(row, first)
            if codes.signed:
                values = load(b, b.add(at, self.k), V64)
                dots = _dot(b, self.target, start, values, codes.codes)
            else:
                dots = _dot(b, self.target, start, codes.codes, load(b, at, V64))
            place = b.add(b.add(row, self.scales), b.lshr(first, I64(3)))
            pair = load(b, place, vector(F32, 2)) if blocks == 2 else self._one(place)
            factor = b.fmul(scale, shuffle(b, pair, None, halves))
            self.sums[m] = fma(b, b.sitofp(dots, V16F), factor, self.sums[m])

    def _one(self, place: Value) -> Value:
        return _two(self.b, load(self.b, place, F32), F32(0.0))

    def emit(self) -> None:
        b = self.b
        if self.form.name in SMALL:
            self._small()
            totals = [tree_sum(b, self.sums[m]) for m in range(len(self.rows))]
        else:
            less = self._large()
            totals = []
            for m in range(len(self.rows)):
                total = tree_sum(b, self.sums[m])
                totals.append(total if less is None else b.fsub(total, tree_sum(b, less[m])))
        for m, total in enumerate(totals):
            store(b, total, b.add(self.y, b.mul(self.y_stride, I64(m))))

    def _small(self) -> None:
        """Blocks of 32, two at a time; an odd last one meets zeros."""
        b, size = self.b, self.form.size
        decode = SMALL[self.form.name]
        pairs = b.lshr(self.k, I64(6))

        def run(index: Value, blocks: int) -> None:
            block = b.add(self.weights, b.mul(index, I64(2 * size)))
            fetch_ahead(b, block, blocks * size)
            codes, scale = decode(b, block, self.tables, self.target)
            if blocks == 2:
                more, other = decode(b, offset(b, block, size), self.tables, self.target)
            else:
                more, other = constant(codes.type, 0), F32(0.0)
            made = Codes(_both(b, codes, more), _two(b, scale, other), signed=True)
            self.add(made, b.shl(index, I64(6)), blocks)

        with loop(b, I64(0), pairs) as index:
            run(index, 2)
        odd = b.icmp_signed("!=", b.and_(self.k, I64(32)), I64(0))
        with b.if_then(odd):
            run(pairs, 1)

    def _large(self) -> Variables | None:
        """Blocks of 256; returns the sums of what their minima subtract."""
        b = self.b
        decode = LARGE[self.form.name]
        less: Variables | None = None
        if self.form.name in ("Q4_K", "Q2_K"):
            kind = vector(F32, 8 if self.form.name == "Q4_K" else 16)
            less = Variables(b, kind, len(self.rows), constant(kind, 0.0))
        with loop(b, I64(0), b.lshr(self.k, I64(8))) as index:
            block = b.add(self.weights, b.mul(index, I64(self.form.size)))
            fetch_ahead(b, block, self.form.size)
            minima, chunks = decode(b, block, self.tables, self.target)
            first = b.shl(index, I64(8))
            if less is not None and minima is not None:
                eight = minima.type.count == 8
                sums = b.add(
                    self.block_sums if eight else self.part_sums,
                    b.lshr(first, I64(3 if eight else 2)),
                )
                for m, row in enumerate(self.rows):
                    values = load(b, b.add(row, sums), minima.type)
                    less[m] = fma(b, minima, values, less[m])
            for chunk, codes in enumerate(chunks):
                self.add(codes, offset(b, first, CHUNK * chunk))
        return less


def emit_product(b: Builder, form: Format, target: Target, arguments: Sequence[Value]) -> None:
    """Output columns `first .. last-1` of `y [m, n] = x [m, k] @ weights.T` for rounded rows x.

    Arguments as of `tiles.emit_product`; `x` and its stride are those of the rounded rows.
    """
    weights, stride, k, x, x_stride, count, y, y_stride, first, last, _, tables = arguments
    with loop(b, first, last) as n:
        row = b.add(weights, b.mul(n, stride))
        out = b.add(y, b.shl(n, I64(2)))

        def run(size: int, m: Value) -> None:
            start = b.add(x, b.mul(m, x_stride))
            place = b.add(out, b.mul(m, y_stride))
            b.call(tile(b, form, target, size), (row, start, x_stride, k, place, y_stride, tables))

        groups(b, count, (4, 3, 2, 1), run)
