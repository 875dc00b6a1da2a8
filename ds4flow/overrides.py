"""What was typed, as Hydra overrides: texts taken literally, flags and variables merged in.

The environment wins over the command line; what lost and where each value came from is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds4flow.env import Variable
from ds4flow.errors import UsageError
from ds4flow.quoting import quoted
from ds4flow.schema import KEYS

__all__ = [
    "PROVENANCE",
    "Flag",
    "Overrides",
    "assemble",
    "key_of",
    "literal",
    "over_the_sweep",
    "quoted",
    "refuse_two_prompts",
]

PROVENANCE = "provenance"
"""The config key under which sources travel to the run, also into other processes."""

_PROMPT_KEYS = ("prompt", "prompt_file", "prompts")  # what to continue: one of them counts
_CHOICE = re.compile(r"choice\(.*\)", re.DOTALL)


class Flag(NamedTuple):
    """A command-line flag with a value: `--mtp-draft 2` sets `mtp.draft`."""

    name: str
    key: str
    value: str


class Overrides(NamedTuple):
    """Hydra overrides, and the lines to print about values that lost."""

    words: list[str]
    notices: list[str]


def literal(word: str, *, multirun: bool = False) -> str:
    """Quote the value of a free-text key; leave every other override as it was typed.

    `null` stays null where the key allows it, and with `multirun` a text sweeps by `choice(a,b)`
    only. A key that takes several texts accepts a list or one literal text.
    """
    head, equal, value = word.partition("=")
    key = KEYS.get(head.lstrip("+"))
    if not equal or key is None or key.limits.choices:
        return word
    if multirun and _CHOICE.fullmatch(value):
        return word
    if key.type is str:
        return word if key.optional and value == "null" else f"{head}={quoted(value)}"
    if key.type == list[str] and not value.startswith("["):
        return f"{head}=[{quoted(value)}]"
    return word


def key_of(word: str) -> str:
    """The key or group that an override names, without the signs before it."""
    return word.partition("=")[0].lstrip("+~")


def assemble(
    typed: Sequence[str],
    flags: Sequence[Flag],
    variables: Iterable[Variable],
    *,
    multirun: bool = False,
) -> Overrides:
    """Merge typed overrides, flags and variables; UsageError when two of them cannot both hold."""
    for word in typed:
        if not key_of(word):
            raise UsageError(f"{word!r} names no key", "type KEY=VALUE")
    words = [literal(word, multirun=multirun) for word in typed]
    sources = {key_of(word): "cli" for word in words}
    for number, flag in enumerate(flags):
        given = [word for word in words if key_of(word) == flag.key]
        given += [
            f"{other.name} {other.value}" for other in flags[:number] if other.key == flag.key
        ]
        if given:
            raise UsageError(
                f"{flag.key} is given twice: {flag.name} {flag.value} and {given[0]}",
                "leave one of them out",
            )
    refuse_two_prompts([*words, *(f"{flag.key}={flag.value}" for flag in flags)])
    for flag in flags:
        words.append(literal(f"{flag.key}={flag.value}", multirun=multirun))
        sources[flag.key] = f"flag {flag.name}"
    notices = []
    for variable in variables:
        losers = [word for word in words if key_of(word) == variable.key]
        _refuse_sweep(variable, losers, multirun=multirun)
        words = [word for word in words if word not in losers]
        words.append(f"{variable.key}={variable.value}")
        sources[variable.key] = f"env {variable.name}"
        if losers:
            sources[variable.key] += f" over {losers[-1]}"
            notices.append(f"{variable.name}={variable.value} overrides {losers[-1]}")
    carried = {key: source for key, source in sources.items() if source != "cli"}
    if carried:
        pairs = ",".join(f"{key}:{quoted(source)}" for key, source in carried.items())
        words.append(f"+{PROVENANCE}={{{pairs}}}")
    return Overrides(words, notices)


def refuse_two_prompts(words: Iterable[str]) -> None:
    """Raise UsageError when overrides give more than one of a text, a file and a set of prompts."""
    keys = {key_of(word) for word in words if word.partition("=")[2] != "null"}
    given = [key for key in _PROMPT_KEYS if key in keys]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are both given", "leave one of them out")


def _refuse_sweep(variable: Variable, losers: Iterable[str], *, multirun: bool) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for word in losers if multirun else ():
        if OverridesParser.create().parse_override(word).is_sweep_override():
            raise over_the_sweep(variable, word)


def over_the_sweep(variable: Variable, word: str) -> UsageError:
    """The refusal of a variable whose key is swept, by `word`: it would win in every job."""
    return UsageError(
        f"{variable.name}={variable.value} would override the sweep {word}",
        f"unset {variable.name}, or leave {variable.key} out of the sweep",
    )
