"""Where every value of a run came from: default, group, preset, command line, flag or variable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, ListConfig, OmegaConf

from ds4flow import schema
from ds4flow.overrides import PROVENANCE, key_of

PARENT = "parent"
"""The config key under which a replay names the run that it repeats."""


def provenance(config: DictConfig, hydra: HydraConf) -> dict[str, dict[str, Any]]:
    """`{key: {"value", "source"}}` of every leaf of a composed config, in order.

    `hydra` is Hydra's own node of the same run. Fields that follow another key are left out.
    """
    carried = dict(config.get(PROVENANCE) or {})
    typed = {key_of(word) for word in hydra.overrides.task}
    choices = dict(hydra.runtime.choices)
    shipped = _shipped_choices(hydra)
    preset_name = choices.get("experiment")
    preset = _preset_keys(hydra, preset_name) if preset_name else set()

    def source(key: str) -> str:
        for name in _upwards(key):
            if name in carried:
                return str(carried[name])
            if name in typed and name not in choices:
                return "cli"
        if any(name in preset for name in _upwards(key)):
            return f"preset {preset_name}"
        group = key.partition(".")[0]
        if choices.get(group) != shipped.get(group):
            return f"group {group}={choices[group]}"
        return "default"

    return {
        key: {"value": value, "source": source(key)}
        for key, value in leaves(config)
        if key.partition(".")[0] not in (PROVENANCE, PARENT) and not follows(key)
    }


def leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its resolved value; a list is one value."""
    for key in map(str, config):
        value = config[key]
        if isinstance(value, DictConfig) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, DictConfig | ListConfig):
            yield f"{prefix}{key}", OmegaConf.to_container(value, resolve=True)
        else:
            yield f"{prefix}{key}", value


def follows(key: str) -> bool:
    """Whether a key takes its value from another key, and can be set there only."""
    keys = (schema.KEYS[name] for name in _upwards(key) if name in schema.KEYS)
    return any(key.limits.link for key in keys)


def _upwards(key: str) -> Iterable[str]:
    parts = key.split(".")
    return (".".join(parts[:size]) for size in range(len(parts), 0, -1))


def _shipped_choices(hydra: HydraConf) -> dict[str, str]:
    """The options of the root config; of a sweep, of the copy that it composes from."""
    sources: Iterable[Any] = hydra.runtime.config_sources
    main = next(one for one in sources if one["provider"] == "main")
    text = (_folder(main) / "config.yaml").read_text(encoding="utf-8")
    defaults = OmegaConf.create(text).defaults
    return {
        str(group): option
        for entry in defaults
        if isinstance(entry, DictConfig)
        for group, option in entry.items()
    }


def _preset_keys(hydra: HydraConf, name: str) -> set[str]:
    """Dotted keys that a preset sets, itself or by the presets it builds on."""
    for origin in hydra.runtime.config_sources:
        root = _folder(origin)
        file = root / "experiment" / f"{name}.yaml" if root is not None else None
        if file is not None and file.is_file():
            content = OmegaConf.create(file.read_text(encoding="utf-8"))
            below = [one for one in content.pop("defaults", []) if isinstance(one, str)]
            keys = {key for key, _ in _raw_leaves(OmegaConf.to_container(content))}
            return keys.union(*(_preset_keys(hydra, one) for one in below if one != "_self_"))
    return set()


def _folder(origin: Any) -> Any:
    if origin["schema"] == "pkg":
        return resources.files(origin["path"])
    return Path(origin["path"]) if origin["schema"] == "file" else None


def _raw_leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _raw_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
