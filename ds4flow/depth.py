"""Choosing how many drafts pay: `mtp.draft=auto`.

The policy learns acceptance by draft position and the cost of drafting and of a verify pass by
width, and takes the depth with the most expected tokens per second. Costs that were not measured
yet are expected to grow as the bytes that are read. It never sees a token, so it cannot change the
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ds4flow.model.trunk import Model

COST_MEMORY = 0.1  # least weight of a new cost in its running mean
FASTEST_OF = 3  # first costs of a kind, of which the least counts
COST_CLIP = 1.5  # a cost that is this many times the mean counts as no more: it was interrupted
ACCEPT_MEMORY = 12.0  # looks at a draft position that are remembered
ACCEPT_IDLE = 1 - 1 / 128  # what a cycle without drafts leaves of them
ACCEPT_GUESS = 0.6  # acceptance of the first draft before any look, with the weight of one look
AUTO_DEPTH_MAX = 8  # deepest drafts that mtp.draft=auto tries
MIN_SAMPLES = 4  # looks at the first draft before it may be given up
MIN_COSTS = 2  # passes of a width before their cost is believed
LEAST = 1e-9  # seconds of a pass; a clock that stands still must not make it free
WARMING = 2  # cycles whose costs are not counted
WORTH = 1.02  # expected gain from which drafting is better than not
PROMISING = 0.9  # a deeper draft this close to the best is worth a first look
OUTDATED = 24  # cycles after which a cost may have changed with the machine
SURPRISE = 1.25  # a probe that is off by this factor is made once more
PROBE_OFF = 64  # cycles before the first probe while nothing is drafted; doubles up to PROBE_LAST
PROBE_ON = 16  # the same while drafting
PROBE_LAST = 256
ROW = 0.02  # of a pass of one row: what each further row costs beside its bytes
SETTLED = 4  # cycles between two looks at the choice once it rests on enough
SETTLED_OFF = 16  # the same while nothing is drafted, and so little is learned


def draft_max(draft: int | str) -> int:
    """The most drafts of one cycle that a value of `mtp.draft` can ask for."""
    return AUTO_DEPTH_MAX if isinstance(draft, str) else draft


@dataclass
class Mean:
    """Running mean of costs that forgets slowly. An interrupted cycle is dearer, never cheaper, so
    it starts as the least of a few and cuts what is far above it.
    """

    value: float = 0.0
    count: int = 0
    last: int = 0  # cycle of the last sample

    def add(self, sample: float, cycle: int) -> None:
        """Take one sample; after a long time without any, it counts for half."""
        if self.count < FASTEST_OF:
            self.value = min(sample, self.value) if self.count else sample
        else:
            weight = 0.5 if cycle - self.last > OUTDATED else COST_MEMORY
            self.value += weight * (min(sample, COST_CLIP * self.value) - self.value)
        self.count += 1
        self.last = cycle


@dataclass
class Looks:
    """Outcomes at one draft position: how many were looked at and how many were right."""

    right: float = 0.0
    count: float = 0.0
    seen: int = 0  # looks ever; the others fade

    def add(self, right: bool) -> None:
        """Take one outcome."""
        if self.count > ACCEPT_MEMORY - 1.0:
            self.fade((ACCEPT_MEMORY - 1.0) / self.count)
        self.seen += 1
        self.count += 1.0
        self.right += right

    def fade(self, factor: float) -> None:
        """Let what was seen count less, but never as if nothing had been seen."""
        if self.count > MIN_SAMPLES:
            factor = max(factor, MIN_SAMPLES / self.count)
            self.right *= factor
            self.count *= factor

    def mean(self, guess: float) -> float:
        """Expected acceptance; `guess` counts as one look."""
        return (self.right + guess) / (self.count + 1.0)

    def hope(self, guess: float) -> float:
        """The same, with the benefit of the doubt while looks are few."""
        mean = self.mean(guess)
        if self.seen >= MIN_SAMPLES:
            return mean
        return min(1.0, mean + math.sqrt(mean * (1.0 - mean) / (self.seen + 2)))


class Decision(NamedTuple):
    """The depth of one cycle and why: `learn`, `best`, `off` (drafting does not pay) or `probe`."""

    depth: int
    why: str
    expected: float = 0.0  # tokens per second expected at this depth, 0 while learning


@dataclass(frozen=True)
class Prior:
    """Costs before anything is measured, in passes of one row: of passes by width, of one draft.

    `passes[w - 1]` is that of width w; a wider pass than the last grows as the last one did.
    """

    passes: tuple[float, ...] = (1.0, 1.1)
    step: float = 0.1

    @classmethod
    def of(cls, model: Model, depth_max: int = AUTO_DEPTH_MAX) -> Prior:
        """By the weight bytes that passes and drafts read: the least that they can cost.

        A row more is never free, also where all experts are read anyway.
        """
        first = model.weight_bytes(1)
        sizes = [
            model.weight_bytes(rows) + ROW * (rows - 1) * first for rows in range(1, depth_max + 2)
        ]
        step = 0.0 if model.mtp is None else model.mtp.weight_bytes()
        return cls(tuple(size / sizes[0] for size in sizes), step / sizes[0])

    def width(self, width: int) -> float:
        """The cost of a pass of `width` rows."""
        if width <= len(self.passes):
            return self.passes[width - 1]
        last = self.passes[-1]
        return last + (last - self.passes[-2]) * (width - len(self.passes))


@dataclass
class DepthPolicy:
    """State of the choice during one run; `depth_max` bounds the depth."""

    depth_max: int
    prior: Prior = field(default_factory=Prior)
    accept: list[Looks] = field(init=False)
    verify: dict[int, Mean] = field(default_factory=dict)  # seconds of a pass, by width
    draft: dict[int, Mean] = field(default_factory=dict)  # seconds of drafting, by steps
    cycle: int = 0
    rest: int = 0  # cycles without drafts that acceptance has not faded by yet
    best: int = 0
    idle: int = 0  # cycles since the last probe
    probe_after: int = PROBE_OFF
    probes: int = 0
    probing: bool = False
    again: int | None = None  # a depth to be probed once more
    expected: float = 0.0  # tokens per second of the best
    settled: int = 0  # cycles until the choice is looked at again
    warming: int = WARMING

    def __post_init__(self) -> None:
        self.accept = [Looks() for _ in range(self.depth_max)]

    # --- learning ---------------------------------------------------------------------------------

    def observe(
        self, *, drafted: int, accepted: int, steps: int, draft_s: float, verify_s: float
    ) -> None:
        """Learn from a cycle: `steps` draft steps took `draft_s`, the pass of `drafted + 1` rows
        took `verify_s` seconds and kept the first `accepted` drafts.
        """
        self.cycle += 1
        for place in range(min(accepted + 1, drafted)):
            self.accept[place].add(place < accepted)
        if steps > drafted == accepted:  # a draft that the gate held back gains nothing either
            self.accept[drafted].add(False)
        self.rest += not drafted
        if self.warming:  # caches and memory are cold: these costs will not come again
            self.warming -= 1
            return
        width = drafted + 1
        mean = self.verify.setdefault(width, Mean())
        before, known = mean.value, mean.count >= MIN_COSTS
        mean.add(max(verify_s, LEAST), self.cycle)
        if self.probing:
            self._weigh(drafted, accepted, verify_s / before if known and before else 1.0)
        elif known and before:
            self._drift(width, steps, mean.value / before)
        if steps:
            self.draft.setdefault(steps, Mean()).add(draft_s, self.cycle)

    def _weigh(self, drafted: int, accepted: int, surprise: float) -> None:
        """What a probe showed is looked at in the next cycle, or first tried once more."""
        self.settled = 0
        if not self.best and drafted == accepted > 0:
            self.again = drafted  # better than thought
        elif self.again is None and not 1 / SURPRISE < surprise < SURPRISE:
            self.again = drafted
        else:
            self.again = None

    def _drift(self, width: int, steps: int, factor: float) -> None:
        """A machine gets faster or slower as a whole: the costs not in use follow the one in use.

        Else a cost measured in a slow moment would rule a depth out, or in, for good.
        """
        for other, mean in self.verify.items():
            if other != width:
                mean.value *= factor
        for other, mean in self.draft.items():
            if other != steps:
                mean.value *= factor

    # --- expectations -----------------------------------------------------------------------------

    def cost(self, depth: int) -> float:
        """Expected seconds of a cycle with `depth` drafts."""
        passes = _fitted(self.verify, self.prior.width, depth + 1)
        if not depth:
            return passes
        if self.draft:  # the first step of a cycle refreshes rows as well, so this is no multiple
            return passes + _fitted(self.draft, float, depth)
        return passes + depth * self.prior.step * _fitted(self.verify, self.prior.width, 1)

    def rates(self, deepest: int) -> list[float]:
        """Expected tokens per second of cycles with 0, 1, .. `deepest` drafts.

        Positions that were seldom looked at get the benefit of the doubt.
        """
        tokens, reach, guess = 1.0, 1.0, ACCEPT_GUESS
        found = [1.0 / self.cost(0)]
        for depth, looks in enumerate(self.accept[:deepest], 1):
            reach *= looks.hope(guess)
            guess = looks.mean(guess)
            tokens += reach
            found.append(tokens / self.cost(depth))
        return found

    # --- choosing ---------------------------------------------------------------------------------

    def choose(self, room: int) -> Decision:
        """The depth of the next cycle, at most `room`."""
        limit = min(room, self.depth_max)
        self.probing = False
        if limit <= 0:
            return Decision(0, "off")
        if self.settled and limit >= self.best:
            self.settled -= 1
            return self._next(limit)
        if self.rest:
            for looks in self.accept:
                looks.fade(ACCEPT_IDLE**self.rest)
            self.rest = 0
        if self._costs(1) < MIN_COSTS:
            return Decision(0, "learn")
        hopeless = self._hopeless(limit)
        if hopeless:
            self.again = None
        if self.accept[0].seen < MIN_SAMPLES and not hopeless:
            return Decision(1, "learn")
        rates = self.rates(limit)
        rates[0] *= WORTH
        # one step beyond what was measured: expectations carry no further
        deepest = min(limit, max(self.verify, default=1))
        best = 0 if hopeless else rates.index(max(rates[: deepest + 1]))
        if best and self._costs(best + 1) < MIN_COSTS:
            return Decision(best, "learn")
        untried = 0 < best < limit and self._costs(best + 2) < MIN_COSTS
        if untried and rates[best + 1] >= PROMISING * rates[best]:
            return Decision(best + 1, "learn")
        if bool(best) != bool(self.best):
            self.idle, self.probe_after = 0, PROBE_ON if best else PROBE_OFF
        self.best = best
        self.expected = rates[best]
        if not best:
            self.settled = SETTLED_OFF
        elif self.accept[best - 1].seen >= ACCEPT_MEMORY:
            self.settled = SETTLED
        return self._next(limit)

    def _next(self, limit: int) -> Decision:
        """The best depth, or now and then a neighbour of it.

        What is not tried is not measured: without this, one bad stretch would last forever.
        """
        best = self.best
        self.idle += 1
        if self.again is not None and self.again <= limit:
            self.probing = True
            return Decision(self.again, "probe", self.expected)
        if self.idle <= self.probe_after:
            return Decision(best, "best" if best else "off", self.expected)
        self.probing = True
        self.idle, self.probe_after = 0, min(2 * self.probe_after, PROBE_LAST)
        self.probes += 1
        near = dict.fromkeys((best + 1, 0, best - 1))
        others = [depth for depth in near if depth != best and 0 <= depth <= limit]
        return Decision(others[self.probes % len(others)], "probe", self.expected)

    def _hopeless(self, limit: int) -> bool:
        """Whether not even drafts that are all accepted would pay, by costs that were measured."""
        if self._costs(2) < MIN_COSTS:
            return False
        plain = self.cost(0)
        return all((depth + 1) * plain < self.cost(depth) for depth in range(1, limit + 1))

    def _costs(self, width: int) -> int:
        mean = self.verify.get(width)
        return mean.count if mean else 0


def _fitted(measured: Mapping[int, Mean], shape: Callable[[int], float], size: int) -> float:
    """The cost at `size`: as measured, or between and beyond what was measured as `shape` grows."""
    if size in measured:
        return measured[size].value
    low, high = min(measured), max(measured)
    unit = measured[high].value / shape(high)
    slope = unit
    if low != high:  # as steep as measured, but nothing is free
        rise = measured[high].value - measured[low].value
        slope = max(rise / (shape(high) - shape(low)), 0.25 * unit)
    below = max((known for known in measured if known < size), default=None)
    above = min((known for known in measured if known > size), default=None)
    if below is None:  # then all that was measured lies above
        return max(measured[low].value - slope * (shape(low) - shape(size)), 0.1 * unit)
    if above is None:
        return measured[below].value + slope * (shape(size) - shape(below))
    a, b = measured[below].value, measured[above].value
    part = (shape(size) - shape(below)) / (shape(above) - shape(below))
    return a + max(b - a, 0.0) * part
