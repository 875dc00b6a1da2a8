"""Sets of prompts: JSON lines, checked whole before anything runs.

`{"id", "category", "prompt" | "messages" [, "max_tokens"] [, "system"]}` a line. Every mistake is
an error that names file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from ds4flow import packaged
from ds4flow.conversation import Message, Role, segments
from ds4flow.errors import Ds4FlowError, UsageError, near_match

SHIPPED = {"demo": f"{packaged.PREFIX}ds4flow.demo/prompts.jsonl"}
"""Sets by name that come with the package; a file of that name is reached as ./NAME."""

FIELDS = ("id", "category", "prompt", "messages", "max_tokens", "system")
MESSAGE_FIELDS = ("role", "content", "reasoning")
ROLES = tuple(role for role in get_args(Role) if role != "tool")

_FOLDER_LENGTH = 60  # of what an id adds to the name of a folder


@dataclass(frozen=True)
class Prompt:
    """One line of a set: a text, or a conversation that the assistant is to continue.

    `max_tokens` and `system` replace the run's own for this prompt.
    """

    id: str
    category: str
    text: str
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None
    system: str | None = None
    line: int = 0

    @property
    def written(self) -> str:
        """The text; of a conversation one JSON object a message."""
        rows = [
            {name: getattr(one, name) for name in MESSAGE_FIELDS if getattr(one, name)}
            for one in self.messages
        ]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        return "\n".join(lines) + "\n" if lines else self.text

    def folder(self, index: int) -> str:
        """The name of its directory as number `index` of a set."""
        slug = re.sub(r"[^\w.-]+", "_", self.id)
        return f"prompt-{index:03d}-{slug[:_FOLDER_LENGTH]}"

    def seed(self, seed: int) -> int:
        """Its seed when the run's is `seed`.

        Random numbers are addressed by position, so one seed for all would make the prompts of a
        set agree in their luck. It depends on the id, not on the place in the set.
        """
        digest = hashlib.sha256(f"{seed}:{self.id}".encode()).digest()
        return int.from_bytes(digest[:4], "big")


@dataclass(frozen=True)
class PromptSet:
    """A set as it was read: `data` are the bytes of the file."""

    name: str
    path: Path
    data: bytes
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """Digest of the file."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of the set."""
        return {
            "prompt_set": self.sha256,
            "prompt_set_file": {"name": self.name, "path": str(self.path.resolve())},
            "prompt_count": len(self.prompts),
        }


def read(name: str, *, mode: str = "auto") -> PromptSet:
    """Read and check the set that `prompts=NAME` means; `mode` is the run's model.chat.

    Raises Ds4FlowError for a file that cannot be read or is wrong, with the number of the line.
    """
    path = packaged.resolve(SHIPPED.get(name, name), "prompts")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Ds4FlowError(
            f"prompts={name} cannot be read: {error.strerror}",
            near_match(name, SHIPPED) or f"give a file of JSON lines, or {', '.join(SHIPPED)}",
        ) from None
    prompts = tuple(_prompts(data, name, mode))
    if not prompts:
        raise Ds4FlowError(f"prompts={name} holds no prompts", "write one JSON object a line")
    return PromptSet(name, path, data, prompts)


def _prompts(data: bytes, name: str, mode: str) -> Iterator[Prompt]:
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        prompt = _Line(f"{name}, line {number}", mode).prompt(line, number)
        if prompt.id in seen:
            raise Ds4FlowError(
                f"{name}, line {number}: the id {prompt.id!r} is that of line {seen[prompt.id]}",
                "give every prompt an id of its own",
            )
        seen[prompt.id] = number
        yield prompt


