"""`ds4flow synth`: words to a recipe, progress on stderr, and a table of what a token reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from ds4flow.errors import UsageError, near_match
from ds4flow.synth.presets import KEYS, PRESETS
from ds4flow.synth.write import SynthReport, synthesize

DEFAULT_PRESET = "medium"
OWN_KEYS = ("preset", "seed", "mtp", "mtp_path")


def synth_command(path: str, words: Sequence[str] = ()) -> int:
    """Write a synthetic model to `path` and its MTP block beside it; returns the exit code.

    `words` are KEY=VALUE: `preset`, `seed`, `mtp` (false: no MTP file), `mtp_path`, and every key
    of a recipe (dimensions, weight types, gains). Raises what `synthesize` does.
    """
    values = _values(words)
    preset = values.pop("preset", DEFAULT_PRESET)
    seed = _seed(values.pop("seed", "0"))
    mtp = _mtp_path(Path(path), values)
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(f"writing {path}")

        def show(_name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = synthesize(preset, path, mtp_path=mtp, seed=seed, changes=values, progress=show)
    console = Console()
    size = f"{report.path}: {report.nbytes / 1e6:.1f} MB"
    console.print(size, highlight=False, soft_wrap=True)
    if report.mtp_path is not None:
        size = f"{report.mtp_path}: {report.mtp_nbytes / 1e6:.1f} MB"
        console.print(size, highlight=False, soft_wrap=True)
    console.print(traffic_table(report))
    return 0


def traffic_table(report: SynthReport) -> Table:
    """Weight bytes of one token (one row, the indexer selecting) and of one draft, by group."""
    table = Table(title="weight bytes read")
    table.add_column("group")
    for name in ("MB a token", "share", "MB a draft"):
        table.add_column(name, justify="right")
    draft = report.draft.groups if report.draft else {}
    shares = report.step.shares()
    for group in dict.fromkeys((*report.step.groups, *draft)):
        table.add_row(
            group,
            _megabytes(report.step.groups.get(group)),
            f"{100 * shares[group]:.1f}%" if group in shares else "",
            _megabytes(draft.get(group)),
        )
    table.add_section()
    total = report.draft.total if report.draft else None
    table.add_row("total", _megabytes(report.step.total), "100%", _megabytes(total))
    return table


def _megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}"


def _values(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    known = (*OWN_KEYS, *KEYS)
    for word in words:
        key, equal, value = word.partition("=")
        if not equal or not value:
            presets = f"; presets: {', '.join(PRESETS)}" if key in PRESETS else ""
            raise UsageError(f"{word!r} is not KEY=VALUE", f"type it as KEY=VALUE{presets}")
        if key not in known:
            raise UsageError(
                f"{key} is not a key of a synthetic model",
                near_match(key, known) or f"use one of {', '.join(known)}",
            )
        if key in values:
            raise UsageError(f"{key} is given twice", "leave one of them out")
        values[key] = value
    return values


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"seed={text} is not a number", "use 0 or a larger integer")
    return int(text)


def _mtp_path(path: Path, values: dict[str, str]) -> Path | None:
    """Take the keys of the MTP file out of `values`; by default it lies beside the main file."""
    wanted = _truth("mtp", values.pop("mtp", "true"))
    given = values.pop("mtp_path", None)
    if not wanted:
        if given is not None:
            raise UsageError("mtp=false and mtp_path contradict each other", "leave one out")
        return None
    return Path(given) if given else path.with_name(f"{path.stem}.mtp-support.gguf")


def _truth(key: str, text: str) -> bool:
    known: Mapping[str, bool] = {"true": True, "false": False}
    if text.lower() not in known:
        raise UsageError(f"{key}={text} is not true or false", f"use {key}=true or {key}=false")
    return known[text.lower()]
