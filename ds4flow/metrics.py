"""Counting speculation, by one definition each; the definitions travel with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

DEFINITIONS = {
    "output_tokens": "committed tokens after the prompt",
    "cycles": "verify passes, those without drafts included",
    "num_spec_steps": "verify passes with at least one draft",
    "num_draft_tokens": "drafts that were verified",
    "num_accepted_draft_tokens": "drafts that were committed; the certain token t0 is not a draft",
    "draft_acceptance_rate": "num_accepted_draft_tokens / num_draft_tokens",
    "mean_acceptance_length": "output tokens / cycles, so t0 is included",
    "acceptance_histogram": "cycles by accepted drafts; sum((k + 1) * count) is the output length",
    "verified_per_position": "drafts verified at depth 1, 2, ..",
    "accepted_per_position": "of the drafts verified at depth 1, 2, ..: share that was committed",
    "accepted_per_cycle": "num_accepted_draft_tokens / cycles",
    "relaxed_accepts": "committed drafts that were not the target's most likely token",
    "decode_seconds": "wall time of all cycles, observers included and prefill not",
    "tokens_per_second": "output tokens / decode_seconds",
    "prefill_tokens_per_second": "prompt tokens / prefill_seconds",
    "peak_memory_bytes": "largest resident memory of the process",
    "repeated_tokens": "output tokens that end a run of 8 tokens that was there before",
}

DEAD_AFTER = 64
"""Drafts after which a run without a single accepted one is called draft_dead."""

REPEATS = 8
"""Length of a run of tokens that counts as repeated text when it comes again."""


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`, None when there is nothing to divide by."""
    return part / whole if whole else None


def repeated(tokens: Sequence[int], first: int) -> int:
    """How many tokens from place `first` on end a run of `REPEATS` tokens that was there before.

    Loops and recitals of the prompt count; text like that is easy to draft, and acceptance on it
    says nothing about other text.
    """
    seen: set[tuple[int, ...]] = set()
    count = 0
    for end in range(REPEATS, len(tokens) + 1):
        run = tuple(tokens[end - REPEATS : end])
        count += end > first and run in seen
        seen.add(run)
    return count


def repetition(repeats: int, output: int) -> list[str]:
    """A warning when more than half of the output repeats earlier text."""
    if 2 * repeats <= output:
        return []
    return [
        f"{repeats} of {output} tokens repeat earlier text: acceptance and speed on such text say "
        "nothing about other text"
    ]


@dataclass
class Counts:
    """Counts over the cycles of one run; every number of the summary derives from these."""

    cycles: int = 0
    output: int = 0
    relaxed: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    verified_at: Counter[int] = field(default_factory=Counter)  # by depth, from 1
    accepted_at: Counter[int] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, *, drafted: int, committed: int, relaxed: int, draft_end: str) -> None:
        """Count one cycle: drafts verified, tokens committed, and why drafting ended."""
        self.cycles += 1
        self.output += committed
        self.relaxed += relaxed
        accepted = max(0, committed - 1)
        self.histogram[accepted] += 1
        self.verified_at.update(range(1, drafted + 1))
        self.accepted_at.update(range(1, accepted + 1))
        if not drafted:
            self.skipped[draft_end] += 1

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Counts:
        """The counts behind a run's summary."""
        histogram = dict(enumerate(summary["acceptance_histogram"]))
        counts = cls(
            cycles=summary["cycles"],
            output=summary["output_tokens"],
            relaxed=summary["relaxed_accepts"],
            histogram=Counter(histogram),
            verified_at=Counter(dict(enumerate(summary["verified_per_position"], 1))),
            skipped=Counter(summary["skipped"]),
        )
        for accepted, cycles in histogram.items():
            counts.accepted_at.update(dict.fromkeys(range(1, accepted + 1), cycles))
        return counts

    def merge(self, other: Counts) -> None:
        """Add the counts of another run, so that ratios can be taken over both."""
        self.cycles += other.cycles
        self.output += other.output
        self.relaxed += other.relaxed
        for name in ("histogram", "verified_at", "accepted_at", "skipped"):
            getattr(self, name).update(getattr(other, name))

    @property
    def drafted(self) -> int:
        """Drafts verified."""
        return self.verified_at.total()

    @property
    def accepted(self) -> int:
        """Drafts committed."""
        return self.accepted_at.total()

    @property
    def dead(self) -> bool:
        """Many drafts and not one accepted."""
        return self.drafted >= DEAD_AFTER and not self.accepted

    def summary(self) -> dict[str, Any]:
        """The counts under the names of vLLM's per-request block and of llama.cpp."""
        depths = range(1, max(self.verified_at, default=0) + 1)
        with_draft = self.cycles - self.skipped.total()
        return {
            "cycles": self.cycles,
            "cycles_with_draft": with_draft,
            "skipped": dict(self.skipped),
            "num_spec_steps": with_draft,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "draft_acceptance_rate": ratio(self.accepted, self.drafted),
            "mean_acceptance_length": ratio(self.output, self.cycles),
            "accepted_per_cycle": ratio(self.accepted, self.cycles),
            "acceptance_histogram": [
                self.histogram[k] for k in range(max(self.histogram, default=-1) + 1)
            ],
            "verified_per_position": [self.verified_at[k] for k in depths],
            "accepted_per_position": [
                ratio(self.accepted_at[k], self.verified_at[k]) for k in depths
            ],
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "relaxed_accepts": self.relaxed,
            "draft_dead": self.dead,
        }

    def warnings(self) -> list[str]:
        """What a reader of the numbers must know before believing them."""
        summary = self.summary()
        found = []
        if summary["draft_dead"]:
            found.append(
                f"none of {self.drafted} drafts was accepted: the drafter does not fit the target"
            )
        if self.accepted and summary["cycles_with_draft"] < 0.2 * self.cycles:
            found.append(
                f"only {summary['cycles_with_draft']} of {self.cycles} cycles had a draft; the "
                "acceptance rate speaks for those alone"
            )
        return found


