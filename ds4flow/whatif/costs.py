"""What a cycle of any width would take, from the times of one traced run.

Phases are medians over the run, so the odd slow moment is left out. How the time of a pass grows
with its width was measured where the run ended; it is scaled to the run's own passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from ds4flow.depth import Prior
from ds4flow.whatif.traced import Traced


@dataclass(frozen=True)
class CostModel:
    """Microseconds of the phases of a cycle; everything that is not a phase is `host`."""

    passes: tuple[float, ...]  # by width, from 1
    refresh: tuple[float, ...]  # by stale rows, from 0
    step: float
    commit: float
    host: float
    prior: Prior = field(default_factory=Prior)  # what mtp.draft=auto expects before it measures

    @classmethod
    def of(cls, traced: Traced) -> CostModel | None:
        """The costs of a run, None when it did not measure them (`trace=full` does)."""
        costs = (traced.run.summary.get("trace") or {}).get("costs") or {}
        measured = costs.get("verify_micros_by_width") or ()
        if not measured or not any(start.verify_micros for start in traced.starts):
            return None  # pipeline=graph times a cycle as one step
        stale = costs.get("step_micros_by_stale_rows") or [0.0]
        refresh = tuple(max(0.0, micros - stale[0]) for micros in stale)
        return cls(
            tuple(micros * _scale(traced, measured) for micros in measured),
            refresh,
            _step(traced, refresh),
            median(start.commit_micros for start in traced.starts),
            _host(traced),
            Prior(tuple(costs["prior"]["passes"]), costs["prior"]["step"]),
        )

    def verify(self, width: int) -> float:
        """A pass of `width` rows; beyond what was measured it grows as the last ones did."""
        return _at(self.passes, width - 1)

    def drafting(self, steps: int, stale: int) -> float:
        """`steps` draft steps after `stale` rows of the block's cache were rewritten."""
        return steps * self.step + (_at(self.refresh, stale) if steps else 0.0)

    def cycle(self, drafted: int, steps: int, stale: int) -> float:
        """A whole cycle with `drafted` drafts in the pass."""
        return self.drafting(steps, stale) + self.verify(drafted + 1) + self.commit + self.host


def _at(values: tuple[float, ...], place: int) -> float:
    if place < len(values):
        return values[place]
    slope = values[-1] - values[-2] if len(values) > 1 else 0.0
    return values[-1] + slope * (place - len(values) + 1)


def _scale(traced: Traced, measured: list[float]) -> float:
    """The run's own passes against those at its end, where the context was longest."""
    ratios = [
        start.verify_micros / measured[width - 1]
        for start in traced.starts
        if (width := 1 if traced.probe else len(start.drafts) + 1) <= len(measured)
    ]
    return median(ratios) if ratios else 1.0


def _step(traced: Traced, refresh: tuple[float, ...]) -> float:
    found = []
    stale = 0
    for start in traced.starts:
        steps = len(start.drafts) + (start.end in ("gate", "eos"))
        if steps:
            found.append(max(0.0, start.draft_micros - _at(refresh, stale)) / steps)
        stale = start.committed - 1
    return median(found)


def _host(traced: Traced) -> float:
    """Time of a cycle outside its phases, without what tracing took."""
    summary = traced.run.summary
    stages = summary["micros_by_stage"]
    phases = sum(stages.get(name, 0) for name in ("draft", "verify", "commit"))
    outside = summary["decode_seconds"] * 1e6 - phases - summary["trace"]["micros"]
    return max(0.0, outside / len(traced.starts))
