"""What drafting and passes cost, learned while decoding: of a machine and a model, not of a text.

A cost is a ratio to a pass of one row at about the same time, so a machine that slows down as a
whole changes none; and a median, so an interrupted cycle decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds4flow.model.trunk import Model

AUTO_DEPTH_MAX = 8  # deepest drafts that mtp.draft=auto tries
KEPT = 7  # costs of a kind that are kept
FEW = 1  # costs of a kind before they are believed
FASTEST_OF = 3  # first passes of all, of which the fastest counts: an interruption only adds
LEAST_OF = 5  # the same of the first costs of a kind
NEAR = 3  # cycles that lie so close together are compared, the fastest of each kind
COLD = 2  # first cycles with drafts after others, whose costs are not counted
PLAIN = 4  # passes of one row before anything is drafted
RECENT = 7  # cycles that tell how fast the machine is now
WARMING = 4  # first cycles of a text, whose costs are not counted: after a prompt caches are cold
LEAST = 1e-9  # seconds of a pass; a clock that stands still must not make it free
ROW = 0.02  # of a pass of one row: what each further row costs beside its bytes
GUESS_WEIGHT = 0.02  # of what the bytes say against what was measured
OTHERS_WEIGHT = 3.0  # costs of one size that all other sizes count as much as
NOTHING_IS_FREE = 0.1  # of what the bytes say is the least that anything is taken to cost
HOPE_WEIGHT = 0.5  # costs as many as which the hope counts that the bytes are all that it takes
BACKLOG = 1.0  # passes of one row: a refresh after a pause, before one was measured


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

    def whole(self) -> Prior:
        """The same where drafting is a part of the pass."""
        passes = (cost + depth * self.step for depth, cost in enumerate(self.passes))
        return Prior(tuple(passes), 0.0)

    def width(self, width: int) -> float:
        """The cost of a pass of `width` rows."""
        if width <= len(self.passes):
            return self.passes[width - 1]
        last = self.passes[-1]
        return last + (last - self.passes[-2]) * (width - len(self.passes))


class Costs:
    """The last costs of one kind and size."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0  # of all, also of those that are not kept
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, cost: float) -> None:
        """Take one."""
        self._last.append(cost)
        self.count += 1
        few = self.count < LEAST_OF
        self.value = min(self._last) if few else _median(self._last)

    @property
    def weight(self) -> int:
        """How many tell the value."""
        return min(self.count, KEPT)


class Curve:
    """Costs of one kind by size. They follow a shape, as steep as all that was measured says.

    So a size that was seldom measured is not believed against its neighbours, and one that never
    was has a cost as well.
    """

    def __init__(self, shape: Callable[[int], float], guess: float) -> None:
        self._shape = shape
        self._guess = guess  # steepness before anything is measured
        self.measured: dict[int, Costs] = {}
        self._known: dict[int, float] = {}  # until something is learned

    def add(self, size: int, cost: float) -> None:
        """Learn one cost."""
        self.measured.setdefault(size, Costs()).add(cost)
        self._known.clear()

    def cost(self, size: int) -> float:
        """The expected cost at a size."""
        if size not in self._known:
            self._known[size] = self._expected(size)
        return self._known[size]

    def _expected(self, size: int) -> float:
        over, under = self._guess * GUESS_WEIGHT, GUESS_WEIGHT
        for other, costs in self.measured.items():
            if costs.count < FEW:
                continue
            shape = self._shape(other)
            over += costs.weight * costs.value * shape
            under += costs.weight * shape**2
        value = max(over / under, NOTHING_IS_FREE * self._guess) * self._shape(size)
        own = self.measured.get(size)
        if own is None or own.count < FEW:
            return value
        return value + (own.value - value) * own.weight / (own.weight + OTHERS_WEIGHT)


