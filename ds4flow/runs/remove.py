"""`ds4flow runs rm`: removing runs for good, and nothing else.

Nothing outside the root is touched, links are not followed, and a run in progress stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.rundir import keep_highest
from ds4flow.runs.record import (
    LATEST,
    SWEEP,
    Run,
    find_runs,
    is_running,
    label,
    natural,
    resolve_run,
)
from ds4flow.runs.table import is_condition, load_rows, select


def chosen(root: Path, words: Sequence[str]) -> list[Path]:
    """The directories that `words` mean: names of runs and sweeps, or conditions that all hold.

    Raises UsageError for what may not be removed: outside the root, running, a job of a sweep.
    """
    conditions = [word for word in words if is_condition(word) and not (root / word).exists()]
    names = [word for word in words if word not in conditions]
    if conditions and names:
        raise UsageError(
            f"{names[0]} names a run and {conditions[0]} is a condition", "give one kind only"
        )
    if conditions:
        paths = [root / row["run"] for row in select(load_rows(root), conditions)]
    else:
        paths = [resolve_run(name, root, sweeps=True) for name in names]
    paths = list(dict.fromkeys(paths))
    for path in paths:
        _check(path, root)
    return paths


def _check(path: Path, root: Path) -> None:
    inside = root.resolve()
    if inside not in path.resolve().parents:
        raise UsageError(
            f"{path} does not lie in {root}", "name the folder of its runs with --root DIR"
        )
    name = label(path, root)
    if (path.parent / SWEEP).is_file():
        raise UsageError(f"{name} is a job of a sweep", f"remove the sweep: {path.parent.name}")
    if not (path / SWEEP).is_file() and Run.open(path).part:
        raise UsageError(f"{name} is a part of a run", f"remove the run: {path.parent.name}")
    if is_running(path / SWEEP):
        raise UsageError(f"{name} is a sweep that runs", "wait for its end, or stop it with Ctrl-C")
    for run in find_runs(path):
        if Run.open(run).status == "running":
            raise UsageError(
                f"{label(run, root)} is running", "wait for its end, or stop it with Ctrl-C"
            )


def size(path: Path) -> int:
    """Bytes of the files below `path`, without what links lead to."""
    return sum(
        (Path(folder) / name).lstat().st_size
        for folder, _, names in os.walk(path)
        for name in names
    )


def remove(path: Path) -> None:
    """Remove one directory and correct the link `latest` beside it; Ds4FlowError when it cannot.

    Its number stays taken, also when an older version made it, or no run follows it.
    It leaves under another name first, so that a half-removed run is never taken for one.
    """
    leaving = path.with_name(f".removed-{path.name}-{os.getpid()}")
    try:
        keep_highest(path.parent)
        path.rename(leaving)
        _correct_latest(path)
        shutil.rmtree(leaving)
    except OSError as error:
        raise Ds4FlowError(f"cannot remove {path}: {error.strerror}", "check its owner") from None


def _correct_latest(removed: Path) -> None:
    link = removed.parent / LATEST
    if not link.is_symlink() or link.readlink().name != removed.name:
        return
    with contextlib.suppress(OSError):
        link.unlink()
        numbers = sorted(_numbers(removed.parent), key=natural)
        if numbers:
            link.symlink_to(numbers[-1].name)


def _numbers(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
