"""A report as text: tables for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ds4flow.bench.results import (
    ContextResult,
    GraphResult,
    MachineResult,
    MatmulResult,
    PeerResult,
    Report,
    Row,
    SpeculationResult,
    StartResult,
    WidthResult,
)
from ds4flow.bench.samples import Samples
from ds4flow.errors import Ds4FlowError

Lines = list[tuple[str, ...]]


def tables(report: Report) -> list[Table]:
    """A table for each kind of result and number of threads, in the order of the measurements.

    A figure is a median, with its quartiles below.
    """
    kinds: dict[tuple[type, int], list[Any]] = {}
    for result in report.results:
        kinds.setdefault((type(result), result.threads), []).append(result)
    return [_table(_TABLES[kind], threads, results) for (kind, threads), results in kinds.items()]


class Layout(NamedTuple):
    """A table's title, columns, and the lines of one result."""

    title: str
    columns: Sequence[str]
    lines: Callable[[Any], Lines]


def _table(layout: Layout, threads: int, results: Sequence[Any]) -> Table:
    count = f"{threads} thread{'s' if threads > 1 else ''}"
    table = Table(title=f"{layout.title}, {count}", title_justify="left")
    for number, column in enumerate(layout.columns):
        left = number == 0 or column == "note"
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for result in results:
        for line in layout.lines(result):
            table.add_row(*line)
    return table


def _machine(result: MachineResult) -> Lines:
    return [("read bandwidth", figure(result.bandwidth, 1e-9))]


def _start(result: StartResult) -> Lines:
    lines: Lines = []
    for cold in (False, True):
        starts = [start for start in result.starts if start.cold == cold]
        if not starts:
            continue
        peaks = [start.peak_bytes for start in starts if start.peak_bytes is not None]
        seconds = (
            figure(Samples(tuple(float(getattr(start, name)) for start in starts)))
            for name in ("imports", "load", "first", "second", "total")
        )
        peak = figure(Samples(tuple(map(float, peaks))), 1e-6) if peaks else "unknown"
        lines.append(("to compile" if cold else "compiled", *seconds, peak))
    return lines


def _speed(result: ContextResult) -> Lines:
    share = "" if result.share is None else f"{100 * result.share:.0f}%"
    read = (result.weight_bytes + result.kv_bytes) / 1e6
    return [
        (
            str(result.context),
            figure(result.prefill),
            figure(result.decode),
            f"{read:.1f}",
            share,
            f"{result.cache_bytes / 1e6:.1f}",
            result.filled,
        )
    ]


def _width(result: WidthResult) -> Lines:
    return [
        (
            str(result.width),
            str(result.context),
            figure(result.seconds, 1e3),
            figure(result.ratio),
            f"{result.byte_ratio:.2f}",
            f"{result.excess:.2f}",
        )
    ]


def _graph(result: GraphResult) -> Lines:
    share = "" if result.share is None else f"{100 * result.share:.0f}%"
    return [
        (
            str(result.drafts),
            str(result.context),
            result.mode,
            figure(result.seconds, 1e3),
            figure(result.ratio),
            figure(result.hoped),
            share,
        )
    ]


def _product(result: MatmulResult) -> Lines:
    share = "" if result.share is None else f"{100 * result.share:.0f}%"
    return [(result.what, str(result.width), figure(result.rate, 1e-9), share)]


def _decoding(result: SpeculationResult) -> Lines:
    rate = figure(result.rate)
    if result.ratio is None:
        distinct = f"{result.distinct} distinct\nof {result.tokens} tokens"
        return [(result.arm, rate, "", "", "", "", distinct)]
    by_bytes = "" if result.byte_cost is None else f"{result.mean_length / result.byte_cost:.2f}"
    name = f"{result.arm}\nSYNTHETIC" if result.synthetic else result.arm
    return [
        (
            name,
            rate,
            figure(result.ratio),
            f"{100 * result.acceptance:.0f}%\n{result.accepted}/{result.drafted}",
            f"{result.mean_length:.2f}",
            by_bytes,
            result.identity,
        )
    ]


def _peer(result: PeerResult) -> Lines:
    lines: Lines = []
    for what, ours, theirs, ratio, note in (
        (
            f"decode {result.tokens}",
            result.ours,
            result.theirs,
            result.ratio,
            f"the first {result.same_prefix} of {result.tokens} tokens agree",
        ),
        (
            f"prefill {result.prompt}",
            result.prefill_ours,
            result.prefill_theirs,
            result.prefill_ratio,
            f"{result.peer} {result.version} {result.note}".rstrip(),
        ),
    ):
        pairs = " ".join(f"{value:.2f}" for value in ratio.values)
        lines.append((what, figure(ours), figure(theirs), figure(ratio), pairs, note))
    return lines


_TABLES: Mapping[type, Layout] = {
    MachineResult: Layout("machine", ("what", "GB/s"), _machine),
    StartResult: Layout(
        "start in a new process, seconds",
        ("kernels", "imports", "load", "first", "second", "to 1st token", "peak MB"),
        _start,
    ),
    ContextResult: Layout(
        "tokens a second by context; share of the read bandwidth",
        ("context", "prefill", "decode", "MB a token", "share", "cache MB", "note"),
        _speed,
    ),
    WidthResult: Layout(
        "cost of a pass by its rows, against one row",
        ("rows", "context", "ms", "cost", "bytes", "cost/bytes"),
        _width,
    ),
    GraphResult: Layout(
        "cycles of the decode graph; tok/s with SYNTHETIC drafts, 0.8 of them accepted; share of "
        "the device's copy bandwidth",
        ("drafts", "context", "mode", "ms", "cost", "tok/s", "share"),
        _graph,
    ),
    MatmulResult: Layout(
        "weights read by kind of product", ("weights", "rows", "GB/s", "share"), _product
    ),
    SpeculationResult: Layout(
        "decoding, same prompts",
        ("drafts", "tok/s", "over greedy", "accepted", "a cycle", "by bytes", "bits"),
        _decoding,
    ),
    PeerResult: Layout(
        "another engine, same file and prompt, tokens a second",
        ("what", "ours", "theirs", "ratio", "pair by pair", "note"),
        _peer,
    ),
}


def figure(values: Samples, factor: float = 1.0) -> str:
    """Median and, when there are several samples, a line with the quartiles: `11.9..12.8`."""
    median = _short(values.median * factor)
    if len(values.values) == 1:
        return median
    return f"{median}\n{_short(values.low * factor)}..{_short(values.high * factor)}"


def _short(value: float) -> str:
    """Three digits, all of them when there are more before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def csv_text(report: Report) -> str:
    """All flat rows with a header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(report.rows())
    return text.getvalue()


def json_text(report: Report) -> str:
    """Everything, samples included."""
    return json.dumps(report.to_plain(), indent=1) + "\n"


def show(report: Report, console: Console) -> None:
    """Print the tables, and first what kind of time they are in when it is not the usual one."""
    if report.facts.get("settings", {}).get("clock") == "cpu":
        console.print("CPU time of one thread, not time on the wall (but for starts)")
    for table in tables(report):
        console.print(table)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; Ds4FlowError when it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise Ds4FlowError(
            f"cannot write {path}: {error.strerror or error}", "give another place"
        ) from None
