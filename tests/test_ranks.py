"""The two largest entries of rows: ties go to the lowest index, and what is remembered is true."""

from dataclasses import replace

import pytest
import torch

from ds4flow.gguf import GgufFile
from ds4flow.model.head import head_logits
from ds4flow.model.trunk import Model
from ds4flow.ranks import Ranks, ranks, remember, remembered
from ds4flow.speculate import argmax, top_two


def by_sorting(row: torch.Tensor) -> tuple[int, float]:
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return order[0], values[order[0]] - values[order[1]]


def rows_with_ties(vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(8, vocab, generator=generator)
    rows[1] = torch.randint(0, 2, (vocab,), generator=generator).float()
    rows[2] = 0.0
    rows[3] = -rows[3].abs()
    rows[4, -1] = 1e30
    rows[5, 0] = 1e30
    rows[6, :2] = 3e38
    rows[7] = -0.0
    rows[7, vocab // 2] = 0.0  # equal to -0.0
    return rows


@pytest.mark.parametrize("vocab", [2, 17, 320])
def test_the_first_of_the_largest_is_found(vocab):
    rows = rows_with_ties(vocab)
    wanted = [by_sorting(row) for row in rows]
    assert list(zip(*ranks(rows), strict=True)) == wanted
    assert [top_two(row) for row in rows] == wanted


def test_changed_entries_are_ranked_again():
    rows = rows_with_ties(17)
    remember(rows, (3,) * 8, (0.5,) * 8)
    assert remembered(rows) == Ranks((3,) * 8, (0.5,) * 8)
    assert argmax(rows).tolist() == [3] * 8
    assert remembered(rows[:2]) is None
    rows[0, 5] = 1e31
    assert remembered(rows) is None
    assert ranks(rows).choices[0] == 5


@pytest.mark.parametrize("vocab", [320, 317])
def test_the_head_leaves_true_ranks(vocab, golden_dir):
    """Also with ties, which a head with equal output rows makes."""
    model = Model.load(GgufFile.open(golden_dir / "tiny-f32.gguf"), profile="plain", kernels="cpu")
    stored = model.weights.output
    data = stored.data[:vocab].clone()
    data[40] = data[7]
    data[-1] = data[7]
    output = replace(stored, shape=(vocab, *stored.shape[1:]), data=data)
    streams = torch.randn(9, model.config.streams, model.config.dim)
    logits = head_logits(model.kernels, streams, model.weights.head, output, "head")
    found = remembered(logits)
    assert found is not None
    assert list(zip(*found, strict=True)) == [by_sorting(row) for row in logits]
