"""Text as it is generated: no character is shown broken, and no part of a stop string at all."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from ds4flow.errors import UsageError
from ds4flow.tokenizer import Tokenizer


class TextStream:
    """Incremental decoder: the pieces joined equal `Tokenizer.decode` of all ids.

    Only complete characters are returned; bytes of an unfinished character wait for the next call.
    """

    def __init__(self, tokenizer: Tokenizer, *, specials: bool = False) -> None:
        """specials: as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._specials = specials
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that they complete (may be empty)."""
        return self._decoder.decode(self._tokenizer.shown_bytes(ids, specials=self._specials))

    def finish(self) -> str:
        """Return what is left: empty, or U+FFFD when the text ends inside a character."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string was found: `stop` itself, the number of characters of text before it,
    and the number of pieces (tokens) up to and including the one that completes it.
    """

    stop: str
    characters: int
    tokens: int


class StopStrings:
    """Finds stop strings in streamed text and never lets any part of one through.

    The match is the one that is complete first (the longest, if several are complete at the same
    character), so it does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """UsageError for an empty stop string, which would match everywhere."""
        if "" in stops:
            raise UsageError(
                "a stop string is empty", "give stop strings of one or more characters"
            )
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._released = 0
        self._tokens = 0
        self.match: StopMatch | None = None

    def push(self, piece: str) -> str:
        """Take the text of ONE token (may be empty) and return the text that is safe to show.

        After a match every further piece is ignored and not counted.
        """
        if self.match is not None:
            return ""
        self._tokens += 1
        text = self._held + piece
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if found:
            end, _, stop = min(found)
            keep = end - len(stop)
            self.match = StopMatch(stop, self._released + keep, self._tokens)
            self._held = ""
        else:
            keep = len(text) - self._overlap(text)
            self._held = text[keep:]
        self._released += keep
        return text[:keep]

    def finish(self) -> str:
        """Return the text still held back; it did not become a stop string."""
        held, self._held = self._held, ""
        self._released += len(held)
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
