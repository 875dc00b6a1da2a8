"""Torch's library mapped into the process while Python still reads the config.

Linking it takes a sixth of a start and needs no Python, so a second core can do it meanwhile. What
torch loads later is the same: where nothing can be loaded beforehand, it loads everything itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path


def begin() -> threading.Thread | None:
    """Start to load the library; None where there is nothing to gain, or torch is there already.

    Only CPU builds on Linux: for others torch first chooses among the vendor's libraries.
    """
    library = None if "torch" in sys.modules or sys.platform != "linux" else _library()
    if library is None:
        return None
    # Not a daemon: a process must not end while the library sets itself up.
    thread = threading.Thread(target=_load, args=(library,), name="ds4flow-preload")
    thread.start()
    return thread


def _library() -> Path | None:
    found = find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        library = Path(folder) / "lib" / "libtorch_cpu.so"
        others = [library.with_name(f"libtorch_{name}.so") for name in ("cuda", "hip", "xpu")]
        if library.is_file() and not any(other.exists() for other in others):
            return library
    return None


def _load(library: Path) -> None:
    """`ctypes.CDLL` would keep the interpreter's lock; a call of the C function gives it up."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(os.fsencode(library), os.RTLD_NOW)
