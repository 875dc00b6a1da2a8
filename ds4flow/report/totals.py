"""Counts and costs of a run, counted again from its cycles: a crashed run has them too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds4flow.metrics import Costs, Counts

Cycle = Mapping[str, Any]

DECODING = ("draft", "verify", "commit")
"""The phases that every decoding cycle has; what others took is shown together."""


@dataclass
class Totals:
    """Counts and costs of the cycles of a run, counted again from the cycles themselves."""

    counts: Counts = field(default_factory=Counts)
    costs: Costs = field(default_factory=Costs)
    committed: dict[int, list[int]] = field(default_factory=dict)  # tokens a cycle, by drafts

    @classmethod
    def of(cls, cycles: Iterable[Cycle]) -> Totals:
        """Count `cycles`."""
        totals = cls()
        for cycle in cycles:
            drafted, committed = int(cycle.get("drafted", 0)), len(cycle.get("tokens", ()))
            totals.counts.add(
                drafted=drafted,
                committed=committed,
                relaxed=int(cycle.get("relaxed", 0)),
                draft_end=str(cycle.get("draft_end", "")),
            )
            totals.costs.add(drafted, sum(micros_of(cycle, name) for name in DECODING))
            totals.committed.setdefault(drafted, []).append(committed)
        return totals


def micros_of(cycle: Cycle, phase: str) -> int:
    """Microseconds of one phase of a cycle, 0 when it was not recorded."""
    return int((cycle.get("micros") or {}).get(phase, 0))
