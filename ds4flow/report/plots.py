"""Figures as PNG and SVG files, drawn by matplotlib; the same numbers as on the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4flow.errors import Ds4FlowError
from ds4flow.report.figure import PALETTE, Chart, Figure, Heatmap, Layer, limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (6.4, 4.0)
_DPI = 160


def write_plots(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg of every figure that has something to show; return their paths.

    Raises Ds4FlowError without matplotlib, and when the folder cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise Ds4FlowError(
            "--plots needs matplotlib, which is not installed", "pip install 'ds4flow[report]'"
        ) from None
    written = []
    # Equal numbers give equal files: no dates, no random names.
    style: Any = {"svg.hashsalt": "ds4flow", "svg.fonttype": "none", "font.size": 10.0}
    with mpl.rc_context(style):
        for figure in figures:
            if figure.missing:
                continue
            canvas = Canvas(figsize=_SIZE, layout="constrained")
            FigureCanvasAgg(canvas)
            axes = canvas.add_subplot()
            axes.set_title(figure.title, loc="left", fontweight="bold")
            if isinstance(figure, Heatmap):
                _heatmap(axes, figure)
            else:
                _chart(axes, figure)
            for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{figure.slug}.{ending}"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    canvas.savefig(path, dpi=_DPI, metadata=metadata)
                except OSError as error:
                    raise Ds4FlowError(
                        f"cannot write {path}: {error.strerror}", "choose another --plots DIR"
                    ) from None
                written.append(path)
    return written


def _chart(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for layer in chart.layers:
        _layer(axes, layer)
    xs, ys = limits(chart)
    axes.set_xlim(*xs)
    axes.set_ylim(*ys)
    axes.set_xlabel(chart.x.label)
    axes.set_ylabel(chart.y.label)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if chart.x.labels:
        places = [i for i, text in enumerate(chart.x.labels) if text and xs[0] <= i <= xs[1]]
        places = places[:: max(1, len(places) // 12)]
        axes.set_xticks(places, [chart.x.labels[place] for place in places])
    elif chart.x.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.y.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    elif chart.y.whole:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if sum(bool(layer.name) for layer in chart.layers) > 1:
        axes.legend(frameon=False, fontsize="small")


def _layer(axes: Axes, layer: Layer) -> None:
    colour: dict[str, Any] = {"color": PALETTE[layer.colour % len(PALETTE)]}
    ys = [float("nan") if y is None else y for y in layer.ys]
    if layer.kind == "bars":
        bars = axes.bar(layer.xs, ys, width=0.62, **colour)
        if layer.notes and len(layer.notes) <= 9:
            axes.bar_label(bars, labels=list(layer.notes), padding=2, fontsize="small")
    elif layer.kind == "line":
        axes.plot(layer.xs, ys, label=layer.name or None, **colour)
    elif layer.kind == "area":
        axes.fill_between(layer.xs, layer.base, ys, label=layer.name, alpha=0.82, lw=0, **colour)
    elif layer.kind == "rings":
        edge = {"edgecolors": colour["color"], "facecolors": "none"}
        axes.scatter(layer.xs, ys, s=90, linewidths=1.6, zorder=4, label=layer.name or None, **edge)
    else:
        size = 8 if len(ys) > 17 else 36
        axes.scatter(layer.xs, ys, s=size, zorder=3, label=layer.name or None, **colour)


def _heatmap(axes: Axes, heat: Heatmap) -> None:
    from matplotlib.patches import Rectangle

    grid = [[float("nan") if value is None else value for value in row] for row in heat.values]
    image = axes.imshow(grid, aspect="auto", cmap="Blues")
    numbers = [value for row in grid for value in row if value == value]
    middle = (min(numbers) + max(numbers)) / 2
    for r, row in enumerate(grid):
        for c, value in enumerate(row):
            dark = value == value and value > middle
            axes.text(
                c, r, heat.texts[r][c], ha="center", va="center", color="white" if dark else "black"
            )
    for r, c in heat.exact:
        axes.add_patch(Rectangle((c - 0.47, r - 0.47), 0.94, 0.94, fill=False, ec=PALETTE[3], lw=2))
    axes.set_xticks(range(len(heat.columns)), heat.columns)
    axes.set_yticks(range(len(heat.rows)), heat.rows)
    axes.set_xlabel(heat.x_label)
    axes.set_ylabel(heat.y_label)
    axes.figure.colorbar(image, ax=axes, label=heat.title)
