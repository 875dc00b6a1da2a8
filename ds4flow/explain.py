"""Hydra's and OmegaConf's complaints in our own words: two lines, the key, and a near match."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from ds4flow import schema
from ds4flow.checks import SEE, unknown_key
from ds4flow.errors import Ds4FlowError, UsageError, near_match
from ds4flow.plugins import missing_for_option

_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


@contextmanager
def explained() -> Iterator[None]:
    """Turn every error of composing a config into a UsageError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise explain(error) from error


def explain(error: Exception) -> Ds4FlowError:
    """The error that says what `error` says: a UsageError, or that a package is missing."""
    if isinstance(error, OverrideParseException):
        return _unparsable(error)
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    cause = _find_cause(error)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return unknown_key(str(cause.full_key or cause.key))
    if isinstance(cause, ValidationError):
        return _wrong_type(error, cause)
    if isinstance(cause, InterpolationResolutionError | GrammarParseError):
        return UsageError(
            f"{cause.full_key or 'a value'}: {_first_line(cause)}",
            "correct the ${...} in the YAML or on the command line",
        )
    if "Config group override must be" in str(error):
        return UsageError(
            "a group was given a value that is not a name", "type GROUP=OPTION, as model=demo"
        )
    if "Ambiguous value" in str(error):
        return UsageError(
            f"{_quoted_part(error)} has several values",
            "sweep over them with --multirun, or write a list as key=[a,b]",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    if cause is not None and cause is not error:
        lines[1:] = [_first_line(cause)]
    return UsageError(lines[0], lines[1] if len(lines) > 1 else SEE)


def _find_cause(error: BaseException) -> OmegaConfBaseException | None:
    step: BaseException | None = error
    while step is not None and not isinstance(step, OmegaConfBaseException):
        step = step.__cause__ or step.__context__
    return step


def _unparsable(error: OverrideParseException) -> UsageError:
    word = str(error.override)
    if "=" not in word:
        return UsageError(
            f"{word!r} is neither a flag nor key=value",
            "type key=value, such as mtp.draft=2; a prompt goes after -p",
        )
    key = word.partition("=")[0]
    return UsageError(
        f"the value of {key} cannot be read: {word.partition('=')[2]}",
        f"quote what is special to Hydra (brackets, braces, commas, quotes): \"{key}='...'\"",
    )


def _missing_option(error: MissingConfigException) -> Ds4FlowError:
    plugin = missing_for_option(str(error.missing_cfg_file or ""))
    if plugin is not None:
        return plugin
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = [str(one).removesuffix(".yaml") for one in error.options or ()]
    if not options:
        return UsageError(
            f"there is no config {error.missing_cfg_file}",
            near_match(group, schema.GROUPS) or SEE,
        )
    close = near_match(option, options)
    return UsageError(
        f"{group}={option}: there is no such option",
        f"use one of {', '.join(options)}" + (f"; {close}" if close else ""),
    )


def _wrong_type(error: Exception, cause: ValidationError) -> UsageError:
    name = str(cause.full_key)
    key = schema.KEYS.get(name)
    typed = re.match(r"Error merging override (.*)", str(error), re.DOTALL)
    what = typed[1] if typed else name
    if key is None:
        return UsageError(f"{what}: {_first_line(cause)}", SEE)
    kind = _TYPES.get(key.type, _list_of(key.type))
    null = " or null" if key.optional else ""
    return UsageError(f"{what} is not {kind}", f"give {name} {kind}{null}")


def _list_of(kind: object) -> str:
    items = typing.get_args(kind)
    return "a list of numbers, as [0.8,0.5]" if float in items else "a list of texts, as [a,b]"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _quoted_part(error: Exception) -> str:
    found = re.search(r"'(.*)'", _first_line(error))
    return found[1] if found else "an override"
