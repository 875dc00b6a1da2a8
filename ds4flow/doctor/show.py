"""The doctor's report as tables for people.

Promise: text from a file is shown, never interpreted: no control character and no markup of it
reaches the terminal.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds4flow.doctor.report import CacheSize, FileReport, Memory, Report, Traffic

MIB, GIB = 1 << 20, 1 << 30
SHOWN_DIMENSIONS = (
    ("layers", "layers"),
    ("dim", "width"),
    ("vocab", "vocabulary"),
    ("streams", "hyper-connection streams"),
    ("heads", "heads"),
    ("head_dim", "head width"),
    ("q_rank", "query rank"),
    ("groups", "output groups"),
    ("o_rank", "output rank"),
    ("window", "window"),
    ("index_heads", "indexer heads"),
    ("index_dim", "indexer width"),
    ("top_k", "indexer top-k"),
    ("experts", "experts"),
    ("experts_used", "experts used"),
    ("experts_shared", "shared experts"),
    ("expert_dim", "expert width"),
    ("hash_layers", "hash-routed layers"),
    ("context_length", "longest context"),
)


def print_report(report: Report, console: Console) -> None:
    """Print every file of the report and a last line with the verdict on all."""
    for file in report.files:
        _print_file(file, console)
    if len(report.files) > 1:
        bad = sum(not file.ok for file in report.files)
        console.print(
            Text("all files can be used", "green")
            if report.ok
            else Text(f"{bad} of {len(report.files)} files cannot be used", "red")
        )


def _print_file(file: FileReport, console: Console) -> None:
    console.rule(Text(_plain(file.path)), align="left")
    console.print(Text(_plain(file.verdict), "bold green" if file.ok else "bold red"))
    for problem in file.problems:
        console.print(Text(f"  ✗ {_plain(problem.what)}", "red"))
        console.print(Text(f"    {_plain(problem.fix)}"))
    for note in file.notes:
        console.print(Text(f"  • {_plain(note)}", "yellow"))
    console.print(_facts(file))
    if file.census:
        console.print(_census(file))
    if file.cache is not None:
        console.print(_memory(file.cache, file.memory))
    if file.traffic is not None:
        console.print(_groups(file.traffic))
        console.print(_widths(file.traffic))


def _facts(file: FileReport) -> Table:
    facts: dict[str, str | None] = {
        "kind": file.role,
        "name": file.name,
        "architecture": file.architecture,
        "size": f"{file.size:,} bytes ({_binary(file.size)})" if file.size is not None else None,
    }
    if file.split is not None:
        missing = f", missing: {', '.join(file.split.missing)}" if file.split.missing else ""
        facts["shards"] = f"{file.split.total}{missing}"
    if file.dimensions is not None:
        known = [(text, file.dimensions.get(key)) for key, text in SHOWN_DIMENSIONS]
        facts["dimensions"] = ", ".join(f"{text} {n}" for text, n in known if n is not None)
        ratios = file.dimensions.get("ratios")
        facts["compression"] = " ".join(map(str, ratios)) if isinstance(ratios, tuple) else None
    if file.vocabulary is not None:
        digest = f", digest {file.vocabulary.digest[:12]}" if file.vocabulary.digest else ""
        facts["tokenizer"] = f"{file.vocabulary.tokens} tokens{digest}"
    if file.drafter is not None:
        layout = file.drafter.layout
        facts["MTP block"] = f"layout {layout}" if layout is not None else "none in the file"
    grid = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        if value is not None:
            grid.add_row(Text(key, "dim"), Text(_plain(value)))
    return grid


def _census(file: FileReport) -> Table:
    table = _table("tensors", "type", "tensors", "bytes", "")
    for count in file.census:
        table.add_row(count.type, str(count.tensors), f"{count.bytes:,}", _binary(count.bytes))
    table.add_section()
    total = sum(count.bytes for count in file.census)
    number = sum(count.tensors for count in file.census)
    table.add_row("all", str(number), f"{total:,}", _binary(total))
    return table


def _memory(cache: CacheSize, memory: Memory | None) -> Table:
    table = _table(f"memory for {cache.context:,} tokens", "", "bytes", "")
    rows = [("cache (float32 rows)", cache.bytes)]
    if memory is not None:
        rows = [("weights", memory.weights), ("MTP block", memory.mtp), *rows]
    for name, size in rows:
        table.add_row(name, f"{size:,}", _binary(size))
    if memory is not None:
        table.add_section()
        table.add_row("all", f"{memory.total:,}", _binary(memory.total))
    table.caption = (
        f"cache growth {cache.per_token:,.0f} bytes a token; with half-precision rows, as usually "
        f"published, {cache.published_per_token:,.0f} and {_binary(cache.published_bytes)} in all"
    )
    return table


def _groups(traffic: Traffic) -> Table:
    table = _table(
        f"read for one token, at position {traffic.position:,}", "group", "types", "bytes", ""
    )
    for group in traffic.groups:
        table.add_row(group.name, " ".join(group.types), f"{group.bytes:,}", _decimal(group.bytes))
    table.add_row("cache rows", "F32", f"{traffic.cache:,}", _decimal(traffic.cache))
    table.add_section()
    total = traffic.weights + traffic.cache
    table.add_row("all", "", f"{total:,}", _decimal(total))
    start = traffic.index_queries_from
    if start is not None and traffic.position < start:
        table.caption = f"from position {start:,} on, indexer queries are read as well"
    return table


def _widths(traffic: Traffic) -> Table:
    speed = traffic.bandwidth_gbs
    table = _table(
        "passes of several rows" + (f" at {speed:g} GB/s" if speed is not None else ""),
        "rows",
        "distinct experts",
        "a pass",
        "with drafts",
        "break-even tokens a cycle",
        *(["tokens/s if all are accepted"] if speed is not None else []),
    )
    for width in traffic.widths:
        rate = width.tokens_per_second
        table.add_row(
            "1 (greedy)" if width.rows == 1 else str(width.rows),
            f"{width.experts:.2f}",
            _decimal(width.bytes),
            _decimal(width.cycle_bytes),
            f"{width.break_even:.2f}",
            *([f"{rate:.2f}"] if rate is not None else []),
        )
    table.caption = (
        f"a draft step reads {_decimal(traffic.draft)}"
        if traffic.draft is not None
        else "no MTP block given: draft steps are not counted"
    )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "types" else "right")
    return table


def _binary(size: int) -> str:
    """Memory and file sizes."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"


def _decimal(size: int) -> str:
    """Traffic, to be compared with a bandwidth."""
    return f"{size / 1e9:.3f} GB" if size >= 1e9 else f"{size / 1e6:.3f} MB"


def _plain(text: str) -> str:
    """`text` on one line, with everything that does not print escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
