"""Running two arms in turn: every run in a directory of its own, under one for the comparison.

Promise: ab.json names every run in its order, also of a comparison that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from ds4flow import origin
from ds4flow.ab.arms import Arm
from ds4flow.bench.samples import interleave
from ds4flow.errors import Ds4FlowError
from ds4flow.prompt_run import load, perform
from ds4flow.recorded import STOPS, recorded
from ds4flow.rundir import RunDir, now
from ds4flow.runs.record import Run
from ds4flow.wiring import build_pipeline

if TYPE_CHECKING:
    from ds4flow.pipeline import State

RECORD = "ab.json"

Say = Callable[[str], None]
Judge = Callable[[Run, Run], None]
"""Looks at the first run of each arm, and raises when they must not be compared."""


@dataclass
class Comparison:
    """The directory of one comparison and what is known of it so far."""

    path: Path
    arms: tuple[Arm, Arm]
    facts: dict[str, Any]
    runs: dict[str, list[Run]] = field(default_factory=dict)  # measured, by arm
    loads: dict[object, State] = field(default_factory=dict, repr=False)

    def record(self, **facts: Any) -> None:
        """Add facts to ab.json."""
        self.facts.update(facts)
        self.folder.write_json(RECORD, self.facts)

    @property
    def folder(self) -> RunDir:
        """The directory to write into; it holds runs and is none."""
        return RunDir(self.path, {})

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write into ab.json how the comparison ended."""
        self.record(status="running", started=now(), order=[])
        try:
            yield
        except BaseException as error:
            status = "interrupted" if isinstance(error, STOPS) else "failed"
            self.record(status=status, ended=now(), error=f"{type(error).__name__}: {error}")
            raise
        self.record(status="complete", ended=now(), error=None)


def measure(
    comparison: Comparison, *, repeats: int, warmup: int, judge: Judge, say: Say
) -> Mapping[str, Sequence[Run]]:
    """Run `warmup` discarded pairs and `repeats` measured ones; the runs by arm, in pairs.

    The order is AB, BA, AB, .. . Each arm is loaded once, and both share one load where they would
    load the same. Raises what a run raises.
    """
    import torch

    threads = torch.get_num_threads()
    begun: dict[str, Run] = {}

    def run(arm: Arm) -> Run:
        torch.set_num_threads(threads)  # an arm with runtime.threads sets its own
        count = len(comparison.facts["order"])
        found = _run(comparison, arm, warm=count < 2 * warmup)
        if begun.setdefault(arm.name, found) is found and len(begun) == 2:
            judge(*(begun[one.name] for one in comparison.arms))
        return found

    try:
        comparison.runs = interleave(
            {arm.name: lambda arm=arm: run(arm) for arm in comparison.arms},  # type: ignore[misc]
            repeats=repeats,
            warmup=warmup,
            say=say,
        )
    finally:
        torch.set_num_threads(threads)
    return comparison.runs


def _run(comparison: Comparison, arm: Arm, *, warm: bool) -> Run:
    order = comparison.facts["order"]
    name = f"{len(order) + 1:03d}-{arm.name.lower()}{'-warmup' if warm else ''}"
    facts = {
        "command": comparison.facts["command"],
        "identity": "exact",
        "versions": comparison.facts["versions"],
        "machine": origin.machine(),
        "git": comparison.facts["git"],
        **arm.facts,
        "arm": arm.name,
        "arm_title": arm.title,
        "warmup": warm,
    }
    directory = RunDir.create(comparison.path / name, facts)
    order.append({"directory": name, "arm": arm.name, "warmup": warm})
    comparison.record()
    config = arm.config.copy()
    for key in ("log.stream", "log.table"):  # what is compared is shown, not each run
        if OmegaConf.select(config, key) is not None:
            OmegaConf.update(config, key, False)
    try:
        with recorded(directory):
            shares = build_pipeline(config).share_key()
            if shares not in comparison.loads:
                comparison.loads[shares] = load(config, directory)
            perform(config, directory, comparison.loads[shares])
    except Ds4FlowError as error:
        raise type(error)(f"arm {arm.name} ({arm.title}): {error.what}", error.fix) from None
    return Run.open(directory.path)


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)
