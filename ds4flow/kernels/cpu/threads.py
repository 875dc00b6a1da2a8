"""The thread pool of the kernels: workers that take numbered shares of a job from one atomic word.

The calling thread takes shares too and waits only for shares that were begun, so a worker that the
system has put aside delays nobody. Which thread computes a share never changes a bit. Idle workers
leave compiled code after a moment and sleep until the next call.
"""

from __future__ import annotations

import threading

import numpy as np

from ds4flow.kernels.cpu import layout
from ds4flow.kernels.cpu.lanes import (
    atomic_add,
    atomic_get,
    atomic_put,
    get,
    give_way,
    invoke,
    pause,
    put,
)
from ds4flow.kernels.cpu.layout import (
    CONTEXT_CONTROL,
    CONTEXT_THREADS,
    CONTROL_DONE,
    CONTROL_JOB,
    CONTROL_PARKED,
    CONTROL_SLEEPS,
    CONTROL_WORD,
)
from ds4flow.kernels.cpu.library import helper, library
from ds4flow.kernels.cpu.linking import entry

SHARES_PER_THREAD = 4
MASK = (1 << 20) - 1
# Turns of the waiting loop, some tens of nanoseconds each, before a worker sleeps: more than one
# thread does alone in a pass, because a worker is only woken at the start of the next one.
PATIENCE = 1 << 17


@helper
def _take_shares(control: int, thread: int) -> None:
    """Compute shares of the current job until none is left.

    The word gives the epoch, the number of shares and the next one together. A share that is taken
    keeps its job from ending, so the job's fields belong to it for as long as it is computed.
    """
    while True:
        word = atomic_add(control + CONTROL_WORD, 1)
        share, shares = word & MASK, (word >> 20) & MASK
        if share >= shares:
            return
        context = get(control + CONTROL_JOB + 8)
        invoke(get(control + CONTROL_JOB), (context, share, shares, thread))
        atomic_add(control + CONTROL_DONE, 1)


def runner(context: int, kernel: int) -> int:
    """Run a job kernel (context, share, shares, thread) on the calling thread and the workers."""
    control = get(context + CONTEXT_CONTROL)
    shares = SHARES_PER_THREAD * get(context + CONTEXT_THREADS)
    put(control + CONTROL_JOB, kernel)
    put(control + CONTROL_JOB + 8, context)
    atomic_put(control + CONTROL_DONE, 0)
    epoch = ((atomic_get(control + CONTROL_WORD) >> 40) + 1) & MASK
    atomic_put(control + CONTROL_WORD, (epoch << 40) | (shares << 20))
    _take_shares(control, 0)
    turns = 0
    while atomic_get(control + CONTROL_DONE) < shares:
        turns += 1
        if turns % 256 == 0:
            give_way()
        else:
            pause()
    return 0


def worker(
    control: int, thread: int, patience: int, a: int, b: int, c: int, d: int, e: int, f: int
) -> int:
    """Take shares whenever there are some; return after `patience` turns without any."""
    idle = 0
    while idle < patience:
        word = atomic_get(control + CONTROL_WORD)
        if (word & MASK) < ((word >> 20) & MASK):
            _take_shares(control, thread)
            idle = 0
        else:
            idle += 1
            if idle % 512 == 0:
                give_way()
            else:
                pause()
    atomic_put(control + CONTROL_SLEEPS + 8 * thread, 1)
    atomic_add(control + CONTROL_PARKED, 1)
    return 0


class Pool:
    """Worker threads for one number of threads; they never end, and sleep when nothing is to do."""

    def __init__(self, threads: int) -> None:
        size = layout.CONTROL_SLEEPS // 8 + threads
        room = np.zeros(size + 8, dtype=np.int64)
        first = -(room.__array_interface__["data"][0] // 8) % 8
        self.control = room[first : first + size]  # at the start of a cache line
        self.address = int(self.control.__array_interface__["data"][0])
        self._parked = 0
        self._events = [threading.Event() for _ in range(threads - 1)]
        for number, event in enumerate(self._events, 1):
            name = f"ds4flow-kernels-{number}"
            run = threading.Thread(target=self._serve, args=(number, event), name=name, daemon=True)
            run.start()

    def _serve(self, number: int, event: threading.Event) -> None:
        serve, kernel = entry(release=True), library.address(worker)
        while True:
            serve(kernel, self.address, number, PATIENCE, 0, 0, 0, 0, 0, 0)
            event.wait()
            event.clear()

    def wake(self) -> None:
        """Wake the workers that sleep; costs next to nothing when none does."""
        parked = int(self.control[layout.CONTROL_PARKED // 8])
        if parked == self._parked:
            return
        self._parked = parked
        for number, event in enumerate(self._events, 1):
            place = layout.CONTROL_SLEEPS // 8 + number
            if self.control[place]:
                self.control[place] = 0
                event.set()


_POOLS: dict[int, Pool] = {}


def pool(threads: int) -> Pool:
    """The process-wide pool of some number of threads (the caller's included)."""
    if threads not in _POOLS:
        library.address(worker)  # compiled here, not by every worker
        _POOLS[threads] = Pool(threads)
    return _POOLS[threads]
