"""The accept rule on tensors: exact, relaxed, ties."""

import math

import pytest
import torch

from ds4flow.speculate import argmax, top_gap, top_two, verify

BIG = 1 << 17


def rows(*peaks: dict[int, float], vocab: int = 8) -> torch.Tensor:
    logits = torch.zeros(len(peaks), vocab)
    for row, peak in zip(logits, peaks, strict=True):
        for token, value in peak.items():
            row[token] = value
    return logits


@pytest.mark.parametrize("places", [(0, 1), (5, 256), (BIG - 2, BIG - 1), (3, BIG // 2, BIG - 1)])
def test_argmax_takes_the_lowest_id_on_ties(places):
    logits = torch.full((3, BIG), -1.0)
    logits[1, list(places)] = 2.0
    assert argmax(logits)[1] == places[0]
    assert argmax(logits[1]) == places[0]


def test_top_gap_is_zero_on_a_tie():
    assert top_gap(torch.tensor([1.0, 3.0, 3.0])) == 0.0
    assert top_gap(torch.tensor([1.0, 3.5, 3.0])) == 0.5


def test_top_two_is_the_argmax_and_its_gap():
    for values in ([1.0, 3.0, 3.0], [1.0, 3.5, 3.0], [4.0, -1.0, 0.0], [0.0, 1.0, 2.0]):
        logits = torch.tensor(values)
        assert top_two(logits) == (int(argmax(logits)), top_gap(logits))


def test_all_drafts_right():
    verdict = verify(rows({1: 5.0}, {2: 5.0}, {3: 5.0}), [1, 2])
    assert (verdict.accepted, verdict.next_token, verdict.reason) == (2, 3, "full")
    assert verdict.ratios == (1.0, 1.0)
    assert verdict.relaxed == 0


def test_first_wrong_draft_ends_the_prefix():
    verdict = verify(rows({1: 5.0}, {2: 5.0}, {3: 5.0}), [1, 7])
    assert (verdict.accepted, verdict.next_token, verdict.reason) == (1, 2, "mismatch")
    # a right draft after a wrong one is worth nothing
    assert verify(rows({1: 5.0}, {2: 5.0}, {3: 5.0}), [7, 2]).accepted == 0


def test_no_drafts_is_plain_greedy():
    verdict = verify(rows({4: 1.0}), [])
    assert (verdict.accepted, verdict.next_token, verdict.reason) == (0, 4, "none")


def test_margin_accepts_by_probability_ratio():
    logits = rows({1: 5.0, 2: 5.0 + math.log(0.5)}, {3: 1.0})
    assert verify(logits, [2], margin=0.49).accepted == 1
    assert verify(logits, [2], margin=0.49).relaxed == 1
    rejected = verify(logits, [2], margin=0.51)
    assert (rejected.accepted, rejected.reason) == (0, "margin")
    assert rejected.ratios[0] == pytest.approx(0.5, rel=1e-6)


def test_strict_ignores_the_margin():
    logits = rows({1: 5.0, 2: 4.9}, {3: 1.0})
    assert verify(logits, [2], margin=0.1, strict=True).accepted == 0


def test_exact_mode_rejects_a_tied_token_with_a_higher_id():
    logits = rows({1: 5.0, 2: 5.0}, {3: 1.0})
    assert verify(logits, [2], margin=1.0).accepted == 0
    assert verify(logits, [1], margin=1.0).accepted == 1


def test_an_argmax_draft_is_never_counted_as_relaxed():
    verdict = verify(rows({1: 5.0}, {3: 1.0}), [1], margin=0.2)
    assert verdict.accepted == 1
    assert verdict.relaxed == 0


def test_rows_and_drafts_must_match():
    with pytest.raises(ValueError, match="rows cannot verify"):
        verify(rows({1: 1.0}), [1])
