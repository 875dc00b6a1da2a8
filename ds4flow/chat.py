"""Prompts and conversations to token ids: what a user writes never becomes a marker.

Only segments that are markers become special tokens; everything else is encoded as ordinary text,
whatever it looks like.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

from ds4flow.conversation import Message, Segment, segments
from ds4flow.errors import UsageError, near_match
from ds4flow.tokenizer import BOS, END_THINK, EOS, Tokenizer

CHATS: Final = ("raw", "nothink", "think", "think-max")
"""Values of the `chat` argument of `prompt_ids`."""

THINK_MAX_CONTEXT: Final = 393216
"""Context, in tokens, that the vendor recommends at least for think-max."""

# The think-max texts as (bytes, SHA-256), the newest checkpoint's first. A template with the newer
# one may hold the older one as well, for a lower effort. Both end with a blank line.
_EFFORT_START: Final = "Reasoning Effort: "
_EFFORT_END: Final = b"\n\n"
_EFFORT_TEXTS: Final = (
    (528, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
    (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
)


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: str, system: str = "") -> list[int]:
    """Return the ids of a single-turn prompt, with exactly one BOS.

    chat: `raw` is BOS and the text; the others are the modes of `segments`. UsageError when the
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
