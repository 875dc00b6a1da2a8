"""Runs that end on record: whatever stops one, its directory says how it ended."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ds4flow.errors import Ds4FlowError
from ds4flow.rundir import RunDir, Status

_log = logging.getLogger("ds4flow")


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


STOPS = (KeyboardInterrupt, BrokenPipeError)
"""What stops a run from outside: nothing is wrong with it, and nothing more should follow."""


@contextmanager
def recorded(run: RunDir) -> Iterator[None]:
    """Write into run.json how the run ended, whichever way it did."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, STOPS)
        status: Status = "interrupted" if stopped else "failed"
        text = f"{type(error).__name__}: {error}"
        expected = stopped or isinstance(error, Ds4FlowError)
        _log.error("run %s: %s", status, text, exc_info=not expected)
        # What stopped the run is what the user must see, not a disk that is full on top.
        with suppress(Ds4FlowError, OSError):
            run.finish(status, text)
        raise
    _log.info("run complete")
    run.finish("complete")


def exit_code(stop: KeyboardInterrupt) -> int:
    """What a process ends with that was stopped: 128 and the number of the signal."""
    return 143 if isinstance(stop, Terminated) else 130


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a run that a scheduler ends is recorded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
