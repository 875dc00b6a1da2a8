"""The IQ2_XXS format: octets from a codebook of 256, signs from a table of 128, in two ways.

Where the CPU looks up bytes in tables of 128, codes are looked up for many octets at once; else
octet by octet. Both give exactly the format's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from ds4flow.kernels.cpu.emit import (
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V16F,
    V16I,
    V64,
    Builder,
    Target,
    Value,
    bits_constant,
    broadcast,
    call,
    constant,
    floats,
    half_to_float,
    like,
    load,
    look_up,
    loop,
    offset,
    shuffle,
    splat,
    store,
    vector,
)

STEP, RECORD = 8, 192
# In `tables`, after the 256 codebook entries of eight bytes: these as float32; four planes
# of 256 bytes with two nibbles, and the same of 128 bytes for the sign fields; two planes of 256
# bytes with four codes of two bits; the 64 magnitudes of a byte's low six bits, by the lowest two;
# the 128 sign bytes of the fields.
WIDE_CODES = 256 * 8
NIBBLES = WIDE_CODES + 256 * 32
MINUSES = NIBBLES + 4 * 256
QUADS = MINUSES + 4 * 128
LEVELS = QUADS + 2 * 256
SIGNS = LEVELS + 64


def group_steps(b: Builder, signs: Value) -> Value:
    """Scales of groups over the block's, from the words with their signs."""
    steps = b.uitofp(b.lshr(signs, constant(signs.type, 28)), like(F32, signs.type))
    return b.fmul(b.fadd(steps, constant(steps.type, 0.5)), constant(steps.type, 0.25))


def group_octets(b: Builder, block: Value, tables: Value, group: int) -> Value:
    """The codes of a group without signs, eight bytes in each lane of `<4 x i64>`."""
    octets = constant(vector(I64, 4), 0)
    for lane in range(4):
        index = b.zext(load(b, block, I8, 2 + 8 * group + lane), I64)
        octets = b.insert_element(
            octets, load(b, b.add(tables, b.shl(index, I64(3))), I64), I32(lane)
        )
    return octets


# In a record, after the scales of the eight groups of 32 weights: where bytes can be looked up, the
# codes of each group in 16 bytes (see `_codes`); else 32 sign bits of each group, and then offsets
# of its four codebook entries.
GROUP_CODES, GROUP_SIGNS, GROUP_ENTRIES = 64, 32, 64


@dataclass(frozen=True)
class Pair:
    """Two blocks of a row: number of the first, addresses, words behind the unit, scales of groups.

    `signs` are the words with the signs of the 16 groups, in order.
    """

    first: Value
    blocks: tuple[Value, Value]
    words: tuple[Value, Value]
    signs: Value
    scales: Value

    def indices(self, b: Builder) -> Value:
        """The codebook entries of the 64 octets, in order (bytes)."""
        return b.bitcast(shuffle(b, *self.words, range(0, 2 * LANES, 2)), V64)


def pairs(b: Builder, row: Value, blocks: Value, target: Target) -> Iterator[Pair]:
    """The one body of a loop over a row's blocks, two at a time.

    The last block also stands in for one that is missing beside it.
    """
    with loop(b, I64(0), blocks, 2) as first:
        block = b.add(row, b.mul(first, I64(66)))
        more = b.icmp_signed("<", b.add(first, I64(1)), blocks)
        both = (block, b.select(more, offset(b, block, 66), block))
        words = (load(b, both[0], V16I, 2), load(b, both[1], V16I, 2))
        signs = shuffle(b, *words, range(1, 2 * LANES, 2))
        halves = ir.Constant(vector(I16, 2), ir.Undefined)
        for place, start in enumerate(both):
            halves = b.insert_element(halves, load(b, start, I16), I32(place))
        units = half_to_float(b, halves, target.native_half)
        unit = shuffle(b, units, None, [0] * 8 + [1] * 8)
        yield Pair(first, both, words, signs, b.fmul(unit, group_steps(b, signs)))


def table(b: Builder, tables: Value, start: int, count: int) -> list[Value]:
    """Some vectors of the tables."""
    return [load(b, tables, V64, start + 64 * i) for i in range(count)]


