"""The proof beside the run: a plain greedy twin from the same prefill, compared bit by bit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.pipeline import Stage, State
from ds4flow.speculate import argmax, top_gap

if TYPE_CHECKING:
    from ds4flow.cache import KVCache


@dataclass
class Parity(Stage):
    """Forks the cache in setup; in the cycle it decodes the same tokens one by one in the fork.

    Compared are the tokens and the float32 bits of the logits at every committed position, and
    with `state` the visible cache state at the end. The first difference stops the run with exit
    code 1.
    """

    state: bool
    twin: KVCache | None = field(default=None, init=False)
    token: int = field(default=-1, init=False)  # the twin's own next token
    gap: float = field(default=0.0, init=False)  # how far it was ahead of the second
    positions: int = field(default=0, init=False)
    rollbacks: int = field(default=0, init=False)

    reads = ("model", "tokenizer", "cache", "next_token", "logits")

    def run(self, state: State) -> None:
        """Fork, or compare what the cycle committed."""
        if state.sampling is not None:
            raise UsageError(
                "pipeline=parity compares with greedy decoding, but this run samples",
                "set sampling.temperature=0",
            )
        if self.twin is None:
            self.twin = state.cache.fork()
            self.token, self.gap = int(argmax(state.logits[-1])), top_gap(state.logits[-1])
            return
        self.rollbacks += len(state.committed) < len(state.rows)
        for row, token in enumerate(state.committed):
            self._compare(state, self.twin, row, token)
        if state.done is not None:
            self._finish(state, self.twin)

    def _compare(self, state: State, twin: KVCache, row: int, token: int) -> None:
        if token != self.token:
            piece = state.tokenizer.piece
            raise self._difference(
                state,
                twin,
                f"greedy {self.token} '{piece(self.token)}', "
                f"speculative {token} '{piece(token)}', top-2 gap {self.gap:.6g}",
            )
        logits = state.model.logits(state.model.forward([token], twin))[0]
        # As integers: equal values are not enough, and NaN or -0.0 must not pass for equal.
        unequal = logits.view(torch.int32) != state.logits[row].view(torch.int32)
        if bool(unequal.any()):
            raise self._difference(
                state,
                twin,
                f"{int(unequal.sum())} of {len(logits)} logits differ by up to "
                f"{float((logits - state.logits[row]).abs().max()):.3g}, "
                f"top-2 gap {top_gap(logits):.6g}",
            )
        twin.commit(1)
        self.positions += 1
        self.token, self.gap = int(argmax(logits)), top_gap(logits)

    def _difference(self, state: State, twin: KVCache, what: str) -> Ds4FlowError:
        state.run.record(parity={**self._counts(), "equal": False, "first_difference": twin.length})
        return Ds4FlowError(
            f"parity: first difference at position {twin.length}, cycle {state.cycle}: {what}",
            "with mtp.margin below 1 differences are expected (mtp.strict=true forbids them); "
            "otherwise a kernel is not row-invariant",
        )

    def _finish(self, state: State, twin: KVCache) -> None:
        if self.state:
            # The drafter's own rows are refreshed by its next pass, so they are left out.
            ours, theirs = state.cache.state_hash(mtp=False), twin.state_hash(mtp=False)
            lanes = [lane for lane in theirs if theirs[lane] != ours.get(lane)]
            if lanes:
                raise self._difference(state, twin, f"cache state differs in {', '.join(lanes)}")
        state.run.record(
            parity={**self._counts(), "equal": True, "state_equal": self.state or None}
        )
        print(
            f"parity: tokens and logits bits equal at {self.positions} positions, "
            f"{self.rollbacks} rollbacks" + (", cache state equal" if self.state else ""),
            file=sys.stderr,
        )
        if not self.rollbacks:
            print("parity: no rollback was seen, so this proves little", file=sys.stderr)

    def _counts(self) -> dict[str, int]:
        return {"positions": self.positions, "rollbacks": self.rollbacks}
