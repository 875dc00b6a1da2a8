"""A sweep as one HTML page: every job, the surface of speed, and what is exact of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ds4flow.metrics import DEFINITIONS
from ds4flow.report.prompt_set import identity_of, number
from ds4flow.report.render import command_line, config_rows, drawn, flat_facts, plain, render
from ds4flow.report.sweep_figures import sweep_figures
from ds4flow.report.sweep_grid import DEPTH, SUBJECT, Done, done_jobs, tried
from ds4flow.runs.compare import other_conditions
from ds4flow.runs.record import ROOT, label
from ds4flow.runs.sweep import Job, Sweep

COLUMNS = (
    ("tokens_per_second", "tokens/s", ".1f"),
    ("draft_acceptance_rate", "accepted", ".1%"),
    ("mean_acceptance_length", "tokens a cycle", ".2f"),
    ("output_tokens", "tokens", ",.0f"),
    ("cycles", "cycles", ",.0f"),
)
"""What the table of jobs shows of each summary: key, words, format."""


def sweep_page(sweep: Sweep) -> str:
    """The page of one sweep, finished or not; failed jobs are shown with their reason."""
    done = done_jobs(sweep)
    return render(
        "sweep.html.j2",
        title=label(sweep.path, ROOT),
        status=str(sweep.facts.get("status", "unknown")),
        counts=_counts(sweep),
        notes=_notes(sweep, done),
        tiles=_tiles(sweep, done),
        keys=sweep.keys,
        columns=[(words, DEFINITIONS.get(key, "")) for key, words, _ in COLUMNS],
        jobs=[_row(sweep, job) for job in sweep.jobs],
        figures=drawn(sweep_figures(sweep)),
        config=_config(sweep, done),
        command=command_line(["-m", *(sweep.facts.get("overrides") or ())]),
        facts=list(_facts(sweep)),
    )


def _counts(sweep: Sweep) -> str:
    """How many jobs ended in which way, in words."""
    statuses = dict.fromkeys(job.status for job in sweep.jobs)
    parts = [f"{len(sweep.with_status(status))} {status}" for status in statuses]
    return f"{len(sweep.jobs)} jobs: {', '.join(parts)}." if parts else "No job."


def _notes(sweep: Sweep, done: list[Done]) -> list[str]:
    notes = []
    missing = len(sweep.jobs) - len(sweep.with_status("done"))
    if missing:
        notes.append(
            f"{missing} of {len(sweep.jobs)} jobs have no result; the charts leave them out."
        )
    different = _different(done)
    if different:
        notes.append(
            f"The jobs differ in {' and '.join(different)}: no fastest one is named, and numbers "
            "of different ones are not put together."
        )
    return notes


def _different(done: list[Done]) -> list[str]:
    """The conditions that are not the same in all jobs, so that their speeds do not compare."""
    found = other_conditions([one.run for one in done]) if done else []
    return [name for name in found if name in SUBJECT]


def _tiles(sweep: Sweep, done: list[Done]) -> list[tuple[str, str, str]]:
    """The fastest jobs, and what they gain over plain greedy decoding where that was swept too."""
    count = ("jobs done", f"{len(sweep.with_status('done'))} of {len(sweep.jobs)}", "")
    if _different(done):
        return [count]

    def speed(one: Done) -> float:
        return one.number("tokens_per_second") or 0.0

    timed = [one for one in done if speed(one)]
    exact = [one for one in timed if one.exact]
    plain_jobs = [one for one in timed if one.run.config.get(DEPTH) == 0]
    greedy = median(map(speed, plain_jobs)) if plain_jobs else None

    def tile(words: str, jobs: list[Done]) -> tuple[str, str, str]:
        if not jobs:
            return words, "-", "no such job has finished"
        best = max(jobs, key=speed)
        where = ", ".join(f"{key}={value}" for key, value in best.job.values.items())
        gain = f"; {speed(best) / greedy:.2f} times greedy" if greedy else ""
        return words, f"{speed(best):.1f}", f"job {best.job.number}: {where}{gain}"

    return [
        tile("fastest exact, tokens/s", exact),
        tile("fastest of all, tokens/s", timed),
        (
            "greedy, tokens/s",
            "-" if greedy is None else f"{greedy:.1f}",
            f"{DEPTH}=0, median of {len(plain_jobs)}"
            if greedy
            else f"no job had {DEPTH}=0, so nothing is compared with greedy",
        ),
        count,
    ]


def _row(sweep: Sweep, job: Job) -> dict[str, Any]:
    """A job as the table shows it, whatever became of it."""
    run = job.run
    summary: Mapping[str, Any] = {} if run is None else run.summary
    identity = "" if run is None or not summary else str(run.facts.get("identity", ""))
    lossy = summary.get("relaxed_accepts")
    return {
        "number": job.number,
        "status": job.status,
        "values": [job.values.get(key, "") for key in sweep.keys],
        "numbers": [number(summary.get(key), form) for key, _, form in COLUMNS],
        "identity": identity,
        "identity_text": identity_of(identity, lossy),
        "reason": job.reason or "",
        "attempt": job.attempt,
    }


def _config(sweep: Sweep, done: list[Done]) -> list[dict[str, Any]]:
    """The config that the jobs share, and what was swept."""
    runs = [one.run for one in done] or [job.run for job in sweep.jobs if job.run is not None]
    if not runs:
        return []
    swept = [
        {"key": key, "value": ", ".join(tried(sweep, key)), "origin": "sweep", "kind": "cli"}
        for key in sweep.keys
    ]
    return swept + [row for row in config_rows(runs[0]) if row["key"] not in sweep.keys]


def _facts(sweep: Sweep) -> Iterator[tuple[str, str]]:
    facts = sweep.facts
    yield "directory", str(sweep.path)
    for name in ("started", "ended", "host", "launcher", "sweeper"):
        if facts.get(name) is not None:
            yield name, plain(facts[name])
    yield from flat_facts({key: facts.get(key) for key in ("machine", "git", "versions")})
