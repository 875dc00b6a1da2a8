"""Rows of activations rounded to 8 bits: blocks of 32 with one float32 scale each.

A row is rounded from its own values alone. `order` says how its codes lie, so that a product finds
them beside the weight codes that one vector holds; the numbers are the same in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds4flow.kernels.cpu.emit import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    MAGIC,
    V16F,
    V16I,
    Builder,
    Target,
    Value,
    bits_constant,
    broadcast,
    constant,
    fma,
    load,
    loop,
    opaque,
    room,
    shuffle,
    store,
    vector,
)

CHUNK = 64  # codes of one vector
WIDE = 512  # activations that a row is padded to, with zeros

NATURAL, FOURS, EIGHTS, COLUMNS = range(4)
"""Orders of the codes: as they come; blocks 0, 2, 1, 3 of every four (Q4_K); blocks 0, 4, 1, 5, 2,
6, 3, 7 of every eight (Q2_K); of every 512, the first of every eight, then the second of every
eight, and so on (IQ2_XXS)."""

ORDERS = {"Q4_K": FOURS, "Q2_K": EIGHTS, "IQ2_XXS": COLUMNS}
"""Orders of the formats' products, NATURAL if not given."""

_PLACES = {  # where each block of eight goes, a hexadecimal digit each, the last block's first
    NATURAL: 0x76543210,
    FOURS: 0x75643120,
    EIGHTS: 0x75316420,
}


class Row:
    """Byte offsets inside a rounded row of `k` activations, by its padded length.

    Codes, codes + 128 (NATURAL only), the scale of each code's block by lanes of four codes, both
    in the row's order; then scales of blocks and sums of 16 activations in natural order. All but
    the codes are float32.
    """

    def __init__(self, b: Builder, k: Value) -> None:
        self.length = b.and_(b.add(k, I64(WIDE - 1)), I64(-WIDE))
        self.raised = self.length
        self.spread = b.shl(self.length, I64(1))
        self.scales = b.add(self.spread, self.length)
        self.sums = b.add(self.scales, b.lshr(self.length, I64(3)))


def row_size(columns: int) -> int:
    """Bytes of a rounded row."""
    length = (columns + WIDE - 1) // WIDE * WIDE
    return 3 * length + length // 8 + length // 4


