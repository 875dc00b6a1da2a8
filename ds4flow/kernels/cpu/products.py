"""Matrix products on stored weights, one kernel a format, and their distribution over threads.

A thread computes whole output elements, and an element's bits do not depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Callable

from ds4flow.kernels.cpu.lanes import (
    decode_kernel,
    get,
    invoke,
    product_kernel,
    put,
    round_row,
    rounded_product_kernel,
)
from ds4flow.kernels.cpu.layout import (
    CONTEXT_BATCH,
    CONTEXT_JOB_FIELDS,
    CONTEXT_PRODUCTS_JOB,
    CONTEXT_ROUNDED,
    CONTEXT_RUNNER,
    CONTEXT_SCRATCH,
    CONTEXT_SCRATCH_STRIDE,
    CONTEXT_TABLES,
    CONTEXT_THREADS,
    MATRIX_ADDRESS,
    MATRIX_COLUMNS,
    MATRIX_KERNEL,
    MATRIX_ROUNDED,
    MATRIX_ROWS,
    MATRIX_STRIDE,
    TASK_COUNT,
    TASK_MATRIX,
    TASK_ROUNDED,
    TASK_SIZE,
    TASK_X,
    TASK_X_STRIDE,
    TASK_Y,
    TASK_Y_STRIDE,
)
from ds4flow.kernels.cpu.library import helper
from ds4flow.kernels.cpu.rounding import row_size

TILE_COLUMNS = 12  # a multiple of the weight rows of every tile
PARALLEL_WORK = 1 << 17  # multiplications below which a second thread costs more than it saves


# Every format's kernel: weights, row stride, k, x, its row stride, rows, y, its row stride, first
# and last output column, scratch, tables (see tiles.emit_product). Written out because numba
# caches by function.


def product_f32(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Float32 weights."""
    product_kernel(0, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_f16(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Half-precision weights."""
    product_kernel(1, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_bf16(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """bfloat16 weights."""
    product_kernel(30, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_q8_0(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q8_0 weights."""
    product_kernel(8, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_q4_k(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q4_K weights."""
    product_kernel(12, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_q2_k(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q2_K weights."""
    product_kernel(10, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_iq2_xxs(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """IQ2_XXS weights."""
    product_kernel(16, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def product_mxfp4(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """MXFP4 weights."""
    product_kernel(39, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


PRODUCTS: dict[str, Callable[..., int]] = {
    "F32": product_f32,
    "F16": product_f16,
    "BF16": product_bf16,
    "Q8_0": product_q8_0,
    "Q4_K": product_q4_k,
    "Q2_K": product_q2_k,
    "IQ2_XXS": product_iq2_xxs,
    "MXFP4": product_mxfp4,
}


# The same for activations rounded to 8 bits: x and its row stride are those of the rounded rows.


def rounded_q8_0(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q8_0 weights, rounded activations."""
    rounded_product_kernel(8, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def rounded_q4_k(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q4_K weights, rounded activations."""
    rounded_product_kernel(12, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def rounded_q2_k(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """Q2_K weights, rounded activations."""
    rounded_product_kernel(10, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def rounded_iq2_xxs(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """IQ2_XXS weights, rounded activations."""
    rounded_product_kernel(16, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


def rounded_mxfp4(
    w: int,
    ws: int,
    k: int,
    x: int,
    xs: int,
    m: int,
    y: int,
    ys: int,
    n0: int,
    n1: int,
    r: int,
    t: int,
) -> int:
    """MXFP4 weights, rounded activations."""
    rounded_product_kernel(39, (w, ws, k, x, xs, m, y, ys, n0, n1, r, t))
    return 0


ROUNDED_PRODUCTS: dict[str, Callable[..., int]] = {
    "Q8_0": rounded_q8_0,
    "Q4_K": rounded_q4_k,
    "Q2_K": rounded_q2_k,
    "IQ2_XXS": rounded_iq2_xxs,
    "MXFP4": rounded_mxfp4,
}


# Every format's look-up of rows: number list, rows, vectors, first row's address, row stride,
# output, tables.


def rows_f32(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of float32 weights by number."""
    for i in range(m):
        decode_kernel(0, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_f16(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of half-precision weights by number."""
    for i in range(m):
        decode_kernel(1, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_bf16(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of bfloat16 weights by number."""
    for i in range(m):
        decode_kernel(30, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_q8_0(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of Q8_0 weights by number."""
    for i in range(m):
        decode_kernel(8, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_q4_k(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of Q4_K weights by number."""
    for i in range(m):
        decode_kernel(12, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_q2_k(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of Q2_K weights by number."""
    for i in range(m):
        decode_kernel(10, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_iq2_xxs(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of IQ2_XXS weights by number."""
    for i in range(m):
        decode_kernel(16, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


def rows_mxfp4(
    ids: int, m: int, vectors: int, w: int, ws: int, y: int, t: int, a: int, b: int
) -> int:
    """Decode rows of MXFP4 weights by number."""
    for i in range(m):
        decode_kernel(39, (w + ws * get(ids + 8 * i), y + 64 * vectors * i, vectors, t))
    return 0


ROW_LOOKUPS: dict[str, Callable[..., int]] = {
    "F32": rows_f32,
    "F16": rows_f16,
    "BF16": rows_bf16,
    "Q8_0": rows_q8_0,
    "Q4_K": rows_q4_k,
    "Q2_K": rows_q2_k,
    "IQ2_XXS": rows_iq2_xxs,
    "MXFP4": rows_mxfp4,
}


@helper
def aligned(at: int) -> int:
    """The next address at the start of a cache line."""
    return (at + 63) & -64


# --- batches of products --------------------------------------------------------------------------


@helper
def task(at: int, matrix: int, x: int, x_stride: int, count: int, y: int, y_stride: int) -> int:
    """Append a product to a batch; returns where the next one goes. Strides in bytes."""
    put(at + TASK_MATRIX, matrix)
    put(at + TASK_X, x)
    put(at + TASK_X_STRIDE, x_stride)
    put(at + TASK_COUNT, count)
    put(at + TASK_Y, y)
    put(at + TASK_Y_STRIDE, y_stride)
    return at + TASK_SIZE


@helper
def _columns(context: int, at: int, first: int, last: int, thread: int) -> None:
    """Output columns `first .. last-1` of one product."""
    matrix = get(at + TASK_MATRIX)
    scratch = get(context + CONTEXT_SCRATCH) + thread * get(context + CONTEXT_SCRATCH_STRIDE)
    x, x_stride = get(at + TASK_X), get(at + TASK_X_STRIDE)
    if get(matrix + MATRIX_ROUNDED):
        x, x_stride = get(at + TASK_ROUNDED), row_bytes(get(matrix + MATRIX_COLUMNS))
    invoke(
        get(matrix + MATRIX_KERNEL),
        (
            get(matrix + MATRIX_ADDRESS),
            get(matrix + MATRIX_STRIDE),
            get(matrix + MATRIX_COLUMNS),
            x,
            x_stride,
            get(at + TASK_COUNT),
            get(at + TASK_Y),
            get(at + TASK_Y_STRIDE),
            first,
            last,
            scratch,
            get(context + CONTEXT_TABLES),
        ),
    )


@helper
def run(context: int, tasks: int, end: int) -> None:
    """Compute a batch of products that do not depend on each other."""
    invoke(get(context + CONTEXT_BATCH), (context, tasks, end))


row_bytes = helper(row_size)


@helper
def _same_rows(one: int, other: int) -> bool:
    """Whether two products of a batch take the same rounded rows."""
    return (
        get(get(one + TASK_MATRIX) + MATRIX_ROUNDED)
        == get(get(other + TASK_MATRIX) + MATRIX_ROUNDED)
        and get(one + TASK_X) == get(other + TASK_X)
        and get(one + TASK_X_STRIDE) == get(other + TASK_X_STRIDE)
        and get(one + TASK_COUNT) == get(other + TASK_COUNT)
        and get(get(one + TASK_MATRIX) + MATRIX_COLUMNS)
        == get(get(other + TASK_MATRIX) + MATRIX_COLUMNS)
    )


@helper
def _round_rows(at: int, out: int) -> int:
    """Round the activations of a product to 8 bits; returns the end of what was written."""
    matrix = get(at + TASK_MATRIX)
    columns, order = get(matrix + MATRIX_COLUMNS), get(matrix + MATRIX_ROUNDED) - 1
    for i in range(get(at + TASK_COUNT)):
        round_row((get(at + TASK_X) + get(at + TASK_X_STRIDE) * i, columns, out, order))
        out += row_bytes(columns)
    return out


def batch(context: int, tasks: int, end: int) -> int:
    """Kernel of `run`: on all threads when the work is worth it."""
    total, work = 0, 0
    rounded = get(context + CONTEXT_ROUNDED)
    at = tasks
    while at < end:
        matrix = get(at + TASK_MATRIX)
        if get(matrix + MATRIX_ROUNDED):
            if at > tasks and _same_rows(at, at - TASK_SIZE):
                put(at + TASK_ROUNDED, get(at - TASK_SIZE + TASK_ROUNDED))
            else:
                put(at + TASK_ROUNDED, rounded)
                rounded = _round_rows(at, rounded)
        columns = get(matrix + MATRIX_ROWS)
        total += columns
        work += columns * get(matrix + MATRIX_COLUMNS) * get(at + TASK_COUNT)
        at += TASK_SIZE
    put(context + CONTEXT_JOB_FIELDS, tasks)
    put(context + CONTEXT_JOB_FIELDS + 8, end)
    put(context + CONTEXT_JOB_FIELDS + 16, total)
    job(context, get(context + CONTEXT_PRODUCTS_JOB), work)
    return 0


@helper
def job(context: int, kernel: int, work: int) -> None:
    """Run a job kernel (context, share, shares, thread) on all threads, or here if it is small."""
    if get(context + CONTEXT_THREADS) == 1 or work < PARALLEL_WORK:
        invoke(kernel, (context, 0, 1, 0))
    else:
        invoke(get(context + CONTEXT_RUNNER), (context, kernel))


@helper
def _part(total: int, share: int, shares: int) -> int:
    """Where a share begins: at whole tiles, because single columns are slow."""
    return total if share == shares else total * share // shares // TILE_COLUMNS * TILE_COLUMNS


def products_job(context: int, share: int, shares: int, thread: int) -> int:
    """Job kernel: one share of the columns of a batch (all products' columns in a row)."""
    tasks = get(context + CONTEXT_JOB_FIELDS)
    end = get(context + CONTEXT_JOB_FIELDS + 8)
    total = get(context + CONTEXT_JOB_FIELDS + 16)
    first, last = _part(total, share, shares), _part(total, share + 1, shares)
    start = 0
    at = tasks
    while at < end:
        columns = get(get(at + TASK_MATRIX) + MATRIX_ROWS)
        low, high = max(first - start, 0), min(last - start, columns)
        if low < high:
            _columns(context, at, low, high, thread)
        start += columns
        at += TASK_SIZE
    return 0


def linear(
    context: int, tasks: int, matrix: int, x: int, m: int, y: int, a: int, b: int, c: int
) -> int:
    """`y [m, rows] = x [m, columns] @ matrix.T`, contiguous; `tasks` is room for one task."""
    end = task(
        tasks,
        matrix,
        x,
        4 * get(matrix + MATRIX_COLUMNS),
        m,
        y,
        4 * get(matrix + MATRIX_ROWS),
    )
    run(context, tasks, end)
    return 0
