"""What the machine can do and what a start costs: read bandwidth, starts in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds4flow import origin
from ds4flow.bench.samples import Clock, Samples
from ds4flow.errors import Ds4FlowError

READ_BYTES = 1 << 30  # larger than the caches of most machines
START_TIMEOUT = 1800  # seconds; compiling all kernels on a slow machine takes minutes


def read_bandwidth(
    threads: int,
    *,
    repeats: int = 5,
    nbytes: int = READ_BYTES,
    clock: Clock = time.perf_counter,
) -> Samples:
    """Bytes per second of summing a float32 array, one value a repeat.

    The array is read from end to end; it takes at most a quarter of the machine's memory. Sets
    torch's number of threads.
    """
    torch.set_num_threads(threads)
    memory = origin.machine()["memory_bytes"] or 4 * nbytes
    array = torch.ones(max(1, min(nbytes, memory // 4) // 4), dtype=torch.float32)
    total = float(array.sum())  # also touches every page
    if not total > 0.0:
        raise Ds4FlowError("summing a large array failed", "this machine's memory is at fault")
    values = []
    for _ in range(repeats):
        started = clock()
        array.sum()
        values.append(array.nbytes / (clock() - started))
    return Samples(tuple(values))


@dataclass(frozen=True)
class StartTimes:
    """Seconds of one start in a fresh process, and its peak memory.

    `imports` until the package is there, `load` until the model is bound and its kernels are
    ready (compiled or loaded from the cache), `first` the first one-row step, `second` the next
    one. `peak_bytes` is the process's largest resident size, pages of the mapped file included;
    None where the system does not tell.
    """

    imports: float
    load: float
    first: float
    second: float
    peak_bytes: int | None
    cold: bool

    @property
    def total(self) -> float:
        """Seconds from the start of the process's own code to its first token."""
        return self.imports + self.load + self.first


def measure_start(
    main: Path,
    mtp: Path | None,
    *,
    kernels: str,
    profile: str,
    threads: int,
    cold: bool = False,
) -> StartTimes:
    """Start once in a new process; `cold` gives it an empty cache of compiled kernels.

    Raises Ds4FlowError with the process's last words when it fails.
    """
    job: dict[str, Any] = {
        "main": str(main),
        "mtp": None if mtp is None else str(mtp),
        "kernels": kernels,
        "profile": profile,
        "threads": threads,
    }
    if not cold:
        return _started(_child(job), cold=False)
    with tempfile.TemporaryDirectory(prefix="ds4flow-cold-") as folder:
        return _started(_child({**job, "compile_folder": folder}), cold=True)


def _started(answer: Mapping[str, Any], *, cold: bool) -> StartTimes:
    return StartTimes(
        imports=float(answer["imports"]),
        load=float(answer["load"]),
        first=float(answer["first"]),
        second=float(answer["second"]),
        peak_bytes=answer["peak_bytes"],
        cold=cold,
    )


def _child(job: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "ds4flow.bench.startup", json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Ds4FlowError(f"a start could not be measured: {error}", "leave start out") from None
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        raise Ds4FlowError(f"a start failed: {last}", "run the model once to see the cause")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def peak_memory() -> int | None:
    """Largest resident size of this process in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
