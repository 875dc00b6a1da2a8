"""A traced run as what-if needs it: the text, and the drafts from each place that has some.

With `mtp.probe` there are drafts from every place of the text, made as any exact run would make
them there; without it only from the places where the run's own cycles began.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.runs.record import Run

RECOMMENDED = "mtp.draft=8 mtp.probe=true trace=full"
"""The words of a run that tells the most."""


@dataclass(frozen=True)
class Start:
    """The drafts of one cycle, which began at output token `index`.

    `ratios[j]` is `p_target(draft j) / p_target(argmax)` with the drafts before it in place, None
    where it was not recorded. `end` says why drafting stopped, as in cycles.jsonl.
    """

    index: int
    drafts: tuple[int, ...]
    gaps: tuple[float, ...]
    ratios: tuple[float | None, ...]
    end: str
    committed: int
    draft_micros: int
    verify_micros: int
    commit_micros: int
    host_micros: int | None  # outside its phases and its tracing; unknown of the last cycle


@dataclass(frozen=True)
class Traced:
    """What a run tells about drafting. `depth` and `gate` bound what can be asked."""

    run: Run
    output: tuple[int, ...]
    starts: tuple[Start, ...]
    depth: int
    gate: float
    probe: bool

    @classmethod
    def read(cls, run: Run) -> Traced:
        """Read a run; Ds4FlowError for one that cannot tell anything, with what to run instead."""
        _refuse_unsuited(run)
        cycles = list(run.cycles())
        start = cycles[0]["position"] if cycles else 0
        late = _late_ratios(cycles)
        starts = tuple(
            _start(cycle, after, start, late.get(cycle["position"], {}))
            for cycle, after in zip(cycles, [*cycles[1:], {}], strict=False)
        )
        if not any(one.drafts for one in starts):
            raise Ds4FlowError("the run drafted nothing", f"trace one with {RECOMMENDED}")
        config = run.config
        return cls(
            run,
            tuple(run.tokens),
            starts,
            int(config["mtp.draft"]),
            float(config["mtp.gate"]),
            bool(config["mtp.probe"]),
        )

    @cached_property
    def by_index(self) -> dict[int, Start]:
        """The starts by the output token at which their cycle began."""
        return {start.index: start for start in self.starts}

    @property
    def pure(self) -> bool:
        """Whether drafts depend on the text before them alone, so that any run makes the same."""
        config = self.run.config
        return self.run.facts.get("choices", {}).get("draft") == "mtp" and not config.get(
            "mtp.keep_accepted"
        )

    def room(self, index: int) -> int:
        """Most drafts of a cycle that begins at output token `index`, by tokens and context."""
        prompt = self.run.summary.get("prompt_tokens", 0)
        context = self.run.facts.get("context_limit", 0)
        left = min(self.run.config["commit.max_tokens"] - index, context - prompt - index)
        return max(0, int(left) - 1)


def _refuse_unsuited(run: Run) -> None:
    config = run.config
    again = f"trace one with {RECOMMENDED}"
    if not config or "mtp.draft" not in config:
        raise Ds4FlowError("the run did not record its config", again)
    if (run.path / "prompts.jsonl").is_file():
        raise UsageError("the run is a set of prompts", "name one of its prompts: RUN/prompt-0-ID")
    if not (run.path / "cycles.jsonl").is_file():
        raise Ds4FlowError("the run recorded no cycles (trace=off)", again)
    if not run.summary:
        raise Ds4FlowError(f"the run is {run.status} and left no summary", again)
    if run.summary.get("identity") != "exact":
        raise Ds4FlowError(
            f"the text of this run is {run.summary.get('identity')}, not the greedy one", again
        )
    if not isinstance(config["mtp.draft"], int):
        raise Ds4FlowError("mtp.draft=auto drafts to a depth of its own", again)


def _late_ratios(cycles: list[dict[str, Any]]) -> dict[int, dict[int, float]]:
    """`{position of a probe's cycle: {depth: ratio}}`, gathered from the cycles that found out."""
    found: dict[int, dict[int, float]] = {}
    for cycle in cycles:
        for depth, ratio in cycle.get("trace", {}).get("late", ()):
            found.setdefault(cycle["position"] + 1 - depth, {})[depth] = ratio
    return found


def _start(
    cycle: dict[str, Any], after: dict[str, Any], first: int, late: dict[int, float]
) -> Start:
    drafts = tuple(cycle["drafts"])
    known = cycle.get("trace", {}).get("draft_ratios") or cycle["ratios"]
    by_depth = dict(enumerate(known, 1)) | late
    micros = cycle["micros"]
    return Start(
        cycle["position"] - first,
        drafts,
        tuple(cycle["draft_gaps"]),
        tuple(by_depth.get(depth) for depth in range(1, len(drafts) + 1)),
        cycle["draft_end"],
        len(cycle["tokens"]),
        micros.get("draft", 0),
        micros.get("verify", 0),
        micros.get("commit", 0),
        _host_micros(cycle, after),
    )


def _host_micros(cycle: dict[str, Any], after: dict[str, Any]) -> int | None:
    """What a cycle took outside its phases; the next one says when it ended."""
    began, ended = (one.get("trace", {}).get("before") for one in (cycle, after))
    if not began or not ended:
        return None
    phases = sum(cycle["micros"].get(name, 0) for name in ("draft", "verify", "commit"))
    return max(0, int(ended["loop"] - began["loop"] - phases - ended["tracing"]))
