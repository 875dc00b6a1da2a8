"""Figures: the numbers are those of the cycles, and matplotlib draws the same ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds4flow.errors import Ds4FlowError
from ds4flow.report.figure import Axis, Chart, Heatmap, Layer, Table, tick_text, ticks
from ds4flow.report.figures import run_figures
from ds4flow.report.plots import write_plots
from ds4flow.report.svg import draw
from ds4flow.report.totals import Totals


def cycle(number: int, drafted: int, committed: int, micros: int, **more: Any) -> dict[str, Any]:
    position = 10 + 2 * number
    phases = {"draft": micros // 4, "verify": micros - micros // 4, "commit": 0}
    tokens = list(range(committed))
    return {
        "cycle": number, "position": position, "drafted": drafted, "tokens": tokens,
        "micros": phases, "draft_end": "depth", **more,
    }  # fmt: skip


# Ten cycles without drafts of 1 ms, ten with two drafts of 2 ms that commit 1, 2 and 3 tokens.
CYCLES = [cycle(n, 0, 1, 1000) for n in range(1, 11)] + [
    cycle(n, 2, 1 + n % 3, 2000) for n in range(11, 21)
]


def figures_of(cycles: list[dict[str, Any]]) -> list[Chart]:
    return run_figures(cycles, Totals.of(cycles))


def by_slug(figures: list[Chart]) -> dict[str, Chart]:
    return {figure.slug: figure for figure in figures}


def test_numbers_of_a_known_run() -> None:
    found = by_slug(figures_of(CYCLES))
    accepted = [n % 3 for n in range(11, 21)]
    assert found["acceptance-by-position"].layers[0].ys == [
        sum(k >= 1 for k in accepted) / 10,
        sum(k >= 2 for k in accepted) / 10,
    ]
    assert found["accepted-length"].layers[0].ys == [
        10 + accepted.count(0),
        accepted.count(1),
        accepted.count(2),
    ]
    stack = found["time-per-phase"].layers
    assert [layer.name for layer in stack] == ["draft", "verify", "commit"]
    assert stack[-1].ys[0] == pytest.approx(1.0)
    assert stack[-1].ys[-1] == pytest.approx(2.0)
    points, line = found["speed-by-context"].layers
    assert points.ys[0] == pytest.approx(1000)
    assert len(line.xs) == 2


def test_break_even_agrees_with_the_costs() -> None:
    figure = by_slug(figures_of(CYCLES))["break-even"]
    (row,) = figure.table.rows
    depth, cycles, cost, mean, needed, reached, pays = row
    assert (depth, cycles, cost) == ("2", "10", "2.00")
    committed = sum(1 + n % 3 for n in range(11, 21)) / 10
    assert mean == f"{committed:.2f}"
    # 1 + a + a*a == 2 at a == 0.618
    assert needed == "61.8%"
    assert pays == ("yes" if committed >= 2 else "no")
    curve, point = figure.layers
    at = min(zip(curve.xs, curve.ys, strict=True), key=lambda xy: abs(xy[0] - 2.0))
    assert at[1] == pytest.approx(0.618, abs=0.02)
    assert (point.ys[0] > 0.618) == (committed > 2)
    assert reached == f"{point.ys[0]:.1%}"


def test_without_plain_cycles_break_even_says_what_is_needed() -> None:
    figure = by_slug(figures_of(CYCLES[10:]))["break-even"]
    assert "mtp.draft=auto" in figure.missing


def test_outliers_do_not_flatten_a_scale_and_are_counted() -> None:
    cycles = [cycle(n, 0, 1, 1000) for n in range(1, 60)] + [cycle(60, 0, 1, 900_000)]
    figure = by_slug(figures_of(cycles))["time-per-phase"]
    assert figure.y.high == pytest.approx(1.5)
    assert "1 of 60 are beyond the scale, up to 900.0 ms" in figure.caption


def test_nothing_to_show_is_said() -> None:
    for figure in figures_of([]):
        assert figure.missing
        assert not figure.table.rows


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 3, True, [0, 1, 2, 3]),
        (7, 130, True, [20, 40, 60, 80, 100, 120]),
        (0, 0.0004, False, [0, 0.0001, 0.0002, 0.0003, 0.0004]),
    ],
)
def test_ticks_are_round(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, whole=whole) == pytest.approx(expected)


def test_tick_texts() -> None:
    assert tick_text(0.25, Axis("", percent=True)) == "25%"
    assert tick_text(0.075, Axis("", percent=True)) == "7.5%"
    assert tick_text(12000, Axis("")) == "12,000"
    assert tick_text(1, Axis("", labels=["a", "b"])) == "b"
    assert tick_text(5, Axis("", labels=["a", "b"])) == ""


HEAT = Heatmap(
    "surface",
    "Surface",
    "",
    "depth",
    "margin",
    ["0", "1"],
    ["1.0", "0.5"],
    [[1.0, 2.0], [None, 3.0]],
    [["1", "2"], ["-", "3"]],
    [["<a>", "b"], ["failed", "d"]],
    frozenset({(0, 0), (0, 1)}),
    Table((), ()),
)


def test_svg_is_well_formed_and_escaped() -> None:
    nasty = Chart(
        "n",
        "t",
        "c",
        Axis("<x>"),
        Axis('"&'),
        [Layer("points", "p", [1, 2], [None, 2.0], notes=["<script>", "&"])],
        Table((), ()),
    )
    for figure in (*figures_of(CYCLES), HEAT, nasty):
        root = ElementTree.fromstring(draw(figure))
        assert root.tag == "svg"
    marks = ElementTree.fromstring(draw(HEAT)).findall("rect")
    assert [mark.get("class") for mark in marks] == ["exact-cell"] * 2


def test_plots_are_png_and_svg(tmp_path: Path) -> None:
    written = write_plots([figures_of(CYCLES)[2], HEAT], tmp_path / "plots")
    assert len(written) == 4
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in data[:500]
    again = write_plots([HEAT], tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written[-2:]]


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Ds4FlowError, match=r"ds4flow\[report\]"):
        write_plots([HEAT], tmp_path)
