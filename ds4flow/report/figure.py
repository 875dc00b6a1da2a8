"""What a chart shows, apart from how it is drawn: for the page as inline SVG, or by matplotlib.

Every figure carries the numbers it shows as a table, for readers who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["bars", "line", "points", "rings", "area"]

NAMES = ("blue", "orange", "green", "vermilion", "purple", "sky", "grey")
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#aa4499", "#56b4e9", "#767676")
"""Colours that stay apart in the common kinds of colour blindness (after Okabe and Ito)."""


@dataclass(frozen=True)
class Layer:
    """One series of a chart: `ys` over `xs`; None in `ys` is a gap.

    An area lies between `base` and `ys`. `notes` are texts shown on hover, one a point. A layer
    without a `name` is left out of the key.
    """

    kind: LayerKind
    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    base: Sequence[float] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """A label, and limits where the data should not choose them.

    `labels` name the categories 0, 1, ..; `percent` writes shares of 1 as percentages; `whole`
    axes have ticks at integers only.
    """

    label: str
    low: float | None = None
    high: float | None = None
    percent: bool = False
    whole: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """The numbers behind a figure, as texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """Series over two axes. `missing` says why there is nothing to show, instead of layers."""

    slug: str
    title: str
    caption: str
    x: Axis
    y: Axis
    layers: Sequence[Layer]
    table: Table
    missing: str = ""


@dataclass(frozen=True)
class Heatmap:
    """A grid of numbers; `values[row][column]` is None where there is none.

    Cells in `exact` are outlined: their text is that of plain greedy decoding. `notes` are shown on
    hover, and `texts` in the cells.
    """

    slug: str
    title: str
    caption: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    notes: Sequence[Sequence[str]]
    exact: frozenset[tuple[int, int]]
    table: Table
    missing: str = ""


Figure = Chart | Heatmap


def limits(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """What both axes span: the data, from zero, unless an axis says otherwise. Never empty."""
    xs = [x for layer in chart.layers for x in layer.xs]
    ys = [y for layer in chart.layers for y in layer.ys if y is not None]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if chart.x.labels:  # categories need room beside the outer ones
        low, high = low - 0.5, high + 0.5
    return _span(chart.x, low, high), _span(chart.y, 0.0, max(ys, default=1.0) * 1.06)


def _span(axis: Axis, low: float, high: float) -> tuple[float, float]:
    low = low if axis.low is None else axis.low
    high = high if axis.high is None else axis.high
    return (low, high) if high > low else (low, low + 1.0)


def ticks(low: float, high: float, *, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    rough = (high - low) / max(1, about)
    size = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = size * min(factors, key=lambda factor: abs(math.log(size * factor / rough)))
    if whole:
        step = max(1.0, step)
    first = -(-low // step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + index) * step, 12) for index in range(max(0, count))]


def tick_text(value: float, axis: Axis) -> str:
    """How a tick of an axis is written."""
    if axis.labels:
        index = round(value)
        return axis.labels[index] if 0 <= index < len(axis.labels) else ""
    if axis.percent:
        return f"{100 * value:.4g}%"
    return f"{value:,.10g}"
