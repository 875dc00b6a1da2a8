"""The one number that a search maximises, from a run's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(summary: Mapping[str, Any], metric: str, max_relaxed: float | None) -> float | None:
    """`metric` of a run; None when the run does not have it, as an acceptance without drafts.

    A run whose share of tokens that were not the target's own choice exceeds `max_relaxed` scores
    minus that share: below every run within the bound, and the worse the further outside.
    """
    value = summary.get(metric)
    if value is None:
        return None
    tokens = summary.get("output_tokens") or 0
    share = (summary.get("relaxed_accepts") or 0) / tokens if tokens else 0.0
    if max_relaxed is not None and share > max_relaxed:
        return -share
    return float(value)
