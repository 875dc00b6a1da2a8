"""Weight formats as stored in GGUF: how a block becomes vectors of 16 float32 weights.

Every decoder gives exactly the values of the format's definition (each product of a scale and a
code fits into float32), so a product on stored blocks has the bits of the same product on
dequantised weights. Layouts: the ggml block formats as the `gguf` package documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


Decoder = Callable[[Builder, Value, Value, Value, Target], Iterator[Value]]
Scaler = Callable[[Builder, Value, Value, Target], None]


@dataclass(frozen=True)
class Format:
    """A weight format: ggml type number, weights and bytes of a block, and its decoder.

    `decode(b, block, scales, tables, target)` yields the block's weights, 16 a vector, in order.
    Where a block has many scales, `scale(b, block, out, target)` writes them as `factors` float32
    first, so that the decoder can load each into all lanes at once; `scales` is where they lie.
    """

    name: str
    kind: int
    weights: int
    size: int
    decode: Decoder
    factors: int = 0
    scale: Scaler | None = None


def _bytes(b: Builder, address: Value, distance: int, count: int = LANES) -> Value:
    return load(b, address, vector(I8, count), distance)


def half(b: Builder, address: Value, distance: int, target: Target) -> Value:
    """The half at a byte address as a float32."""
    return half_to_float(b, load(b, address, I16, distance), target.native_half)


def unsigned(b: Builder, codes: Value) -> Value:
    """Unsigned bytes as float32, through signed conversion, which every CPU has."""
    return b.sitofp(b.zext(codes, vector(I32, codes.type.count)), vector(F32, codes.type.count))


def _factor(b: Builder, scales: Value, number: int) -> Value:
    return splat(b, load(b, scales, F32, 4 * number))


def _decode_f32(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield load(b, block, V16F)


def _decode_f16(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield half_to_float(b, load(b, block, vector(I16)), target.native_half)


def _decode_bf16(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    yield bfloat_to_float(b, load(b, block, vector(I16)))


def _decode_q8_0(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    scale = splat(b, half(b, block, 0, target))
    for part in range(2):
        codes = b.sitofp(b.sext(_bytes(b, block, 2 + 16 * part), V16I), V16F)
        yield b.fmul(codes, scale)


def q4_k_scales(b: Builder, block: Value) -> tuple[Value, Value]:
    """The eight 6-bit scales and the eight 6-bit minima of a Q4_K block, each `<8 x i8>`."""
    words = [load(b, block, I32, 4 + 4 * word) for word in range(3)]

    def masked(word: Value, shift: int, mask: int) -> Value:
        return b.and_(b.lshr(word, I32(shift)) if shift else word, I32(mask))

    def join(low: Value, high: Value) -> Value:
        wide = b.or_(b.zext(low, I64), b.shl(b.zext(high, I64), I64(32)))
        return b.bitcast(wide, vector(I8, 8))

    def high(word: Value, shift: int) -> Value:
        top = b.shl(masked(word, 6, 0x03030303), I32(4))
        return b.or_(masked(words[2], shift, 0x0F0F0F0F), top)

    scales = join(masked(words[0], 0, 0x3F3F3F3F), high(words[0], 0))
    minima = join(masked(words[1], 0, 0x3F3F3F3F), high(words[1], 4))
    return scales, minima


def _scale_q4_k(b: Builder, block: Value, out: Value, target: Target) -> None:
    """Eight scales, then eight minima, negative."""
    scales, minima = q4_k_scales(b, block)
    unit, least = half(b, block, 0, target), half(b, block, 2, target)
    store(b, b.fmul(unsigned(b, scales), splat(b, unit, 8)), out)
    store(b, b.fneg(b.fmul(unsigned(b, minima), splat(b, least, 8))), out, 32)


def _decode_q4_k(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    every = ir.Constant(V16F, [F32(float(code)) for code in range(LANES)])
    for pair in range(4):
        parts = [b.zext(_bytes(b, block, 16 + 32 * pair + 16 * part), V16I) for part in range(2)]
        for nibble in range(2):
            k = 2 * pair + nibble
            factor, shift = _factor(b, scales, k), _factor(b, scales, 8 + k)
            # the 16 possible weights once, then looked up by the low four bits
            values = fma(b, every, factor, shift) if target.wide else None
            for wide in parts:
                codes = b.lshr(wide, constant(V16I, 4)) if nibble else wide
                if values is not None:
                    yield call(b, "llvm.x86.avx512.permvar.sf.512", V16F, (values, codes))
                else:
                    codes = b.and_(codes, constant(V16I, 15))
                    yield fma(b, b.sitofp(codes, V16F), factor, shift)


def _scale_q2_k(b: Builder, block: Value, out: Value, target: Target) -> None:
    """Sixteen scales, then sixteen minima, negative."""
    packed = _bytes(b, block, 0)
    low = b.and_(packed, constant(packed.type, 15))
    high = b.lshr(packed, constant(packed.type, 4))
    store(b, b.fmul(unsigned(b, low), splat(b, half(b, block, 80, target))), out)
    store(b, b.fneg(b.fmul(unsigned(b, high), splat(b, half(b, block, 82, target)))), out, 64)


def _decode_q2_k(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    every = ir.Constant(V16F, [F32(float(lane % 4)) for lane in range(LANES)])
    for part in range(16):
        wide = b.zext(_bytes(b, block, 16 + 32 * (part // 8) + 16 * (part % 2)), V16I)
        bits = 2 * (part % 8 // 2)
        codes = b.lshr(wide, constant(V16I, bits)) if bits else wide
        factor, shift = _factor(b, scales, part), _factor(b, scales, 16 + part)
        if target.wide:  # the four possible weights once, then looked up by the low two bits
            values = fma(b, every, factor, shift)
            yield call(b, "llvm.x86.avx512.vpermilvar.ps.512", V16F, (values, codes))
        else:
            whole = b.sitofp(b.and_(codes, constant(V16I, 3)), V16F)
            yield fma(b, whole, factor, shift)


# Byte offsets in `tables`: 256 codebook entries of eight and 128 masks of eight signs as bytes,
# and the codebook again as float32.
BYTE_SIGNS = 256 * 8
WIDE_CODES = BYTE_SIGNS + 128 * 8


def _iq2_xxs_step(b: Builder, signs: Value) -> Value:
    """Scale of a group over the block's from the word with its signs (scalar or vector)."""
    step = b.uitofp(b.lshr(signs, constant(signs.type, 28)), like(F32, signs.type))
    half_step = b.fadd(step, constant(step.type, 0.5))
    return b.fmul(half_step, constant(step.type, 0.25))


