"""The numba backend: every operation of the interface is one call into compiled code.

Promise: row i of an M-row call has the same bits as the row alone, for any M, thread count and CPU,
because every output element is computed in one fixed order from its own row.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from ds4flow.errors import NOT_FINITE, NumericsError, UsageError, near_match
from ds4flow.kernels.cpu import (
    attention,
    experts,
    hyper,
    layout,
    passes,
    products,
    rows,
    stack,
    threads,
    tiles,
)
from ds4flow.kernels.cpu.formats import FORMATS, lookup_tables
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.records import Records, address, put, put_float, record
from ds4flow.kernels.cpu.threads import pool
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import BLOCK, Rope
from ds4flow.model.weights import (
    CompressorWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    MtpWeights,
    TrunkWeights,
)
from ds4flow.quants import QTensor

OPERATIONS: tuple[Callable[..., int], ...] = (
    products.linear,
    products.batch,
    products.products_job,
    rows.rms_norm,
    hyper.hc_pre,
    hyper.hc_post,
    hyper.hc_head,
    attention.queries,
    attention.kv_rows,
    attention.compress,
    attention.index_topk,
    attention.index_job,
    attention.attend,
    attention.attend_job,
    attention.attention_output,
    experts.moe,
    stack.stack,
    passes.trunk,
    passes.head,
    passes.draft,
)
ACTIVATIONS = ("f32", "int8")
MOST_CACHE_RECORDS = 1 << 14
SPARE = 4096  # bytes beyond the computed size of a buffer


class Selection(list[torch.Tensor | None]):
    """The indexer's choices, with the int64 table `[M, 1 + top_k]` that kernels read."""

    def __init__(self, table: torch.Tensor) -> None:
        counts = table[:, 0].tolist()
        super().__init__(
            None if n < 0 else row[1 : 1 + n] for n, row in zip(counts, table, strict=True)
        )
        self.table = table


