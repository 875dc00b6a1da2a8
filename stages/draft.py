"""Proposing tokens for the target to verify; a proposal never changes the text, only its speed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from ds4flow.depth import DepthPolicy, Experience
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.oracle import Oracle, check_rates
from ds4flow.pace import AUTO_DEPTH_MAX
from ds4flow.pipeline import Stage, State
from ds4flow.sampling import draw_draft
from ds4flow.speculate import Draft, argmax, top_two
from ds4flow.stale import Fresh, StaleRows


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

    kind: ClassVar[str] = "off"  # what records call it

    reads: ClassVar[tuple[str, ...]] = (
        "model",
        "tokenizer",
        "cache",
        "tokens",
        "next_token",
        "hidden",
    )
    writes = ("drafts", "draft_logits", "draft_from", "draft_end", "depth_choice", "drafter")

    def prepare(self, state: State) -> None:
        """Say which drafter it is."""
        state.drafter = self.kind

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
    backlog: float = field(default=0.0, init=False)  # seconds for what a pause left behind

    kind = "custom"

    def prepare(self, state: State) -> None:
        """Make the policy, which begins with what earlier texts have taught of the model."""
        super().prepare(state)
        if self.depth == "auto":
            known = Experience.of(state.model)
            state.run.record(draft_auto=known.facts())
            self.policy = DepthPolicy(AUTO_DEPTH_MAX, known)

    def run(self, state: State) -> None:
        """Propose up to the clamped depth."""
        if self.policy is not None and self.policy.sleeps():
            self._pass_over(state)
            return
        start = time.perf_counter()
        left = state.drafts_left(self.max_tokens)
        depth = 0 if state.mtp_off else max(0, min(self._depth(state, left, start), left))
        self.steps, self.backlog = depth, 0.0
        self.propose(state, depth)
        if not depth:
            state.draft_end = self._why_none(state, left)
        self.finished = time.perf_counter()
        self.seconds = self.finished - start - self.backlog

    def _pass_over(self, state: State) -> None:
        """A cycle in which nothing was to be decided: as little as can be done."""
        self.finished = 0.0
        super().propose(state, 0)
        state.draft_end = "auto"

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
                backlog_s=self.backlog,
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
    stale: StaleRows | None = field(default=None, init=False)  # until there is a block

    kind = "mtp"

    def prepare(self, state: State) -> None:
        """Switch drafting off where there is no block to draft with."""
        super().prepare(state)
        if self.depth != 0 and state.model.mtp is None:
            state.switch_mtp_off("the model files hold no MTP weights")

    def run(self, state: State) -> None:
        """Note which of the block's cache rows are stale, then draft."""
        if self.depth != 0 and not state.mtp_off and state.fresh is not None:
            self._note_stale(state, state.fresh)
            state.fresh = None
        super().run(state)

    def _note_stale(self, state: State, fresh: Fresh) -> None:
        if self.stale is None:
            block = state.model.mtp
            assert block is not None
            self.stale = StaleRows(block.reach)
        if self.policy is not None and self.policy.dozes:  # most cycles of a pause
            self.stale.later(fresh)
        else:
            self.stale.note(fresh, self.written if self.keep_accepted else min(self.written, 1))

    def _refresh(self, state: State) -> Fresh | None:
        """Rewrite the stale rows; the last few are returned, to go with the first step.

        Cycles without drafts leave their rows for the next one with.
        """
        block = state.model.mtp
        assert block is not None
        if self.stale is None:
            return None
        parts, last = self.stale.take()
        start = time.perf_counter()
        for fresh in parts:
            block.warm(fresh.streams, fresh.tokens, fresh.first, state.cache)
        if parts:
            self.backlog = time.perf_counter() - start
        return last

    def propose(self, state: State, depth: int) -> None:
        """Draft until `depth`, the end of the text, or a logit gap below the gate."""
        super().propose(state, depth)
        self.written = 0
        if depth:
            self._draft(state, depth, self._refresh(state))

    def _draft(self, state: State, depth: int, stale: Fresh | None) -> None:
        if state.sampling is None and self._at_once():
            self._chain(state, depth, stale)
        else:
            self._one_by_one(state, depth, stale)

    def _at_once(self) -> bool:
        """Whether what is proposed can be told before the steps are made."""
        return True

    def _forced(self, position: int, depth: int) -> list[int] | None:
        """The drafts for `position ..` where they are not the block's own choices."""
        return None

    def _chain(self, state: State, depth: int, stale: Fresh | None) -> None:
        block, at = state.model.mtp, state.cache.length
        assert block is not None
        end = None if self.ignore_eos else state.tokenizer.eos
        made = block.chain(
            state.hidden,
            state.next_token,
            at,
            state.cache,
            stale,
            count=depth,
            gate=self.gate,
            end=end,
            forced=self._forced(at + 1, depth),
        )
        count = self.written = self.steps = len(made.tokens)
        state.draft_end = "depth"
        # The row before an end of text already tells it; verifying it would gain nothing.
        if made.tokens[-1] == end:
            state.draft_end, count = "eos", count - 1
        elif made.gaps[-1] < self.gate:
            state.draft_end, count = "gate", count - 1
        state.drafts = tuple(map(Draft, made.tokens[:count], made.gaps[:count]))
        state.draft_logits = made.logits[:count].unbind()

    def _one_by_one(self, state: State, depth: int, stale: Fresh | None) -> None:
        block, cache = state.model.mtp, state.cache
        assert block is not None
        streams, token = state.hidden, state.next_token
        drafts: list[Draft] = []
        rows: list[torch.Tensor] = []
        drawn: list[np.ndarray] = []
        state.draft_end = "depth"
        while len(drafts) < depth:
            position = cache.length + len(drafts)
            logits, streams = block.step(streams, token, position, cache, stale)
            stale = None
            self.written += 1
            self.steps = self.written
            token, gap = self._choose(state, logits, position + 1, drawn)
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

    def _choose(
        self, state: State, logits: torch.Tensor, position: int, drawn: list[np.ndarray]
    ) -> tuple[int, float]:
        """The draft for `position` and the gap of the logits' two largest entries.

        What the draft was drawn from is added to `drawn`.
        """
        assert state.sampling is not None
        _, gap = top_two(logits)
        token, source = draw_draft(logits, position, state.sampling)
        drawn.append(source)
        return token, gap


