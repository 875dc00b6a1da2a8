"""The DS4_* variables: read here and nowhere else, checked like any other value.

A variable overrides the command line. Empty means unset; booleans are values, so `0` is off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ds4flow.errors import UsageError, near_match
from ds4flow.quoting import quoted
from ds4flow.schema import KEYS

VARIABLES: Mapping[str, str] = {
    "DS4_MTP_DRAFT": "mtp.draft",
    "DS4_MTP_MIN_MARGIN": "mtp.margin",
    "DS4_MTP_STRICT": "mtp.strict",
    "DS4_MTP_GATE": "mtp.gate",
    "DS4_MTP_KEEP_ACCEPTED": "mtp.keep_accepted",
    "DS4_MTP_FULL_LOGITS": "mtp.full_logits",
    "DS4_MTP_PROBE": "mtp.probe",
    "DS4_MTP_TIMING": "mtp.timing",
    "DS4_MTP_SPEC_LOG": "mtp.spec_log",
    "DS4_MTP_CONF_LOG": "mtp.conf_log",
    "DS4_NO_GPU": "runtime.no_gpu",
    "DS4_GGUF_DIR": "download.folder",
}

_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), "true") | dict.fromkeys(
    ("0", "false", "no", "off"), "false"
)


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in each process that it starts; torch reads them itself."""


class Ranks(NamedTuple):
    """This process's number below `world`, the number of processes that torchrun started."""

    rank: int
    world: int


def ranks(environ: Mapping[str, str] | None = None) -> Ranks | None:
    """Which of several processes this is; None for one alone."""
    environ = os.environ if environ is None else environ
    if not all(environ.get(name, "").strip() for name in TORCHRUN):
        return None
    try:
        found = Ranks(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    except ValueError:
        raise UsageError(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are not numbers",
            "start several processes with torchrun, or unset these variables",
        ) from None
    return found if found.world > 1 else None


class Variable(NamedTuple):
    """One variable that is set: its name, the config key, and the value in Hydra's spelling."""

    name: str
    key: str
    value: str


def read(environ: Mapping[str, str] | None = None) -> tuple[Variable, ...]:
    """Return the variables that set a key, in the order of `VARIABLES`.

    Raises UsageError for an unknown DS4_MTP_* name and for a value of the wrong type.
    """
    environ = os.environ if environ is None else environ
    for name in sorted(environ):
        if name.startswith("DS4_MTP_") and name not in VARIABLES:
            known = [known for known in VARIABLES if known.startswith("DS4_MTP_")]
            raise UsageError(
                f"{name} is not a variable of ds4flow",
                near_match(name, known) or f"use one of {', '.join(known)}",
            )
    found = [
        Variable(name, key, _spelled(name, key, environ[name].strip()))
        for name, key in VARIABLES.items()
        if environ.get(name, "").strip()
    ]
    shared = ranks(environ)
    if shared is not None:
        found.append(Variable("WORLD_SIZE", "runtime.tensor_parallel", str(shared.world)))
    return tuple(found)


def _spelled(name: str, key: str, text: str) -> str:
    """The value as Hydra reads it, after a check against the key's type."""
    kind, words = KEYS[key].type, KEYS[key].limits.words
    if text in words:
        return text
    if kind is str:
        return quoted(text)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        return repr(kind(text))
    except (KeyError, ValueError):
        wanted = {bool: "1 or 0", int: "an integer", float: "a number"}[kind]
        raise UsageError(
            f"{name}={text} is not a value for {key}", f"set {name} to {wanted}, or unset it"
        ) from None
