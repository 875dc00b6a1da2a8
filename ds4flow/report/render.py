"""From values to a page, for runs and sweeps alike: templates, texts, badges.

Whatever a prompt or a model wrote is shown as text, never taken for markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from ds4flow import __version__
from ds4flow.quoting import unquoted
from ds4flow.report.figure import NAMES, Figure
from ds4flow.report.svg import draw
from ds4flow.runs.record import Run
from ds4flow.schema import KEYS

_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


def render(template: str, **values: Any) -> str:
    """Fill a template; every value is escaped, and the page may run its own script only."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds4flow.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    folder = resources.files("ds4flow.report") / "templates"
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        names=NAMES,
        script=script,
        script_hash=f"sha256-{digest}",
        style=(folder / "page.css").read_text(encoding="utf-8"),
        version=__version__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        **values,
    )


def visible(text: str) -> str:
    """Text with its control characters as pictures, so that a browser shows what is there."""
    return text.translate(_CONTROLS)


def drawn(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Figures as the template takes them."""
    return [{"figure": figure, "svg": "" if figure.missing else draw(figure)} for figure in figures]


def config_rows(run: Run) -> list[dict[str, Any]]:
    """Every key with its value, where it came from, and the class of its badge."""
    return [
        {"key": key, "value": plain(value), "origin": origin, "kind": _origin_kind(origin)}
        for key, value in run.config.items()
        for origin in [run.origins.get(key, "")]
    ]


def _origin_kind(origin: str) -> str:
    """The class of an origin's badge; what is not known by name was asked for somewhere."""
    word = origin.partition(" ")[0]
    if not word:
        return "default"
    return word if word in ("default", "env", "group", "preset") else "cli"


def command_line(words: Sequence[Any]) -> str:
    """`ds4flow run` with the recorded override words, as it can be typed in a shell again."""
    return shlex.join(["ds4flow", "run", *map(_typed, map(str, words))])


def _typed(word: str) -> str:
    """A word as it was typed: texts are recorded as Hydra quotes them."""
    head, equal, value = word.partition("=")
    key = KEYS.get(head.lstrip("+"))
    if equal and key is not None and key.type is str and re.fullmatch("'.*'", value, re.DOTALL):
        return f"{head}={unquoted(value)}"
    return word


def flat_facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Facts within facts, one a line; what is null is left out."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat_facts(value, f"{prefix}{key}: ")
        elif value is not None and value != []:
            yield prefix + str(key), plain(value)


def plain(value: Any) -> str:
    """A value of a record as text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value}"
    return visible(str(value))
