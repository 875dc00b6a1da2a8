"""Synthetic acceptance: the target's own greedy tokens, spoiled at given rates by draft position.

For benchmarks and tests. What it proposes is verified like any draft, so it never changes the text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds4flow.errors import UsageError


@dataclass
class Oracle:
    """Proposes `recorded`, whose token i is the greedy one at position `first + i`.

    Of the drafts at place j of a chain whose predecessors were all right, the part `rates[j]` is
    right (the last rate holds beyond the end), spread evenly over a run from a phase that `seed`
    decides: the acceptance of a long run is exact, without the noise of draws. A wrong draft is
    another token of the `vocab`, never `avoid`.
    """

    recorded: Sequence[int]
    first: int
    rates: Sequence[float]
    vocab: int
    seed: int = 0
    avoid: int | None = None
    _reached: list[int] = field(default_factory=list, init=False)  # drafts by place, this run
    _phases: list[float] = field(
        default_factory=list, init=False
    )  # where each place's pattern starts
    _place: int = field(default=0, init=False)
    _alive: bool = field(default=True, init=False)  # all drafts of this chain were right so far

    def __post_init__(self) -> None:
        check_rates(self.rates)

    def begin(self) -> None:
        """Start the pattern of right and wrong anew."""
        self._reached = []

    def chain(self) -> None:
        """Start a new chain of drafts, whose first has place 0."""
        self._place, self._alive = 0, True

    def left(self, position: int) -> int:
        """How many drafts can be proposed from `position` on."""
        return max(0, self.first + len(self.recorded) - position)

    def propose(self, position: int) -> int:
        """The next draft of the chain, meant for `position`."""
        token, place = int(self.recorded[position - self.first]), self._place
        self._place += 1
        if self._alive and not self._right(place):
            self._alive = False
            return self._wrong(token, position * 7919 + place)
        return token

    def _wrong(self, token: int, mark: int) -> int:
        lie = (token + 1 + mark % (self.vocab - 1)) % self.vocab
        while lie in (token, self.avoid):
            lie = (lie + 1) % self.vocab
        return lie

    def _right(self, place: int) -> bool:
        """Whether the next draft at `place` is right: count times rate passes an integer."""
        if place == len(self._phases):  # making a generator takes longer than a draft step may
            self._phases.append(random.Random(f"{self.seed}:{place}").random())
        if place == len(self._reached):
            self._reached.append(0)
        rate = self.rates[min(place, len(self.rates) - 1)]
        before = self._reached[place]
        self._reached[place] += 1
        # the small term keeps rates such as 0.8 from losing a whole step to rounding
        start = before * rate + self._phases[place] + 1e-9
        return math.floor(start + rate) > math.floor(start)


def check_rates(rates: Sequence[float]) -> None:
    """Raise UsageError unless `rates` are probabilities, at least one."""
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise UsageError(
            f"oracle rates {list(rates)} are not probabilities", "use numbers from 0 to 1"
        )
