"""Attention projections, compressor, indexer and sink attention (one kernel call each).

Every row loops over exactly its own keys, window first and then compressed rows, both ascending.
"""

from __future__ import annotations

import numpy as np

from ds4flow.kernels.cpu.lanes import (
    blend,
    block_scores,
    copy,
    exp,
    fma,
    get,
    getf,
    lanes,
    larger,
    largest,
    order_key,
    put,
    put_lanes,
    putf,
    scores,
    spread,
    total,
)
from ds4flow.kernels.cpu.layout import (
    ATTENTION_KV,
    ATTENTION_KV_NORM,
    ATTENTION_OUT_A,
    ATTENTION_OUT_B,
    ATTENTION_Q_A,
    ATTENTION_Q_A_NORM,
    ATTENTION_Q_B,
    ATTENTION_SINKS,
    COMPRESSOR_APE,
    COMPRESSOR_GATE,
    COMPRESSOR_KV,
    COMPRESSOR_NORM,
    CONTEXT_ARENA,
    CONTEXT_ATTEND_JOB,
    CONTEXT_DIM,
    CONTEXT_EPS,
    CONTEXT_GROUPS,
    CONTEXT_HEAD_DIM,
    CONTEXT_HEADS,
    CONTEXT_INDEX_DIM,
    CONTEXT_INDEX_FP4,
    CONTEXT_INDEX_HEADS,
    CONTEXT_INDEX_JOB,
    CONTEXT_JOB_FIELDS,
    CONTEXT_KV_FP8,
    CONTEXT_O_RANK,
    CONTEXT_Q_RANK,
    CONTEXT_ROPE_DIM,
    CONTEXT_SCRATCH,
    CONTEXT_SCRATCH_STRIDE,
    CONTEXT_TOP_K,
    CONTEXT_WINDOW,
    INDEXER_PROJ,
    INDEXER_Q_B,
    MATRIX_SIZE,
    POOL_OVERLAPPING,
    POOL_RATIO,
    POOL_ROWS,
    POOL_SCORES,
    POOL_SLOTS,
    POOL_VALUES,
    POOL_WIDTH,
    ROWS_POOL,
    ROWS_SLOTS,
    ROWS_WINDOW,
    TASK_SIZE,
)
from ds4flow.kernels.cpu.library import helper
from ds4flow.kernels.cpu.products import aligned, job, run, task
from ds4flow.kernels.cpu.rows import hadamard, norm, round_e2m1, round_e4m3, turn

ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOWEST = np.float32(-3.0e38)
HEADS_TOGETHER = 4
KEYS_TOGETHER = 64
INDEX_ROWS = 4  # rows whose index scores are made from one reading of the keys


def queries(
    context: int, layer: int, x: int, m: int, start: int, rope: int, q: int, low: int, a: int
) -> int:
    """Rotated queries `q [m, heads, head_dim]` and the low-rank query `low [m, q_rank]`."""
    tasks = get(context + CONTEXT_ARENA)
    dim, rank = get(context + CONTEXT_DIM), get(context + CONTEXT_Q_RANK)
    heads, width = get(context + CONTEXT_HEADS), get(context + CONTEXT_HEAD_DIM)
    turned, eps = get(context + CONTEXT_ROPE_DIM), getf(context + CONTEXT_EPS)
    run(context, tasks, task(tasks, get(layer + ATTENTION_Q_A), x, 4 * dim, m, low, 4 * rank))
    for i in range(m):
        row = low + 4 * rank * i
        norm(row, rank, eps, get(layer + ATTENTION_Q_A_NORM), row)
    size = 4 * heads * width
    run(context, tasks, task(tasks, get(layer + ATTENTION_Q_B), low, 4 * rank, m, q, size))
    for i in range(m):
        for h in range(heads):
            row = q + size * i + 4 * width * h
            norm(row, width, eps, 0, row)
            turn(row, width, turned, rope, start + i, ONE)
    return 0


@helper
def _round_kv(context: int, row: int, width: int) -> None:
    if get(context + CONTEXT_KV_FP8):
        round_e4m3(row, width - get(context + CONTEXT_ROPE_DIM))


