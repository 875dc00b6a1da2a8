"""The output of a run, token by token: what was accepted, corrected, rejected, and on what grounds.

Every committed token appears once and in order; drafts that were not committed stand where they
were proposed.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds4flow.runs.record import Run

KINDS = {
    "certain": "the target's own token after the prompt, or after a cycle without drafts",
    "bonus": "the target's own token after a cycle whose drafts were all accepted: free",
    "corrected": "the target's own token where a draft was rejected",
    "accepted": "a draft that was the target's choice too",
    "relaxed": "a draft that the margin let pass though the target's choice was another",
    "drawn": "a draft that lossless sampling kept",
    "rejected": "a draft that was verified and refused",
    "unused": "a draft after a rejected one: verified, never looked at",
    "beyond": "a draft beyond the end of the text",
    "probe": "a draft that was only compared, never used",
}
"""What the kinds of tokens mean, in the order of a legend."""

COMMITTED = ("certain", "bonus", "corrected", "accepted", "relaxed", "drawn")
"""The kinds that are part of the text; the others are drafts that are not."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the output, or one draft that did not become a part of it.

    `depth` counts drafts from 1 and is 0 for a token of the target's own. `gap` is the target's
    logit gap between its two likeliest tokens there, `draft_gap` the drafter's; `ratio` is the
    draft's probability over that of the target's choice (when sampling: over the drafter's).
    `choice` and `runner` are the target's two likeliest tokens there, `draft_runner` the drafter's
    second one; most are known with trace=full only. What was not recorded is None.
    """

    kind: str
    id: int
    text: str
    position: int
    cycle: int
    depth: int = 0
    gap: float | None = None
    draft_gap: float | None = None
    ratio: float | None = None
    choice: int | None = None
    runner: int | None = None
    draft_runner: int | None = None

    @property
    def committed(self) -> bool:
        """Whether it is part of the text."""
        return self.kind in COMMITTED


def pieces_of(run: Run) -> dict[int, bytes]:
    """The bytes of every token id of a run; empty when it did not get to write them."""
    try:
        found = json.loads((run.path / "pieces.json").read_bytes())
        return {int(id): text.encode(errors="surrogateescape") for id, text in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def tokens_of(
    cycles: Iterable[Mapping[str, Any]],
    pieces: Mapping[int, bytes],
    *,
    sampled: bool = False,
    first_gap: float | None = None,
) -> list[Token]:
    """Every token of the cycles of one run, in order, drafts that were not committed included.

    `sampled` says that drafts were kept by lossless sampling, not by the target's choice;
    `first_gap` is the target's gap where the prompt ends. A character whose bytes are several
    tokens belongs to the last of them. Ids without a piece are written as <id>.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    cycles = list(cycles)
    found: list[Token] = []
    for index, cycle in enumerate(cycles):
        before = cycles[index - 1] if index else None
        after = cycles[index + 1] if index + 1 < len(cycles) else None
        for kind, id, depth in _of_cycle(cycle, before, sampled=sampled):
            raw = pieces.get(id, f"<{id}>".encode())
            committed = kind in COMMITTED
            # The row of the verify pass that decided this token.
            deciding, row = (cycle, depth - 1) if depth else (before or {}, _last_row(before))
            trace = deciding.get("trace") or {}
            found.append(
                Token(
                    kind=kind,
                    id=id,
                    text=decoder.decode(raw) if committed else raw.decode(errors="replace"),
                    position=int(cycle.get("position", 0)) + depth,
                    cycle=int(cycle.get("cycle", 0)),
                    depth=depth,
                    gap=_at(deciding.get("gaps"), row) if deciding else first_gap,
                    draft_gap=_at(cycle.get("draft_gaps"), depth - 1),
                    ratio=_ratio(cycle, depth),
                    choice=_choice(kind, id, _at(trace.get("choices"), row), after),
                    runner=_id(_at(trace.get("runners"), row)),
                    draft_runner=_id(
                        _at((cycle.get("trace") or {}).get("draft_runners"), depth - 1)
                    ),
                )
            )
    return found


def _of_cycle(
    cycle: Mapping[str, Any], before: Mapping[str, Any] | None, *, sampled: bool
) -> Iterator[tuple[str, int, int]]:
    """Kind, id and depth of each token that a cycle is about."""
    committed, drafts = list(cycle.get("tokens", ())), list(cycle.get("drafts", ()))
    ratios, reason = list(cycle.get("ratios", ())), cycle.get("reason", "none")
    kept = max(0, len(committed) - 1)
    refused = reason in ("mismatch", "margin")
    passed = len(ratios) - refused  # drafts that the verdict accepted
    if committed:
        yield _own_kind(before), committed[0], 0
    for depth, id in enumerate(drafts[:kept], 1):
        below = cycle.get("relaxed") and ratios[depth - 1 : depth] < [1.0]
        yield "drawn" if sampled else "relaxed" if below else "accepted", id, depth
    for depth, id in enumerate(drafts[kept:], kept + 1):
        if not cycle.get("drafted"):
            kind = "probe"
        elif depth <= passed:
            kind = "beyond"
        else:
            kind = "rejected" if refused and depth == passed + 1 else "unused"
        yield kind, id, depth


def _own_kind(before: Mapping[str, Any] | None) -> str:
    """The kind of a cycle's first token, which the cycle before it decided."""
    reason = before.get("reason") if before else None
    return {"mismatch": "corrected", "margin": "corrected", "full": "bonus"}.get(
        str(reason), "certain"
    )


def _last_row(before: Mapping[str, Any] | None) -> int:
    """The row of a cycle's pass that chose the first token of the next one."""
    return len(before.get("tokens", ())) - 1 if before else -1


def _ratio(cycle: Mapping[str, Any], depth: int) -> float | None:
    """The ratio that decided a draft; of one that was never looked at, what a full trace says."""
    found = _at(cycle.get("ratios"), depth - 1)
    if found is None:
        found = _at((cycle.get("trace") or {}).get("draft_ratios"), depth - 1)
    return found


def _choice(
    kind: str, id: int, traced: float | None, after: Mapping[str, Any] | None
) -> int | None:
    if traced is not None:
        return int(traced)
    if kind == "rejected" and after and after.get("tokens"):
        return int(after["tokens"][0])
    return id if kind == "accepted" else None


def _id(value: float | None) -> int | None:
    return None if value is None else int(value)


def _at(values: Any, index: int) -> float | None:
    if not isinstance(values, list) or not 0 <= index < len(values):
        return None
    return values[index] if isinstance(values[index], int | float) else None
