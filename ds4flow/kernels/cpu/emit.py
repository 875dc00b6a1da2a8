"""Emission of LLVM code for 16-lane vectors: one fixed order of every operation, on any CPU.

All functions take the llvmlite builder first. Nothing here sets a fast-math flag, so neither order
nor rounding can change between CPUs: wider or narrower registers only split the same vectors
differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

Builder = Any  # llvmlite ships no types
Value = Any

LANES = 16
F32, F64 = ir.FloatType(), ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
V16F = ir.VectorType(F32, LANES)
V16I = ir.VectorType(I32, LANES)
V64 = ir.VectorType(I8, 64)


@dataclass(frozen=True)
class Target:
    """What the decoders may use of the CPU that the code is compiled for."""

    native_half: bool
    vnni: bool  # dot products of 64 bytes
    wide: bool  # 32 registers of 16 lanes; otherwise 8 at most
    bytes: bool = False  # wide, and looks up bytes in tables of 128
    pairs: bool = False  # sums of two products of bytes (AVX2)


def vector(kind: Any, lanes: int = LANES) -> Any:
    """The LLVM vector type of `lanes` elements."""
    return ir.VectorType(kind, lanes)


def like(kind: Any, model: Any) -> Any:
    """`kind` with the lanes of the type `model` (a scalar stays a scalar)."""
    return ir.VectorType(kind, model.count) if isinstance(model, ir.VectorType) else kind


def constant(kind: Any, value: float) -> Value:
    """A scalar constant, or one repeated in every lane of a vector type."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def bits_constant(kind: Any, bits: int) -> Value:
    """An integer constant given as an unsigned bit pattern."""
    width = (kind.element if isinstance(kind, ir.VectorType) else kind).width
    return constant(kind, bits - (1 << width) if bits >> (width - 1) else bits)


def offset(b: Builder, address: Value, distance: int) -> Value:
    """`address + distance` in bytes."""
    return b.add(address, I64(distance)) if distance else address


def load(b: Builder, address: Value, kind: Any, distance: int = 0) -> Value:
    """Load a value of any alignment from a byte address (i64)."""
    value = b.load(b.inttoptr(offset(b, address, distance), kind.as_pointer()))
    value.align = 1
    return value


def store(b: Builder, value: Value, address: Value, distance: int = 0) -> None:
    """Store a value at a byte address (i64) of any alignment."""
    pointer = b.inttoptr(offset(b, address, distance), value.type.as_pointer())
    b.store(value, pointer).align = 1


def shuffle(b: Builder, first: Value, second: Value | None, lanes: Sequence[int]) -> Value:
    """Constant shuffle; lane numbers continue from `first` into `second`."""
    if second is None:
        second = ir.Constant(first.type, ir.Undefined)
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), [I32(lane) for lane in lanes])
    return b.shuffle_vector(first, second, mask)


def splat(b: Builder, value: Value, lanes: int = LANES) -> Value:
    """A scalar repeated in every lane."""
    kind = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return shuffle(b, one, None, [0] * lanes)


def call(b: Builder, name: str, result: Any, arguments: Sequence[Value]) -> Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, kind, name)
    return b.call(function, arguments)


def prefetch(b: Builder, address: Value) -> None:
    """Ask for a cache line; an address that is not mapped does nothing."""
    pointer = b.inttoptr(address, I8.as_pointer())
    arguments = (pointer, I32(0), I32(3), I32(1))  # for reading, into all caches, data
    call(b, "llvm.prefetch.p0", ir.VoidType(), arguments)


def broadcast(b: Builder, record: Value, distance: int) -> Value:
    """The float32 at a byte address in every lane."""
    return splat(b, load(b, record, F32, distance))


def floats(b: Builder, values: Sequence[float]) -> Value:
    """A constant vector of float32."""
    return ir.Constant(vector(F32, len(values)), [F32(value) for value in values])


def look_up(b: Builder, values: Value, codes: Value) -> Value:
    """Lanes of `values` by the low four bits of `codes` (one instruction of wide targets)."""
    return call(b, "llvm.x86.avx512.permvar.sf.512", V16F, (values, codes))


def opaque(b: Builder, address: Value) -> Value:
    """The same address, of which the compiler knows nothing: what it points to is read in place.

    Else tables are read before a loop and kept in more registers than there are.
    """
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], True)


