"""The reference kernels: plain torch, readable; they define what every other backend must compute.

Row-invariant: matrix products always run on blocks of the same number of rows (zero padded), all
else is elementwise, a reduction inside one row, or a loop over rows in which each row's shapes
depend on its own position only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ds4flow.errors import NumericsError
from ds4flow.kernels import numerics
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import Rope, rotate
from ds4flow.model.weights import (
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
)
from ds4flow.quants import QTensor

BLOCK_ROWS = 8  # rows of every matrix product: with 4 or 8 the library's choice never follows M
ROUTER_FLOOR = 6.103515625e-5  # smallest normal half: floor of the sum of the selected weights
DEQUANTISED_BYTES = 2 << 30


class ReferenceKernels:
    """Implements `ds4flow.kernels.interface.Kernels` with torch on any device."""

    layers = passes = None  # one operation after the other

    def __init__(
        self, config: ModelConfig, profile: Profile, device: torch.device | None = None
    ) -> None:
        self.config = config
        self.profile = profile
        self.device = torch.device("cpu") if device is None else device
        self.block_rows = BLOCK_ROWS
        self._float: dict[tuple[str, int], torch.Tensor] = {}
        self._float_bytes = 0

    # --- matrix products -------------------------------------------------------------------------

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Check on this device that rows of a padded product ignore their place and neighbours.

        Which products have this property depends on the CPU and on the library, so it is measured
        for every shape; where it fails, products run one row at a time, which is invariant by
        construction.
        """
        shapes = {weight.shape[-2:] for weight in weights}
        # the grouped output projection multiplies one group's rows at a time
        config = self.config
        shapes.add((config.o_rank, config.head_dim * config.heads // config.groups))
        if not all(self._rows_are_independent(*shape[-2:]) for shape in sorted(shapes)):
            self.block_rows = 1

    def _rows_are_independent(self, out: int, width: int) -> bool:
        generator = torch.Generator().manual_seed(out * 65537 + width)
        weight = torch.randn(min(out, 4096), width, generator=generator).to(self.device)
        rows = torch.randn(BLOCK_ROWS, width, generator=generator).to(self.device)
        together = functional.linear(rows, weight)
        for place in (0, 3, BLOCK_ROWS - 1):
            alone = torch.zeros(BLOCK_ROWS, width, device=self.device)
            alone[place] = rows[2]
            if not torch.equal(functional.linear(alone, weight)[place], together[2]):
                return False
        return True

    def _dequantised(self, weight: QTensor) -> torch.Tensor:
        """The float32 weight; kept while all kept ones fit into `DEQUANTISED_BYTES`.

        This backend defines the meaning, so small models may live dequantised; a large one is
        dequantised where it is used and never as a whole.
        """
        key = (weight.name, weight.data.data_ptr())
        if key in self._float:
            return self._float[key]
        value = weight.float()
        size = value.numel() * value.element_size()
        if self._float_bytes + size <= DEQUANTISED_BYTES:
            self._float[key] = value
            self._float_bytes += size
        return value

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, block = x.shape[0], self.block_rows
        if rows == block:
            return functional.linear(x.contiguous(), weight)
        parts = []
        for first in range(0, rows, block):
            part = x[first : first + block]
            if part.shape[0] < block:
                part = functional.pad(part, (0, 0, 0, block - part.shape[0]))
            parts.append(functional.linear(part.contiguous(), weight))
        product = parts[0] if len(parts) == 1 else torch.cat(parts)
        return product[:rows]

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """`x [M, in]` times the transposed weight `(out, in)`: `[M, out]`."""
        return self._product(x, self._dequantised(weight))

    def embed(self, weight: QTensor, tokens: Sequence[int]) -> torch.Tensor:
        """Embedding rows `[M, D]`, float32."""
        return weight.rows(_ids(tokens, weight.data.device))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""
        return numerics.rms_norm(x, weight, self.config.eps)

    # --- hyper-connections -----------------------------------------------------------------------

    def _mix(self, streams: torch.Tensor, hyper: HyperWeights) -> torch.Tensor:
        """Mixing logits before scale and base: the projected, RMS-normalised flat streams."""
        return self.linear(self.rms_norm(streams.flatten(1), None), hyper.fn)

    def hc_pre(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised input `[M, D]` of a block, `post [M, N]` and `comb [M, N, N]`."""
        n = self.config.streams
        mix = self._mix(streams, hyper)
        scale, base = hyper.scale, hyper.base
        pre = numerics.sigmoid(mix[:, :n] * scale[0] + base[:n]) + self.config.eps_hc
        post = 2.0 * numerics.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        scores = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        comb = numerics.sinkhorn(scores, self.config.sinkhorn, self.config.eps_hc)
        return self.rms_norm(self._weighted(pre, streams), norm), post, comb

    @staticmethod
    def _weighted(pre: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """`sum_s pre[m, s] * streams[m, s]` in the fixed order of the streams."""
        total = pre[:, 0, None] * streams[:, 0]
        for s in range(1, streams.shape[1]):
            total = total + pre[:, s, None] * streams[:, s]
        return total

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams: j gets `post_j * block` plus the old streams by column j of `comb`."""
        total = post[:, :, None] * block[:, None, :]
        for i in range(streams.shape[1]):
            total = total + comb[:, i, :, None] * streams[:, i, None, :]
        return total

    def hc_head(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""
        mix = self._mix(streams, hyper)
        pre = numerics.sigmoid(mix * hyper.scale[0] + hyper.base) + self.config.eps_hc
        return self.rms_norm(self._weighted(pre, streams), norm)

    # --- attention -------------------------------------------------------------------------------

    def _round_kv(self, row: torch.Tensor) -> torch.Tensor:
        if not self.profile.kv_fp8:
            return row
        fixed = self.config.head_dim - self.config.rope_dim
        return torch.cat((numerics.fp8_round_trip(row[..., :fixed]), row[..., fixed:]), dim=-1)

    def kv_rows(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, window: torch.Tensor, start: int
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        rows = self.rms_norm(self.linear(x, layer.kv), layer.kv_norm)
        rows = self._round_kv(rotate(rows, *rope.rows(start, x.shape[0])))
        window[_slots(start, x.shape[0], window)] = rows

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        low_rank = self.rms_norm(self.linear(x, layer.q_a), layer.q_a_norm)
        q = self.linear(low_rank, layer.q_b).unflatten(-1, (self.config.heads, -1))
        cos, sin = rope.rows(start, x.shape[0])
        return rotate(self.rms_norm(q, None), cos[:, None], sin[:, None]), low_rank

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
        count, ratio = x.shape[0], rows.ratio
        slots = _slots(start, count, rows.values)
        phases = torch.arange(start, start + count, device=x.device) % ratio
        rows.values[slots] = self.linear(x, weights.kv)
        rows.scores[slots] = self.linear(x, weights.gate) + weights.ape[phases]
        for block in range(start // ratio, (start + count) // ratio):
            pooled = self._pool(rows, block)
            row = self.rms_norm(pooled[None], weights.norm)
            row = rotate(row, *rope.rows(block * ratio, 1))
            rows.pool[block] = (self._round_index(row) if index else self._round_kv(row))[0]

    @staticmethod
    def _pool(rows: CompressedRows, block: int) -> torch.Tensor:
        """Per-channel softmax pooling of the slots of one block, `[width]`."""
        ratio, width = rows.ratio, rows.pool.shape[-1]
        own = _slots(block * ratio, ratio, rows.values)
        values, scores = rows.values[own], rows.scores[own]
        if rows.overlapping:
            values, scores = values[:, width:], scores[:, width:]
            if block > 0:  # the first block has no predecessor: its slots do not exist
                before = _slots((block - 1) * ratio, ratio, rows.values)
                values = torch.cat((rows.values[before][:, :width], values))
                scores = torch.cat((rows.scores[before][:, :width], scores))
        return (torch.softmax(scores, dim=0) * values).sum(0)

    def _round_index(self, x: torch.Tensor) -> torch.Tensor:
        if not self.profile.index_fp4:
            return x
        return numerics.fp4_round_trip(numerics.hadamard(x))

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
        config, count = self.config, x.shape[0]
        if (start + count) // rows.ratio <= config.top_k:
            return [None] * count
        q = self.linear(low_rank, weights.q_b).unflatten(-1, (config.index_heads, -1))
        cos, sin = rope.rows(start, count)
        q = self._round_index(rotate(q, cos[:, None], sin[:, None]))
        scale = (config.index_dim * config.index_heads) ** -0.5
        gains = self.linear(x, weights.proj) * scale
        selected: list[torch.Tensor | None] = []
        for i in range(count):
            visible = (start + i + 1) // rows.ratio
            if visible <= config.top_k:
                selected.append(None)
                continue
            dots = torch.clamp(q[i] @ rows.pool[:visible].T, min=0.0)
            scores = (gains[i, :, None] * dots).sum(0)
            # stable: exact ties (the clamp makes zeros) go to the smaller block number
            order = torch.sort(scores, descending=True, stable=True).indices[: config.top_k]
            selected.append(torch.sort(order).values)
        return selected

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
        scale = self.config.head_dim**-0.5
        sinks = layer.sinks[:, None]
        outputs = []
        for i in range(q.shape[0]):
            position = start + i
            first = max(0, position - self.config.window + 1)
            keys = rows.window[_slots(first, position - first + 1, rows.window)]
            if rows.compressed is not None:
                visible = (position + 1) // rows.compressed.ratio
                choice = selected[i] if selected is not None else None
                pool = rows.compressed.pool
                keys = torch.cat((keys, pool[:visible] if choice is None else pool[choice]))
            scores = (q[i] @ keys.T) * scale
            top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
            outputs.append((weights / total) @ keys)
        cos, sin = rope.rows(start, q.shape[0])
        return rotate(torch.stack(outputs), cos[:, None], -sin[:, None])

    def attention_output(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Grouped low-rank output projection of `[M, H, d]`: `[M, D]`."""
        return self.linear(self._grouped(heads, layer), layer.out_b)

    def _grouped(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Each group's own projection of `[M, H, d]`, side by side: `[M, G * O]`."""
        groups = self.config.groups
        inputs = heads.flatten(1).unflatten(-1, (groups, -1))
        weight = self._dequantised(layer.out_a).unflatten(0, (groups, -1))
        parts = [self._product(inputs[:, g], weight[g]) for g in range(groups)]
        return torch.cat(parts, dim=-1)

    # --- mixture of experts ----------------------------------------------------------------------

    def _route(
        self, x: torch.Tensor, tokens: Sequence[int], layer: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected experts `[M, used]` (int64) and their weights `[M, used]`."""
        config, moe = self.config, layer.moe
        gates = torch.sqrt(numerics.softplus(self.linear(x, moe.router)))
        if moe.table is not None:
            chosen = moe.table[_ids(tokens, x.device)].long()
        else:
            biased = gates if moe.bias is None else gates + moe.bias
            if not bool(torch.isfinite(biased).all()):
                raise NumericsError(f"layer {layer.index}: the router's scores are not finite")
            order = torch.sort(biased, dim=-1, descending=True, stable=True).indices
            chosen = order[:, : config.experts_used]
        weights = torch.gather(gates, 1, chosen)
        if config.expert_norm:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=ROUTER_FLOOR)
        return chosen, weights * config.expert_scale

    def _expert(
        self, x: torch.Tensor, gate: QTensor, up: QTensor, down: QTensor, clamp: float
    ) -> torch.Tensor:
        g, u = self.linear(x, gate), self.linear(x, up)
        if clamp > 1e-6:
            g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
        return self.linear(numerics.silu(g) * u, down)

    def moe(self, x: torch.Tensor, tokens: Sequence[int], layer: LayerWeights) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
        moe = layer.moe
        chosen, weights = self._route(x, tokens, layer)
        parts = self._expert_parts(x, chosen, layer)
        total = self._expert(x, moe.shared_gate, moe.shared_up, moe.shared_down, layer.clamp_shared)
        for place in range(chosen.shape[1]):
            total = total + weights[:, place, None] * parts[:, place]
        return total

    def _expert_parts(
        self, x: torch.Tensor, chosen: torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """What each chosen expert of each row gives, `[M, used, D]`."""
        moe = layer.moe
        parts = x.new_empty(*chosen.shape, x.shape[-1])
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            parts[rows, places] = self._expert(
                x[rows],
                moe.gate.expert(expert),
                moe.up.expert(expert),
                moe.down.expert(expert),
                layer.clamp,
            )
        return parts


def _ids(tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=device)


def _slots(start: int, count: int, ring: torch.Tensor) -> torch.Tensor:
    """Ring slots of the positions `start .. start+count-1`."""
    return torch.arange(start, start + count, device=ring.device) % ring.shape[0]
