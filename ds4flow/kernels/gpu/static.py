"""Fixed-shape kernels in torch: what a captured graph does, step by step on any machine.

Promise: `start` and `tokens` may be tensors, and no value is ever read back to choose a shape or a
branch. What is visible is decided by masks over positions, so every pass of M rows runs the same
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ds4flow.kernels import numerics
from ds4flow.kernels.interface import CompressedRows, Kernels, LayerRows
from ds4flow.kernels.reference import ROUTER_FLOOR, ReferenceKernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import BLOCK, Rope, rotate
from ds4flow.model.weights import CompressorWeights, IndexerWeights, LayerWeights
from ds4flow.quants import QTensor

Start = int | torch.Tensor
Tokens = Sequence[int] | torch.Tensor


class Chosen(NamedTuple):
    """The compressed rows of each row of a pass: ascending `blocks [M, top_k]`, `counts [M]`
    (int32)."""

    blocks: torch.Tensor
    counts: torch.Tensor


class Top2(NamedTuple):
    """Per row of logits: `token` (int64, lowest id on ties), `top` logit, `gap` to the next, `bad`
    count.

    `bad` counts the entries that are not finite.
    """

    token: torch.Tensor
    top: torch.Tensor
    gap: torch.Tensor
    bad: torch.Tensor


@runtime_checkable
class DeviceKernels(Kernels, Protocol):
    """Kernels whose `start` and `tokens` may be device tensors, and which never wait for the
    device."""

    device: torch.device

    def reserve(self, rope: Rope, context: int) -> None:
        """Make the rotary table of all positions below `context`; needed before device
        positions."""

    def top2(self, logits: torch.Tensor) -> Top2:
        """The two largest logits of each row of `[M, V]`."""


class StaticKernels(ReferenceKernels):
    """The reference kernels with device positions; values differ in the last bits only.

    Every expert that a row chose is gathered as a whole, so this suits small models: it proves the
    graph's logic where there is no GPU, it is not meant to be fast.
    """

    def __init__(
        self, config: ModelConfig, profile: Profile, device: torch.device | None = None
    ) -> None:
        super().__init__(config, profile, device)
        self._tables: dict[int, tuple[Rope, torch.Tensor, torch.Tensor]] = {}

    def reserve(self, rope: Rope, context: int) -> None:
        """Make the rotary table of all positions below `context`."""
        kept = self._tables.get(id(rope))
        if kept is None or kept[1].shape[0] < context:
            blocks = [rope.block(i) for i in range(-(-context // BLOCK))]
            cos, sin = (torch.cat([block[i] for block in blocks]).to(self.device) for i in (0, 1))
            self._tables[id(rope)] = (rope, cos, sin)

    def _at(self, start: Start, count: int) -> torch.Tensor:
        """Positions `[count]` of a pass."""
        return start + torch.arange(count, device=self.device)

    def _turns(
        self, rope: Rope, start: Start, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary rows of `positions`; a pass from a host position makes sure that they are
        there."""
        if isinstance(start, int):
            self.reserve(rope, -(-(start + positions.shape[0]) // BLOCK) * BLOCK)
        _, cos, sin = self._tables[id(rope)]
        return cos[positions], sin[positions]

    def _ids(self, tokens: Tokens) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            return tokens
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.device)

    def embed(self, weight: QTensor, tokens: Tokens) -> torch.Tensor:
        """Embedding rows `[M, D]`, float32."""
        return weight.rows(self._ids(tokens))

    def kv_rows(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, window: torch.Tensor, start: Start
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        at = self._at(start, x.shape[0])
        rows = self.rms_norm(self.linear(x, layer.kv), layer.kv_norm)
        window[at % window.shape[0]] = self._round_kv(rotate(rows, *self._turns(rope, start, at)))

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: Start
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        low_rank = self.rms_norm(self.linear(x, layer.q_a), layer.q_a_norm)
        q = self.linear(low_rank, layer.q_b).unflatten(-1, (self.config.heads, -1))
        cos, sin = self._turns(rope, start, self._at(start, x.shape[0]))
        return rotate(self.rms_norm(q, None), cos[:, None], sin[:, None]), low_rank

    def compress(
        self,
        x: torch.Tensor,
        weights: CompressorWeights,
        rows: CompressedRows,
        rope: Rope,
        start: Start,
        *,
        index: bool,
    ) -> None:
        """Write the projections of each position and every row whose block is finished by them."""
        count, ratio, capacity = x.shape[0], rows.ratio, rows.pool.shape[0]
        at = self._at(start, count)
        slots = at % rows.values.shape[0]
        rows.values[slots] = self.linear(x, weights.kv)
        rows.scores[slots] = self.linear(x, weights.gate) + weights.ape[at % ratio]
        if not capacity:
            return
        for candidate in range(count // ratio + 1):  # as many blocks as can end in this pass
            block = at[0] // ratio + candidate
            row = self.rms_norm(self._pooled(rows, block)[None], weights.norm)
            # a block that is not finished yet may lie beyond the table; it is not kept
            begin = torch.minimum(block * ratio, at[-1])
            row = rotate(row, *self._turns(rope, start, begin[None]))
            row = self._round_index(row) if index else self._round_kv(row)
            place = block.clamp(max=capacity - 1)[None]
            finished = block < (at[0] + count) // ratio
            rows.pool[place] = torch.where(finished, row, rows.pool[place])

    @staticmethod
    def _pooled(rows: CompressedRows, block: torch.Tensor) -> torch.Tensor:
        """Per-channel softmax pooling of the slots of one block, `[width]`."""
        ratio, width = rows.ratio, rows.pool.shape[-1]
        lane = torch.arange(ratio, device=block.device)
        own = (block * ratio + lane) % rows.values.shape[0]
        values, scores = rows.values[own], rows.scores[own]
        if rows.overlapping:
            before = ((block - 1) * ratio + lane) % rows.values.shape[0]
            earlier = torch.where(block > 0, rows.scores[before][:, :width], -torch.inf)
            values = torch.cat((rows.values[before][:, :width], values[:, width:]))
            scores = torch.cat((earlier, scores[:, width:]))
        return (torch.softmax(scores, dim=0) * values).sum(0)

    def index_topk(
        self,
        x: torch.Tensor,
        low_rank: torch.Tensor,
        weights: IndexerWeights,
        rows: CompressedRows,
        rope: Rope,
        start: Start,
    ) -> Any:
        """Blocks to attend, as `Chosen`: all visible ones, or the `top_k` best, lower blocks on
        ties."""
        config, count, capacity = self.config, x.shape[0], rows.pool.shape[0]
        at = self._at(start, count)
        visible = (at + 1) // rows.ratio
        width = min(config.top_k, capacity)
        plain = torch.arange(width, device=self.device).expand(count, -1)
        counts = visible.clamp(max=width)
        if capacity <= config.top_k:
            return Chosen(plain, counts)
        q = self.linear(low_rank, weights.q_b).unflatten(-1, (config.index_heads, -1))
        cos, sin = self._turns(rope, start, at)
        q = self._round_index(rotate(q, cos[:, None], sin[:, None]))
        gains = self.linear(x, weights.proj) * (config.index_dim * config.index_heads) ** -0.5
        hidden = torch.arange(capacity, device=self.device) >= visible[:, None]
        scores = torch.stack(
            [
                (gains[i, :, None] * torch.clamp(q[i] @ rows.pool.T, min=0.0)).sum(0)
                for i in range(count)
            ]
        ).masked_fill(hidden, -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :width]
        best = torch.sort(order, dim=-1).values
        return Chosen(torch.where(visible[:, None] <= config.top_k, plain, best), counts)

    def attend(
        self,
        q: torch.Tensor,
        layer: LayerWeights,
        rows: LayerRows,
        rope: Rope,
        start: Start,
        selected: Any,
    ) -> torch.Tensor:
        """Sink attention over window and compressed rows, de-rotated: `[M, H, d]`."""
        config, at = self.config, self._at(start, q.shape[0])
        back = torch.arange(config.window - 1, -1, -1, device=self.device)
        sinks = layer.sinks[:, None]
        outputs = []
        for i in range(q.shape[0]):  # a row at a time: its operations never see how many there are
            positions = at[i] - back
            keys = rows.window[positions % rows.window.shape[0]]
            seen = positions >= 0
            if rows.compressed is not None:
                pool = rows.compressed.pool
                if selected is None:
                    far = torch.arange(pool.shape[0], device=self.device)
                    far_seen = far < (at[i] + 1) // rows.compressed.ratio
                else:
                    far = selected.blocks[i]
                    far_seen = torch.arange(far.shape[0], device=self.device) < selected.counts[i]
                keys = torch.cat((keys, pool[far]))
                seen = torch.cat((seen, far_seen))
            scores = (q[i] @ keys.T) * config.head_dim**-0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
            outputs.append((weights / total) @ keys)
        cos, sin = self._turns(rope, start, at)
        return rotate(torch.stack(outputs), cos[:, None], -sin[:, None])

    def _route(
        self, x: torch.Tensor, tokens: Tokens, layer: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected experts and weights `[M, used]`; a score that is not finite makes weights
        NaN."""
        config, moe = self.config, layer.moe
        gates = torch.sqrt(numerics.softplus(self.linear(x, moe.router)))
        biased = gates if moe.bias is None else gates + moe.bias
        if moe.table is not None:
            chosen = moe.table[self._ids(tokens)].long()
        else:
            order = torch.sort(biased, dim=-1, descending=True, stable=True).indices
            chosen = order[:, : config.experts_used]
        weights = torch.gather(gates, 1, chosen)
        if config.expert_norm:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=ROUTER_FLOOR)
        sound = torch.isfinite(biased).all(-1, keepdim=True)
        return chosen, torch.where(sound, weights * config.expert_scale, torch.nan)

    def _expert_parts(
        self, x: torch.Tensor, chosen: torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """What each chosen expert of each row gives, `[M, used, D]`."""
        moe, clamp, parts = layer.moe, layer.clamp, []
        gate, up, down = (self._dequantised(w) for w in (moe.gate, moe.up, moe.down))
        for place in range(chosen.shape[1]):
            expert = chosen[:, place]
            g = (gate[expert] * x[:, None, :]).sum(-1)
            u = (up[expert] * x[:, None, :]).sum(-1)
            if clamp > 1e-6:
                g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
            h = numerics.silu(g) * u
            parts.append((down[expert] * h[:, None, :]).sum(-1))
        return torch.stack(parts, dim=1)

    def top2(self, logits: torch.Tensor) -> Top2:
        """The two largest logits of each row of `[M, V]`."""
        two = torch.topk(logits, 2).values
        gap = two[:, 0].double() - two[:, 1].double()
        vocab = logits.shape[-1]
        places = torch.arange(vocab, device=logits.device)
        # a row of NaN has no largest entry; its place must still exist
        token = torch.where(logits == two[:, :1], places, vocab - 1).amin(-1)
        bad = (~torch.isfinite(logits)).sum(-1).int()
        return Top2(token, two[:, 0], gap, bad)
