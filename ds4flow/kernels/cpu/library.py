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
        self.compiled = 0
        self.loaded = 0
        self.seconds = 0.0

    def address(self, function: Callable[..., int]) -> int:
        """Address of the machine code of a kernel (int64 arguments, int64 result)."""
        found = self._addresses.get(function)
        if found is None:
            found = self._addresses[function] = self._find(function)
        return found

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

    def _find(self, function: Callable[..., int]) -> int:
        """Link the stored object code of a kernel, or compile it and store it."""
        store = ObjectStore(cache_folder())
        name = _file_name(function)
        stored = store.read(name)
        if stored is not None:
            self.loaded += 1
            return link(stored)
        started = time.perf_counter()
        arity = len(inspect.signature(function).parameters)
        kind = types.int64(*[types.int64] * arity)
        made: Any = numba.cfunc(kind, **OPTIONS)(function)
        took = time.perf_counter() - started
        self.seconds += took
        self.compiled += 1
        log.info("compiled %s in %.1f s", function.__name__, took)
        self._made.append(made)
        _, _, (code, _) = made._library.serialize_using_object_code()
        if not store.write(name, Stored(made.native_name, raising(made.inspect_llvm()), code)):
            log.warning("compiled kernels are not kept: %s is not writable", store.folder)
        return int(made.address)


def _file_name(function: Callable[..., int]) -> str:
    """The name of a kernel among stored ones; with its module's digest if not of this package."""
    module = function.__module__.removeprefix(f"{__package__}.")
    if module == function.__module__:
        source = Path(inspect.getfile(function)).read_bytes()
        module += f"-{hashlib.sha256(source).hexdigest()[:16]}"
    return f"{module}.{function.__name__}-{machine()}-{numba.__version__}.o"


library = Library()
"""The process-wide library: machine code does not depend on a model."""
