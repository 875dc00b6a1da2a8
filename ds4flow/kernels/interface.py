"""The operations that the model is written against, and the cache buffers that they read and write.

Promise of every backend: row i of an M-row call has the same bits as the same row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds4flow.model.rope import Rope
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


@dataclass
class CompressedRows:
    """Buffers of one compressor; block `j` covers positions `j*ratio .. j*ratio+ratio-1`.

    `values` and `scores` are float32 rings `[slots, c * width]` addressed by `position % slots` and
    hold the compressor's projections of single positions (scores with the position embedding
    added); `pool [capacity, width]` holds finished rows by block number.
    """

    ratio: int
    values: torch.Tensor
    scores: torch.Tensor
    pool: torch.Tensor

    @property
    def overlapping(self) -> bool:
        """True when a row also pools the first halves of the block before it (ratio 4)."""
        return self.values.shape[-1] == 2 * self.pool.shape[-1]


@dataclass
class LayerRows:
    """Cache buffers of one layer. `window` is a float32 ring `[slots, head_dim]` of raw KV rows."""

    window: torch.Tensor
    compressed: CompressedRows | None = None
    index: CompressedRows | None = None


class Cache(Protocol):
    """What the model needs of a cache: the cursor, the buffers, and a check that a pass fits."""

    @property
    def length(self) -> int:
        """Committed tokens; the next pass starts at this position."""

    @property
    def layers(self) -> Sequence[LayerRows]:
        """Buffers of the trunk layers."""

    @property
    def mtp(self) -> LayerRows:
        """Buffers of the MTP block (its window only)."""

    def check_room(self, start: int, rows: int) -> None:
        """Raise when `rows` rows from position `start` do not fit."""


class Layers(Protocol):
    """Several layers in one call, in the order of `ds4flow.model.layer`."""

    def __call__(
        self,
        streams: torch.Tensor,
        tokens: Sequence[int],
        stacked: Sequence[tuple[LayerWeights, LayerRows, Rope]],
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` after the layers; writes their cache rows of positions `start ..`.

        Raises NumericsError naming the layer when a value is not finite.
        """


class Passes(Protocol):
    """Whole passes in one call each: the operations of `ds4flow.model`, in its order.

    For backends where what happens between two calls takes more time than small operations. All
    raise NumericsError naming the layer when the streams are not finite.
    """

    def trunk(
        self,
        tokens: Sequence[int],
        weights: TrunkWeights,
        rows: Sequence[LayerRows],
        ropes: Sequence[Rope],
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` of tokens at positions `start ..` after all layers."""

    def head(
        self, streams: torch.Tensor, weights: HeadWeights, output: QTensor
    ) -> tuple[torch.Tensor, int]:
        """Logits `[M, V]` of streams `[M, N, D]`, and the first row that is not finite or -1."""

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
        """The MTP block over M pairs at positions `start ..`.

        `embedded [M, D]` is the tokens' part of the input, normed and projected. Of the first
        `written` pairs only the window rows are made; returned are logits `[M - written, V]` and
        streams `[M - written, N, D]` of the others (without the first axis if `one` says that there
        is one), and the first row of logits that is not finite or -1.
        """

    def decide(
        self,
        tokens: Sequence[int],
        weights: TrunkWeights,
        rows: Sequence[LayerRows],
        ropes: Sequence[Rope],
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """`trunk`, and `head` on all its rows: streams, logits, and what `head` says of them."""

    def chain(
        self,
        streams: torch.Tensor,
        stale: torch.Tensor | None,
        tokens: Sequence[int],
        weights: MtpWeights,
        embedding: QTensor,
        output: QTensor,
        rows: LayerRows,
        rope: Rope,
        start: int,
        *,
        count: int,
        gate: float,
        end: int,
        forced: Sequence[int] | None,
    ) -> tuple[torch.Tensor, list[int], list[float], int] | None:
        """Up to `count` passes of the MTP block, each on the choice and streams of the one before.

        The first is a `draft` of all `tokens`: the last with `streams [N, D]`, those before, which
        are only written, with `stale [M - 1, N, D]`. Ends after a pass whose
        gap is below `gate`, and after one that chooses `end`; goes on with the tokens `forced`
        instead of the choices where there are any. Returns logits `[passes, V]`, choices and gaps,
        and which pass's logits are not finite or -1; None where it takes several calls.
        """


class Kernels(Protocol):
    """Fused operations. `start` is the absolute position of row 0; row i lies at `start + i`.

    M rows, N streams, D model width, H heads of d, Q query rank; all activations are float32.
    """

    @property
    def layers(self) -> Layers | None:
        """What runs whole layers; None where a layer is put together from the operations below."""

    @property
    def passes(self) -> Passes | None:
        """What runs whole passes; None where they are put together from the operations below."""

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Make the weights ready (self-test of the shapes, packing); called once after loading."""

    def embed(self, weight: QTensor, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows `[M, D]`."""

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """`x [M, in]` times the transposed weight `(out, in)`: `[M, out]`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""

    def hc_pre(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hyper-connection input: normalised mix `[M, D]`, `post [M, N]` and `comb [M, N, N]`."""

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """Hyper-connection output: the new streams `[M, N, D]` from the block's output `[M, D]`."""

    def hc_head(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""

    def kv_rows(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, window: torch.Tensor, start: int
    ) -> None:
        """Project, norm, rotate and round the KV rows of `x [M, D]` into the window."""

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]` that the indexer shares."""

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

    def attention_output(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Grouped low-rank output projection of `[M, H, d]`: `[M, D]`."""

    def moe(self, x: torch.Tensor, tokens: Sequence[int], layer: LayerWeights) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