def emit_round(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """Round a row: address x of `k` float32, k (a multiple of 32), address y, order.

    The largest magnitude of a block is found on the bit patterns, so that a value that is not a
    number makes the scale, and with it every product, not a number.
    """
    x, k, y, order = arguments
    row = Row(b, k)
    places = I64(_PLACES[NATURAL])
    for number in (FOURS, EIGHTS):
        chosen = b.icmp_signed("==", order, I64(number))
        places = b.select(chosen, I64(_PLACES[number]), places)
    blocks = b.lshr(k, I64(5))
    whole = b.and_(blocks, I64(-8))
    _Rounding(b, x, y, row, order, places).emit(blocks, whole)
    zeros = constant(vector(I8), 0)
    with loop(b, blocks, b.lshr(row.length, I64(5))) as block:
        place = _place(b, places, block)
        for start in (I64(0), row.raised):
            at = b.add(b.add(y, start), b.shl(place, I64(5)))
            for half in range(2):
                store(b, zeros, at, 16 * half)
        store(b, F32(0.0), b.add(b.add(y, row.scales), b.shl(block, I64(2))))
        spread = b.add(b.add(y, row.spread), b.shl(place, I64(5)))
        store(b, constant(vector(F32, 8), 0.0), spread)
        sums = b.add(b.add(y, row.sums), b.shl(block, I64(3)))
        store(b, constant(vector(F32, 2), 0.0), sums)
    with b.if_then(b.icmp_signed("==", order, I64(COLUMNS))):
        _transpose(b, y, row)


def _place(b: Builder, places: Value, block: Value) -> Value:
    """Where a block goes: inside its eight by the digits of `places`."""
    inside = b.and_(block, I64(7))
    digit = b.and_(b.lshr(places, b.shl(inside, I64(2))), I64(7))
    return b.add(b.sub(block, inside), digit)


class _Rounding:
    """Blocks of a row: eight at a time, whose largest values are found side by side."""

    def __init__(
        self, b: Builder, x: Value, y: Value, row: Row, order: Value, places: Value
    ) -> None:
        self.b, self.x, self.y, self.row = b, x, y, row
        self.places = places
        self.columns = b.icmp_signed("==", order, I64(COLUMNS))
        self.sums = b.or_(
            b.icmp_signed("==", order, I64(FOURS)), b.icmp_signed("==", order, I64(EIGHTS))
        )
        self.kept = room(b, 64)

    def emit(self, blocks: Value, whole: Value) -> None:
        """All blocks; `whole` of them, a multiple of eight, eight at a time."""
        b = self.b
        with loop(b, I64(0), whole, 8) as first:
            self._round(first, 8)
        with loop(b, whole, blocks) as first:
            self._round(first, 1)

    def _round(self, first: Value, count: int) -> None:
        b = self.b
        start = b.add(self.x, b.shl(first, I64(7)))
        parts = [load(b, start, V16F, 64 * i) for i in range(2 * count)]
        mask = bits_constant(V16I, 0x7FFFFFFF)
        sizes = [b.and_(b.bitcast(part, V16I), mask) for part in parts]
        largest = _largest(b, [_most(b, *sizes[2 * i : 2 * i + 2]) for i in range(count)])
        lanes = vector(F32, count)
        scales = b.fdiv(largest, constant(lanes, 127.0))
        none = b.fcmp_ordered("==", largest, constant(lanes, 0.0))
        inverse = b.fdiv(constant(lanes, 127.0), largest)
        store(b, b.select(none, constant(lanes, 0.0), inverse), self.kept)
        store(b, scales, b.add(b.add(self.y, self.row.scales), b.shl(first, I64(2))))
        for i in range(count):
            scale = shuffle(b, scales, None, [i] * 8)
            self._block(b.add(first, I64(i)), parts[2 * i : 2 * i + 2], 4 * i, scale)

    def _block(self, block: Value, parts: Sequence[Value], kept: int, scale: Value) -> None:
        b, row = self.b, self.row
        place = b.shl(_place(b, self.places, block), I64(5))
        codes = b.add(self.y, place)
        store(b, scale, b.add(codes, row.spread))
        inverse = broadcast(b, self.kept, kept)
        wholes = []
        for part in parts:
            moved = b.bitcast(fma(b, part, inverse, constant(V16F, MAGIC)), V16I)
            wholes.append(b.sub(moved, b.bitcast(constant(V16F, MAGIC), V16I)))
        for i, whole in enumerate(wholes):
            narrow = b.trunc(whole, vector(I8))
            store(b, narrow, codes, 16 * i)
            # in the order COLUMNS the second copy is what the columns are made of
            raised = b.xor(narrow, bits_constant(narrow.type, 0x80))
            raised = b.select(self.columns, narrow, raised)
            store(b, raised, b.add(codes, row.raised), 16 * i)
        with b.if_then(self.sums):
            at = b.add(b.add(self.y, row.sums), b.shl(block, I64(3)))
            for i, whole in enumerate(wholes):
                total = b.sitofp(_reduce(b, whole, b.add), F32)
                store(b, b.fmul(total, b.extract_element(scale, I32(0))), at, 4 * i)


def _most(b: Builder, left: Value, right: Value) -> Value:
    return b.select(b.icmp_signed(">", left, right), left, right)


def _reduce(b: Builder, v: Value, join: Callable[[Value, Value], Value]) -> Value:
    while v.type.count > 1:
        part = v.type.count // 2
        low = shuffle(b, v, None, range(part))
        v = join(low, shuffle(b, v, None, range(part, 2 * part)))
    return b.extract_element(v, I32(0))


def _largest(b: Builder, sizes: Sequence[Value]) -> Value:
    """The largest lane of one or eight vectors of bit patterns, as a vector of float32."""
    if len(sizes) == 1:
        one = _reduce(b, sizes[0], lambda left, right: _most(b, left, right))
        return b.bitcast(b.insert_element(constant(vector(I32, 1), 0), one, I32(0)), vector(F32, 1))
    span, together = LANES // 2, list(sizes)
    while len(together) > 1:  # half the vectors, each with the lanes of two, folded
        starts = range(0, 2 * LANES, 2 * span)
        low = [start + i for start in starts for i in range(span)]
        high = [lane + span for lane in low]
        together = [
            _most(b, shuffle(b, one, other, low), shuffle(b, one, other, high))
            for one, other in zip(together[::2], together[1::2], strict=True)
        ]
        span //= 2
    (pairs,) = together
    even, odd = (shuffle(b, pairs, None, range(parity, LANES, 2)) for parity in range(2))
    return b.bitcast(_most(b, even, odd), vector(F32, 8))


def _transpose(b: Builder, y: Value, row: Row) -> None:
    """Codes of eight vectors of 64 as columns: byte i of column j is code `8 * i + j`."""
    turned = [8 * (i % 8) + i // 8 for i in range(CHUNK)]
    kept = room(b, CHUNK)
    with loop(b, I64(0), b.lshr(row.length, I64(9))) as part:
        start = b.add(y, b.shl(part, I64(9)))
        source = b.add(start, row.raised)
        for number in range(8):
            codes = load(b, source, vector(I8, CHUNK), CHUNK * number)
            store(b, shuffle(b, codes, None, turned), kept)
            eights = opaque(b, kept)  # read back from memory: taking lanes out costs more
            for column in range(8):
                eight = load(b, eights, I64, 8 * column)
                store(b, eight, start, CHUNK * column + 8 * number)
