"""Weight formats as stored in GGUF: how a block becomes vectors of 16 float32 weights.

Every decoder gives exactly the values of the format's definition (each product of a scale and a
code fits into float32), so a product on stored blocks has the bits of the same product on
dequantised weights. Layouts: the ggml block formats as the `gguf` package documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    Builder,
    Value,
    bfloat_to_float,
    bits_constant,
    call,
    constant,
    fma,
    half_to_float,
    like,
    load,
    loop,
    offset,
    shuffle,
    splat,
    store,
    vector,
)


@dataclass(frozen=True)
class Target:
    """What the decoders may use of the CPU that the code is compiled for."""

    native_half: bool
    vnni: bool
    wide: bool  # 32 registers of 16 lanes; otherwise 8 at most
    bytes: bool = False  # wide, and looks up bytes in tables of 128


Decoder = Callable[[Builder, Value, Value, Value, Value, Target], Iterator[Value]]
Scaler = Callable[[Builder, Value, Value, Value, Value, Target], None]
SPARE = 192  # bytes that a scaler may write beyond the last record


@dataclass(frozen=True)
class Format:
    """A weight format: ggml type number, weights and bytes of a block, and its decoder.

    `decode(b, block, record, part, tables, target)` yields `step` vectors of 16 weights, in order:
    the block's from number `step * part` on. What a block's scales need of preparation is done
    before, for a whole row: `scale(b, row, blocks, out, tables, target)` writes `record` bytes a block, of
    which decoders can load single floats into all lanes.
    """

    name: str
    kind: int
    weights: int
    size: int
    decode: Decoder
    step: int
    record: int = 0
    scale: Scaler | None = None


def _bytes(b: Builder, address: Value, distance: int, count: int = LANES) -> Value:
    return load(b, address, vector(I8, count), distance)


def half(b: Builder, address: Value, distance: int, target: Target) -> Value:
    """The half at a byte address as a float32."""
    return half_to_float(b, load(b, address, I16, distance), target.native_half)


def unsigned(b: Builder, codes: Value) -> Value:
    """Unsigned bytes as float32, through signed conversion, which every CPU has."""
    return b.sitofp(b.zext(codes, vector(I32, codes.type.count)), vector(F32, codes.type.count))


def _factor(b: Builder, record: Value, distance: int) -> Value:
    return splat(b, load(b, record, F32, distance))


def _floats(b: Builder, values: Sequence[float]) -> Value:
    return ir.Constant(vector(F32, len(values)), [F32(value) for value in values])


def _lookup(b: Builder, values: Value, codes: Value) -> Value:
    """Lanes of `values` by the low four bits of `codes` (one instruction of wide targets)."""
    return call(b, "llvm.x86.avx512.permvar.sf.512", V16F, (values, codes))


V64 = vector(I8, 64)
EVERY = [float(code) for code in range(LANES)]


def _pair(b: Builder, block: Value, distance: int, target: Target, spread: Sequence[int]) -> Value:
    """Two neighbouring halves as float32, spread over 16 lanes."""
    both = half_to_float(b, load(b, block, vector(I16, 2), distance), target.native_half)
    return shuffle(b, both, None, spread)


def _decode_f32(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield load(b, block, V16F)


def _decode_f16(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield half_to_float(b, load(b, block, vector(I16)), target.native_half)


def _decode_bf16(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield bfloat_to_float(b, load(b, block, vector(I16)))


def _decode_q8_0(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    scale = splat(b, half(b, block, 0, target))
    for number in range(2):
        codes = b.sitofp(b.sext(_bytes(b, block, 2 + 16 * number), V16I), V16F)
        yield b.fmul(codes, scale)


def q4_k_scales(b: Builder, block: Value) -> Value:
    """The eight 6-bit scales and after them the eight 6-bit minima of a Q4_K block, `<16 x i32>`.

    The first four of both are the low six bits of a byte; the others have their low four bits in
    one byte and their high two at the top of another.
    """

    def lanes(kinds: Sequence[int]) -> Value:
        return ir.Constant(V16I, [I32(value) for value in kinds for _ in range(4)])

    packed = _bytes(b, block, 0)
    first, second, third = (range(start, start + 4) for start in (4, 8, 12))
    low = b.zext(shuffle(b, packed, None, [*first, *third, *second, *third]), V16I)
    high = b.zext(shuffle(b, packed, None, [*first, *first, *second, *second]), V16I)
    low = b.and_(b.lshr(low, lanes((0, 0, 0, 4))), lanes((63, 15, 63, 15)))
    return b.or_(low, b.and_(b.lshr(high, constant(V16I, 2)), lanes((0, 48, 0, 48))))


def _scale_q4_k(
    b: Builder, row: Value, blocks: Value, out: Value, tables: Value, target: Target
) -> None:
    """Eight scales, then eight minima, negative."""
    signs = _floats(b, [1.0] * 8 + [-1.0] * 8)
    with loop(b, I64(0), blocks) as index:
        block = b.add(row, b.mul(index, I64(144)))
        units = b.fmul(_pair(b, block, 0, target, [0] * 8 + [1] * 8), signs)
        scales = b.fmul(b.sitofp(q4_k_scales(b, block), V16F), units)
        store(b, scales, b.add(out, b.shl(index, I64(6))))


def _decode_q4_k(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    packed, record = b.add(block, b.shl(part, I64(5))), b.add(record, b.shl(part, I64(3)))
    parts = [b.zext(_bytes(b, packed, 16 + 16 * number), V16I) for number in range(2)]
    for nibble in range(2):
        factor, shift = _factor(b, record, 4 * nibble), _factor(b, record, 32 + 4 * nibble)
        # the 16 possible weights once, then looked up by the low four bits
        values = fma(b, _floats(b, EVERY), factor, shift) if target.wide else None
        for wide in parts:
            codes = b.lshr(wide, constant(V16I, 4)) if nibble else wide
            if values is not None:
                yield _lookup(b, values, codes)
            else:
                codes = b.and_(codes, constant(V16I, 15))
                yield fma(b, b.sitofp(codes, V16F), factor, shift)


def _scale_q2_k(
    b: Builder, row: Value, blocks: Value, out: Value, tables: Value, target: Target
) -> None:
    """Sixteen scales, then sixteen minima, negative."""
    with loop(b, I64(0), blocks) as index:
        block, record = b.add(row, b.mul(index, I64(84))), b.add(out, b.shl(index, I64(7)))
        unit = _pair(b, block, 80, target, [0] * LANES)
        least = b.fneg(_pair(b, block, 80, target, [1] * LANES))
        packed = b.zext(_bytes(b, block, 0), V16I)
        for place, (factor, shift) in enumerate(((unit, 0), (least, 4))):
            codes = b.lshr(packed, constant(V16I, shift)) if shift else packed
            if target.wide:
                scales = _lookup(b, b.fmul(_floats(b, EVERY), factor), codes)
            else:
                scales = b.fmul(b.sitofp(b.and_(codes, constant(V16I, 15)), V16F), factor)
            store(b, scales, record, 64 * place)


def _decode_q2_k(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    every = _floats(b, [float(lane % 4) for lane in range(LANES)])
    packed, record = b.add(block, b.shl(part, I64(5))), b.add(record, b.shl(part, I64(5)))
    halves = [b.zext(_bytes(b, packed, 16 + 16 * number), V16I) for number in range(2)]
    for number in range(8):
        wide, bits = halves[number % 2], 2 * (number // 2)
        codes = b.lshr(wide, constant(V16I, bits)) if bits else wide
        factor, shift = _factor(b, record, 4 * number), _factor(b, record, 64 + 4 * number)
        if target.wide:  # the four possible weights once, then looked up by the low two bits
            values = fma(b, every, factor, shift)
            yield call(b, "llvm.x86.avx512.vpermilvar.ps.512", V16F, (values, codes))
        else:
            whole = b.sitofp(b.and_(codes, constant(V16I, 3)), V16F)
            yield fma(b, whole, factor, shift)


IQ2_STEP, IQ2_RECORD = 8, 192
# In `tables`, after the 256 IQ2_XXS codebook entries of eight bytes: these as float32; four planes
# of 256 bytes with two nibbles, and the same of 128 bytes for the sign fields; two planes of 256
# bytes with four codes of two bits; the 64 magnitudes of a byte's low six bits, by the lowest two;
# the 128 sign bytes of the fields.
WIDE_CODES = 256 * 8
NIBBLES = WIDE_CODES + 256 * 32
MINUSES = NIBBLES + 4 * 256
QUADS = MINUSES + 4 * 128
LEVELS = QUADS + 2 * 256
SIGNS = LEVELS + 64


def iq2_xxs_steps(b: Builder, signs: Value) -> Value:
    """Scales of groups over the block's, from the words with their signs."""
    steps = b.uitofp(b.lshr(signs, constant(signs.type, 28)), like(F32, signs.type))
    return b.fmul(b.fadd(steps, constant(steps.type, 0.5)), constant(steps.type, 0.25))


