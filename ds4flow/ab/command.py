"""`ds4flow ab`: compose both arms, run them in turn, and say what came of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds4flow import env, origin, rundir
from ds4flow.ab.arms import Arm, differing, make_arms
from ds4flow.ab.measure import Comparison, measure, say
from ds4flow.ab.result import (
    ALLOWABLE,
    RATE,
    TextCheck,
    categories,
    check_texts,
    figures,
    rates,
    ratio,
    refuse,
    refuse_unlike,
    verdict,
    warnings,
)
from ds4flow.errors import UsageError, near_match
from ds4flow.overrides import Flag
from ds4flow.recorded import exit_code, terminable
from ds4flow.runs.compare import difference_lines
from ds4flow.runs.record import Run
from ds4flow.runs.screen import console, short


@dataclass(frozen=True)
class Options:
    """How to compare: measured pairs, discarded pairs, waived conditions, JSON on stdout."""

    repeats: int
    warmup: int
    allow: tuple[str, ...] = ()
    config_dir: str | None = None
    as_json: bool = False


def parse_allow(text: str) -> tuple[str, ...]:
    """`weights,prompts` as names; UsageError for an unknown one."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in ALLOWABLE:
            raise UsageError(
                f"--allow {name}: there is no such condition",
                near_match(name, ALLOWABLE) or f"use {', '.join(ALLOWABLE)}",
            )
    return names


def ab_command(
    words: Sequence[str],
    flags: Sequence[Flag],
    after_dashes: Sequence[Sequence[str]],
    options: Options,
) -> int:
    """Compare two arms; 1 when texts part that had to be equal."""
    arms, template = make_arms(
        words, flags, after_dashes, env.read(), config_dir=options.config_dir
    )
    for notice in dict.fromkeys((*arms[0].notices, *arms[1].notices)):
        say(notice)
    differences = differing(*arms)
    if _asked(arms[0]) != _asked(arms[1]):  # before anything is loaded
        refuse(["prompts"], options.allow)
    tree, patch = origin.source_tree()
    path = rundir.allocate(template)
    comparison = Comparison(path, arms, _facts(arms, differences, options, tree))
    if patch:
        comparison.folder.write("source.patch", patch)
    _announce(arms, differences, options)
    allowed: list[str] = []

    def judge(first: Run, second: Run) -> None:
        allowed[:] = refuse_unlike(first, second, options.allow)

    try:
        with terminable(), comparison.recorded():
            runs = measure(
                comparison, repeats=options.repeats, warmup=options.warmup, judge=judge, say=say
            )
            first, second = (list(runs[arm.name]) for arm in arms)
            text = check_texts(first, second, allowed)
            found = _results(first, second, text)
            comparison.record(
                **found,
                different_conditions=allowed,
                loads=len(comparison.loads),
                verdict=verdict(found["ratio"], same=not differences),
            )
    except KeyboardInterrupt as stop:
        say(f"interrupted; what was run is kept in {os.path.relpath(path)}")
        return exit_code(stop)
    if options.as_json:
        print(json.dumps(comparison.facts, indent=1))
    else:
        _show(comparison, text)
    return int(text.fault)


def _asked(arm: Arm) -> str:
    """What the arm is asked to continue; raises for a set or a file that cannot be read."""
    from ds4flow.prompt_run import read_set
    from ds4flow.wiring import read_prompt

    prompts = read_set(arm.config)
    return read_prompt(arm.config) if prompts is None else prompts.sha256


def _facts(
    arms: tuple[Arm, Arm],
    differences: Mapping[str, tuple[Any, Any]],
    options: Options,
    tree: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": origin.versions(),
        "machine": origin.machine(),
        "git": tree,
        "arms": {arm.name: {"title": arm.title, "overrides": list(arm.words)} for arm in arms},
        "differences": {key: list(values) for key, values in differences.items()},
        "same_config": not differences,
        "repeats": options.repeats,
        "warmup": options.warmup,
        "order": [],
    }


