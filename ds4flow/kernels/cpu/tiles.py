"""Matrix products as register tiles: a few weight rows times a few activation rows.

The bits of one output element depend on its weight row and its activation row only: 16-lane partial
sums, even vectors into one and odd vectors into another, added up by `tree_sums`. Tile shapes are
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
    Target,
    Value,
    Variables,
    constant,
    fma,
    load,
    loop,
    offset,
    prefetch,
    room,
    splat,
    store,
    tree_sums,
)
from ds4flow.kernels.cpu.formats import BY_KIND, MOST_RECORD, SPARE, Format

ROWS = 4  # most activation rows of a tile over stored weights
COLUMNS = 4  # most weight rows of a tile
DECODED = 4  # weight rows that are decoded together, for more rows than that
CHUNK = 16  # blocks whose records a decoder makes at a time
AHEAD = 6144  # bytes; measured: from 4096 to 8192 it matters little
CHAINS = 2  # partial sums of an output element
SUMS = 18  # vectors of partial sums of a tile over stored weights; decoding needs registers, too
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

    Arguments (i64): the address of each weight row, that of each row's records (see `Format`), of
    activation row 0 and its stride, of output (0, 0) and its row stride, the number of 16-weight
    vectors, and the lookup tables.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        _Tile(inner, form, target, weights, rows, arguments).emit()

    return function(b, f"tile_{form.name}_{weights}_{rows}", 2 * weights + 6, body)


class _Tile:
    """Some weight rows times some activation rows, decoded vector by vector."""

    def __init__(
        self,
        b: Builder,
        form: Format,
        target: Target,
        weights: int,
        rows: int,
        arguments: Sequence[Value],
    ) -> None:
        self.b, self.form, self.target, self.weights = b, form, target, weights
        self.starts, self.records = arguments[:weights], arguments[weights : 2 * weights]
        x, stride, self.y, self.y_stride, self.vectors, self.tables = arguments[2 * weights :]
        self.inputs = [b.add(x, b.mul(stride, I64(m))) if m else x for m in range(rows)]
        self.sums = Variables(b, V16F, CHAINS * weights * rows, constant(V16F, 0.0))

    def emit(self) -> None:
        """The loops over all vectors, the sums and their stores."""
        b, per_block = self.b, self.form.weights // LANES
        if per_block == 1:
            self._single()
        else:
            with loop(b, I64(0), b.lshr(self.vectors, I64(per_block.bit_length() - 1))) as block:
                self._block(block, per_block)
        for m in range(len(self.inputs)):
            totals = []
            for n in range(self.weights):
                place = CHAINS * (m * self.weights + n)
                totals.append(b.fadd(self.sums[place], self.sums[place + 1]))
            _store_sums(b, totals, b.add(self.y, b.mul(self.y_stride, I64(m))))

    def _single(self) -> None:
        """Blocks of one vector: two a step, so that even and odd ones keep their own sums."""
        b, size = self.b, self.form.size
        steps = b.lshr(self.vectors, I64(1))

        def at(first: Value, places: int) -> None:
            for place in range(places):
                blocks = [
                    offset(b, b.add(start, b.mul(first, I64(size))), place * size)
                    for start in self.starts
                ]
                if self.form is not PLAIN:  # float32 rows are mostly decoded ones, in the cache
                    for block in blocks:
                        fetch_ahead(b, block, size)
                self._step(blocks, self.records, I64(0), b.shl(first, I64(6)), place)

        with loop(b, I64(0), steps) as step:
            at(b.shl(step, I64(1)), CHAINS)
        done = b.shl(steps, I64(1))
        with b.if_then(b.icmp_signed("<", done, self.vectors)):
            at(done, 1)

    def _block(self, block: Value, per_block: int) -> None:
        b, form = self.b, self.form
        starts = [b.add(start, b.mul(block, I64(form.size))) for start in self.starts]
        records = [b.add(made, b.mul(block, I64(form.record))) for made in self.records]
        for start in starts:
            fetch_ahead(b, start, form.size)
        byte = b.mul(block, I64(4 * form.weights))
        steps = per_block // form.step
        if steps == 1:
            self._step(starts, records, I64(0), byte, 0)
            return
        with loop(b, I64(0), I64(steps)) as part:
            at = b.add(byte, b.mul(part, I64(64 * form.step)))
            self._step(starts, records, part, at, 0)

    def _step(
        self,
        blocks: Sequence[Value],
        records: Sequence[Value],
        part: Value,
        byte: Value,
        place: int,
    ) -> None:
        """Add the vectors of one step; `byte` is the activations' offset, `place` the first's."""
        b, form = self.b, self.form
        decoders = [
            form.decode(b, block, record, part, self.tables, self.target)
            for block, record in zip(blocks, records, strict=True)
        ]
        for number in range(place, place + form.step):
            decoded = [next(decoder) for decoder in decoders]
            for m, row in enumerate(self.inputs):
                values = load(b, b.add(row, byte), V16F, 64 * number)
                for n, weight in enumerate(decoded):
                    sum_ = CHAINS * (m * self.weights + n) + number % CHAINS
                    self.sums[sum_] = fma(b, weight, values, self.sums[sum_])


def _store_sums(b: Builder, totals: Sequence[Value], out: Value) -> None:
    """Write the sums of the lanes of some vectors next to each other."""
    done = 0
    for size in (4, 2, 1):
        while len(totals) - done >= size:
            store(b, tree_sums(b, totals[done : done + size]), out, 4 * done)
            done += size


def plain_tile(b: Builder, weights: int, rows: int, *, ahead: bool) -> Value:
    """A larger tile of float32 weight rows, which keeps one of the two partial sums at a time.

    Arguments (i64): the address of each weight row, of activation row 0 and its stride, of output
    (0, 0) and its row stride, the number of vectors. `ahead`: ask for what follows the weight rows.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        starts = arguments[:weights]
        x, x_stride, y, y_stride, vectors = arguments[weights:]
        inputs = [inner.add(x, inner.mul(x_stride, I64(m))) if m else x for m in range(rows)]
        count = weights * rows
        even = Variables(inner, V16F, count, constant(V16F, 0.0))
        for chain in range(CHAINS):
            sums = Variables(inner, V16F, count, constant(V16F, 0.0))
            steps = inner.lshr(inner.add(vectors, I64(1 - chain)), I64(1))
            with loop(inner, I64(0), steps) as step:
                at = inner.shl(step, I64(7))
                if ahead and chain == 0:
                    for row in starts:
                        fetch_ahead(inner, inner.add(row, at), 128)
                decoded = [load(inner, inner.add(row, at), V16F, 64 * chain) for row in starts]
                for m, row in enumerate(inputs):
                    values = load(inner, inner.add(row, at), V16F, 64 * chain)
                    for n, weight in enumerate(decoded):
                        place = m * weights + n
                        sums[place] = fma(inner, weight, values, sums[place])
            if chain == 0:
                for place in range(count):
                    even[place] = sums[place]
                continue
            for m in range(rows):
                totals = [
                    inner.fadd(even[m * weights + n], sums[m * weights + n]) for n in range(weights)
                ]
                _store_sums(inner, totals, inner.add(y, inner.mul(y_stride, I64(m))))

    return function(b, f"plain_{weights}_{rows}_{ahead:d}", weights + 5, body)


