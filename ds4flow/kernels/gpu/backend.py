"""The Triton backend behind the kernel interface, on a GPU or in Triton's interpreter.

Promise: nothing here waits for the device. `start` and `tokens` may be device tensors, so that a
captured graph can move on by itself; shapes and launch grids then depend on the number of rows
only.
"""

from __future__ import annotations

from typing import Any

import torch

from ds4flow.kernels.gpu import attention, rows
from ds4flow.kernels.gpu.base import HEADS, KEYS, SCORES, ceil_div, next_power, row_block
from ds4flow.kernels.gpu.launch import (
    ATTENTION,
    ROW,
)
from ds4flow.kernels.gpu.mixing import MixingKernels
from ds4flow.kernels.gpu.static import Chosen
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.rope import Rope
from ds4flow.model.weights import (
    CompressorWeights,
    IndexerWeights,
    LayerWeights,
)


class GpuKernels(MixingKernels):
    """Implements `ds4flow.kernels.interface.Kernels` with Triton.

    Weights are copied to the device once, as stored. Raises Ds4FlowError where there is neither a
    GPU nor Triton's interpreter.
    """

    # --- attention -------------------------------------------------------------------------------

    def kv_rows(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        rope: Rope,
        window: torch.Tensor,
        start: int | torch.Tensor,
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        width = self.config.head_dim
        self._launch(
            rows.kv_rows,
            (x.shape[0],),
            (
                self.linear(x, layer.kv),
                self._vectors.get(layer.kv_norm),
                *self._turns(rope, start, x.shape[0]),
                self._position(start),
                window,
                window.shape[0],
                self.config.eps,
            ),
            self._row_shape(width),
            ROW,
        )

    def _row_shape(self, width: int) -> dict[str, Any]:
        return dict(
            WIDTH=width,
            ROPE=self.config.rope_dim,
            BLOCKS=next_power(ceil_div(width, 64)),
            ROUND=self.profile.kv_fp8,
            NORM=row_block(width),
        )

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        heads, width = self.config.heads, self.config.head_dim
        low_rank = self.rms_norm(self.linear(x, layer.q_a), layer.q_a_norm)
        q = self._product(low_rank, layer.q_b, 1, 1)
        self._launch(
            rows.queries,
            (x.shape[0], heads),
            (q, *self._turns(rope, start, x.shape[0]), self._position(start), self.config.eps),
            dict(HEADS=heads, WIDTH=width, ROPE=self.config.rope_dim, BLOCK=next_power(width)),
            ROW,
        )
        return q.unflatten(-1, (heads, width)), low_rank

    def compress(
        self,
        x: torch.Tensor,
        weights: CompressorWeights,
        rows_: CompressedRows,
        rope: Rope,
        start: int | torch.Tensor,
        *,
        index: bool,
    ) -> None:
        """Write the projections of each position and every row whose block is finished by them."""
        count, ratio, width = x.shape[0], rows_.ratio, rows_.pool.shape[-1]
        line, slots = rows_.values.shape[-1], rows_.values.shape[0]
        position = self._position(start)
        self._launch(
            attention.compress_write,
            (count, ceil_div(line, 256)),
            (
                self.linear(x, weights.kv),
                self.linear(x, weights.gate),
                self._vectors.get(weights.ape),
                rows_.values,
                rows_.scores,
                position,
                slots,
            ),
            dict(RATIO=ratio, WIDTH=line, BLOCK=256),
            ROW,
        )
        blocks = count // ratio + 1  # as many as can end in this many positions
        pooled = self._empty(blocks, width)
        self._launch(
            attention.pool_blocks,
            (blocks, ceil_div(width, 64)),
            (rows_.values, rows_.scores, pooled, position, count, slots),
            dict(RATIO=ratio, WIDTH=width, OVERLAP=rows_.overlapping, BLOCK=64),
            ROW,
        )
        finish = rows.index_rows if index else rows.pooled_rows
        shape = self._index_shape() if index else self._row_shape(width)
        self._launch(
            finish,
            (blocks,),
            (
                pooled,
                self._vectors.get(weights.norm),
                *self._turns(rope, start, count),
                position,
                rows_.pool,
                count,
                self.config.eps,
            ),
            {"RATIO": ratio} | shape,
            ROW,
        )

    def _index_shape(self) -> dict[str, Any]:
        width = self.config.index_dim
        return dict(
            WIDTH=width,
            ROPE=self.config.rope_dim,
            STAGES=width.bit_length() - 1,
            FACTOR=width**-0.5,
            ROUND=self.profile.index_fp4,
        )

    def index_topk(
        self,
        x: torch.Tensor,
        low_rank: torch.Tensor,
        weights: IndexerWeights,
        rows_: CompressedRows,
        rope: Rope,
        start: int | torch.Tensor,
    ) -> Any:
        """Blocks to attend, as `Chosen`: all visible ones, or the `top_k` best, lower blocks on
        ties."""
        config, count = self.config, x.shape[0]
        heads, width, capacity = config.index_heads, config.index_dim, rows_.pool.shape[0]
        position = self._position(start)
        chosen = self._empty(count, config.top_k, dtype=torch.int32)
        counts = self._empty(count, dtype=torch.int32)
        scores = chosen  # never read while the cache holds no more blocks than are selected
        if capacity > config.top_k:
            q = self.linear(low_rank, weights.q_b)
            self._launch(
                rows.index_queries,
                (count, heads),
                (q, *self._turns(rope, start, count), position),
                {"HEADS": heads} | self._index_shape(),
                ROW,
            )
            scores = self._empty(count, capacity)
            self._launch(
                attention.index_scores,
                (count, ceil_div(capacity, 64)),
                (
                    q,
                    self.linear(x, weights.proj),
                    rows_.pool,
                    scores,
                    position,
                    capacity,
                    (config.index_dim * config.index_heads) ** (-0.5),
                ),
                dict(RATIO=rows_.ratio, HEADS=heads, WIDTH=width, HP=max(16, next_power(heads)))
                | dict(BT=64, DC=32, TOP=config.top_k, DOT=self._scores),
                ATTENTION,
            )
        self._launch(
            attention.select_blocks,
            (count,),
            (scores, chosen, counts, position, capacity),
            dict(RATIO=rows_.ratio, TOP=config.top_k, BLOCK=SCORES),
            ROW,
        )
        return Chosen(chosen, counts)

    def attend(
        self,
        q: torch.Tensor,
        layer: LayerWeights,
        rows_: LayerRows,
        rope: Rope,
        start: int | torch.Tensor,
        selected: Any,
    ) -> torch.Tensor:
        """Sink attention over window and compressed rows, de-rotated: `[M, H, d]`."""
        config = self.config
        count, heads, width = q.shape
        window, position = rows_.window, self._position(start)
        near = ceil_div(config.window, KEYS)
        ratio, pool, far = 0, window, 0
        if rows_.compressed is not None:
            ratio, pool = rows_.compressed.ratio, rows_.compressed.pool
            far = pool.shape[0]
        blocks = counts = position
        if selected is not None:
            blocks, counts = selected
            far = min(far, config.top_k)
        splits = near + ceil_div(far, KEYS)
        parts = self._empty(count, heads, splits, width)
        tops, totals = self._empty(count, heads, splits), self._empty(count, heads, splits)
        shape = dict(HEADS=heads, WIDTH=width, WINDOW_SPLITS=near, RATIO=ratio, BT=KEYS)
        shape |= dict(LISTED=selected is not None)
        self._launch(
            attention.attend_parts,
            (count, ceil_div(heads, HEADS), splits),
            (
                q.contiguous(),
                window,
                pool,
                blocks,
                counts,
                parts,
                tops,
                totals,
                position,
                window.shape[0],
                config.top_k,
                splits,
                config.head_dim ** (-0.5),
            ),
            shape | dict(WINDOW=config.window, BH=HEADS, DC=64, DOT=self._scores),
            ATTENTION,
        )
        y = self._empty(count, heads, width)
        self._launch(
            attention.attend_join,
            (count, heads),
            (
                parts,
                tops,
                totals,
                self._vectors.get(layer.sinks),
                counts,
                *self._turns(rope, start, count),
                y,
                position,
                splits,
            ),
            shape | dict(ROPE=config.rope_dim, BLOCK=next_power(width)),
            ROW,
        )
        return y

    def attention_output(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Grouped low-rank output projection of `[M, H, d]`: `[M, D]`."""
        return self.linear(self._grouped(heads, layer), layer.out_b)

    def _grouped(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Each group's own projection of `[M, H, d]`, side by side: `[M, G * O]`."""
        groups = self.config.groups
        return self._product(heads.flatten(1), layer.out_a, groups, groups * self.shares)
