"""The `ds4flow runs` commands: click declarations over the functions that do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ds4flow.runs import ROOT

root_option = click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=ROOT,
    show_default=True,
    metavar="DIR",
    help="The folder of all runs.",
)
_PARTS = click.option("--prompts", "parts", is_flag=True, help="Each prompt of a set by itself.")


@click.group("runs")
def runs() -> None:
    """Find, show, compare, export and remove what runs left behind.

    RUN is a path, latest, NAME, NAME/NNNN or NNNN. A CONDITION is KEY=VALUE, with = != < <= > >= or
    ~ (contains), on any config key, metric or fact; all must hold.
    """


@runs.command("ls")
@click.argument("conditions", nargs=-1, metavar="[CONDITION]...")
@click.option("--sort", default="", metavar="[-]KEY", help="Order by a key; -KEY: largest first.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show so many.")
@click.option("--columns", default="", metavar="KEY,..", help="Other columns than the usual.")
@click.option("--keys", is_flag=True, help="List the keys that runs have.")
@click.option("--json", "as_json", is_flag=True, help="Every key, as JSON.")
@_PARTS
@root_option
def list_command(conditions: tuple[str, ...], keys: bool, root: Path, **options: Any) -> None:
    """List runs: ls mtp.draft=2 'tokens_per_second>100' status=complete --sort -acceptance."""
    from ds4flow.runs.listing import list_keys, list_runs

    if keys:
        list_keys(root)
    else:
        list_runs(root, conditions, **options)


@runs.command("show")
@click.argument("run", default="latest")
@click.option("--json", "as_json", is_flag=True, help="The whole record, as JSON.")
@root_option
def show_command(run: str, as_json: bool, root: Path) -> None:
    """Show one RUN: what ran and from where, its numbers and their meaning, its end, its text."""
    from ds4flow.runs.record import Run, resolve_run
    from ds4flow.runs.show import show_run

    show_run(Run.open(resolve_run(run, root)), root, as_json=as_json)


@runs.command("compare")
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN...")
@root_option
def compare_command(names: tuple[str, ...], root: Path) -> None:
    """Compare runs with the first: config, conditions, numbers, and where the texts part."""
    from ds4flow.errors import UsageError
    from ds4flow.runs.compare import compare_runs
    from ds4flow.runs.record import Run, resolve_run

    if len(names) < 2:
        raise UsageError("one run cannot be compared", "name two runs or more")
    compare_runs([Run.open(resolve_run(name, root)) for name in names], root)


@runs.command("export")
@click.argument("conditions", nargs=-1, metavar="[CONDITION]...")
@click.option("--format", "form", type=click.Choice(["csv", "json", "parquet"]), help="[csv]")
@click.option("-o", "--output", metavar="FILE", help="Its ending gives the format.  [stdout]")
@_PARTS
@root_option
def export_command(
    conditions: tuple[str, ...], form: str | None, output: str | None, parts: bool, root: Path
) -> None:
    """Write every key of the runs as csv, json or parquet, one row a run."""
    from ds4flow.runs.listing import FORMATS, export_runs
    from ds4flow.runs.table import load_rows, select

    ending = Path(output or "").suffix.lstrip(".")
    chosen = form or (ending if ending in FORMATS else FORMATS[0])
    rows = select(load_rows(root, parts=parts), conditions)
    export_runs(rows, chosen, output)
    if output is not None:
        click.echo(f"{len(rows)} runs in {output}", err=True)


@runs.command("rm")
@click.argument("words", nargs=-1, required=True, metavar="RUN...|CONDITION...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@root_option
def remove_command(words: tuple[str, ...], yes: bool, root: Path) -> None:
    """Remove runs or whole sweeps after asking; what is running stays, links are not followed."""
    from ds4flow.runs.record import label
    from ds4flow.runs.remove import chosen, remove, size

    paths = chosen(root, words)
    if not paths:
        click.echo("no runs satisfy that", err=True)
        return
    for path in paths:
        click.echo(f"{label(path, root)}  {size(path) / 1e6:.1f} MB", err=True)
    if not yes:
        click.confirm(f"remove {len(paths)} for good?", abort=True, err=True)
    for path in paths:
        remove(path)
    click.echo(f"removed {len(paths)}", err=True)