def iq2_xxs_octets(b: Builder, block: Value, tables: Value, group: int) -> Value:
    """The codes of a group without signs, eight bytes in each lane of `<4 x i64>`."""
    octets = constant(vector(I64, 4), 0)
    for lane in range(4):
        index = b.zext(load(b, block, I8, 2 + 8 * group + lane), I64)
        octets = b.insert_element(
            octets, load(b, b.add(tables, b.shl(index, I64(3))), I64), I32(lane)
        )
    return octets


# In a record, after the scales of the eight groups of 32 weights: where bytes can be looked up, the
# codes of each group in 16 bytes (see `_iq2_xxs_codes`); else 32 sign bits of each group, and then
# offsets of its four codebook entries.
IQ2_CODES, IQ2_SIGNS, IQ2_ENTRIES = 64, 32, 64


def _scale_iq2_xxs(
    b: Builder, row: Value, blocks: Value, out: Value, tables: Value, target: Target
) -> None:
    """The scales of eight groups, and what decoding them needs.

    Two blocks at a time; the last one also stands in for the one that follows it.
    """
    pairs = b.lshr(b.add(blocks, I64(1)), I64(1))
    with loop(b, I64(0), pairs) as index:
        first = b.shl(index, I64(1))
        more = b.icmp_signed("<", b.add(first, I64(1)), blocks)
        block = b.add(row, b.mul(first, I64(66)))
        other = b.select(more, offset(b, block, 66), block)
        words, others = (load(b, start, V16I, 2) for start in (block, other))
        signs = shuffle(b, words, others, range(1, 2 * LANES, 2))
        halves = ir.Constant(vector(I16, 2), ir.Undefined)
        for place, start in enumerate((block, other)):
            halves = b.insert_element(halves, load(b, start, I16), I32(place))
        units = half_to_float(b, halves, target.native_half)
        unit = shuffle(b, units, None, [0] * 8 + [1] * 8)
        scales = b.fmul(unit, iq2_xxs_steps(b, signs))
        record = b.add(out, b.mul(first, I64(IQ2_RECORD)))
        for number in range(2):
            eight = shuffle(b, scales, None, range(8 * number, 8 * number + 8))
            store(b, eight, record, IQ2_RECORD * number)
        if target.bytes:
            codes = _iq2_xxs_codes(b, words, others, tables)
        else:
            bits = iq2_xxs_signs(b, signs)
            indices = b.bitcast(shuffle(b, words, others, range(0, 2 * LANES, 2)), V64)
            wide = vector(I16, 64)
            offsets = b.shl(b.zext(indices, wide), constant(wide, 5))
        for number in range(2):
            at = offset(b, record, IQ2_RECORD * number)
            if target.bytes:
                for place in range(2):
                    store(b, codes[2 * number + place], at, IQ2_CODES + 64 * place)
                continue
            eight, many = range(8 * number, 8 * number + 8), range(32 * number, 32 * number + 32)
            store(b, shuffle(b, bits, None, eight), at, IQ2_SIGNS)
            store(b, shuffle(b, offsets, None, many), at, IQ2_ENTRIES)


