"""`ds4flow runs show`: one run on one page: origins of values, meanings of numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds4flow.runs.record import Run, label
from ds4flow.runs.screen import console, print_table, shown
from ds4flow.runs.sets import COLUMNS, category_rows

METRICS = (
    "output_tokens",
    "cycles",
    "cycles_with_draft",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "accepted_per_cycle",
    "accepted_per_position",
    "acceptance_histogram",
    "relaxed_accepts",
    "tokens_per_second",
    "prefill_tokens_per_second",
    "peak_memory_bytes",
)
"""What is shown of a summary, in order."""

_TEXT_SHOWN = 800  # characters


def show_run(run: Run, root: Path, *, as_json: bool) -> None:
    """Print what ran, its values that are not defaults, its numbers, its end and its text."""
    if as_json:
        whole = {"path": str(run.path), "status": run.status, **run.facts, "summary": run.summary}
        print(json.dumps(whole | {"status": run.status}, indent=1))
        return
    out = console()
    print_table(["run", label(run.path, root)], _facts(run), left=2)
    changed = [(k, shown(v), run.origins[k]) for k, v in run.config.items() if _is_set(run, k)]
    out.print()
    if changed:
        print_table(["value", "", "from"], changed, left=3)
    else:
        out.print("every value is its default" if run.config else "the config is not recorded")
    if run.summary:
        out.print()
        definitions = run.summary.get("definitions") or {}
        print_table(
            ["number", "", "meaning"],
            [
                (key, shown(run.summary[key], key), definitions.get(key, ""))
                for key in METRICS
                if run.summary.get(key) is not None
            ],
            left=3,
        )
    by_category = category_rows(run.summary)
    if by_category:
        out.print()
        print_table(COLUMNS, by_category)
    for warning in run.summary.get("warnings", ()):
        out.print(f"note: {warning}", soft_wrap=True)
    if by_category:
        out.print("\neach prompt lies in a directory of its own: ds4flow runs ls --prompts")
        return
    for title, text in (("prompt", run.prompt), ("text", run.text)):
        out.print(f"\n{title}:")
        out.print(_cut(text) if text else "(none)", soft_wrap=True)


def _is_set(run: Run, key: str) -> bool:
    return run.origins[key] != "default" and not key.endswith("._target_")


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = run.facts
    machine, git = facts.get("machine") or {}, facts.get("git") or {}
    rows = [
        ("status", f"{run.status}{_why(run)}"),
        ("started", f"{facts.get('started', '-')} on {facts.get('host', '-')}"),
        ("command", " ".join(map(str, facts.get("command") or ()))),
        ("identity", shown(facts.get("identity"))),
        ("machine", f"{machine.get('processor', '-')}, {machine.get('cores', '-')} cores"),
        ("kernels", f"{facts.get('kernels', '-')}, {facts.get('threads', '-')} threads"),
        ("source", _source(git)),
    ]
    for name, file in (facts.get("files") or {}).items():
        if file:
            rows.append((f"file {name}", f"{file['path']} SHA-256 {file['sha256'] or 'not taken'}"))
    if facts.get("parent"):
        rows.append(("replay of", str(facts["parent"].get("path"))))
    for key in ("mtp_off", "prompt_set"):
        if facts.get(key):
            rows.append((key, shown(facts[key])))
    return rows


def _why(run: Run) -> str:
    reasons = [run.facts.get("finish_reason"), run.facts.get("error")]
    if run.status == "killed":
        reasons = ["its process is gone and did not say why"]
    return "".join(f" ({reason})" for reason in reasons if reason)


def _source(git: dict[str, Any]) -> str:
    if not git.get("revision"):
        return str(git.get("note", "-"))
    changed = ", with changes (source.patch)" if git.get("dirty") else ""
    return f"{git['revision']}{changed}"


def _cut(text: str) -> str:
    if len(text) <= _TEXT_SHOWN:
        return text
    return f"{text[:_TEXT_SHOWN]}... ({len(text)} characters in all)"
