"""A sweep's page: every job with how it ended, and the surface with what is exact."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ds4flow.report.command import report_command
from ds4flow.report.figure import Chart, Heatmap
from ds4flow.report.sweep_figures import sweep_figures
from ds4flow.report.sweep_grid import Grid, value_order
from ds4flow.report.sweep_page import sweep_page
from ds4flow.runs.sweep import Sweep
from tests.report.reading import Page, assert_alone
from tests.report.sweep_folder import ENDINGS, GRID, make, write_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "runs" / "demo" / "0001", GRID, ENDINGS)


def figures(folder: Path) -> dict[str, Any]:
    return {figure.slug: figure for figure in sweep_figures(Sweep.open(folder))}


def test_every_job_is_in_the_table_with_how_it_ended(folder: Path) -> None:
    page = Page(sweep_page(Sweep.open(folder)))
    assert_alone(page)
    rows = {e.attributes["data-job"]: e.text for e in page.all("tr") if "data-job" in e.attributes}
    assert set(rows) == {"0", "1", "2", "3", "4", "5"}
    assert "Ds4FlowError: </script> no room" in rows["3"]
    assert "missing" in rows["5"]
    assert "300.0" in rows["4"]
    assert "exact" in rows["4"]
    assert "2 of 6 jobs have no result" in page.source


def test_the_surface_has_every_number_and_marks_what_is_exact(folder: Path) -> None:
    surface = figures(folder)["surface"]
    assert isinstance(surface, Heatmap)
    assert (surface.x_label, surface.y_label) == ("mtp.draft", "mtp.margin")
    assert surface.columns == ["0", "1", "2"]
    assert surface.rows == ["1.0", "0.5"]
    assert surface.values == [[100.0, 200.0, 300.0], [200.0, None, None]]
    assert surface.exact == {(0, 0), (0, 1), (0, 2), (1, 0)}
    page = Page(sweep_page(Sweep.open(folder)))
    assert len([e for e in page.all("rect") if "exact-cell" in e.classes]) == 4
    assert surface.table.rows[0] == ("1.0", "100.0, exact", "200.0, exact", "300.0, exact")


def test_lines_have_gaps_where_jobs_are_missing(folder: Path) -> None:
    speed = figures(folder)["speed"]
    assert isinstance(speed, Chart)
    lines = {layer.name: layer.ys for layer in speed.layers if layer.kind == "line"}
    assert lines == {
        "mtp.margin=1.0": [100.0, 200.0, 300.0],
        "mtp.margin=0.5": [200.0, None, None],
    }
    (rings,) = [layer for layer in speed.layers if layer.kind == "rings"]
    assert sorted(y for y in rings.ys if y) == [100.0, 200.0, 200.0, 300.0]


def test_the_fastest_jobs_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "sweep", GRID)
    page = Page(sweep_page(Sweep.open(folder)))
    tiles = [element.text for element in page.all("div") if "tile" in element.classes]
    # margin 0.5 doubles the speed, also of greedy: the median of 100 and 200
    assert tiles[0].startswith("fastest exact, tokens/s300.0job 4: mtp.draft=2, mtp.margin=1.0")
    assert tiles[1].startswith("fastest of all, tokens/s600.0job 5: mtp.draft=2, mtp.margin=0.5")
    assert "2.00 times greedy" in tiles[0]
    assert tiles[2].startswith("greedy, tokens/s150.0")


def test_shared_values_and_what_was_swept(folder: Path) -> None:
    page = Page(sweep_page(Sweep.open(folder)))
    rows = [e.text for e in page.all("tr") if {"cli", "env", "default"} & set(e.classes)]
    assert rows[:3] == [
        "mtp.draft0, 1, 2sweep",
        "mtp.margin0.5, 1.0sweep",
        "mtp.gate0.5env DS4_MTP_GATE",
    ]


def test_a_sweep_of_one_key_has_lines_only(tmp_path: Path) -> None:
    folder = make(tmp_path / "sweep", [{"mtp.draft": d} for d in ("0", "2", "10")])
    found = figures(folder)
    assert "surface" not in found
    assert found["speed"].x.labels == ["0", "2", "10"]
    assert found["speed"].layers[0].ys == [100.0, 300.0, 1100.0]


def test_jobs_that_share_a_cell_show_their_median(tmp_path: Path) -> None:
    jobs = [
        {"sampling.seed": s, "mtp.draft": d, "mtp.margin": m}
        for s in ("0", "1", "2")
        for d in ("0", "1")
        for m in ("1.0", "0.5")
    ]
    folder = make(tmp_path / "sweep", jobs)
    path = folder / "1" / "summary.json"
    write_json(path, {**json.loads(path.read_text()), "tokens_per_second": 9e9})
    surface = figures(folder)["surface"]
    assert surface.values == [[100.0, 200.0], [200.0, 400.0]]
    assert "differ only in sampling.seed" in surface.caption
    assert "3 jobs" in surface.notes[0][0]


def test_many_values_of_a_search_are_numbers_on_an_axis(tmp_path: Path) -> None:
    chance = random.Random(1)
    jobs = [
        {"mtp.draft": str(n % 3), "mtp.margin": f"{chance.uniform(0.1, 1):.6f}"} for n in range(40)
    ]
    found = figures(make(tmp_path / "sweep", jobs))
    assert "surface" not in found
    assert found["speed"].x.labels == ["0", "1", "2"]
    grid = Grid.of(Sweep.open(tmp_path / "sweep"))
    assert grid is not None
    assert len(grid.rows) == 40


def test_a_sweep_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    endings = {number: ("missing", "") for number in range(6)}
    folder = make(tmp_path / "sweep", GRID, endings)
    page = Page(sweep_page(Sweep.open(folder)))
    assert_alone(page)
    assert "No job has finished." in page.source


def test_the_command_takes_a_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent.parent)
    target = report_command("demo/0001", None, Path("plots"))
    assert target == Path("runs/demo/0001/report.html")
    assert {path.name for path in Path("plots").glob("*.png")} == {
        "surface.png",
        "speed.png",
        "acceptance.png",
        "length.png",
    }


def test_values_are_in_order_of_size() -> None:
    values = ["auto", "10", "2", "0.5", "1.0"]
    assert sorted(values, key=value_order) == ["0.5", "1.0", "2", "10", "auto"]


def test_jobs_with_different_prompts_are_not_put_together(tmp_path: Path) -> None:
    jobs = [
        {"prompt": text, "mtp.draft": d, "mtp.margin": m}
        for text in ('"one"', '"two"')
        for d in ("0", "1")
        for m in ("1.0", "0.5")
    ]
    folder = make(tmp_path / "sweep", jobs)
    for number in range(8):
        (folder / str(number) / "prompt.txt").write_text("one" if number < 4 else "two")
    path = folder / "5" / "summary.json"
    write_json(path, {**json.loads(path.read_text()), "tokens_per_second": 5.0})
    found = figures(folder)
    assert found["surface-1"].values == [[100.0, 200.0], [200.0, 400.0]]
    assert found["surface-2"].values == [[100.0, 200.0], [5.0, 400.0]]
    assert found["surface-1"].title == 'Tokens per second, prompt="one"'
    page = Page(sweep_page(Sweep.open(folder)))
    assert "The jobs differ in prompt: no fastest one is named" in page.source
    tiles = [element.text for element in page.all("div") if "tile" in element.classes]
    assert tiles == ["jobs done8 of 8"]
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))


def test_break_even_takes_its_plain_cycles_from_the_greedy_jobs(folder: Path) -> None:
    """Two drafts for 1.5 times the time, 2 of 3 tokens committed each time: 1 + a + a*a == 1.5."""
    for job, drafted, micros in ((0, 0, 1000), (4, 2, 1500)):
        cycle = {"drafted": drafted, "tokens": [1, 2][: drafted + 1], "micros": {"verify": micros}}
        (folder / str(job) / "cycles.jsonl").write_text((json.dumps(cycle) + "\n") * 5)
    figure = figures(folder)["break-even"]
    assert [row[:2] for row in figure.table.rows] == [("2", "5")]
    assert figure.table.rows[0][2:] == ("1.50", "2.00", "36.6%", "61.8%", "yes")
    assert figure.layers[1].name == "exact jobs, 2 drafts"
