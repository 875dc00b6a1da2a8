"""What a replay hands to Hydra: words that make today's config the one that a run recorded.

A key that no longer exists is refused by name, and every value keeps where it came from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig

from ds4flow import env, prompt_set, schema
from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError, UsageError, near_match
from ds4flow.overrides import PROVENANCE, key_of, literal, quoted
from ds4flow.provenance import PARENT, follows, leaves
from ds4flow.runs.record import PROMPTS, Run

_PLACES = ("download", "hydra", "name", "log", "trace")
"""Keys and groups that say where things lie or what is kept and shown, never what comes out."""


class Plan(NamedTuple):
    """What a replay hands to Hydra: overrides, lines to say first, and whether it is the same."""

    words: list[str]
    notices: list[str]
    same: bool  # no override of what could change the output


def make_plan(
    run: Run,
    name: str,
    typed: Sequence[str],
    *,
    drop: Sequence[str] = (),
    config_dir: str | None = None,
) -> Plan:
    """The overrides that make today's config the one that `run` recorded, `typed` ones aside.

    Only what today's defaults do not give is written out. A DS4_* variable overrides as it does in
    `ds4flow run`, and is named. Raises UsageError for keys that no longer exist.
    """
    recorded = _recorded(run, name)
    overrides = [literal(word) for word in typed]
    typed_keys = {key_of(word) for word in overrides}
    groups = _group_words(run, typed_keys, config_dir)
    search = _search_path(run, typed_keys)
    today = _flat(compose([*search, *groups, *overrides], config_dir=config_dir))
    kept = {
        key: value
        for key, value in recorded.items()
        if not _is_given(key, typed_keys) and key not in drop and not _is_wiring(run, key)
    }
    _refuse_gone(kept, recorded, today, drop, name)
    words = {key: f"{key}={spelled(value)}" for key, value in kept.items() if today[key] != value}
    sources = {key: f"{name}: {run.origins[key]}" for key in words}
    notices = _new_keys(recorded, today, name)
    changed_by = [key for key in typed_keys if key.partition(".")[0] not in _PLACES]
    for variable in env.read():
        loser = next((word for word in overrides if key_of(word) == variable.key), None)
        if loser is None and spelled(recorded.get(variable.key)) == variable.value:
            continue
        loser = loser or f"{variable.key}={spelled(recorded.get(variable.key))} of {name}"
        notices.append(f"{variable.name}={variable.value} overrides {loser}")
        overrides = [word for word in overrides if key_of(word) != variable.key]
        words[variable.key] = f"{variable.key}={variable.value}"
        sources[variable.key] = f"env {variable.name} over {loser}"
        if variable.key.partition(".")[0] not in _PLACES:
            changed_by.append(variable.key)
    pairs = ",".join(f"{key}:{quoted(source)}" for key, source in sources.items())
    return Plan(
        [
            *search,
            *groups,
            *words.values(),
            *overrides,
            *([f"+{PROVENANCE}={{{pairs}}}"] if pairs else []),
            f"+{PARENT}={{{_parent(run)}}}",
        ],
        notices,
        not changed_by,
    )


def _parent(run: Run) -> str:
    facts = {"path": str(run.path.resolve()), "started": str(run.facts.get("started"))}
    return ",".join(f"{key}:{quoted(value)}" for key, value in facts.items())


def _recorded(run: Run, name: str) -> dict[str, Any]:
    """The config of a run, with the prompt itself instead of a file that may have changed since."""
    if not run.config or not isinstance(run.facts.get("choices"), dict):
        raise Ds4FlowError(
            f"{name} did not record its config, so it cannot be replayed",
            "runs of ds4flow run can be replayed",
        )
    config = dict(run.config)
    if run.part and not config.get("prompt"):
        raise UsageError(
            f"{name} is a conversation, which a set of prompts alone can hold",
            f"replay the set: {run.path.parent}",
        )
    if config.get("prompt_file") is not None:
        config |= {"prompt": run.prompt, "prompt_file": None}
    if config.get("prompts") is not None and not _is_todays_set(run, config):
        config["prompts"] = str((run.path / PROMPTS).resolve())
    return config


def _is_todays_set(run: Run, config: dict[str, Any]) -> bool:
    """Whether the set of prompts that a run names is still the one that it ran."""
    try:
        found = prompt_set.read(config["prompts"], mode=config["model.chat"])
    except Ds4FlowError:
        return False
    return found.data == (run.path / PROMPTS).read_bytes()


def _group_words(run: Run, typed: set[str], config_dir: str | None) -> list[str]:
    """Today's defaults turned into the options that the run chose. Presets are values by now."""
    shipped = _shipped_choices(config_dir)
    return [
        f"{'' if group in shipped else '+'}{group}={spelled(option)}"
        for group, option in run.facts["choices"].items()
        if option is not None
        and group != "experiment"
        and group not in typed
        and shipped.get(group) != option
    ]


@functools.cache
def _shipped_choices(config_dir: str | None) -> dict[str, Any]:
    """Today's option of every group."""
    return dict(compose([], config_dir=config_dir, hydra=True).hydra.runtime.choices)


def _recorded_hydra(run: Run) -> dict[str, Any]:
    folder = run.path.parent if run.part else run.path
    try:
        content = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    found = content.get("hydra") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def recorded_config_dir(run: Run) -> str | None:
    """The --config-dir that the run was given."""
    sources = (_recorded_hydra(run).get("runtime") or {}).get("config_sources") or ()
    for source in sources:
        if source.get("provider") == "command-line" and source.get("schema") == "file":
            return str(source["path"])
    return None


def _search_path(run: Run, typed: set[str]) -> list[str]:
    paths = _recorded_hydra(run).get("searchpath")
    if not paths or "hydra.searchpath" in typed:
        return []
    return [f"hydra.searchpath={spelled(paths)}"]


def _flat(config: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in leaves(config) if not follows(key)}


def _is_wiring(run: Run, key: str) -> bool:
    """Whether a key is the class behind a group's option, which no user chose."""
    return key.endswith("._target_") and run.origins[key].partition(" ")[0] in ("default", "group")


def _is_given(key: str, typed: set[str]) -> bool:
    """Whether an override names the key itself or a group that it lies in."""
    parts = key.split(".")
    return any(".".join(parts[:size]) in typed for size in range(1, len(parts) + 1))


def _refuse_gone(
    kept: dict[str, Any],
    recorded: dict[str, Any],
    today: dict[str, Any],
    drop: Iterable[str],
    name: str,
) -> None:
    for key in drop:
        if key not in recorded:
            raise UsageError(
                f"--drop {key}: {name} has no such key", near_match(key, recorded) or "leave it out"
            )
    gone = [key for key in kept if key not in today]
    if not gone:
        return
    fix = "leave out with " + " ".join(f"--drop {key}" for key in gone)
    for key in gone:
        hint = near_match(key, schema.KEYS.keys() - recorded.keys())
        if hint:
            fix += f"; for {key}={spelled(kept[key])}, {hint} type it as well"
    raise UsageError(f"{name} was made with {', '.join(gone)}, which no longer exist", fix)


def _new_keys(recorded: dict[str, Any], today: dict[str, Any], name: str) -> list[str]:
    fresh = [key for key in today if key not in recorded]
    if not fresh:
        return []
    return [f"new since {name}, at today's defaults: {', '.join(fresh)}"]


def spelled(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, which reads it back unchanged."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spelled(item)}' for key, item in value.items())}}}"
    return repr(value)
