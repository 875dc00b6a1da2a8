"""Sweep directories as records: what was to run, how each job ended, and what is missing.

Reads files only. A job's last row in jobs.jsonl says how it ended; a planned job without one is
missing, whether its turn never came or its process was killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds4flow.errors import Ds4FlowError
from ds4flow.runs.record import SWEEP, Run

JOBS = "jobs.jsonl"
ENDINGS = ("done", "failed", "skipped")
"""What a row can say; a job without a row is `missing`."""


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as its last attempt left it.

    `overrides` are Hydra's words of this job, `values` those of the swept keys as texts. `value` is
    the objective's. `attempt` counts from 1; 0 is a job that has not ended once.
    """

    number: int
    overrides: tuple[str, ...]
    values: dict[str, str]
    status: str
    directory: Path | None = None
    attempt: int = 0
    reason: str | None = None
    value: float | None = None

    @property
    def run(self) -> Run | None:
        """The record of its last attempt, None when it left none."""
        try:
            return None if self.directory is None else Run.open(self.directory)
        except Ds4FlowError:
            return None


@dataclass(frozen=True)
class Sweep:
    """One sweep directory; `facts` is the content of sweep.json."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """Read the sweep in `path`; Ds4FlowError when none lies there or its record is damaged."""
        path = Path(path)
        try:
            facts = json.loads((path / SWEEP).read_bytes())
        except FileNotFoundError:
            raise Ds4FlowError(
                f"{path} holds no sweep", f"a sweep directory has a file {SWEEP}"
            ) from None
        except (OSError, ValueError) as error:
            raise Ds4FlowError(f"cannot read {path / SWEEP}: {error}", "") from None
        if not isinstance(facts, dict):
            raise Ds4FlowError(f"{path / SWEEP} is not a sweep's record", "it was edited")
        return cls(path, facts)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The swept keys and groups, in the order in which they vary, slowest first."""
        return tuple(self.facts.get("keys", ()))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of jobs.jsonl: one for each ending of each attempt, oldest first."""
        return list(_rows(self.path / JOBS))

    @cached_property
    def jobs(self) -> list[Job]:
        """The planned jobs and any other that left a row, by number."""
        last = {int(row["number"]): row for row in self.rows}
        planned = {int(job["number"]): job for job in self.facts.get("jobs", ())}
        return [
            self._job(number, planned.get(number, {}), last.get(number, {}))
            for number in sorted({*planned, *last})
        ]

    def _job(self, number: int, planned: dict[str, Any], row: dict[str, Any]) -> Job:
        overrides = tuple(row.get("overrides") or planned.get("overrides") or ())
        name = row.get("directory")
        return Job(
            number,
            overrides,
            {key: value for key, value in map(_split, overrides) if key in self.keys},
            str(row.get("status", "missing")),
            self.path / name if name else self._begun(number),
            int(row.get("attempt") or 0),
            row.get("reason"),
            row.get("value"),
        )

    def _begun(self, number: int) -> Path | None:
        """The newest directory of a job that has no row: it was stopped hard, or it still runs."""
        attempts = [path for path in self.path.glob(f"{number}*") if attempt_of(path.name)]
        named = [path for path in attempts if number_of(path.name) == number]
        return max(named, key=lambda path: attempt_of(path.name), default=None)

    def with_status(self, *statuses: str) -> list[Job]:
        """The jobs whose status is one of `statuses`."""
        return [job for job in self.jobs if job.status in statuses]


_NAME = re.compile(r"(\d+)(?:\.(\d+))?")


def directory_name(number: int, attempt: int) -> str:
    """The directory of a job's attempt: `3` for the first, then `3.2`, `3.3`."""
    return str(number) if attempt == 1 else f"{number}.{attempt}"


def number_of(name: str) -> int:
    """The job's number in the name of its directory; -1 when it is not one."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def attempt_of(name: str) -> int:
    """The attempt in the name of a job's directory, from 1; 0 when it is not one."""
    found = _NAME.fullmatch(name)
    return int(found[2] or 1) if found else 0


def _split(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+~"), value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that grows; a line that was cut by a full disk is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise Ds4FlowError(f"cannot read {path}: {error.strerror}", "") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("number"), int):
            yield row
