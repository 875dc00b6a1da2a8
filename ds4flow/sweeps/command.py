"""`ds4flow run -m` and `--resume`: from what was typed to a sweep directory that says how it went.

A sweep's config is frozen before its first job; it is resumed with that config or not at all.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from ds4flow import env, origin, plugins, rundir
from ds4flow.config import sweep_words, swept, validate_all
from ds4flow.errors import UsageError
from ds4flow.execute import hand_over, new_directory
from ds4flow.explain import explained
from ds4flow.overrides import Flag, assemble, key_of, over_the_sweep, quoted
from ds4flow.recorded import Terminated, terminable
from ds4flow.rundir import RunDir
from ds4flow.runs.record import resolve_run
from ds4flow.runs.sweep import Sweep
from ds4flow.sweeps import inputs, snapshot
from ds4flow.sweeps.differences import differences
from ds4flow.sweeps.launching import Record, grid, is_grid, recorded_launches
from ds4flow.sweeps.table import print_table

_LOCK = ".lock"
_DIRECTORY = "hydra.sweep.dir"
_OWN = (_DIRECTORY, "hydra.searchpath")
"""Words that say where a sweep lies; they are made anew when it is resumed."""

_HOW = (
    "hydra/launcher",
    "hydra.launcher.",
    "hydra.sweeper.n_trials",
    "hydra.sweeper.max_failure_rate",
)
"""Keys that may change when a sweep is resumed."""


@dataclass(frozen=True)
class Given:
    """What the user typed: override words, flags, and a folder with more YAML."""

    words: tuple[str, ...]
    flags: tuple[Flag, ...] = ()
    config_dir: str | None = None

    def over(self, later: Given) -> Given:
        """This with what was typed later on top, except words that say how jobs are run."""
        typed = [word for word in later.words if not _says_how(word)]
        replaced = {*map(key_of, typed), *(flag.key for flag in later.flags)}
        return Given(
            (*(word for word in self.words if key_of(word) not in replaced), *typed),
            (*(flag for flag in self.flags if flag.key not in replaced), *later.flags),
            later.config_dir or self.config_dir,
        )

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Given:
        """From sweep.json."""
        flags = tuple(Flag(**flag) for flag in saved["flags"])
        return cls(tuple(saved["words"]), flags, saved["config_dir"])

    def save(self) -> dict[str, Any]:
        """For sweep.json; the folder by its full path."""
        folder = None if self.config_dir is None else str(Path(self.config_dir).resolve())
        return {**asdict(self), "flags": [f._asdict() for f in self.flags], "config_dir": folder}


def start(given: Given, words: Sequence[str], configs: Sequence[DictConfig]) -> int:
    """Run a sweep of checked `words` in a new directory; return the exit code.

    `configs` are what `validate_all` composed.
    """
    first = configs[0]
    _refuse(words, first)
    full = sweep_words(words, first)
    with explained():
        jobs = grid(full) if is_grid(first) else []
    path = new_directory(first, _DIRECTORY).resolve()
    kept = [word for word in words if key_of(word) not in _OWN]
    tree, patch = origin.source_tree()
    file = RunDir(path, {})
    if patch:
        file.write("source.patch", patch)
    record = Record(
        path,
        {
            "status": "running",
            "started": rundir.now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "keys": list(swept(full)),
            "values": swept(full),
            "overrides": kept,
            "given": given.save(),
            "launcher": _choice(first, "launcher"),
            "sweeper": _choice(first, "sweeper"),
            "yaml": snapshot.take(first, path),
            "inputs": inputs.identify(configs),
            "versions": origin.versions(),
            "machine": origin.machine(),
            "git": tree,
        },
    )
    record.plan(dict(enumerate(jobs)))
    return _run(record)


def resume(folder: str | Path, given: Given) -> int:
    """Run what is missing or failed in a sweep's directory; return the exit code.

    `folder` is a path, or a sweep's name as NAME/NNNN. Raises UsageError, naming the keys, when the
    config or a file that it reads is not what it was.
    """
    sweep = Sweep.open(resolve_run(folder, sweeps=True))
    record = Record(sweep.path.resolve(), sweep.facts)
    saved = Given.read(sweep.facts["given"])
    how = [word for word in given.words if _says_how(word)]
    again = saved.over(given)
    words, notices = assemble(again.words, again.flags, env.read(), multirun=True)
    words, configs = validate_all(words, config_dir=again.config_dir, multirun=True)
    for notice in notices:
        _say(notice)
    _refuse(words, configs[0])
    found = differences(sweep, words, configs)
    if found:
        raise UsageError(
            f"{folder} was begun with another config: {'; '.join(found)}",
            "set them back to resume it, or start a new sweep without --resume",
        )
    if how:
        _change_how(record, words, how, again.config_dir)
    tree, patch = origin.source_tree()
    if not _same_code(sweep, tree, patch):
        _say("note: the code is not the revision that this sweep began with; run.json tells which")
    if not how and not sweep.with_status("missing", "failed", "skipped"):
        _say("note: every job of this sweep is done")
    resumed = rundir.now()
    record.facts.setdefault("resumed", []).append({"time": resumed, "git": tree})
    return _run(record)


def _change_how(
    record: Record, words: Sequence[str], how: Sequence[str], config_dir: str | None
) -> None:
    """Put another launcher, or another length of a search, into the record of a sweep."""
    chosen = tuple(map(key_of, how))
    if "hydra/launcher" in chosen:
        chosen += ("hydra.launcher.",)  # settings of the launcher before
    kept, words = (
        [word for word in old if not key_of(word).startswith(chosen)]
        for old in (record.facts["overrides"], words)
    )
    _, configs = validate_all([*words, *how], config_dir=config_dir, multirun=True)
    _refuse([], configs[0])
    record.facts["overrides"] = [*kept, *how]
    record.facts["launcher"] = _choice(configs[0], "launcher")


def _run(record: Record) -> int:
    """Let Hydra run the sweep, keep its record, and show how it went."""
    try:
        held = FileLock(record.path / _LOCK).acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{record.path} is a sweep that still runs", "wait for it, or stop it first"
        ) from None
    with held:
        record.save(
            status="running", ended=None, missing=None,
            host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip
        code, status = 0, "complete"
        words = [f"{_DIRECTORY}={quoted(str(record.path))}", *record.facts["overrides"]]
        try:
            with recorded_launches(record), terminable():
                frozen = snapshot.arguments(record.path, record.facts["yaml"])
                hand_over(["--multirun", *frozen, *words])
        except KeyboardInterrupt as error:
            code, status = (143 if isinstance(error, Terminated) else 130), "interrupted"
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            status = "interrupted" if code in (130, 141, 143) else "failed"
        sweep = record.end(status)
        unfinished = sweep.with_status("failed", "missing", "skipped")
        if status == "complete" and (unfinished or not sweep.jobs):
            record.save(status="failed")
            code = 1
        print_table(Sweep.open(record.path))
    return code


def _refuse(words: Sequence[str], first: DictConfig) -> None:
    """Refuse what cannot be swept: a missing plugin, a variable over a swept key, own folders."""
    for part in ("launcher", "sweeper"):
        target = str(first.hydra[part]._target_)
        plugins.refuse_missing(f"hydra/{part}", _choice(first, part), target)
    if str(first.hydra.sweeper.get("direction")).endswith("minimize"):
        raise UsageError(
            "hydra.sweeper.direction is minimize, but more of objective.metric is better",
            "use hydra/sweeper=search, or hydra.sweeper.direction=maximize",
        )
    params = OmegaConf.select(first, "hydra.sweeper.params") or {}
    for variable in env.read():
        if variable.key in params:
            raise over_the_sweep(variable, f"{variable.key}={params[variable.key]}")
    if any(key_of(word) == "hydra.sweep.subdir" for word in words):
        raise UsageError(
            "hydra.sweep.subdir cannot be set: the jobs of a sweep lie in numbered directories",
            "leave it out; hydra.sweep.dir sets where the sweep lies",
        )


def _choice(first: DictConfig, part: str) -> str:
    return str(first.hydra.runtime.choices[f"hydra/{part}"])


def _says_how(word: str) -> bool:
    """Whether a word says where jobs run or how long to search, not what a job is."""
    return key_of(word).startswith(_HOW)


def _same_code(sweep: Sweep, tree: dict[str, Any], patch: bytes) -> bool:
    before = sweep.facts.get("git") or {}
    file = sweep.path / "source.patch"
    kept = file.read_bytes() if file.exists() else b""
    return before.get("revision") == tree.get("revision") and kept == patch


def _say(line: str) -> None:
    print(line, file=sys.stderr)
