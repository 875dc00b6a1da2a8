"""Hyper-connections, experts and the argmax on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4flow.errors import ModelFileError
from ds4flow.kernels.gpu import products, rows
from ds4flow.kernels.gpu.base import LOGITS, KernelBase, ceil_div, next_power, row_block
from ds4flow.kernels.gpu.launch import PRODUCT, ROW, WIDE_ROW
from ds4flow.kernels.gpu.static import Top2
from ds4flow.kernels.gpu.tiles import ROWS
from ds4flow.kernels.reference import ROUTER_FLOOR
from ds4flow.model.weights import HyperWeights, LayerWeights


class MixingKernels(KernelBase):
    """Everything of a layer but its attention."""

    # --- hyper-connections -----------------------------------------------------------------------

    def _hc_in(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor, head: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, n, width = streams.shape
        streams = streams.contiguous()
        mix = self.linear(streams.flatten(1), hyper.fn)
        x, post, comb = (
            self._empty(count, width), self._empty(count, n), self._empty(count, n, n)
        )  # fmt: skip
        vectors = [self._vectors.get(v) for v in (hyper.base, hyper.scale, norm)]
        self._launch(
            rows.hc_in,
            (count,),
            (streams, mix, *vectors, x, post, comb, self.config.eps, self.config.eps_hc),
            dict(S=n, D=width, ITERATIONS=self.config.sinkhorn, HEAD=head, BLOCK=row_block(width)),
            WIDE_ROW,
        )
        return x, post, comb

    def hc_pre(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised input `[M, D]` of a block, `post [M, N]` and `comb [M, N, N]`."""
        return self._hc_in(streams, hyper, norm, head=False)

    def hc_head(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""
        return self._hc_in(streams, hyper, norm, head=True)[0]

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams `[M, N, D]`."""
        count, n, width = streams.shape
        y = torch.empty_like(streams)
        self._launch(
            rows.hc_out,
            (count, ceil_div(width, 512)),
            (block, streams, post, comb, y),
            dict(S=n, D=width, BLOCK=512),
            ROW,
        )
        return y

    # --- mixture of experts ----------------------------------------------------------------------

    def route(
        self, x: torch.Tensor, tokens: Sequence[int] | torch.Tensor, layer: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected experts `[M, used]` (int32) and their weights `[M, used]`."""
        config, moe, count = self.config, layer.moe, x.shape[0]
        ids = self._empty(count, config.experts_used, dtype=torch.int32)
        weights = self._empty(count, config.experts_used)
        logits = self.linear(x, moe.router)
        self._launch(
            rows.route,
            (count,),
            (
                logits,
                logits if moe.bias is None else self._vectors.get(moe.bias),
                ids if moe.table is None else self._vectors.get(moe.table),
                self._ids(tokens),
                ids,
                weights,
                config.expert_scale,
                ROUTER_FLOOR,
            ),
            dict(E=config.experts, USED=config.experts_used, SLOTS=next_power(config.experts_used))
            | dict(BLOCK=next_power(config.experts), BIASED=moe.bias is not None)
            | dict(HASHED=moe.table is not None, NORMED=config.expert_norm),
            ROW,
        )
        return ids, weights

    def moe(
        self, x: torch.Tensor, tokens: Sequence[int] | torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
        count, width, used = *x.shape, self.config.experts_used
        x = x.contiguous()
        ids, weights = self.route(x, tokens, layer)
        parts = self._expert_parts(x, ids, layer)
        y = self._empty(count, width)
        self._launch(
            products.add_experts,
            (count, ceil_div(width, 512)),
            (self._shared(x, layer), parts, weights, y),
            dict(D=width, USED=used, BLOCK=512),
            ROW,
        )
        return y

    def _expert_parts(
        self, x: torch.Tensor, ids: torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """What each chosen expert of each row gives, `[M, used, D]`; nothing is written where an
        id is negative."""
        moe, count = layer.moe, x.shape[0]
        used, width = ids.shape[1], x.shape[-1]
        gate, up, down = self._planes(moe.gate), self._planes(moe.up), self._planes(moe.down)
        if gate.units != up.units:
            raise ModelFileError(
                f"{gate.name} is {gate.type} and {up.name} is {up.type}; the gpu kernels read them "
                "in equal steps",
                "use runtime.kernels=reference",
            )
        pairs = min(count, ROWS) * used
        shape = dict(USED=used, PAIRS=next_power(ROWS * used), DOT=self._dot, BN=self.columns)
        shape |= dict(ROWS=ROWS)
        inner = moe.gate.shape[1]
        h = self._empty(count, used, inner)
        self._launch(
            products.experts_in,
            (ceil_div(inner, self.columns), pairs, ceil_div(count, ROWS)),
            (
                x,
                ids,
                gate.codes,
                gate.scales,
                gate.factors,
                up.codes,
                up.scales,
                up.factors,
                self._codebook,
                h,
                count,
                float(layer.clamp),
            ),
            shape | dict(N=inner, K=width, UNITS=gate.units, GATE=gate.type, UP=up.type),
            PRODUCT,
        )
        parts = self._empty(count, used, width)
        self._launch(
            products.experts_out,
            (ceil_div(width, self.columns), pairs, ceil_div(count, ROWS)),
            (h, ids, down.codes, down.scales, down.factors, self._codebook, parts, count),
            shape | dict(N=width, K=inner, UNITS=down.units, TYPE=down.type),
            PRODUCT,
        )
        return parts

    def _shared(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        g, u = self.linear(x, layer.moe.shared_gate), self.linear(x, layer.moe.shared_up)
        h = torch.empty_like(g)
        self._launch(
            products.swiglu,
            (ceil_div(g.numel(), 256),),
            (g, u, h, g.numel(), float(layer.clamp_shared)),
            dict(BLOCK=256),
            ROW,
        )
        return self.linear(h, layer.moe.shared_down)

    # --- head ------------------------------------------------------------------------------------

    def top2(self, logits: torch.Tensor) -> Top2:
        """Argmax, its logit, its lead over the next one and the entries that are not finite, by
        row."""
        count, vocab = logits.shape
        tiles = ceil_div(vocab, LOGITS)
        first, second = self._empty(count, tiles), self._empty(count, tiles)
        index, bad = (self._empty(count, tiles, dtype=torch.int32) for _ in range(2))
        self._launch(
            rows.top2_parts,
            (count, tiles),
            (logits.contiguous(), first, index, second, bad, vocab, tiles),
            dict(BLOCK=LOGITS),
            ROW,
        )
        token = self._empty(count, dtype=torch.int64)
        top, gap = self._empty(count), self._empty(count)
        flag = self._empty(count, dtype=torch.int32)
        self._launch(
            rows.top2_join,
            (count,),
            (first, index, second, bad, token, top, gap, flag, vocab, tiles),
            dict(BLOCK=next_power(tiles)),
            ROW,
        )
        return Top2(token, top, gap, flag)
