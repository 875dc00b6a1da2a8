"""Sampling: truncation, seeds, and a chi-square test that lossless speculation is lossless."""

import math

import numpy as np
import pytest
import torch

from ds4flow import sampling as s
from ds4flow.errors import UsageError
from ds4flow.sampling import Sampling, choose, distribution, uniform, verify_sampled

DRAWS = 24_000
VOCAB = 6


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": -1},
    ],
)
def test_values_out_of_range_name_their_key(bad):
    with pytest.raises(UsageError, match=f"sampling.{next(iter(bad))}="):
        Sampling(**bad)


def test_truncations_keep_what_they_say():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    full = distribution(logits, Sampling(temperature=1.0))
    np.testing.assert_allclose(full, [0.4, 0.3, 0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(
        distribution(logits, Sampling(temperature=1.0, top_k=2)), [4 / 7, 3 / 7, 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(
        distribution(logits, Sampling(temperature=1.0, top_p=0.65)), [4 / 7, 3 / 7, 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(
        distribution(logits, Sampling(temperature=1.0, min_p=0.45)),
        [4 / 9, 3 / 9, 2 / 9, 0],
        rtol=1e-6,
    )
    sharp = distribution(logits, Sampling(temperature=0.5))
    np.testing.assert_allclose(sharp, np.array([16, 9, 4, 1]) / 30, rtol=1e-6)


def test_greedy_is_the_lowest_argmax():
    assert distribution(torch.tensor([0.0, 2.0, 2.0]), Sampling()).tolist() == [0.0, 1.0, 0.0]


def test_a_tied_token_at_the_bound_goes_to_the_lower_id():
    kept = distribution(torch.tensor([1.0, 2.0, 1.0, 1.0]), Sampling(temperature=1.0, top_k=2))
    assert np.flatnonzero(kept).tolist() == [0, 1]


def test_random_numbers_depend_on_every_part_of_their_address():
    draws = {
        uniform(seed, position, purpose)
        for seed in (0, 1)
        for position in (0, 1, 2)
        for purpose in (s.DRAFT, s.ACCEPT, s.CHOOSE)
    }
    assert len(draws) == 18
    assert uniform(7, 11, s.DRAFT) == uniform(7, 11, s.DRAFT)


def test_choose_never_takes_an_impossible_token():
    p = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {choose(p, u) for u in (0.0, 0.25, 0.4999, 0.5, 0.75, np.nextafter(1, 0))} == {1, 3}


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def wrong_verify(logits, drafts, drafters, first, sampling):
    """A plausible mistake: after a rejection redraw from the target instead of the residual."""
    original = s.residual
    try:
        s.residual = lambda target, drafter: target
        return verify_sampled(logits, drafts, drafters, first, sampling)
    finally:
        s.residual = original


def two_token_counts(verifier, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expectations of the first two tokens of `draws` sequences, from one draft each.

    The target's second distribution depends on its first token, so a bug in the hand-over shows
    too.
    """
    generator = torch.Generator().manual_seed(3)
    table = 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=generator)
    plain = Sampling(temperature=1.0)
    first = distribution(table[VOCAB], plain)
    after = [distribution(table[token], plain) for token in range(VOCAB)]
    drafter = distribution(torch.randn(VOCAB, generator=generator), plain)
    counts = np.zeros((VOCAB, VOCAB))
    logits = [torch.stack((table[VOCAB], table[d])) for d in range(VOCAB)]
    for n in range(draws):
        seeded = Sampling(temperature=1.0, seed=n)
        draft = choose(drafter, uniform(n, 0, s.DRAFT))
        verdict = verifier(logits[draft], [draft], [drafter], 0, seeded)
        if verdict.accepted:
            one, two = draft, verdict.next_token
        else:
            one = verdict.next_token
            two = choose(after[one], uniform(n, 1, s.CHOOSE))
        counts[one, two] += 1
    return counts, draws * first[:, None] * np.stack(after)


def test_speculative_sampling_has_the_targets_distribution(monkeypatch):
    # distributions of the six possible rows do not change: compute each once
    cache: dict[bytes, np.ndarray] = {}
    real = s.distribution

    def cached(logits, sampling):
        key = logits.numpy().tobytes()
        if key not in cache:
            cache[key] = real(logits, sampling)
        return cache[key]

    monkeypatch.setattr(s, "distribution", cached)
    monkeypatch.setattr(s, "top_gap", lambda row: 0.0)
    counts, expected = two_token_counts(verify_sampled, DRAWS)
    # 35 degrees of freedom: 66.6 is the 0.1% point, 58 the 0.9% point
    assert chi_square(counts, expected) < 66.6
    wrong, expected = two_token_counts(wrong_verify, DRAWS // 3)
    assert chi_square(wrong, expected) > 200.0


def test_more_than_the_draft_is_never_committed_after_a_rejection():
    logits = torch.tensor([[0.0, 20.0], [0.0, 20.0], [0.0, 20.0]])
    q = np.array([0.5, 0.5])
    verdict = verify_sampled(logits, [0, 0], [q, q], 5, Sampling(temperature=1.0, seed=1))
    assert (verdict.accepted, verdict.next_token, verdict.reason) == (0, 1, "mismatch")
