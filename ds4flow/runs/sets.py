"""Runs of prompt sets: their prompts, and their figures by category as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds4flow.metrics import ratio
from ds4flow.runs.record import Run, find_parts

COLUMNS = (
    *("category", "prompts", "tokens", "tokens/s", "accepted", "drafts", "length", "repeated"),
    "identity",
)
"""Of `category_rows`; `length` is the mean acceptance length, a number beside a relaxed identity
that of tokens that were not the target's choice."""


def parts(run: Run) -> dict[str, Run]:
    """The prompts of a set's run by id, in order; another run is its own only part, named ''."""
    found = [Run.open(path) for path in find_parts(run.path)]
    return {str(one.facts.get("prompt_id", one.path.name)): one for one in found} or {"": run}


def category_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """A row of texts for each category of a set's summary, and one for all; none for other runs."""
    categories = summary.get("categories") or {}
    if not categories:
        return []
    prompts = sum(figures["prompts"] for figures in categories.values())
    rows = [[name, *_cells(figures, figures["prompts"])] for name, figures in categories.items()]
    return [*rows, ["total", *_cells(summary, prompts)]]


def _cells(figures: Mapping[str, Any], prompts: int) -> list[str]:
    done, output = figures["prompts_complete"], figures["output_tokens"]
    identity = figures["identity"] if done else "-"
    if figures["relaxed_accepts"]:
        identity += f" ({figures['relaxed_accepts']})"
    return [
        str(prompts) if done == prompts else f"{done} of {prompts}",
        str(output),
        _number(figures["tokens_per_second"], ".1f"),
        _number(figures["draft_acceptance_rate"], ".1%"),
        str(figures["num_draft_tokens"]),
        _number(figures["mean_acceptance_length"], ".2f"),
        _number(ratio(figures["repeated_tokens"], output), ".0%"),
        identity,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
