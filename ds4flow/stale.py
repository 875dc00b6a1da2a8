"""Cache rows of the MTP block that committed tokens make stale, kept until something is drafted.

Rows that no later draft can see are dropped, so a pause of any length costs little; what a draft
sees never depends on when its rows were written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

FEW_ROWS = 17
"""Stale rows of a cycle that drafted as deep as it can: more are the backlog of a pause."""


class Fresh(NamedTuple):
    """Rows that the target has committed since the drafter last looked.

    `streams [M, N, D]` are the target's of positions `first-1 ..`; `tokens` lie at `first ..`.
    """

    first: int
    tokens: tuple[int, ...]
    streams: torch.Tensor


class StaleRows:
    """Rows of the MTP block to be written again from the target's streams before the next draft.

    `reach` is how many rows a draft can see.
    """

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.waiting: deque[Fresh] = deque()
        self.count = 0
        self._later: deque[Fresh] = deque(maxlen=reach)  # single rows that were not noted yet

    def later(self, fresh: Fresh) -> None:
        """Take one committed row, not final, and do nothing more before the next `note`."""
        self._later.append(fresh)

    def note(self, fresh: Fresh, final: int) -> None:
        """Take committed rows; the first `final` of them are right in the block's cache already."""
        while self._later:
            self._note(self._later.popleft(), 0)
        self._note(fresh, final)

    def _note(self, fresh: Fresh, final: int) -> None:
        if final < len(fresh.tokens):
            if final:
                fresh = Fresh(fresh.first + final, fresh.tokens[final:], fresh.streams[final:])
            self.waiting.append(fresh)
            self.count += len(fresh.tokens)
        while self.waiting and self.count - len(self.waiting[0].tokens) >= self.reach:
            self.count -= len(self.waiting.popleft().tokens)

    def take(self) -> tuple[list[Fresh], Fresh | None]:
        """What a pause left behind, and the last few rows, which can go with the first draft step.

        Nothing is waiting afterwards.
        """
        parts = list(_joined(self.waiting))
        self.waiting.clear()
        self.count = 0
        last = parts.pop() if parts and len(parts[-1].tokens) <= FEW_ROWS else None
        return parts, last


def _joined(rows: Iterable[Fresh]) -> Iterator[Fresh]:
    """Neighbouring rows as one, so that a long pause costs one call."""
    together: list[Fresh] = []
    for fresh in rows:
        if together and together[-1].first + len(together[-1].tokens) != fresh.first:
            yield _join(together)
            together = []
        together.append(fresh)
    if together:
        yield _join(together)


def _join(rows: list[Fresh]) -> Fresh:
    if len(rows) == 1:
        return rows[0]
    tokens = tuple(token for row in rows for token in row.tokens)
    return Fresh(rows[0].first, tokens, torch.cat([row.streams for row in rows]))