def decoder(b: Builder, form: Format, target: Target) -> Value:
    """The function that decodes one row: its address, the output, the vectors, the tables."""

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        row, out, vectors, tables = arguments
        parts = form.weights // LANES
        blocks = inner.lshr(vectors, I64(parts.bit_length() - 1))
        records = room(inner, CHUNK * form.record + SPARE)

        def decode(first: Value, count: Value) -> None:
            start = inner.add(row, inner.mul(first, I64(form.size)))
            if form.scale is not None:
                form.scale(inner, start, count, records, tables, target)
            with loop(inner, I64(0), count) as block:
                at = inner.add(start, inner.mul(block, I64(form.size)))
                fetch_ahead(inner, at, form.size)
                made = inner.add(records, inner.mul(block, I64(form.record)))
                to = inner.add(out, inner.mul(inner.add(first, block), I64(4 * form.weights)))
                with loop(inner, I64(0), I64(parts // form.step)) as part:
                    place = inner.add(to, inner.mul(part, I64(64 * form.step)))
                    decoded = form.decode(inner, at, made, part, tables, target)
                    for number, weight in enumerate(decoded):
                        store(inner, weight, place, 64 * number)

        chunks = inner.udiv(inner.add(blocks, I64(CHUNK - 1)), I64(CHUNK))
        with loop(inner, I64(0), chunks) as chunk:
            first = inner.mul(chunk, I64(CHUNK))
            rest = inner.sub(blocks, first)
            few = inner.icmp_signed("<", rest, I64(CHUNK))
            decode(first, inner.select(few, rest, I64(CHUNK)))

    return function(b, f"decode_{form.name}", 4, body)


def scaler(b: Builder, form: Format, target: Target) -> Value:
    """The function that writes the records of one row: its address, the output, vectors, tables.

    A function of its own, so that what it writes is read again from memory, where a load into all
    lanes is free, instead of being kept in registers and shuffled.
    """

    def body(inner: Builder, arguments: Sequence[Value]) -> None:
        row, out, vectors, tables = arguments
        parts = form.weights // LANES
        if form.scale is not None:
            blocks = inner.lshr(vectors, I64(parts.bit_length() - 1))
            form.scale(inner, row, blocks, out, tables, target)

    return function(b, f"records_{form.name}", 4, body)


def groups(
    b: Builder, count: Value, sizes: Sequence[int], run: Callable[[int, Value], None]
) -> None:
    """Emit `run(size, first)` for as many groups of `sizes[0]` as fit into `count`.

    The rest is split into the sizes that follow, largest first; the last must be 1.
    """
    first = I64(0)
    for place, size in enumerate(sizes):
        fit = b.sdiv(b.sub(count, first), I64(size)) if size > 1 else b.sub(count, first)
        once = place > 0 and 2 * size > sizes[place - 1] - 1

        def at(i: Value, size: int = size, first: Value = first) -> Value:
            return b.add(first, b.mul(i, I64(size)))

        if once:
            with b.if_then(b.icmp_signed(">", fit, I64(0))):
                run(size, first)
        else:
            with loop(b, I64(0), fit) as i:
                run(size, at(i))
        first = at(fit)


@dataclass(frozen=True)
class Rows:
    """Activation and output rows of a product: addresses, strides in bytes, number of rows.

    `ahead`: whether the weight rows are read for the first time, one after the other.
    """

    x: Value
    x_stride: Value
    count: Value
    y: Value
    y_stride: Value
    vectors: Value
    ahead: bool = False

    def times(
        self,
        b: Builder,
        target: Target,
        length: Value,
        column: Value,
        find: Callable[[Value], Value],
    ) -> None:
        """Multiply all rows with `length` float32 rows, whose addresses `find` gives by number.

        The results go to the columns from `column` on. A few activation rows meet all weight rows
        before the next few do, because they stay in the cache meanwhile.
        """
        most, sizes = (COLUMNS, (6, 4, 3, 2, 1)) if target.wide else (2, (2, 1))

        def run(size: int, m: Value) -> None:
            start = b.add(self.x, b.mul(m, self.x_stride))
            place = b.add(self.y, b.mul(m, self.y_stride))

            def multiply(together: int, n: Value) -> None:
                weights = [find(b.add(n, I64(i))) for i in range(together)]
                out = b.add(place, b.shl(b.add(column, n), I64(2)))
                self._multiply(b, target, weights, size, start, out)

            groups(b, length, (most, 1), multiply)

        groups(b, self.count, sizes, run)

    def _multiply(
        self,
        b: Builder,
        target: Target,
        weights: Sequence[Value],
        rows: int,
        x: Value,
        y: Value,
    ) -> None:
        if len(weights) * rows > (12 if target.wide else 2):  # two sums each: too many registers
            shared = (x, self.x_stride, y, self.y_stride, self.vectors)
            made = plain_tile(b, len(weights), rows, ahead=self.ahead)
            b.call(made, (*weights, *shared))
            return
        made = tile(b, PLAIN, target, len(weights), rows)
        b.call(made, (*weights, *weights, x, self.x_stride, y, self.y_stride, self.vectors, I64(0)))


def emit_product(b: Builder, form: Format, target: Target, arguments: Sequence[Value]) -> None:
    """Output columns `first .. last-1` of `y [m, n] = x [m, k] @ weights.T`.

    Arguments (i64): weights and their row stride, k, x, its row stride, m, y, its row stride,
    first, last, scratch (see `scratch_bytes`), tables. Strides are in bytes. Up to four activation
    rows use each weight vector as soon as it is decoded; more use rows decoded into `scratch`.
    """
    weights, stride, k, x, x_stride, count, y, y_stride, first, last, scratch, tables = arguments
    vectors = b.lshr(k, I64(4))
    rows = Rows(x, x_stride, count, y, y_stride, vectors)
    columns = b.sub(last, first)

    def start(n: Value) -> Value:
        return b.add(weights, b.mul(n, stride))

    def decoded(place: Value) -> Value:
        return b.add(scratch, b.mul(b.shl(vectors, I64(6)), place))

    with b.if_then(b.icmp_signed(">", count, I64(ROWS))):
        batches = b.sdiv(b.add(columns, I64(DECODED - 1)), I64(DECODED))
        with loop(b, I64(0), batches) as batch:
            base = b.add(first, b.mul(batch, I64(DECODED)))
            rest = b.sub(last, base)
            here = b.select(b.icmp_signed("<", rest, I64(DECODED)), rest, I64(DECODED))
            if form is not PLAIN:
                with loop(b, I64(0), here) as i:
                    made = (start(b.add(base, i)), decoded(i), vectors, tables)
                    b.call(decoder(b, form, target), made)

            def find(place: Value, base: Value = base) -> Value:
                return start(b.add(base, place)) if form is PLAIN else decoded(place)

            rows.times(b, target, here, base, find)
    for size in range(1, ROWS + 1):
        with b.if_then(b.icmp_signed("==", count, I64(size))):
            most = columns_together(form, target, size)

            def fused(together: int, n: Value, size: int = size, most: int = most) -> None:
                n = b.add(first, n)
                starts = [start(b.add(n, I64(i))) for i in range(together)]
                records = [scratch] * together
                if form.scale is not None:
                    each = b.mul(vectors, I64(LANES * form.record // form.weights))
                    each = b.and_(b.add(each, I64(SPARE + 63)), I64(-64))
                    records = [b.add(scratch, b.mul(each, I64(i))) for i in range(together)]
                    for row, place in zip(starts, records, strict=True):
                        b.call(scaler(b, form, target), (row, place, vectors, tables))
                out = b.add(y, b.shl(n, I64(2)))
                if together < most and size > 1:  # rare (a share's rest): not worth a tile
                    with loop(b, I64(0), I64(size)) as m:
                        row, place = b.add(x, b.mul(m, x_stride)), b.add(out, b.mul(m, y_stride))
                        shared = (row, x_stride, place, y_stride, vectors, tables)
                        b.call(tile(b, form, target, 1, 1), (*starts, *records, *shared))
                    return
                made = tile(b, form, target, together, size)
                b.call(made, (*starts, *records, x, x_stride, out, y_stride, vectors, tables))

            groups(b, columns, (most, 1) if most > 1 else (1,), fused)


def columns_together(form: Format, target: Target, rows: int) -> int:
    """Weight rows of a tile: as many as the vector registers hold sums for.

    One or two activation rows with a simple format wait for memory, where fewer streams are better.
    """
    if rows < 3 and form is not PLAIN and form.weights <= 32:
        return 1 + rows
    return max(1, min(COLUMNS, (SUMS if target.wide else SUMS // 2) // (rows * CHAINS)))


def scratch_bytes(columns: int) -> int:
    """Room that a product kernel needs for weight rows of `columns` weights."""
    records = COLUMNS * (columns // LANES * MOST_RECORD + SPARE + 64)
    return max(4 * DECODED * columns, records)


def emit_scores(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """`y [m, n] = x [m, k] @ rows.T` for float32 rows at the addresses in a list.

    Arguments (i64): the address list, the number of rows, k, x, its stride, m, y, its stride.
    """
    listed, length, k, x, x_stride, count, y, y_stride = arguments
    rows = Rows(x, x_stride, count, y, y_stride, b.lshr(k, I64(4)))
    rows.times(b, target, length, I64(0), lambda n: load(b, b.add(listed, b.shl(n, I64(3))), I64))


def emit_block_scores(b: Builder, target: Target, arguments: Sequence[Value]) -> None:
    """The same for rows that lie one after the other, the first at the address given first."""
    first, length, k, x, x_stride, count, y, y_stride = arguments
    rows = Rows(x, x_stride, count, y, y_stride, b.lshr(k, I64(4)), ahead=True)
    rows.times(b, target, length, I64(0), lambda n: b.add(first, b.mul(n, b.shl(k, I64(2)))))


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

        groups(b, count, (4, 3, 2, 1), run)

    groups(b, b.lshr(k, I64(4)), (4, 3, 2, 1), chunk)


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
