"""Every option of every group composes and fits its stage; every mistake is two clear lines."""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from ds4flow import config, overrides, schema
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.pipeline import Stage
from ds4flow.wiring import build_pipeline, read_prompt

CONF = Path(__file__).parent.parent / "conf"
STAGES = sorted(path.stem for path in (CONF.parent / "stages").glob("[a-z]*.py"))
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name != "hydra"
]

OBSERVERS = {"mlflow", "tensorboard"}
"""Stages of optional packages: in the config only where a pipeline names them."""


@cache
def with_option(group: str, option: str) -> DictConfig:
    """The config with one option chosen; not to be changed."""
    return config.compose([f"{'+' if group in OBSERVERS else ''}{group}={option}"])


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    assert with_option(group, option).pipeline.cycle


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group, option in OPTIONS if group in STAGES]
)
def test_the_yaml_of_a_stage_has_exactly_its_fields(group: str, option: str) -> None:
    node = with_option(group, option)[group]
    module, _, name = node._target_.rpartition(".")
    assert module == f"ds4flow.stages.{group}"
    cls = getattr(importlib.import_module(module), name)
    assert issubclass(cls, Stage)
    wanted = {item.name for item in fields(cls) if item.init}
    known = {item.name: item for item in fields(schema.GROUPS[group])}
    # a field with a default there is one that only some options of the group have
    others = {name for name, item in known.items() if item.default is None} - wanted
    assert {name for name in node if name not in others} == {"_target_", *wanted}
    assert set(known) == {"_target_", *wanted, *others}
    assert all(node[name] is None for name in others)


def test_each_stage_module_has_a_group_and_a_schema() -> None:
    assert {group for group, _ in OPTIONS} - set(STAGES) - OBSERVERS == {
        "mtp",
        "model",
        "runtime",
        "sampling",
        "objective",
        "pipeline",
        "experiment",
    }
    assert set(STAGES) - {"track"} < set(schema.GROUPS)  # track holds the stages of OBSERVERS


