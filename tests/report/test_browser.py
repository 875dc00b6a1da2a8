"""The page in a real browser: opened from the disk without a network, read with hand and keyboard.

Needs ds4flow[browser] and a Chromium, else it is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4flow.report.sweep_page import sweep_page
from ds4flow.runs.sweep import Sweep
from tests.report.sweep_folder import ENDINGS, GRID, make

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'ds4flow[browser]'"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        found = next(filter(None, map(shutil.which, NAMES)), engine.chromium.executable_path)
        if not os.path.exists(found):
            pytest.skip("no Chromium was found: playwright install chromium")
        running = engine.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


class Visit:
    """One page in the browser, with all it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, **options: Any) -> None:
        size = {"width": width, "height": 800}
        self.context = browser.new_context(viewport=size, offline=True, **options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.url = path.resolve().as_uri()
        self.page.goto(self.url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def detail(self) -> dict[str, str]:
        """What the details say, when they are shown."""
        if not self.page.locator("#detail").is_visible():
            return {}
        names = self.page.locator("#detail dt").all_inner_texts()
        return dict(zip(names, self.page.locator("#detail dd").all_inner_texts(), strict=True))

    def overflow(self) -> int:
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


def brightness(colour: str) -> int:
    """The sum of the channels of rgb(R, G, B)."""
    return sum(map(int, colour[4:-1].split(",")))


@pytest.fixture
def page(folder: Path) -> Path:
    return folder / "report.html"


def test_it_opens_offline_without_a_request_or_a_complaint(browser: Any, page: Path) -> None:
    with Visit(browser, page) as visit:
        assert visit.page.title().startswith("demo/0001")
        assert visit.asked == [visit.url]
        assert visit.said == []


def test_hovering_a_token_shows_its_details(browser: Any, page: Path, folder: Path) -> None:
    cycles = [json.loads(line) for line in (folder / "cycles.jsonl").read_text().splitlines()]
    cycle = next(one for one in cycles if one["accepted"])
    accepted = cycle["drafts"][0]
    with Visit(browser, page) as visit:
        assert visit.detail() == {}
        visit.page.locator(".tokens .accepted").first.hover()
        detail = visit.detail()
        assert detail["position"] == str(cycle["position"] + 1)
        assert detail["token id"] == str(accepted)
        assert detail["draft depth"] == f"1 of {cycle['drafted']}"
        assert float(detail["drafter's gap"]) == pytest.approx(cycle["draft_gaps"][0], rel=1e-3)
        assert float(detail["target's gap"]) == pytest.approx(cycle["gaps"][0], rel=1e-3)
        assert float(detail["ratio"]) == 1.0
        assert "ms" in detail["time"]
        visit.page.locator("h1").hover()
        assert visit.detail() == {}
        assert visit.said == []


def test_the_keyboard_walks_from_token_to_token(browser: Any, page: Path) -> None:
    with Visit(browser, page) as visit:
        visit.page.locator(".prompt").first.focus()
        visit.page.keyboard.press("Tab")
        first = visit.detail()
        visit.page.keyboard.press("ArrowRight")
        second = visit.detail()
        assert int(first["position"]) < int(second["position"]) or second["draft depth"]
        described = visit.page.evaluate("document.activeElement.getAttribute('aria-describedby')")
        assert described == "detail"
        visit.page.keyboard.press("End")
        last = visit.detail()
        visit.page.keyboard.press("Home")
        assert visit.detail() == first != last
        visit.page.keyboard.press("Escape")
        assert visit.detail() == {}


def test_drafts_are_hidden_and_shown(browser: Any, page: Path, folder: Path) -> None:
    with Visit(browser, page) as visit:
        refused = visit.page.locator(".tokens .rejected")
        behind = visit.page.locator(".tokens .unused")
        assert refused.first.is_visible()
        assert not behind.first.is_visible()
        visit.page.get_by_label("with all drafts").check()
        assert behind.first.is_visible()
        visit.page.get_by_label("the text only").check()
        assert not refused.first.is_visible()
        shown = visit.page.locator(".tokens").inner_text()
        assert shown.split() == (folder / "output.txt").read_text().split()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_can_show_it(browser: Any, page: Path, scheme: str) -> None:
    with Visit(browser, page, 380, color_scheme=scheme, has_touch=True) as visit:
        visit.page.locator("summary").first.tap()
        assert visit.overflow() <= 0
        visit.page.locator(".tokens .t").nth(3).tap()
        box = visit.page.locator("#detail").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 380
        style = "getComputedStyle(document.body)"
        ink, paper = visit.page.evaluate(f"[{style}.color, {style}.backgroundColor]")
        assert (brightness(ink) > brightness(paper)) == (scheme == "dark")


def test_without_scripts_the_text_and_the_numbers_are_there(browser: Any, page: Path) -> None:
    with Visit(browser, page, java_script_enabled=False) as visit:
        assert visit.page.locator(".tokens .accepted").first.is_visible()
        visit.page.locator("figure summary").first.click()
        assert visit.page.locator("figure table").first.is_visible()
        assert visit.page.locator("noscript p").is_visible()


@pytest.mark.parametrize("width", [380, 1280])
def test_a_sweep_fits_and_asks_for_nothing(browser: Any, tmp_path: Path, width: int) -> None:
    sweep = Sweep.open(make(tmp_path / "sweep", GRID, ENDINGS))
    path = tmp_path / "page.html"
    path.write_text(sweep_page(sweep), encoding="utf-8")
    with Visit(browser, path, width) as visit:
        assert visit.overflow() <= 0
        assert visit.asked == [visit.url]
        assert visit.said == []
        assert visit.page.locator("#surface .exact-cell").count() == 4
        visit.page.locator("#surface summary").click()
        assert "100.0, exact" in visit.page.locator("#surface table").inner_text()
        assert visit.page.locator("tr[data-job='3'] .failed").is_visible()
