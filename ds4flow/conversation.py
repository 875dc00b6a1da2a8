"""Conversations in the model's own format: segments that say which of them are special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from ds4flow.errors import UsageError
from ds4flow.tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    MARKERS,
    REMINDER,
    THINK,
    USER,
)

Role = Literal["system", "user", "assistant", "tool", "developer", "latest_reminder"]
Mode = Literal["nothink", "think", "think-max"]

_MARKER: Final = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the assistant; `id` links it to the message with its result."""

    name: str
    arguments: Mapping[str, object]
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    reasoning: of an assistant message, without its markers. tools: JSON function objects, on a
    system or developer message. tool_calls: of an assistant message. call_id: of a tool message,
    the `ToolCall.id` it answers (needed only to order several results).
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tools: tuple[Mapping[str, object], ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


class ToolText(NamedTuple):
    """The fixed instructions around the list of tool schemas, from the model's chat template."""

    before: str
    after: str = ""


class Segment(NamedTuple):
    """A part of a prompt: the string of one special token, or ordinary text."""

    text: str
    marker: bool


def render(
    messages: Sequence[Message],
    *,
    mode: Mode,
    prefix: str | None = None,
    tool_text: ToolText | None = None,
) -> str:
    """Return the prompt as one string, from BOS to the opening of the next assistant turn.

    A conversation that ends with an assistant message ends with EOS instead. For ids use `segments`
    and `chat.encode`: in the string alone, markers and text that looks like one are the same. The
    arguments are those of `segments`.
    """
    parts = segments(messages, mode=mode, prefix=prefix, tool_text=tool_text)
    return "".join(part.text for part in parts)


def segments(
    messages: Sequence[Message],
    *,
    mode: Mode,
    prefix: str | None = None,
    tool_text: ToolText | None = None,
) -> list[Segment]:
    """Render a conversation; neighbouring text is joined, so that ids equal those of the string.

    mode: how the next assistant turn opens. prefix: the effort text, for think-max only (see
    `chat.effort_prefix`). tool_text: the tool instructions, needed when a message declares tools.
    Reasoning before the last user message is left out unless tools are declared or were called.
    UsageError for an order of messages that the format cannot express.
    """
    if (mode == "think-max") != (prefix is not None):
        raise UsageError(
            f"mode {mode} {'needs' if prefix is None else 'has no place for'} an effort text",
            "give the effort text with think-max and only there",
        )
    _check_order(messages)
    keep = any(m.tools or m.role == "tool" for m in messages)
    thinking = mode != "nothink"
    turns = _turns(messages)
    last_user = max(i for i, turn in enumerate(turns) if turn.role in ("user", "developer"))
    parts: list[Segment] = [Segment(BOS, True), Segment(prefix or "", False)]
    for index, turn in enumerate(turns):
        if turn.role == "developer" and thinking and not keep and index < last_user:
            continue
        if turn.role == "assistant":
            reasoned = thinking and (keep or index > last_user)
            parts.extend(_assistant(turn, reasoned=reasoned))
            continue
        if turn.role != "system":
            parts.append(Segment(REMINDER if turn.role == "latest_reminder" else USER, True))
        parts.append(Segment(turn.content, False))
        if turn.tools:
            parts.extend(_tool_schemas(turn.tools, tool_text))
    if turns[-1].role != "assistant":
        parts.extend((Segment(ASSISTANT, True), Segment(THINK if thinking else END_THINK, True)))
    return list(_joined(parts))


def _check_order(messages: Sequence[Message]) -> None:
    before = "system"
    for number, message in enumerate(messages, 1):
        role = message.role
        problem = ""
        if role == "system" and before != "system":
            problem = "a system message after the conversation began"
        elif role == "assistant" and before not in ("user", "tool", "developer"):
            problem = "an assistant message that answers no user message"
        elif message.tools and role not in ("system", "developer"):
            problem = f"tools declared by a {role} message (system or developer may)"
        elif message.tool_calls and role != "assistant":
            problem = f"tool calls in a {role} message"
        if problem:
            raise UsageError(f"message {number}: {problem}", "correct the conversation")
        before = role
    if not any(m.role in ("user", "tool", "developer") for m in messages) or before in (
        "system",
        "latest_reminder",
    ):
        raise UsageError(
            "the conversation has no user message for the assistant to answer",
            "end it with a user message",
        )


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Merge neighbouring user and tool messages into one user message each."""
    turns: list[Message] = []
    run: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    for message in messages:
        if message.role in ("user", "tool"):
            run.append(message)
            continue
        if run:
            turns.append(_user_turn(run, calls))
            run = []
        if message.role == "assistant":
            calls = message.tool_calls
        turns.append(message)
    if run:
        turns.append(_user_turn(run, calls))
    return turns


def _user_turn(run: Sequence[Message], calls: Sequence[ToolCall]) -> Message:
    """Join user texts and tool results; the results take the order of the calls they answer."""
    order = {call.id: index for index, call in enumerate(calls) if call.id}
    results = [message for message in run if message.role == "tool"]
    for message in results:
        if message.call_id and message.call_id not in order:
            raise UsageError(
                f"a tool result answers the call {message.call_id!r}, which the assistant message "
                "before it does not make",
                "give the result the id of one of the calls",
            )
    if all(message.call_id for message in results):
        results.sort(key=lambda message: order[message.call_id])
    ordered = iter(results)
    texts = [m.content if m.role == "user" else _tool_result(next(ordered).content) for m in run]
    return replace(run[0], role="user", content="\n\n".join(texts), call_id="")


def _tool_result(text: str) -> str:
    safe = text.replace("</tool_result>", "&lt;/tool_result>")
    return f"<tool_result>{safe}</tool_result>"


def _assistant(turn: Message, *, reasoned: bool) -> Iterator[Segment]:
    yield Segment(ASSISTANT, True)
    if reasoned:
        yield Segment(THINK, True)
        yield Segment(turn.reasoning, False)
    yield Segment(END_THINK, True)
    yield Segment(turn.content, False)
    if turn.tool_calls:
        yield from _marked(f"\n\n<{DSML}tool_calls>")
        for call in turn.tool_calls:
            yield from _tool_call(call)
        yield from _marked(f"\n</{DSML}tool_calls>")
    yield Segment(EOS, True)


def _tool_call(call: ToolCall) -> Iterator[Segment]:
    """Each tag on a line of its own; a string argument stays raw, any other one is JSON."""
    yield from _marked(f"\n<{DSML}invoke name=")
    yield Segment(f'"{call.name}">\n', False)
    for number, (key, value) in enumerate(call.arguments.items()):
        raw = isinstance(value, str)
        yield from _marked(("\n" if number else "") + f"<{DSML}parameter name=")
        yield Segment(f'"{key}" string="{"true" if raw else "false"}">', False)
        yield Segment(str(value) if raw else json.dumps(value, ensure_ascii=False), False)
        yield from _marked(f"</{DSML}parameter>")
    yield from _marked(f"\n</{DSML}invoke>")


def _tool_schemas(
    tools: Sequence[Mapping[str, object]], text: ToolText | None
) -> Iterator[Segment]:
    if text is None:
        raise UsageError(
            "a message declares tools, but the tool instructions of the model's chat template "
            "were not given",
            "give tool_text, or declare no tools",
        )
    yield from _marked("\n\n" + text.before)
    # Callers use both the bare function object and the wrapped form {"type", "function"}.
    objects = (tool.get("function", tool) for tool in tools)
    yield Segment("\n".join(json.dumps(tool, ensure_ascii=False) for tool in objects), False)
    yield from _marked(text.after)


def _marked(text: str) -> Iterator[Segment]:
    """Cut text of the format itself at its markers."""
    for number, part in enumerate(_MARKER.split(text)):
        yield Segment(part, number % 2 == 1)


def _joined(parts: Sequence[Segment]) -> Iterator[Segment]:
    text = ""
    for part in parts:
        if not part.marker:
            text += part.text
            continue
        if text:
            yield Segment(text, False)
            text = ""
        yield part
    if text:
        yield Segment(text, False)