def _results(first: Sequence[Run], second: Sequence[Run], text: TextCheck) -> dict[str, Any]:
    base, candidate = rates(first), rates(second)
    if base is None or candidate is None:
        raise UsageError(
            "a run recorded no speed, as it wrote no token or its pipeline has no log stage",
            "give a prompt that is continued, and keep log among pipeline.observe",
        )
    found: dict[str, Any] = {
        "figures": {"A": figures(first), "B": figures(second)},
        "ratio": ratio(base, candidate),
        "categories": {},
        "text": {"equal": text.equal, "compared_tokens": text.compared, "must_be_equal": text.must},
        "warnings": warnings(first, second),
    }
    if text.difference is not None and text.runs is not None:
        found["text"] |= {
            "prompt": text.prompt,
            "runs": [run.path.name for run in text.runs],
            "first_difference": asdict(text.difference),
        }
    for name in categories(first):
        pair = rates(first, name), rates(second, name)
        if pair[0] is not None and pair[1] is not None:
            found["categories"][name] = ratio(pair[0], pair[1])
    return found


def _announce(
    arms: tuple[Arm, Arm], differences: Mapping[str, tuple[Any, Any]], options: Options
) -> None:
    for arm in arms:
        say(f"{arm.name}: {arm.title}")
    if not differences:
        say("A/A: the arms are the same config, so every difference is noise")
    for key, (one, other) in differences.items():
        say(f"  {key}: {short(one)} / {short(other)}")
    say(f"{options.repeats} pairs in turn (ABBA); {options.warmup} before are discarded")


# --- on the terminal ------------------------------------------------------------------------------


def _show(comparison: Comparison, text: TextCheck) -> None:
    from rich.table import Table

    out, facts = console(), comparison.facts
    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for column in ("tokens/s", "quartiles", "accepted", "length", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("identity")
    for arm in comparison.arms:
        table.add_row(f"{arm.name}: {arm.title}", *_cells(facts["figures"][arm.name]))
    out.print(table)
    out.print()
    _show_ratios(facts, out)
    out.print(f"verdict: {facts['verdict']}", soft_wrap=True)
    for line in _text_lines(text):
        out.print(line, soft_wrap=True)
    if facts["different_conditions"]:
        out.print(f"note: allowed to differ: {', '.join(facts['different_conditions'])}")
    for warning in facts["warnings"]:
        out.print(f"note: {warning}", soft_wrap=True)
    loads = "one load for both arms" if facts["loads"] == 1 else "each arm loaded once"
    out.print(f"{loads}, in one process; runs in {os.path.relpath(comparison.path)}")


def _show_ratios(facts: Mapping[str, Any], out: Any) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("B / A, pair by pair", overflow="fold")
    for column in ("median", "smallest", "largest", "interval", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = {"tokens/s": facts["ratio"]}
    rows |= {f"  {name}": found for name, found in facts["categories"].items()}
    for name, found in rows.items():
        low, high, coverage = (found["interval"][key] for key in ("low", "high", "coverage"))
        numbers = [f"{found[key]:.3f}" for key in ("median", "min", "max")]
        table.add_row(name, *numbers, f"{low:.3f}..{high:.3f}", f"{coverage:.1%}")
    out.print(table)
    out.print("interval of the median by order statistics, whatever the distribution")


def _cells(found: Mapping[str, Any]) -> list[str]:
    speed = found[RATE]
    rate, length = found["draft_acceptance_rate"], found["mean_acceptance_length"]
    return [
        f"{speed['median']:.1f}",
        f"{speed['lower_quartile']:.1f}..{speed['upper_quartile']:.1f}",
        "-" if rate is None else f"{rate:.1%}",
        "-" if length is None else f"{length:.2f}",
        str(found["output_tokens"]),
        str(found["identity"]),
    ]


def _text_lines(text: TextCheck) -> list[str]:
    if text.equal is None:
        return [f"text: {text.why}"]
    if text.equal:
        return [f"text: the same {text.compared} tokens in every run of both arms"]
    assert text.difference is not None
    assert text.runs is not None
    expected = "which is a fault" if text.fault else f"which may be: {text.why or 'it ended early'}"
    where = f" in prompt {text.prompt}" if text.prompt else ""
    names = [run.path.name for run in text.runs]
    return [
        f"text: not the same{where}, {expected}",
        *difference_lines(text.difference, *names),
    ]
