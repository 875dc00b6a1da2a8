"""The two largest entries of rows of logits; ties go to the lowest index, everywhere.

Promise: a backend's compiled form (`use`) gives the same numbers as the one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class Ranks(NamedTuple):
    """By row: index of the largest entry, and largest minus second largest (0 on a tie)."""

    choices: tuple[int, ...]
    gaps: tuple[float, ...]


def _by_numpy(logits: torch.Tensor) -> Ranks:
    rows = logits.numpy()
    choices, gaps = [], []
    for row in rows:
        best = int(row.argmax())  # the first of equals
        others = row.copy()
        others[best] = -np.inf
        choices.append(best)
        gaps.append(float(row[best]) - float(others.max()))
    return Ranks(tuple(choices), tuple(gaps))


_compiled: list[Callable[[torch.Tensor], Ranks]] = []


def use(compiled: Callable[[torch.Tensor], Ranks]) -> None:
    """Rank contiguous float32 rows on the CPU with `compiled` from now on."""
    _compiled[:] = [compiled]


def ranks(logits: torch.Tensor) -> Ranks:
    """Choices and gaps of finite `logits [M, V]`, V at least 2, on any device."""
    logits = logits.detach()
    if logits.device.type != "cpu":
        logits = logits.cpu()
    if _compiled and logits.dtype == torch.float32 and logits.is_contiguous():
        return _compiled[0](logits)
    return _by_numpy(logits)
