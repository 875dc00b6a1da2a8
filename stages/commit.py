"""Making accepted tokens permanent, and deciding when the text is complete.

Tokens, cache, text and counts always agree: nothing is kept beyond the end of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds4flow.errors import UsageError
from ds4flow.pipeline import Stage, State
from ds4flow.speculate import argmax
from ds4flow.stale import Fresh
from ds4flow.text_stream import StopStrings, TextStream


@dataclass
class Commit(Stage):
    """Commits the accepted prefix and sets the next certain token.

    An end-of-text token is never committed. The token that completes a stop string is, but its text
    ends before the stop string.
    """

    max_tokens: int
    stop: list[str]
    ignore_eos: bool
    stream: TextStream | None = field(default=None, init=False)
    stops: StopStrings = field(init=False)

    reads = ("tokenizer", "cache", "tokens", "rows", "streams", "logits", "verdict", "hidden")
    writes = ("tokens", "next_token", "hidden", "fresh", "committed", "relaxed", "pieces", "done")

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("commit.stop holds an empty text", "leave it out")
        self.stops = StopStrings(self.stop)

    def run(self, state: State) -> None:
        """Commit, and set `done` to eos, stop, limit or context when the text is complete."""
        accepted = state.rows[: state.verdict.accepted + 1]
        count = self._fitting(state, accepted)
        kept = accepted[:count]
        first = state.cache.length
        state.cache.commit(count)
        state.tokens.extend(kept)
        state.committed = kept
        state.relaxed = self._relaxed(state, count)
        if kept:
            before = state.hidden[None]
            if count > 1:
                before = torch.cat((before, state.streams[: count - 1]))
            state.fresh = Fresh(first, kept, before)
            state.hidden = state.streams[count - 1]
        state.next_token = (*accepted, state.verdict.next_token)[count]
        state.done = self._ended(state)
        if state.done is not None:
            self._flush(state)

    def _fitting(self, state: State, accepted: tuple[int, ...]) -> int:
        """How many of the accepted tokens belong to the text; their text is passed on."""
        self.stream = self.stream or TextStream(state.tokenizer)
        left = self.max_tokens - state.produced
        for count, token in enumerate(accepted[:left]):
            if self._is_end(state, token):
                return count
            state.pieces.append(self.stops.push(self.stream.push([token])))
            if self.stops.match is not None:
                return count + 1
        return min(len(accepted), left)

    def _is_end(self, state: State, token: int | None) -> bool:
        return token == state.tokenizer.eos and not self.ignore_eos

    def _relaxed(self, state: State, count: int) -> int:
        if not state.verdict.relaxed or count < 2:
            return 0
        choices = argmax(state.logits[: count - 1]).tolist()
        return sum(a != b for a, b in zip(choices, state.rows[1:count], strict=True))

    def _ended(self, state: State) -> str | None:
        if self.stops.match is not None:
            return "stop"
        if self._is_end(state, state.next_token):
            return "eos"
        if state.produced >= self.max_tokens:
            return "limit"
        return "context" if state.cache.length >= state.cache.context else None

    def _flush(self, state: State) -> None:
        """Pass on the text that waited for the rest of a character or of a stop string."""
        if self.stream is not None:
            state.pieces.append(self.stops.push(self.stream.finish()) + self.stops.finish())
            self.stream = None

    def close(self, state: State) -> None:
        """Leave no text behind when the run was stopped from outside."""
        self._flush(state)