class _Line:
    """Checks one line; `place` says where it is."""

    def __init__(self, place: str, mode: str) -> None:
        self.place, self.mode = place, mode

    def wrong(self, what: str, fix: str) -> NoReturn:
        raise Ds4FlowError(f"{self.place}: {what}", fix)

    def prompt(self, line: bytes, number: int) -> Prompt:
        row = self._object(line)
        self._known(row, FIELDS, "")
        for name in ("id", "category"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                self.wrong(f"{name} is {_said(row, name)}", f"give {name} a text")
        self._encodable(row["id"] + row["category"], "id or category")
        if ("prompt" in row) == ("messages" in row):
            both = "both prompt and messages" if "prompt" in row else "neither prompt nor messages"
            self.wrong(f"there are {both}", "give one of them")
        text = self._text(row, "prompt") if "prompt" in row else ""
        messages = self._messages(row["messages"]) if "messages" in row else ()
        system = self._text(row, "system", empty=True) if "system" in row else None
        if system and (messages or self.mode == "raw"):
            why = (
                "beside messages" if messages else "with model.chat=raw, which has no place for it"
            )
            self.wrong(f"there is a system text {why}", "make it a message, or leave it out")
        tokens = row.get("max_tokens")
        if "max_tokens" in row and (type(tokens) is not int or tokens < 1):
            self.wrong(f"max_tokens is {_said(row, 'max_tokens')}", "give a number from 1")
        return Prompt(row["id"], row["category"], text, messages, tokens, system, number)

    def _object(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line.decode(), object_pairs_hook=self._once)
        except UnicodeDecodeError as error:
            self.wrong(f"byte {error.start + 1} is not UTF-8", "save the file as UTF-8")
        except json.JSONDecodeError as error:
            self.wrong(
                f"not JSON at column {error.colno}: {error.msg}", "write one JSON object a line"
            )
        except RecursionError:
            self.wrong("too deeply nested", "write one flat JSON object a line")
        if not isinstance(row, dict):
            self.wrong(f"a {type(row).__name__}, not an object", "write one JSON object a line")
        return row

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self.wrong(f"the key {twice} appears twice", "leave one of them out")
        return row

    def _known(self, row: dict[str, Any], names: Sequence[str], where: str) -> None:
        for name in row:
            if name not in names:
                self.wrong(
                    f"there is no key {name!r}{where}",
                    near_match(name, names) or f"the keys are {', '.join(names)}",
                )

    def _text(self, row: dict[str, Any], name: str, *, empty: bool = False) -> str:
        value = row.get(name)
        if not isinstance(value, str) or not (value or empty):
            self.wrong(f"{name} is {_said(row, name)}", f"give {name} a text")
        self._encodable(value, name)
        return value

    def _encodable(self, text: str, name: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.wrong(f"{name} holds half of a surrogate pair", "write the whole character")

    def _messages(self, rows: Any) -> tuple[Message, ...]:
        if not isinstance(rows, list) or not rows:
            self.wrong("messages is not a list with messages", 'write [{"role": "user", ...}]')
        if self.mode == "raw":
            self.wrong(
                "there are messages, but model.chat=raw has no turns",
                "use model.chat=nothink or model.chat=think, or give a prompt",
            )
        messages = tuple(self._message(row, number) for number, row in enumerate(rows, 1))
        if messages[-1].role == "assistant":
            self.wrong("the last message is the assistant's", "end with a user message")
        try:
            segments(messages, mode="nothink")
        except UsageError as error:
            self.wrong(error.what, error.fix)
        return messages

    def _message(self, row: Any, number: int) -> Message:
        if not isinstance(row, dict):
            self.wrong(f"message {number} is not an object", 'write {"role": "user", ...}')
        self._known(row, MESSAGE_FIELDS, f" in message {number} (tools are not supported)")
        role: Any = row.get("role")
        if role not in ROLES:
            close = near_match(role, ROLES) if isinstance(role, str) else ""
            self.wrong(
                f"message {number}: the role is {_said(row, 'role')}",
                close or f"use one of {', '.join(ROLES)}",
            )
        content = self._text(row, "content", empty=role == "assistant")
        reasoning = self._text(row, "reasoning", empty=True) if "reasoning" in row else ""
        if reasoning and role != "assistant":
            self.wrong(f"message {number}: reasoning of a {role}", "only the assistant reasons")
        return Message(role, content, reasoning)


def _said(row: dict[str, Any], name: str) -> str:
    """How a value is named in an error."""
    if name not in row:
        return "missing"
    return "empty" if row[name] == "" else f"{json.dumps(row[name])[:40]}"