class CpuKernels:
    """Implements `ds4flow.kernels.interface.Kernels` with numba on the weights as stored.

    `threads` 0 means as many as torch uses; the bits do not depend on it. `activations` is "f32",
    or "int8" to round the activations that meet block formats to 8 bits in blocks of 32 (faster;
    rows are as independent of each other as with "f32", but results differ from the reference's).
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        *,
        threads: int = 0,
        activations: str = "f32",
    ) -> None:
        _check(config)
        if activations not in ACTIVATIONS:
            raise UsageError(
                f"{activations} is not an activation mode of the CPU kernels",
                f"use one of: {', '.join(ACTIVATIONS)} {near_match(activations, ACTIVATIONS)}",
            )
        self.config = config
        self.profile = profile
        self.threads = threads if threads > 0 else torch.get_num_threads()
        library.build(OPERATIONS)
        self._rounding = activations == "int8"
        self._records = Records(config, library, rounded=self._rounding)
        self._ropes: dict[int, tuple[Rope, np.ndarray, list[np.ndarray]]] = {}
        self._pools: dict[tuple[int, ...], np.ndarray] = {}
        self._rows: dict[tuple[int, ...], np.ndarray] = {}
        self._stacks: dict[tuple[int, ...], _Stack] = {}
        self._between = np.empty(0, dtype=np.uint8)
        self._between_address = 0
        self._ids = np.empty(0, dtype=np.int64)
        self._ids_address = 0
        self._trunk_pass, self._head_pass, self._draft_pass = (
            library.address(kernel) for kernel in (passes.trunk, passes.head, passes.draft)
        )
        self._tables = lookup_tables()
        self._arena = np.empty(0, dtype=np.uint8)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._rounded = np.empty(0, dtype=np.uint8)
        self._pool = pool(self.threads) if self.threads > 1 else None
        self._context = self._make_context()
        self._at = address(self._context)
        self._call: Any = library.enter()

    @property
    def passes(self) -> CpuKernels:
        """Whole passes in one call each, see `ds4flow.kernels.interface.Passes`."""
        return self

    def _make_context(self) -> np.ndarray:
        config, made = self.config, record(layout.CONTEXT_SIZE)
        for field, value in (
            (layout.CONTEXT_THREADS, self.threads),
            (layout.CONTEXT_TABLES, address(self._tables)),
            (layout.CONTEXT_BATCH, library.address(products.batch)),
            (layout.CONTEXT_PRODUCTS_JOB, library.address(products.products_job)),
            (layout.CONTEXT_ATTEND_JOB, library.address(attention.attend_job)),
            (layout.CONTEXT_INDEX_JOB, library.address(attention.index_job)),
            (layout.CONTEXT_HC_PRE, library.address(hyper.hc_pre)),
            (layout.CONTEXT_HC_POST, library.address(hyper.hc_post)),
            (layout.CONTEXT_QUERIES, library.address(attention.queries)),
            (layout.CONTEXT_KV_ROWS, library.address(attention.kv_rows)),
            (layout.CONTEXT_COMPRESS, library.address(attention.compress)),
            (layout.CONTEXT_INDEX_TOPK, library.address(attention.index_topk)),
            (layout.CONTEXT_ATTEND, library.address(attention.attend)),
            (layout.CONTEXT_ATTENTION_OUTPUT, library.address(attention.attention_output)),
            (layout.CONTEXT_MOE, library.address(experts.moe)),
            (layout.CONTEXT_STACK, library.address(stack.stack)),
            (layout.CONTEXT_HC_HEAD, library.address(hyper.hc_head)),
            (layout.CONTEXT_DIM, config.dim),
            (layout.CONTEXT_HEADS, config.heads),
            (layout.CONTEXT_HEAD_DIM, config.head_dim),
            (layout.CONTEXT_ROPE_DIM, config.rope_dim),
            (layout.CONTEXT_Q_RANK, config.q_rank),
            (layout.CONTEXT_GROUPS, config.groups),
            (layout.CONTEXT_O_RANK, config.o_rank),
            (layout.CONTEXT_WINDOW, config.window),
            (layout.CONTEXT_INDEX_HEADS, config.index_heads),
            (layout.CONTEXT_INDEX_DIM, config.index_dim),
            (layout.CONTEXT_TOP_K, config.top_k),
            (layout.CONTEXT_EXPERTS, config.experts),
            (layout.CONTEXT_USED, config.experts_used),
            (layout.CONTEXT_SINKHORN, config.sinkhorn),
            (layout.CONTEXT_KV_FP8, self.profile.kv_fp8),
            (layout.CONTEXT_INDEX_FP4, self.profile.index_fp4),
            (layout.CONTEXT_EXPERT_NORM, config.expert_norm),
        ):
            put(made, field, int(value))
        put_float(made, layout.CONTEXT_EPS, config.eps)
        put_float(made, layout.CONTEXT_EPS_HC, config.eps_hc)
        put_float(made, layout.CONTEXT_EXPERT_SCALE, config.expert_scale)
        if self._pool is not None:
            put(made, layout.CONTEXT_CONTROL, self._pool.address)
            put(made, layout.CONTEXT_RUNNER, library.address(threads.runner))
        return made

    def _enter(self, *arguments: int) -> int:
        """Call a kernel by its address with nine arguments."""
        if self._pool is not None:
            self._pool.wake()
        return int(self._call(*arguments))

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Compile what these weights need (kept on disk) and make their records."""
        needed = {self._records.kernel(weight): None for weight in weights}
        library.build(list(needed))
        for weight in weights:
            self._records.matrices(weight)

    # --- buffers and records ----------------------------------------------------------------------

    def _reserve(self, m: int, keys: int = 0, visible: int = 0, columns: int = 0) -> None:
        """Make room for the temporaries of an operation on `m` rows.

        At most `keys` keys a row, `visible` blocks to rank; input rows have as many columns as the
        configuration says, or `columns`.
        """
        c = self.config
        shared = c.expert_dim * c.experts_shared
        pairs = m * c.experts_used
        sizes = (
            96 * m + 256,
            4 * m * (c.head_dim + 4 * max(c.head_dim, c.index_dim)) + 16 * 128,
            4 * m * c.index_heads * (c.index_dim + 1)
            + 8 * 2048
            + attention.INDEX_ROWS * (4 * visible + 64 * 8)
            + 16 * visible,
            m * (16 + 8 * keys),
            4 * m * c.groups * c.o_rank + layout.TASK_SIZE * c.groups,
            pairs * (4 * (2 * c.dim + 2 * c.expert_dim) + 20 + 2 * layout.TASK_SIZE)
            + 12 * c.experts
            + m * (8 * shared + 4 * c.experts + 64),
        )
        self._arena = self._room(self._arena, max(sizes) + SPARE, layout.CONTEXT_ARENA)
        if self._rounding:
            widest = max((c.experts_used + 1) * max(c.dim, c.expert_dim, shared), 4 * c.dim)
            widest = max(widest, c.heads * c.head_dim, c.groups * c.o_rank, c.q_rank, columns)
            size = m * (3 * widest + 64 * (c.experts_used + c.groups + 1))
            self._rounded = self._room(self._rounded, size + SPARE, layout.CONTEXT_ROUNDED)
        each = max(
            tiles.scratch_bytes(self._records.most_columns),
            4 * attention.HEADS_TOGETHER * (keys + 17),
            attention.INDEX_ROWS * attention.KEYS_TOGETHER * 4 * c.index_heads,
        )
        each = (each + SPARE) // 64 * 64
        if each > self._context[layout.CONTEXT_SCRATCH_STRIDE // 8]:
            self._scratch = self._room(self._scratch, each * self.threads, layout.CONTEXT_SCRATCH)
            put(self._context, layout.CONTEXT_SCRATCH_STRIDE, each)

    def _room(self, buffer: np.ndarray, size: int, field: int) -> np.ndarray:
        if buffer.size >= size + 64:
            return buffer
        buffer = np.empty(size + size // 2 + 64, dtype=np.uint8)
        put(self._context, field, (address(buffer) + 63) // 64 * 64)
        return buffer

    def _rope(self, rope: Rope, last: int) -> int:
        """Address of a record that points to the rotary tables of all positions below `last`."""
        entry = self._ropes.get(id(rope))
        if entry is None:
            entry = (rope, record(8), [np.empty((0, 2), dtype=np.int64)])
            self._ropes[id(rope)] = entry
        _, made, tables = entry
        have, want = tables[0].shape[0], (last + BLOCK - 1) // BLOCK
        if want > have:
            grown = np.empty((want, 2), dtype=np.int64)
            grown[:have] = tables[0]
            for index in range(have, want):
                cos, sin = rope.block(index)  # the Rope keeps them
                grown[index] = cos.data_ptr(), sin.data_ptr()
            tables[0] = grown
            put(made, 0, address(grown))
        return address(made)

    def _forget(self) -> None:
        """Drop the records of cache buffers when many caches have come and gone."""
        if len(self._pools) + len(self._rows) + len(self._stacks) > MOST_CACHE_RECORDS:
            self._pools.clear()
            self._rows.clear()
            self._stacks.clear()

    def _compressed(self, compressed: CompressedRows) -> int:
        """Address of the record of a compressor's buffers."""
        values, pool = compressed.values, compressed.pool
        width = pool.shape[-1]
        key = (
            values.data_ptr(),
            compressed.scores.data_ptr(),
            pool.data_ptr(),
            compressed.ratio,
            values.shape[0],
            width,
            values.shape[-1],
        )
        made = self._pools.get(key)
        if made is None:
            made = record(layout.POOL_SIZE)
            for field, value in (
                (layout.POOL_VALUES, key[0]),
                (layout.POOL_SCORES, key[1]),
                (layout.POOL_ROWS, key[2]),
                (layout.POOL_RATIO, compressed.ratio),
                (layout.POOL_SLOTS, values.shape[0]),
                (layout.POOL_WIDTH, width),
                (layout.POOL_OVERLAPPING, int(values.shape[-1] == 2 * width)),
            ):
                put(made, field, value)
            self._pools[key] = made
        return address(made)

    def _cache_rows(self, rows: LayerRows) -> int:
        """Address of the record of a layer's cache rows."""
        window = rows.window
        pool = 0 if rows.compressed is None else self._compressed(rows.compressed)
        key = (window.data_ptr(), window.shape[0], pool)
        made = self._rows.get(key)
        if made is None:
            made = np.array(key, dtype=np.int64)
            self._rows[key] = made
        return address(made)

    # --- matrix products --------------------------------------------------------------------------

    def embed(self, weight: QTensor, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows `[M, D]`, float32."""
        if not _readable(weight):
            return weight.rows(list(tokens))
        _check_ids(tokens, weight)
        columns = weight.shape[1]
        out = torch.empty((len(tokens), columns))
        data = weight.data
        self._enter(
            library.address(products.ROW_LOOKUPS[weight.type]),
            self._numbers(tokens),
            len(tokens),
            columns // 16,
            data.data_ptr(),
            data.stride(0) * data.element_size(),
            out.data_ptr(),
            address(self._tables),
            0,
            0,
        )
        return out

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """`x [M, in]` times the transposed weight `(out, in)`: `[M, out]`."""
        x = x.contiguous()
        m = x.shape[0]
        matrix = self._records.matrix(weight)
        self._reserve(m, columns=weight.shape[1])
        out = torch.empty((m, weight.shape[0]))
        arena = int(self._context[layout.CONTEXT_ARENA // 8])
        kernel = library.address(products.linear)
        self._enter(kernel, self._at, arena, matrix, x.data_ptr(), m, out.data_ptr(), 0, 0, 0)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        if weight is not None:
            weight = weight.contiguous()
        self._enter(
            library.address(rows.rms_norm),
            self._at,
            x.data_ptr(),
            x.numel() // width,
            width,
            0 if weight is None else weight.data_ptr(),
            out.data_ptr(),
            0,
            0,
            0,
        )
        return out

    # --- hyper-connections ------------------------------------------------------------------------

    def hc_pre(
        self, streams: torch.Tensor, hyper_: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised input `[M, D]` of a block, `post [M, N]` and `comb [M, N, N]`."""
        streams = streams.contiguous()
        m, n, dim = streams.shape
        made = self._records.hyper(hyper_, norm)
        self._reserve(m)
        x, post, comb = torch.empty((m, dim)), torch.empty((m, n)), torch.empty((m, n, n))
        self._enter(
            library.address(hyper.hc_pre),
            self._at,
            made,
            streams.data_ptr(),
            m,
            x.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            0,
            0,
        )
        return x, post, comb

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams: stream j gets `post_j * block` plus old streams by column j of `comb`."""
        block, streams = block.contiguous(), streams.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        out = torch.empty_like(streams)
        self._enter(
            library.address(hyper.hc_post),
            self._at,
            block.data_ptr(),
            streams.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            streams.shape[0],
            out.data_ptr(),
            0,
            0,
        )
        return out

    def hc_head(
        self, streams: torch.Tensor, hyper_: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""
        streams = streams.contiguous()
        m, _, dim = streams.shape
        made = self._records.hyper(hyper_, norm)
        self._reserve(m)
        out = torch.empty((m, dim))
        kernel = library.address(hyper.hc_head)
        self._enter(kernel, self._at, made, streams.data_ptr(), m, out.data_ptr(), 0, 0, 0, 0)
        return out

    # --- attention --------------------------------------------------------------------------------

    def kv_rows(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, window: torch.Tensor, start: int
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        x = x.contiguous()
        m = x.shape[0]
        made = self._records.attention(layer)
        self._reserve(m)
        self._enter(
            library.address(attention.kv_rows),
            self._at,
            made,
            x.data_ptr(),
            m,
            start,
            self._rope(rope, start + m),
            window.data_ptr(),
            window.shape[0],
            0,
        )

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        x = x.contiguous()
        m, c = x.shape[0], self.config
        made = self._records.attention(layer)
        self._reserve(m)
        q, low_rank = torch.empty((m, c.heads, c.head_dim)), torch.empty((m, c.q_rank))
        self._enter(
            library.address(attention.queries),
            self._at,
            made,
            x.data_ptr(),
            m,
            start,
            self._rope(rope, start + m),
            q.data_ptr(),
            low_rank.data_ptr(),
            0,
        )
        return q, low_rank

    def compress(
        self,
        x: torch.Tensor,
        weights: CompressorWeights,
        rows: CompressedRows,
        rope: Rope,
        start: int,
        *,
        index: bool,
    ) -> None:
        """Write the projections of each position and every row whose block is finished by them."""
        self._forget()
        x = x.contiguous()
        m = x.shape[0]
        made = self._records.compressor(weights)
        self._reserve(m)
        self._enter(
            library.address(attention.compress),
            self._at,
            made,
            self._compressed(rows),
            x.data_ptr(),
            m,
            start,
            self._rope(rope, start + m),
            int(index),
            0,
        )

    def index_topk(
        self,
        x: torch.Tensor,
        low_rank: torch.Tensor,
        weights: IndexerWeights,
        rows: CompressedRows,
        rope: Rope,
        start: int,
    ) -> list[torch.Tensor | None]:
        """Per row the ascending block numbers to attend, or None for all visible ones."""
        m, most = x.shape[0], self.config.top_k
        visible = (start + m) // rows.ratio
        if visible <= most:
            return [None] * m
        self._forget()
        x, low_rank = x.contiguous(), low_rank.contiguous()
        made = self._records.indexer(weights)
        self._reserve(m, visible=visible)
        table = torch.empty((m, 1 + most), dtype=torch.int64)
        self._enter(
            library.address(attention.index_topk),
            self._at,
            made,
            self._compressed(rows),
            x.data_ptr(),
            low_rank.data_ptr(),
            m,
            start,
            self._rope(rope, start + m),
            table.data_ptr(),
        )
        return Selection(table)

    def attend(
        self,
        q: torch.Tensor,
        layer: LayerWeights,
        rows: LayerRows,
        rope: Rope,
        start: int,
        selected: list[torch.Tensor | None] | None,
    ) -> torch.Tensor:
        """Sink attention over window and compressed rows, de-rotated: `[M, H, d]`."""
        self._forget()
        q = q.contiguous()
        m, c = q.shape[0], self.config
        table = self._selection(selected)
        keys = min(c.window, start + m)
        if rows.compressed is not None:
            visible = (start + m) // rows.compressed.ratio
            keys += visible if table is None else max(c.top_k, table.shape[1])
        made = self._records.attention(layer)
        self._reserve(m, keys)
        out = torch.empty_like(q)
        self._enter(
            library.address(attention.attend),
            self._at,
            made,
            self._cache_rows(rows),
            q.data_ptr(),
            m,
            start,
            self._rope(rope, start + m),
            0 if table is None else table.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _selection(self, selected: list[torch.Tensor | None] | None) -> torch.Tensor | None:
        """The table of a selection, None when every row attends all visible blocks."""
        if isinstance(selected, Selection):
            return selected.table
        if selected is None or all(choice is None for choice in selected):
            return None
        table = torch.zeros((len(selected), 1 + self.config.top_k), dtype=torch.int64)
        for row, choice in zip(table, selected, strict=True):
            row[0] = -1 if choice is None else len(choice)
            if choice is not None:
                row[1 : 1 + len(choice)] = choice
        return table

    def attention_output(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Grouped low-rank output projection of `[M, H, d]`: `[M, D]`."""
        heads = heads.contiguous()
        m = heads.shape[0]
        made = self._records.attention(layer)
        self._reserve(m)
        out = torch.empty((m, self.config.dim))
        kernel = library.address(attention.attention_output)
        self._enter(kernel, self._at, made, heads.data_ptr(), m, out.data_ptr(), 0, 0, 0, 0)
        return out

    # --- mixture of experts -----------------------------------------------------------------------

    def moe(self, x: torch.Tensor, tokens: Sequence[int], layer: LayerWeights) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
        x = x.contiguous()
        m = x.shape[0]
        made = self._records.experts(layer)
        self._reserve(m)
        out = torch.empty_like(x)
        failed = self._enter(
            library.address(experts.moe),
            self._at,
            made,
            x.data_ptr(),
            self._numbers(tokens),
            m,
            out.data_ptr(),
            0,
            0,
            0,
        )
        if failed:
            raise NumericsError(f"layer {layer.index}: the router's scores are not finite")
        return out

    # --- whole layers -----------------------------------------------------------------------------

    def layers(
        self,
        streams: torch.Tensor,
        tokens: Sequence[int],
        stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]],
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` after some layers, in one call; writes their cache rows.

        Raises NumericsError naming the layer when a value is not finite.
        """
        m = streams.shape[0]
        made = self._ready(stacked, m, start)
        out = streams.clone(memory_format=torch.contiguous_format)
        failed = self._enter(
            library.address(stack.stack),
            self._at,
            made.address,
            len(stacked),
            out.data_ptr(),
            m,
            start,
            self._numbers(tokens),
            self._between_address,
            0,
        )
        if failed:
            _raise_failed(failed, [layer.index for layer, _, _ in stacked], start)
        return out

    def trunk(
        self,
        tokens: Sequence[int],
        weights: TrunkWeights,
        rows: Sequence[LayerRows],
        ropes: Sequence[Rope],
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` of tokens at positions `start ..` after all layers."""
        m, c, embedding = len(tokens), self.config, weights.embed
        stacked = list(zip(weights.layers, rows, ropes, strict=True))
        if not _readable(embedding):
            streams = self.embed(embedding, tokens)[:, None, :].expand(-1, c.streams, -1)
            return self.layers(streams, tokens, stacked, start)
        made = self._ready(stacked, m, start)
        _check_ids(tokens, embedding)
        if made.trunk is None:
            data, made.trunk = embedding.data, record(layout.TRUNK_SIZE)
            for field, value in (
                (layout.TRUNK_LOOKUP, library.address(products.ROW_LOOKUPS[embedding.type])),
                (layout.TRUNK_ROWS, data.data_ptr()),
                (layout.TRUNK_STRIDE, data.stride(0) * data.element_size()),
                (layout.TRUNK_LAYERS, made.address),
                (layout.TRUNK_COUNT, len(rows)),
            ):
                put(made.trunk, field, value)
        out = torch.empty((m, c.streams, c.dim))
        failed = self._enter(
            self._trunk_pass,
            self._at,
            address(made.trunk),
            self._numbers(tokens),
            m,
            start,
            out.data_ptr(),
            self._between_address,
            0,
            0,
        )
        if failed:
            _raise_failed(failed, [layer.index for layer in weights.layers], start)
        return out

    def head(
        self, streams: torch.Tensor, weights: HeadWeights, output: QTensor
    ) -> tuple[torch.Tensor, int]:
        """Logits `[M, V]` of streams `[M, N, D]`, and the first row that is not finite or -1."""
        streams = streams.contiguous()
        m, _, dim = streams.shape
        made, matrix = self._records.hyper(weights.hc, weights.norm), self._records.matrix(output)
        self._reserve(m)
        self._reserve_between(4 * m * dim)
        out = torch.empty((m, output.shape[0]))
        failed = self._enter(
            self._head_pass,
            self._at,
            made,
            matrix,
            streams.data_ptr(),
            m,
            out.data_ptr(),
            self._between_address,
            0,
            0,
        )
        return out, failed - 1

    def draft(
        self,
        embedded: torch.Tensor,
        streams: torch.Tensor,
        tokens: Sequence[int],
        weights: MtpWeights,
        output: QTensor,
        rows: LayerRows,
        rope: Rope,
        start: int,
        *,
        written: int,
        one: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Logits `[M - written, V]` and streams of pairs at `start ..`, after `written` rows.

        `embedded [M, D]` is the tokens' part of the input, normed and projected. `one`: there is
        one result, and it needs no axis of its own. Also the first row of logits that is not finite
        or -1.
        """
        embedded, streams, c = embedded.contiguous(), streams.contiguous(), self.config
        m = len(tokens)
        made = self._ready([(weights.layer, rows, rope)], c.streams * m, start)
        if made.draft is None:
            made.draft = record(layout.DRAFT_SIZE)
            head = weights.head
            for field, value in (
                (layout.DRAFT_NORM, self._records.vector(weights.hnorm)),
                (layout.DRAFT_PROJECTION, self._records.matrix(weights.h_proj)),
                (layout.DRAFT_HYPER, self._records.hyper(head.hc, head.norm)),
                (layout.DRAFT_OUTPUT, self._records.matrix(output)),
                (layout.DRAFT_LAYER, made.address),
            ):
                put(made.draft, field, value)
            self._reserve(c.streams * m)  # for columns that were not known before
        vocab, rest = output.shape[0], m - written
        logits = torch.empty(vocab) if one else torch.empty((rest, vocab))
        out = torch.empty((c.streams, c.dim) if one else (rest, c.streams, c.dim))
        made.draft[layout.DRAFT_TOKENS // 8 :] = (
            embedded.data_ptr(),
            streams.data_ptr(),
            self._numbers(tokens),
            m,
            written,
            start,
            out.data_ptr(),
            logits.data_ptr(),
            self._between_address,
        )
        failed = self._enter(self._draft_pass, self._at, address(made.draft), 0, 0, 0, 0, 0, 0, 0)
        if failed > 0:
            _raise_failed(failed, [weights.layer.index], start + written)
        return logits, out, -failed - 1

    def _numbers(self, tokens: Sequence[int]) -> int:
        """Address of the token numbers as int64."""
        m = len(tokens)
        if m > self._ids.size:
            self._ids = np.empty(2 * m, dtype=np.int64)
            self._ids_address = address(self._ids)
        self._ids[:m] = tokens
        return self._ids_address

    def _reserve_between(self, size: int) -> None:
        """Make room for what passes from one kernel to the next inside a call."""
        if self._between.size < size + 64:
            self._between = np.empty(size + size // 2 + 64, dtype=np.uint8)
            self._between_address = (address(self._between) + 63) // 64 * 64

    def _ready(
        self, stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]], m: int, start: int
    ) -> _Stack:
        """Records and room for a pass of `m` rows through some layers."""
        self._forget()
        made = self._stack(stacked, start + m)
        if m <= made.rows and start + m <= made.last:
            return made
        c, last = self.config, start + m + BLOCK
        keys, visible = 0, 0
        for _, rows_, rope in stacked:
            self._rope(rope, last)
            if rows_.index is not None:
                visible = max(visible, last // rows_.index.ratio)
                keys = max(keys, c.top_k)
            elif rows_.compressed is not None:
                keys = max(keys, last // rows_.compressed.ratio)
        self._reserve(m, c.window + keys, visible)
        each = 3 * c.dim + c.heads * c.head_dim + c.q_rank + 16 + c.top_k
        self._reserve_between(8 * m * (each + c.streams * c.dim))
        made.rows, made.last = m, last
        return made

    def _stack(self, stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]], last: int) -> _Stack:
        """The records of some layers with their ropes and cache rows filled in.

        Kept by the identity of the cache rows, as long as their buffers are still the same objects.
        """
        key = tuple([id(rows_) for _, rows_, _ in stacked])
        known = self._stacks.get(key)
        if known is not None and known.describes(stacked):
            return known
        parts = []
        for layer, rows_, rope in stacked:
            part = self._records.layer(layer)
            put(part, layout.LAYER_ROPE, self._rope(rope, last))
            put(part, layout.LAYER_ROWS, self._cache_rows(rows_))
            if rows_.index is not None:
                put(part, layout.LAYER_INDEX_POOL, self._compressed(rows_.index))
            parts.append(part)
        made = _Stack(stacked, np.concatenate(parts))
        self._stacks[key] = made
        return made


def _raise_failed(failed: int, indices: Sequence[int], start: int) -> NoReturn:
    """Say which layer of a stack, and which position, gave a value that is not finite."""
    number, row = (failed & ~stack.ROUTER) >> 32, (failed & 0xFFFFFFFF) - 1
    if failed & stack.ROUTER:
        raise NumericsError(f"layer {indices[number]}: the router's scores are not finite")
    raise NumericsError(
        f"layer {indices[number]} gave a value that is not finite at position {start + row} "
        f"(row {row} of the pass)",
        NOT_FINITE,
    )


def _readable(embedding: QTensor) -> bool:
    """Whether a kernel looks up rows of this weight as stored."""
    return embedding.type in FORMATS and embedding.data.stride(-1) == 1


def _check_ids(tokens: Sequence[int], embedding: QTensor) -> None:
    rows_ = embedding.shape[0]
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < rows_:
        raise IndexError(f"token ids must lie in 0 .. {rows_ - 1}")


class _Stack:
    """Records of a stack of layers, and what they were made from (buffers by weak reference)."""

    def __init__(
        self, stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]], records: np.ndarray
    ) -> None:
        self.records = records
        self.address = address(records)
        self.trunk: np.ndarray | None = None
        self.draft: np.ndarray | None = None
        self.rows = self.last = 0  # what room has been made for
        self._fixed = [part for layer, _, rope in stacked for part in (layer, rope)]
        self._buffers = [weakref.ref(tensor) for tensor in _buffers(stacked)]

    def describes(self, stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]]) -> bool:
        """Whether the layers, ropes and buffers are those that the records were made from."""
        fixed = [part for layer, _, rope in stacked for part in (layer, rope)]
        found = _buffers(stacked)
        return (
            len(found) == len(self._buffers)
            and all(map(operator.is_, fixed, self._fixed))
            and all(map(operator.is_, found, map(operator.call, self._buffers)))
        )


def _buffers(stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]]) -> list[torch.Tensor]:
    """All tensors of the layers' cache rows."""
    found = []
    for _, rows_, _ in stacked:
        found.append(rows_.window)
        for part in (rows_.compressed, rows_.index):
            if part is not None:
                found += (part.values, part.scores, part.pool)
    return found


def _check(config: ModelConfig) -> None:
    """Refuse dimensions that do not fit the kernels' vectors."""
    if config.streams != hyper.STREAMS:
        raise UsageError(
            f"runtime.kernels=cpu: the model has {config.streams} streams, the kernels handle "
            f"{hyper.STREAMS}",
            "use runtime.kernels=reference",
        )
    for name in ("dim", "head_dim", "rope_dim", "q_rank", "index_dim", "expert_dim", "o_rank"):
        value = getattr(config, name)
        if value % 16:
            raise UsageError(
                f"runtime.kernels=cpu: the model's {name} is {value}, not a multiple of 16",
                "use runtime.kernels=reference",
            )
