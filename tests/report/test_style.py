"""Colours of the page: text stays readable on its ground, in light and in dark."""

from __future__ import annotations

import re
from importlib import resources

import pytest

STYLE = (resources.files("ds4flow.report") / "templates" / "page.css").read_text(encoding="utf-8")
BLOCKS = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
NAMES = ("accepted", "relaxed", "corrected", "bonus", "rejected")
PAIRS = [
    *((name, f"{name}-bg") for name in NAMES),
    *((text, ground) for text in ("ink", "soft", "link") for ground in ("paper", "card")),
    *(("ink", "wash"), ("soft", "wash")),
    *(("on-dark", f"heat{step}") for step in range(5, 9)),
    *(("ink", f"heat{step}") for step in range(0, 5)),
]


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    block = BLOCKS[("light", "dark").index(scheme)]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    low = []
    for text, ground in PAIRS:
        light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        if (light + 0.05) / (dark + 0.05) < 4.5:
            low.append(f"{text} on {ground}: {(light + 0.05) / (dark + 0.05):.2f}")
    assert not low
