"""Between a sweeper and its launcher: which jobs run, in which directory, and how they ended.

Works with every sweeper and launcher of Hydra's. Jobs that are done already are not launched again
but answered from their row; a failed job stops no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ds4flow.errors import Ds4FlowError
from ds4flow.overrides import key_of
from ds4flow.rundir import RunDir, now
from ds4flow.runs.record import SWEEP, Run
from ds4flow.runs.sweep import Job, Sweep, attempt_of, directory_name
from ds4flow.sweeps import rows


def is_grid(composed: DictConfig) -> bool:
    """Whether the sweeper tries all combinations, so that its jobs are known before it starts."""
    return str(composed.hydra.sweeper._target_).endswith(f".{BasicSweeper.__name__}")


def grid(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep over all combinations, in order.

    Raises HydraException for a word that only a search can sweep, as an interval.
    """
    parsed = OverridesParser.create().parse_overrides(
        [word for word in words if not key_of(word).startswith("hydra")]
    )
    return [rows.shown(job) for job in BasicSweeper.split_arguments(parsed, None)[0]]


class Record:
    """The sweep's own files, as the process that leads the sweep keeps them."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self._planned = {int(job["number"]) for job in facts.setdefault("jobs", [])}
        self._file = RunDir(path, {})

    def save(self, **facts: Any) -> None:
        """Add facts to sweep.json."""
        self.facts.update(facts)
        self._file.write_json(SWEEP, self.facts)

    def plan(self, jobs: dict[int, list[str]]) -> None:
        """Note jobs that are about to be launched, by number."""
        for number, overrides in jobs.items():
            if number not in self._planned:
                self._planned.add(number)
                self.facts["jobs"].append({"number": number, "overrides": overrides})
        self.save()

    def jobs(self) -> dict[int, Job]:
        """How every job stands, read back from the files."""
        return {job.number: job for job in Sweep.open(self.path).jobs}

    def next_directory(self, number: int) -> str:
        """A name for a job's directory that no attempt has used."""
        attempt = 1
        while (self.path / directory_name(number, attempt)).exists():
            attempt += 1
        return directory_name(number, attempt)

    def end(self, status: str) -> Sweep:
        """Record how the sweep ended and which jobs are missing; return it as readers see it."""
        jobs = self.jobs().values()
        if status == "interrupted":
            for job in jobs:
                if job.status == "missing" and job.directory is None:
                    self.skip(job, "the sweep was interrupted before it began")
        missing = [job.number for job in jobs if job.status != "done"]
        ended = now()
        self.save(status=status, ended=ended, missing=missing)
        return Sweep.open(self.path)

    def skip(self, job: Job, reason: str) -> None:
        """Give a job that will not run its row."""
        rows.append(
            self.path, number=job.number, attempt=0, overrides=list(job.overrides),
            directory=None, status="skipped", reason=reason,
        )  # fmt: skip


class RecordedLauncher(Launcher):
    """A launcher that keeps a sweep's record around another launcher."""

    def __init__(self, inner: Launcher, record: Record, *, grid: bool, last: int | None) -> None:
        self.inner = inner
        self.record = record
        self.grid = grid
        self.last = last  # jobs of a search; None where the sweeper does not say

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Nothing: the inner launcher is set up already."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run what is not done yet; one result a job, in order."""
        wanted = dict(enumerate(map(list, job_overrides), initial_job_idx))
        before = self.record.jobs()
        self.record.plan({number: rows.shown(words) for number, words in wanted.items()})
        results = {}
        for number, words in wanted.items():
            job = before.get(number)
            if job is not None and job.status == "done":
                _check_same(job, rows.shown(words))
                results[number] = _returned(job.value)
        results |= self._launch({n: words for n, words in wanted.items() if n not in results})
        self._refuse_empty_search(initial_job_idx + len(wanted))
        return [results[number] for number in wanted]

    def _refuse_empty_search(self, jobs: int) -> None:
        """End a search without a single result here; a sweeper has no words for it."""
        done = any(job.status == "done" for job in self.record.jobs().values())
        if not self.grid and jobs == self.last and not done:
            raise CompactHydraException("error: no job of the search was done")

    def _launch(self, wanted: dict[int, list[str]]) -> dict[int, JobReturn]:
        if not wanted:
            return {}
        names = {number: self.record.next_directory(number) for number in wanted}
        stopped: Exception | None = None
        returns: Sequence[JobReturn] = ()
        try:
            returns = self.inner.launch(
                [[*words, f"hydra.sweep.subdir='{names[n]}'"] for n, words in wanted.items()],
                initial_job_idx=next(iter(wanted)),
            )
        except Exception as error:  # a worker that died takes the whole batch along
            stopped = error
        ended = {row.get("directory"): row for row in Sweep.open(self.record.path).rows}
        results = dict(zip(wanted, returns, strict=False))
        return {
            number: self._result(number, name, ended.get(name), results.get(number), stopped)
            for number, name in names.items()
        }

    def _result(
        self,
        number: int,
        name: str,
        row: dict[str, Any] | None,
        returned: JobReturn | None,
        stopped: Exception | None,
    ) -> JobReturn:
        """What a job came to: its row counts; one that could write none gets it here."""
        if row is not None and row["status"] == "done":
            return _returned(row.get("value"))
        job = self.record.jobs()[number]
        error: BaseException = stopped or Ds4FlowError("it left no result")
        if returned is not None and returned.status is JobStatus.FAILED:
            error = returned._return_value
        if row is None and not _still_runs(self.record.path / name):
            rows.append(
                self.record.path, number=number, attempt=attempt_of(name), directory=name,
                overrides=list(job.overrides), status="failed", reason=rows.reason_of(error),
            )  # fmt: skip
        if self.grid:
            return _returned(None)  # a grid makes nothing of values, and stops at a failed job
        failed = JobReturn()
        failed.status = JobStatus.FAILED
        failed.return_value = error
        return failed


@contextmanager
def recorded_launches(record: Record) -> Iterator[None]:
    """Make every launcher that Hydra instantiates inside keep `record`."""
    original = Plugins.instantiate_launcher

    def instantiate(
        self: Plugins,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> Launcher:
        inner = original(
            self, hydra_context=hydra_context, task_function=task_function, config=config
        )
        last = config.hydra.sweeper.get("n_trials")
        return RecordedLauncher(inner, record, grid=is_grid(config), last=last)

    Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = original  # type: ignore[method-assign]


def _still_runs(directory: Path) -> bool:
    """Whether a job that its launcher gave up is known to go on, as on another machine."""
    try:
        return Run.open(directory).status == "running"
    except Ds4FlowError:
        return False


def _check_same(job: Job, overrides: list[str]) -> None:
    if list(job.overrides) != overrides:
        raise CompactHydraException(
            f"error: job {job.number} would now be {' '.join(overrides)}, but it was "
            f"{' '.join(job.overrides)}\n"
            "  a search is resumed by repeating it, so its sampler needs a seed; start a new "
            "sweep"
        )


def _returned(value: float | None) -> JobReturn:
    done = JobReturn()
    done.status = JobStatus.COMPLETED
    done.return_value = value
    return done
