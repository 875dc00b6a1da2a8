"""What `trace=full` keeps of a cycle, and what passes of each width cost: the stuff of what-if.

It reads logits that are there anyway and runs nothing while the text is generated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from ds4flow.pace import Prior
from ds4flow.pipeline import State
from ds4flow.speculate import argmax, top_gap, verify
from ds4flow.stale import Fresh

ROUNDS = 5, 25
"""Least and most rounds of timed passes; each times every width once, so slow moments hit all."""

ENOUGH_SECONDS = 2.0
"""After which there are no more rounds than the least."""


class Waiting(NamedTuple):
    """Drafts of a probe, whose fate later cycles decide; the first stands at `first`."""

    first: int
    tokens: tuple[int, ...]


@dataclass
class Tracer:
    """Makes one record a cycle; of a probe also how later rows judge its unused drafts."""

    waiting: list[Waiting] = field(default_factory=list)
    micros: int = 0  # spent on tracing and writing it, in all
    last: int = 0  # of these, in the last cycle
    ids: set[int] = field(default_factory=set)  # of runners-up, for their text

    def record(self, state: State, position: int) -> dict[str, Any]:
        """What `trace=full` adds to the line of the cycle that began at `position`.

        `choices[j]` and `runners[j]` are the target's best and second token of row j, which decides
        position + j + 1. `draft_ratios[j]` is `p_target(draft j) / p_target(argmax)` of every draft
        in the pass; behind a wrong draft that is the target's view of a text that was not kept.
        `draft_runners[j]` is the drafter's second token. `late` holds `[depth, ratio]` of a probe's
        drafts for position + 1, made in the cycle at position + 1 - depth, as long as all drafts
        before them were right. `before` are the microseconds of all earlier cycles, and of tracing
        in the last of them.
        """
        choices = argmax(state.logits).tolist()
        runners = _runners_up(state.logits, choices)
        draft_runners: list[int] = []
        if state.draft_logits:
            drafter_rows = torch.stack(tuple(state.draft_logits))
            draft_runners = _runners_up(drafter_rows, [draft.token for draft in state.drafts])
        in_pass = state.rows[1:]
        found = {
            "choices": choices,
            "runners": runners,
            "draft_ratios": [
                _ratio(row, token, choice)
                for row, token, choice in zip(state.logits, in_pass, choices, strict=False)
            ],
            "draft_runners": draft_runners,
            "late": [] if in_pass else self._late(state, position + 1, choices[0]),
            "before": {"loop": state.loop_micros, "tracing": self.last},
        }
        self.ids.update(choices, runners, draft_runners)
        return found

    def spent(self, micros: int) -> None:
        """Note what tracing and writing a cycle took."""
        self.last = micros
        self.micros += micros

    def _late(self, state: State, position: int, choice: int) -> list[tuple[int, float]]:
        """Judge every unused draft for `position`; where one is wrong, those behind it are moot."""
        tokens = tuple(draft.token for draft in state.drafts)
        found, kept = [], []
        for one in (*self.waiting, Waiting(position, tokens)):
            place = position - one.first
            if place >= len(one.tokens):
                continue
            found.append((place + 1, _ratio(state.logits[0], one.tokens[place], choice)))
            if one.tokens[place] == choice:
                kept.append(one)
        self.waiting = kept
        return found


def _ratio(logits: torch.Tensor, token: int, choice: int) -> float:
    return math.exp(float(logits[token]) - float(logits[choice]))


def _runners_up(logits: torch.Tensor, best: Sequence[int]) -> list[int]:
    """The second token of each row of `logits [M, V]`, beside the `best` one."""
    pairs = torch.topk(logits, 2).indices.tolist()
    return [
        second if first == top else first for (first, second), top in zip(pairs, best, strict=True)
    ]


def measure_costs(state: State) -> dict[str, Any] | None:
    """Time passes and draft steps where the run ended, each after what comes before it in a cycle.

    That matters, as a pass leaves its weights in the processor's caches, and not the drafter's.
    Returns microseconds: `plain_micros` of a pass of one row after a pass,
    `verify_micros_by_width` of passes after a draft step (from width 1, the verdict included),
    `step_micros_by_stale_rows` of a draft step after a pass (from 0 rows to refresh; empty without
    an MTP block) and `next_step_micros` of one after a step; and `prior`, from which mtp.draft=auto
    starts. What is timed writes rows behind the cursor only, which nothing sees. None when the
    context has no room.
    """
    cache, model = state.cache, state.model
    widest = min(cache.draft_max + 1, cache.context - cache.length)
    if widest < 1:
        return None
    if model.mtp is not None and state.fresh is not None:  # as the next draft would begin
        model.mtp.warm(state.fresh.streams, state.fresh.tokens, state.fresh.first, cache)
    drafts = model.mtp is not None
    one_pass, one_step = _pass(state, 1), _step(state, 0) if drafts else _pass(state, 1)
    timed = [(one_pass, one_pass), (one_step, one_step)]
    timed += [(one_step, _pass(state, width)) for width in range(1, widest + 1)]
    timed += [(one_pass, _step(state, rows)) for rows in range(widest) if drafts]
    plain, next_step, *others = _times(timed)
    return {
        "plain_micros": plain,
        "verify_micros_by_width": others[:widest],
        "step_micros_by_stale_rows": others[widest:],
        "next_step_micros": next_step if drafts else None,
        "prior": asdict(Prior.of(model)),
    }


def _pass(state: State, width: int) -> Callable[[], object]:
    """A pass over the text's last tokens: different ones, as those of drafts, use more experts."""
    tokens = [state.next_token, *state.tokens[::-1]][:width]
    tokens += [state.next_token] * (width - len(tokens))

    def run() -> object:
        return verify(state.model.logits(state.model.forward(tokens, state.cache)), tokens[1:])

    return run


def _step(state: State, rows: int) -> Callable[[], object]:
    """A draft step, its token chosen, behind `rows` rows that are to be refreshed before it."""
    block, first = state.model.mtp, state.cache.length
    assert block is not None
    stale = None
    if rows:
        streams = state.hidden[None].expand(rows, *state.hidden.shape).contiguous()
        stale = Fresh(first, (state.next_token,) * rows, streams)

    def run() -> object:
        logits, _ = block.step(state.hidden, state.next_token, first + rows, state.cache, stale)
        return argmax(logits), top_gap(logits)

    return run


def _times(pairs: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> list[float]:
    """Microseconds of each pair's second action, right after its first; the least of all rounds:
    what else the machine did is no cost of a width.
    """
    taken: list[list[int]] = [[] for _ in pairs]
    for _, action in pairs:  # caches and kernels warm up untimed
        action()
    began = time.perf_counter()
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and time.perf_counter() - began > ENOUGH_SECONDS:
            break
        for times, (before, action) in zip(taken, pairs, strict=True):
            before()
            start = time.perf_counter_ns()
            action()
            times.append(time.perf_counter_ns() - start)
    return [min(times) / 1000 for times in taken]
