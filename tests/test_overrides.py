"""Typed words to overrides: texts arrive unchanged, precedence and sources are right."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ds4flow.env import Variable
from ds4flow.errors import UsageError
from ds4flow.overrides import Flag, assemble, literal, quoted
from ds4flow.quoting import unquoted

# The YAML library folds these line breaks; prompt.txt and run.json of a run keep them.
UNSAFE_IN_YAML = set("\x85\u2028\u2029")
TEXTS = st.text() | st.text(alphabet="\\'\"${}, =[](:)\n ~+x", max_size=12)


@settings(deadline=None)
@given(TEXTS)
@example("def f(x): return {x}")
@example('it\'s "quoted" \\')
@example("\\\\'\\")
@example("\\${x} ${y} \\\\${z} ${")
@example(" leading and trailing ")
@example("a,b")
@example("choice(a,b)")
@example("null")
@example("5")
@example("line\nline\r\n")
@example("\x85")
def test_a_text_arrives_unchanged(text: str) -> None:
    override = OverridesParser.create().parse_override(literal(f"prompt={text}"))
    config = OmegaConf.create({"prompt": ""})
    OmegaConf.update(config, override.key_or_group, override.value())
    assert config.prompt == text
    if not UNSAFE_IN_YAML & set(text):
        assert OmegaConf.create(OmegaConf.to_yaml(config)).prompt == text


@given(TEXTS)
def test_what_was_quoted_can_be_shown_as_typed(text: str) -> None:
    assert unquoted(quoted(text)) == text


@settings(deadline=None)
@given(TEXTS)
def test_a_single_stop_string_is_literal_too(text: str) -> None:
    override = OverridesParser.create().parse_override(f"commit.stop=[{quoted(text)}]")
    config = OmegaConf.create({"stop": override.value()})
    assert OmegaConf.to_container(config, resolve=True) == {"stop": [text]}


def test_only_free_text_keys_are_quoted() -> None:
    assert literal("mtp.draft=0,1") == "mtp.draft=0,1"
    assert literal("model=file") == "model=file"
    assert literal("runtime.kernels=cpu,reference") == "runtime.kernels=cpu,reference"
    assert literal("prompt_file=null") == "prompt_file=null"
    assert literal("prompt=null") == "prompt='null'"
    assert literal("commit.stop=[a,b]") == "commit.stop=[a,b]"
    assert literal("commit.stop=a,b") == "commit.stop=['a,b']"
    assert literal("+prompt=a b") == "+prompt='a b'"
    assert literal("new.key=a b") == "new.key=a b"


def test_a_comma_in_a_text_is_no_sweep_but_choice_is() -> None:
    parse = OverridesParser.create().parse_override
    assert not parse(literal("prompt=a,b", multirun=True)).is_sweep_override()
    assert parse(literal("prompt=choice(a,b)", multirun=True)).is_sweep_override()
    assert not parse(literal("prompt=choice(a,b)")).is_sweep_override()


def test_the_environment_beats_the_command_line_and_says_so() -> None:
    words, notices = assemble(
        ["mtp.draft=2", "mtp.margin=0.5"], [], [Variable("DS4_MTP_DRAFT", "mtp.draft", "4")]
    )
    assert words[:2] == ["mtp.margin=0.5", "mtp.draft=4"]
    assert words[2] == "+provenance={mtp.draft:'env DS4_MTP_DRAFT over mtp.draft=2'}"
    assert notices == ["DS4_MTP_DRAFT=4 overrides mtp.draft=2"]


def test_flags_are_overrides_with_their_name_as_source() -> None:
    words, notices = assemble([], [Flag("--mtp-draft", "mtp.draft", "2")], [])
    assert words == ["mtp.draft=2", "+provenance={mtp.draft:'flag --mtp-draft'}"]
    assert notices == []


def test_a_flag_and_an_override_of_one_key_are_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        assemble(["mtp.draft=3"], [Flag("--mtp-draft", "mtp.draft", "2")], [])


def test_a_variable_may_not_override_a_sweep() -> None:
    variable = Variable("DS4_MTP_DRAFT", "mtp.draft", "4")
    with pytest.raises(UsageError, match="would override the sweep"):
        assemble(["mtp.draft=0,1"], [], [variable], multirun=True)
    words, _ = assemble(["mtp.margin=0.5,1.0"], [], [variable], multirun=True)
    assert "mtp.draft=4" in words


def test_two_prompts_are_refused() -> None:
    with pytest.raises(UsageError, match="prompt and prompt_file are both given"):
        assemble(["prompt_file=x"], [Flag("--prompt", "prompt", "y")], [])


@pytest.mark.parametrize("word", ["", "=", "+=", "~", "=5", "++=x"])
def test_a_word_without_a_key_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="names no key"):
        assemble([word], [], [])
