"""Run directories: numbered, never reused, and readable up to the moment a run stopped.

`mkdir` is the lock; files appear whole or not at all, and so do appended lines, also when the disk
is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ds4flow.errors import Ds4FlowError, UsageError

Status = Literal["running", "complete", "failed", "interrupted"]

NUMBER = "NNNN"
"""The last part of a run directory's template that stands for the next free number."""

_HIGHEST = ".highest"
_RECORD = "run.json"
_RESERVE = ".reserve"
_RESERVE_BYTES = 64 * 1024


def now() -> str:
    """The time as records write it: ISO 8601, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def allocate(template: str | Path) -> Path:
    """Make the directory that `template` names and return it; `NNNN` becomes the next new number.

    Raises UsageError when a directory named outright exists and is not empty, Ds4FlowError when it
    cannot be made. Processes that start at once get different numbers.
    """
    path = Path(template)
    try:
        if path.name == NUMBER:
            return _next_number(path.parent)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(
                f"the run directory {path} exists and is not empty",
                "give a new directory as hydra.run.dir, or leave it out for the next free number",
            )
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def _next_number(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = max(_kept(parent), _highest(parent)) + 1
    while True:
        path = parent / f"{number:04d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        keep_highest(parent)
        _link_latest(parent, path.name)
        return path


def keep_highest(parent: Path) -> None:
    """Write down the highest number in `parent`, so that it stays taken when its run is removed.

    Raises OSError when it cannot be written.
    """
    # Again until it holds, as a process that started earlier may have written a lower number.
    while (kept := _kept(parent)) > _highest(parent):
        fresh = parent / f"{_HIGHEST}-{os.getpid()}"
        fresh.write_text(f"{kept:04d}\n")
        fresh.replace(parent / _HIGHEST)


def _kept(parent: Path) -> int:
    return max((int(path.name) for path in parent.iterdir() if path.name.isdecimal()), default=0)


def _highest(parent: Path) -> int:
    """The highest number that was ever written down; 0 without a readable one."""
    try:
        return int((parent / _HIGHEST).read_text())
    except (OSError, ValueError):
        return 0


def _link_latest(parent: Path, name: str) -> None:
    fresh = parent / f".latest-{os.getpid()}-{name}"
    # A file system without links loses a convenience only.
    with contextlib.suppress(OSError, NotImplementedError):
        fresh.symlink_to(name)
        fresh.replace(parent / "latest")


def _unwritable(path: Path, error: OSError) -> Ds4FlowError:
    return Ds4FlowError(
        f"cannot write {path}: {error.strerror or error}",
        "make room or choose another place with hydra.run.dir=DIR; what was written so far is kept",
    )


class RunDir:
    """The directory of one run. Every method that writes raises Ds4FlowError when it cannot.

    `facts` is the content of run.json. A small reserve file is given up when the run ends, so that
    its end can be recorded on a full disk.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.after_finish: list[Callable[[], None]] = []
        self._files: dict[str, _Appended] = {}
        self._started = time.monotonic()

    @classmethod
    def create(cls, path: str | Path, facts: Mapping[str, Any] | None = None) -> RunDir:
        """Claim `path` for a new run and write run.json with status `running`.

        Raises UsageError when the directory holds a run already.
        """
        run = cls(Path(path), {})
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            (run.path / _RECORD).open("x").close()
            (run.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))
        except FileExistsError:
            raise UsageError(
                f"{run.path} already holds a run", "choose another hydra.run.dir"
            ) from None
        except OSError as error:
            raise _unwritable(run.path, error) from None
        run.record(
            status="running",
            started=now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            **(facts or {}),
        )
        return run

    def record(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.facts.update(facts)
        self.write_json(_RECORD, self.facts)

    def finish(self, status: Status, error: str | None = None) -> None:
        """Record how the run ended, and close its files. Only the first call counts.

        Then what `after_finish` holds is called; it must not raise.
        """
        if self.facts.get("status") != "running":
            return
        self.release_reserve()
        self.close()
        ended = now()
        seconds = round(time.monotonic() - self._started, 3)
        self.record(status=status, ended=ended, seconds=seconds, error=error)
        for action in self.after_finish:
            action()

    def close(self) -> None:
        """Close the files that were appended to; appending opens them again."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def release_reserve(self) -> None:
        """Give up the reserve, so that the last files of a run fit on a full disk."""
        (self.path / _RESERVE).unlink(missing_ok=True)

    def write(self, name: str, data: str | bytes) -> None:
        """Write a whole file: readers see the old one or the new one, never a part."""
        path = self.path / name
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                file.write(_encoded(data))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise _unwritable(path, error) from None

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON."""
        self.write(name, json.dumps(value, indent=1) + "\n")

    def append(self, name: str, data: str | bytes) -> None:
        """Append to a file, whole or not at all; what was appended survives a killed process."""
        encoded = _encoded(data)
        try:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _Appended(self.path / name)
            file.append(encoded)
        except OSError as error:
            raise _unwritable(self.path / name, error) from None

    def append_json(self, name: str, value: Any) -> None:
        """Append `value` as one line of JSON."""
        self.append(name, json.dumps(value, separators=(",", ":")) + "\n")


class _Appended:
    """A file that grows by whole pieces; this process alone writes to it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self.descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self.descriptor).st_size

    def append(self, data: bytes) -> None:
        """Write all of `data`, or leave the file as it was and raise OSError."""
        try:
            _write_all(self.descriptor, data)
        except OSError:
            os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)


def _encoded(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
