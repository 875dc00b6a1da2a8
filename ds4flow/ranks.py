"""The two largest entries of rows of logits; ties go to the lowest index, everywhere.

A backend that ranks rows while it makes them leaves what it found with the tensor (`remember`), so
that nothing reads the rows a second time. Its numbers are those of `ranks`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Ranks(NamedTuple):
    """By row: index of the largest entry, and largest minus second largest (0 on a tie)."""

    choices: tuple[int, ...]
    gaps: tuple[float, ...]


def ranks(logits: torch.Tensor) -> Ranks:
    """Choices and gaps of finite `logits [M, V]` or `[V]`, V at least 2, on any device."""
    known = remembered(logits)
    if known is not None:
        return known
    rows = logits.detach().cpu().numpy()
    choices, gaps = [], []
    for row in rows if rows.ndim > 1 else rows[None]:
        best = int(row.argmax())  # the first of equals
        others = row.copy()
        others[best] = -np.inf
        choices.append(best)
        # in a loop of models' passes, argmax takes half the time of max
        gaps.append(float(row[best]) - float(others[others.argmax()]))
    return Ranks(tuple(choices), tuple(gaps))


_MEMO = "_ds4flow_ranks"


def remember(logits: torch.Tensor, choices: tuple[int, ...], gaps: tuple[float, ...]) -> None:
    """Leave the ranks of its rows with the tensor."""
    setattr(logits, _MEMO, (Ranks(choices, gaps), logits._version))


def remembered(logits: torch.Tensor) -> Ranks | None:
    """What was left with the tensor, unless its entries were changed since."""
    memo = getattr(logits, _MEMO, None)
    if memo is None or memo[1] != logits._version:
        return None
    found: Ranks = memo[0]
    return found