def scale(b: Builder, row: Value, blocks: Value, out: Value, tables: Value, target: Target) -> None:
    """The scales of eight groups, and what decoding them needs."""
    for pair in pairs(b, row, blocks, target):
        record = b.add(out, b.mul(pair.first, I64(RECORD)))
        for number in range(2):
            eight = shuffle(b, pair.scales, None, range(8 * number, 8 * number + 8))
            store(b, eight, record, RECORD * number)
        if target.bytes:
            for place, codes in enumerate(_codes(b, pair, tables)):
                at = RECORD * (place // 2) + GROUP_CODES + 64 * (place % 2)
                store(b, codes, record, at)
        else:
            _store_entries(b, pair, record)


def _store_entries(b: Builder, pair: Pair, record: Value) -> None:
    """Sign bits of the groups of both blocks, and offsets of their codebook entries."""
    bits, wide = sign_bits(b, pair.signs), vector(I16, 64)
    offsets = b.shl(b.zext(pair.indices(b), wide), constant(wide, 5))
    for number in range(2):
        at = offset(b, record, RECORD * number)
        eight, many = range(8 * number, 8 * number + 8), range(32 * number, 32 * number + 32)
        store(b, shuffle(b, bits, None, eight), at, GROUP_SIGNS)
        store(b, shuffle(b, offsets, None, many), at, GROUP_ENTRIES)


def sign_bits(b: Builder, signs: Value) -> Value:
    """Four fields of seven bits, each completed to a byte by its parity."""

    def number(value: int) -> Value:
        return bits_constant(signs.type, value)

    spread = b.and_(signs, number(0x7F))
    for field in range(1, 4):
        part = b.and_(b.shl(signs, number(field)), number(0x7F << 8 * field))
        spread = b.or_(spread, part)
    parity = spread
    for distance in (4, 2, 1):
        parity = b.xor(parity, b.lshr(parity, number(distance)))
    return b.or_(spread, b.shl(b.and_(parity, number(0x01010101)), number(7)))


MAGNITUDES = (8.0, 25.0, 43.0)  # magnitudes of the codebook


def look_up_bytes(b: Builder, vectors: Sequence[Value], places: Value) -> Value:
    """Bytes of a table of two vectors by the low seven bits of `places`, of four by all eight."""
    looked_up = [
        call(b, "llvm.x86.avx512.vpermi2var.qi.512", V64, (low, places, high))
        for low, high in zip(vectors[::2], vectors[1::2], strict=True)
    ]
    if len(looked_up) == 1:
        return looked_up[0]
    return b.select(b.icmp_signed("<", places, constant(V64, 0)), *looked_up[::-1])


def sign_fields(b: Builder, signs: Value) -> Value:
    """The four sign fields of each word as bytes; their highest bit is not theirs."""
    starts = ir.Constant(V64, [I8(bit) for _ in range(8) for bit in (0, 7, 14, 21, 32, 39, 46, 53)])
    return call(b, "llvm.x86.avx512.pmultishift.qb.512", V64, (starts, b.bitcast(signs, V64)))


def _codes(b: Builder, pair: Pair, tables: Value) -> list[Value]:
    """Codes of the 64 octets of two blocks, a nibble a weight, in four vectors of four groups.

    A nibble is the number of the magnitude in `MAGNITUDES`, plus 8 for a minus sign. Eight bytes
    hold 16 weights: first those with even numbers, then the others, so that a shift of each 32-bit
    half moves the nibble of every second lane to its low end.
    """
    # the halving of lanes below puts the words 4 * L + k of the order here into lane L of vector k
    order = [2 * (8 * (k // 2) + 4 * (k % 2) + lane) for lane in range(4) for k in range(4)]
    indices = b.bitcast(shuffle(b, *pair.words, order), V64)
    fields = sign_fields(b, shuffle(b, *pair.words, [word + 1 for word in order]))
    planes = []
    for plane in range(4):
        entries = table(b, tables, NIBBLES + 256 * plane, 4)
        minus = look_up_bytes(b, table(b, tables, MINUSES + 128 * plane, 2), fields)
        planes.append(b.or_(look_up_bytes(b, entries, indices), minus))
    kind = vector(I32, LANES)
    even, odd = (_interleaved(b, *planes[2 * i : 2 * i + 2]) for i in range(2))
    made = []
    for one, other in zip(even, odd, strict=True):
        made += _interleaved(b, b.bitcast(one, kind), b.bitcast(other, kind))
    return made


def _interleaved(b: Builder, one: Value, other: Value) -> list[Value]:
    """Elements of two vectors in turn, in every 16 bytes: first halves, then second."""
    count = one.type.count
    span = count // 4
    made = []
    for half_ in range(2):
        starts = [span * lane + span // 2 * half_ for lane in range(4)]
        places = [start + i for start in starts for i in range(span // 2)]
        made.append(shuffle(b, one, other, [at for p in places for at in (p, p + count)]))
    return made


def decode(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    group = b.add(record, b.shl(part, I64(4)))
    for number in range(STEP // 2):
        scale = broadcast(b, group, 4 * number)
        if target.bytes:
            codes = b.add(record, b.shl(part, I64(6)))
            yield from _looked_up(b, offset(b, codes, GROUP_CODES + 16 * number), scale)
        else:
            entries = b.add(record, b.shl(part, I64(5)))
            entries = offset(b, entries, GROUP_ENTRIES + 8 * number)
            signs = offset(b, group, GROUP_SIGNS + 4 * number)
            yield from _signed(b, entries, signs, scale, tables)


def _looked_up(b: Builder, codes: Value, scale: Value) -> Iterator[Value]:
    """A group from its nibbles: its possible weights once, then looked up."""
    signed = [*MAGNITUDES, 0.0, *[0.0] * 4, *(-level for level in MAGNITUDES), *[0.0] * 5]
    values = b.fmul(floats(b, signed), scale)
    shifts = ir.Constant(V16I, [I32(4 * (lane // 2)) for lane in range(LANES)])
    for number in range(2):
        octets = b.bitcast(splat(b, load(b, codes, I64, 8 * number), 8), V16I)
        yield look_up(b, values, b.lshr(octets, shifts))


def _signed(
    b: Builder, entries: Value, signs: Value, scale: Value, tables: Value
) -> Iterator[Value]:
    """A group from its codebook entries as float32 and its sign bits."""
    minus = bits_constant(V16I, 1 << 31)
    for number in range(2):
        codes = []
        for octet in (2 * number, 2 * number + 1):
            entry = b.zext(load(b, entries, I16, 2 * octet), I64)
            codes.append(load(b, b.add(tables, entry), vector(I32, 8), WIDE_CODES))
        joined = shuffle(b, codes[0], codes[1], range(LANES))
        bits = b.bitcast(load(b, signs, I16, 2 * number), vector(I1))
        signed = b.select(bits, b.xor(joined, minus), joined)
        yield b.fmul(b.bitcast(signed, V16F), scale)


def lookup_tables() -> np.ndarray:
    """Bytes that the decoders read, at the start of a cache line (see `WIDE_CODES`)."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    grid = np.asarray(IQ2_XXS.grid, dtype=np.float32).reshape(256, 8)
    levels = np.searchsorted(MAGNITUDES, grid).astype(np.uint8)
    fields = np.arange(128, dtype=np.uint8)
    bits = fields[:, None] >> np.arange(8, dtype=np.uint8) & 1
    bits[:, 7] = bits[:, :7].sum(1) & 1  # completed by their parity
    planes = [
        codes[:, first] | codes[:, first + 2] << 4
        for codes in (levels, bits << 3)
        for first in (0, 4, 1, 5)
    ]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    quads = [np.bitwise_or.reduce(levels[:, i : i + 4] << shifts, 1) for i in (0, 4)]
    magnitudes = np.tile(np.array([*MAGNITUDES, 0.0], dtype=np.uint8), 16)
    signs = np.packbits(bits, axis=1, bitorder="little").ravel()
    parts = (grid.astype(np.uint8), grid, *planes, *quads, magnitudes, signs)
    joined = np.concatenate([np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts])
    room = np.empty(joined.size + 64, dtype=np.uint8)
    first = -room.__array_interface__["data"][0] % 64
    room[first : first + joined.size] = joined
    return room[first : first + joined.size]
