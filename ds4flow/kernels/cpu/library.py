"""Compilation of the kernels: each once, on demand, kept on disk between runs.

A kernel takes and returns int64 only, so it has one specialisation and can be called by address
from Python and from other kernels. Compiled code is keyed by the CPU (by numba) and by the text of
this package.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import config as numba_config
from numba.misc.appdirs import AppDirs

config: Any = numba_config  # its settings are made at run time
log = logging.getLogger("ds4flow.kernels.cpu")

OPTIONS: dict[str, Any] = {"nopython": True, "error_model": "numpy", "_nrt": False}
_HELPER: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
helper: Callable[[Any], Any] = numba.njit(**_HELPER)
"""Decorator of functions that kernels call directly (compiled into each of them)."""


def _digest() -> str:
    """Digest of this package's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = _digest()  # of the sources as they are imported, should they change on disk later


def cache_folder() -> Path:
    """Folder of the compiled code: below NUMBA_CACHE_DIR, else below numba's folder of the user.

    Its name holds a digest of this package's sources, because numba itself compares the file of a
    kernel only, not the files that it is built from.
    """
    base = config.CACHE_DIR or AppDirs(appname="numba", appauthor=False).user_cache_dir
    return Path(base) / f"ds4flow-{_SOURCES}"


@contextmanager
def _numba_cache() -> Iterator[bool]:
    """Point numba's cache to our folder meanwhile; yields False when that cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    before = config.CACHE_DIR
    if usable:
        config.CACHE_DIR = str(folder)
    try:
        yield usable
    finally:
        config.CACHE_DIR = before


class Library:
    """Compiled kernels by function; `address` compiles what is not there yet."""

    def __init__(self) -> None:
        self._compiled: dict[Callable[..., int], Any] = {}
        self.compiled = 0
        self.loaded = 0
        self.seconds = 0.0
        self._entries: dict[str, Any] = {}

    def address(self, function: Callable[..., int]) -> int:
        """Address of the machine code of a kernel (int64 arguments, int64 result)."""
        if function not in self._compiled:
            self._compiled[function] = self._compile(function)
        return int(self._compiled[function].address)

    def build(self, functions: Sequence[Callable[..., int]]) -> None:
        """Compile or load some kernels; says so on stderr once one had to be compiled.

        A first start compiles for some seconds, and that much silence would look like a hang.
        """
        before, started = self.compiled, self.seconds
        for number, function in enumerate(functions, 1):
            self.address(function)
            if self.compiled > before:
                line = f"compiling CPU kernels for this machine, once: {number}/{len(functions)}"
                print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if self.compiled > before:
            took = f"{self.seconds - started:.0f} s, kept in {cache_folder()}"
            print(f" ({took})", file=sys.stderr, flush=True)

    def _compile(self, function: Callable[..., int]) -> Any:
        arity = len(inspect.signature(function).parameters)
        kind = types.int64(*[types.int64] * arity)
        started = time.perf_counter()
        with _numba_cache() as cached:
            if not cached:
                log.warning("compiled kernels are not kept: %s is not writable", cache_folder())
            made = numba.cfunc(kind, cache=cached, **OPTIONS)(function)
        took = time.perf_counter() - started
        self.seconds += took
        if made.cache_hits:
            self.loaded += 1
        else:
            self.compiled += 1
            log.info("compiled %s in %.1f s", function.__name__, took)
        return made

    def enter(self, *, release: bool = False) -> Any:
        """The function that Python calls: kernel address and nine int64 arguments.

        `release`: other Python threads go on meanwhile, the pool's workers for instance.
        """
        return self._entry("enter_and_release" if release else "enter", 10)

    def serve(self) -> Any:
        """The function of a worker thread (see `entry.serve`)."""
        return self._entry("serve", 4)

    def _entry(self, name: str, arity: int) -> Any:
        if name not in self._entries:
            with _numba_cache() as cached:
                from ds4flow.kernels.cpu import entry

                kind = types.int64(*[types.int64] * arity)
                make = numba.njit(kind, cache=cached, error_model="numpy", nogil=name != "enter")
                self._entries[name] = make(getattr(entry, name))
        return self._entries[name]


library = Library()
"""The process-wide library: machine code does not depend on a model."""
