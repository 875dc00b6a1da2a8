"""What would now be composed for a sweep, against what it was begun with, key by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ds4flow.config import compose, points, sweep_words, swept
from ds4flow.overrides import PROVENANCE, key_of, quoted
from ds4flow.provenance import leaves
from ds4flow.runs.sweep import Sweep
from ds4flow.schema import KEYS
from ds4flow.sweeps import inputs, snapshot

_MAY_CHANGE = ("n_trials", "max_failure_rate", "params")
"""Of a sweeper: how long it goes on. Its params are compared as the sweep that they are."""


def differences(sweep: Sweep, words: Sequence[str], configs: Sequence[DictConfig]) -> list[str]:
    """`KEY is NOW, was THEN` for everything that differs; empty when the sweep can go on.

    `words` and `configs` are what `validate_all` made of the command line of today.
    """
    folder = (sweep.path / snapshot.FOLDER).resolve()
    further = [f"file://{folder / name}" for name in sweep.facts["yaml"]]
    frozen = [word for word in sweep.facts["overrides"] if key_of(word) != "hydra.searchpath"]
    if further:
        frozen.append(f"hydra.searchpath=[{','.join(map(quoted, further))}]")
    shipped = folder / snapshot.SHIPPED
    begun = compose(points(frozen)[0], hydra=True, shipped=shipped)
    then = sweep_words(frozen, begun)
    found = _compared(swept(then), swept(sweep_words(words, configs[0])))
    if found:
        return found
    before = [compose(point, shipped=shipped) for point in points(then)]
    found = _compared(_sweeper(begun), _sweeper(configs[0]))
    for old, new in zip(before, configs, strict=True):
        found += [line for line in _compared(_flat(old), _flat(new)) if line not in found]
        for key, path in inputs.changed(sweep.facts.get("inputs", {}), new).items():
            line = f"the file {path} of {key} has changed"
            found += [line] if line not in found else []
    return found


def _compared(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    missing = "not there"
    return [
        f"{key} is {_text(now.get(key, missing))}, was {_text(then.get(key, missing))}"
        for key in {**then, **now}
        if then.get(key, missing) != now.get(key, missing)
    ]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _flat(config: DictConfig) -> dict[str, Any]:
    """Every key of a job's config that can be set, without sources and Hydra's own part."""
    names = [str(key) for key in config if key not in (PROVENANCE, "hydra")]
    found = leaves(OmegaConf.masked_copy(config, names))
    return {key: value for key, value in found if not (key in KEYS and KEYS[key].limits.link)}


def _sweeper(config: DictConfig) -> dict[str, Any]:
    node: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    return {f"hydra.sweeper.{key}": value for key, value in node.items() if key not in _MAY_CHANGE}
