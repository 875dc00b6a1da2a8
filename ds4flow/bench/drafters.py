"""Where the drafts of a measurement come from: the model's own MTP block, or a synthetic oracle.

Both pay for every draft step; they differ in which token they propose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ds4flow.cache import KVCache
from ds4flow.errors import UsageError
from ds4flow.model.mtp import MtpBlock
from ds4flow.speculate import Draft, argmax, top_gap


class Drafter(Protocol):
    """Proposes tokens after `token`, which will lie at `cache.length`."""

    synthetic: bool

    def begin(self) -> None:
        """Called when a run starts."""

    def propose(
        self, block: MtpBlock, hidden: torch.Tensor, token: int, depth: int, cache: KVCache
    ) -> list[Draft]:
        """Up to `depth` drafts; `hidden [N, D]` are the target's streams before `token`."""


class OwnDrafter:
    """The MTP block applied recursively to its own streams."""

    synthetic = False

    def begin(self) -> None:
        """Nothing is kept between drafts."""

    def propose(
        self, block: MtpBlock, hidden: torch.Tensor, token: int, depth: int, cache: KVCache
    ) -> list[Draft]:
        """`depth` drafts."""
        drafts: list[Draft] = []
        streams = hidden
        for place in range(depth):
            logits, streams = block.step(streams, token, cache.length + place, cache)
            token = int(argmax(logits))
            drafts.append(Draft(token, top_gap(logits)))
        return drafts


@dataclass
class OracleDrafter:
    """Synthetic acceptance: proposes the recorded greedy tokens, spoiled at given rates.

    `recorded[i]` is the greedy token at position `first + i`. Of the drafts at place j whose
    predecessors were all right, the part `rates[j]` is right (the last rate holds beyond the end),
    spread evenly over a run: the acceptance of a long run is exact, without the noise of draws. The
    MTP block runs for its cost and its answer is thrown away.
    """

    recorded: Sequence[int]
    first: int
    rates: Sequence[float]
    vocab: int
    reached: list[int] = field(default_factory=list, init=False)  # drafts by place, this run
    synthetic = True

    def __post_init__(self) -> None:
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise UsageError(
                f"oracle rates {list(self.rates)} are not probabilities", "use numbers from 0 to 1"
            )

    def begin(self) -> None:
        """Start the pattern of right and wrong anew."""
        self.reached = []

    def propose(
        self, block: MtpBlock, hidden: torch.Tensor, token: int, depth: int, cache: KVCache
    ) -> list[Draft]:
        """`depth` drafts, fewer where the recording ends."""
        drafts: list[Draft] = []
        streams, alive = hidden, True
        for place in range(depth):
            at = cache.length + 1 + place
            if at - self.first >= len(self.recorded):
                break
            logits, streams = block.step(streams, token, cache.length + place, cache)
            argmax(logits)
            token = int(self.recorded[at - self.first])
            if alive and not self._right(place):
                alive = False
                token = (token + 1 + (at * 7919 + place) % (self.vocab - 1)) % self.vocab
            drafts.append(Draft(token, top_gap(logits)))
        return drafts

    def _right(self, place: int) -> bool:
        """Whether the next draft at `place` is right: count times rate passes an integer."""
        if place == len(self.reached):
            self.reached.append(0)
        rate = self.rates[min(place, len(self.rates) - 1)]
        before = self.reached[place]
        self.reached[place] += 1
        # the small term keeps rates such as 0.8 from losing a whole step to rounding
        return math.floor((before + 1) * rate + 1e-9) > math.floor(before * rate + 1e-9)
