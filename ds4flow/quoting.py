"""Texts as quoted values of Hydra's override grammar: what is quoted here arrives unchanged."""

from __future__ import annotations

import re


def uninterpolated(text: str) -> str:
    """`text` as a value of a config that arrives unchanged: `${` in it stands for itself."""
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)


def quoted(text: str) -> str:
    """`text` as a quoted value of Hydra's grammar that arrives unchanged.

    Backslashes matter there only before a quote, and before `${`, which would be interpolated.
    """
    text = re.sub(r"(\\*)'", lambda m: m[1] * 2 + "\\'", uninterpolated(text))
    ending = len(text) - len(text.rstrip("\\"))
    return f"'{text}{chr(92) * ending}'"


def unquoted(text: str) -> str:
    """What `quoted` made a value of Hydra's grammar from."""
    inner = text[1:-1]
    ending = len(inner) - len(inner.rstrip("\\"))
    inner = inner[: len(inner) - ending // 2]
    for mark in ("'", "${"):
        inner = re.sub(rf"(\\+)(?={re.escape(mark)})", lambda m: m[1][: len(m[1]) // 2], inner)
    return inner
