"""A report as text: tables for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds4flow.bench.results import (
    ContextResult,
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
    """One table a kind of result, in the order of the measurements.

    A figure is a median, with its quartiles in brackets.
    """
    kinds: dict[type, list[Any]] = {}
    for result in report.results:
        kinds.setdefault(type(result), []).append(result)
    return [_table(*_TABLES[kind], results) for kind, results in kinds.items()]


def _table(
    title: str,
    columns: Sequence[str],
    lines: Callable[[Any], Lines],
    results: Sequence[Any],
) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        left = number == 0 or column == "note"
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for result in results:
        for line in lines(result):
            table.add_row(*line)
    return table


def _machine(result: MachineResult) -> Lines:
    return [("read", str(result.threads), figure(result.bandwidth, 1e-9))]


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
        kernels = "none compiled yet" if cold else "compiled before"
        lines.append((kernels, str(result.threads), *seconds, peak))
    return lines


def _speed(result: ContextResult) -> Lines:
    share = "" if result.share is None else f"{100 * result.share:.0f}%"
    read = (result.weight_bytes + result.kv_bytes) / 1e6
    return [
        (
            str(result.context),
            str(result.threads),
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
            str(result.threads),
            str(result.context),
            figure(result.seconds, 1e3),
            figure(result.ratio),
            f"{result.byte_ratio:.2f}",
            f"{result.excess:.2f}",
        )
    ]


def _product(result: MatmulResult) -> Lines:
    share = "" if result.share is None else f"{100 * result.share:.0f}%"
    return [
        (
            result.what,
            str(result.threads),
            str(result.width),
            figure(result.rate, 1e-9),
            share,
        )
    ]


def _decoding(result: SpeculationResult) -> Lines:
    threads, rate = str(result.threads), figure(result.rate)
    if result.ratio is None:
        note = f"{result.distinct} distinct of {result.tokens} tokens"
        return [(result.arm, threads, rate, "", "", "", "", "", note)]
    by_bytes = "" if result.byte_cost is None else f"{result.mean_length / result.byte_cost:.2f}"
    return [
        (
            result.arm,
            threads,
            rate,
            figure(result.ratio),
            f"{result.accepted}/{result.drafted} {100 * result.acceptance:.0f}%",
            f"{result.mean_length:.2f}",
            by_bytes,
            result.identity,
            "SYNTHETIC acceptance" if result.synthetic else "",
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
            f"first {result.same_prefix} of {result.tokens} tokens agree",
        ),
        (
            f"prefill {result.prompt}",
            result.prefill_ours,
            result.prefill_theirs,
            result.prefill_ratio,
            f"{result.peer} {result.version}",
        ),
    ):
        pairs = " ".join(f"{value:.2f}" for value in ratio.values)
        lines.append(
            (what, str(result.threads), figure(ours), figure(theirs), figure(ratio), pairs, note)
        )
    return lines


_TABLES: Mapping[type, tuple[str, Sequence[str], Callable[[Any], Lines]]] = {
    MachineResult: ("read bandwidth", ("what", "threads", "GB/s"), _machine),
    StartResult: (
        "start in a new process, seconds; peak resident memory, mapped file included",
        ("kernels", "threads", "imports", "load", "first", "second", "to 1st token", "peak MB"),
        _start,
    ),
    ContextResult: (
        "tokens a second by context; share of the read bandwidth",
        ("context", "threads", "prefill", "decode", "MB a token", "share", "cache MB", "note"),
        _speed,
    ),
    WidthResult: (
        "cost of a pass by its rows, against one row",
        ("rows", "threads", "context", "ms", "cost", "bytes", "cost/bytes"),
        _width,
    ),
    MatmulResult: (
        "weights read by kind of product",
        ("weights", "threads", "rows", "GB/s", "share"),
        _product,
    ),
    SpeculationResult: (
        "decoding, same prompts",
        (
            *("drafts", "threads", "tok/s", "over greedy", "accepted", "tokens a cycle"),
            *("by bytes", "bits", "note"),
        ),
        _decoding,
    ),
    PeerResult: (
        "another engine, same file, prompt and threads; tokens a second",
        ("what", "threads", "ours", "theirs", "ratio", "pair by pair", "note"),
        _peer,
    ),
}


def figure(values: Samples, factor: float = 1.0) -> str:
    """Median and, when there are several samples, quartiles: `12.3 (11.9..12.8)`."""
    median = f"{values.median * factor:.4g}"
    if len(values.values) == 1:
        return median
    return f"{median} ({values.low * factor:.3g}..{values.high * factor:.3g})"


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
    """Print the tables."""
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
