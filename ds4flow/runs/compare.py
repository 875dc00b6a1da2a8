"""`ds4flow runs compare`: what differs between runs - config, conditions, numbers, first token.

Runs of other weights, prompts or machines are compared too, but never without saying so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4flow.runs.record import Run, label
from ds4flow.runs.screen import console, print_table, short, shown
from ds4flow.runs.sets import parts
from ds4flow.runs.show import METRICS

_BEFORE, _AFTER = 24, 8  # tokens shown around a difference


@dataclass(frozen=True)
class Choice:
    """How a run came to one output token: its text, and the target's top-2 logit gap there.

    `gap` is None where the run did not record it; `runner` is the target's second token, known of
    runs with trace=full.
    """

    token: int
    text: str
    gap: float | None
    runner: str | None


@dataclass(frozen=True)
class Difference:
    """The first output token, counted from 0, at which two runs part; None for one that ended."""

    index: int
    before: str
    first: Choice | None
    second: Choice | None
    after: tuple[str, str]


def first_difference(first: Run, second: Run) -> Difference | None:
    """Where the outputs of two runs part, None when they are the same tokens."""
    a, b = first.tokens, second.tokens
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if index is None:
        if len(a) == len(b):
            return None
        index = min(len(a), len(b))
    return Difference(
        index,
        first.decode(a[max(0, index - _BEFORE) : index]),
        _choice(first, index),
        _choice(second, index),
        (
            first.decode(a[index : index + _AFTER]),
            second.decode(b[index : index + _AFTER]),
        ),
    )


def _choice(run: Run, index: int) -> Choice | None:
    if index >= len(run.tokens):
        return None
    token = run.tokens[index]
    gap, runner = _decided(run, index)
    return Choice(token, run.decode([token]), gap, None if runner is None else run.decode([runner]))


def _decided(run: Run, index: int) -> tuple[float | None, int | None]:
    """The gap and the runner-up of the row that decided output token `index`."""
    if index == 0:
        return run.summary.get("first_gap"), None
    seen = 0
    for cycle in run.cycles():
        count = len(cycle["tokens"])
        if seen + count >= index:  # row j of the cycle decides the token after its j-th
            row = index - 1 - seen
            gaps, runners = cycle["gaps"], cycle.get("trace", {}).get("runners", ())
            return (
                gaps[row] if row < len(gaps) else None,
                runners[row] if row < len(runners) else None,
            )
        seen += count
    return None, None


CONDITIONS = {
    "weights": lambda run: _digest(run, "main"),
    "MTP weights": lambda run: _digest(run, "mtp"),
    "prompt": lambda run: run.facts.get("prompt_set") or run.prompt_tokens or run.prompt,
    "machine": lambda run: [
        (run.facts.get("machine") or {}).get(key) for key in ("processor", "cores")
    ],
    "kernels": lambda run: run.facts.get("kernels"),
    "threads": lambda run: run.facts.get("threads"),
    "source revision": lambda run: (run.facts.get("git") or {}).get("revision"),
    "versions": lambda run: run.facts.get("versions"),
}
"""What must be equal for numbers to be comparable, and how it is read from a run."""


def _digest(run: Run, name: str) -> Any:
    """The file's SHA-256, or its size and time where none was taken."""
    file = (run.facts.get("files") or {}).get(name)
    if not file:
        return None
    return file.get("sha256") or (file.get("bytes"), file.get("modified"))


def other_conditions(runs: Sequence[Run]) -> list[str]:
    """The conditions that are not the same in all runs."""
    return [
        name
        for name, read in CONDITIONS.items()
        if any(read(run) != read(runs[0]) for run in runs[1:])
    ]


