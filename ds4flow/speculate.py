"""Accepting drafts: pure functions on logits, readable on one screen.

Exact acceptance compares token ids, so it never depends on how a tie is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds4flow.ranks import ranks, remembered


@dataclass(frozen=True)
class Draft:
    """One draft token with the drafter's own top-1 minus top-2 logit gap."""

    token: int
    gap: float


@dataclass(frozen=True)
class Verdict:
    """What one verify pass decided.

    `accepted` drafts are committed beside t0; `next_token` is the next t0. `relaxed` counts
    accepted drafts that were not the target's argmax. `ratios[j]` is `p_target(draft j) /
    p_target(argmax)` of each draft that was looked at; `gaps[j]` is the target's own top-2 logit
    gap of each row. `reason` is `full` (all accepted), `mismatch` (not the argmax), `margin` (ratio
    below the margin) or `none` (no drafts).
    """

    accepted: int
    next_token: int
    reason: str
    relaxed: int
    ratios: tuple[float, ...]
    gaps: tuple[float, ...]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest entry over the last axis, the lowest index on ties (int64)."""
    known = remembered(logits)
    if known is not None:
        return torch.tensor(known.choices if logits.dim() > 1 else known.choices[0])
    if logits.device.type == "cpu":  # numpy takes the first of equals, in one pass
        return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))
    # `torch.argmax` leaves ties open; comparing with the maximum does not
    top = logits.amax(-1, keepdim=True)
    places = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == top, places, logits.shape[-1]).amin(-1)


def top_gap(logits: torch.Tensor) -> float:
    """Largest minus second largest entry of `logits [V]`, 0 on a tie."""
    return top_two(logits)[1]


def top_two(logits: torch.Tensor) -> tuple[int, float]:
    """`argmax` and `top_gap` of `logits [V]`."""
    found = ranks(logits)
    return found.choices[0], found.gaps[0]


def agreed(logits: torch.Tensor, drafts: Sequence[int]) -> tuple[int, int]:
    """What `verify` decides at a margin of 1, without what only records need.

    Returns how many `drafts` are accepted, and the next token.
    """
    choices = ranks(logits).choices
    accepted = 0
    while accepted < len(drafts) and choices[accepted] == drafts[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def verify(
    logits: torch.Tensor, drafts: Sequence[int], *, margin: float = 1.0, strict: bool = False
) -> Verdict:
    """Accept the longest prefix of `drafts` against target `logits [len(drafts) + 1, V]` (float32).

    Row j decides draft j. With `strict` or `margin == 1.0` a draft must be the target's argmax;
    otherwise it is accepted when its probability is at least `margin` times that of the argmax.
    """
    if logits.shape[0] != len(drafts) + 1:
        raise ValueError(f"{logits.shape[0]} rows cannot verify {len(drafts)} drafts")
    exact = strict or margin >= 1.0
    choices, gaps = ranks(logits)
    ratios: list[float] = []
    relaxed = 0
    reason = "full" if drafts else "none"
    accepted = 0
    for j, draft in enumerate(drafts):
        ratio = 1.0
        if draft != choices[j]:
            ratio = math.exp(float(logits[j, draft]) - float(logits[j, choices[j]]))
        ratios.append(ratio)
        if draft != choices[j]:
            if exact or ratio < margin:
                reason = "mismatch" if exact else "margin"
                break
            relaxed += 1
        accepted += 1
    return Verdict(accepted, choices[accepted], reason, relaxed, tuple(ratios), gaps)
