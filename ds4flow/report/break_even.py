"""Where drafting pays: the acceptance that its cost asks for, against what was reached."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ds4flow.metrics import acceptance_for
from ds4flow.report.figure import Axis, Chart, Layer, Table
from ds4flow.report.totals import Totals

_CURVES = 4  # depths that are drawn, the commonest ones
_LEAST_CYCLES = 3
_STEPS = 40


@dataclass(frozen=True)
class Depth:
    """What cycles with `drafts` drafts cost, in cycles without any, and what they committed.

    `needed` is the acceptance per draft at which they are as fast as none, None where certain
    drafts would not pay either; `reached` is the acceptance that would commit what they did.
    """

    drafts: int
    cycles: int
    cost: float
    committed: float

    @property
    def needed(self) -> float | None:
        """The acceptance per draft that would pay for the cost."""
        return acceptance_for(self.cost, self.drafts)

    @property
    def reached(self) -> float:
        """The acceptance per draft that the committed tokens amount to."""
        return acceptance_for(self.committed, self.drafts) or 0.0

    @property
    def words(self) -> str:
        """`2 drafts`."""
        return f"{self.drafts} draft{'s' * (self.drafts > 1)}"

    @property
    def note(self) -> str:
        """All numbers in a sentence."""
        needs = "cannot break even" if self.needed is None else f"needs {self.needed:.0%}"
        return (
            f"{self.words}: costs {self.cost:.2f} cycles without, commits {self.committed:.2f} "
            f"tokens; {needs}, reached {self.reached:.0%}"
        )

    @property
    def row(self) -> tuple[str, ...]:
        """The same as cells of a table."""
        return (
            str(self.drafts),
            str(self.cycles),
            f"{self.cost:.2f}",
            f"{self.committed:.2f}",
            "never" if self.needed is None else f"{self.needed:.1%}",
            f"{self.reached:.1%}",
            "yes" if self.committed >= self.cost else "no",
        )


_HEADER = (
    *("drafts", "cycles", "cost, in cycles without", "tokens committed"),
    *("acceptance needed", "acceptance reached", "pays"),
)


def depths_of(totals: Totals) -> list[Depth]:
    """The commonest depths by number; empty without cycles that draft nothing."""
    plain = totals.costs.median(0)
    if not plain:
        return []
    found = []
    for drafts, committed in totals.committed.items():
        cost = totals.costs.median(drafts)
        if drafts and cost and len(committed) >= _LEAST_CYCLES:
            found.append(Depth(drafts, len(committed), cost / plain, fmean(committed)))
    commonest = sorted(found, key=lambda one: (-one.cycles, one.drafts))[:_CURVES]
    return sorted(commonest, key=lambda one: one.drafts)


def break_even_figure(totals: Totals, who: str) -> Chart:
    """Acceptance per draft that a cycle of some cost needs, and where `who` stands."""
    depths = depths_of(totals)
    shares = [step / _STEPS for step in range(_STEPS + 1)]
    layers = []
    for colour, depth in enumerate(depths):
        costs = [sum(share**k for k in range(depth.drafts + 1)) for share in shares]
        layers.append(Layer("line", f"break-even, {depth.words}", costs, shares, colour))
        name = f"{who}, {depth.words}"
        layers.append(
            Layer("points", name, [depth.cost], [depth.reached], colour, (), [depth.note])
        )
    plains = len(totals.committed.get(0, ()))
    return Chart(
        "break-even",
        "Break-even",
        "How much of each draft must be accepted for a cycle with drafts to pay, by what it costs "
        "in cycles without. A point above the line of its depth gains time, below it loses. "
        f"The cost is a ratio of medians; the one without drafts is that of {plains} "
        f"cycle{'s' * (plains != 1)}.",
        Axis("cost of a cycle with drafts, in cycles without"),
        Axis("acceptance per draft", low=0.0, high=1.0, percent=True),
        layers,
        Table(_HEADER, [depth.row for depth in depths]),
        missing=""
        if depths
        else "Cycles with and without drafts are both needed; mtp.draft=auto has both.",
    )
