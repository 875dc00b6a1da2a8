"""`ds4flow whatif`: predictions over depths, margins and gates as one table.

Every line says whether its counts are exact or estimated; times are always estimated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds4flow.errors import UsageError
from ds4flow.runs.record import Run, label
from ds4flow.runs.screen import console, print_table, shown
from ds4flow.verification import parse_depths
from ds4flow.whatif.costs import CostModel
from ds4flow.whatif.predict import Prediction, Setting, predict
from ds4flow.whatif.traced import RECOMMENDED, Traced

_TITLES = (
    *("draft", "margin", "gate", "cycles", "drafted", "accepted", "acceptance", "length"),
    *("lossy", "tok/s", "x greedy", "counts"),
)


def whatif_command(
    run: Run, root: Path, *, depths: str, margins: str, gates: str, as_json: bool
) -> None:
    """Print what other settings would have done; UsageError for settings out of range."""
    traced = Traced.read(run)
    costs = CostModel.of(traced)
    settings = [
        Setting(depth, margin, gate)
        for margin in _numbers(margins, "--margin", 1.0) or [1.0]
        for gate in _numbers(gates, "--gate", None) or [traced.gate]
        for depth in _depths(depths) or [*range(traced.depth + 1), "auto"]
    ]
    found = [(setting, predict(traced, setting, costs)) for setting in settings]
    greedy = predict(traced, Setting(0, gate=traced.gate), costs)
    if as_json:
        print(json.dumps([_facts(*pair, greedy) for pair in found], indent=1))
        return
    name = label(run.path, root)
    out = console()
    out.print(
        f"{name}: {len(traced.output)} tokens traced at mtp.draft={traced.depth}, "
        f"{'drafts from every place' if traced.probe else 'drafts where its own cycles began'}"
    )
    print_table(_TITLES, (_cells(*pair, greedy) for pair in found), left=0)
    for line in _notes(traced, costs, [one for _, one in found]):
        out.print(line, soft_wrap=True)


def _depths(text: str) -> list[int | str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    found: list[int | str] = []
    for word in words:
        found += ["auto"] if word == "auto" else parse_depths(word)
    return list(dict.fromkeys(found))


def _numbers(text: str, flag: str, high: float | None) -> list[float]:
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not (value >= 0 and (high is None or 0 < value <= high)):
            limits = "0 or more" if high is None else f"above 0, at most {high:g}"
            raise UsageError(f"{flag} {text}: {word} is out of range", f"use numbers {limits}")
        found.append(value)
    return found


def _speedup(one: Prediction, greedy: Prediction | None) -> float | None:
    rate, base = one.tokens_per_second, greedy.tokens_per_second if greedy else None
    return rate / base if rate and base else None


def _facts(setting: Setting, one: Prediction | None, greedy: Prediction | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "mtp.draft": setting.depth,
        "mtp.margin": setting.margin,
        "mtp.gate": setting.gate,
    }
    if one is None:
        return facts | {"counts": None}
    return facts | {
        "counts": "exact" if one.exact else "estimated",
        "output_tokens": one.tokens,
        "cycles": one.cycles,
        "num_draft_tokens": one.drafted,
        "num_accepted_draft_tokens": one.accepted,
        "draft_acceptance_rate": one.acceptance,
        "mean_acceptance_length": one.mean_length,
        "relaxed_accepts": one.relaxed,
        "tokens_per_second": one.tokens_per_second,
        "speed_against_greedy": _speedup(one, greedy),
    }


def _cells(setting: Setting, one: Prediction | None, greedy: Prediction | None) -> list[str]:
    knobs = [str(setting.depth), f"{setting.margin:g}", f"{setting.gate:g}"]
    if one is None:
        return [*knobs, *["-"] * (len(_TITLES) - len(knobs) - 1), "not traced"]
    speedup = _speedup(one, greedy)
    return [
        *knobs,
        *(f"{value:.0f}" for value in (one.cycles, one.drafted, one.accepted)),
        shown(one.acceptance, "draft_acceptance_rate"),
        shown(one.mean_length, "mean_acceptance_length"),
        f"{one.relaxed:.0f}",
        shown(one.tokens_per_second, "tokens_per_second"),
        "-" if speedup is None else f"{speedup:.2f}",
        "exact" if one.exact else "estimated",
    ]


def _notes(
    traced: Traced, costs: CostModel | None, found: Sequence[Prediction | None]
) -> list[str]:
    notes = []
    timed = [one for one in found if one is not None and one.tokens_per_second]
    if timed:
        best = max(timed, key=lambda one: one.tokens_per_second or 0.0)
        notes.append(
            f"fastest: mtp.draft={best.setting.depth} mtp.margin={best.setting.margin:g} "
            f"mtp.gate={best.setting.gate:g}; speeds are estimates"
        )
    if costs is None:
        notes.append(
            "no speeds: this run did not measure passes by width; trace=full with "
            "pipeline=speculative does"
        )
    if any(one is not None and not one.exact for one in found) and not traced.probe:
        notes.append(f"estimated from the places where cycles began; exact: {RECOMMENDED}")
    if not traced.pure:
        notes.append("nothing is exact: this drafter, or mtp.keep_accepted, looks beyond the text")
    return notes
