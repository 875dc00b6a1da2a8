"""What a run of a prompt set shows beside its texts: figures by category, and every prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds4flow.report.figure import Axis, Chart, Layer, Table

COLUMNS = (
    ("output_tokens", "tokens", ",.0f"),
    ("tokens_per_second", "tokens/s", ".1f"),
    ("draft_acceptance_rate", "accepted", ".1%"),
    ("num_draft_tokens", "drafts", ",.0f"),
    ("mean_acceptance_length", "tokens a cycle", ".2f"),
)
"""Numbers in the tables of categories and of prompts: key, words, format."""

_LABEL = 13


def numbers_of(summary: Mapping[str, Any]) -> list[str]:
    """The numbers of `COLUMNS` as texts, empty where there are none."""
    return [number(summary.get(key), form) for key, _, form in COLUMNS]


def number(value: Any, form: str) -> str:
    """A number as text, empty when there is none."""
    return format(float(value), form) if isinstance(value, int | float) else ""


def identity_of(identity: str, lossy: Any) -> str:
    """The words of an identity badge, with the number of lossy tokens where there can be any."""
    return f"{identity}, {lossy} lossy" if identity == "relaxed" and lossy is not None else identity


def category_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each category of a set's summary."""
    return [
        {
            "name": name,
            "prompts": f"{one.get('prompts_complete', 0)} of {one.get('prompts', 0)}",
            "numbers": numbers_of(one),
            "identity": str(one.get("identity", "")) if one.get("prompts_complete") else "",
            "identity_text": identity_of(str(one.get("identity", "")), one.get("relaxed_accepts")),
        }
        for name, one in (summary.get("categories") or {}).items()
    ]


def prompt_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each prompt of a set's summary, whatever became of it."""
    return [
        {
            "id": str(one.get("id")),
            "category": str(one.get("category")),
            "status": str(one.get("status")),
            "numbers": numbers_of(one),
            "finish": str(one.get("finish_reason") or ""),
            "error": str(one.get("error") or ""),
        }
        for one in summary.get("prompts") or ()
        if isinstance(one, Mapping)
    ]


def category_figures(summary: Mapping[str, Any]) -> list[Chart]:
    """Acceptance and tokens a cycle by category; none for a run without categories."""
    categories = summary.get("categories") or {}
    if not categories:
        return []
    return [
        _bars(
            categories,
            ("acceptance-by-category", "Acceptance by category"),
            "Of the drafts verified for a category's prompts, the share that was committed.",
            Axis("committed", low=0.0, high=1.0, percent=True),
            ("draft_acceptance_rate", ".0%", 2),
        ),
        _bars(
            categories,
            ("length-by-category", "Tokens a cycle by category"),
            "Output tokens over cycles; 1 is what decoding without drafts gives.",
            Axis("tokens a cycle", low=0.0),
            ("mean_acceptance_length", ".2f", 0),
        ),
    ]


def _bars(
    categories: Mapping[str, Mapping[str, Any]],
    names: tuple[str, str],
    caption: str,
    axis: Axis,
    shown: tuple[str, str, int],
) -> Chart:
    key, form, colour = shown
    values: Sequence[float | None] = [one.get(key) for one in categories.values()]
    texts = [number(value, form) for value in values]
    labels = [name if len(name) <= _LABEL else name[: _LABEL - 1] + "…" for name in categories]
    known = any(value is not None for value in values)
    layer = Layer("bars", names[1], list(range(len(values))), values, colour, (), texts)
    return Chart(
        *names,
        caption,
        Axis("category", labels=labels),
        axis,
        [layer] if known else [],
        Table(("category", names[1]), list(zip(categories, texts, strict=True))),
        missing="" if known else "No category has this number.",
    )
