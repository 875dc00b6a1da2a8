"""Sets of prompts as files: what a line may hold, and how a mistake is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ds4flow import prompt_set
from ds4flow.conversation import Message
from ds4flow.errors import Ds4FlowError
from ds4flow.prompt_set import Prompt, read
from tools.demo.data import read_corpus

USER = {"role": "user", "content": "Hello"}


def line(**values: Any) -> bytes:
    row = {"id": "a", "category": "code", "prompt": "x = 1", **values}
    return json.dumps({key: value for key, value in row.items() if value is not ...}).encode()


def talk(*messages: Any, **values: Any) -> bytes:
    return line(prompt=..., messages=list(messages), **values)


def wrong(tmp_path: Path, data: bytes, mode: str = "auto") -> Ds4FlowError:
    (tmp_path / "set.jsonl").write_bytes(data)
    with pytest.raises(Ds4FlowError) as caught:
        read(str(tmp_path / "set.jsonl"), mode=mode)
    assert caught.value.fix
    return caught.value


def test_a_set_is_read_with_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(
        line(id="one", max_tokens=7, system="Be brief.")
        + b"\n\n"  # an empty line is none
        + talk({"role": "system", "content": "Be kind."}, USER, id="two", category="talk")
        + b"\r\n"
    )
    found = read(str(path))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.prompts == (
        Prompt("one", "code", "x = 1", max_tokens=7, system="Be brief.", line=1),
        Prompt(
            *("two", "talk", ""),
            messages=(Message("system", "Be kind."), Message("user", "Hello")),
            line=3,
        ),
    )
    assert found.facts["prompt_set"] == found.sha256


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not JSON at column 2"),
        (b"\xef\xbb\xbf" + line(), "not JSON at column 1"),
        (b'"text"', "a str, not an object"),
        (b"[" * 100_000, "too deeply nested"),
        (b'{"id": "\xff"}', "byte 9 is not UTF-8"),
        (b'{"id": "a", "id": "b"}', "the key id appears twice"),
        (line(promt="x"), "there is no key 'promt'"),
        (line(id=...), "id is missing"),
        (line(id=" "), "id is "),
        (line(id=3), "id is 3"),
        (line(category=""), "category is empty"),
        (line(prompt=""), "prompt is empty"),
        (line(prompt=None), "prompt is null"),
        (line(prompt=["x"]), "prompt is "),
        (line(prompt=...), "neither prompt nor messages"),
        (line(messages=[USER]), "both prompt and messages"),
        (line(prompt="\ud800"), "half of a surrogate pair"),
        (line(id="\udfff"), "half of a surrogate pair"),
        (line(max_tokens=0), "max_tokens is 0"),
        (line(max_tokens=True), "max_tokens is true"),
        (line(max_tokens=None), "max_tokens is null"),
        (line(system=1), "system is 1"),
        (talk(), "messages is not a list with messages"),
        (line(prompt=..., messages="Hello"), "messages is not a list with messages"),
        (talk("Hello"), "message 1 is not an object"),
        (talk({"role": "usr", "content": "x"}), "message 1: the role is"),
        (talk({"content": "x"}), "the role is missing"),
        (talk({"role": ["user"], "content": "x"}), "the role is"),
        (talk({"role": "user", "content": ""}), "content is empty"),
        (talk({**USER, "reasoning": "x"}), "reasoning of a user"),
        (talk({**USER, "tools": []}), "no key 'tools' in message 1"),
        (talk(USER, {"role": "assistant", "content": "x"}), "the last message is the assistant's"),
        (talk(USER, {"role": "system", "content": "x"}, USER), "message 2: a system message"),
        (talk(USER, system="x"), "a system text beside messages"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, data: bytes, says: str) -> None:
    error = wrong(tmp_path, line(id="first") + b"\n\n" + data + b"\n" + line(id="last"))
    assert error.what.startswith(f"{tmp_path / 'set.jsonl'}, line 3: ")
    assert says in error.what


def test_near_matches(tmp_path: Path) -> None:
    assert wrong(tmp_path, line(promt="x")).fix == "did you mean prompt?"
    assert wrong(tmp_path, talk({**USER, "contnt": ""})).fix == "did you mean content?"
    assert wrong(tmp_path, talk({"role": "usr", "content": "x"})).fix == "did you mean user?"
    with pytest.raises(Ds4FlowError, match="prompts=dmeo cannot be read") as caught:
        read("dmeo")
    assert caught.value.fix == "did you mean demo?"


def test_an_id_is_used_once(tmp_path: Path) -> None:
    error = wrong(tmp_path, line() + b"\n" + line(id="b") + b"\n" + line())
    assert "line 3: the id 'a' is that of line 1" in error.what


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_an_empty_set_is_none(tmp_path: Path, data: bytes) -> None:
    assert "holds no prompts" in wrong(tmp_path, data).what


def test_what_raw_prompts_cannot_hold(tmp_path: Path) -> None:
    assert "model.chat=raw has no turns" in wrong(tmp_path, talk(USER), "raw").what
    assert "has no place for it" in wrong(tmp_path, line(system="x"), "raw").what


def test_a_folder_name_is_safe_and_of_one_prompt() -> None:
    names = ["a/b", "../..", "a b", "ä" * 300, "x" * 300, "x" * 299 + "y", "."]
    folders = [Prompt(name, "c", "t").folder(index) for index, name in enumerate(names)]
    assert len(set(folders)) == len(names)
    assert not any("/" in name or len(name.encode()) > 200 for name in folders)
    assert folders[0] == "prompt-000-a_b"


def test_seeds_depend_on_the_id_and_the_run_alone() -> None:
    one, other = Prompt("one", "c", "t", line=1), Prompt("one", "d", "u", line=9)
    assert one.seed(0) == other.seed(0)
    assert one.seed(0) != one.seed(1)
    assert one.seed(0) != Prompt("two", "c", "t").seed(0)
    assert 0 <= one.seed(0) < 2**32


def test_a_conversation_is_written_as_json_lines() -> None:
    messages = (Message("user", "Ä\n"), Message("assistant", "b", reasoning="c"))
    rows = [json.loads(row) for row in Prompt("a", "c", "", messages).written.splitlines()]
    assert rows == [
        {"role": "user", "content": "Ä\n"},
        {"role": "assistant", "content": "b", "reasoning": "c"},
    ]


def test_the_shipped_set_is_held_out_from_what_the_demo_model_saw() -> None:
    found = read("demo", mode="raw")
    assert len(found.prompts) >= 15
    categories = {"code", "docstring", "comment", "repetitive", "hard"}
    assert {prompt.category for prompt in found.prompts} == categories
    texts = [prompt.text.rstrip("\n") for prompt in found.prompts]
    corpus = read_corpus()
    assert len(corpus) > 300  # some distributions leave the standard library's own tests out
    for document in corpus:
        assert not [text for text in texts if text in document.text], document.path


def test_names_of_shipped_sets_can_be_read() -> None:
    for name in prompt_set.SHIPPED:
        assert read(name).prompts
