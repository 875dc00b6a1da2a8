"""Processes beside the first one that torchrun started: they compute, and neither write nor speak.

Promise: one run leaves one run directory and prints its text once.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def silent(rank: int) -> Iterator[str]:
    """A folder that is gone afterwards; of what is said in between, only failures are shown."""
    folder = tempfile.mkdtemp(prefix="ds4flow-")
    said = io.StringIO()
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(said):
            yield folder
    except SystemExit as error:
        if error.code not in (0, None):
            for line in said.getvalue().splitlines():
                print(f"process {rank}: {line}", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
