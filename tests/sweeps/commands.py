"""Running `ds4flow run` from tests, in this process and in its own, on the look-up model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from ds4flow.runs.sweep import Sweep
from tests.command import ds4flow

ROOT = Path(__file__).parent.parent.parent
CONF = str(ROOT / "tests" / "data" / "conf")
FAKE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default", "prompt=hello",
        "commit.max_tokens=12", "log.table=false")  # fmt: skip
SWEEP = Path("runs/demo/0001")


def run(*arguments: str) -> Result:
    """`ds4flow run` in this process."""
    return ds4flow("run", *arguments)


def sweep(*arguments: str) -> Result:
    """A sweep on the look-up model."""
    return run(*FAKE, "--multirun", *arguments)


def statuses(path: Path = SWEEP) -> list[str]:
    return [job.status for job in Sweep.open(path).jobs]


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """`ds4flow run` in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "ds4flow", "run", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, **options,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError
