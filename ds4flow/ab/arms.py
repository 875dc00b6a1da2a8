"""The two arms of a comparison: from words or YAML files to checked configs.

Both are composed and checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from ds4flow import schema
from ds4flow.config import validate
from ds4flow.env import Variable
from ds4flow.errors import UsageError
from ds4flow.overrides import Flag, assemble, key_of, quoted
from ds4flow.provenance import provenance

NAMES = ("A", "B")  # the baseline and the candidate


@dataclass(frozen=True)
class Arm:
    """One arm: `words` are its own overrides, `facts` what its runs record of the config."""

    name: str
    title: str
    words: tuple[str, ...]
    config: DictConfig
    facts: dict[str, Any]
    notices: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Every key of the resolved config with its value."""
        return {key: item["value"] for key, item in self.facts["config"].items()}


def make_arms(
    words: Sequence[str],
    flags: Sequence[Flag],
    after_dashes: Sequence[Sequence[str]],
    variables: Sequence[Variable],
    *,
    config_dir: str | None = None,
) -> tuple[tuple[Arm, Arm], str]:
    """The arms, and the template of the directory for their runs.

    `words` are common overrides and, without `after_dashes`, the two YAML files; `flags` are common
    too, and what an arm sets itself counts more than either. UsageError for anything that does not
    make two arms, and for what is wrong in a config, naming the arm.
    """
    common = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word]
    if after_dashes:
        if files or len(after_dashes) != 2:
            what = f"{files[0]!r} stands before --" if files else f"there are {len(after_dashes)}"
            raise UsageError(
                f"a comparison has two arms after --, but {what}",
                "type ds4flow ab [KEY=VALUE].. -- mtp.draft=0 -- mtp.draft=2",
            )
        own = [(" ".join(arm) or "as it is", list(arm)) for arm in after_dashes]
    elif len(files) == 2:
        own = [(file, words_of_file(file)) for file in files]
    else:
        raise UsageError(
            f"a comparison has two arms, but {len(files)} YAML files were given",
            "type ds4flow ab A.yaml B.yaml, or ds4flow ab -- mtp.draft=0 -- mtp.draft=2",
        )
    for variable in variables:
        if any(key_of(word) == variable.key for _, arm in own for word in arm):
            raise UsageError(
                f"{variable.name}={variable.value} would override {variable.key} of the arms",
                f"unset {variable.name}",
            )
    (first, template), (second, _) = (
        _arm(name, title, common, flags, arm, variables, config_dir)
        for name, (title, arm) in zip(NAMES, own, strict=True)
    )
    return (first, second), template


def _arm(
    name: str,
    title: str,
    common: Sequence[str],
    flags: Sequence[Flag],
    own: Sequence[str],
    variables: Sequence[Variable],
    config_dir: str | None,
) -> tuple[Arm, str]:
    """An arm, and the template of its run directory."""
    keys = {key_of(word) for word in own}
    words = [word for word in common if key_of(word) not in keys]
    flags = [flag for flag in flags if flag.key not in keys]
    try:
        merged, notices = assemble([*words, *own], flags, variables)
        _, full = validate(merged, config_dir=config_dir)
        template = str(OmegaConf.select(full, "hydra.run.dir"))
    except UsageError as error:
        raise UsageError(f"arm {name} ({title}): {error.what}", error.fix) from None
    node = full.hydra
    config = full.copy()
    with open_dict(config):
        del config["hydra"]
    found = provenance(config, node)
    for key in keys & set(found):
        found[key]["source"] = f"arm {name}: {title}"
    choices = OmegaConf.to_container(node.runtime.choices)
    assert isinstance(choices, dict)
    facts = {
        "config": found,
        "choices": {k: v for k, v in choices.items() if not str(k).startswith("hydra/")},
    }
    return Arm(name, title, tuple(own), config, facts, tuple(notices)), template


def differing(first: Arm, second: Arm) -> dict[str, tuple[Any, Any]]:
    """Keys whose values are not the same in both arms; empty when the arms are one."""
    a, b = first.values, second.values
    return {
        key: (a.get(key), b.get(key))
        for key in dict.fromkeys((*a, *b))
        if a.get(key) != b.get(key) or (key in a) != (key in b)
    }


# --- YAML files of overrides ----------------------------------------------------------------------


def words_of_file(path: str) -> list[str]:
    """The overrides in a YAML file, flat (`mtp.draft: 2`) or nested (`mtp: {draft: 2}`)."""
    try:
        content = yaml.safe_load(Path(path).read_bytes().decode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            "give two YAML files of overrides, or write the arms after --",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: byte {error.start}", "save it as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UsageError(f"{path}{place}: {problem}", "write KEY: VALUE lines") from None
    if content is not None and not isinstance(content, dict):
        raise UsageError(
            f"{path} holds a {type(content).__name__}, not keys with values",
            "write KEY: VALUE lines, such as mtp.draft: 2",
        )
    return [_word(path, key, value) for key, value in _flat(path, content or {})]


def _flat(path: str, content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name == "defaults":
            raise UsageError(
                f"{path}: an arm has no defaults list", "choose a preset by experiment: NAME"
            )
        if isinstance(value, dict):
            yield from _flat(path, value, f"{name}.")
        else:
            yield name, value


def _word(path: str, key: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"{key}=[{','.join(quoted(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    if isinstance(value, int | float):
        return f"{key}={value!r}"
    if not isinstance(value, str):
        raise UsageError(
            f"{path}: {key} is a {type(value).__name__}", "give a text, a number, a boolean or null"
        )
    known = schema.KEYS.get(key)
    is_group = known is None and "." not in key
    if is_group or (known is not None and known.type is str and not known.limits.choices):
        return f"{key}={value}"  # an option, or a text, which is taken literally
    return f"{key}={quoted(value)}"
