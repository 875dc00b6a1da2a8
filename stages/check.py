"""Checking every commit: the visible cache state against that of a plain twin that never drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ds4flow.errors import Ds4FlowError
from ds4flow.pipeline import Stage, State

if TYPE_CHECKING:
    from ds4flow.cache import KVCache


@dataclass
class NoCheck(Stage):
    """Compares nothing."""

    keep_accepted: bool

    reads = ("model", "cache", "tokens", "hidden")

    def run(self, state: State) -> None:
        """Do nothing."""


@dataclass
class StateCheck(NoCheck):
    """Hashes window, compressor, indexer and MTP rows after every commit, ours and the twin's.

    The pipeline calls it in setup to fork the cache, after the drafter to compare the MTP rows
    (which the drafter has refreshed by then) and after the commit to compare the trunk's rows. The
    twin runs the committed tokens one by one. The first difference stops the run and names layer
    and lane.
    """

    twin: KVCache | None = field(default=None, init=False)
    hidden: torch.Tensor | None = field(default=None, init=False)  # twin's streams of its last row
    states: int = field(default=0, init=False)  # states compared

    def run(self, state: State) -> None:
        """Fork, or bring the twin up to the cache's cursor and compare."""
        if self.twin is None:
            self.twin = state.cache.fork()
            self.hidden = state.hidden
        elif self.twin.length < state.cache.length:
            self._advance(state, self.twin)
            self._compare(state, self.twin, mtp=False)
        elif state.drafts and state.model.mtp is not None and not self.keep_accepted:
            # A cycle without drafts leaves the block's rows as they are, for the next one with.
            self._compare(state, self.twin, mtp=True)

    def _advance(self, state: State, twin: KVCache) -> None:
        model = state.model
        for token in state.tokens[twin.length : state.cache.length]:
            streams = model.forward([token], twin)
            if model.mtp is not None:
                model.mtp.follow([token], twin.length, self.hidden, streams, twin)
            self.hidden = streams[0]
            twin.commit(1)

    def _compare(self, state: State, twin: KVCache, *, mtp: bool) -> None:
        ours, theirs = state.cache.state_hash(mtp=mtp), twin.state_hash(mtp=mtp)
        different = [lane for lane in theirs if ours.get(lane) != theirs[lane]]
        self.states += 1
        if different:
            state.run.record(check={"states_compared": self.states, "different": different})
            raise Ds4FlowError(
                f"check=state: after {twin.length} tokens (cycle {state.cycle}) the cache differs "
                f"from plain decoding in {', '.join(different)}",
                "this is a fault of the cache or of a kernel; run pipeline=parity to see whether "
                "the logits differ as well",
            )

    def close(self, state: State) -> None:
        """Record how much was compared."""
        if self.states and state.done is not None:
            state.run.record(check={"states_compared": self.states, "different": []})
