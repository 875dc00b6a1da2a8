"""From a checked config to what runs: the stages of its pipeline, and its prompt."""

from __future__ import annotations

import copy
import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from ds4flow.errors import Ds4FlowError, UsageError, near_match
from ds4flow.pipeline import Pipeline, Stage
from ds4flow.schema import ROLES


def build_pipeline(config: DictConfig) -> Pipeline:
    """Make the stages that the checked `config` names, each once, and wire them; UsageError."""
    return Wiring.of(config).build()


class Wiring(NamedTuple):
    """The stages of a config with their values resolved, from which pipelines can be made."""

    stages: dict[str, tuple[type[Stage], dict[str, Any]]]
    roles: dict[str, list[str]]
    note: str = ""

    @classmethod
    def of(cls, config: DictConfig) -> Wiring:
        """Look the stages of a checked config up; UsageError."""
        roles = {role: list(config.pipeline[role]) for role in ROLES}
        note = ""
        if config.pipeline.on_gpu:
            instead, note = _on_gpu(config)
            roles["cycle"] = instead or roles["cycle"]
        names = dict.fromkeys(name for role in ROLES for name in roles[role])
        return cls({name: _stage_values(name, config) for name in names}, roles, note)

    def build(self) -> Pipeline:
        """Make new stages, and wire them; UsageError."""
        stages = {name: _build_stage(name, *parts) for name, parts in self.stages.items()}
        return Pipeline(stages, **self.roles, note=self.note)


def _on_gpu(config: DictConfig) -> tuple[list[str], str]:
    """`pipeline.on_gpu` if it can be captured here, else nothing; and why not, where a GPU is used.

    Raises what choosing the device raises.
    """
    from ds4flow.device import choose, graph_obstacle  # torch is slow to import

    runtime, processes = config.runtime, config.runtime.tensor_parallel
    choice = choose(runtime.device, runtime.kernels, no_gpu=runtime.no_gpu, processes=processes)
    if choice.name != "cuda":
        return [], ""
    instead = list(config.pipeline.on_gpu)
    obstacle = graph_obstacle(choice, processes)
    for name in instead:
        stage, values = _stage_values(name, config)
        obstacle = obstacle or stage.unfit(values)
    return [] if obstacle else instead, obstacle


def _stage_values(name: str, config: DictConfig) -> tuple[type[Stage], dict[str, Any]]:
    values: Any = OmegaConf.to_container(config[name], resolve=True)
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        raise UsageError(f"the group {name} has no _target_", "name its class, as module.Class")
    cls = _stage_class(name, target)
    keys = [item.name for item in fields(cls) if item.init]
    for key in list(values):
        if values[key] is None and key not in keys:
            del values[key]  # a field that only other options of the group have
        elif key not in keys:
            raise UsageError(
                f"{name}.{key} is not a key of {target}",
                near_match(key, keys) or f"it has {', '.join(keys) or 'no keys'}",
            )
    return cls, values


def _build_stage(name: str, cls: type[Stage], values: dict[str, Any]) -> Stage:
    try:
        return cls(**copy.deepcopy(values))
    except TypeError as error:
        raise UsageError(f"stage {name}: {error}", f"complete the YAML of {name}") from None


def _stage_class(name: str, target: str) -> type[Stage]:
    module, _, cls_name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), cls_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"stage {name}: cannot import {target} ({error})",
            "correct its _target_, or put its folder on PYTHONPATH",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UsageError(f"stage {name}: {target} is not a Stage", "derive it from Stage")
    return cls


def read_prompt(config: DictConfig) -> str:
    """The text to continue: `prompt`, or the content of `prompt_file`. Never empty."""
    text = str(config.prompt)
    if config.prompt_file is not None:
        try:
            text = Path(config.prompt_file).read_bytes().decode()
        except OSError as error:
            raise Ds4FlowError(
                f"prompt_file={config.prompt_file} cannot be read: {error.strerror}",
                "check the path",
            ) from None
        except UnicodeDecodeError as error:
            raise Ds4FlowError(
                f"prompt_file={config.prompt_file} is not UTF-8 text: byte {error.start}",
                "save it as UTF-8",
            ) from None
    if not text:
        raise Ds4FlowError("the prompt is empty", "give one with -p TEXT or prompt_file=FILE")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Ds4FlowError("the prompt is not valid UTF-8", "give the text as UTF-8") from None
    return text
