"""Sampling and lossless speculative sampling: pure functions on logits and numbered random draws.

Promise: with drafts, the text is distributed exactly as without, and the same seed gives the same
text. Random numbers are addressed by (seed, position, purpose), so they do not depend on how a run
was cut into cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds4flow.errors import UsageError
from ds4flow.speculate import Verdict, argmax, top_gap

DRAFT, ACCEPT, CHOOSE = range(3)  # purposes of a random number at one position


@dataclass(frozen=True)
class Sampling:
    """Temperature and truncation. `temperature == 0` is greedy; `top_k == 0`, `top_p == 1` and
    `min_p == 0` switch the respective truncation off. Applied in the order temperature, top-k,
    top-p, min-p; the rest is renormalised.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and np.isfinite(self.temperature)):
            raise UsageError(
                f"sampling.temperature={self.temperature} is not a temperature",
                "use 0 for greedy decoding or a positive number",
            )
        for key, value, low in (("top_p", self.top_p, False), ("min_p", self.min_p, True)):
            if not (0.0 < value <= 1.0 or (low and value == 0.0)):
                raise UsageError(
                    f"sampling.{key}={value} is out of range",
                    f"use a number in {'[0' if low else '(0'}, 1]",
                )
        if self.top_k < 0:
            raise UsageError(f"sampling.top_k={self.top_k} is negative", "use 0 to keep all tokens")
        if self.seed < 0:
            raise UsageError(f"sampling.seed={self.seed} is negative", "use 0 or a larger number")

    @property
    def greedy(self) -> bool:
        """True when every choice is the argmax."""
        return self.temperature == 0.0


def uniform(seed: int, position: int, purpose: int) -> float:
    """The random number in [0, 1) that belongs to (seed, position, purpose)."""
    return float(np.random.Generator(np.random.Philox(key=[seed, position * 4 + purpose])).random())


def distribution(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Probabilities `[V]` (float64) of one row of logits after temperature and truncation.

    Ties at a truncation bound go to the lower token id.
    """
    x = logits.detach().cpu().numpy().astype(np.float64)
    if sampling.greedy:
        one = np.zeros(len(x))
        one[int(argmax(logits))] = 1.0
        return one
    weights = np.exp((x - x.max()) / sampling.temperature)
    order = np.argsort(-x, kind="stable")
    ranked = weights[order]
    keep = len(x)
    if sampling.top_k:
        keep = min(keep, sampling.top_k)
    if sampling.top_p < 1.0:
        mass = np.cumsum(ranked[:keep]) / ranked[:keep].sum()
        keep = min(keep, int(np.searchsorted(mass, sampling.top_p)) + 1)
    if sampling.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(ranked >= sampling.min_p * ranked[0])))
    probabilities = np.zeros(len(x))
    probabilities[order[:keep]] = ranked[:keep]
    return probabilities / probabilities.sum()


def choose(probabilities: np.ndarray, draw: float) -> int:
    """The token whose cumulative interval holds `draw`; never one of probability zero."""
    edges = np.cumsum(probabilities)
    token = int(np.searchsorted(edges, draw * edges[-1], side="right"))
    return min(token, int(np.flatnonzero(probabilities)[-1]))


def next_token(logits: torch.Tensor, position: int, sampling: Sampling | None) -> int:
    """The token for `position` from one row of logits `[V]`: sampled, or the argmax."""
    if sampling is None or sampling.greedy:
        return int(argmax(logits))
    return choose(distribution(logits, sampling), uniform(sampling.seed, position, CHOOSE))


def draw_draft(logits: torch.Tensor, position: int, sampling: Sampling) -> tuple[int, np.ndarray]:
    """A draft for `position` from the drafter's logits `[V]`, and the distribution it came from."""
    probabilities = distribution(logits, sampling)
    return choose(probabilities, uniform(sampling.seed, position, DRAFT)), probabilities


def certain(token: int, vocab: int) -> np.ndarray:
    """The distribution of a drafter that always proposes `token`."""
    one = np.zeros(vocab)
    one[token] = 1.0
    return one


def residual(target: np.ndarray, drafter: np.ndarray) -> np.ndarray:
    """`max(0, p - q)` normalised: what to draw from after a rejected draft."""
    rest = np.maximum(target - drafter, 0.0)
    total = rest.sum()
    # p == q leaves nothing, and then no draft is ever rejected but by rounding
    return rest / total if total > 0.0 else target


def verify_sampled(
    logits: torch.Tensor,
    drafts: Sequence[int],
    drafters: Sequence[np.ndarray],
    first: int,
    sampling: Sampling,
) -> Verdict:
    """Speculative sampling: keep draft d with probability `min(1, p(d) / q(d))`, else redraw.

    `logits [len(drafts) + 1, V]` are the target's; `drafters[j]` is the distribution `[V]` that
    draft j was drawn from; draft j stands at position `first + j`. The committed tokens are
    distributed as if each had been sampled from the target (Leviathan et al. 2023, Chen et al.
    2023).
    """
    if logits.shape[0] != len(drafts) + 1 or len(drafters) != len(drafts):
        raise ValueError(f"{logits.shape[0]} rows cannot verify {len(drafts)} drafts")
    gaps = tuple(top_gap(row) for row in logits)
    ratios: list[float] = []
    for j, draft in enumerate(drafts):
        target = distribution(logits[j], sampling)
        ratio = float(target[draft] / drafters[j][draft])
        ratios.append(ratio)
        if uniform(sampling.seed, first + j, ACCEPT) >= ratio:
            rest = residual(target, drafters[j])
            token = choose(rest, uniform(sampling.seed, first + j, CHOOSE))
            return Verdict(j, token, "mismatch", 0, tuple(ratios), gaps)
    last = distribution(logits[len(drafts)], sampling)
    token = choose(last, uniform(sampling.seed, first + len(drafts), CHOOSE))
    return Verdict(len(drafts), token, "full" if drafts else "none", 0, tuple(ratios), gaps)
