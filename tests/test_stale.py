"""Which rows of the MTP block wait to be written again, and how they are handed over."""

import torch

from ds4flow.stale import FEW_ROWS, Fresh, StaleRows


def fresh(first: int, *tokens: int) -> Fresh:
    return Fresh(first, tokens, torch.full((len(tokens), 1, 1), float(first)))


def test_a_long_pause_keeps_only_rows_that_a_draft_can_see() -> None:
    rows = StaleRows(reach=8)
    for first in range(0, 300, 3):
        rows.note(fresh(first, 1, 2, 3), 0)
    assert 8 <= rows.count <= 10
    assert rows.count == sum(len(part.tokens) for part in rows.waiting)
    assert rows.waiting[-1].first == 297


def test_rows_that_are_final_already_do_not_wait() -> None:
    rows = StaleRows(reach=8)
    rows.note(fresh(4, 7), 1)
    assert rows.take() == ([], None)
    rows.note(fresh(5, 7, 8, 9), 1)
    backlog, last = rows.take()
    assert not backlog
    assert last is not None
    assert (last.first, last.tokens, len(last.streams)) == (6, (8, 9), 2)
    assert rows.take() == ([], None)


def test_neighbours_are_joined_and_gaps_are_not() -> None:
    rows = StaleRows(reach=100)
    rows.note(fresh(0, 1, 2), 0)
    rows.note(fresh(2, 3), 0)
    rows.note(fresh(3, 4, 5), 1)  # row 3 is final: a gap
    backlog, last = rows.take()
    assert [(part.first, part.tokens) for part in backlog] == [(0, (1, 2, 3))]
    assert backlog[0].streams.flatten().tolist() == [0.0, 0.0, 2.0]
    assert last is not None
    assert (last.first, last.tokens) == (4, (5,))


def test_a_backlog_does_not_go_with_a_draft_step() -> None:
    rows = StaleRows(reach=100)
    rows.note(fresh(0, *range(FEW_ROWS + 1)), 0)
    backlog, last = rows.take()
    assert last is None
    assert len(backlog[0].tokens) == FEW_ROWS + 1
