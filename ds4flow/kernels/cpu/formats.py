"""Weight formats as stored in GGUF: how a block becomes vectors of 16 float32 weights.

Every decoder gives exactly the values of the format's definition (each product of a scale and a
code fits into float32), so a product on stored blocks has the bits of the same product on
dequantised weights. Layouts: the ggml block formats as the `gguf` package documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir  # type: ignore[import-untyped]

from ds4flow.kernels.cpu import iq2_xxs
from ds4flow.kernels.cpu.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V16F,
    V16I,
    Builder,
    Target,
    Value,
    bfloat_to_float,
    broadcast,
    call,
    constant,
    floats,
    fma,
    half_to_float,
    load,
    look_up,
    loop,
    shuffle,
    splat,
    store,
    vector,
)

Decoder = Callable[[Builder, Value, Value, Value, Value, Target], Iterator[Value]]
Scaler = Callable[[Builder, Value, Value, Value, Value, Target], None]
SPARE = 192  # bytes that a scaler may write beyond the last record


@dataclass(frozen=True)
class Format:
    """A weight format: ggml type number, weights and bytes of a block, and its decoder.

    `decode(b, block, record, part, tables, target)` yields `step` vectors of 16 weights, in order:
    the block's from number `step * part` on. What a block's scales need of preparation is done
    before, for a whole row: `scale(b, row, blocks, out, tables, target)` writes `record` bytes a
    block, of which decoders can load single floats into all lanes.
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
    signs = floats(b, [1.0] * 8 + [-1.0] * 8)
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
        factor, shift = broadcast(b, record, 4 * nibble), broadcast(b, record, 32 + 4 * nibble)
        # the 16 possible weights once, then looked up by the low four bits
        values = fma(b, floats(b, EVERY), factor, shift) if target.wide else None
        for wide in parts:
            codes = b.lshr(wide, constant(V16I, 4)) if nibble else wide
            if values is not None:
                yield look_up(b, values, codes)
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
                scales = look_up(b, b.fmul(floats(b, EVERY), factor), codes)
            else:
                scales = b.fmul(b.sitofp(b.and_(codes, constant(V16I, 15)), V16F), factor)
            store(b, scales, record, 64 * place)


def _decode_q2_k(
    b: Builder, block: Value, record: Value, part: Value, tables: Value, target: Target
) -> Iterator[Value]:
    every = floats(b, [float(lane % 4) for lane in range(LANES)])
    packed, record = b.add(block, b.shl(part, I64(5))), b.add(record, b.shl(part, I64(5)))
    halves = [b.zext(_bytes(b, packed, 16 + 16 * number), V16I) for number in range(2)]
    for number in range(8):
        wide, bits = halves[number % 2], 2 * (number // 2)
        codes = b.lshr(wide, constant(V16I, bits)) if bits else wide
        factor, shift = broadcast(b, record, 4 * number), broadcast(b, record, 64 + 4 * number)
        if target.wide:  # the four possible weights once, then looked up by the low two bits
            values = fma(b, every, factor, shift)
            yield call(b, "llvm.x86.avx512.vpermilvar.ps.512", V16F, (values, codes))
        else:
            whole = b.sitofp(b.and_(codes, constant(V16I, 3)), V16F)
            yield fma(b, whole, factor, shift)


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
        values = floats(b, [*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        scaled = b.fmul(values, scale)
        yield look_up(b, scaled, packed)
        yield look_up(b, scaled, b.lshr(packed, constant(V16I, 4)))
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
        Format("IQ2_XXS", 16, 256, 66, iq2_xxs.decode, iq2_xxs.STEP, iq2_xxs.RECORD, iq2_xxs.scale),
        Format("BF16", 30, 16, 32, _decode_bf16, 1),
        Format("MXFP4", 39, 32, 17, _decode_mxfp4, 2),
    )
}
BY_KIND = {form.kind: form for form in FORMATS.values()}
MOST_RECORD = max(LANES * form.record // form.weights for form in FORMATS.values())
"""Most bytes of records per 16 weights."""
