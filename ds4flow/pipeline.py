"""A run as a pipeline: setup stages once, then a cycle of stages until done, with observers.

What a stage reads and writes is declared and checked when the pipeline is built.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ds4flow.errors import Ds4FlowError, UsageError, near_match

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ds4flow.cache import KVCache
    from ds4flow.conversation import Message
    from ds4flow.depth import Decision
    from ds4flow.gguf import GgufFile
    from ds4flow.kept import Kept
    from ds4flow.model.trunk import Model
    from ds4flow.rundir import RunDir
    from ds4flow.sampling import Sampling
    from ds4flow.speculate import Draft, Verdict
    from ds4flow.stale import Fresh
    from ds4flow.tokenizer import Tokenizer


class Files(NamedTuple):
    """The opened model files of a run; `mtp` is None when there is no MTP block."""

    main: GgufFile
    mtp: GgufFile | None


UNSET: Any = None
"""Default of fields that a stage sets; the pipeline checks that it runs before any reader."""


@dataclass
class State:
    """Everything that the stages of one run share. What is not there yet is None.

    Between cycles, `next_token` is the target's choice for the next position: certain, but not yet
    in the cache or among the tokens. `hidden [N, D]` are the target's streams of the last committed
    row.
    """

    run: RunDir
    prompt: str
    messages: tuple[Message, ...] = ()  # a conversation, instead of the prompt
    files: Files = UNSET
    model: Model = UNSET
    tokenizer: Tokenizer = UNSET
    cache: KVCache = UNSET
    kept: Kept | None = None  # of the text before this one, on the same model
    runs_on: str = ""  # device, kernels and why; then how the cycle runs
    sampling: Sampling | None = None  # None: the argmax, always
    mtp_off: str = ""  # why drafting is switched off, empty when it is not
    tokens: list[int] = UNSET  # committed: prompt and output
    prompt_length: int = 0
    next_token: int = UNSET
    first_gap: float | None = None  # the target's top-2 logit gap where the prompt ends
    hidden: torch.Tensor = UNSET
    fresh: Fresh | None = None
    drafter: str = ""  # which drafter the run has; `synthetic` ones say so
    drafts: tuple[Draft, ...] = ()
    draft_logits: tuple[torch.Tensor, ...] = ()  # one row [V] a draft
    draft_from: tuple[np.ndarray, ...] = ()  # when sampling: what each draft was drawn from, [V]
    draft_end: str = ""  # why drafting stopped: depth, gate, eos, room, auto, off, recording
    depth_choice: Decision | None = None  # of mtp.draft=auto
    rows: tuple[int, ...] = ()  # the tokens of the verify pass
    streams: torch.Tensor = UNSET  # [rows, N, D]
    logits: torch.Tensor = UNSET  # [rows, V]
    verdict: Verdict = UNSET
    committed: tuple[int, ...] = ()  # by this cycle
    relaxed: int = 0  # of these, drafts that were not the target's argmax
    identity: str = "exact"  # relaxed by a margin below 1; sampled when sampling
    pieces: list[str] = field(default_factory=list)  # text that may be shown, in order
    done: str | None = None  # why the run ended: eos, stop, limit, context
    cycle: int = 0
    micros: dict[str, int] = field(default_factory=dict)  # by stage, of this cycle
    total_micros: dict[str, int] = field(default_factory=dict)  # by stage, of the run
    loop_micros: int = 0  # wall time of all cycles, observers included
    extra: dict[str, Any] = field(default_factory=dict)  # for stages from elsewhere

    def share_with(self, run: RunDir, prompt: str, messages: tuple[Message, ...] = ()) -> State:
        """The state of another prompt in `run`: what `Pipeline.share` made, and all else fresh."""
        if self.mtp_off:
            run.record(mtp_off=self.mtp_off)
        return State(run, prompt, messages, **{name: getattr(self, name) for name in SHARED})

    def switch_mtp_off(self, reason: str) -> None:
        """Draft no more in this run; says so once, and records it."""
        if not self.mtp_off:
            self.mtp_off = reason
            self.run.record(mtp_off=reason)
            print(f"MTP is off: {reason}", file=sys.stderr)

    @property
    def output(self) -> list[int]:
        """The committed tokens after the prompt."""
        return [] if self.tokens is None else self.tokens[self.prompt_length :]

    def mark_relaxed(self) -> None:
        """A margin below 1 judged drafts: from here on the text may not be greedy's."""
        if self.identity == "exact":
            self.identity = "relaxed"
            self.run.record(identity="relaxed")

    def drafts_left(self, max_tokens: int) -> int:
        """Drafts that a text of `max_tokens` and the context still have room for.

        A cycle commits one token more than it accepts drafts.
        """
        room = self.cache.context - self.cache.length
        return min(max_tokens - self.produced, room) - 1

    @property
    def produced(self) -> int:
        """How many tokens were committed after the prompt."""
        return 0 if self.tokens is None else len(self.tokens) - self.prompt_length

    @property
    def text(self) -> str:
        """The output text so far, without what may still become a stop string."""
        return "".join(self.pieces)


FIELDS = tuple(item.name for item in fields(State))
ALWAYS = frozenset(item.name for item in fields(State) if item.default is not None)
"""Fields that have a value from the start."""

SHARED = ("files", "tokenizer", "model", "kept", "mtp_off")
"""Fields that are the same for every prompt of one config: what `Stage.share` may set."""


