"""How thoroughly to measure, and the random tokens to measure with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds4flow.bench.engine import Engine
from ds4flow.bench.samples import CLOCKS, Clock
from ds4flow.errors import UsageError

Say = Callable[[str], None]


def quiet(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure. `tokens` are generated a run; see `fill` for `fill_cap`.

    `clock` is a name of CLOCKS.
    """

    repeats: int = 5
    warmup: int = 1
    tokens: int = 32
    chunk: int = 64
    fill_cap: int = 2048
    seed: int = 0
    clock: str = "wall"

    @property
    def now(self) -> Clock:
        """The clock's seconds."""
        return CLOCKS[self.clock]

    def __post_init__(self) -> None:
        for name, low in (("repeats", 1), ("warmup", 0), ("tokens", 1), ("chunk", 1)):
            if getattr(self, name) < low:
                raise UsageError(f"{name}={getattr(self, name)} is too small", f"use {low} or more")
        if self.clock not in CLOCKS:
            raise UsageError(
                f"clock={self.clock} is not a clock", f"use one of {', '.join(CLOCKS)}"
            )
        if self.fill_cap < 1 or self.seed < 0:
            raise UsageError(
                f"fill_cap={self.fill_cap}, seed={self.seed} are out of range",
                "use a positive cap and a seed of 0 or more",
            )


def random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    """Token ids for prompts without text; the first two ids (begin, end) are left out."""
    rng = np.random.Generator(np.random.PCG64([seed, count]))
    vocab = engine.model.config.vocab
    return [int(token) for token in rng.integers(min(2, vocab - 1), vocab, count)]


def check_context(engine: Engine, needed: int) -> None:
    """Raise UsageError when a measurement needs more positions than the model has."""
    limit = engine.model.config.context_length
    if needed > limit:
        raise UsageError(
            f"measuring there needs {needed} positions, the model has {limit}",
            "use smaller contexts",
        )
