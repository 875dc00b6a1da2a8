"""Where the drafts of a measurement come from: the model's own MTP block, or a synthetic oracle.

Both pay for every draft step; they differ in which token they propose.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ds4flow.cache import KVCache
from ds4flow.model.mtp import MtpBlock, Pairs
from ds4flow.oracle import Oracle
from ds4flow.speculate import Draft, top_two


class Drafter(Protocol):
    """Proposes tokens after `token`, which will lie at `cache.length`."""

    synthetic: bool

    def begin(self) -> None:
        """Called when a run starts."""

    def propose(
        self,
        block: MtpBlock,
        hidden: torch.Tensor,
        token: int,
        depth: int,
        cache: KVCache,
        stale: Pairs | None = None,
    ) -> list[Draft]:
        """Up to `depth` drafts; `hidden [N, D]` are the target's streams before `token`.

        `stale` are rows of the block that must be written first (`MtpBlock.step`).
        """


class OwnDrafter:
    """The MTP block applied recursively to its own streams."""

    synthetic = False

    def begin(self) -> None:
        """Nothing is kept between drafts."""

    def propose(
        self,
        block: MtpBlock,
        hidden: torch.Tensor,
        token: int,
        depth: int,
        cache: KVCache,
        stale: Pairs | None = None,
    ) -> list[Draft]:
        """`depth` drafts."""
        drafts: list[Draft] = []
        streams = hidden
        for place in range(depth):
            logits, streams = block.step(streams, token, cache.length + place, cache, stale)
            stale = None
            token, gap = top_two(logits)
            drafts.append(Draft(token, gap))
        return drafts


class OracleDrafter:
    """Synthetic acceptance (`ds4flow.oracle`); the MTP block runs and its answer is thrown away."""

    synthetic = True

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def begin(self) -> None:
        """Start the pattern of right and wrong anew."""
        self.oracle.begin()

    def propose(
        self,
        block: MtpBlock,
        hidden: torch.Tensor,
        token: int,
        depth: int,
        cache: KVCache,
        stale: Pairs | None = None,
    ) -> list[Draft]:
        """`depth` drafts, fewer where the recording ends."""
        drafts: list[Draft] = []
        streams = hidden
        self.oracle.chain()
        for position in range(cache.length, cache.length + depth):
            if not self.oracle.left(position + 1):
                break
            logits, streams = block.step(streams, token, position, cache, stale)
            stale = None
            _, gap = top_two(logits)  # as dear as a real draft
            token = self.oracle.propose(position + 1)
            drafts.append(Draft(token, gap))
        return drafts