@dataclass
class Stage:
    """One step of a run. The fields of a subclass are the keys of its config group.

    `reads` and `writes` name fields of `State`. `run` is called once in setup, or once a cycle.
    Several prompts in one load run in pipelines of their own, whose stages are new, on states that
    begin with what `share` made; a stage without it needs to know nothing of that.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def share(self, state: State) -> None:
        """Set those of the fields `SHARED` that this stage makes; `run` takes them as they are."""

    def share_key(self) -> object:
        """Stages with equal keys share equal things. Unless a stage knows better: all its keys."""
        return type(self), *(getattr(self, item.name) for item in fields(self) if item.init)

    @classmethod
    def unfit(cls, values: Mapping[str, Any]) -> str:
        """Why a stage with these keys cannot stand in `pipeline.on_gpu`; empty when it can."""
        return ""

    def prepare(self, state: State) -> None:
        """Called once between setup and the first cycle, outside of every measured time."""

    def run(self, state: State) -> None:
        """Do the step."""
        raise NotImplementedError

    def close(self, state: State) -> None:
        """Called once when the run ends, however it ends; `state` may be incomplete."""


class Pipeline:
    """Stages by name in three roles. Construction raises UsageError for wiring that cannot work."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        *,
        setup: Sequence[str],
        cycle: Sequence[str],
        observe: Sequence[str] = (),
        note: str = "",
    ) -> None:
        self.stages = stages
        self.setup, self.cycle, self.observe = setup, cycle, observe
        self.note = note  # how the cycle came to be chosen, if that must be told
        self._writers: dict[str, list[str]] = {}
        for name, stage in stages.items():
            for item in stage.writes:
                self._writers.setdefault(item, []).append(name)
        self._check()

    def _check(self) -> None:
        if not self.cycle:
            raise UsageError("pipeline.cycle is empty", "name the stages of a cycle, in order")
        known = set(ALWAYS)
        for role in ("setup", "cycle", "observe"):
            for name in getattr(self, role):
                stage = self.stages[name]
                for item in (*stage.reads, *stage.writes):
                    if item not in FIELDS:
                        raise UsageError(
                            f"stage {name} ({type(stage).__name__}) names the field {item!r}, "
                            "which State does not have",
                            near_match(item, FIELDS) or "use state.extra for fields of your own",
                        )
                missing = [item for item in stage.reads if item not in known]
                if missing:
                    raise UsageError(
                        f"stage {name} in pipeline.{role} reads {', '.join(missing)}, "
                        "which no stage before it writes",
                        self._who_writes(missing[0]),
                    )
                known.update(stage.writes)
        if "done" not in self._writers:
            raise UsageError("no stage writes done, so the cycle would not end", "add commit")

    def _who_writes(self, item: str) -> str:
        writers = self._writers.get(item)
        if writers:
            return f"put {' or '.join(writers)} before it"
        return f"add a stage that writes {item} to the pipeline"

    def share(self, state: State) -> None:
        """Do the part of setup that serves any number of prompts: files, tokenizer, model."""
        for name in self._sharing():
            start = time.perf_counter_ns()
            self.stages[name].share(state)
            state.total_micros[name] = (time.perf_counter_ns() - start) // 1000

    def share_key(self) -> object:
        """Pipelines with equal keys can use what either of them has shared."""
        return tuple((name, self.stages[name].share_key()) for name in self._sharing())

    def _sharing(self) -> list[str]:
        """Setup stages that share something: no others can make shared things differ."""
        return [name for name in self.setup if type(self.stages[name]).share is not Stage.share]

    def run(self, state: State) -> None:
        """Run setup, then cycles until a stage sets `done`. Stages are closed in every case."""
        try:
            for name in self.setup:
                self._step(name, state)
            if self.note:
                state.run.record(decode={"mode": "stages", "why": self.note})
                print(f"decoding: stage by stage ({self.note})", file=sys.stderr)
            for name in dict.fromkeys((*self.cycle, *self.observe)):
                self.stages[name].prepare(state)
            start = time.perf_counter_ns()
            while state.done is None:
                state.cycle += 1
                state.micros = {}
                for name in (*self.cycle, *self.observe):
                    self._step(name, state)
                state.loop_micros = (time.perf_counter_ns() - start) // 1000
        except BaseException:
            self._close(state)  # what stopped the run is what the user must see
            raise
        failures = self._close(state)
        if failures:
            raise failures[0]

    def _step(self, name: str, state: State) -> None:
        stage = self.stages[name]
        if state.cycle <= 1:  # what had a value once keeps one
            self._check_values(name, stage, state)
        start = time.perf_counter_ns()
        stage.run(state)
        micros = (time.perf_counter_ns() - start) // 1000
        state.micros[name] = micros
        state.total_micros[name] = state.total_micros.get(name, 0) + micros

    def _check_values(self, name: str, stage: Stage, state: State) -> None:
        for item in stage.reads:
            if getattr(state, item) is None:
                raise Ds4FlowError(
                    f"stage {name} reads {item}, which has no value yet", self._who_writes(item)
                )

    def _close(self, state: State) -> list[Exception]:
        """Close every stage, also after one fails to; return the failures."""
        failures: list[Exception] = []
        for stage in self.stages.values():
            try:
                stage.close(state)
            except Exception as error:
                failures.append(error)
        return failures