def iq2_xxs_group(b: Builder, block: Value, tables: Value, group: int) -> tuple[list[Value], Value]:
    """32 signed codes of a group as two `<16 x i8>`, and its scale over the block's (a float32)."""
    start = 2 + 8 * group
    signs = load(b, block, I32, start + 4)
    parts = []
    for part in range(2):
        octets, masks = [], []
        for octet in (2 * part, 2 * part + 1):
            index = b.zext(load(b, block, I8, start + octet), I64)
            octets.append(load(b, b.add(tables, b.shl(index, I64(3))), I64))
            field = b.and_(b.lshr(signs, I32(7 * octet)), I32(127))
            entry = b.add(tables, b.shl(b.zext(field, I64), I64(3)))
            masks.append(load(b, entry, I64, BYTE_SIGNS))
        codes, mask = (_pair(b, values) for values in (octets, masks))
        parts.append(b.sub(b.xor(codes, mask), mask))
    return parts, _iq2_xxs_step(b, signs)


def _pair(b: Builder, words: list[Value]) -> Value:
    kind = vector(I64, 2)
    pair = b.insert_element(constant(kind, 0), words[0], I32(0))
    return b.bitcast(b.insert_element(pair, words[1], I32(1)), vector(I8))


def _scale_iq2_xxs(b: Builder, block: Value, out: Value, target: Target) -> None:
    """The scales of the eight groups, then 32 sign bits of each."""
    words = load(b, block, V16I, 2)
    signs = shuffle(b, words, None, range(1, 16, 2))
    unit = splat(b, half(b, block, 0, target), 8)
    store(b, b.fmul(unit, _iq2_xxs_step(b, signs)), out)

    def number(value: int) -> Value:
        return bits_constant(signs.type, value)

    # four fields of seven bits, each completed to a byte by its parity
    spread = b.and_(signs, number(0x7F))
    for field in range(1, 4):
        part = b.and_(signs, number(0x7F << 7 * field))
        spread = b.or_(spread, b.shl(part, number(field)))
    parity = spread
    for distance in (4, 2, 1):
        parity = b.xor(parity, b.lshr(parity, number(distance)))
    last = b.shl(b.and_(parity, number(0x01010101)), number(7))
    store(b, b.or_(spread, last), out, 32)