@helper
def _round_index(context: int, row: int, width: int) -> None:
    if get(context + CONTEXT_INDEX_FP4):
        hadamard(row, width)
        round_e2m1(row, width)


def kv_rows(
    context: int, layer: int, x: int, m: int, start: int, rope: int, window: int, slots: int, a: int
) -> int:
    """Project, norm, rotate and round the KV rows and write them to the window ring."""
    tasks = get(context + CONTEXT_ARENA)
    made = aligned(tasks + TASK_SIZE)
    dim, width = get(context + CONTEXT_DIM), get(context + CONTEXT_HEAD_DIM)
    turned, eps = get(context + CONTEXT_ROPE_DIM), getf(context + CONTEXT_EPS)
    run(context, tasks, task(tasks, get(layer + ATTENTION_KV), x, 4 * dim, m, made, 4 * width))
    for i in range(m):
        row = window + 4 * width * ((start + i) % slots)
        norm(made + 4 * width * i, width, eps, get(layer + ATTENTION_KV_NORM), row)
        turn(row, width, turned, rope, start + i, ONE)
        _round_kv(context, row, width)
    return 0


@helper
def _pool_block(pool: int, block: int, list_: int, y: int) -> None:
    """Softmax pooling, channel by channel, of the positions of one block into `y`."""
    ratio, slots = get(pool + POOL_RATIO), get(pool + POOL_SLOTS)
    width, overlapping = get(pool + POOL_WIDTH), get(pool + POOL_OVERLAPPING)
    stride = 4 * width * (1 + overlapping)
    count = 0
    if overlapping and block > 0:  # the block before gives its first halves
        for position in range((block - 1) * ratio, block * ratio):
            put(list_ + 8 * count, stride * (position % slots))
            count += 1
    for position in range(block * ratio, (block + 1) * ratio):
        put(list_ + 8 * count, stride * (position % slots) + 4 * width * overlapping)
        count += 1
    values, gates = get(pool + POOL_VALUES), get(pool + POOL_SCORES)
    for at in range(0, 4 * width, 64):
        top = lanes(gates + get(list_) + at)
        for i in range(1, count):
            top = larger(lanes(gates + get(list_ + 8 * i) + at), top)
        weight, value = spread(ZERO), spread(ZERO)
        for i in range(count):
            place = get(list_ + 8 * i) + at
            part = exp(lanes(gates + place) - top)
            weight = weight + part
            value = fma(part, lanes(values + place), value)
        put_lanes(y + at, value / weight)


