"""The table at the end of a sweep: a line a job, and why the others did not finish."""

from __future__ import annotations

import os
from typing import Any

from ds4flow.runs.screen import shown
from ds4flow.runs.sweep import Job, Sweep


def print_table(sweep: Sweep) -> None:
    """Print the jobs of a sweep on stderr."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not sweep.jobs:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job", justify="right")
    for key in sweep.keys:
        table.add_column(key)
    for name in ("status", "tokens/s", "acceptance", "identity"):
        table.add_column(name, justify="right" if name in ("tokens/s", "acceptance") else "left")
    for job in sweep.jobs:
        values = [_drawn(job.values.get(key, "")) for key in sweep.keys]
        cells = [str(job.number), *values, *_cells(job)]
        table.add_row(*map(Text, cells))
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for line in _notes(sweep):
        console.print(line)


def _drawn(value: str) -> str:
    """A swept value as text; a search draws more digits than a column has room for."""
    if "." not in value or len(value) <= 8:
        return value
    try:
        return shown(float(value))
    except ValueError:
        return value


def _cells(job: Job) -> list[str]:
    summary: dict[str, Any] = job.run.summary if job.run is not None else {}
    status = job.status + (f" (attempt {job.attempt})" if job.attempt > 1 else "")
    return [
        status,
        _number(summary.get("tokens_per_second"), ".1f"),
        _number(summary.get("draft_acceptance_rate"), ".1%"),
        str(summary.get("identity") or "-"),
    ]


def _notes(sweep: Sweep) -> list[str]:
    lines = [
        f"job {job.number} {job.status}: {job.reason}"
        + (f" ({os.path.relpath(job.directory)})" if job.directory else "")
        for job in sweep.with_status("failed")
    ]
    done, path = len(sweep.with_status("done")), os.path.relpath(sweep.path)
    others = [str(job.number) for job in sweep.jobs if job.status in ("missing", "skipped")]
    if others:
        lines.append(f"not run: {', '.join(others)}")
    lines.append(f"{done} of {len(sweep.jobs)} jobs done in {path}")
    if sweep.facts.get("launcher") != "basic":
        lines.append("jobs may have run side by side: compare their speeds with care")
    if done < len(sweep.jobs) or sweep.facts.get("status") != "complete":
        lines.append(f"run the rest with: ds4flow run --resume {path}")
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
