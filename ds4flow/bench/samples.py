"""Repeated timings: rounds in which every arm runs once, and what is reported of them.

Arms are interleaved, so a machine that slows down for a minute slows all of them, and ratios are
taken pair by pair inside a round.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds by name. `cpu` counts what this process computed: on a machine that others use too it
says more about one thread than the time on the wall, and nothing about several.
"""


class Interval(NamedTuple):
    """Ends of a confidence interval and how surely it holds what it is for."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Samples:
    """One value a round, in the order of the rounds."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("no samples")

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile; with fewer than four values the smallest."""
        return self._quartile(0)

    @property
    def high(self) -> float:
        """The upper quartile; with fewer than four values the largest."""
        return self._quartile(2)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, relative to the median; 0 for a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def _quartile(self, which: int) -> float:
        if len(self.values) < 4:
            return min(self.values) if which == 0 else max(self.values)
        return statistics.quantiles(self.values, n=4, method="inclusive")[which]

    def interval(self, level: float = 0.95) -> Interval:
        """Where the median of the population lies, whatever its distribution.

        Between two order statistics: of n independent values, the k-th smallest and the k-th
        largest hold it with probability `1 - 2 P(Binomial(n, 1/2) < k)`. The narrowest interval
        that reaches `level`; with too few values all of them, and a lower coverage.
        """
        n, ordered = len(self.values), sorted(self.values)
        below = 2.0**-n  # chance that fewer than k values lie below the median, for k = 1
        k, coverage = 1, 1.0 - 2.0 * below
        while k < n // 2:
            below += math.comb(n, k) * 2.0**-n
            if 1.0 - 2.0 * below < level:
                break
            k, coverage = k + 1, 1.0 - 2.0 * below
        return Interval(ordered[k - 1], ordered[n - k], max(coverage, 0.0))

    def over(self, other: Samples) -> Samples:
        """The ratio to another arm, round by round."""
        return Samples(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


def interleave(
    arms: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warmup: int = 1,
    say: Callable[[str], None] | None = None,
) -> dict[str, list[T]]:
    """Run every arm `warmup` times unrecorded, then `repeats` rounds; results by arm.

    Each round starts with another arm. Garbage is collected between arms, never inside one.
    """
    names = list(arms)
    results: dict[str, list[T]] = {name: [] for name in names}
    with _no_collections():
        for number in range(-warmup, repeats):
            if say is not None:
                warm = f"warm-up {number + warmup + 1}"
                say(warm if number < 0 else f"round {number + 1}/{repeats}")
            shift = number % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                gc.collect()
                result = arms[name]()
                if number >= 0:
                    results[name].append(result)
    return results


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect on request only, and then only what was made since."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def samples(results: Sequence[T], value: Callable[[T], float]) -> Samples:
    """The samples of one figure of an arm's results."""
    return Samples(tuple(value(result) for result in results))