def compare_runs(runs: Sequence[Run], root: Path) -> None:
    """Print how the runs differ, each against the first."""
    out = console()
    names = [label(run.path, root) for run in runs]
    for name in other_conditions(runs):
        out.print(f"note: not the same {name}: {_condition(name, runs)}")
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    missing = object()
    changed = [key for key in keys if len({repr(run.config.get(key, missing)) for run in runs}) > 1]
    if changed:
        rows = [[key, *(short(run.config.get(key)) for run in runs)] for key in changed]
        print_table(["config", *names], rows)
    else:
        out.print("config: the same")
    out.print()
    print_table(["number", *names], _numbers(runs))
    if "mtp.gate" in changed:
        out.print(
            "note: mtp.gate differs, so the acceptance rates speak of other drafts; "
            "accepted_per_cycle counts all cycles"
        )
    out.print()
    for run, name in zip(runs[1:], names[1:], strict=True):
        _print_difference(runs[0], run, names[0], name)


def _condition(name: str, runs: Sequence[Run]) -> str:
    read = CONDITIONS[name]
    if name == "prompt":
        return " / ".join(f"{len(run.prompt_tokens)} tokens {run.prompt[:30]!r}" for run in runs)
    if name == "versions":
        found = [read(run) or {} for run in runs]
        keys = [key for key in found[0] if any(one.get(key) != found[0][key] for one in found)]
        return "; ".join(f"{key} {' / '.join(str(one.get(key)) for one in found)}" for key in keys)
    return " / ".join(short(str(read(run))) for run in runs)


def _numbers(runs: Sequence[Run]) -> list[list[str]]:
    rows = []
    for key in METRICS:
        values = [run.summary.get(key) for run in runs]
        if all(value is None for value in values):
            continue
        cells = [shown(value, key) for value in values]
        if key.endswith("tokens_per_second") and values[0]:
            for index, value in enumerate(values[1:], 1):
                cells[index] += f" ({value / values[0]:.2f}x)" if value else ""
        rows.append([key, *cells])
    return rows


def _print_difference(first: Run, second: Run, name: str, other: str) -> None:
    out = console()
    if first.prompt_tokens and second.prompt_tokens and first.prompt_tokens != second.prompt_tokens:
        out.print(f"{other}: another prompt than {name}, so the outputs are not compared")
        return
    ours, theirs = parts(first), parts(second)
    if "" not in ours or "" not in theirs:
        _print_parts(ours, theirs, name, other)
        return
    found = first_difference(first, second)
    if found is None:
        out.print(f"{other}: the same {len(first.tokens)} output tokens as {name}")
        return
    for line in difference_lines(found, name, other):
        out.print(line, soft_wrap=True)


def _print_parts(ours: dict[str, Run], theirs: dict[str, Run], name: str, other: str) -> None:
    """How the prompts of two sets compare; those that only one of them has are counted."""
    out = console()
    both = [key for key in ours if key in theirs]
    alone = len(ours) + len(theirs) - 2 * len(both)
    if alone:
        out.print(f"{other}: {alone} prompts are in one of the sets only")
    same = 0
    for key in both:
        if ours[key].prompt_tokens != theirs[key].prompt_tokens:
            out.print(f"{other}/{key}: another prompt than in {name}, so it is not compared")
        elif (found := first_difference(ours[key], theirs[key])) is None:
            same += 1
        else:
            for line in difference_lines(found, f"{name}/{key}", f"{other}/{key}"):
                out.print(line, soft_wrap=True)
    out.print(f"{other}: the same output tokens as {name} in {same} of {len(both)} prompts")


def difference_lines(found: Difference, name: str, other: str) -> list[str]:
    """What a difference looks like, in lines."""
    width = max(len(name), len(other))
    lines = [f"{other} and {name} part at output token {found.index}, after {found.before!r}"]
    for who, choice, after in zip(
        (name, other), (found.first, found.second), found.after, strict=True
    ):
        if choice is None:
            lines.append(f"  {who:{width}}  ended before")
            continue
        gap = "gap not recorded" if choice.gap is None else f"top-2 gap {choice.gap:.4g}"
        runner = "" if choice.runner is None else f", runner-up {choice.runner!r}"
        lines.append(f"  {who:{width}}  {choice.text!r} ({gap}{runner}), then {after!r}")
    return lines
