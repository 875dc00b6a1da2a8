"""The multi-token-prediction block: drafts from the trunk's streams, one token deeper a step.

Alignment is the trained one: row q pairs the streams of position q-1 with the token at q and
predicts the token at q+1. Row 0 has no predecessor and gets zero streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4flow.kernels.interface import Cache, Kernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.head import head_logits
from ds4flow.model.layer import layer_forward
from ds4flow.model.rope import Rope
from ds4flow.model.weights import MtpWeights, TrunkWeights


class MtpBlock:
    """One transformer layer with its own window rows, hyper-connection head and final norm.

    Embedding and output matrix are the trunk's unless the file brings its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MtpWeights,
        trunk: TrunkWeights,
        kernels: Kernels,
        rope: Rope,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.rope = rope
        self.embedding = weights.embed or trunk.embed
        self.output = weights.output or trunk.output

    def _join(self, streams: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Input streams `[M, N, D]` of the block from the paired streams and tokens."""
        kernels, weights = self.kernels, self.weights
        embedded = kernels.rms_norm(kernels.embed(self.embedding, tokens), weights.enorm)
        embedded = kernels.linear(embedded, weights.e_proj)
        normed = kernels.rms_norm(streams, weights.hnorm)
        hidden = kernels.linear(normed.flatten(0, 1), weights.h_proj).unflatten(
            0, streams.shape[:2]
        )
        return embedded[:, None, :] + hidden

    @torch.inference_mode()
    def warm(self, streams: torch.Tensor, tokens: Sequence[int], first: int, cache: Cache) -> None:
        """Write the window rows of positions `first ..` without running the whole block.

        `streams [M, N, D]` are the trunk's of positions `first-1 ..`; `tokens` lie at `first ..`. A
        row depends on its own pair only. Rows that no later draft can see are skipped.
        """
        skipped = max(0, len(tokens) - self.config.window)
        streams, tokens, first = streams[skipped:], tokens[skipped:], first + skipped
        layer = self.weights.layer
        joined = self._join(streams, tokens)
        x, _, _ = self.kernels.hc_pre(joined, layer.hc_attn, layer.attn_norm)
        self.kernels.kv_rows(x, layer, self.rope, cache.mtp.window, first)

    def follow(
        self,
        tokens: Sequence[int],
        first: int,
        previous: torch.Tensor | None,
        streams: torch.Tensor,
        cache: Cache,
    ) -> None:
        """Write the rows of `tokens` (positions `first ..`) that the trunk has just processed.

        `streams [M, N, D]` are the trunk's of the same positions, `previous [N, D]` those of
        position `first-1` (None at position 0).
        """
        head = torch.zeros_like(streams[0]) if previous is None else previous
        self.warm(torch.cat((head[None], streams[:-1])), tokens, first, cache)

    @torch.inference_mode()
    def forward(
        self, streams: torch.Tensor, tokens: Sequence[int], first: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block on M pairs at positions `first ..`.

        Returns draft logits `[M, V]` and the block's own streams `[M, N, D]`, the input of the next
        depth. Raises NumericsError when a logit is not finite.
        """
        cache.check_room(first, len(tokens))
        joined = self._join(streams, tokens)
        out = layer_forward(
            self.kernels, joined, tokens, self.weights.layer, cache.mtp, self.rope, first
        )
        where = f"MTP block at position {first}"
        return head_logits(self.kernels, out, self.weights.head, self.output, where), out

    def step(
        self, streams: torch.Tensor, token: int, position: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: logits `[V]` and streams `[N, D]` for (`streams [N, D]`, `token`)."""
        logits, out = self.forward(streams[None], [token], position, cache)
        return logits[0], out[0]
