"""What a cycle of any width would take, from the times of one traced run.

How passes and draft steps cost was measured where the run ended, each after what comes before it in
a cycle; that is scaled to the run's own cycles. Of these the quickest tenth counts, so that other
work on the machine is no cost of speculation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ds4flow.pace import Prior
from ds4flow.whatif.traced import Start, Traced


@dataclass(frozen=True)
class CostModel:
    """Microseconds of the phases of a cycle; everything that is not a phase is `host`."""

    plain: float  # a pass of one row in a cycle without drafting
    passes: tuple[float, ...]  # by width, from 1, after drafting
    first: tuple[float, ...]  # the first draft step, by stale rows, from 0
    next: float  # every further one
    commit: float
    host: float
    prior: Prior = field(default_factory=Prior)  # what mtp.draft=auto expects before it measures

    @classmethod
    def of(cls, traced: Traced) -> CostModel | None:
        """The costs of a run, None when it did not measure them (`trace=full` does)."""
        costs = (traced.run.summary.get("trace") or {}).get("costs") or {}
        passes = costs.get("verify_micros_by_width") or ()
        first = costs.get("step_micros_by_stale_rows") or ()
        if not passes or not first or not any(start.verify_micros for start in traced.starts):
            return None  # pipeline=graph times a cycle as one step
        following = costs["next_step_micros"]
        scale = _scale(traced, passes, first, following)
        return cls(
            costs["plain_micros"] * scale,
            tuple(micros * scale for micros in passes),
            tuple(micros * scale for micros in first),
            following * scale,
            _quiet(start.commit_micros for start in traced.starts),
            _quiet(host for start in traced.starts if (host := start.host_micros) is not None),
            Prior(tuple(costs["prior"]["passes"]), costs["prior"]["step"]),
        )

    def verify(self, width: int) -> float:
        """A pass of `width` rows after drafting; beyond what was measured it grows as the last."""
        return _at(self.passes, width - 1)

    def drafting(self, steps: int, stale: int) -> float:
        """`steps` draft steps, with `stale` rows of the block's cache to be rewritten before."""
        return _at(self.first, stale) + (steps - 1) * self.next if steps else 0.0

    def cycle(self, drafted: int, steps: int, stale: int) -> float:
        """A whole cycle with `drafted` drafts in the pass."""
        passing = self.verify(drafted + 1) if steps else self.plain
        return self.drafting(steps, stale) + passing + self.commit + self.host


def _at(values: Sequence[float], place: int) -> float:
    if place < len(values):
        return values[place]
    slope = values[-1] - values[-2] if len(values) > 1 else 0.0
    return values[-1] + slope * (place - len(values) + 1)


def _steps(start: Start) -> int:
    return len(start.drafts) + (start.end in ("gate", "eos"))


def _scale(
    traced: Traced, passes: Sequence[float], first: Sequence[float], following: float
) -> float:
    """Drafting and passes of the run's own cycles against what was measured.

    One factor for both, as a busy machine slows both: their ratio is that of the measurement.
    """
    found, stale = [], 0
    for start in traced.starts:
        steps = _steps(start)
        if steps:
            told = _at(first, stale) + (steps - 1) * following
            told += _at(passes, 0 if traced.probe else len(start.drafts))
            found.append((start.draft_micros + start.verify_micros) / told)
        stale = start.committed - 1
    return _quiet(found)


def _quiet(values: Iterable[float]) -> float:
    """The tenth percentile: what something takes when the machine does nothing else."""
    found = sorted(values)
    return found[len(found) // 10] if found else 0.0
