"""Matrix products as register tiles: a few weight rows times a few activation rows.

The bits of one output element depend on its weight row and its activation row only: 16-lane partial
sums, even vectors into one and odd vectors into another, added up by `tree_sum`. Tile shapes are
for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir  # type: ignore[import-untyped]

from ds4flow.kernels.cpu.emit import (
    F32,
    I64,
    LANES,
    V16F,
    Builder,
    Value,
    Variables,
    constant,
    fma,
    load,
    loop,
    offset,
    prefetch,
    splat,
    store,
    tree_sum,
)
from ds4flow.kernels.cpu.formats import BY_KIND, Format, Target

ROWS = 4  # activation rows of the largest tile
DECODED = 3  # most decoded weight rows of a tile
AHEAD = 6144  # bytes; measured: from 4096 to 8192 it matters little
CHAINS = 2  # partial sums of an output element
VOID = ir.VoidType()
PLAIN = BY_KIND[0]  # float32


def function(
    b: Builder, name: str, count: int, body: Callable[[Builder, Sequence[Value]], None]
) -> Value:
    """A private function of `count` i64 arguments in the module under construction, made once."""
    existing = b.module.globals.get(name)
    if existing is not None:
        return existing
    made = ir.Function(b.module, ir.FunctionType(VOID, [I64] * count), name)
    made.linkage = "internal"
    made.attributes.add("noinline")
    inner = ir.IRBuilder(made.append_basic_block("entry"))
    # the entry block holds stack slots only
    start = made.append_basic_block("start")
    inner.branch(start)
    inner.position_at_end(start)
    body(inner, made.args)
    inner.ret_void()
    return made


def fetch_ahead(b: Builder, address: Value, size: int) -> None:
    """Ask for the `size` bytes that follow AHEAD bytes after an address.

    Hardware prefetching stops at the end of a page, and a matrix streams through many. Asking
    beyond the end of a matrix does nothing.
    """
    for line in range(0, size, 64):
        prefetch(b, offset(b, address, AHEAD + line))


def tile(b: Builder, form: Format, target: Target, weights: int, rows: int) -> Value:
    """The tile function of `weights` weight rows and `rows` activation rows.

    Arguments (i64): the address of each weight row, that of each row's scales (see `Format`), of
    activation row 0 and its stride, of output (0, 0) and its row stride, the number of 16-weight
    vectors, and the lookup tables.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        _tile_body(inner, form, target, weights, rows, arguments)

    return function(b, f"tile_{form.name}_{weights}_{rows}", 2 * weights + 6, body)


