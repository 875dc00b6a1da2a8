"""Object code of kernels on disk: a file each, written whole, and read whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    """Object code, the function in it, and the functions by which numba would raise."""

    symbol: str
    raising: tuple[str, ...]
    code: bytes


def raising(assembly: str) -> tuple[str, ...]:
    """The functions of numba that LLVM assembly calls; they exist only where numba is set up."""
    found = re.findall(r"^declare .*@\"?((?:numba|NRT)_\w+)", assembly, re.MULTILINE)
    return tuple(sorted(set(found)))


class ObjectStore:
    """Object files in a folder. Other processes may write the same ones at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Stored | None:
        """What is stored under `name`; None when nothing is, or not what was written."""
        try:
            head, _, code = (self.folder / name).read_bytes().partition(b"\n")
            facts = json.loads(head)
        except (OSError, ValueError):
            return None
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        return Stored(facts["symbol"], tuple(facts["raising"]), code)

    def write(self, name: str, stored: Stored) -> bool:
        """Store object code; False when the folder cannot be written."""
        facts = {
            "symbol": stored.symbol,
            "raising": stored.raising,
            "sha256": hashlib.sha256(stored.code).hexdigest(),
        }
        fresh = self.folder / f".{name}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(json.dumps(facts).encode() + b"\n" + stored.code)
            fresh.replace(self.folder / name)
        except OSError:
            return False
        return True
