"""What a job of a sweep writes about itself: one row when it ends, in whatever process it ran.

Rows are appended whole, so that jobs that run side by side do not mix theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from ds4flow.errors import Ds4FlowError
from ds4flow.overrides import PROVENANCE, key_of
from ds4flow.rundir import RunDir, now
from ds4flow.runs.sweep import JOBS, Sweep, attempt_of, number_of
from ds4flow.sweeps import inputs


@dataclass
class Ending:
    """How a job ends; the job itself sets `value`, the objective's."""

    value: float | None = None


def refuse_changed(config: DictConfig, node: HydraConf) -> None:
    """Raise Ds4FlowError when a file that the job reads is not the one the sweep began with."""
    inputs.refuse_changed(Sweep.open(node.sweep.dir).facts.get("inputs", {}), config)


@contextmanager
def recorded(node: HydraConf) -> Iterator[Ending]:
    """Append the row of the job that runs inside, however it ends; `node` is Hydra's part."""
    ending, started = Ending(), time.monotonic()
    status, reason = "done", None
    try:
        yield ending
    except BaseException as error:
        status, reason = "failed", reason_of(error)
        raise
    finally:
        directory = Path(node.runtime.output_dir)
        append(
            Path(node.sweep.dir),
            number=number_of(directory.name),
            attempt=attempt_of(directory.name),
            overrides=shown(node.overrides.task),
            directory=directory.name,
            status=status,
            reason=reason,
            value=ending.value,
            seconds=round(time.monotonic() - started, 3),
        )


def append(sweep: Path, **row: Any) -> None:
    """Append one row to the sweep's jobs.jsonl, with the time."""
    file = RunDir(sweep, {})
    try:
        file.append_json(JOBS, {**row, "time": now()})
    finally:
        file.close()


def reason_of(error: BaseException) -> str:
    """Why a job failed, in one line."""
    if isinstance(error, KeyboardInterrupt | SystemExit | BrokenPipeError):
        return "interrupted"
    if isinstance(error, Ds4FlowError):
        return error.what
    if isinstance(error, CompactHydraException):  # a job's error that has been shown already
        return str(error).partition("\n")[0].removeprefix("error: ")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def shown(overrides: Sequence[str]) -> list[str]:
    """A job's overrides without those that are ours or Hydra's own."""
    return [
        word for word in overrides if key_of(word) != PROVENANCE and not word.startswith("hydra.")
    ]