@dataclass
class OracleDrafter(MtpDrafter):
    """Synthetic: proposes the target's own greedy tokens, spoiled at rates by position.

    The MTP block runs for its cost, and its answer is thrown away. `accept` are the rates at which
    drafts of depth 1, 2, .. are right, the last one for all deeper. `tokens` names a run whose
    output is replayed; null decodes greedily once before the run that is measured, with a cache of
    its own. Where the text leaves the recording, nothing is drafted.
    """

    accept: list[float]
    tokens: str | None
    seed: int
    oracle: Oracle | None = field(default=None, init=False)

    kind = "oracle, synthetic"
    reads = (*MtpDrafter.reads, "logits")

    def __post_init__(self) -> None:
        check_rates(self.accept)

    def prepare(self, state: State) -> None:
        """Get the greedy tokens, from a run or by decoding."""
        super().prepare(state)
        if state.sampling is not None:
            raise UsageError(
                "draft=oracle replays greedy tokens, but this run samples",
                "set sampling.temperature=0, or use draft=mtp",
            )
        if state.mtp_off or self.depth == 0 or state.done is not None:
            return
        start = time.perf_counter()
        recorded = self._decoded(state) if self.tokens is None else self._read(state, self.tokens)
        vocab = state.logits.shape[-1]
        self.oracle = Oracle(
            recorded, len(state.tokens), self.accept, vocab, self.seed, state.tokenizer.eos
        )
        state.run.record(
            oracle={
                "synthetic": True,
                "accept": list(self.accept),
                "seed": self.seed,
                "recorded": len(recorded),
                "source": self.tokens or "decoded before the run",
                "seconds": round(time.perf_counter() - start, 3),
            }
        )

    def _decoded(self, state: State) -> list[int]:
        print(
            f"draft=oracle: decoding up to {self.max_tokens} greedy tokens to replay, before the "
            "run itself",
            file=sys.stderr,
        )
        cache, token = state.cache.fork(), state.next_token
        found: list[int] = []
        while len(found) < self.max_tokens and cache.length < cache.context:
            if token == state.tokenizer.eos and not self.ignore_eos:
                break
            found.append(token)
            token = int(argmax(state.model.logits(state.model.forward([token], cache)))[0])
            cache.commit(1)
        return found

    def _read(self, state: State, name: str) -> list[int]:
        from ds4flow.runs.record import ROOT, Run, resolve_run

        run = Run.open(resolve_run(name, ROOT))
        if run.path.resolve() == state.run.path.resolve():
            raise UsageError(
                f"draft.tokens={name} is this run itself", "give the number of an earlier run"
            )
        if run.prompt_tokens != state.tokens:
            raise Ds4FlowError(
                f"draft.tokens={name} is a run of another prompt",
                "give a greedy run of this prompt and model, or leave draft.tokens out",
            )
        return run.tokens

    def propose(self, state: State, depth: int) -> None:
        """Draft as the MTP block would, as far as the recording goes."""
        oracle = self.oracle
        if depth and oracle is not None:
            at = state.cache.length  # of the certain token, which the recording has as well
            strayed = not oracle.left(at) or oracle.recorded[at - oracle.first] != state.next_token
            depth = 0 if strayed else min(depth, oracle.left(at + 1))
            oracle.chain()
        super().propose(state, depth)
        if not depth and state.draft_end == "off":
            state.draft_end = "recording"

    def _at_once(self) -> bool:
        return self.gate <= 0.0  # else how far a chain goes is known only step by step

    def _forced(self, position: int, depth: int) -> list[int]:
        assert self.oracle is not None
        return [self.oracle.propose(place) for place in range(position, position + depth)]

    def _choose(
        self, state: State, logits: torch.Tensor, position: int, drawn: list[np.ndarray]
    ) -> tuple[int, float]:
        _, gap = top_two(logits)  # as dear as a real draft
        assert self.oracle is not None
        return self.oracle.propose(position), gap


class LyingDrafter(Drafter):
    """Always wrong: asks the target itself and proposes another token. For tests and parity runs.

    It writes cache rows beyond the cursor, which must stay invisible.
    """

    kind = "lying, synthetic"

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
