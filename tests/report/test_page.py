"""A run's page: whole, alone, harmless, and its numbers are those of the run's files."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds4flow.report.page import run_page
from ds4flow.runs.record import Run
from tests.command import ds4flow
from tests.report.conftest import FAKE, NASTY
from tests.report.reading import Page, assert_alone

pytestmark = pytest.mark.usefixtures("alone")


def page_of(path: str | Path = "runs/demo/0001") -> Page:
    return Page(run_page(Run.open(path)))


def badges(page: Page, key: str) -> str:
    """The origin badge of a config key."""
    rows = iter(page.elements)
    for element in rows:
        if element.tag == "th" and element.text == key:
            return next(e for e in rows if "badge" in e.classes).text
    raise AssertionError(f"no row for {key}")


@pytest.fixture
def made(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def copied(folder: Path) -> Path:
    """A copy of the run that a test may damage, where the command finds it."""
    return Path(shutil.copytree(folder, "runs/demo/0001"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def test_a_page_needs_nothing_else_and_its_numbers_are_the_summary(
    made: Page, folder: Path
) -> None:
    assert_alone(made)
    summary = read(folder / "summary.json")
    numbers = made.numbers()
    for key in ("cycles", "num_draft_tokens", "num_accepted_draft_tokens", "output_tokens"):
        assert numbers[key] == str(summary[key])
    assert float(numbers["mean_acceptance_length"]) == pytest.approx(
        summary["mean_acceptance_length"], rel=1e-5
    )
    tokens = read(folder / "tokens.json")
    rows, kinds = made.data["parts"][0]["tokens"], [kind for kind, _ in made.data["kinds"]]
    spans = made.tokens()
    assert len(spans) == len(rows)
    assert all(kinds[row[0]] in span.classes for span, row in zip(spans, rows, strict=True))
    committed = {"certain", "bonus", "corrected", "accepted", "relaxed"}
    kept = [row for row in rows if kinds[row[0]] in committed]
    assert [row[1] for row in kept] == tokens["output"]
    assert [row[2] for row in kept] == list(
        range(len(tokens["prompt"]), len(tokens["prompt"]) + len(kept))
    )
    of_kind = [kinds[row[0]] for row in rows]
    assert of_kind.count("accepted") + of_kind.count("relaxed") == summary["draft_n_accepted"]
    assert of_kind.count("relaxed") == summary["relaxed_accepts"]
    text = "".join(s.text for s in spans if committed & set(s.classes))
    assert text == (folder / "output.txt").read_text()


def test_every_value_says_where_it_came_from(made: Page, folder: Path) -> None:
    assert badges(made, "mtp.draft") == "cli"
    assert badges(made, "mtp.margin") == "preset relaxed"
    assert badges(made, "commit.max_tokens") == "flag --max-tokens"
    assert badges(made, "mtp.gate") == "env DS4_MTP_GATE"
    assert badges(made, "pipeline.cycle") == "group pipeline=fake"
    assert badges(made, "mtp.probe") == "default"
    facts = read(folder / "run.json")
    keys = {e.text for e in made.all("th", scope="row") if "mono" in e.classes}
    assert set(facts["config"]) <= keys
    (command,) = [e.text for e in made.all("pre") if "command" in e.classes]
    assert command.startswith("ds4flow run ")
    assert "provenance" not in command
    words = shlex.split(command)
    assert "mtp.draft=4" in words
    assert f"prompt={NASTY}".replace("\x07", "\u2407") in words


def test_a_prompt_is_text_whatever_it_holds(made: Page) -> None:
    assert len(made.all("script")) == 2
    assert not made.all("img")
    shown = next(e for e in made.elements if "prompt" in e.classes)
    assert shown.text == NASTY.replace("\x07", "\u2407")
    assert "49" not in shown.text


def test_every_figure_is_named_and_has_its_numbers(made: Page, folder: Path) -> None:
    figures = made.all("figure")
    assert {figure.attributes["id"] for figure in figures} == {
        "acceptance-by-position",
        "accepted-length",
        "time-per-phase",
        "speed-by-context",
        "break-even",
    }
    ids = [element.attributes["id"] for element in made.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    charts = [e for e in made.all("svg", role="img")]
    assert len(charts) >= 4
    for chart in charts:
        named = chart.attributes["aria-labelledby"].split()
        assert named
        assert set(named) <= set(ids)
    summary = read(folder / "summary.json")
    bars = [e for e in made.elements if e.tag == "rect" and {"bar", "blue"} <= set(e.classes)]
    drawn = [int(bar.text) for bar in bars if bar.text]
    assert drawn == summary["acceptance_histogram"]


def test_identity_and_ending_are_badges(made: Page, folder: Path) -> None:
    lossy = read(folder / "summary.json")["relaxed_accepts"]
    (identity,) = made.all("span", id="identity")
    assert identity.text == f"relaxed, {lossy} lossy"
    (status,) = made.all("span", id="status")
    assert status.text == "complete"


def test_a_failed_run_shows_what_there_is_and_why() -> None:
    assert ds4flow("run", *FAKE, "prompt=hello", "fakeload.fail_at=15").exit_code == 1
    page = page_of()
    assert_alone(page)
    assert page.all("span", id="status")[0].text == "failed"
    assert any("a bug in a kernel" in e.text for e in page.elements if "notes" in e.classes)
    assert len(page.tokens()) > 5


def test_a_run_that_failed_before_its_first_token_has_a_page_too() -> None:
    assert ds4flow("run", *FAKE, "prompt_file=missing.txt").exit_code != 0
    page = page_of()
    assert_alone(page)
    assert page.all("span", id="status")[0].text == "failed"
    assert not page.tokens()
    assert "No token was produced" in page.source


@pytest.mark.parametrize("lost", ["summary.json", "pieces.json", "tokens.json", "cycles.jsonl"])
def test_a_killed_run_shows_what_reached_the_disk(copied: Path, lost: str) -> None:
    summary = read(copied / "summary.json")
    facts = {**read(copied / "run.json"), "status": "running", "host": "another"}
    (copied / "run.json").write_text(json.dumps(facts))
    (copied / lost).unlink()
    page = page_of()
    assert_alone(page)
    assert page.all("span", id="status")[0].text == "running"
    assert page.numbers()["cycles"] == str(summary["cycles"])
    if lost == "summary.json":
        assert "counted from its cycles" in page.source
    if lost == "pieces.json":
        assert (copied / "output.txt").read_text() in page.source
    assert bool(page.tokens()) == (lost != "cycles.jsonl")
    if lost == "cycles.jsonl":  # as with trace=off: the text and the counts are there
        assert (copied / "output.txt").read_text() in page.source
        shown = {
            e.attributes["aria-labelledby"].split("-title")[0] for e in page.all("svg", role="img")
        }
        assert {"acceptance-by-position", "accepted-length"} <= shown


def test_where_the_page_goes(copied: Path) -> None:
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    result = ds4flow("report", "1", "-o", "some/where.html")
    assert (result.exit_code, result.stdout) == (0, "some/where.html\n")
    assert Path("some/where.html").is_file()
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before
    Path("blocked").write_text("")
    refused = ds4flow("report", "-o", "blocked/page.html")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[0].startswith("error: cannot write blocked/page.html")


def test_a_run_that_is_not_there_is_a_usage_error(copied: Path) -> None:
    result = ds4flow("report", "dmo/0001")
    assert result.exit_code == 2
    assert "demo/0001" in result.stderr


def test_a_prompt_set_shows_every_prompt_and_its_categories() -> None:
    lines = [
        {"id": "one", "category": "code", "prompt": "hello"},
        {"id": "two</script>", "category": "code", "prompt": "world"},
        {"id": "three", "category": "<b>prose</b>", "prompt": "again"},
    ]
    Path("set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = ds4flow("run", *FAKE, "prompts=set.jsonl", "mtp.draft=2", "-n", "16")
    assert done.exit_code == 0, done.stderr
    folder = Path("runs/demo/0001")
    page = page_of(folder)
    assert_alone(page)
    summary = read(folder / "summary.json")
    categories = {
        e.attributes["data-category"]: e.text
        for e in page.all("tr")
        if "data-category" in e.attributes
    }
    assert set(categories) == {"code", "<b>prose</b>"}
    assert "2 of 2" in categories["code"]
    prompts = [e.attributes["data-prompt"] for e in page.all("tr") if "data-prompt" in e.attributes]
    assert prompts == ["one", "two</script>", "three"]
    parts = page.data["parts"]
    kept = [
        sum(page.data["kinds"][row[0]][0] not in ("rejected", "unused") for row in part["tokens"])
        for part in parts
    ]
    assert kept == [16, 16, 16]
    assert sum(kept) == summary["output_tokens"] == int(page.numbers()["output_tokens"])
    assert {"acceptance-by-category", "length-by-category"} <= {
        figure.attributes["id"] for figure in page.all("figure")
    }
    one = page_of(next(folder.glob("prompt-000-*")))
    assert len(one.data["parts"]) == 1
