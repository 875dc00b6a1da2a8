"""Where the drafts of a measurement come from: the model's own MTP block, or a synthetic oracle.

Both pay for every draft step; they differ in which token they propose.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ds4flow.cache import KVCache
from ds4flow.model.mtp import MtpBlock, Pairs
from ds4flow.oracle import Oracle


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
    ) -> list[int]:
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
    ) -> list[int]:
        """`depth` drafts, fewer where the oracle's recording ends."""
        forced = self._forced(cache.length + 1, depth)
        count = depth if forced is None else len(forced)
        if not count:
            return []
        first = cache.length
        return block.chain(hidden, token, first, cache, stale, count=count, forced=forced).tokens

    def _forced(self, position: int, depth: int) -> list[int] | None:
        """The drafts for `position ..` if they are not the block's own."""
        return None


class OracleDrafter(OwnDrafter):
    """Synthetic acceptance (`ds4flow.oracle`); the MTP block runs and its answer is thrown away."""

    synthetic = True

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def begin(self) -> None:
        """Start the pattern of right and wrong anew."""
        self.oracle.begin()

    def _forced(self, position: int, depth: int) -> list[int]:
        self.oracle.chain()
        places = range(position, position + min(depth, self.oracle.left(position)))
        return [self.oracle.propose(place) for place in places]
