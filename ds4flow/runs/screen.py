"""How runs look on a screen: tables that stay whole in a pipe, numbers in a fixed form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_FORMS = {
    "draft_acceptance_rate": ".1%",
    "mean_acceptance_length": ".2f",
    "tokens_per_second": ".1f",
    "prefill_tokens_per_second": ".1f",
}
_COLUMN = 40  # characters of a value beside others
_WIDE = 1000  # columns of a pipe or a file, which nothing must be cut for


def console() -> Console:
    """A console on stdout that neither colours text nor cuts lines in a pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, markup=False, emoji=False, width=width)


def shown(value: Any, key: str = "") -> str:
    """A value in one line; metrics in their usual form, `-` for what is not there."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return format(value, _FORMS.get(key, ".6g"))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)[1:-1]
    if isinstance(value, list) and all(isinstance(item, float) for item in value):
        return " ".join(format(item, ".3g") for item in value) or "-"
    return json.dumps(value)


def short(value: Any, key: str = "") -> str:
    """`shown`, cut to what fits into a column."""
    text = shown(value, key)
    return text if len(text) <= _COLUMN else f"{text[: _COLUMN - 3]}..."


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1
) -> None:
    """Print rows under columns; the first `left` columns are texts, the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    out = console()
    if sys.stdout.isatty():
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
