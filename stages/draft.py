"""Proposing tokens for the target to verify; a proposal never changes the text, only its speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ds4flow.depth import AUTO_DEPTH_MAX, DepthPolicy
from ds4flow.pipeline import Fresh, Stage, State
from ds4flow.sampling import draw_draft
from ds4flow.speculate import Draft, argmax, top_gap


@dataclass
class NoDrafter(Stage):
    """Never drafts: plain greedy decoding. Also what the other drafters have in common.

    A cycle commits one token more than it accepts drafts, so `depth` is clamped to what is left of
    `max_tokens` and of the context, less one.
    """

    uses_mtp: bool
    depth: int | str  # a number, or auto
    gate: float
    keep_accepted: bool
    max_tokens: int
    ignore_eos: bool

    reads = ("model", "tokenizer", "cache", "tokens", "next_token", "hidden")
    writes = ("drafts", "draft_logits", "draft_from", "draft_end", "depth_choice")

    def run(self, state: State) -> None:
        """Set no drafts."""
        self.propose(state, 0)

    def propose(self, state: State, depth: int) -> None:
        """Set `drafts`, `draft_logits` and `draft_end` for up to `depth` drafts."""
        state.drafts, state.draft_logits, state.draft_from = (), (), ()
        state.draft_end = "off"


@dataclass
class Drafter(NoDrafter):
    """Clamps the depth, and drafts unless drafting is switched off for the run.

    With `depth=auto` a policy chooses it each cycle from what drafting and verifying cost so far.
    """

    policy: DepthPolicy | None = field(default=None, init=False)
    steps: int = field(default=0, init=False)  # draft steps of the last cycle
    seconds: float = field(default=0.0, init=False)  # that they took
    finished: float = field(default=0.0, init=False)  # when they were done

    def __post_init__(self) -> None:
        if self.depth == "auto":
            self.policy = DepthPolicy(AUTO_DEPTH_MAX)

    def run(self, state: State) -> None:
        """Propose up to the clamped depth."""
        start = time.perf_counter()
        cache = state.cache
        left = min(self.max_tokens - len(state.output), cache.context - cache.length) - 1
        depth = 0 if state.mtp_off else max(0, min(self._depth(state, left, start), left))
        self.steps = depth
        self.propose(state, depth)
        if not depth:
            state.draft_end = self._why_none(state, left)
        self.finished = time.perf_counter()
        self.seconds = self.finished - start

    def _depth(self, state: State, left: int, now: float) -> int:
        if self.policy is None:
            return int(self.depth)
        if self.finished and state.verdict is not None:
            self.policy.observe(
                drafted=len(state.rows) - 1,
                accepted=state.verdict.accepted,
                steps=self.steps,
                draft_s=self.seconds,
                verify_s=now - self.finished,
            )
        state.depth_choice = self.policy.choose(left)
        return state.depth_choice.depth

    def _why_none(self, state: State, left: int) -> str:
        if state.mtp_off or self.depth == 0:
            return "off"
        return "room" if left <= 0 else "auto"


@dataclass
class MtpDrafter(Drafter):
    """The model's own MTP block, applied recursively to its own streams.

    Before drafting, the block's cache rows of the tokens committed since are rewritten from the
    target's streams (`keep_accepted` leaves those that the block wrote itself). The first row that
    a draft pass writes came from the target's streams already and is final.
    """

    written: int = field(default=0, init=False)  # rows that the last draft pass wrote
    stale: list[Fresh] = field(default_factory=list, init=False)  # rows to rewrite before drafting

    def run(self, state: State) -> None:
        """Note which of the block's cache rows are stale, then draft."""
        if self.depth != 0 and state.model.mtp is None:
            state.switch_mtp_off("the model files hold no MTP weights")
        if self.depth != 0 and not state.mtp_off:
            self._note_stale(state)
        super().run(state)

    def _note_stale(self, state: State) -> None:
        fresh = state.fresh
        if fresh is None:
            return
        final = self.written if self.keep_accepted else min(self.written, 1)
        if final < len(fresh.tokens):
            self.stale.append(
                Fresh(fresh.first + final, fresh.tokens[final:], fresh.streams[final:])
            )
        state.fresh = None

    def _refresh(self, state: State) -> None:
        """Rewrite the stale rows; cycles without drafts leave them for the next one with."""
        block = state.model.mtp
        assert block is not None
        for fresh in _joined(self.stale):
            block.warm(fresh.streams, fresh.tokens, fresh.first, state.cache)
        self.stale.clear()

    def propose(self, state: State, depth: int) -> None:
        """Draft until `depth`, the end of the text, or a logit gap below the gate."""
        super().propose(state, depth)
        self.written = 0
        if depth:
            self._refresh(state)
            self._draft(state, depth)

    def _draft(self, state: State, depth: int) -> None:
        block, cache = state.model.mtp, state.cache
        assert block is not None
        streams, token = state.hidden, state.next_token
        drafts: list[Draft] = []
        rows: list[torch.Tensor] = []
        drawn: list[np.ndarray] = []
        state.draft_end = "depth"
        while len(drafts) < depth:
            logits, streams = block.step(streams, token, cache.length + len(drafts), cache)
            self.written += 1
            self.steps = self.written
            if state.sampling is None:
                token = int(argmax(logits))
            else:
                place = cache.length + len(drafts) + 1
                token, source = draw_draft(logits, place, state.sampling)
                drawn.append(source)
            gap = top_gap(logits)
            ends = token == state.tokenizer.eos and not self.ignore_eos
            # The row before an end of text already tells it; verifying it would gain nothing. A
            # drawn draft must stand, though: leaving some tokens out would bend the distribution.
            if ends and state.sampling is None:
                state.draft_end = "eos"
                break
            if gap < self.gate:
                state.draft_end = "gate"
                break
            drafts.append(Draft(token, gap))
            rows.append(logits)
            if ends:
                state.draft_end = "eos"
                break
        state.drafts, state.draft_logits = tuple(drafts), tuple(rows)
        state.draft_from = tuple(drawn[: len(drafts)])


def _joined(stale: list[Fresh]) -> Iterator[Fresh]:
    """Neighbouring rows as one, so that a long pause costs one call."""
    rows: list[Fresh] = []
    for fresh in stale:
        if rows and rows[-1].first + len(rows[-1].tokens) != fresh.first:
            yield _join(rows)
            rows = []
        rows.append(fresh)
    if rows:
        yield _join(rows)


def _join(rows: list[Fresh]) -> Fresh:
    tokens = tuple(token for row in rows for token in row.tokens)
    return Fresh(rows[0].first, tokens, torch.cat([row.streams for row in rows]))


class LyingDrafter(Drafter):
    """Always wrong: asks the target itself and proposes another token. For tests and parity runs.

    It writes cache rows beyond the cursor, which must stay invisible.
    """

    def propose(self, state: State, depth: int) -> None:
        """Propose `depth` tokens, each other than the target's choice after those before it."""
        super().propose(state, depth)
        model, cache, eos = state.model, state.cache, state.tokenizer.eos
        rows = [state.next_token]
        for _ in range(depth):
            logits = model.logits(model.forward(rows, cache)[-1:])[0]
            lie = (int(argmax(logits)) + 1) % len(logits)
            rows.append((lie + 1) % len(logits) if lie == eos else lie)
        state.drafts = tuple(Draft(token, 0.0) for token in rows[1:])
        state.draft_end = "depth"
