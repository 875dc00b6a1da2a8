"""What the kernels are written with: raw memory access and a vector of 16 float32 lanes for numba.

Addresses and counts are int64. Arithmetic on `Lanes` follows the operators `+ - * /`; every
function here is one LLVM operation or a fixed sequence of them, so bits do not depend on the lane,
the row or the CPU.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from ds4flow.kernels.cpu import emit, int8, rounding, tiles
from ds4flow.kernels.cpu.emit import Target
from ds4flow.kernels.cpu.formats import BY_KIND


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = _LanesType()
INT, FLOAT, DOUBLE = types.int64, types.float32, types.float64


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, emit.V16F)


def _operator(function: Any, instruction: str) -> None:
    class Template(ConcreteTemplate):
        cases = (signature(LANES, LANES, LANES),)

    infer_global(function)(Template)

    @lower_builtin(function, LANES, LANES)
    def lower(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _instruction)


def _intrinsic(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba function from an emitter `(builder, *values)`; arguments are cast to `kinds`."""

    def make(body: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            value = body(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        def typed(typing_context: Any, *_: Any) -> Any:
            return result(*kinds), generate

        names = ["typing_context", *(f"a{i}" for i in range(len(kinds)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__ = body.__name__
        typed.__doc__ = body.__doc__
        return intrinsic(typed)

    return make


def _any(decorator: Any) -> Any:
    """The decorator with a result that a type checker lets kernels call."""
    return decorator


def target_of(context: Any) -> Target:
    """What the CPU that numba compiles for offers (numba's cache is keyed by the same)."""
    triple, _, features = context.codegen().magic_tuple()
    enabled = set(features.split(","))
    native_half = "+f16c" in enabled or triple.startswith(("aarch64", "arm64"))
    wide = {"+avx512f", "+avx512bw", "+avx512dq", "+avx512vl"} <= enabled
    return Target(
        native_half=native_half,
        vnni=wide and "+avx512vnni" in enabled,
        wide=wide,
        bytes=wide and "+avx512vbmi" in enabled,
        pairs="+avx2" in enabled,
    )


# --- memory ---------------------------------------------------------------------------------------


@_intrinsic(INT, INT)
def get(b: Any, address: Any) -> Any:
    """The int64 at an address."""
    return emit.load(b, address, emit.I64)


@_intrinsic(types.void, INT, INT)
def put(b: Any, address: Any, value: Any) -> None:
    """Write an int64."""
    emit.store(b, value, address)


@_intrinsic(INT, INT)
def get32(b: Any, address: Any) -> Any:
    """The int32 at an address."""
    return b.sext(emit.load(b, address, emit.I32), emit.I64)


@_intrinsic(FLOAT, INT)
def getf(b: Any, address: Any) -> Any:
    """The float32 at an address."""
    return emit.load(b, address, emit.F32)


@_intrinsic(DOUBLE, INT)
def getd(b: Any, address: Any) -> Any:
    """The float64 at an address."""
    return emit.load(b, address, emit.F64)


@_intrinsic(types.void, INT, DOUBLE)
def putd(b: Any, address: Any, value: Any) -> None:
    """Write a float64."""
    emit.store(b, value, address)


@_intrinsic(types.void, INT, FLOAT)
def putf(b: Any, address: Any, value: Any) -> None:
    """Write a float32."""
    emit.store(b, value, address)


@_intrinsic(LANES, INT)
def lanes(b: Any, address: Any) -> Any:
    """16 consecutive float32 at an address."""
    return emit.load(b, address, emit.V16F)


@_intrinsic(types.void, INT, LANES)
def put_lanes(b: Any, address: Any, value: Any) -> None:
    """Write 16 consecutive float32."""
    emit.store(b, value, address)


@_intrinsic(types.void, INT, INT, INT)
def copy(b: Any, out: Any, source: Any, size: Any) -> None:
    """Copy `size` bytes between places that do not overlap."""
    byte = emit.I8.as_pointer()
    arguments = (b.inttoptr(out, byte), b.inttoptr(source, byte), size, emit.I1(0))
    emit.call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), arguments)


@_intrinsic(INT, INT)
def atomic_get(b: Any, address: Any) -> Any:
    """The int64 at an aligned address, before anything that follows is read."""
    pointer = b.inttoptr(address, emit.I64.as_pointer())
    return b.load_atomic(pointer, ordering="acquire", align=8)


@_intrinsic(types.void, INT, INT)
def atomic_put(b: Any, address: Any, value: Any) -> None:
    """Write an int64 to an aligned address, after all that was written before."""
    pointer = b.inttoptr(address, emit.I64.as_pointer())
    b.store_atomic(value, pointer, ordering="release", align=8)


@_intrinsic(INT, INT, INT)
def atomic_add(b: Any, address: Any, value: Any) -> Any:
    """Add to an int64 at an aligned address; returns what was there."""
    pointer = b.inttoptr(address, emit.I64.as_pointer())
    return b.atomic_rmw("add", pointer, value, "acq_rel")


@_any(intrinsic)
def pause(typing_context: Any) -> Any:
    """Tell the CPU that this is a waiting loop."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i686")):
            emit.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), ())
        elif triple.startswith(("aarch64", "arm64")):
            emit.call(builder, "llvm.aarch64.hint", ir.VoidType(), (emit.I32(1),))
        return context.get_dummy_value()

    return types.void(), generate


@_any(intrinsic)
def give_way(typing_context: Any) -> Any:
    """Let the system run another thread (where the C library has sched_yield)."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        if "windows" not in context.codegen().magic_tuple()[0]:
            emit.call(builder, "sched_yield", emit.I32, ())
        return context.get_dummy_value()

    return types.void(), generate


# --- arithmetic -----------------------------------------------------------------------------------


@_intrinsic(LANES, FLOAT)
def spread(b: Any, value: Any) -> Any:
    """One float32 in every lane."""
    return emit.splat(b, value)


@_intrinsic(LANES, LANES, LANES, LANES)
def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z`, rounded once."""
    return emit.fma(b, x, y, z)


@_intrinsic(LANES, LANES, LANES)
def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger lanes; those of `x` that are not numbers stay so."""
    return emit.larger(b, x, y)


@_intrinsic(LANES, LANES, LANES)
def smaller(b: Any, x: Any, y: Any) -> Any:
    """The smaller lanes; those of `x` that are not numbers stay so."""
    return emit.smaller(b, x, y)


@_intrinsic(LANES, LANES)
def absolute(b: Any, x: Any) -> Any:
    """Magnitudes."""
    return emit.absolute(b, x)


@_intrinsic(LANES, LANES)
def root(b: Any, x: Any) -> Any:
    """Square roots, correctly rounded."""
    return emit.sqrt(b, x)


@_intrinsic(LANES, LANES)
def exp(b: Any, x: Any) -> Any:
    """Exponentials (see `emit.exp`)."""
    return emit.exp(b, x)


@_intrinsic(FLOAT, FLOAT)
def exp1(b: Any, x: Any) -> Any:
    """Exponential of one number, the bits of `exp`."""
    return emit.exp(b, x)


@_intrinsic(FLOAT, FLOAT)
def root1(b: Any, x: Any) -> Any:
    """Square root of one number, correctly rounded."""
    return emit.sqrt(b, x)


@_intrinsic(LANES, LANES)
def softplus(b: Any, x: Any) -> Any:
    """`log(1 + exp(x))` (see `emit.softplus`)."""
    return emit.softplus(b, x)


@_intrinsic(FLOAT, LANES)
def total(b: Any, x: Any) -> Any:
    """Sum of the lanes in the fixed order."""
    return emit.tree_sum(b, x)


@_intrinsic(FLOAT, LANES)
def largest(b: Any, x: Any) -> Any:
    """Largest lane."""
    return emit.tree_max(b, x)


@_intrinsic(LANES, LANES, INT)
def partners(b: Any, x: Any, distance: Any) -> Any:
    """Lanes exchanged in pairs whose numbers differ in the bit `distance` (1, 2, 4 or 8)."""
    result = x
    for bit in (1, 2, 4, 8):
        swapped = emit.shuffle(b, x, None, [lane ^ bit for lane in range(16)])
        result = b.select(b.icmp_signed("==", distance, emit.I64(bit)), swapped, result)
    return result


@_intrinsic(LANES, LANES, INT)
def butterfly(b: Any, x: Any, distance: Any) -> Any:
    """One stage of the Walsh-Hadamard transform inside 16 lanes: sums low, differences high."""
    result = x
    for bit in (1, 2, 4, 8):
        swapped = emit.shuffle(b, x, None, [lane ^ bit for lane in range(16)])
        signs = [emit.F32(-1.0 if lane & bit else 1.0) for lane in range(16)]
        stage = b.fadd(b.fmul(x, ir.Constant(emit.V16F, signs)), swapped)
        result = b.select(b.icmp_signed("==", distance, emit.I64(bit)), stage, result)
    return result


@_intrinsic(LANES, LANES, LANES, LANES)
def rotate_pairs(b: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotate eight adjacent pairs; lanes 2i and 2i+1 of `cos` and `sin` belong to pair i.

    Even lanes become `even * cos - odd * sin`, odd ones `odd * cos + even * sin`; each product is
    rounded.
    """
    swapped = emit.shuffle(b, x, None, [lane ^ 1 for lane in range(16)])
    signs = ir.Constant(emit.V16F, [emit.F32(-1.0 if lane % 2 == 0 else 1.0) for lane in range(16)])
    return b.fadd(b.fmul(x, cos), b.fmul(b.fmul(swapped, sin), signs))


@_intrinsic(LANES, INT)
def doubled(b: Any, address: Any) -> Any:
    """Eight float32 at an address, each in two adjacent lanes."""
    eight = emit.load(b, address, emit.vector(emit.F32, 8))
    return emit.shuffle(b, eight, None, [lane // 2 for lane in range(16)])


@_intrinsic(FLOAT, FLOAT, FLOAT)
def block_scale(b: Any, most: Any, largest_code: Any) -> Any:
    """`2 ** ceil(log2(most / largest_code))` of normal numbers, exact at powers of two."""
    bits = b.bitcast(b.fdiv(most, largest_code), emit.I32)
    up = b.add(bits, emit.I32(0x007FFFFF))
    return b.bitcast(b.and_(up, emit.I32(0x7F800000)), emit.F32)


def _round_code(b: Any, x: Any, mantissa: int, least: int) -> Any:
    """Round to `mantissa` fraction bits, exponents below `least` keeping the quantum of `least`."""
    bits = b.bitcast(emit.absolute(b, x), emit.V16I)
    exponent = b.and_(bits, emit.constant(emit.V16I, 0x7F800000))
    floor = emit.constant(emit.V16I, (127 + least) << 23)
    exponent = b.select(b.icmp_signed(">", exponent, floor), exponent, floor)
    # adding and removing 1.5 * 2**(23 - mantissa) of the exponent rounds to the quantum, ties to
    # even
    shift = emit.constant(emit.V16I, (23 - mantissa) << 23)
    magic = b.bitcast(b.add(exponent, shift), emit.V16F)
    magic = b.fmul(magic, emit.constant(emit.V16F, 1.5))
    return b.fsub(b.fadd(x, magic), magic)


@_intrinsic(LANES, LANES)
def e4m3(b: Any, x: Any) -> Any:
    """Nearest E4M3 value (ties to even) of lanes within +-448."""
    return _round_code(b, x, 3, -6)


@_intrinsic(LANES, LANES)
def e2m1(b: Any, x: Any) -> Any:
    """Nearest E2M1 value (ties to even) of lanes within +-6."""
    return _round_code(b, x, 1, 0)


@_intrinsic(INT, FLOAT)
def order_key(b: Any, x: Any) -> Any:
    """An integer in 0 .. 2**32 - 1 with the order of the floats; both zeros give the same key."""
    bits = b.bitcast(b.fadd(x, emit.F32(0.0)), emit.I32)
    negative = b.icmp_signed("<", bits, emit.I32(0))
    flipped = b.select(negative, b.not_(bits), b.or_(bits, emit.bits_constant(emit.I32, 1 << 31)))
    return b.zext(flipped, emit.I64)


# --- calls and products ---------------------------------------------------------------------------


@_any(intrinsic)
def invoke(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of int64; it returns an int64."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        count = len(sig.args[1])
        items = [builder.extract_value(values[1], i) for i in range(count)]
        items = [
            context.cast(builder, item, kind, INT)
            for item, kind in zip(items, sig.args[1], strict=True)
        ]
        kind = ir.FunctionType(emit.I64, [emit.I64] * count)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), items)

    return INT(INT, arguments), generate


@_any(intrinsic(prefer_literal=True))
def product_kernel(typing_context: Any, kind: Any, arguments: Any) -> Any:
    """The whole product kernel of the weight format with the literal ggml number `kind`.

    `arguments` is the tuple that `tiles.emit_product` documents.
    """

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        items = [builder.extract_value(values[1], i) for i in range(len(sig.args[1]))]
        form = BY_KIND[sig.args[0].literal_value]
        tiles.emit_product(builder, form, target_of(context), items)
        return context.get_dummy_value()

    return types.void(kind, arguments), generate


@_any(intrinsic(prefer_literal=True))
def rounded_product_kernel(typing_context: Any, kind: Any, arguments: Any) -> Any:
    """Like `product_kernel`, for activation rows rounded to 8 bits (see `int8.emit_product`)."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        items = [builder.extract_value(values[1], i) for i in range(len(sig.args[1]))]
        form = BY_KIND[sig.args[0].literal_value]
        int8.emit_product(builder, form, target_of(context), items)
        return context.get_dummy_value()

    return types.void(kind, arguments), generate


@_any(intrinsic(prefer_literal=True))
def decode_kernel(typing_context: Any, kind: Any, arguments: Any) -> Any:
    """Decode one row of the weight format with the literal ggml number `kind`.

    `arguments` is the row's address, the output's, the number of 16-lane vectors and the tables.
    """

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        items = [builder.extract_value(values[1], i) for i in range(len(sig.args[1]))]
        form = BY_KIND[sig.args[0].literal_value]
        builder.call(tiles.decoder(builder, form, target_of(context)), items)
        return context.get_dummy_value()

    return types.void(kind, arguments), generate


def _emitter(name: str, emitter: Callable[..., None]) -> Any:
    @intrinsic
    def call(typing_context: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            items = [builder.extract_value(values[0], i) for i in range(len(sig.args[0]))]
            emitter(builder, target_of(context), items)
            return context.get_dummy_value()

        return types.void(arguments), generate

    call.__doc__ = emitter.__doc__
    return call


scores = _emitter("scores", tiles.emit_scores)
block_scores = _emitter("block_scores", tiles.emit_block_scores)
blend = _emitter("blend", tiles.emit_blend)
round_row = _emitter("round_row", rounding.emit_round)
