"""Results of a prompt set: per prompt, per category and in total, all from counts.

Promise: no ratio is an average of ratios; prompts that did not finish are listed and not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ds4flow.metrics import DEFINITIONS, Counts, ratio, repetition
from ds4flow.prompt_set import Prompt
from ds4flow.runs.record import Run
from ds4flow.runs.sets import COLUMNS, category_rows

if TYPE_CHECKING:
    from rich.table import Table

NOT_RUN = "not run"
IDENTITIES = ("exact", "relaxed", "sampled")  # from the strongest promise to the weakest


@dataclass(frozen=True)
class Outcome:
    """What became of one prompt; `run` is None when it never began."""

    index: int
    prompt: Prompt
    run: Run | None

    @property
    def status(self) -> str:
        """complete, failed, interrupted or `NOT_RUN`."""
        return NOT_RUN if self.run is None else str(self.run.facts.get("status"))

    @property
    def error(self) -> str | None:
        """Why it failed."""
        error = None if self.run is None else self.run.facts.get("error")
        return error and str(error)


@dataclass
class Figures:
    """Sums over finished prompts, and the ratios of these sums."""

    prompts: int = 0
    prompt_tokens: int = 0
    repeated: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)
    identities: Counter[str] = field(default_factory=Counter)

    def add(self, run: Run) -> None:
        """Take a finished prompt; without a log stage there is nothing to add but one."""
        self.prompts += 1
        self.identities[str(run.facts.get("identity"))] += 1
        if not run.summary:
            return
        self.prompt_tokens += run.summary["prompt_tokens"]
        self.repeated += run.summary["repeated_tokens"]
        self.seconds += run.summary["decode_seconds"]
        self.prefill_seconds += run.summary["prefill_seconds"]
        self.counts.merge(Counts.of(run.summary))

    @property
    def identity(self) -> str:
        """The weakest of its prompts."""
        return max(self.identities, key=_weakness, default=IDENTITIES[0])

    def summary(self) -> dict[str, Any]:
        """The figures under the names of a single run's summary."""
        return {
            "prompts_complete": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.counts.output,
            "identity": self.identity,
            **self.counts.summary(),
            "repeated_tokens": self.repeated,
            "decode_seconds": self.seconds,
            "tokens_per_second": ratio(self.counts.output, self.seconds),
            "prefill_seconds": self.prefill_seconds,
            "prefill_tokens_per_second": ratio(self.prompt_tokens, self.prefill_seconds),
        }


def _weakness(identity: str) -> int:
    return IDENTITIES.index(identity) if identity in IDENTITIES else len(IDENTITIES)


class SetResult(NamedTuple):
    """The outcomes of a set with the figures of its categories, in order, and of all."""

    outcomes: Sequence[Outcome]
    categories: dict[str, Figures]
    total: Figures

    def of_category(self, name: str) -> list[Outcome]:
        """The prompts of one category."""
        return [one for one in self.outcomes if one.prompt.category == name]

    def warnings(self) -> list[str]:
        """What a reader of the figures must know before believing them."""
        runs = [one.run for one in self.outcomes if one.run is not None]
        found = list(dict.fromkeys(note for run in runs for note in run.facts.get("notes") or ()))
        counts = self.total.counts
        finished = [one for one in self.outcomes if one.status == "complete" and one.run]
        if len(finished) < len(self.outcomes):
            count = f"{len(finished)} of {len(self.outcomes)} prompts"
            found.append(f"the figures are of {count}: the others did not finish")
        most = max(finished, key=_output, default=None)
        if len(finished) == 1:
            found.append("one prompt only: the figures speak for that prompt")
        elif most is not None and 2 * _output(most) > counts.output:
            found.append(
                f"{_output(most)} of {counts.output} tokens are of the prompt {most.prompt.id}: "
                "the totals speak for that prompt"
            )
        if counts.drafted:
            found += repetition(self.total.repeated, counts.output)
        return [*found, *counts.warnings()]

    def summary(self) -> dict[str, Any]:
        """The content of the set's summary.json."""
        statuses = Counter(one.status for one in self.outcomes)
        return {
            **self.total.summary(),
            "prompt_statuses": dict(statuses),
            "warnings": self.warnings(),
            "categories": {
                name: {"prompts": len(self.of_category(name)), **figures.summary()}
                for name, figures in self.categories.items()
            },
            "prompts": [_row(one) for one in self.outcomes],
            "definitions": DEFINITIONS,
        }


def collect(outcomes: Iterable[Outcome]) -> SetResult:
    """Add up what finished."""
    outcomes = list(outcomes)
    total = Figures()
    categories = {one.prompt.category: Figures() for one in outcomes}
    for one in outcomes:
        if one.run is not None and one.status == "complete":
            total.add(one.run)
            categories[one.prompt.category].add(one.run)
    return SetResult(outcomes, categories, total)


def _output(outcome: Outcome) -> int:
    return 0 if outcome.run is None else outcome.run.summary.get("output_tokens", 0)


_SHOWN = (
    *("prompt_tokens", "output_tokens", "finish_reason", "identity", "cycles"),
    *("num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate"),
    *("mean_acceptance_length", "relaxed_accepts", "repeated_tokens"),
    *("decode_seconds", "tokens_per_second", "prefill_seconds"),
)


def _row(outcome: Outcome) -> dict[str, Any]:
    prompt, run = outcome.prompt, outcome.run
    row: dict[str, Any] = {
        "index": outcome.index,
        "id": prompt.id,
        "category": prompt.category,
        "line": prompt.line,
        "directory": None if run is None else run.path.name,
        "status": outcome.status,
        "error": outcome.error,
    }
    if run is not None:
        row |= {name: run.summary[name] for name in _SHOWN if name in run.summary}
        row["seed"] = run.facts.get("seed")
        row["parity"] = run.facts.get("parity")
    return row


# --- on the terminal -----------------------------------------------------------------------------


def line(outcome: Outcome) -> str:
    """One prompt's outcome in a line."""
    if outcome.status == "failed":
        return f"failed: {outcome.error}".replace("\n", " / ")
    if outcome.run is None or outcome.status != "complete":
        return outcome.status
    summary = outcome.run.summary
    return (
        f"{summary.get('output_tokens')} tokens ({summary.get('finish_reason')}), "
        f"{_number(summary.get('tokens_per_second'), '.1f')} tokens/s, accepted "
        f"{_number(summary.get('draft_acceptance_rate'), '.1%')} of "
        f"{summary.get('num_draft_tokens')} drafts"
    )


def table(result: SetResult) -> Table:
    """A row for each category, and one for all."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, collapse_padding=True)
    shown.add_column(COLUMNS[0], overflow="fold", min_width=len(COLUMNS[0]))
    for column in COLUMNS[1:-1]:
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column(COLUMNS[-1], no_wrap=True)
    for row in category_rows(result.summary()):
        shown.add_row(*row)
    shown.rows[-1].style = "bold"
    return shown


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
