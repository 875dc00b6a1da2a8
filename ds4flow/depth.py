"""Choosing how many drafts pay: `mtp.draft=auto`.

The policy measures acceptance by draft position and the cost of a draft step and of a verify pass
by width, and takes the depth with the most expected tokens per second. It never sees a token, so it
cannot change the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

COST_MEMORY = 0.1  # least weight of a new cost in its running mean
ACCEPT_MEMORY = 1 / 64  # the same for acceptance: single outcomes say little
AUTO_DEPTH_MAX = 8  # deepest drafts that mtp.draft=auto tries
MIN_SAMPLES = 4  # looks at a draft position or a width before a decision may rest on it
WARMING = 2  # cycles whose costs are not counted
PROBE_FIRST = 16  # cycles between probes of a neighbour; doubles while they change nothing
PROBE_LAST = 256


def draft_max(draft: int | str) -> int:
    """The most drafts of one cycle that a value of `mtp.draft` can ask for."""
    return AUTO_DEPTH_MAX if isinstance(draft, str) else draft


@dataclass
class Mean:
    """Running mean that starts as a plain average and then forgets slowly."""

    value: float = 0.0
    count: int = 0
    memory: float = COST_MEMORY

    def add(self, sample: float) -> None:
        """Take one sample."""
        self.count += 1
        self.value += max(1.0 / self.count, self.memory) * (sample - self.value)


class Decision(NamedTuple):
    """The depth of one cycle and why: `learn`, `best`, `off` (drafting does not pay) or `probe`."""

    depth: int
    why: str
    expected: float = 0.0  # tokens per second expected at this depth, 0 while learning


@dataclass
class DepthPolicy:
    """State of the choice during one run; `depth_max` bounds the depth."""

    depth_max: int
    accept: list[Mean] = field(init=False)
    verify: dict[int, Mean] = field(default_factory=dict)  # seconds of a pass, by width
    step: Mean = field(default_factory=Mean)  # seconds of one draft step
    best: int = 0
    idle: int = 0  # cycles since the last probe
    probe_after: int = PROBE_FIRST
    probes: int = 0
    probing: bool = False
    warming: int = WARMING

    def __post_init__(self) -> None:
        # Optimistic until measured: an untried position is worth trying.
        self.accept = [Mean(1.0, memory=ACCEPT_MEMORY) for _ in range(self.depth_max)]

    def observe(
        self, *, drafted: int, accepted: int, steps: int, draft_s: float, verify_s: float
    ) -> None:
        """Learn from a cycle: `steps` draft steps took `draft_s`, the pass of `drafted + 1` rows
        took `verify_s` seconds and kept the first `accepted` drafts.
        """
        for place in range(min(accepted + 1, drafted)):
            self.accept[place].add(1.0 if place < accepted else 0.0)
        if self.warming:  # caches and memory are cold: these costs will not come again
            self.warming -= 1
            return
        width = drafted + 1
        mean = self.verify.setdefault(width, Mean())
        before, settled = mean.value, mean.count >= MIN_SAMPLES and not self.probing
        mean.add(verify_s)
        if settled and before:
            self._drift(width, mean.value / before)
        if steps:
            self.step.add(draft_s / steps)

    def _drift(self, width: int, factor: float) -> None:
        """A machine gets faster or slower as a whole: the widths not in use follow the one in use.

        Else a cost measured in a slow moment would rule a depth out, or in, for good.
        """
        for other, mean in self.verify.items():
            if other != width:
                mean.value *= factor

    def cost(self, depth: int) -> float:
        """Expected seconds of a cycle with `depth` drafts; widths not yet seen are interpolated."""
        return self._pass_cost(depth + 1) + depth * self.step.value

    def _pass_cost(self, width: int) -> float:
        known = sorted(w for w, mean in self.verify.items() if mean.count)
        if width in self.verify:
            return self.verify[width].value
        low = max((w for w in known if w < width), default=known[0])
        high = min((w for w in known if w > width), default=known[-1])
        if low == high:  # beyond what was measured: as steep as the whole measured range
            low, high = known[0], known[-1]
        if low == high:
            return self.verify[low].value
        a, b = self.verify[low].value, self.verify[high].value
        return a + max(b - a, 0.0) * (width - low) / (high - low)

    def tokens(self, depth: int) -> float:
        """Expected tokens of a cycle with `depth` drafts."""
        total, reach = 1.0, 1.0
        for place in range(depth):
            reach *= self.accept[place].value
            total += reach
        return total

    def rate(self, depth: int) -> float:
        """Expected tokens per second of cycles with `depth` drafts."""
        cost = self.cost(depth)
        return self.tokens(depth) / cost if cost > 0.0 else 0.0

    def choose(self, room: int) -> Decision:
        """The depth of the next cycle, at most `room`."""
        limit = min(room, self.depth_max)
        if limit <= 0:
            return Decision(0, "off")
        lacking = self._lacking(limit)
        if lacking is not None:
            return Decision(lacking, "learn")
        best = max(range(limit + 1), key=lambda depth: (self.rate(depth), -depth))
        if best != self.best:
            self.best, self.idle, self.probe_after = best, 0, PROBE_FIRST
        self.idle += 1
        self.probing = self.idle >= self.probe_after
        if self.probing:
            # What is not tried is not measured: without this, one bad stretch would last forever.
            self.idle, self.probe_after = 0, min(2 * self.probe_after, PROBE_LAST)
            self.probes += 1
            probe = best + 1 if best == 0 or (self.probes % 2 and best < limit) else best - 1
            return Decision(min(probe, limit), "probe", self.rate(min(probe, limit)))
        return Decision(best, "best" if best else "off", self.rate(best))

    def _lacking(self, limit: int) -> int | None:
        """A depth that must still be tried: none, one, then deeper while the last one may pay."""
        for depth in (0, 1):
            if self._samples(depth + 1) < MIN_SAMPLES:
                return depth
        for depth in range(2, limit + 1):
            if self._samples(depth + 1) >= MIN_SAMPLES:
                continue
            # Even a certain draft more must beat the best so far to be worth the measurement.
            reach = self.tokens(depth - 1) - self.tokens(depth - 2)
            hoped = (self.tokens(depth - 1) + reach) / self.cost(depth)
            seen = max(self.rate(d) for d in range(depth))
            return depth if hoped > seen else None
        return None

    def _samples(self, width: int) -> int:
        mean = self.verify.get(width)
        return mean.count if mean else 0