@pytest.mark.parametrize("pipeline", [option for group, option in OPTIONS if group == "pipeline"])
def test_every_pipeline_can_be_built(pipeline: str) -> None:
    build_pipeline(with_option("pipeline", pipeline))


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("mtp.drfat=2", "there is no key mtp.drfat", "did you mean mtp.draft?"),
        ("+mtp.drfat=2", "there is no key mtp.drfat", "did you mean mtp.draft?"),
        ("modle=file", "there is no key modle", "did you mean model?"),
        ("model=dmeo", "model=dmeo: there is no such option", "did you mean demo?"),
        ("mtp.draft=abc", "mtp.draft=abc is not an integer", "give mtp.draft an integer"),
        ("mtp.draft=1.5", "mtp.draft=1.5 is not an integer", "give mtp.draft an integer"),
        ("mtp.draft=true", "mtp.draft=true is not an integer", "give mtp.draft an integer"),
        ("mtp.strict=maybe", "mtp.strict=maybe is not true or false", "true or false"),
        ("mtp.draft=17", "mtp.draft=17 is too large", "use a value from 0 to 16"),
        ("mtp.draft=-1", "mtp.draft=-1 is too small", "use a value from 0 to 16"),
        ("mtp.margin=3", "mtp.margin=3.0 is too large", "mtp.gate"),
        ("mtp.margin=0", "mtp.margin=0.0 is too small", "mtp.gate"),
        ("mtp.margin=nan", "mtp.margin=nan is not a number", "mtp.gate"),
        ("mtp.gate=-1", "mtp.gate=-1.0 is too small", "use a value of 0 or more"),
        ("sampling.temperature=-1", "sampling.temperature=-1.0 is too small", "0 or more"),
        ("draft.depth=3", "draft.depth follows mtp.draft", "set mtp.draft instead"),
        ("runtime.kernels=cup", "runtime.kernels=cup is not one of", "did you mean cpu?"),
        ("commit.stop=5", "commit.stop=5 is not a list of texts", "a list of texts"),
        ("mtp.draft=0,1", "mtp.draft=0,1 has several values", "--multirun"),
        ("hello", "'hello' is neither a flag nor key=value", "-p"),
        ("mtp.draft=[1", "the value of mtp.draft cannot be read: [1", "quote"),
        ("mtp=1", "a group was given a value that is not a name", "GROUP=OPTION"),
        ("~log", "the pipeline names the stage log, whose group was removed", "~log"),
        ("name=../x", "name=../x cannot name a folder", "letters"),
        ("hydra.foo=1", "there is no key hydra.foo", "--cfg job"),
        ("hydra/launcher=nope", "hydra/launcher=nope: there is no such option", "basic"),
    ],
)
def test_mistakes(word: str, what: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.compose([word])
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert "\n" not in caught.value.what + caught.value.fix


def test_precedence_of_yaml_preset_command_line(tmp_path: Path) -> None:
    """The environment comes on top of these: tests/test_overrides.py and tests/test_cli.py."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\nmtp: {draft: 3}\n")
    preset = ["experiment=mine"]
    assert config.compose().mtp.draft == 1
    assert config.compose(preset, config_dir=tmp_path).mtp.draft == 3
    assert config.compose([*preset, "mtp.draft=5"], config_dir=tmp_path).mtp.draft == 5


def test_a_preset_with_a_wrong_key_names_it(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    preset = tmp_path / "experiment" / "mine.yaml"
    preset.write_text("# @package _global_\nmtp: {drafts: 3}\n")
    with pytest.raises(UsageError, match=r"there is no key mtp\.drafts") as caught:
        config.compose(["experiment=mine"], config_dir=tmp_path)
    assert caught.value.fix == "did you mean mtp.draft?"
    preset.write_text("mtp: {draft: [\n")
    with pytest.raises(UsageError):
        config.compose(["experiment=mine"], config_dir=tmp_path)


def test_every_value_of_a_sweep_is_checked_before_it_starts() -> None:
    with pytest.raises(UsageError, match=r"mtp\.draft=99"):
        config.validate(["mtp.draft=0,1,99", "mtp.margin=1.0,0.5"], multirun=True)
    with pytest.raises(UsageError, match="no such option"):
        config.validate(["model=demo,dmeo"], multirun=True)
    words, first = config.validate(["mtp.draft=range(2,5)"], multirun=True)
    assert words == ["mtp.draft=range(2,5)"]
    assert first.mtp.draft == 2


@pytest.mark.parametrize("text", ["${x}", "a: {b}, [c]", "null", "1", "it's", "", "\\", "\n \n"])
def test_texts_reach_the_config_and_a_saved_copy(text: str) -> None:
    composed = config.compose([overrides.literal(f"prompt={text}")])
    assert composed.prompt == text
    assert OmegaConf.create(OmegaConf.to_yaml(composed)).prompt == text


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    def prompt(*words: str) -> str:
        return read_prompt(config.compose([overrides.literal(word) for word in words]))

    with pytest.raises(Ds4FlowError, match="the prompt is empty"):
        prompt("prompt=")
    with pytest.raises(Ds4FlowError, match="cannot be read"):
        prompt(f"prompt_file={tmp_path / 'missing'}")
    file = tmp_path / "a, b = {c}.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(Ds4FlowError, match="is not UTF-8 text: byte 0"):
        prompt(f"prompt_file={file}")
    file.write_bytes("zwei\r\nZeilen ü".encode())
    assert prompt(f"prompt_file={file}") == "zwei\r\nZeilen ü"


@pytest.mark.parametrize(
    ("yaml", "what"),
    [
        ("_target_: nowhere.Shout", "cannot import nowhere.Shout"),
        ("_target_: ds4flow.errors.UsageError", "is not a Stage"),
        ("depth: 1", "has no _target_"),
        ("_target_: ds4flow.stages.commit.Commit\nmax_token: 1", "shout.max_token is not a key"),
        ("_target_: ds4flow.stages.commit.Commit\nmax_tokens: 1", "missing 2 required"),
    ],
)
def test_a_stage_group_that_does_not_fit(tmp_path: Path, yaml: str, what: str) -> None:
    (tmp_path / "shout").mkdir()
    (tmp_path / "shout" / "default.yaml").write_text(yaml)
    words = ["pipeline.observe=[log,shout]"]
    words, composed = config.validate(words, config_dir=tmp_path)
    assert words[-1] == "+shout=default"
    with pytest.raises(UsageError, match=what):
        build_pipeline(composed)


def test_a_stage_without_a_group_is_named_with_a_near_match() -> None:
    with pytest.raises(UsageError, match="'comit'") as caught:
        config.validate(["pipeline.cycle=[draft,verify,comit]"])
    assert caught.value.fix == "did you mean commit?"