def iq2_xxs_signs(b: Builder, signs: Value) -> Value:
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


IQ2_LEVELS = (8.0, 25.0, 43.0)  # magnitudes of the codebook


def look_up_bytes(b: Builder, table: Sequence[Value], places: Value) -> Value:
    """Bytes of a table of two vectors by the low seven bits of `places`, of four by all eight."""
    looked_up = [
        call(b, "llvm.x86.avx512.vpermi2var.qi.512", V64, (low, places, high))
        for low, high in zip(table[::2], table[1::2], strict=True)
    ]
    if len(looked_up) == 1:
        return looked_up[0]
    return b.select(b.icmp_signed("<", places, constant(V64, 0)), *looked_up[::-1])


def iq2_xxs_fields(b: Builder, signs: Value) -> Value:
    """The four sign fields of each word as bytes; their highest bit is not theirs."""
    starts = ir.Constant(V64, [I8(bit) for _ in range(8) for bit in (0, 7, 14, 21, 32, 39, 46, 53)])
    return call(b, "llvm.x86.avx512.pmultishift.qb.512", V64, (starts, b.bitcast(signs, V64)))


def _iq2_xxs_codes(b: Builder, words: Value, others: Value, tables: Value) -> list[Value]:
    """Codes of the 64 octets of two blocks, a nibble a weight, in four vectors of four groups.

    A nibble is the number of the magnitude in `IQ2_LEVELS`, plus 8 for a minus sign. Eight bytes
    hold 16 weights: first those with even numbers, then the others, so that a shift of each 32-bit
    half moves the nibble of every second lane to its low end.
    """
    # the halving of lanes below puts the words 4 * L + k of the order here into lane L of vector k
    order = [2 * (8 * (k // 2) + 4 * (k % 2) + lane) for lane in range(4) for k in range(4)]
    indices = b.bitcast(shuffle(b, words, others, order), V64)
    fields = iq2_xxs_fields(b, shuffle(b, words, others, [word + 1 for word in order]))
    planes = []
    for plane in range(4):
        entries = [load(b, tables, V64, NIBBLES + 256 * plane + 64 * part) for part in range(4)]
        signs = [load(b, tables, V64, MINUSES + 128 * plane + 64 * part) for part in range(2)]
        minus = look_up_bytes(b, signs, fields)
        planes.append(b.or_(look_up_bytes(b, entries, indices), minus))
    pairs = vector(I32, LANES)
    even, odd = (_interleaved(b, *planes[2 * i : 2 * i + 2], V64) for i in range(2))
    made = []
    for one, other in zip(even, odd, strict=True):
        made += _interleaved(b, b.bitcast(one, pairs), b.bitcast(other, pairs), pairs)
    return made


def _interleaved(b: Builder, one: Value, other: Value, kind: Value) -> list[Value]:
    """Elements of two vectors in turn, in every 16 bytes: of their first halves, of their second.

    """
    count = kind.count
    span = count // 4
    made = []
    for half_ in range(2):
        starts = [span * lane + span // 2 * half_ for lane in range(4)]
        places = [start + i for start in starts for i in range(span // 2)]
        made.append(shuffle(b, one, other, [at for p in places for at in (p, p + count)]))
    return made


def _decode_iq2_xxs(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    group = b.add(record, b.shl(part, I64(4)))
    for number in range(IQ2_STEP // 2):
        scale = _factor(b, group, 4 * number)
        if target.bytes:
            codes = b.add(record, b.shl(part, I64(6)))
            yield from _looked_up_iq2_xxs(b, offset(b, codes, IQ2_CODES + 16 * number), scale)
        else:
            entries = b.add(record, b.shl(part, I64(5)))
            entries = offset(b, entries, IQ2_ENTRIES + 8 * number)
            signs = offset(b, group, IQ2_SIGNS + 4 * number)
            yield from _signed_iq2_xxs(b, entries, signs, scale, tables)


def _looked_up_iq2_xxs(b: Builder, codes: Value, scale: Value) -> Iterator[Value]:
    """A group from its nibbles: its possible weights once, then looked up."""
    signed = [*IQ2_LEVELS, 0.0, *[0.0] * 4, *(-level for level in IQ2_LEVELS), *[0.0] * 5]
    values = b.fmul(_floats(b, signed), scale)
    shifts = ir.Constant(V16I, [I32(4 * (lane // 2)) for lane in range(LANES)])
    for number in range(2):
        octets = b.bitcast(splat(b, load(b, codes, I64, 8 * number), 8), V16I)
        yield _lookup(b, values, b.lshr(octets, shifts))


def _signed_iq2_xxs(
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


def mxfp4_scale(b: Builder, exponent: Value) -> Value:
    """`2 ** (e - 127)` of an exponent byte e (i32)."""
    # the bits are e in the exponent field, or one half of 2**-126 for e = 0
    small = b.icmp_unsigned("==", exponent, I32(0))
    return b.bitcast(b.select(small, I32(1 << 22), b.shl(exponent, I32(23))), F32)


MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _decode_mxfp4(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    scale = splat(b, mxfp4_scale(b, b.zext(load(b, block, I8), I32)))
    packed = b.zext(_bytes(b, block, 1), V16I)
    if target.wide:
        values = _floats(b, [*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        scaled = b.fmul(values, scale)
        yield _lookup(b, scaled, packed)
        yield _lookup(b, scaled, b.lshr(packed, constant(V16I, 4)))
        return
    for nibble in range(2):
        wide = b.lshr(packed, constant(V16I, 4)) if nibble else packed
        # two exponent bits and one mantissa bit, moved to float32's fields; no exponent: 0 or 1/2
        code = b.and_(wide, constant(V16I, 7))
        moved = b.add(b.shl(code, constant(V16I, 22)), constant(V16I, 126 << 23))
        halves = b.fmul(b.sitofp(code, V16F), constant(V16F, 0.5))
        tiny = b.icmp_signed("<", code, constant(V16I, 2))
        value = b.select(tiny, halves, b.bitcast(moved, V16F))
        sign = b.shl(b.and_(wide, constant(V16I, 8)), constant(V16I, 28))
        signed = b.bitcast(b.or_(b.bitcast(value, V16I), sign), V16F)
        yield b.fmul(signed, scale)


FORMATS = {
    form.name: form
    for form in (
        Format("F32", 0, 16, 64, _decode_f32, 1),
        Format("F16", 1, 16, 32, _decode_f16, 1),
        Format("Q8_0", 8, 32, 34, _decode_q8_0, 2),
        Format("Q2_K", 10, 256, 84, _decode_q2_k, 8, 128, _scale_q2_k),
        Format("Q4_K", 12, 256, 144, _decode_q4_k, 4, 64, _scale_q4_k),
        Format("IQ2_XXS", 16, 256, 66, _decode_iq2_xxs, IQ2_STEP, IQ2_RECORD, _scale_iq2_xxs),
        Format("BF16", 30, 16, 32, _decode_bf16, 1),
        Format("MXFP4", 39, 32, 17, _decode_mxfp4, 2),
    )
}
BY_KIND = {form.kind: form for form in FORMATS.values()}
MOST_RECORD = max(LANES * form.record // form.weights for form in FORMATS.values())
"""Most bytes of records per 16 weights."""


def lookup_tables() -> np.ndarray:
    """Bytes that the decoders read, at the start of a cache line (see `WIDE_CODES`)."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    grid = np.asarray(IQ2_XXS.grid, dtype=np.float32).reshape(256, 8)
    levels = np.searchsorted(IQ2_LEVELS, grid).astype(np.uint8)
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
    magnitudes = np.tile(np.array([*IQ2_LEVELS, 0.0], dtype=np.uint8), 16)
    signs = np.packbits(bits, axis=1, bitorder="little").ravel()
    parts = (grid.astype(np.uint8), grid, *planes, *quads, magnitudes, signs)
    joined = np.concatenate([np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts])
    room = np.empty(joined.size + 64, dtype=np.uint8)
    first = -room.__array_interface__["data"][0] % 64
    room[first : first + joined.size] = joined
    return room[first : first + joined.size]
