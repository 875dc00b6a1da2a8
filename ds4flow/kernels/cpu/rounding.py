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
    MAGIC,
    V16F,
    V16I,
    Builder,
    Target,
    Value,
    bits_constant,
    constant,
    fma,
    load,
    loop,
    shuffle,
    splat,
    store,
    vector,
)

BLOCK = 32  # activations of one scale
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
    COLUMNS: 0x76543210,
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


def _reduce(b: Builder, v: Value, join: Callable[[Value, Value], Value]) -> Value:
    while v.type.count > 1:
        part = v.type.count // 2
        low = shuffle(b, v, None, range(part))
        v = join(low, shuffle(b, v, None, range(part, 2 * part)))
    return b.extract_element(v, I32(0))


def emit_round(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """Round a row: address x of `k` float32, k (a multiple of 32), address y, order.

    The largest magnitude of a block is found on the bit patterns, so that a value that is not a
    number makes the scale, and with it every product, not a number.
    """
    x, k, y, order = arguments
    row = Row(b, k)
    columns = b.icmp_signed("==", order, I64(COLUMNS))
    places = I64(_PLACES[NATURAL])
    for number in (FOURS, EIGHTS):
        chosen = b.icmp_signed("==", order, I64(number))
        places = b.select(chosen, I64(_PLACES[number]), places)
    blocks = b.lshr(k, I64(5))
    with loop(b, I64(0), blocks) as block:
        _round_block(b, x, y, row, block, _place(b, places, block), columns)
    zeros = constant(vector(I8), 0)
    with loop(b, blocks, b.lshr(row.length, I64(5))) as block:
        place = _place(b, places, block)
        for start in (I64(0), row.raised):
            at = b.add(b.add(y, start), b.shl(place, I64(5)))
            for half in range(2):
                store(b, zeros, at, 16 * half)
        _store_scale(b, y, row, block, place, F32(0.0))
        at = b.add(b.add(y, row.sums), b.shl(block, I64(3)))
        store(b, constant(vector(F32, 2), 0.0), at)
    with b.if_then(columns):
        _transpose(b, y, row)


def _place(b: Builder, places: Value, block: Value) -> Value:
    """Where a block goes: inside its eight by the digits of `places`."""
    inside = b.and_(block, I64(7))
    digit = b.and_(b.lshr(places, b.shl(inside, I64(2))), I64(7))
    return b.add(b.sub(block, inside), digit)


def _store_scale(b: Builder, y: Value, row: Row, block: Value, place: Value, scale: Value) -> None:
    store(b, scale, b.add(b.add(y, row.scales), b.shl(block, I64(2))))
    store(b, splat(b, scale, 8), b.add(b.add(y, row.spread), b.shl(place, I64(5))))


def _round_block(
    b: Builder, x: Value, y: Value, row: Row, block: Value, place: Value, columns: Value
) -> None:
    def most(left: Value, right: Value) -> Value:
        return b.select(b.icmp_signed(">", left, right), left, right)

    parts = [load(b, b.add(x, b.shl(block, I64(7))), V16F, 64 * i) for i in range(2)]
    mask = bits_constant(V16I, 0x7FFFFFFF)
    sizes = [b.and_(b.bitcast(part, V16I), mask) for part in parts]
    largest = b.bitcast(_reduce(b, most(*sizes), most), F32)
    scale = b.fdiv(largest, F32(127.0))
    none = b.fcmp_ordered("==", largest, F32(0.0))
    inverse = b.select(none, F32(0.0), b.fdiv(F32(127.0), largest))
    codes = b.add(y, b.shl(place, I64(5)))
    sums = b.add(b.add(y, row.sums), b.shl(block, I64(3)))
    for i, part in enumerate(parts):
        moved = fma(b, part, splat(b, inverse), constant(V16F, MAGIC))
        whole = b.sub(b.bitcast(moved, V16I), b.bitcast(constant(V16F, MAGIC), V16I))
        narrow = b.trunc(whole, vector(I8))
        store(b, narrow, codes, 16 * i)
        # in the order COLUMNS the second copy is what the columns are made of
        raised = b.select(columns, narrow, b.xor(narrow, bits_constant(narrow.type, 0x80)))
        store(b, raised, b.add(codes, row.raised), 16 * i)
        weighted = b.fmul(b.sitofp(_reduce(b, whole, b.add), F32), scale)
        store(b, weighted, sums, 4 * i)
    _store_scale(b, y, row, block, place, scale)


def _transpose(b: Builder, y: Value, row: Row) -> None:
    """Codes of eight vectors of 64 as columns: byte i of column j is code `8 * i + j`."""
    turned = [8 * (i % 8) + i // 8 for i in range(CHUNK)]
    with loop(b, I64(0), b.lshr(row.length, I64(9))) as part:
        start = b.add(y, b.shl(part, I64(9)))
        source = b.add(start, row.raised)
        for number in range(8):
            codes = load(b, source, vector(I8, CHUNK), CHUNK * number)
            eights = b.bitcast(shuffle(b, codes, None, turned), vector(I64, 8))
            for column in range(8):
                eight = b.extract_element(eights, I32(column))
                store(b, eight, start, CHUNK * column + 8 * number)