def _decode_iq2_xxs(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    minus = bits_constant(V16I, 1 << 31)
    for group in range(8):
        scale = _factor(b, scales, group)
        for part in range(2):
            codes = []
            for octet in (2 * part, 2 * part + 1):
                index = b.zext(load(b, block, I8, 2 + 8 * group + octet), I64)
                entry = b.add(tables, b.shl(index, I64(5)))
                codes.append(load(b, entry, vector(I32, 8), WIDE_CODES))
            joined = shuffle(b, codes[0], codes[1], range(LANES))
            bits = b.bitcast(load(b, scales, I16, 32 + 4 * group + 2 * part), vector(I1))
            signed = b.select(bits, b.xor(joined, minus), joined)
            yield b.fmul(b.bitcast(signed, V16F), scale)


def mxfp4_scale(b: Builder, block: Value, distance: int = 0) -> Value:
    """`2 ** (e - 127)` of an MXFP4 block's exponent byte e."""
    exponent = b.zext(load(b, block, I8, distance), I32)
    # the bits are e in the exponent field, or one half of 2**-126 for e = 0
    small = b.icmp_unsigned("==", exponent, I32(0))
    return b.bitcast(b.select(small, I32(1 << 22), b.shl(exponent, I32(23))), F32)


def _decode_mxfp4(
    b: Builder, block: Value, scales: Value, tables: Value, target: Target
) -> Iterator[Value]:
    scale = splat(b, mxfp4_scale(b, block))
    packed = _bytes(b, block, 1)
    for nibble in range(2):
        wide = b.zext(packed, V16I)
        if nibble:
            wide = b.lshr(wide, constant(V16I, 4))
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
        Format("F32", 0, 16, 64, _decode_f32),
        Format("F16", 1, 16, 32, _decode_f16),
        Format("Q8_0", 8, 32, 34, _decode_q8_0),
        Format("Q2_K", 10, 256, 84, _decode_q2_k, 32, _scale_q2_k),
        Format("Q4_K", 12, 256, 144, _decode_q4_k, 16, _scale_q4_k),
        Format("IQ2_XXS", 16, 256, 66, _decode_iq2_xxs, 16, _scale_iq2_xxs),
        Format("BF16", 30, 16, 32, _decode_bf16),
        Format("MXFP4", 39, 32, 17, _decode_mxfp4),
    )
}
BY_KIND = {form.kind: form for form in FORMATS.values()}


def lookup_tables() -> np.ndarray:
    """Bytes that the decoders read, at the start of a cache line (see `BYTE_SIGNS`)."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    grid = np.asarray(IQ2_XXS.grid, dtype=np.float32).reshape(256, 8)
    fields = np.arange(128)
    parity = np.array([bin(field).count("1") & 1 for field in range(128)])
    negative = ((fields | (parity << 7))[:, None] >> np.arange(8)) & 1
    parts = (
        grid.astype(np.uint8),
        np.where(negative, 0xFF, 0).astype(np.uint8),
        grid,
    )
    joined = np.concatenate([part.view(np.uint8).ravel() for part in parts])
    room = np.empty(joined.size + 64, dtype=np.uint8)
    first = -room.__array_interface__["data"][0] % 64
    room[first : first + joined.size] = joined
    return room[first : first + joined.size]