@dataclass
class Costs:
    """Microseconds of cycles by their number of drafts, and where drafting would break even."""

    micros: dict[int, list[int]] = field(default_factory=dict)

    def add(self, drafted: int, micros: int) -> None:
        """Take one cycle: its drafts, and its draft, verify and commit phases together."""
        self.micros.setdefault(drafted, []).append(micros)

    def median(self, drafted: int) -> float | None:
        """The median cycle with so many drafts, None if there was none."""
        return float(median(self.micros[drafted])) if drafted in self.micros else None

    def break_even(self) -> dict[str, Any] | None:
        """Acceptance per draft at which the commonest depth is as fast as no drafts.

        `acceptance` is None where even certain drafts would not pay. None without a cycle of both
        kinds.
        """
        depths = [depth for depth in self.micros if depth]
        plain = self.median(0)
        if not depths or not plain:
            return None
        depth = max(depths, key=lambda d: (len(self.micros[d]), d))
        drafting = self.median(depth)
        assert drafting is not None
        needed = drafting / plain
        return {
            "depth": depth,
            "plain_micros": plain,
            "drafting_micros": drafting,
            "tokens_needed": needed,
            "acceptance": acceptance_for(needed, depth),
        }


def acceptance_for(tokens: float, depth: int) -> float | None:
    """The acceptance a per draft at which `1 + a + .. + a**depth == tokens`, by bisection.

    0 for a token or less; None if no a up to 1 gives so many tokens.
    """
    if tokens > depth + 1:
        return None
    if tokens <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(depth + 1)) < tokens:
            low = middle
        else:
            high = middle
    return high


@dataclass
class Probe:
    """Hits of drafts that are never used: each waits until its positions are committed."""

    waiting: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    drafted: int = 0
    hits_at: Counter[int] = field(default_factory=Counter)
    seen_at: Counter[int] = field(default_factory=Counter)

    def add(self, position: int, drafts: Sequence[int]) -> None:
        """Remember drafts for the positions from `position` on."""
        if drafts:
            self.drafted += len(drafts)
            self.waiting.append((position, tuple(drafts)))

    def settle(self, tokens: Sequence[int]) -> None:
        """Count what the committed `tokens` decide; a hit needs all drafts before it to be hits."""
        undecided = []
        for position, drafts in self.waiting:
            if position + len(drafts) > len(tokens):
                undecided.append((position, drafts))
                continue
            self.seen_at.update(range(1, len(drafts) + 1))
            for depth, draft in enumerate(drafts, 1):
                if draft != tokens[position + depth - 1]:
                    break
                self.hits_at[depth] += 1
        self.waiting = undecided

    def summary(self) -> dict[str, Any]:
        """Drafts made, decided and hit; hits by depth."""
        return {
            "drafted": self.drafted,
            "decided": self.seen_at.total(),
            "hits": self.hits_at.total(),
            "hit_rate": ratio(self.hits_at.total(), self.seen_at.total()),
            "hits_per_position": [
                ratio(self.hits_at[k], self.seen_at[k]) for k in sorted(self.seen_at)
            ],
        }
