"""Conversations to prompts in the model's own format: what a user writes never becomes a marker.

A conversation is rendered to segments that say which of them are special tokens. Only those become
special tokens; everything else is encoded as ordinary text, whatever it looks like.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from ds4flow.errors import UsageError, near_match
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
    Tokenizer,
)

Role = Literal["system", "user", "assistant", "tool", "developer", "latest_reminder"]
Mode = Literal["nothink", "think", "think-max"]

CHATS: Final = ("raw", "nothink", "think", "think-max")
"""Values of the `chat` argument of `prompt_ids`."""

THINK_MAX_CONTEXT: Final = 393216
"""Context, in tokens, that the vendor recommends at least for think-max."""

_MARKER: Final = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")

# The think-max texts as (bytes, SHA-256), the newest checkpoint's first. A template with the newer
# one may hold the older one as well, for a lower effort. Both end with a blank line.
_EFFORT_START: Final = "Reasoning Effort: "
_EFFORT_END: Final = b"\n\n"
_EFFORT_TEXTS: Final = (
    (528, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
    (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
)


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


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: str, system: str = "") -> list[int]:
    """Return the ids of a single-turn prompt, with exactly one BOS.

    chat: `raw` is BOS and the text; the others are the modes of `render`. UsageError when the
    vocabulary lacks a marker, when think-max is not in the model file's chat template, and for a
    system text with `raw`.
    """
    if chat == "raw":
        if system:
            raise UsageError(
                "chat=raw has no place for a system text",
                "put the text into the prompt, or use chat=nothink or chat=think",
            )
        return [tokenizer.bos, *tokenizer.encode(prompt)]
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", prompt))
    return conversation_ids(tokenizer, messages, chat=chat)


def conversation_ids(tokenizer: Tokenizer, messages: Sequence[Message], *, chat: str) -> list[int]:
    """Return the ids of a conversation and the opening of the assistant's next turn.

    chat: as for `prompt_ids`. UsageError as there, for `raw`, and for a conversation that the
    format cannot express.
    """
    if chat not in CHATS:
        raise UsageError(
            f"chat={chat} is not a prompt format",
            near_match(chat, CHATS) or f"use one of {', '.join(CHATS)}",
        )
    if chat == "raw":
        raise UsageError(
            "chat=raw has no turns, so a conversation cannot be its prompt",
            "use chat=nothink or chat=think, or give one text",
        )
    if chat == "think-max":
        prefix = effort_prefix(tokenizer.chat_template)
        return encode(tokenizer, segments(messages, mode="think-max", prefix=prefix))
    return encode(tokenizer, segments(messages, mode="think" if chat == "think" else "nothink"))


def render(
    messages: Sequence[Message],
    *,
    mode: Mode,
    prefix: str | None = None,
    tool_text: ToolText | None = None,
) -> str:
    """Return the prompt as one string, from BOS to the opening of the next assistant turn.

    A conversation that ends with an assistant message ends with EOS instead. For ids use
    `segments` and `encode`: in the string alone, markers and text that looks like one are the same.
    The arguments are those of `segments`.
    """
    parts = segments(messages, mode=mode, prefix=prefix, tool_text=tool_text)
    return "".join(part.text for part in parts)


def encode(tokenizer: Tokenizer, parts: Sequence[Segment]) -> list[int]:
    """Return the ids of rendered segments; UsageError names markers that the vocabulary lacks."""
    known = dict(tokenizer.specials) | {BOS: tokenizer.bos, EOS: tokenizer.eos}
    missing = dict.fromkeys(part.text for part in parts if part.marker and part.text not in known)
    if missing:
        raise UsageError(
            f"the model's vocabulary has no token {' and no token '.join(missing)}, which this "
            "prompt format needs",
            "use chat=raw, which needs no token but the start of the text",
        )
    ids: list[int] = []
    for part in parts:
        ids.extend([known[part.text]] if part.marker else tokenizer.encode(part.text))
    return ids


def effort_prefix(template: str | None) -> str:
    """Return the think-max text stored in a model file's chat template, verified by its hash.

    The text may be written into the template as it is or as a string literal. UsageError when the
    template does not hold it; there is no substitute for it.
    """
    longest = 2 * _EFFORT_TEXTS[0][0]  # escapes take more characters than what they stand for
    found = []
    for start in re.finditer(_EFFORT_START, template or ""):
        written = start.string[start.start() :][:longest]
        found += [text.encode(errors="replace") for text in (written, _unquoted(written))]
    for size, digest in _EFFORT_TEXTS:
        for raw in found:
            # The blank line at the end may be a part of another string of the template.
            text = raw[: size - len(_EFFORT_END)] + _EFFORT_END
            if hashlib.sha256(text).hexdigest() == digest:
                return text.decode()
    state = "has no chat template" if template is None else "has a chat template without that text"
    raise UsageError(
        f"chat=think-max needs the effort text of the model's protocol; the model file {state}",
        "use chat=think, or a GGUF whose tokenizer.chat_template carries the full template",
    )


def _unquoted(text: str) -> str:
    """Read `text` as the inside of a template string literal (or several, joined)."""
    text = re.sub(r"""(['"])\s*[~+]?\s*\1""", "", text)
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), text)
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text)


def split_reasoning(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], list[int] | None]:
    """Split what was generated after `<think>` at the first `</think>`, which is in neither part.

    The second part is None while the reasoning has not ended.
    """
    end = tokenizer.specials.get(END_THINK)
    if end is None or end not in ids:
        return list(ids), None
    at = list(ids).index(end)
    return list(ids[:at]), list(ids[at + 1 :])


def segments(
    messages: Sequence[Message],
    *,
    mode: Mode,
    prefix: str | None = None,
    tool_text: ToolText | None = None,
) -> list[Segment]:
    """Render a conversation; neighbouring text is joined, so that ids equal those of the string.

    mode: how the next assistant turn opens. prefix: the effort text, for think-max only (see
    `effort_prefix`). tool_text: the tool instructions, needed when a message declares tools.
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