def suffix(kind: Any) -> str:
    """The type suffix of an overloaded LLVM intrinsic."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    return {"float": "f32", "double": "f64"}.get(str(kind), str(kind))


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """`x * y + z`, rounded once."""
    return call(b, f"llvm.fma.{suffix(x.type)}", x.type, (x, y, z))


def sqrt(b: Builder, x: Value) -> Value:
    """Correctly rounded square root."""
    return call(b, f"llvm.sqrt.{suffix(x.type)}", x.type, (x,))


def absolute(b: Builder, x: Value) -> Value:
    """Magnitude."""
    return call(b, f"llvm.fabs.{suffix(x.type)}", x.type, (x,))


def larger(b: Builder, x: Value, y: Value) -> Value:
    """`x` where it is larger than `y` or not a number, else `y`."""
    return b.select(b.fcmp_unordered(">", x, y), x, y)


def smaller(b: Builder, x: Value, y: Value) -> Value:
    """`x` where it is smaller than `y` or not a number, else `y`."""
    return b.select(b.fcmp_unordered("<", x, y), x, y)


def _halves(b: Builder, v: Value) -> tuple[Value, Value]:
    half = v.type.count // 2
    return shuffle(b, v, None, range(half)), shuffle(b, v, None, range(half, 2 * half))


def tree_sum(b: Builder, v: Value) -> Value:
    """Sum of all lanes in the one fixed order: halves onto halves."""
    while v.type.count > 1:
        low, high = _halves(b, v)
        v = b.fadd(low, high)
    return b.extract_element(v, I32(0))


def tree_sums(b: Builder, vectors: Sequence[Value]) -> Value:
    """`tree_sum` of 1, 2 or 4 vectors of 16 lanes as a vector of as many (or a scalar).

    Several vectors go through the same additions side by side.
    """
    if len(vectors) == 1:
        return tree_sum(b, vectors[0])
    half = LANES // 2
    parts = [
        b.fadd(
            shuffle(b, one, other, [*range(half), *range(LANES, LANES + half)]),
            shuffle(b, one, other, [*range(half, LANES), *range(LANES + half, 2 * LANES)]),
        )
        for one, other in zip(vectors[::2], vectors[1::2], strict=True)
    ]
    v, span = parts[0], half
    if len(vectors) == 4:
        places = range(0, 2 * LANES, half)
        span = half // 2
        low = [place + i for place in places for i in range(span)]
        v = b.fadd(
            shuffle(b, parts[0], parts[1], low),
            shuffle(b, parts[0], parts[1], [lane + span for lane in low]),
        )
    while span > 1:
        span //= 2
        v = b.fadd(v, shuffle(b, v, None, [lane ^ span for lane in range(LANES)]))
    return shuffle(b, v, None, range(0, LANES, LANES // len(vectors)))


def tree_max(b: Builder, v: Value) -> Value:
    """Largest lane."""
    while v.type.count > 1:
        low, high = _halves(b, v)
        v = larger(b, low, high)
    return b.extract_element(v, I32(0))


def half_to_float(b: Builder, h: Value, native: bool) -> Value:
    """Finite halves (i16 scalar or vector) as float32.

    Without a conversion instruction the exponent is moved by a multiplication with 2**112, which is
    exact for every finite half, subnormal ones included.
    """
    if native:
        return b.fpext(b.bitcast(h, like(ir.HalfType(), h.type)), like(F32, h.type))
    wide = b.zext(h, like(I32, h.type))
    magnitude = b.shl(b.and_(wide, constant(wide.type, 0x7FFF)), constant(wide.type, 13))
    scaled = b.fmul(b.bitcast(magnitude, like(F32, h.type)), constant(like(F32, h.type), 2.0**112))
    sign = b.shl(b.and_(wide, constant(wide.type, 0x8000)), constant(wide.type, 16))
    return b.bitcast(b.or_(b.bitcast(scaled, wide.type), sign), scaled.type)


def bfloat_to_float(b: Builder, h: Value) -> Value:
    """bfloat16 bit patterns (i16 scalar or vector) as float32."""
    wide = b.zext(h, like(I32, h.type))
    return b.bitcast(b.shl(wide, constant(wide.type, 16)), like(F32, h.type))


MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


def exp(b: Builder, x: Value) -> Value:
    """Exponential, scalar or vector with the same bits; 0 below -87.3, largest finite above 88.3.

    Cody-Waite reduction by ln 2 and a polynomial of degree 7 (coefficients of the Cephes library);
    relative error about 1e-7. NaN stays NaN.
    """
    kind = x.type

    def c(value: float) -> Value:
        return constant(kind, value)

    y = smaller(b, larger(b, x, c(-87.33)), c(88.3))
    shifted = fma(b, y, c(1.44269504088896341), c(MAGIC))
    n = b.fsub(shifted, c(MAGIC))
    r = fma(b, n, c(-0.693359375), y)
    r = fma(b, n, c(2.12194440e-4), r)
    p = c(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(b, p, r, c(coefficient))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), c(1.0))
    integers = like(I32, kind)
    scale = b.shl(b.bitcast(shifted, integers), constant(integers, 23))
    value = b.bitcast(b.add(b.bitcast(p, integers), scale), kind)
    value = b.select(b.fcmp_ordered("<", x, c(-87.33)), c(0.0), value)
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


def log(b: Builder, x: Value) -> Value:
    """Natural logarithm of positive normal numbers (Cephes), scalar or vector."""
    kind, integers = x.type, like(I32, x.type)

    def c(value: float) -> Value:
        return constant(kind, value)

    bits = b.bitcast(x, integers)
    # subtracting the bits of sqrt(1/2) makes the exponent field count from the nearest power of two
    shifted = b.sub(bits, constant(integers, 0x3F3504F3))
    exponent = b.ashr(shifted, constant(integers, 23))
    mantissa = b.sub(bits, b.shl(exponent, constant(integers, 23)))
    m = b.fsub(b.bitcast(mantissa, kind), c(1.0))
    e = b.sitofp(exponent, kind)
    p = c(7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = fma(b, p, m, c(coefficient))
    square = b.fmul(m, m)
    y = b.fmul(b.fmul(p, m), square)
    y = fma(b, e, c(-2.12194440e-4), y)
    y = fma(b, square, c(-0.5), y)
    value = fma(b, e, c(0.693359375), b.fadd(m, y))
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


def softplus(b: Builder, x: Value) -> Value:
    """`log(1 + exp(x))`, scalar or vector with the same bits; linear above 20.

    `log1p` is `log(u) * e / (u - 1)` with `u = 1 + e` (Kahan), accurate down to tiny exponentials.
    """
    kind = x.type

    def c(value: float) -> Value:
        return constant(kind, value)

    e = exp(b, smaller(b, x, c(20.0)))
    u = b.fadd(c(1.0), e)
    less = b.fsub(u, c(1.0))
    none = b.fcmp_ordered("==", less, c(0.0))
    ratio = b.fdiv(e, b.select(none, c(1.0), less))
    value = b.select(none, e, b.fmul(log(b, u), ratio))
    return b.select(b.fcmp_ordered(">", x, c(20.0)), x, value)


@contextmanager
def loop(b: Builder, first: Value, last: Value, step: int = 1) -> Iterator[Value]:
    """`for i in range(first, last, step)` on i64, `step > 0`; yields i."""
    counter = _entry_alloca(b, I64)
    b.store(first, counter)
    head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    i = b.load(counter)
    b.cbranch(b.icmp_signed("<", i, last), body, end)
    b.position_at_end(body)
    yield i
    b.store(b.add(i, I64(step)), counter)
    b.branch(head)
    b.position_at_end(end)


def _entry_alloca(b: Builder, kind: Any) -> Value:
    with b.goto_entry_block():
        return b.alloca(kind)


def room(b: Builder, size: int) -> Value:
    """The address of `size` bytes on the stack of the function under construction."""
    return b.ptrtoint(_entry_alloca(b, ir.ArrayType(I64, (size + 7) // 8)), I64)


class Variables:
    """Mutable SSA values kept in stack slots, which LLVM turns back into registers."""

    def __init__(self, b: Builder, kind: Any, count: int, initial: Value) -> None:
        self._b = b
        self._slots = [_entry_alloca(b, kind) for _ in range(count)]
        for slot in self._slots:
            b.store(initial, slot)

    def __getitem__(self, index: int) -> Value:
        return self._b.load(self._slots[index])

    def __setitem__(self, index: int, value: Value) -> None:
        self._b.store(value, self._slots[index])
