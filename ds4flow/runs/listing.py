"""`ds4flow runs ls` and `export`: rows on the screen or in a file."""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.runs.screen import print_table, shown
from ds4flow.runs.table import ALIASES, Row, check_keys, load_rows, parse_condition, select

COLUMNS = {
    "run": "run",
    "status": "status",
    "started": "started",
    "mtp.draft": "draft",
    "mtp.margin": "margin",
    "mtp.gate": "gate",
    "output_tokens": "tokens",
    "tokens_per_second": "tok/s",
    "draft_acceptance_rate": "accepted",
    "mean_acceptance_length": "length",
    "identity": "identity",
}
"""What `ls` shows unless asked for other columns, with their titles."""

_TEXTS = ("run", "status", "started")
FORMATS = ("csv", "json", "parquet")


def list_runs(
    root: Path,
    words: Sequence[str],
    *,
    sort: str,
    limit: int | None,
    columns: str,
    parts: bool,
    as_json: bool,
) -> None:
    """Print the selected runs as a table, or as JSON with every key."""
    whole = load_rows(root, parts=parts)
    rows = select(whole, words, sort=sort, limit=limit)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print("no runs" + (" satisfy that" if words else f" in {root}"), file=sys.stderr)
        return
    keys = _columns(columns, words, sort)
    check_keys(whole, keys if columns else ())
    titles = [COLUMNS.get(key, key) for key in keys]
    texts = sum(key in _TEXTS for key in keys[: len(_TEXTS)])
    print_table(titles, ([_cell(row, key) for key in keys] for row in rows), left=texts)


def _columns(typed: str, words: Sequence[str], sort: str) -> list[str]:
    """The columns that were asked for; else the usual ones and what was filtered or sorted by."""
    if typed:
        asked = [ALIASES.get(key.strip(), key.strip()) for key in typed.split(",")]
        return list(dict.fromkeys(["run", *asked]))
    used = [parse_condition(word).key for word in words] + [sort.lstrip("-")] * bool(sort)
    return list(dict.fromkeys([*COLUMNS, *(ALIASES.get(key, key) for key in used)]))


def _cell(row: Row, key: str) -> str:
    text = shown(row.get(key), key)
    return text[:19].replace("T", " ") if key == "started" else text


def list_keys(root: Path) -> None:
    """Print every key that some run has, with an example of its value."""
    example: dict[str, Any] = {}
    for row in load_rows(root):
        for key, value in row.items():
            if example.get(key) is None:
                example[key] = value
    print_table(["key", "for example"], ([k, shown(v, k)[:60]] for k, v in sorted(example.items())))


def export_runs(rows: Sequence[Row], form: str, output: str | None) -> None:
    """Write rows to `output` (stdout without one) as csv, json or parquet."""
    if form == "parquet":
        if output is None:
            raise UsageError("parquet is not for the screen", "give a file with -o FILE.parquet")
        _write_parquet(rows, Path(output))
        return
    text = json.dumps(rows, indent=1) + "\n" if form == "json" else _csv(rows)
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise _unwritable(output, error) from None


def _keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(["run", "status", *(key for row in rows for key in row)]))


def _plain(value: Any) -> Any:
    """Lists as JSON text: a cell holds one value."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _csv(rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, _keys(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return file.getvalue()


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    try:
        import duckdb
    except ImportError:
        raise Ds4FlowError(
            "writing parquet needs the package duckdb", "pip install 'ds4flow[data]'"
        ) from None
    keys = _keys(rows)
    types = {key: _sql_type([_plain(row.get(key)) for row in rows]) for key in keys}
    lines = []
    for row in rows:
        cells = {key: _plain(row.get(key)) for key in keys}
        lines.append(
            json.dumps(
                {
                    key: json.dumps(value)
                    if types[key] == "VARCHAR" and value is not None and not isinstance(value, str)
                    else value
                    for key, value in cells.items()
                }
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.json"
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            with duckdb.connect() as connection:
                table = connection.read_json(str(source), columns=types, format="newline_delimited")
                table.write_parquet(str(path))
        except duckdb.Error as error:
            raise _unwritable(str(path), error) from None


def _sql_type(values: Sequence[Any]) -> str:
    """The column type that holds all values; text where they are of several kinds."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "BOOLEAN"
    if kinds == {int}:
        return "BIGINT"
    if kinds in ({float}, {int, float}):
        return "DOUBLE"
    return "VARCHAR"


def _unwritable(path: str, error: Exception) -> Ds4FlowError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return Ds4FlowError(f"cannot write {path}: {reason}", "choose another file with -o FILE")
