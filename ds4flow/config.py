"""Composing and checking a run's config, from Python and from the command line.

Every mistake that a user can make in a config is a UsageError of two lines, Hydra's own included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Transformer, ValueType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ds4flow import schema
from ds4flow.checks import check
from ds4flow.errors import UsageError
from ds4flow.explain import explained
from ds4flow.overrides import key_of

CONF = "ds4flow.conf"

_CHOOSES_STAGES = re.compile(r"(pipeline|experiment|hydra\.searchpath)\b")
_CHOOSES_MODE = re.compile(r"(experiment|hydra\.searchpath|hydra\.mode)\b")

ConfigStore.instance().store(name="schema", node=schema.root_node(), provider="ds4flow")


def compose(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    hydra: bool = False,
    shipped: Path | None = None,
) -> DictConfig:
    """Compose and check the config of one run.

    `overrides` are Hydra's, as `ds4flow.overrides.literal` makes them; `config_dir` is searched
    beside the shipped YAML, for which a copy may stand in (`shipped`, as a sweep keeps one). With
    `hydra` the result keeps Hydra's own node. Raises UsageError.
    """
    with initialized(config_dir, shipped=shipped), explained():
        full = _compose(overrides)
        config = full.copy()
        with open_dict(config):
            del config["hydra"]
        check(config)
        OmegaConf.to_container(config, resolve=True)  # an interpolation to nowhere fails here
    return full if hydra else config


def validate(
    overrides: Sequence[str], *, config_dir: str | Path | None = None, multirun: bool = False
) -> tuple[list[str], DictConfig]:
    """Check every value of a command line before anything runs.

    Returns the overrides with the groups of further stages added, and the config of the first job.
    """
    words, configs = validate_all(overrides, config_dir=config_dir, multirun=multirun)
    return words, configs[0]


def validate_all(
    overrides: Sequence[str], *, config_dir: str | Path | None = None, multirun: bool = False
) -> tuple[list[str], list[DictConfig]]:
    """`validate`, with all configs that were composed: each value of a sweep once (see `points`).

    The first one, with the first value of each swept key, has Hydra's node.
    """
    added: list[str] = []
    try:
        configs = _compose_all(overrides, config_dir, multirun=multirun)
    except UsageError:
        with initialized(config_dir), explained():
            found = list(_points(overrides, multirun=multirun))
            further = config_dir is not None
            added = [f"+{name}=default" for name in _missing_groups(found, further=further)]
        if not added:
            raise
        configs = _compose_all([*overrides, *added], config_dir, multirun=multirun)
    return [*overrides, *added], configs


def asks_for_sweep(overrides: Sequence[str], *, config_dir: str | Path | None = None) -> bool:
    """Whether the preset that the overrides choose is a sweep (it sets `hydra.mode: MULTIRUN`).

    False for overrides that cannot be composed; `validate` says what is wrong with them.
    """
    choosing = [word for word in overrides if _CHOOSES_MODE.match(key_of(word))]
    if not choosing:
        return False
    try:
        with initialized(config_dir), explained():
            return _compose(choosing).hydra.mode == RunMode.MULTIRUN
    except UsageError:
        return False


def sweep_words(overrides: Sequence[str], composed: DictConfig) -> list[str]:
    """The overrides of a sweep, after those that a preset gives the sweeper (`params`).

    What is typed replaces the preset's word for the same key. `composed` is the config of any job,
    with Hydra's node.
    """
    params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    typed = {key_of(word) for word in overrides}
    return [f"{key}={value}" for key, value in params.items() if key not in typed] + list(overrides)


def swept(words: Sequence[str]) -> dict[str, list[str]]:
    """`{key: values}` of the words that sweep, slowest first; of an interval, its one spelling.

    As for Hydra, the last word for a key counts, in the place of the first.
    """
    with explained():
        parsed = OverridesParser.create().parse_overrides(list(words))
        last = {key_of(str(one.input_line)): one for one in parsed}
        return {
            key: [word.partition("=")[2] for word in _choices(one)]
            or [str(one.input_line).partition("=")[2]]
            for key, one in last.items()
            if one.is_sweep_override()
        }


def points(words: Sequence[str]) -> list[list[str]]:
    """Overrides that together try each value of a sweep once, the others at their first."""
    with explained():
        return list(_points(words, multirun=True))


def _compose_all(
    overrides: Sequence[str], config_dir: str | Path | None, *, multirun: bool
) -> list[DictConfig]:
    """Compose every point, to find mistakes; the first with Hydra's node."""
    with explained():
        found = list(_points(overrides, multirun=multirun))
    first = compose(found[0], config_dir=config_dir, hydra=True)
    words = sweep_words(overrides, first) if multirun else list(overrides)
    if words != list(overrides):
        with explained():
            found = list(_points(words, multirun=True))
        first = compose(found[0], config_dir=config_dir, hydra=True)
    return [first, *(compose(point, config_dir=config_dir) for point in found[1:])]


@contextmanager
def initialized(
    config_dir: str | Path | None = None, *, shipped: Path | None = None
) -> Iterator[None]:
    """Hydra with the shipped YAML and `config_dir`, as its own `--config-dir` would have it.

    `shipped`: a copy of the shipped YAML. Raises UsageError when `config_dir` is not a folder.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UsageError(f"--config-dir {config_dir} is not a folder", "give a folder with YAML")
    hydra: AbstractContextManager[None] = (
        initialize_config_module(CONF, version_base="1.3")
        if shipped is None
        else initialize_config_dir(str(shipped.resolve()), version_base="1.3")
    )
    with hydra:
        if config_dir is not None:
            _search_also(os.path.abspath(config_dir))
        yield


def _search_also(folder: str) -> None:
    """What Hydra does for `--config-dir`, and has no other way to ask for."""
    path = GlobalHydra.instance().config_loader().get_search_path()
    path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("ds4flow", path)


def _compose(overrides: Sequence[str]) -> DictConfig:
    return hydra_compose("config", overrides=list(overrides), return_hydra_config=True)


def _points(overrides: Sequence[str], *, multirun: bool) -> Iterator[list[str]]:
    """The overrides without sweeps: all at their first values, then every other value once."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [_choices(one) if multirun else [str(one.input_line)] for one in parsed]
    first = [words[:1] for words in choices]
    yield [word for words in first for word in words]
    for index, words in enumerate(choices):
        for other in words[1:]:
            changed = [*first[:index], [other], *first[index + 1 :]]
            yield [word for words in changed for word in words]


def _choices(override: Override) -> list[str]:
    """What a sweep over one key tries; nothing where only the sweeper or the file system knows."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    values = override.sweep_iterator(transformer=Transformer.encode)
    return [f"{override.get_key_element()}={value}" for value in values]


def _missing_groups(points: Sequence[Sequence[str]], *, further: bool) -> list[str]:
    """Stages that a pipeline names and that have a group, but no place in the config yet.

    `further`: there is YAML beside the shipped one.

    They are added, so that a new stage needs one name in a pipeline YAML and no second one in a
    defaults list.
    """
    names: dict[str, None] = {}
    for point in points:
        choosing = [word for word in point if _CHOOSES_STAGES.match(key_of(word))]
        if choosing or further:
            config = _compose(choosing)
            named = [name for role in schema.ROLES for name in config.pipeline[role]]
            named += config.pipeline.on_gpu or []
            names |= dict.fromkeys(name for name in named if name not in config)
    return [name for name in names if not any(key_of(w) == name for w in points[0])]
