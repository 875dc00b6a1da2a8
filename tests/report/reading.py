"""Reading a report as a browser would: elements, their attributes and their text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "input", "br", "img", "hr"}
OUTSIDE = re.compile(r"https?:|//|url\((?!#)|@import|src=", re.IGNORECASE)
"""What would reach beyond the page, in an attribute or a style sheet."""


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()


class Page(HTMLParser):
    """All elements of a page in order; the text of an element includes that of those within."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.feed(source)
        self.close()
        assert not self.open, [element.tag for element in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.texts.append(data)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        return [
            element
            for element in self.elements
            if element.tag == tag
            and all(element.attributes.get(key) == value for key, value in attributes.items())
        ]

    def tokens(self) -> list[Element]:
        """The spans of the text's tokens, without those of the legend."""
        inside = False
        found = []
        for element in self.elements:
            if element.tag == "div":
                inside = "tokens" in element.classes
            elif inside and element.tag == "span" and "t" in element.classes:
                found.append(element)
        return found

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.all("script", id="data")[0].text)

    def numbers(self) -> dict[str, str]:
        """Value by name of the table of numbers."""
        found = {}
        for index, row in enumerate(self.elements):
            if row.tag == "tr" and "data-key" in row.attributes:
                value = next(e for e in self.elements[index:] if "value" in e.classes)
                found[row.attributes["data-key"]] = value.text
        return found


def assert_alone(page: Page) -> None:
    """The page names nothing outside itself, and only its own script may run."""
    for element in page.elements:
        for name, value in element.attributes.items():
            if name in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
                assert value.startswith(("#", "data:")), (element.tag, name, value)
            if name == "style":
                assert not OUTSIDE.search(value)
            assert not name.startswith("on"), (element.tag, name)
        assert element.tag not in ("iframe", "object", "embed", "img", "base", "form")
    for style in page.all("style"):
        assert not OUTSIDE.search(style.text)
    (links,) = [element.attributes for element in page.all("link")]
    assert links == {"rel": "icon", "href": "data:,"}
    own = [element for element in page.all("script") if "type" not in element.attributes]
    assert len(own) == 1
