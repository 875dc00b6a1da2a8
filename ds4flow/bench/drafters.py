"""Where the drafts of a measurement come from: the model's own MTP block, or a synthetic oracle.

Both pay for every draft step; they differ in which token they propose.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch

from ds4flow.cache import KVCache
from ds4flow.model.mtp import MtpBlock, Pairs
from ds4flow.oracle import Oracle
from ds4flow.ranks import ranks


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
        """`depth` drafts, fewer where `_room` ends."""
        drafts: list[int] = []
        streams = hidden
        first = cache.length
        for position in range(first, first + min(depth, self._room(first + 1))):
            logits, streams = block.step(streams, token, position, cache, stale)
            stale = None
            token = self._choose(ranks(logits).choices[0], position + 1)
            drafts.append(token)
        return drafts

    def _room(self, position: int) -> int:
        """How many drafts there may be from `position` on, where a new chain starts."""
        return sys.maxsize

    def _choose(self, best: int, position: int) -> int:
        """The draft for `position`, where the block's choice is `best`."""
        return best


class OracleDrafter(OwnDrafter):
    """Synthetic acceptance (`ds4flow.oracle`); the MTP block runs and its answer is thrown away."""

    synthetic = True

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def begin(self) -> None:
        """Start the pattern of right and wrong anew."""
        self.oracle.begin()

    def _room(self, position: int) -> int:
        self.oracle.chain()
        return self.oracle.left(position)

    def _choose(self, best: int, position: int) -> int:
        return self.oracle.propose(position)
