"""The DS4_* variables: names, types, empties."""

from __future__ import annotations

import pytest

from ds4flow import env
from ds4flow.config import compose
from ds4flow.errors import UsageError
from ds4flow.overrides import assemble
from ds4flow.schema import KEYS


def test_every_variable_names_a_key() -> None:
    assert set(env.VARIABLES.values()) <= set(KEYS)


def test_values_are_spelled_for_their_type() -> None:
    found = env.read({"DS4_MTP_DRAFT": " 4 ", "DS4_MTP_MIN_MARGIN": ".25", "DS4_MTP_STRICT": "ON"})
    assert [(v.key, v.value) for v in found] == [
        ("mtp.draft", "4"),
        ("mtp.margin", "0.25"),
        ("mtp.strict", "true"),
    ]


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_booleans_are_values_not_presence(text: str) -> None:
    assert env.read({"DS4_NO_GPU": text})[0].value == "false"


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_is_unset(text: str) -> None:
    assert env.read({"DS4_MTP_DRAFT": text}) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DS4_MTP_DRAFT", "1,2"),
        ("DS4_MTP_DRAFT", "two"),
        ("DS4_NO_GPU", "2"),
        ("DS4_MTP_GATE", "x"),
    ],
)
def test_a_wrong_type_names_variable_and_key(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={text}") as caught:
        env.read({name: text})
    assert env.VARIABLES[name] in caught.value.what


def test_an_unknown_mtp_variable_is_an_error_with_a_near_match() -> None:
    with pytest.raises(UsageError, match="DS4_MTP_DRAFTS") as caught:
        env.read({"DS4_MTP_DRAFTS": "1"})
    assert caught.value.fix == "did you mean DS4_MTP_DRAFT?"


def test_other_programs_variables_are_left_alone() -> None:
    assert env.read({"DS4_METAL_SOMETHING": "1", "HOME": "/"}) == ()


@pytest.mark.parametrize(
    "text",
    ["/models", "my models/a, b", "it's", "${HOME}/x", "C:\\gguf\\", "null", "[a]", "{b: c}"],
)
def test_a_folder_is_a_text_that_arrives_unchanged(text: str) -> None:
    (variable,) = env.read({"DS4_GGUF_DIR": text})
    assert variable.key == "download.folder"
    words, _ = assemble([], [], [variable])
    assert compose(words).download.folder == text


def test_an_empty_folder_is_unset() -> None:
    assert env.read({"DS4_GGUF_DIR": " "}) == ()
