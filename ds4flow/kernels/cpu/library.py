"""Compilation of the kernels: each once, on demand, kept on disk between runs.

A kernel takes and returns int64 only, so it has one specialisation and can be called by address
from Python and from other kernels. Compiled code is keyed by the CPU, by the versions of LLVM and
numba, and by the text of this package; it is kept here and not by numba, because reading it back
through numba sets up all of numba's compiler, which takes longer than everything else.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import config as numba_config
from numba.misc.appdirs import AppDirs

from ds4flow.kernels.cpu.linking import link, machine
from ds4flow.kernels.cpu.store import ObjectStore, Stored, raising

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

    Its name holds a digest of this package's sources: a kernel is built from many of its files.
    """
    base = config.CACHE_DIR or AppDirs(appname="numba", appauthor=False).user_cache_dir
    return Path(base) / f"ds4flow-{_SOURCES}"


class Library:
    """Compiled kernels by function; `address` compiles what is not there yet."""

    def __init__(self) -> None:
        self._addresses: dict[Callable[..., int], int] = {}
        self._made: list[Any] = []  # keeps alive what numba compiled in this process
        self._lock = threading.RLock()  # object code must not be linked twice
        self.compiled = 0
        self.loaded = 0
        self.seconds = 0.0

    def address(self, function: Callable[..., int]) -> int:
        """Address of the machine code of a kernel (int64 arguments, int64 result)."""
        found = self._addresses.get(function)
        if found is None:
            with self._lock:
                if not self._load(function):
                    self._compile(function)
                found = self._addresses[function]
        return found

    def build(self, functions: Sequence[Callable[..., int]]) -> None:
        """Load some kernels, and compile those that are not stored, with progress on stderr.

        A first start compiles for some seconds, and that much silence would look like a hang.
        """
        with self._lock:
            missing = [function for function in functions if not self._load(function)]
            started, kept = self.seconds, True
            for number, function in enumerate(missing):
                _say(f"{number}/{len(missing)}", first=number == 0)
                kept &= self._compile(function)
        if missing:
            took = f"{self.seconds - started:.0f} s"
            where = f"kept in {cache_folder()}" if kept else "not kept"
            _say(f"{len(missing)}/{len(missing)} ({took}, {where})", last=True)

    def _load(self, function: Callable[..., int]) -> bool:
        """Link the stored object code of a kernel; False when there is none."""
        if function in self._addresses:
            return True
        stored = ObjectStore(cache_folder()).read(_file_name(function))
        if stored is None:
            return False
        self._addresses[function] = link(stored)
        self.loaded += 1
        return True

    def _compile(self, function: Callable[..., int]) -> bool:
        """Compile a kernel and store it; False when the folder cannot be written."""
        started = time.perf_counter()
        arity = len(inspect.signature(function).parameters)
        kind = types.int64(*[types.int64] * arity)
        made: Any = numba.cfunc(kind, **OPTIONS)(function)
        took = time.perf_counter() - started
        self.seconds += took
        self.compiled += 1
        log.info("compiled %s in %.1f s", function.__name__, took)
        self._made.append(made)
        self._addresses[function] = int(made.address)
        _, _, (code, _) = made._library.serialize_using_object_code()
        stored = Stored(made.native_name, raising(made.inspect_llvm()), code)
        kept = ObjectStore(cache_folder()).write(_file_name(function), stored)
        if not kept:
            log.warning("compiled kernels are not kept: %s is not writable", cache_folder())
        return kept


def _say(progress: str, *, first: bool = False, last: bool = False) -> None:
    """One line that grows: on a terminal it is written over, elsewhere it appears twice."""
    line = f"compiling CPU kernels for this machine, once: {progress}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif first or last:
        print(line, file=sys.stderr, flush=True)


def _file_name(function: Callable[..., int]) -> str:
    """The name of a kernel among stored ones; with its module's digest if not of this package."""
    module = function.__module__.removeprefix(f"{__package__}.")
    if module == function.__module__:
        source = Path(inspect.getfile(function)).read_bytes()
        module += f"-{hashlib.sha256(source).hexdigest()[:16]}"
    return f"{module}.{function.__name__}-{machine()}-{numba.__version__}.o"


library = Library()
"""The process-wide library: machine code does not depend on a model."""
