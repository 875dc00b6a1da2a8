"""The numba backend: every operation of the interface is one call into compiled code.

Promise: row i of an M-row call has the same bits as the row alone, for any M, thread count and CPU,
because every output element is computed in one fixed order from its own row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4flow.errors import NumericsError, UsageError, near_match
from ds4flow.kernels.cpu import attention, experts, hyper, products, rows
from ds4flow.kernels.cpu.caches import CacheRecords
from ds4flow.kernels.cpu.context import Context
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.lookup import look_up
from ds4flow.kernels.cpu.whole import WholePasses
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import Rope
from ds4flow.model.weights import CompressorWeights, HyperWeights, IndexerWeights, LayerWeights
from ds4flow.quants import QTensor

ACTIVATIONS = ("f32", "int8")


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
        if activations not in ACTIVATIONS:
            raise UsageError(
                f"{activations} is not an activation mode of the CPU kernels",
                f"use one of: {', '.join(ACTIVATIONS)} {near_match(activations, ACTIVATIONS)}",
            )
        self.config = config
        self.profile = profile
        rounded = activations == "int8"
        self._context = Context(config, profile, threads=threads, rounded=rounded)
        self._caches = CacheRecords(self._context.records)
        self.passes = WholePasses(self._context, self._caches)
        self.layers = self.passes.layers

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Compile what these weights need (kept on disk) and make their records."""
        needed = {self._context.records.kernel(weight): None for weight in weights}
        library.build(list(needed))
        for weight in weights:
            self._context.records.matrices(weight)

    # --- matrix products --------------------------------------------------------------------------

    def embed(self, weight: QTensor, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows `[M, D]`, float32."""
        return look_up(self._context, weight, tokens)

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """`x [M, in]` times the transposed weight `(out, in)`: `[M, out]`."""
        x = x.contiguous()
        m = x.shape[0]
        matrix = self._context.records.matrix(weight)
        self._context.reserve(m, columns=weight.shape[1])
        out = torch.empty((m, weight.shape[0]))
        arena = self._context.arena
        kernel = library.address(products.linear)
        self._context.call(kernel, arena, matrix, x.data_ptr(), m, out.data_ptr())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        if weight is not None:
            weight = weight.contiguous()
        self._context.call(
            library.address(rows.rms_norm),
            x.data_ptr(),
            x.numel() // width,
            width,
            0 if weight is None else weight.data_ptr(),
            out.data_ptr(),
        )
        return out

    # --- hyper-connections ------------------------------------------------------------------------

    def hc_pre(
        self, streams: torch.Tensor, hyper_: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised input `[M, D]` of a block, `post [M, N]` and `comb [M, N, N]`."""
        streams = streams.contiguous()
        m, n, dim = streams.shape
        made = self._context.records.hyper(hyper_, norm)
        self._context.reserve(m)
        x, post, comb = torch.empty((m, dim)), torch.empty((m, n)), torch.empty((m, n, n))
        self._context.call(
            library.address(hyper.hc_pre),
            made,
            streams.data_ptr(),
            m,
            x.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
        )
        return x, post, comb

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams: stream j gets `post_j * block` plus old streams by column j of `comb`."""
        block, streams = block.contiguous(), streams.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        out = torch.empty_like(streams)
        self._context.call(
            library.address(hyper.hc_post),
            block.data_ptr(),
            streams.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            streams.shape[0],
            out.data_ptr(),
        )
        return out

    def hc_head(
        self, streams: torch.Tensor, hyper_: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""
        streams = streams.contiguous()
        m, _, dim = streams.shape
        made = self._context.records.hyper(hyper_, norm)
        self._context.reserve(m)
        out = torch.empty((m, dim))
        kernel = library.address(hyper.hc_head)
        self._context.call(kernel, made, streams.data_ptr(), m, out.data_ptr())
        return out

    # --- attention --------------------------------------------------------------------------------

    def kv_rows(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, window: torch.Tensor, start: int
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        x = x.contiguous()
        m = x.shape[0]
        made = self._context.records.attention(layer)
        self._context.reserve(m)
        self._context.call(
            library.address(attention.kv_rows),
            made,
            x.data_ptr(),
            m,
            start,
            self._caches.rope(rope, start + m),
            window.data_ptr(),
            window.shape[0],
        )

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        x = x.contiguous()
        m, c = x.shape[0], self.config
        made = self._context.records.attention(layer)
        self._context.reserve(m)
        q, low_rank = torch.empty((m, c.heads, c.head_dim)), torch.empty((m, c.q_rank))
        self._context.call(
            library.address(attention.queries),
            made,
            x.data_ptr(),
            m,
            start,
            self._caches.rope(rope, start + m),
            q.data_ptr(),
            low_rank.data_ptr(),
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
        self._caches.forget()
        x = x.contiguous()
        m = x.shape[0]
        made = self._context.records.compressor(weights)
        self._context.reserve(m)
        self._context.call(
            library.address(attention.compress),
            made,
            self._caches.compressed(rows),
            x.data_ptr(),
            m,
            start,
            self._caches.rope(rope, start + m),
            int(index),
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
        self._caches.forget()
        x, low_rank = x.contiguous(), low_rank.contiguous()
        made = self._context.records.indexer(weights)
        self._context.reserve(m, visible=visible)
        table = torch.empty((m, 1 + most), dtype=torch.int64)
        self._context.call(
            library.address(attention.index_topk),
            made,
            self._caches.compressed(rows),
            x.data_ptr(),
            low_rank.data_ptr(),
            m,
            start,
            self._caches.rope(rope, start + m),
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
        self._caches.forget()
        q = q.contiguous()
        m, c = q.shape[0], self.config
        table = self._selection(selected)
        keys = min(c.window, start + m)
        if rows.compressed is not None:
            visible = (start + m) // rows.compressed.ratio
            keys += visible if table is None else max(c.top_k, table.shape[1])
        made = self._context.records.attention(layer)
        self._context.reserve(m, keys)
        out = torch.empty_like(q)
        self._context.call(
            library.address(attention.attend),
            made,
            self._caches.rows(rows),
            q.data_ptr(),
            m,
            start,
            self._caches.rope(rope, start + m),
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
        made = self._context.records.attention(layer)
        self._context.reserve(m)
        out = torch.empty((m, self.config.dim))
        kernel = library.address(attention.attention_output)
        self._context.call(kernel, made, heads.data_ptr(), m, out.data_ptr())
        return out

    # --- mixture of experts -----------------------------------------------------------------------

    def moe(self, x: torch.Tensor, tokens: Sequence[int], layer: LayerWeights) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
        x = x.contiguous()
        m = x.shape[0]
        made = self._context.records.experts(layer)
        self._context.reserve(m)
        out = torch.empty_like(x)
        failed = self._context.call(
            library.address(experts.moe),
            made,
            x.data_ptr(),
            self._context.numbers(tokens),
            m,
            out.data_ptr(),
        )
        if failed:
            raise NumericsError(f"layer {layer.index}: the router's scores are not finite")
        return out