def _tile_body(
    b: Builder, form: Format, target: Target, weights: int, rows: int, arguments: Sequence[Value]
) -> None:
    starts, scales = arguments[:weights], arguments[weights : 2 * weights]
    x, x_stride, y, y_stride, vectors, tables = arguments[2 * weights :]
    inputs = [b.add(x, b.mul(x_stride, I64(m))) if m else x for m in range(rows)]
    sums = Variables(b, V16F, CHAINS * weights * rows, constant(V16F, 0.0))

    def accumulate(first: Value, count: int) -> None:
        """Add the vectors of `count` blocks from number `first` on."""
        for block in range(count):
            at = b.mul(first, I64(form.size))
            factors = b.mul(first, I64(4 * form.factors))
            decoders = [
                form.decode(
                    b,
                    offset(b, b.add(start, at), block * form.size),
                    offset(b, b.add(scale, factors), 4 * form.factors * block),
                    tables,
                    target,
                )
                for start, scale in zip(starts, scales, strict=True)
            ]
            if form is not PLAIN:  # float32 rows are mostly decoded ones, in the cache already
                for start in starts:
                    fetch_ahead(b, offset(b, b.add(start, at), block * form.size), form.size)
            byte = b.mul(first, I64(4 * form.weights))
            for part in range(form.weights // LANES):
                decoded = [next(decoder) for decoder in decoders]
                number = block * (form.weights // LANES) + part
                for m, row in enumerate(inputs):
                    values = load(b, b.add(row, byte), V16F, 64 * number)
                    for n, weight in enumerate(decoded):
                        place = CHAINS * (m * weights + n) + number % CHAINS
                        sums[place] = fma(b, weight, values, sums[place])

    per_step = max(form.weights, CHAINS * LANES) // LANES  # vectors of one loop step
    blocks_per_step = per_step * LANES // form.weights
    steps = b.lshr(vectors, I64(per_step.bit_length() - 1))
    with loop(b, I64(0), steps) as step:
        accumulate(b.mul(step, I64(blocks_per_step)), blocks_per_step)
    if blocks_per_step > 1:  # an odd last vector
        done = b.mul(steps, I64(blocks_per_step))
        with b.if_then(b.icmp_signed("<", done, vectors)):
            accumulate(done, 1)
    for m in range(rows):
        for n in range(weights):
            place = CHAINS * (m * weights + n)
            total = tree_sum(b, b.fadd(sums[place], sums[place + 1]))
            store(b, total, b.add(y, b.mul(y_stride, I64(m))), 4 * n)


def decoder(b: Builder, form: Format, target: Target) -> Value:
    """The function that decodes one row: its address, the output, the vectors, the tables."""

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        row, out, vectors, tables = arguments
        parts = form.weights // LANES
        blocks = inner.lshr(vectors, I64(parts.bit_length() - 1))
        room = inner.alloca(ir.ArrayType(F32, max(form.factors, 1)))
        scales = inner.ptrtoint(room, I64)
        with loop(inner, I64(0), blocks) as block:
            at = inner.add(out, inner.mul(block, I64(form.weights * 4)))
            start = inner.add(row, inner.mul(block, I64(form.size)))
            fetch_ahead(inner, start, form.size)
            if form.scale is not None:
                form.scale(inner, start, scales, target)
            for part, weight in enumerate(form.decode(inner, start, scales, tables, target)):
                store(inner, weight, at, 64 * part)

    return function(b, f"decode_{form.name}", 4, body)


def scaler(b: Builder, form: Format, target: Target) -> Value:
    """The function that writes the scales of one row: its address, the output, the vectors.

    A function of its own, so that what it writes is read again from memory, where a load into all
    lanes is free, instead of being kept in registers and shuffled.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        row, out, vectors = arguments
        parts = form.weights // LANES
        with loop(inner, I64(0), inner.lshr(vectors, I64(parts.bit_length() - 1))) as block:
            start = inner.add(row, inner.mul(block, I64(form.size)))
            place = inner.add(out, inner.mul(block, I64(4 * form.factors)))
            if form.scale is not None:
                form.scale(inner, start, place, target)

    return function(b, f"scales_{form.name}", 3, body)


def groups(b: Builder, count: Value, size: int, run: Callable[[int, Value], None]) -> None:
    """Emit `run(size, first)` for groups of `size` out of `count` and for the rest."""
    full = b.sdiv(count, I64(size))
    with loop(b, I64(0), full) as i:
        run(size, b.mul(i, I64(size)))
    first = b.mul(full, I64(size))
    rest = b.sub(count, first)
    for fewer in range(1, size):
        with b.if_then(b.icmp_signed("==", rest, I64(fewer))):
            run(fewer, first)


@dataclass(frozen=True)
class Rows:
    """Activation and output rows of a product: addresses, strides in bytes, number of rows."""

    x: Value
    x_stride: Value
    count: Value
    y: Value
    y_stride: Value
    vectors: Value

    def times(self, b: Builder, target: Target, weights: list[Value], column: Value) -> None:
        """Multiply all rows with the float32 rows at some addresses, from `column` on."""
        out = b.add(self.y, b.shl(column, I64(2)))

        def run(size: int, m: Value) -> None:
            start = b.add(self.x, b.mul(m, self.x_stride))
            place = b.add(out, b.mul(m, self.y_stride))
            made = tile(b, PLAIN, target, len(weights), size)
            shared = (start, self.x_stride, place, self.y_stride, self.vectors, I64(0))
            b.call(made, (*weights, *weights, *shared))

        groups(b, self.count, ROWS, run)


def emit_product(b: Builder, form: Format, target: Target, arguments: Sequence[Value]) -> None:
    """Output columns `first .. last-1` of `y [m, n] = x [m, k] @ weights.T`.

    Arguments (i64): weights and their row stride, k, x, its row stride, m, y, its row stride,
    first, last, scratch (room for DECODED decoded rows, or for the scales of four), tables. Strides
    are in bytes. Up to four activation rows use each weight vector as soon as it is decoded; more
    use rows decoded into `scratch`.
    """
    weights, stride, k, x, x_stride, count, y, y_stride, first, last, scratch, tables = arguments
    vectors = b.lshr(k, I64(4))
    rows = Rows(x, x_stride, count, y, y_stride, vectors)

    def buffered(size: int, n: Value) -> None:
        n = b.add(first, n)
        decoded = []
        for i in range(size):
            row = b.add(weights, b.mul(b.add(n, I64(i)), stride))
            if form is not PLAIN:
                buffer = b.add(scratch, b.mul(b.shl(vectors, I64(6)), I64(i)))
                b.call(decoder(b, form, target), (row, buffer, vectors, tables))
                row = buffer
            decoded.append(row)
        rows.times(b, target, decoded, n)

    many = b.icmp_signed(">", count, I64(ROWS))
    with b.if_then(many):
        groups(b, b.sub(last, first), decoded_together(target), buffered)
    for size in range(1, ROWS + 1):
        with b.if_then(b.icmp_signed("==", count, I64(size))):

            def fused(columns: int, n: Value, size: int = size) -> None:
                n = b.add(first, n)
                starts = [b.add(weights, b.mul(b.add(n, I64(i)), stride)) for i in range(columns)]
                scales = [scratch] * columns
                if form.scale is not None:
                    room = b.mul(vectors, I64(LANES * 4 * form.factors // form.weights))
                    scales = [b.add(scratch, b.mul(room, I64(i))) for i in range(columns)]
                    for start, place in zip(starts, scales, strict=True):
                        b.call(scaler(b, form, target), (start, place, vectors))
                out = b.add(y, b.shl(n, I64(2)))
                made = tile(b, form, target, columns, size)
                b.call(made, (*starts, *scales, x, x_stride, out, y_stride, vectors, tables))

            groups(b, b.sub(last, first), columns_together(form, target, size), fused)


def decoded_together(target: Target) -> int:
    """Decoded weight rows of a tile with ROWS activation rows, by the registers for its sums."""
    return DECODED if target.wide else 1


def columns_together(form: Format, target: Target, rows: int) -> int:
    """Weight rows of a tile over stored weights: as many as the vector registers hold sums for.

    One row alone leaves the units idle between dependent sums; the long decoders of the 256-weight
    blocks and a single activation row (where memory streams count) are best with two.
    """
    room = 24 if target.wide else 8
    most = 2 if form.weights > 32 or rows == 1 else 4
    while most > 1 and most * rows * CHAINS > room:
        most //= 2
    return most


def emit_scores(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """`y [m, n] = x [m, k] @ rows.T` for float32 rows at the addresses in a list.

    Arguments (i64): the address list, the number of rows, k, x, its stride, m, y, its stride.
    """
    listed, length, k, x, x_stride, count, y, y_stride = arguments
    rows = Rows(x, x_stride, count, y, y_stride, b.lshr(k, I64(4)))

    def run(size: int, n: Value) -> None:
        at = b.add(listed, b.shl(n, I64(3)))
        rows.times(b, target, [load(b, at, I64, 8 * i) for i in range(size)], n)

    groups(b, length, decoded_together(target), run)


def emit_blend(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """`y [m, k] = w [m, n] @ rows` for float32 rows at listed addresses, added in order.

    Arguments (i64): the address list, n, k, w, its stride, m, y, its stride.
    """
    listed, length, k, w, w_stride, count, y, y_stride = arguments

    def chunk(vectors: int, first: Value) -> None:
        byte = b.shl(first, I64(6))

        def run(rows: int, m: Value) -> None:
            weights = b.add(w, b.mul(m, w_stride))
            out = b.add(b.add(y, byte), b.mul(m, y_stride))
            made = _blend_tile(b, rows, vectors)
            b.call(made, (listed, length, byte, weights, w_stride, out, y_stride))

        groups(b, count, ROWS, run)

    groups(b, b.lshr(k, I64(4)), 4, chunk)


def _blend_tile(b: Builder, rows: int, vectors: int) -> Value:
    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        listed, length, byte, w, w_stride, y, y_stride = arguments
        sums = Variables(inner, V16F, rows * vectors, constant(V16F, 0.0))
        weights = [inner.add(w, inner.mul(w_stride, I64(m))) for m in range(rows)]
        with loop(inner, I64(0), length) as i:
            row = inner.add(load(inner, inner.add(listed, inner.shl(i, I64(3))), I64), byte)
            values = [load(inner, row, V16F, 64 * v) for v in range(vectors)]
            for m in range(rows):
                at = inner.add(weights[m], inner.shl(i, I64(2)))
                weight = splat(inner, load(inner, at, F32))
                for v in range(vectors):
                    place = m * vectors + v
                    sums[place] = fma(inner, weight, values[v], sums[place])
        for m in range(rows):
            out = inner.add(y, inner.mul(y_stride, I64(m)))
            for v in range(vectors):
                store(inner, sums[m * vectors + v], out, 64 * v)

    return function(b, f"blend_{rows}_{vectors}", 7, body)
