"""Runs as rows: one flat name for every fact, key and metric, filtered and sorted by any of them.

Rows come from the files each time, so they are never stale; a run takes a quarter of a millisecond.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds4flow.errors import UsageError, near_match
from ds4flow.runs.record import Run, find_parts, find_runs, label

Row = dict[str, Any]

ALIASES = {
    "acceptance": "draft_acceptance_rate",
    "decode_tokens_per_second": "tokens_per_second",
    "length": "mean_acceptance_length",
}
"""Short names of metrics, for typing."""

_FACTS = (
    *("started", "ended", "seconds", "host", "error", "finish_reason", "identity", "mtp_off"),
    *("kernels", "threads", "chat", "context_limit", "prompt_set"),
)
_NOT_METRICS = {"definitions", "prompts"}
_FILTER = re.compile(r"(\w[\w.\-]*)(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)


def row(run: Run, name: str) -> Row:
    """Everything that is known about `run` under flat names: facts, config keys, metrics."""
    facts = run.facts
    files = facts.get("files") or {}
    found: Row = {"run": name, "status": run.status}
    found |= {key: facts.get(key) for key in _FACTS}
    found |= {
        "parent": (facts.get("parent") or {}).get("path"),
        "weights": (files.get("main") or {}).get("sha256"),
        "mtp_weights": (files.get("mtp") or {}).get("sha256"),
        "git.revision": (facts.get("git") or {}).get("revision"),
        "git.dirty": (facts.get("git") or {}).get("dirty"),
        "processor": (facts.get("machine") or {}).get("processor"),
        "version": (facts.get("versions") or {}).get("ds4flow"),
    }
    metrics = dict(_flat(run.summary))
    return {**metrics, **run.config, **{k: v for k, v in found.items() if v is not None}}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not prefix and key in _NOT_METRICS:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_rows(root: Path, *, parts: bool = False) -> list[Row]:
    """The rows of all runs below `root`; with `parts` the prompts of a set instead of the set."""
    paths = find_runs(root)
    if parts:
        paths = [part for path in paths for part in (find_parts(path) or [path])]
    return [row(Run.open(path), label(path, root)) for path in paths]


class Condition(NamedTuple):
    """`key` `operator` `value`, as typed: mtp.draft=2, tokens_per_second>100, prompt~def."""

    key: str
    operator: str
    value: str

    def holds(self, found: Row) -> bool:
        """Whether a row satisfies it; an ordering never holds for what a run does not have."""
        value = found.get(self.key)
        if self.operator == "~":
            return value is not None and self.value.lower() in _text(value).lower()
        if self.operator in ("=", "!="):
            return _equals(value, self.value) == (self.operator == "=")
        return _ordered(value, self.operator, self.value)


def is_condition(word: str) -> bool:
    """Whether a word is a condition and not the name of a run."""
    return _FILTER.fullmatch(word) is not None


def parse_condition(word: str) -> Condition:
    """The condition in `word`; UsageError when it is none."""
    match = _FILTER.fullmatch(word)
    if match is None:
        raise UsageError(
            f"{word!r} is not a condition", "type KEY=VALUE, with one of = != < <= > >= ~"
        )
    key, operator, value = match.groups()
    return Condition(ALIASES.get(key, key), operator, value)


def _equals(value: Any, typed: str) -> bool:
    if value is None:
        return typed == "null"
    if _text(value) == typed:
        return True
    number = _number(typed)
    return number is not None and not isinstance(value, bool) and value == number


def _ordered(value: Any, operator: str, typed: str) -> bool:
    other: Any = typed
    if isinstance(value, int | float) and not isinstance(value, bool):
        other = _number(typed)
    elif not isinstance(value, str) or (_number(typed) is not None and not value[:1].isdigit()):
        return False  # a word like auto is neither more nor less than a number; a date is text
    if other is None:
        return False
    order = (value > other) - (value < other)
    return {"<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0}[operator]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def select(
    rows: Iterable[Row],
    words: Sequence[str] = (),
    *,
    sort: str = "",
    limit: int | None = None,
) -> list[Row]:
    """The rows that satisfy every condition in `words`, sorted by a key (`-KEY`: largest first).

    Raises UsageError for a key that no row has, so that a typing error is not an empty answer.
    """
    rows = list(rows)
    conditions = [parse_condition(word) for word in words]
    sort_key = ALIASES.get(sort.lstrip("-"), sort.lstrip("-"))
    check_keys(rows, [*(condition.key for condition in conditions), *([sort_key] if sort else ())])
    kept = [found for found in rows if all(condition.holds(found) for condition in conditions)]
    if sort:
        there = [found for found in kept if found.get(sort_key) is not None]
        there.sort(key=lambda found: _rank(found[sort_key]), reverse=sort.startswith("-"))
        kept = there + [found for found in kept if found.get(sort_key) is None]
    return kept if limit is None else kept[:limit]


def check_keys(rows: Sequence[Row], keys: Iterable[str]) -> None:
    """Raise UsageError for a key that no row has."""
    known = {key for found in rows for key in found}
    for key in keys:
        if rows and key not in known:
            raise UsageError(
                f"no run here has {key}",
                near_match(key, {*known, *ALIASES}) or "ds4flow runs ls --keys lists what there is",
            )


def _rank(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, each in their own order."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, _text(value)
