"""Choosing how many drafts pay: `mtp.draft=auto`.

The policy learns acceptance by draft position, takes the costs from `ds4flow.pace`, and chooses the
depth with the most expected tokens per second. What may lose it tries from a purse only: a few
passes at the start, and later a small share of the run or of what drafting has gained. It never
sees a token, so it cannot change the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ds4flow.pace import AUTO_DEPTH_MAX, NEAR, Pace, Prior

if TYPE_CHECKING:
    from ds4flow.model.trunk import Model

ACCEPT_MEMORY = 12.0  # looks at a draft position that are remembered
ACCEPT_IDLE = 1 - 1 / 128  # what a cycle without a look leaves of them
ACCEPT_GUESS = 0.6  # acceptance of the first draft before any look
GUESS_LOOKS = 4.0  # looks at earlier texts that this counts as much as
TEXTS_MEMORY = 48.0  # looks at a draft position in earlier texts that are remembered
TEXTS_TELL = 24.0  # of these, so many that a text need not begin with a look of its own
PER_TEXT = 8.0  # of these, from one text at most
KEPT_LOOKS = 3.0  # looks that do not fade
MIN_LOOKS = 4.0  # looks at a draft position before the benefit of the doubt ends
AHEAD = 2  # draft positions beyond those looked at in this text
WORTH = 1.02  # expected gain from which drafting is better than not

# All in passes of one row:
FIRST_PURSE = 1.5  # what may be lost to learning before anything was gained
PURSE_SHARE = 0.004  # what a cycle adds
PURSE_REFILL = 0.03  # what it adds beside that from the reserve
PURSE_TEXT = 0.7  # least purse where a text begins; less after texts where few drafts were right
PURSE_MIN, PURSE_MAX = -1.0, 3.0
RESERVE_MAX = 30.0

UNSURE = 1.5  # of the cost by bytes, what a cost that rests on little counts for at most

BURST = 5  # cycles of a probe whose cost rests on little
PROBE_OFF = 32  # least cycles before a probe while nothing is drafted
PROBE_HOPELESS = 256  # the same where not even certain drafts would pay
PROBE_ON = 16  # the same while drafting; doubles up to PROBE_LAST
PROBE_LAST = 256
PAUSE = 17  # cycles without drafts after which a refresh costs extra (`ds4flow.stale`)
SETTLED = 4  # cycles between two looks at the choice once it rests on enough
SETTLED_OFF = 32  # the same while nothing is drafted, and so nothing is learned; doubles up to
SETTLED_LAST = 256
AWAKE = 4  # last of these cycles, whose costs tell how fast the machine is


def draft_max(draft: int | str) -> int:
    """The most drafts of one cycle that a value of `mtp.draft` can ask for."""
    return AUTO_DEPTH_MAX if isinstance(draft, str) else draft


@dataclass
class Looks:
    """Outcomes at one draft position: how many were looked at and how many were right."""

    memory: float  # looks that are remembered
    right: float = 0.0
    count: float = 0.0
    last: int = 0  # cycle up to which they have faded

    def add(self, right: float, count: float = 1.0) -> None:
        """Take outcomes."""
        if self.count > self.memory - count:
            self.fade(max(0.0, self.memory - count) / self.count)
        self.right += right
        self.count += count

    def fade(self, factor: float) -> None:
        """Let what was seen count less."""
        self.right *= factor
        self.count *= factor

    def rest(self, cycle: int) -> None:
        """Fade for the cycles up to `cycle` since the last look, but never to nothing."""
        if self.count > KEPT_LOOKS:
            self.fade(max(ACCEPT_IDLE ** max(0, cycle - self.last), KEPT_LOOKS / self.count))
        self.last = cycle

    def mean(self, guess: float, weight: float = 1.0) -> float:
        """Expected acceptance; `guess` counts as `weight` looks."""
        return (self.right + weight * guess) / (self.count + weight)


def _positions(memory: float) -> list[Looks]:
    return [Looks(memory) for _ in range(AUTO_DEPTH_MAX)]


@dataclass
class Experience:
    """What the texts so far have taught: costs, acceptance, and the purse for further learning."""

    pace: Pace = field(default_factory=Pace)
    earlier: list[Looks] = field(default_factory=lambda: _positions(TEXTS_MEMORY))
    current: list[Looks] = field(default_factory=lambda: _positions(PER_TEXT))  # of this text
    texts: int = 0
    purse: float = FIRST_PURSE
    reserve: float = 0.0  # what drafting gained beyond what the purse holds

    @classmethod
    def of(cls, model: Model, *, whole: bool = False) -> Experience:
        """That with a loaded model, with which it goes; `whole`: drafting is a part of the pass."""
        known = _WITH.setdefault(model, {})
        if whole not in known:
            prior = Prior.of(model)
            known[whole] = cls(Pace(prior.whole() if whole else prior))
        return known[whole]

    def begin(self) -> None:
        """A text begins: what the one before it showed is experience."""
        self.texts += 1
        self.pace.begin()
        for earlier, current in zip(self.earlier, self.current, strict=True):
            if current.count:
                earlier.add(current.right, current.count)
                current.fade(0.0)
        likely = self.earlier[0].mean(ACCEPT_GUESS, GUESS_LOOKS) / ACCEPT_GUESS
        self.purse = max(self.purse, PURSE_TEXT * min(1.0, likely))

    def earn(self, gain: float, cycles: int) -> None:
        """Some cycles gained so much over plain decoding; less than 0 if they lost."""
        refill = min(PURSE_REFILL * cycles, self.reserve)
        purse = self.purse + gain + PURSE_SHARE * cycles + refill
        self.reserve = min(self.reserve - refill + max(0.0, purse - PURSE_MAX), RESERVE_MAX)
        self.purse = max(PURSE_MIN, min(purse, PURSE_MAX))

    def facts(self) -> dict[str, Any]:
        """For records: what a text begins with, and where that comes from."""
        if not self.texts:
            return {"costs_from": "weight bytes"}
        return {
            "costs_from": "weight bytes, and measured with earlier texts of this process",
            "texts": self.texts,
            **self.pace.facts(),
            "accepted": [round(one.right / one.count, 4) for one in self.earlier if one.count],
        }


_WITH: WeakKeyDictionary[Model, dict[bool, Experience]] = WeakKeyDictionary()


class Decision(NamedTuple):
    """The depth of one cycle and why: `learn`, `best`, `off` (drafting does not pay) or `probe`."""

    depth: int
    why: str
    expected: float = 0.0  # tokens per second expected at this depth, 0 while learning


@dataclass
class DepthPolicy:
    """State of the choice during one text; `depth_max` bounds the depth."""

    depth_max: int
    known: Experience = field(default_factory=Experience)
    accept: list[Looks] = field(init=False)
    cycle: int = 0
    best: int = 0
    idle: int = PROBE_OFF  # cycles since the last probe; where a text begins, one is cheapest
    rest: int = 0  # cycles since the last draft
    unpaid: int = 0  # of these, cycles that have added nothing to the purse yet
    probe_after: int = PROBE_ON
    probes: int = 0
    again: int | None = None  # a depth to be probed once more
    burst: int = 0  # cycles of a probe so far
    quiet: int = 0  # cycles for which the last choice stands
    calm: int = SETTLED_OFF  # cycles for which the next choice of no drafts will stand
    slept: int = 0  # cycles that were not accounted for yet
    choice: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.accept = [Looks(ACCEPT_MEMORY) for _ in range(self.depth_max)]
        self.choice = Decision(0, "off")
        self.known.begin()
        if self.known.earlier[0].count >= TEXTS_TELL and self.known.pace.sure(1):
            self.idle = 0  # one more look at once would tell little, and is dear while all is cold

    # --- learning ---------------------------------------------------------------------------------

    def observe(
        self,
        *,
        drafted: int,
        accepted: int,
        steps: int,
        draft_s: float,
        verify_s: float,
        backlog_s: float = 0.0,
    ) -> None:
        """Learn from a cycle: `steps` draft steps took `draft_s`, after `backlog_s` for what a
        pause left behind; the pass of `drafted + 1` rows took `verify_s` seconds and kept the first
        `accepted` drafts.
        """
        self.cycle += 1
        if not steps and not drafted:
            self.rest += 1
            self.unpaid += 1
            self.known.pace.plain(verify_s)
            return
        self.known.pace.drafted(drafted + 1, steps, draft_s, verify_s, backlog_s)
        for place in range(min(accepted + 1, drafted)):
            self._look_at(place, place < accepted)
        if steps > drafted == accepted:  # a draft that the gate held back gains nothing either
            self._look_at(drafted, False)
        self.rest = 0
        self.calm = SETTLED_OFF
        self._earn(drafted, accepted, steps, bool(backlog_s))
        if self.choice.why == "probe":
            self.quiet = 0
            better = not self.best and drafted == accepted > 0
            self.burst += 1
            pays = accepted > 0 or self.known.purse > 0.0
            if self.burst < BURST and drafted and pays and not self.known.pace.sure(drafted):
                better = True  # one cycle alone finds cold caches, and tells no cost
            self.again = drafted if better else None
        else:
            self.burst = 0

    def _look_at(self, place: int, right: bool) -> None:
        looks = self.accept[place]
        looks.rest(self.cycle - 1)
        looks.last = self.cycle
        looks.add(right)
        self.known.current[place].add(right)

    def _earn(self, drafted: int, accepted: int, steps: int, backlog: bool) -> None:
        pace = self.known.pace
        taken = pace.cost(drafted, steps) + (pace.backlog_cost if backlog else 0.0)
        self.known.earn(accepted + 1 - taken, self.unpaid + 1)
        self.unpaid = 0

    # --- expectations -----------------------------------------------------------------------------

    def rates(self, deepest: int, *, hope: bool = False) -> list[float]:
        """Expected tokens by cost of cycles with 0, 1, .. `deepest` drafts; 1 is plain decoding.

        `hope`: positions that were seldom looked at get the benefit of the doubt.
        """
        tokens, reach, guess = 1.0, 1.0, ACCEPT_GUESS
        found = [1.0]
        for depth in range(1, deepest + 1):
            looks, earlier = self.accept[depth - 1], self.known.earlier[depth - 1]
            guess = looks.mean(earlier.mean(guess, GUESS_LOOKS))
            reach *= _hoped(guess, looks.count) if hope else guess
            tokens += reach
            cost = self.known.pace.hoped(depth) if hope else self.known.pace.cost(depth)
            found.append(tokens / cost)
        return found

    # --- choosing ---------------------------------------------------------------------------------

    @property
    def dozes(self) -> bool:
        """Whether the cycle before slept, and the next one will."""
        return self.slept > 0 and self._rests()

    def _rests(self) -> bool:
        return self.quiet > AWAKE and not self.choice.depth

    def sleeps(self) -> bool:
        """Whether the next cycle drafts nothing, and needs neither `choose` nor `observe`.

        Where drafting does not pay, deciding that must cost nothing, too.
        """
        if not self._rests():
            return False
        self.quiet -= 1
        self.slept += 1
        return True

    def _wake(self) -> None:
        self.cycle += self.slept
        self.idle += self.slept
        self.rest += self.slept
        self.unpaid += self.slept
        self.slept = 0

    def choose(self, room: int) -> Decision:
        """The depth of the next cycle, at most `room`."""
        if self.slept:
            self._wake()
        limit = min(room, self.depth_max)
        if limit <= 0:
            return Decision(0, "off")
        self.idle += 1
        if self.quiet and limit >= self.choice.depth:
            self.quiet -= 1
        else:
            self.quiet = 0
            self.choice = self._choose(limit)
        return self.choice

    def _choose(self, limit: int) -> Decision:
        pace = self.known.pace
        if not pace.knows(0):
            return Decision(0, "learn")
        self.known.earn(0.0, self.unpaid)
        self.unpaid = 0
        for looks in self.accept:
            looks.rest(self.cycle)
        # expectations carry no further than a step beyond what was measured and seen
        seen = sum(looks.count > 0.5 for looks in self.accept)
        deepest = min(limit, pace.deepest + 1, seen + AHEAD)
        believed, hoped = self.rates(deepest), self.rates(deepest, hope=True)
        if not self.best:
            believed[0] *= WORTH
        known = [depth for depth in range(deepest + 1) if pace.knows(depth)]
        best = max(known, key=believed.__getitem__)
        if bool(best) != bool(self.best):
            self.idle, self.probe_after = 0, PROBE_ON
        self.best = best
        expected = believed[best] / pace.unit
        again = self.again
        if again is not None and again <= limit and self._may_pay(again):
            return Decision(again, "probe", expected)
        if pace.warming:  # what is tried now would tell no cost
            return Decision(best, "best" if best else "off", expected)
        tried = hoped.index(max(hoped))
        if hoped[tried] > believed[best] and tried != best and self._affords(tried, believed):
            return Decision(tried, "learn")
        probe = self._probe(limit, believed)
        if probe is not None:
            self.quiet = 0 if probe else NEAR - 1
            return Decision(probe, "probe", expected)
        if not best:
            self.quiet = self.calm
            self.calm = min(2 * self.calm, SETTLED_LAST)
        elif self.accept[best - 1].count > MIN_LOOKS:
            self.quiet = SETTLED
        return Decision(best, "best" if best else "off", expected)

    def _may_pay(self, depth: int) -> bool:
        """Whether certain drafts would pay, or their cost is not known for sure."""
        pace = self.known.pace
        short = self.burst < BURST and not pace.sure(depth)
        return short or depth + 1 > pace.cost(depth)

    def _affords(self, depth: int, believed: list[float]) -> bool:
        """Whether the purse holds what a cycle of `depth` would lose against the best.

        A cost that rests on little may be that of a bad moment, and must not forbid to look again.
        """
        pace = self.known.pace
        tokens = believed[depth] * pace.cost(depth)
        cost = pace.cost(depth)
        if not pace.sure(depth):
            cost = min(cost, UNSURE * pace.least(depth))
        loss = cost - tokens / believed[self.best]
        if depth and self.rest > PAUSE:
            loss += pace.backlog_cost
        return loss <= max(self.known.purse, 0.0)

    def _probe(self, limit: int, believed: list[float]) -> int | None:
        """Now and then a neighbour of the best depth.

        What is not tried is not measured: without this, one bad stretch would last forever.
        """
        best = self.best
        if not best:
            wait = PROBE_HOPELESS if self._hopeless(limit) else PROBE_OFF
            if self.idle < wait or not self._affords(1, believed):
                return None
            self.idle = 0
            return 1
        if self.idle < self.probe_after:
            return None
        near = dict.fromkeys((best + 1, 0, best - 1))
        others = [depth for depth in near if depth != best and 0 <= depth < len(believed)]
        self.probes += 1
        depth = others[self.probes % len(others)]
        if not self._affords(depth, believed):
            return None
        self.idle, self.probe_after = 0, min(2 * self.probe_after, PROBE_LAST)
        return depth

    def _hopeless(self, limit: int) -> bool:
        """Whether not even drafts that are all accepted would pay, by costs that were measured."""
        pace = self.known.pace
        return pace.sure(1) and all(depth + 1 < pace.cost(depth) for depth in range(1, limit + 1))


def _hoped(mean: float, looks: float) -> float:
    """An acceptance with the benefit of the doubt while looks are few."""
    if looks >= MIN_LOOKS:
        return mean
    return min(1.0, mean + math.sqrt(mean * (1.0 - mean) / (looks + 2.0)))
