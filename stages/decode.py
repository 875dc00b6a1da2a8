"""Draft and verify as one step on the device, captured as a graph where the device has graphs.

What it leaves in the state is what `draft` and `verify` would leave, so that commit, observers and
records need not know.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds4flow.depth import DepthPolicy, Experience
from ds4flow.errors import UsageError
from ds4flow.graph import Cycle, DecodeGraph, Rules, Usage
from ds4flow.pace import AUTO_DEPTH_MAX
from ds4flow.pipeline import Stage, State
from ds4flow.sampling import verify_sampled
from ds4flow.speculate import Verdict

DRAFTERS = {"MtpDrafter": True, "NoDrafter": False}
"""Drafters that the graph can stand for, and whether they draft."""


@dataclass
class Decode(Stage):
    """One `DecodeGraph` cycle: the device drafts, verifies and moves on; `commit` follows here.

    The graph drafts greedily with the model's MTP block. When the run samples, it only computes
    the logits, the host draws from them, and MTP is switched off. `depth=auto` learns the cost of
    whole cycles by width.
    """

    drafter: str
    depth: int | str
    gate: float
    keep_accepted: bool
    margin: float
    strict: bool
    probe: bool
    max_tokens: int
    ignore_eos: bool
    sampling: dict[str, Any]
    eager: bool
    graph: DecodeGraph | None = field(default=None, init=False)
    policy: DepthPolicy | None = field(default=None, init=False)
    usage: Usage = field(default_factory=Usage, init=False)
    drafts: bool = field(init=False)

    reads = ("model", "tokenizer", "cache", "tokens", "next_token", "hidden")
    writes = ("drafts", "draft_logits", "draft_from", "draft_end", "depth_choice", "drafter",
              "rows", "streams", "logits", "verdict", "identity", "runs_on")  # fmt: skip

    def __post_init__(self) -> None:
        name = self.drafter.rpartition(".")[2]
        if name not in DRAFTERS:
            raise UsageError(
                f"pipeline=graph drafts with the model's own MTP block, not with {self.drafter}",
                "use draft=mtp or draft=off, or pipeline=speculative",
            )
        self.drafts = DRAFTERS[name]

    @classmethod
    def unfit(cls, values: Mapping[str, Any]) -> str:
        """Why the graph cannot stand for the ordinary cycle: what it does not do, that does."""
        drafter, depth = values["drafter"].rpartition(".")[2], values["depth"]
        if drafter not in DRAFTERS:
            return f"the graph drafts with the MTP block, and this run with {drafter}"
        sampling = values["sampling"]
        if depth != 0 and DRAFTERS[drafter] and sampling["temperature"] and sampling["lossless"]:
            return "the graph drafts greedily, and this run while sampling"
        return ""

    def prepare(self, state: State) -> None:
        """Make the graphs of all widths that can come, and say how decoding runs."""
        state.drafter = "mtp" if self.drafts else "off"
        if self.drafts and self.depth != 0:
            if state.model.mtp is None:
                state.switch_mtp_off("the model files hold no MTP weights")
            elif state.sampling is not None:
                state.switch_mtp_off(
                    "the graph drafts greedily; pipeline=speculative drafts while sampling"
                )
        if self.depth == "auto":
            known = Experience.of(state.model, whole=True)
            state.run.record(draft_auto=known.facts())
            self.policy = DepthPolicy(AUTO_DEPTH_MAX, known)
        rules = Rules(
            margin=1.0 if self.strict else self.margin,
            gate=self.gate,
            eos=None if self.ignore_eos else state.tokenizer.eos,
            keep_accepted=self.keep_accepted,
            probe=self.probe,
        )
        self.graph = self._graph(state, rules)
        self.usage = self.graph.count()
        if state.done is None:
            limit = state.prompt_length + self.max_tokens
            self.graph.start(state.next_token, state.hidden, limit)
            left = state.drafts_left(self.max_tokens)
            deepest = 0 if self._off(state) else min(state.cache.draft_max, left)
            self.graph.capture(range(max(0, deepest) + 1))
        state.runs_on += f", decoding: {self.graph.mode}"
        state.run.record(decode={"mode": self.graph.mode, "why": self.graph.why})
        print(f"decoding: {self.graph.mode} ({self.graph.why})", file=sys.stderr)

    def _graph(self, state: State, rules: Rules) -> DecodeGraph:
        """The graph of the text before this one if it fits, else a new one."""
        found = state.kept and state.kept.find(state.cache, rules, eager=self.eager)
        graph = found or DecodeGraph(state.model, state.cache, eager=self.eager, rules=rules)
        if state.kept is not None:
            state.kept.graph = graph
        return graph

    def run(self, state: State) -> None:
        """Run one cycle on the device and tell the state what it did; the cursor stays."""
        assert self.graph is not None  # prepare
        width = self._width(state)
        start = time.perf_counter()
        cycle = self.graph.step(width)
        self._tell(state, width, cycle)
        if self.policy is not None and not state.mtp_off:
            self.policy.observe(
                drafted=len(cycle.rows) - 1,
                accepted=cycle.accepted,
                steps=0,  # drafting and verifying are one: the cost is that of the width
                draft_s=0.0,
                verify_s=time.perf_counter() - start,
            )

    def close(self, state: State) -> None:
        """Record which widths were captured, were there already, and how often each was used."""
        if self.graph is not None:
            state.run.record(graphs=asdict(self.usage))

    def _off(self, state: State) -> bool:
        return bool(state.mtp_off) or not self.drafts or self.depth == 0

    def _width(self, state: State) -> int:
        """Drafts of this cycle."""
        if self._off(state):
            state.draft_end = "off"
            return 0
        left = state.drafts_left(self.max_tokens)
        if self.policy is None:
            wanted = int(self.depth)
        else:
            state.depth_choice = self.policy.choose(left)
            wanted = state.depth_choice.depth
        state.draft_end = "room" if left <= 0 else "auto"  # of a cycle without drafts
        return max(0, min(wanted, left))

    def _tell(self, state: State, width: int, cycle: Cycle) -> None:
        assert self.graph is not None
        buffers, count = self.graph.buffers, len(cycle.rows)
        if width:
            state.draft_end = cycle.draft_end
        state.drafts = cycle.drafts
        state.draft_logits = tuple(buffers.draft_logits[: len(cycle.drafts)])
        state.draft_from = ()
        state.rows = cycle.rows
        # the next cycle overwrites the buffers, and what is committed may be looked at after it
        state.streams = buffers.streams[:count].clone()
        state.logits = buffers.logits[:count]
        state.verdict = self._verdict(cycle)
        if state.sampling is not None:
            place = state.cache.length + 1
            state.verdict = verify_sampled(state.logits, [], [], place, state.sampling)
            self.graph.choose(state.verdict.next_token)
        elif count > 1 and self.margin < 1.0 and not self.strict:
            state.mark_relaxed()

    def _verdict(self, cycle: Cycle) -> Verdict:
        reason = "none"
        if len(cycle.rows) > 1:
            rejected = "mismatch" if self.strict or self.margin >= 1.0 else "margin"
            reason = "full" if cycle.accepted == len(cycle.rows) - 1 else rejected
        return Verdict(
            cycle.accepted, cycle.next_token, reason, cycle.relaxed, cycle.ratios, cycle.gaps
        )