@dataclass
class Pace:
    """Costs of cycles, in passes of one row."""

    prior: Prior = field(default_factory=Prior)
    wider: Curve = field(init=False)  # what a pass costs more than one of one row, by width
    drafting: Curve = field(init=False)  # by steps
    backlog: Costs = field(default_factory=Costs)  # refreshing the rows that a pause left behind
    cycles: int = 0  # that were measured
    warming: int = WARMING
    _since: int = NEAR  # cycles since the last without drafts
    _last: tuple[int, int] = (0, 0)  # width and steps of the last cycle with drafts
    _plain: deque[float] = field(init=False)  # seconds of the last cycles without drafts
    _deep: deque[tuple[float, float]] = field(init=False)  # of drafting and of the pass, with them
    _recent: deque[float] = field(init=False)  # seconds that a pass of one row took or would have

    def __post_init__(self) -> None:
        self.wider = Curve(lambda width: self.prior.width(width) - 1.0, 1.0)
        self.drafting = Curve(float, self.prior.step)
        self._plain, self._deep = deque(maxlen=NEAR), deque(maxlen=NEAR)
        self._recent = deque(maxlen=RECENT)

    # --- learning ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A text begins."""
        self.warming = WARMING
        self._since = 0
        self._plain.clear()
        self._deep.clear()

    def plain(self, seconds: float) -> None:
        """A cycle without drafts took so long."""
        after, self._since = self._since, 0
        if self.warming:
            self.warming -= 1
            return
        seconds = max(seconds, LEAST)
        self.cycles += 1
        if self.cycles <= FASTEST_OF and self._recent:  # else drafts would seem cheap
            seconds = min(seconds, self._recent[-1])
            self._plain.clear()
            self._recent.clear()
        if after:
            self._plain.clear()
        self._plain.append(seconds)
        if self._deep and len(self._plain) == NEAR:  # what has just been drafted, against these
            draft_s, verify_s = (min(kind) for kind in zip(*self._deep, strict=True))
            self._learn(draft_s / min(self._plain), verify_s / min(self._plain))
            self._deep.clear()
        self._recent.append(seconds)

    def drafted(
        self, width: int, steps: int, draft_s: float, verify_s: float, backlog_s: float
    ) -> None:
        """A cycle took `steps` draft steps in `draft_s` seconds, and a pass of `width` rows."""
        if self.warming:
            self.warming -= 1
            return
        verify_s = max(verify_s, LEAST)
        self.cycles += 1
        self._since += 1
        if (width, steps) != self._last:
            self._last = width, steps
            self._deep.clear()
        if self._since <= COLD:
            if backlog_s and self._plain:
                self.backlog.add(backlog_s / min(self._plain))
            return  # the drafter's weights, and kernels for more rows, are cold
        self._deep.append((draft_s, verify_s))
        near = self._since <= NEAR + COLD and bool(self._plain)
        if near or self._count(width) < FEW:
            unit = min(self._plain) if near else self.unit or verify_s / self._pass(width)
            self._learn(draft_s / unit, verify_s / unit)
        if self._count(width) > FEW or width == 1:  # what is not known tells nothing
            self._recent.append(verify_s / self._pass(width))

    def _learn(self, drafting: float, passing: float) -> None:
        width, steps = self._last
        if width > 1:
            self.wider.add(width, passing - 1.0)
        if steps:
            self.drafting.add(steps, drafting)

    def _count(self, width: int) -> int:
        found = self.wider.measured.get(width)
        return found.count if found else 0

    # --- expectations -----------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """Seconds of a pass of one row, of late; 0 before any."""
        return _median(self._recent) if self._recent else 0.0

    def _pass(self, width: int) -> float:
        return max(1.0 + self.wider.cost(width), LEAST) if width > 1 else 1.0

    def knows(self, depth: int) -> bool:
        """Whether the cost of cycles with `depth` drafts was measured."""
        return self._count(depth + 1) >= FEW if depth else self.cycles >= PLAIN

    def sure(self, depth: int) -> bool:
        """Whether it was measured so often that no bad moment decides it."""
        return self._count(depth + 1) >= KEPT

    def least(self, depth: int) -> float:
        """What cycles with `depth` drafts cost by their bytes alone."""
        return self.prior.width(depth + 1) + depth * self.prior.step

    @property
    def deepest(self) -> int:
        """The most drafts of a cycle whose cost was measured."""
        known = (width for width, costs in self.wider.measured.items() if costs.count >= FEW)
        return max(known, default=1) - 1

    def cost(self, depth: int, steps: int | None = None) -> float:
        """Expected cost of a cycle with `depth` drafts, after `steps` draft steps if not as many.

        The first step of a cycle refreshes rows as well, so drafting is no multiple of one.
        """
        steps = depth if steps is None else steps
        return self._pass(depth + 1) + (self.drafting.cost(steps) if steps else 0.0)

    def hoped(self, depth: int) -> float:
        """The same with the benefit of the doubt, while costs rest on little."""
        least = self.least(depth)
        known = sum(costs.count for costs in self.wider.measured.values())
        sure = known / (known + HOPE_WEIGHT)
        return min(self.cost(depth), least + sure * (self.cost(depth) - least))

    @property
    def backlog_cost(self) -> float:
        """Expected cost of refreshing what a long pause left behind."""
        return self.backlog.value if self.backlog.count else BACKLOG

    def facts(self) -> dict[str, Any]:
        """For records: what was measured so far, in passes of one row."""
        passes = {width: 1.0 + costs.value for width, costs in self.wider.measured.items()}
        drafts = {steps: costs.value for steps, costs in self.drafting.measured.items()}
        return {
            "cycles": self.cycles,
            "passes": {str(width): round(passes[width], 4) for width in sorted(passes)},
            "drafting": {str(steps): round(drafts[steps], 4) for steps in sorted(drafts)},
        }


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
