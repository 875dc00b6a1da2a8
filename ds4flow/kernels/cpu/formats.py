"""Weight formats as stored in GGUF: how a block becomes vectors of 16 float32 weights.

Every decoder gives exactly the values of the format's definition (each product of a scale and a
code fits into float32), so a product on stored blocks has the bits of the same product on
dequantised weights. Layouts: the ggml block formats as the `gguf` package documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

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
    Value,
    bfloat_to_float,
    constant,
    fma,
    half_to_float,
    load,
    shuffle,
    splat,
    vector,
)


@dataclass(frozen=True)
class Target:
    """What the decoders may use of the CPU that the code is compiled for."""

    native_half: bool
    vnni: bool
    wide: bool  # 32 registers of 16 lanes; otherwise 8 at most


Decoder = Callable[[Builder, Value, Value, Target], Iterator[Value]]


@dataclass(frozen=True)
class Format:
    """A weight format: ggml type number, weights and bytes of a block, and its decoder.

    `decode(b, block, tables, target)` yields the block's weights, 16 a vector, in order.
    """

    name: str
    kind: int
    weights: int
    size: int
    decode: Decoder


def _bytes(b: Builder, address: Value, distance: int, count: int = LANES) -> Value:
    return load(b, address, vector(I8, count), distance)


def half(b: Builder, address: Value, distance: int, target: Target) -> Value:
    """The half at a byte address as a float32."""
    return half_to_float(b, load(b, address, I16, distance), target.native_half)


def unsigned(b: Builder, codes: Value) -> Value:
    """Unsigned bytes as float32, through signed conversion, which every CPU has."""
    return b.sitofp(b.zext(codes, vector(I32, codes.type.count)), vector(F32, codes.type.count))


def _lane(b: Builder, v: Value, lane: int) -> Value:
    return shuffle(b, v, None, [lane] * LANES)


def _decode_f32(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    yield load(b, block, V16F)


def _decode_f16(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    yield half_to_float(b, load(b, block, vector(I16)), target.native_half)


def _decode_bf16(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    yield bfloat_to_float(b, load(b, block, vector(I16)))


def _decode_q8_0(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
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


def _decode_q4_k(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    scales, minima = q4_k_scales(b, block)
    unit, offset_unit = half(b, block, 0, target), half(b, block, 2, target)
    scale = b.fmul(unsigned(b, scales), splat(b, unit, 8))
    least = b.fneg(b.fmul(unsigned(b, minima), splat(b, offset_unit, 8)))
    for pair in range(4):
        parts = [_bytes(b, block, 16 + 32 * pair + 16 * part) for part in range(2)]
        for nibble in range(2):
            k = 2 * pair + nibble
            factor, shift = _lane(b, scale, k), _lane(b, least, k)
            for codes in parts:
                wide = b.zext(codes, V16I)
                if nibble:
                    wide = b.lshr(wide, constant(V16I, 4))
                else:
                    wide = b.and_(wide, constant(V16I, 15))
                yield fma(b, b.sitofp(wide, V16F), factor, shift)


def _decode_q2_k(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    packed = _bytes(b, block, 0)
    low = b.and_(packed, constant(packed.type, 15))
    high = b.lshr(packed, constant(packed.type, 4))
    scale = b.fmul(unsigned(b, low), splat(b, half(b, block, 80, target)))
    least = b.fneg(b.fmul(unsigned(b, high), splat(b, half(b, block, 82, target))))
    for part in range(16):
        wide = b.zext(_bytes(b, block, 16 + 32 * (part // 8) + 16 * (part % 2)), V16I)
        wide = b.lshr(wide, constant(V16I, 2 * (part % 8 // 2)))
        codes = b.sitofp(b.and_(wide, constant(V16I, 3)), V16F)
        yield fma(b, codes, _lane(b, scale, part), _lane(b, least, part))


SIGN_TABLE = (
    2048  # byte offset of the sign masks in `tables`, after 256 codebook entries of 8 bytes
)


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
            masks.append(load(b, entry, I64, SIGN_TABLE))
        codes, mask = (_pair(b, values) for values in (octets, masks))
        parts.append(b.sub(b.xor(codes, mask), mask))
    step = b.uitofp(b.lshr(signs, I32(28)), F32)
    return parts, b.fmul(b.fadd(step, F32(0.5)), F32(0.25))


def _pair(b: Builder, words: list[Value]) -> Value:
    kind = vector(I64, 2)
    pair = b.insert_element(constant(kind, 0), words[0], I32(0))
    return b.bitcast(b.insert_element(pair, words[1], I32(1)), vector(I8))


def _decode_iq2_xxs(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
    unit = half(b, block, 0, target)
    for group in range(8):
        parts, step = iq2_xxs_group(b, block, tables, group)
        scale = splat(b, b.fmul(unit, step))
        for codes in parts:
            yield b.fmul(b.sitofp(b.sext(codes, V16I), V16F), scale)


def mxfp4_scale(b: Builder, block: Value, distance: int = 0) -> Value:
    """`2 ** (e - 127)` of an MXFP4 block's exponent byte e."""
    exponent = b.zext(load(b, block, I8, distance), I32)
    # the bits are e in the exponent field, or one half of 2**-126 for e = 0
    small = b.icmp_unsigned("==", exponent, I32(0))
    return b.bitcast(b.select(small, I32(1 << 22), b.shl(exponent, I32(23))), F32)


def _decode_mxfp4(b: Builder, block: Value, tables: Value, target: Target) -> Iterator[Value]:
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
        Format("Q2_K", 10, 256, 84, _decode_q2_k),
        Format("Q4_K", 12, 256, 144, _decode_q4_k),
        Format("IQ2_XXS", 16, 256, 66, _decode_iq2_xxs),
        Format("BF16", 30, 16, 32, _decode_bf16),
        Format("MXFP4", 39, 32, 17, _decode_mxfp4),
    )
}
BY_KIND = {form.kind: form for form in FORMATS.values()}


def lookup_tables() -> np.ndarray:
    """Bytes that the decoders read: the IQ2_XXS codebook, then its 128 masks of eight signs."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    grid = np.asarray(IQ2_XXS.grid, dtype=np.float32).reshape(256, 8).astype(np.uint8)
    fields = np.arange(128)
    parity = np.array([bin(field).count("1") & 1 for field in range(128)])
    signs = fields | (parity << 7)
    masks = np.where((signs[:, None] >> np.arange(8)) & 1, 0xFF, 0).astype(np.uint8)
    return np.concatenate((grid.ravel(), masks.ravel()))