def compress(
    context: int, weights: int, pool: int, x: int, m: int, start: int, rope: int, index: int, a: int
) -> int:
    """Write the projections of each position and every row whose block is finished by them."""
    tasks = get(context + CONTEXT_ARENA)
    dim, eps = get(context + CONTEXT_DIM), getf(context + CONTEXT_EPS)
    ratio, slots, width = get(pool + POOL_RATIO), get(pool + POOL_SLOTS), get(pool + POOL_WIDTH)
    size = 4 * width * (1 + get(pool + POOL_OVERLAPPING))
    list_ = tasks + 2 * TASK_SIZE
    values = aligned(list_ + 8 * 2 * ratio)
    gates = aligned(values + size * m)
    end = task(tasks, get(weights + COMPRESSOR_KV), x, 4 * dim, m, values, size)
    end = task(end, get(weights + COMPRESSOR_GATE), x, 4 * dim, m, gates, size)
    run(context, tasks, end)
    for i in range(m):
        slot = size * ((start + i) % slots)
        copy(get(pool + POOL_VALUES) + slot, values + size * i, size)
        ape = get(weights + COMPRESSOR_APE) + size * ((start + i) % ratio)
        for at in range(0, size, 64):
            sum_ = lanes(gates + size * i + at) + lanes(ape + at)
            put_lanes(get(pool + POOL_SCORES) + slot + at, sum_)
    for block in range(start // ratio, (start + m) // ratio):
        row = get(pool + POOL_ROWS) + 4 * width * block
        _pool_block(pool, block, list_, row)
        norm(row, width, eps, get(weights + COMPRESSOR_NORM), row)
        turn(row, width, get(context + CONTEXT_ROPE_DIM), rope, block * ratio, ONE)
        if index:
            _round_index(context, row, width)
        else:
            _round_kv(context, row, width)
    return 0


# --- indexer --------------------------------------------------------------------------------------


def index_job(context: int, share: int, shares: int, thread: int) -> int:
    """Job kernel: one share of the blocks' index scores, for a few rows at once."""
    fields = context + CONTEXT_JOB_FIELDS
    q, gains, keys, out = get(fields), get(fields + 8), get(fields + 16), get(fields + 24)
    visible, rows, stride = get(fields + 32), get(fields + 40), get(fields + 48)
    width, heads = get(context + CONTEXT_INDEX_DIM), get(context + CONTEXT_INDEX_HEADS)
    scratch = get(context + CONTEXT_SCRATCH) + thread * get(context + CONTEXT_SCRATCH_STRIDE)
    size = 4 * KEYS_TOGETHER
    blocks = (visible + KEYS_TOGETHER - 1) // KEYS_TOGETHER
    for block in range(blocks * share // shares, blocks * (share + 1) // shares):
        first = block * KEYS_TOGETHER
        count = min(KEYS_TOGETHER, visible - first)
        start = keys + 4 * width * first
        block_scores((start, count, width, q, 4 * width, rows * heads, scratch, size))
        for i in range(rows):
            row, dots_ = out + stride * i + 4 * first, scratch + size * heads * i
            for at in range(0, 4 * count, 64):
                sum_ = spread(ZERO)
                for h in range(heads):
                    dots = larger(lanes(dots_ + size * h + at), spread(ZERO))
                    sum_ = fma(spread(getf(gains + 4 * (heads * i + h))), dots, sum_)
                put_lanes(row + at, sum_)
    return 0


@helper
def _select(values: int, count: int, most: int, keys: int, bins: int, out: int) -> None:
    """Write the numbers of the `most` largest of `count` values, ascending; ties to lower numbers.

    The smallest chosen key is found 11 bits at a time: histogram, then only the keys of its bin go
    on. `keys` is room for `2 * count` int64, `bins` for 2048.
    """
    for i in range(count):
        put(keys + 8 * i, order_key(getf(values + 4 * i)))
    source, remaining, needed = keys, count, most
    prefix = 0
    shift = 22
    while shift > -11:
        width = 11 if shift >= 0 else 11 + shift
        low = max(shift, 0)
        mask = (1 << width) - 1
        for i in range(mask + 1):
            put(bins + 8 * i, 0)
        for i in range(remaining):
            place = bins + 8 * ((get(source + 8 * i) >> low) & mask)
            put(place, get(place) + 1)
        bin_ = mask
        while get(bins + 8 * bin_) < needed:
            needed -= get(bins + 8 * bin_)
            bin_ -= 1
        prefix |= bin_ << low
        kept = 0
        target = keys + 8 * count
        for i in range(remaining):
            key = get(source + 8 * i)
            if ((key >> low) & mask) == bin_:
                put(target + 8 * kept, key)
                kept += 1
        source, remaining = target, kept
        shift -= 11
    # `needed` of the keys equal to `prefix` belong to the selection: the first ones
    written = 0
    for i in range(count):
        key = get(keys + 8 * i)
        if key > prefix or (key == prefix and needed > 0):
            if key == prefix:
                needed -= 1
            put(out + 8 * written, i)
            written += 1


def index_topk(
    context: int,
    indexer: int,
    pool: int,
    x: int,
    low: int,
    m: int,
    start: int,
    rope: int,
    selection: int,
) -> int:
    """Per row of `selection [m, 1 + top_k]` (int64): the number of blocks and they, ascending.

    -1 instead of the number stands for all visible blocks.
    """
    tasks = get(context + CONTEXT_ARENA)
    dim, rank = get(context + CONTEXT_DIM), get(context + CONTEXT_Q_RANK)
    width, heads = get(context + CONTEXT_INDEX_DIM), get(context + CONTEXT_INDEX_HEADS)
    most, ratio = get(context + CONTEXT_TOP_K), get(pool + POOL_RATIO)
    turned = get(context + CONTEXT_ROPE_DIM)
    size = 4 * heads * width
    q = aligned(tasks + 2 * TASK_SIZE)
    gains = q + size * m
    bins = gains + 4 * heads * m
    values = aligned(bins + 8 * 2048)
    stride = aligned(4 * ((start + m) // ratio + KEYS_TOGETHER))
    keys = values + INDEX_ROWS * stride
    end = task(tasks, get(indexer + INDEXER_Q_B), low, 4 * rank, m, q, size)
    end = task(end, get(indexer + INDEXER_PROJ), x, 4 * dim, m, gains, 4 * heads)
    run(context, tasks, end)
    scale = ONE / np.float32(np.sqrt(np.float64(width * heads)))
    i = 0
    while i < m:
        if (start + i + 1) // ratio <= most:
            put(selection + 8 * (1 + most) * i, -1)
            i += 1
            continue
        rows = min(INDEX_ROWS, m - i)
        visible = (start + i + rows) // ratio
        for row in range(i, i + rows):
            for h in range(heads):
                head = q + size * row + 4 * width * h
                turn(head, width, turned, rope, start + row, ONE)
                _round_index(context, head, width)
                gain = gains + 4 * (heads * row + h)
                putf(gain, getf(gain) * scale)
        fields = context + CONTEXT_JOB_FIELDS
        put(fields, q + size * i)
        put(fields + 8, gains + 4 * heads * i)
        put(fields + 16, get(pool + POOL_ROWS))
        put(fields + 24, values)
        put(fields + 32, visible)
        put(fields + 40, rows)
        put(fields + 48, stride)
        job(context, get(context + CONTEXT_INDEX_JOB), visible * heads * width * rows)
        for row in range(i, i + rows):
            chosen = selection + 8 * (1 + most) * row
            count = (start + row + 1) // ratio
            put(chosen, most)
            _select(values + stride * (row - i), count, most, keys, bins, chosen + 8)
        i += rows
    return 0


# --- attention ------------------------------------------------------------------------------------


@helper
def _softmax(row: int, count: int, scale: np.float32, sink: np.float32) -> np.float32:
    """Turn `count` scores (room up to a multiple of 16) into weights in place; returns their total.

    The sink's own weight is in the total only.
    """
    padded = (count + 15) // 16 * 16
    for i in range(count, padded):
        putf(row + 4 * i, LOWEST)
    factor = spread(scale)
    top = spread(sink)
    for at in range(row, row + 4 * padded, 64):
        scaled = lanes(at) * factor
        put_lanes(at, scaled)
        top = larger(scaled, top)
    peak = spread(largest(top))
    sum_ = spread(ZERO)
    for at in range(row, row + 4 * padded, 64):
        weight = exp(lanes(at) - peak)
        put_lanes(at, weight)
        sum_ = sum_ + weight
    return total(sum_) + largest(exp(spread(sink) - peak))


def attend_job(context: int, share: int, shares: int, thread: int) -> int:
    """Job kernel: one share of the (row, group of heads) pairs."""
    fields = context + CONTEXT_JOB_FIELDS
    q, out, sinks, table = get(fields), get(fields + 8), get(fields + 16), get(fields + 24)
    m, start, rope = get(fields + 32), get(fields + 40), get(fields + 48)
    heads, width = get(context + CONTEXT_HEADS), get(context + CONTEXT_HEAD_DIM)
    turned = get(context + CONTEXT_ROPE_DIM)
    scratch = get(context + CONTEXT_SCRATCH) + thread * get(context + CONTEXT_SCRATCH_STRIDE)
    scale = ONE / np.float32(np.sqrt(np.float64(width)))
    groups = (heads + HEADS_TOGETHER - 1) // HEADS_TOGETHER
    for unit in range(m * groups * share // shares, m * groups * (share + 1) // shares):
        i, first = unit // groups, unit % groups * HEADS_TOGETHER
        together = min(HEADS_TOGETHER, heads - first)
        list_, count = get(table + 16 * i), get(table + 16 * i + 8)
        stride = 4 * ((count + 15) // 16 * 16)
        place = 4 * width * (heads * i + first)
        scores((list_, count, width, q + place, 4 * width, together, scratch, stride))
        weights = scratch + stride * together
        for h in range(together):
            sum_ = _softmax(scratch + stride * h, count, scale, getf(sinks + 4 * (first + h)))
            putf(weights + 4 * h, ONE / sum_)
        blend((list_, count, width, scratch, stride, together, out + place, 4 * width))
        for h in range(together):
            row = out + place + 4 * width * h
            factor = spread(getf(weights + 4 * h))
            for at in range(row, row + 4 * width, 64):
                put_lanes(at, lanes(at) * factor)
            turn(row, width, turned, rope, start + i, -ONE)
    return 0


@helper
def _list_keys(context: int, rows: int, start: int, i: int, selection: int, list_: int) -> int:
    """Write the addresses of the keys of row `i`; returns their number."""
    position = start + i
    window, slots = get(rows + ROWS_WINDOW), get(rows + ROWS_SLOTS)
    width = get(context + CONTEXT_HEAD_DIM)
    count = 0
    for p in range(max(0, position - get(context + CONTEXT_WINDOW) + 1), position + 1):
        put(list_ + 8 * count, window + 4 * width * (p % slots))
        count += 1
    pool = get(rows + ROWS_POOL)
    if pool:
        finished = get(pool + POOL_ROWS)
        chosen = -1
        if selection:
            row = selection + 8 * (1 + get(context + CONTEXT_TOP_K)) * i
            chosen = get(row)
        if chosen < 0:
            for block in range((position + 1) // get(pool + POOL_RATIO)):
                put(list_ + 8 * count, finished + 4 * width * block)
                count += 1
        else:
            for j in range(chosen):
                put(list_ + 8 * count, finished + 4 * width * get(row + 8 + 8 * j))
                count += 1
    return count


def attend(
    context: int,
    layer: int,
    rows: int,
    q: int,
    m: int,
    start: int,
    rope: int,
    selection: int,
    out: int,
) -> int:
    """Sink attention over window and compressed rows, de-rotated: `out [m, heads, head_dim]`."""
    table = get(context + CONTEXT_ARENA)
    list_ = table + 16 * m
    keys = 0
    for i in range(m):
        count = _list_keys(context, rows, start, i, selection, list_)
        put(table + 16 * i, list_)
        put(table + 16 * i + 8, count)
        list_ += 8 * count
        keys += count
    fields = context + CONTEXT_JOB_FIELDS
    put(fields, q)
    put(fields + 8, out)
    put(fields + 16, get(layer + ATTENTION_SINKS))
    put(fields + 24, table)
    put(fields + 32, m)
    put(fields + 40, start)
    put(fields + 48, rope)
    work = keys * get(context + CONTEXT_HEADS) * get(context + CONTEXT_HEAD_DIM)
    job(context, get(context + CONTEXT_ATTEND_JOB), work)
    return 0


def attention_output(
    context: int, layer: int, heads: int, m: int, y: int, a: int, b: int, c: int, d: int
) -> int:
    """Grouped low-rank output projection of `heads [m, heads * head_dim]`: `y [m, dim]`."""
    groups, rank = get(context + CONTEXT_GROUPS), get(context + CONTEXT_O_RANK)
    size = 4 * get(context + CONTEXT_HEADS) * get(context + CONTEXT_HEAD_DIM)
    tasks = get(context + CONTEXT_ARENA)
    joined = aligned(tasks + groups * TASK_SIZE)
    end = tasks
    for g in range(groups):
        matrix = get(layer + ATTENTION_OUT_A) + MATRIX_SIZE * g
        x, part = heads + size // groups * g, joined + 4 * rank * g
        end = task(end, matrix, x, size, m, part, 4 * rank * groups)
    run(context, tasks, end)
    matrix = get(layer + ATTENTION_OUT_B)
    dim = get(context + CONTEXT_DIM)
    run(context, tasks, task(tasks, matrix, joined, 4 * rank * groups, m, y, 4 * dim))
    return 0
