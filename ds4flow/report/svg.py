"""Figures as inline SVG that follows the page's colours and needs no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from ds4flow.report.figure import (
    NAMES,
    Chart,
    Figure,
    Heatmap,
    Layer,
    limits,
    tick_text,
    ticks,
)

WIDTH, HEIGHT = 460, 280
_FEW = 17
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 16, 48

Scale = Callable[[float], float]


def draw(figure: Figure) -> str:
    """The `<svg>` of a figure; its title and caption are beside it in the page."""
    return _heatmap(figure) if isinstance(figure, Heatmap) else _chart(figure)


def _open(figure: Figure, height: float) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-labelledby="{figure.slug}-title {figure.slug}-caption">'
    )


def _chart(chart: Chart) -> str:
    (x_low, x_high), (y_low, y_high) = limits(chart)

    def at_x(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)

    clip = f"{chart.slug}-clip"
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    parts = [
        _open(chart, HEIGHT),
        f'<clipPath id="{clip}"><rect x="{_LEFT}" y="{_TOP - 9}" '  # whole marks at the edges
        f'width="{wide + 6}" height="{high + 18}"/></clipPath>',
        *_axes(chart, at_x, at_y, (x_low, x_high), (y_low, y_high)),
        f'<g clip-path="url(#{clip})">',
    ]
    bar = min(64.0, 0.62 * (at_x(x_low + 1) - at_x(x_low)))
    for layer in chart.layers:
        parts += _layer(layer, at_x, at_y, bar)
    return "".join([*parts, "</g></svg>"])


def _axes(
    chart: Chart, at_x: Scale, at_y: Scale, xs: tuple[float, float], ys: tuple[float, float]
) -> Iterator[str]:
    right, floor = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for y in ticks(*ys, whole=chart.y.whole):
        yield f'<path class="grid" d="M{_LEFT} {at_y(y):.1f}H{right}"/>'
        yield _text(_LEFT - 7, at_y(y) + 4, tick_text(y, chart.y), "end")
    about = 12 if chart.x.labels else 6
    for x in ticks(*xs, about=about, whole=chart.x.whole or bool(chart.x.labels)):
        label = tick_text(x, chart.x)
        if label:
            yield f'<path class="axis" d="M{at_x(x):.1f} {floor}v4"/>'
            yield _text(at_x(x), floor + 17, label, "middle")
    yield f'<path class="axis" d="M{_LEFT} {floor}H{right}"/>'
    yield _text((_LEFT + right) / 2, HEIGHT - 9, chart.x.label, "middle", "label")
    middle = (_TOP + floor) / 2
    yield (
        f'<text class="label" text-anchor="middle" '
        f'transform="translate(13 {middle:g}) rotate(-90)">{escape(chart.y.label)}</text>'
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


def _layer(layer: Layer, at_x: Scale, at_y: Scale, bar: float) -> Iterator[str]:
    colour = NAMES[layer.colour % len(NAMES)]
    known = [i for i, y in enumerate(layer.ys) if y is not None]
    points = [(at_x(layer.xs[i]), at_y(layer.ys[i] or 0.0)) for i in known]
    if layer.kind == "line":
        yield f'<path class="line {colour}" d="{_broken(layer, at_x, at_y)}"/>'
    elif layer.kind == "area":
        low = [(at_x(x), at_y(y)) for x, y in zip(layer.xs, layer.base, strict=True)]
        if len(points) == 1:  # one column must be seen too
            points = [(points[0][0] - 20, points[0][1]), (points[0][0] + 20, points[0][1])]
            low = [(low[0][0] - 20, low[0][1]), (low[0][0] + 20, low[0][1])]
        yield f'<path class="area {colour}" d="{_path([*points, *reversed(low)])}Z"/>'
    for index, (x, y) in zip(known, points, strict=False):
        note = f"<title>{escape(layer.notes[index])}</title>" if layer.notes else ""
        if layer.kind == "rings":
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="7.5"'
            yield f'<circle class="ring {colour}" {place}>{note}</circle>'
        elif layer.kind == "points":
            size = 2.6 if len(points) > _FEW else 4.5
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{size}"'
            yield f'<circle class="point {colour}" {place}>{note}</circle>'
        elif layer.kind == "bars":
            floor = at_y(0.0)
            yield (
                f'<rect class="bar {colour}" x="{x - bar / 2:.1f}" y="{y:.1f}" '
                f'width="{bar:.1f}" height="{max(0.0, floor - y):.1f}">{note}</rect>'
            )
            if layer.notes and len(points) <= 9:
                yield _text(x, y - 4, layer.notes[index], "middle", "value")


def _broken(layer: Layer, at_x: Scale, at_y: Scale) -> str:
    """The path of a line with gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(layer.xs, layer.ys, strict=True):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((at_x(x), at_y(y)))
    return "".join(map(_path, pieces))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _heatmap(heat: Heatmap) -> str:
    columns, rows = max(1, len(heat.columns)), max(1, len(heat.rows))
    left, top = 66, 10
    cell_width = (WIDTH - left - _RIGHT) / columns
    cell_height = min(46.0, max(26.0, 220 / rows))
    floor = top + rows * cell_height
    height = floor + 46
    numbers = [value for line in heat.values for value in line if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    parts, outlines = [_open(heat, height)], []
    for r, line in enumerate(heat.values):
        y = top + r * cell_height
        parts.append(_text(left - 8, y + cell_height / 2 + 4, heat.rows[r], "end"))
        for c, value in enumerate(line):
            x = left + c * cell_width
            box = (
                f'x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{cell_width - 3:.1f}" '
                f'height="{cell_height - 3:.1f}" rx="3"'
            )
            share = 0.0 if value is None else (value - low) / (high - low) if high > low else 1.0
            step = round(share * 8)
            style = "cell empty" if value is None else f"cell heat{step}"
            parts.append(
                f'<g><title>{escape(heat.notes[r][c])}</title><rect class="{style}" {box}/>'
            )
            strong = "value on-dark" if step > 4 and value is not None else "value"
            middle = x + cell_width / 2
            parts.append(
                _text(middle, y + cell_height / 2 + 4, heat.texts[r][c], "middle", strong) + "</g>"
            )
            if (r, c) in heat.exact:
                outlines.append(f'<rect class="exact-cell" {box}/>')
    parts += outlines
    for c, name in enumerate(heat.columns):
        parts.append(_text(left + (c + 0.5) * cell_width, floor + 15, name, "middle"))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, height - 9, heat.x_label, "middle", "label"))
    parts.append(
        f'<text class="label" text-anchor="middle" '
        f'transform="translate(13 {(top + floor) / 2:g}) rotate(-90)">{escape(heat.y_label)}</text>'
    )
    return "".join([*parts, "</svg>"])
