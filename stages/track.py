"""Mirroring a run to a tracking tool; the run directory stays the truth.

A cycle costs the decoding loop one short tuple: batches are sent by a thread of their own. Whatever
goes wrong there is a warning, recorded in run.json under `tracking`, and never ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.pipeline import Stage, State
from ds4flow.rundir import RunDir
from ds4flow.runs.record import ROOT, Run, label


class Cycle(NamedTuple):
    """What is kept of a cycle until its batch is sent; `wall` is in seconds since the epoch."""

    number: int
    wall: float
    context: int
    drafted: int
    committed: int
    relaxed: int
    micros: Mapping[str, int]

    def metrics(self) -> Iterator[tuple[str, float]]:
        """Name and value of what a chart over the cycles shows; times in milliseconds."""
        yield "cycle/context", self.context
        yield "cycle/drafted", self.drafted
        yield "cycle/accepted", max(0, self.committed - 1)
        yield "cycle/relaxed", self.relaxed
        total = sum(self.micros.values())
        for name in ("draft", "verify", "commit"):
            if name in self.micros:
                yield f"cycle/{name}_ms", self.micros[name] / 1000
        if total:
            yield "cycle/tokens_per_second", self.committed * 1e6 / total


@dataclass
class Tracker(Stage):
    """What the tracking observers share; a subclass says how to open, write and end a mirror.

    `seconds` lie between batches; at the end of the run `patience` seconds are waited at most.
    `open`, `write` and `end` run in the worker thread, in this order, and may raise anything.
    """

    seconds: float
    patience: float
    cycles: list[Cycle] = field(default_factory=list, init=False)
    queue: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue, init=False)
    worker: threading.Thread | None = field(default=None, init=False)
    opened: threading.Event = field(default_factory=threading.Event, init=False)
    sent: float = field(default=0.0, init=False)
    facts: dict[str, Any] = field(default_factory=dict, init=False)  # where the mirror is
    error: str = field(default="", init=False)  # the first thing that went wrong

    tool: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ()
    reads = ("tokens", "rows", "committed")

    def __post_init__(self) -> None:
        for key in ("seconds", "patience"):
            value = getattr(self, key)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise UsageError(
                    f"{self.tool}.{key}={value} is not a number of seconds", "use 0 or more"
                )
        # Imported before anything is measured, as the package takes seconds to load.
        for module in self.modules:
            try:
                import_module(module)
            except ImportError as error:
                raise Ds4FlowError(
                    f"the stage {self.tool} cannot import {module}: {error}",
                    f"pip install 'ds4flow[{self.tool}]', or leave {self.tool} out of "
                    "pipeline.observe",
                ) from None

    def open(self, run: Run) -> None:
        """Begin the mirror of `run`; set `facts`."""
        raise NotImplementedError

    def write(self, cycles: Sequence[Cycle]) -> None:
        """Send a batch."""
        raise NotImplementedError

    def end(self, run: Run) -> None:
        """Send what only the end can tell; the record of `run` is complete."""
        raise NotImplementedError

    def prepare(self, state: State) -> None:
        """Open the mirror before anything is measured, and say at once when that fails."""
        self._start(state.run)
        self.opened.wait(self.patience)
        if self.error:
            print(f"note: {self.tool}: {self.error}; the run goes on without it", file=sys.stderr)

    def run(self, state: State) -> None:
        """Note one cycle; from time to time pass what was noted to the worker."""
        self.cycles.append(
            Cycle(
                state.cycle,
                time.time(),
                len(state.tokens),
                len(state.rows) - 1,
                len(state.committed),
                state.relaxed,
                dict(state.micros),
            )
        )
        if time.monotonic() - self.sent >= self.seconds:
            self._send()

    def close(self, state: State) -> None:
        """See to it that runs that never began decoding are mirrored too."""
        if self.worker is None:
            self._start(state.run)

    def _start(self, run: RunDir) -> None:
        self.sent = time.monotonic()
        self.worker = threading.Thread(target=self._work, name=self.tool, daemon=True)
        self.worker.start()
        path = run.path
        self.queue.put(lambda: self.open(Run.open(path)))
        run.after_finish.append(lambda: self._finish(run))

    def _send(self) -> None:
        batch, self.cycles = self.cycles, []
        self.sent = time.monotonic()
        if batch:
            self.queue.put(lambda: self.write(batch))

    def _work(self) -> None:
        """Do what is queued until None comes; after a failure the rest is dropped."""
        while (action := self.queue.get()) is not None:
            if self.error:
                continue
            try:
                action()
            except Exception as error:  # whatever a tracking library raises must not end the run
                self.error = _told(error)
            self.opened.set()  # opening comes first

    def _finish(self, run: RunDir) -> None:
        """Send the rest, wait for it, and record in the run's own directory how it went."""
        self._send()
        path = run.path
        self.queue.put(lambda: self.end(Run.open(path)))
        self.queue.put(None)
        assert self.worker is not None
        try:
            self.worker.join(self.patience)
        except KeyboardInterrupt:
            self.error = self.error or "interrupted while it was sent"
        if self.worker.is_alive() and not self.error:
            self.error = f"not done after {self.patience:g} seconds"
        found = {**self.facts, "complete": not self.error, "error": self.error or None}
        if self.error:
            print(
                f"note: {self.tool} has no complete copy of this run ({self.error}); "
                f"{run.path} has everything",
                file=sys.stderr,
            )
        with contextlib.suppress(Ds4FlowError):  # a full disk; the note was printed
            run.record(tracking={**run.facts.get("tracking", {}), self.tool: found})


