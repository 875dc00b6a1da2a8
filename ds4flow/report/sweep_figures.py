"""The figures of a sweep: what each swept value does to speed, acceptance and exactness.

A cell or point that several jobs share shows their median. Jobs with different weights, prompts or
machines are never put together: they get figures of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ds4flow.report.break_even import break_even_figure
from ds4flow.report.figure import Axis, Chart, Figure, Heatmap, Layer, Table
from ds4flow.report.sweep_grid import DEPTH, Done, Grid, value_order
from ds4flow.report.totals import Totals
from ds4flow.runs.sweep import Sweep

_MOST_GRID = 16
"""Values of a key beyond which it is drawn as a number, not as a category."""
_LINES = 6


def sweep_figures(sweep: Sweep) -> list[Figure]:
    """All figures of a sweep; empty when no key varies."""
    grid = Grid.of(sweep)
    grids = [] if grid is None else grid.apart()
    if len(grids) == 1:
        return _figures(grids[0])
    return [
        replace(figure, slug=f"{figure.slug}-{number}", title=f"{figure.title}, {one.name}")
        for number, one in enumerate(grids, 1)
        for figure in _figures(one)
    ]


def _figures(grid: Grid) -> list[Figure]:
    speed = _lines(
        grid,
        ("speed", "Speed"),
        Axis("tokens/s", low=0.0),
        lambda one: one.number("tokens_per_second"),
        ".1f",
    )
    acceptance = _lines(
        grid,
        ("acceptance", "Drafts accepted"),
        Axis("committed", low=0.0, high=1.0, percent=True),
        lambda one: one.number("draft_acceptance_rate"),
        ".1%",
    )
    length = _lines(
        grid,
        ("length", "Tokens a cycle"),
        Axis("tokens", low=0.0),
        lambda one: one.number("mean_acceptance_length"),
        ".2f",
    )
    figures: list[Figure] = [speed, acceptance, length]
    if (
        DEPTH in (grid.column_key, grid.row_key, *grid.others)
        and len({one.subject for one in grid.done}) <= 1
    ):
        exact = (cycle for one in grid.done if one.exact for cycle in one.run.cycles())
        figures.append(break_even_figure(Totals.of(exact), "exact jobs"))
    if grid.row_key and len(grid.columns) <= _MOST_GRID and len(grid.rows) <= _MOST_GRID:
        figures.insert(0, _surface(grid))
    if any(one.lossy_share for one in grid.done):
        figures.append(
            _lines(
                grid,
                ("lossy", "Lossy tokens"),
                Axis("of the output", low=0.0, percent=True),
                lambda one: one.lossy_share,
                ".2%",
            )
        )
    return figures


def _surface(grid: Grid) -> Heatmap:
    values: list[list[float | None]] = []
    texts, notes, rows = [], [], []
    exact = set()
    for r, row in enumerate(grid.rows):
        cells = [grid.cell(row, column) for column in grid.columns]
        speeds = [_median([one.number("tokens_per_second") for one in cell]) for cell in cells]
        values.append(speeds)
        texts.append([_form(speed, ".1f" if (speed or 0) < 1000 else ",.0f") for speed in speeds])
        notes.append(
            [
                _note(grid, row, column, cell)
                for column, cell in zip(grid.columns, cells, strict=True)
            ]
        )
        exact |= {(r, c) for c, cell in enumerate(cells) if cell and all(d.exact for d in cell)}
        rows.append(
            (
                row,
                *(
                    _form(speed, ".1f") + (", exact" if (r, c) in exact else "")
                    for c, speed in enumerate(speeds)
                ),
            )
        )
    return Heatmap(
        "surface",
        "Tokens per second",
        f"Speed over {grid.column_key} and {grid.row_key}; the stronger the colour, the faster. "
        "Outlined cells are exact: their text is bit for bit that of plain "
        f"greedy decoding. Cells without a number have no finished job.{_shared(grid) or _SINGLE}",
        grid.column_key,
        grid.row_key,
        grid.columns,
        grid.rows,
        values,
        texts,
        notes,
        frozenset(exact),
        Table((f"{grid.row_key} / {grid.column_key}", *grid.columns), rows),
        missing="" if grid.done else "No job has finished.",
    )


def _note(grid: Grid, row: str, column: str, cell: Sequence[Done]) -> str:
    where = f"{grid.column_key}={column}, {grid.row_key}={row}"
    if not cell:
        return f"{where}: no finished job"
    speed = _form(_median([one.number("tokens_per_second") for one in cell]), ".1f")
    accepted = _form(_median([one.number("draft_acceptance_rate") for one in cell]), ".1%")
    lossy = sum(int(one.number("relaxed_accepts") or 0) for one in cell)
    kind = "exact" if all(one.exact for one in cell) else f"not exact, {lossy} lossy tokens"
    many = f", {len(cell)} jobs" if len(cell) > 1 else ""
    return f"{where}: {speed} tokens/s, {accepted} of drafts accepted, {kind}{many}"


def _lines(
    grid: Grid,
    names: tuple[str, str],
    y: Axis,
    number: Callable[[Done], float | None],
    form: str,
) -> Chart:
    """A line over the columns for each row, with the exact points marked."""
    numeric = all(value_order(column)[0] == 0 for column in grid.columns)
    as_numbers = numeric and len(grid.columns) > _MOST_GRID
    places = [float(c) if as_numbers else float(i) for i, c in enumerate(grid.columns)]
    axis = Axis(grid.column_key) if as_numbers else Axis(grid.column_key, labels=grid.columns)
    shown = grid.rows if len(grid.rows) <= _LINES else []
    layers: list[Layer] = []
    sure: list[tuple[float, float, str]] = []
    for index, row in enumerate(shown or [""]):
        cells = [
            grid.cell(row, column)
            if shown
            else [one for one in grid.done if one.job.values.get(grid.column_key) == column]
            for column in grid.columns
        ]
        ys = [_median([number(one) for one in cell]) for cell in cells]
        name = f"{grid.row_key}={row}" if row else y.label
        notes = [
            f"{grid.column_key}={column}{', ' + name if row else ''}: {_form(value, form)}"
            for column, value in zip(grid.columns, ys, strict=True)
        ]
        layers.append(Layer("line", name, places, ys, colour=index))
        layers.append(Layer("points", "", places, ys, colour=index, notes=notes))
        sure += [
            (x, value, note + ", exact")
            for x, value, cell, note in zip(places, ys, cells, notes, strict=True)
            if value is not None and cell and all(one.exact for one in cell)
        ]
    if sure:
        layers.append(
            Layer(
                "rings",
                "exact",
                [x for x, _, _ in sure],
                [value for _, value, _ in sure],
                colour=3,
                notes=[note for _, _, note in sure],
            )
        )
    slug, title = names
    finished = any(y is not None for layer in layers for y in layer.ys)
    return Chart(
        slug,
        title,
        f"{title} by {grid.column_key}"
        + (f", a line for each {grid.row_key}" if grid.row_key and shown else "")
        + f". Ringed points are exact.{_shared(grid)}",
        axis,
        y,
        layers if finished else [],
        _line_table(grid, number, form),
        missing="" if finished else "No finished job has this number.",
    )


def _line_table(grid: Grid, number: Callable[[Done], float | None], form: str) -> Table:
    header = [grid.column_key, *(f"{grid.row_key}={row}" if row else "value" for row in grid.rows)]
    return Table(
        header,
        [
            (
                column,
                *(
                    _form(_median([number(one) for one in grid.cell(row, column)]), form)
                    for row in grid.rows
                ),
            )
            for column in grid.columns
        ],
    )


_SINGLE = " Each is one run, and speeds vary: ds4flow ab measures two settings against each other."


def _shared(grid: Grid) -> str:
    """A sentence about jobs that share a point, where some do."""
    if not grid.others:
        return ""
    return f" Jobs that differ only in {', '.join(grid.others)} are shown by their median."


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def _form(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
