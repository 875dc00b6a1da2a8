"""The two largest entries of rows: compiled and numpy agree, ties go to the lowest index."""

import numpy as np
import pytest
import torch

from ds4flow import ranks
from ds4flow.kernels.cpu import ranking


def by_sorting(row: torch.Tensor) -> tuple[int, float]:
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return order[0], values[order[0]] - values[order[1]]


@pytest.mark.parametrize("vocab", [2, 5, 16, 17, 47, 320, 6656])
def test_both_forms_find_the_first_of_the_largest(vocab):
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(12, vocab, generator=generator)
    rows[1] = torch.randint(0, 2, (vocab,), generator=generator).float()  # ties
    rows[2] = 0.0
    rows[3] = -rows[3].abs()
    rows[4, -1] = 1e30
    rows[5, 0] = 1e30
    rows[6, :2] = 3e38
    rows[7] = -0.0
    rows[7, vocab // 2] = 0.0  # equal to -0.0
    wanted = [by_sorting(row) for row in rows]
    for found in (ranking.ranks(rows), ranks._by_numpy(rows)):
        assert list(zip(*found, strict=True)) == wanted


def test_rows_that_are_no_float32_matrix_are_ranked_as_well(monkeypatch):
    monkeypatch.setattr(ranks, "_compiled", [ranking.ranks])
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 40)))
    wanted = ([int(row.argmax()) for row in rows],)
    assert list(ranks.ranks(rows).choices) == wanted[0]
    turned = rows.float().T.contiguous().T
    assert list(ranks.ranks(turned).choices) == wanted[0]