@dataclass
class Mlflow(Tracker):
    """A run of MLflow: the config as parameters, cycles and summary as metrics, files as artifacts.

    Sources of values that are not defaults become tags `origin.KEY`.
    """

    uri: str | None
    experiment: str
    artifacts: bool
    client: Any = field(default=None, init=False)
    id: str = field(default="", init=False)

    tool = "mlflow"
    modules = (
        "mlflow",
        "mlflow.entities",
        "mlflow.environment_variables",
        "mlflow.utils.validation",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if not RETRIES.is_set():  # the default waits for minutes
            RETRIES.set(_RETRIES)

    def open(self, run: Run) -> None:
        """Make the run in its experiment, which is made when it is not there."""
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        self.client = MlflowClient(tracking_uri=self.uri)
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id if found else self.client.create_experiment(self.experiment)
        )
        made = self.client.create_run(experiment, run_name=label(run.path, ROOT.resolve()))
        self.id = made.info.run_id
        self.facts = {
            "run_id": self.id,
            "experiment": self.experiment,
            "uri": _public(str(self.client.tracking_uri)),
        }
        texts = {key: str(value) for key, value in run.config.items()}
        params = [Param(key, _cut(text, MAX_PARAM_VAL_LENGTH)) for key, text in texts.items()]
        for some in _chunks(params, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(self.id, params=some)
        tags = {
            f"origin.{key}": source for key, source in run.origins.items() if source != "default"
        }
        tags["ds4flow.directory"] = str(run.path)
        revision = (run.facts.get("git") or {}).get("revision")
        if revision:
            tags["mlflow.source.git.commit"] = revision
        for some_tags in _chunks(
            [RunTag(k, v) for k, v in tags.items()], MAX_PARAMS_TAGS_PER_BATCH
        ):
            self.client.log_batch(self.id, tags=some_tags)

    def write(self, cycles: Sequence[Cycle]) -> None:
        """Metrics of the cycles, the number of the cycle as their step."""
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        metrics = [
            Metric(name, value, round(cycle.wall * 1000), cycle.number)
            for cycle in cycles
            for name, value in cycle.metrics()
        ]
        for some in _chunks(metrics, MAX_METRICS_PER_BATCH):
            self.client.log_batch(self.id, metrics=some)

    def end(self, run: Run) -> None:
        """The summary, the files, and how the run ended."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(name, value, now, 0) for name, value in _summary(run)]
        self.client.log_batch(self.id, metrics=metrics)
        for key in ("status", "identity", "finish_reason", "error"):
            if run.facts.get(key) is not None:
                self.client.set_tag(self.id, f"ds4flow.{key}", str(run.facts[key]))
        if self.artifacts:
            self.client.log_artifacts(self.id, str(run.path))
        self.client.set_terminated(self.id, _ENDINGS.get(run.status, "FAILED"))


_RETRIES = 2
_LONGEST_ERROR = 300
_ENDINGS = {"complete": "FINISHED", "interrupted": "KILLED"}


@dataclass
class TensorBoard(Tracker):
    """Events of TensorBoard: cycles and summary as scalars; config, prompt and output as texts."""

    folder: str
    writer: Any = field(default=None, init=False)

    tool = "tensorboard"
    modules = ("tensorboard", "torch.utils.tensorboard")

    def open(self, run: Run) -> None:
        """Begin the file of events."""
        from torch.utils.tensorboard import SummaryWriter

        place = run.path / self.folder
        self.writer = SummaryWriter(str(place))
        self.facts = {"folder": str(place)}
        rows = (
            f"| {key} | {_cell(str(value))} | {run.origins[key]} |"
            for key, value in run.config.items()
        )
        self.writer.add_text(
            "config", "\n".join(["| key | value | from |", "|---|---|---|", *rows])
        )
        self.writer.add_text("prompt", _block(run.prompt))

    def write(self, cycles: Sequence[Cycle]) -> None:
        """Scalars of the cycles, the number of the cycle as their step."""
        for cycle in cycles:
            for name, value in cycle.metrics():
                self.writer.add_scalar(name, value, cycle.number, cycle.wall)
        self.writer.flush()

    def end(self, run: Run) -> None:
        """The summary and the text."""
        for name, value in _summary(run):
            self.writer.add_scalar(name, value, 0)
        self.writer.add_text("output", _block(run.text))
        self.writer.add_text("status", run.status)
        self.writer.close()


def _summary(run: Run) -> list[tuple[str, float]]:
    """Every number of the summary; truth values are not numbers here."""
    return [
        (f"summary/{key}", float(value))
        for key, value in run.summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _cut(text: str, length: int) -> str:
    """A text that fits, saying that it was longer."""
    note = f"... ({len(text)} characters)"
    return text if len(text) <= length else text[: length - len(note)] + note


def _told(error: Exception) -> str:
    """An error in a line that can be shown and kept."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _cut(_public(text), _LONGEST_ERROR)


def _public(text: str) -> str:
    """Addresses without the passwords in them."""
    return re.sub(r"//[^/\s]*@", "//", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _block(text: str) -> str:
    """A text as Markdown code, whatever it holds."""
    return "\n".join("    " + line for line in text.split("\n"))
