"""What a composed config must satisfy beyond its types; the stages rely on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ds4flow.errors import UsageError, near_match
from ds4flow.schema import GROUPS, KEYS, ROLES, Key

SEE = "see what there is with: ds4flow run --cfg job"


def check(config: DictConfig) -> None:
    """Raise UsageError for an unknown key, and for a value missing or out of its limits."""
    used = {name for role in ROLES for name in config.pipeline[role]}
    used.update(config.pipeline.on_gpu or ())
    for name in used:
        if not OmegaConf.is_dict(config.get(name)):
            groups = [str(key) for key in config if OmegaConf.is_dict(config.get(key))]
            raise UsageError(
                f"the pipeline names the stage {name!r}, which has no config group",
                near_match(name, groups) or f"add a file {name}/default.yaml",
            )
    for group in GROUPS:
        if _is_removed(config, group):
            if group in used:
                raise UsageError(
                    f"the pipeline names the stage {group}, whose group was removed",
                    f"leave ~{group} out, or take {group} out of the pipeline",
                )
            continue
        for key in config[group]:
            if f"{group}.{key}" not in KEYS:
                raise unknown_key(f"{group}.{key}")
        _check_keys(config, (key for key in KEYS.values() if key.name.startswith(f"{group}.")))
    _check_keys(config, (key for key in KEYS.values() if "." not in key.name))
    if not re.fullmatch(r"\w[\w.-]*", config.name):
        raise UsageError(
            f"name={config.name} cannot name a folder", "use letters, digits, dots, - and _"
        )


def unknown_key(name: str) -> UsageError:
    """The error for a key that no group has."""
    return UsageError(f"there is no key {name}", near_match(name, {*KEYS, *GROUPS}) or SEE)


def _is_removed(config: DictConfig, group: str) -> bool:
    """`~GROUP` on the command line leaves the empty shape of the group behind."""
    if group not in config:
        return True
    return f"{group}._target_" in KEYS and OmegaConf.is_missing(config[group], "_target_")


def _check_keys(config: DictConfig, keys: Iterator[Key]) -> None:
    for key in keys:
        group, _, leaf = key.name.rpartition(".")
        node = config[group] if group else config
        link = key.limits.link
        if OmegaConf.is_missing(node, leaf):
            raise UsageError(f"{key.name} has no value", f"type {key.name}=VALUE")
        absent = key.limits.absent and node[leaf] is None
        if link and not absent and not OmegaConf.is_interpolation(node, leaf):
            raise UsageError(f"{key.name} follows {link}", f"set {link} instead")
        problem = "" if node[leaf] is None else _problem(key, node[leaf])
        if problem:
            raise UsageError(f"{key.name}={node[leaf]} {problem}", _advice(key, node[leaf]))


def _problem(key: Key, value: Any) -> str:
    low, high, open_low, choices, *_ = key.limits
    if value in key.limits.words:
        return ""
    if key.limits.words and isinstance(value, str):
        return "is not an integer"
    if choices and value not in choices:
        return "is not one of its choices"
    if low is not None and not (value > low if open_low else value >= low):
        return "is too small" if value == value else "is not a number"
    if high is not None and not value <= high:
        return "is too large"
    return ""


def _advice(key: Key, value: Any) -> str:
    low, high, open_low, choices, hint, _, words, _ = key.limits
    if hint:
        return hint
    also = "".join(f", or {word}" for word in words)
    if isinstance(value, str) and words:
        return f"give {key.name} an integer from {low:g} to {high:g}{also}"
    if choices:
        close = near_match(str(value), choices)
        return f"use one of {', '.join(choices)}" + (f"; {close}" if close else "")
    if high is None:
        return f"use a value of {low:g} or more{also}"
    return f"use a value from {'above ' if open_low else ''}{low:g} to {high:g}{also}"
