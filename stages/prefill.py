"""The prompt through the target in chunks, and through the MTP block's cache rows.

The chunk size never changes a bit of what follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ds4flow.pipeline import Stage, State
from ds4flow.sampling import next_token
from ds4flow.speculate import top_gap


@dataclass
class Prefill(Stage):
    """Fills the cache with the prompt and chooses the first token.

    A progress bar appears on stderr when the rest of the prompt seems to take more than
    `progress_after` seconds.
    """

    chunk: int
    ignore_eos: bool
    progress_after: float

    reads = ("model", "tokenizer", "cache", "tokens")
    writes = ("next_token", "first_gap", "hidden", "logits", "done", "prompt_length")

    def run(self, state: State) -> None:
        """Set `next_token`, and `hidden` to the streams of the prompt's last token."""
        for chunk in self._shown(self._chunks(state.tokens), len(state.tokens)):
            streams = self._pass(state, chunk)
        state.prompt_length = len(state.tokens)
        state.logits = state.model.logits(streams[-1:])
        state.next_token = next_token(state.logits[-1], len(state.tokens), state.sampling)
        state.first_gap = top_gap(state.logits[-1])
        if state.next_token == state.tokenizer.eos and not self.ignore_eos:
            state.done = "eos"

    def _chunks(self, tokens: list[int]) -> list[list[int]]:
        return [tokens[i : i + self.chunk] for i in range(0, len(tokens), self.chunk)]

    def _pass(self, state: State, chunk: list[int]) -> torch.Tensor:
        model, cache = state.model, state.cache
        streams = model.forward(chunk, cache)
        if model.mtp is not None:
            before = torch.zeros_like(streams[0]) if state.hidden is None else state.hidden
            shifted = torch.cat((before[None], streams[:-1]))
            model.mtp.warm(shifted, chunk, cache.length, cache)
        cache.commit(len(chunk))
        state.hidden = streams[-1]
        return streams

    def _shown(self, chunks: list[list[int]], total: int) -> Iterator[list[int]]:
        """Yield the chunks, with a bar once it is clear that they take long."""
        start = time.monotonic()
        finished = 0
        with ExitStack() as stack:
            advance = None
            for chunk in chunks:
                yield chunk
                finished += len(chunk)
                elapsed = time.monotonic() - start
                if advance is None and elapsed / finished * (total - finished) > (
                    self.progress_after
                ):
                    advance = _progress(stack, total)
                if advance is not None:
                    advance(finished)


def _progress(stack: ExitStack, total: int):  # type: ignore[no-untyped-def]
    """Open a progress bar on stderr; the result sets how many tokens are finished."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("prompt", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("prompt", total=total)
    return lambda finished: bar.update(task, completed=finished)
