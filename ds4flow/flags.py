"""Flags that set keys: each is named once, for every command that takes it.

Light to import: `ds4flow --help` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from ds4flow.overrides import Flag


class FlagKey(NamedTuple):
    """A flag, the key it sets, the value of a flag that takes none, and what else it sets."""

    names: tuple[str, ...]
    key: str
    metavar: str
    help: str
    value: str | None = None
    also: tuple[tuple[str, str], ...] = ()

    @property
    def parameter(self) -> str:
        """The name of the click parameter."""
        return self.names[-1].lstrip("-").replace("-", "_")


REQUEST_FLAGS = (
    FlagKey(("-p", "--prompt"), "prompt", "TEXT", "Text to continue, taken literally."),
    FlagKey(("--prompt-file",), "prompt_file", "FILE", "Read the prompt from a UTF-8 file."),
    FlagKey(("--prompts",), "prompts", "FILE", "Run a set of prompts, JSON lines, in one load."),
    FlagKey(("--model",), "model.path", "FILE", "Main GGUF file; selects model=file."),
    FlagKey(("--mtp",), "model.mtp_path", "FILE", "GGUF file with the MTP block."),
    FlagKey(("-n", "--max-tokens"), "commit.max_tokens", "N", "Tokens to generate at most."),
    FlagKey(("--ctx",), "runtime.context", "N", "Context in tokens, prompt included."),
    FlagKey(("--temp",), "sampling.temperature", "F", "Sampling temperature; 0 is greedy."),
    FlagKey(("--nothink",), "model.chat", "", "Chat prompt without thinking.", "nothink"),
)
"""What to run with which model."""

FLAGS = (
    *REQUEST_FLAGS,
    FlagKey(("--mtp-draft",), "mtp.draft", "N", "Drafts per cycle, 0 to 16."),
    FlagKey(("--mtp-margin",), "mtp.margin", "F", "Acceptance ratio in (0, 1]; 1 is exact."),
    FlagKey(("--mtp-gate",), "mtp.gate", "F", "Stop drafting below this logit gap."),
    FlagKey(("--mtp-strict",), "mtp.strict", "", "Exact, whatever the margin.", "true"),
    FlagKey(("--mtp-probe",), "mtp.probe", "", "Count draft hits, never use drafts.", "true"),
    FlagKey(("--mtp-timing",), "mtp.timing", "", "Counters and times at the end.", "true"),
    FlagKey(("--mtp-spec-log",), "mtp.spec_log", "", "One line per cycle.", "true"),
    FlagKey(("--mtp-conf-log",), "mtp.conf_log", "", "One line per draft.", "true"),
    FlagKey(
        ("--mtp-verify-depth",),
        "mtp.draft",
        "N",
        "Compare with plain greedy decoding at this depth; selects pipeline=parity.",
        also=(("pipeline", "parity"),),
    ),
)
"""All of `ds4flow run` that set keys."""


def flag_options(flags: Sequence[FlagKey]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds `flags` to a click command."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for flag in reversed(flags):
            text = f"{flag.help} [{flag.key}]"
            if flag.value is None:
                option = click.option(*flag.names, flag.parameter, metavar=flag.metavar, help=text)
            else:
                option = click.option(*flag.names, flag.parameter, is_flag=True, help=text)
            command = option(command)
        return command

    return add


def given_flags(
    flags: Sequence[FlagKey], options: Mapping[str, Any], words: Sequence[str]
) -> list[Flag]:
    """Those of `flags` that `options`, the values of a command, holds, with what else they set."""
    from ds4flow.overrides import Flag, key_of

    given = [flag for flag in flags if options[flag.parameter] not in (None, False)]
    found = [
        Flag(flag.names[-1], flag.key, flag.value or str(options[flag.parameter])) for flag in given
    ]
    for flag in given:
        found += [Flag(flag.names[-1], key, value) for key, value in flag.also]
    if options["model"] and not any(key_of(word) == "model" for word in words):
        found.insert(0, Flag("--model", "model", "file"))
    return found
