"""The finished jobs of a sweep by the values of the keys that were swept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds4flow.runs.compare import CONDITIONS
from ds4flow.runs.record import Run
from ds4flow.runs.sweep import Job, Sweep

SUBJECT = ("weights", "prompt", "machine")
"""Conditions without which speeds have nothing to do with each other; of runs.compare."""

DEPTH, MARGIN = "mtp.draft", "mtp.margin"


@dataclass(frozen=True)
class Done:
    """A finished job with its record."""

    job: Job
    run: Run

    def number(self, name: str) -> float | None:
        """A number of its summary, None where there is none."""
        value = self.run.summary.get(name)
        return float(value) if isinstance(value, int | float) else None

    @property
    def subject(self) -> str:
        """What ran where: weights, prompt and machine, as a text to compare."""
        return repr([CONDITIONS[name](self.run) for name in SUBJECT])

    @property
    def exact(self) -> bool:
        """Whether its text is that of plain greedy decoding."""
        return self.run.facts.get("identity") == "exact"

    @property
    def lossy_share(self) -> float | None:
        """Accepted tokens that were not the target's choice, as a share of the output."""
        lossy, output = self.number("relaxed_accepts"), self.number("output_tokens")
        return lossy / output if lossy is not None and output else None


def done_jobs(sweep: Sweep) -> list[Done]:
    """The jobs that finished, in order of their numbers."""
    pairs = [(job, job.run) for job in sweep.with_status("done")]
    return [Done(job, run) for job, run in pairs if run is not None]


@dataclass(frozen=True)
class Grid:
    """Finished jobs by the values of one or two swept keys; `row_key` is empty for one.

    `name` tells the grids of a sweep apart that had to be split.
    """

    column_key: str
    row_key: str
    columns: Sequence[str]
    rows: Sequence[str]
    done: Sequence[Done]
    others: Sequence[str]
    name: str = ""

    @classmethod
    def of(cls, sweep: Sweep) -> Grid | None:
        """Depth across and margin down where these are swept, else other keys; None without any."""
        keys = [key for key in sweep.keys if len(tried(sweep, key)) > 1] or list(sweep.keys)
        if not keys:
            return None
        across = (
            DEPTH if DEPTH in keys else next((k for k in reversed(keys) if k != MARGIN), MARGIN)
        )
        left = [key for key in keys if key != across]
        down = MARGIN if MARGIN in left else (left[-1] if left else "")
        return cls(
            across,
            down,
            tried(sweep, across),
            tried(sweep, down)[::-1] if down else [""],
            done_jobs(sweep),
            [key for key in left if key != down],
        )

    def apart(self) -> list[Grid]:
        """This grid, or one for each subject where jobs of different subjects share a cell."""
        cells = [self.cell(row, column) for row in self.rows for column in self.columns]
        if all(len({one.subject for one in cell}) <= 1 for cell in cells):
            return [self]
        groups: dict[str, list[Done]] = {}
        for one in self.done:
            groups.setdefault(one.subject, []).append(one)
        grids = []
        for number, group in enumerate(groups.values(), 1):
            had = {key: {one.job.values.get(key) for one in group} for key in self.others}
            common = [f"{key}={value}" for key, (value, *more) in had.items() if not more]
            varied = [key for key, values in had.items() if len(values) > 1]
            name = ", ".join(common) or f"group {number}"
            grids.append(replace(self, done=group, others=varied, name=name))
        return grids

    def cell(self, row: str, column: str) -> list[Done]:
        """The finished jobs of one pair of values."""
        return [
            one
            for one in self.done
            if one.job.values.get(self.column_key) == column
            and (not self.row_key or one.job.values.get(self.row_key) == row)
        ]


def value_order(value: str) -> tuple[int, float, str]:
    """Sort key of a swept value: numbers by size, then words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def tried(sweep: Sweep, key: str) -> list[str]:
    """The values of a swept key that jobs had or were to have, in order of size."""
    found = {job.values[key] for job in sweep.jobs if key in job.values}
    return sorted(found, key=value_order)
