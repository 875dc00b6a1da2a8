"""A run as one HTML page that opens offline: everything it needs is inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4flow.metrics import DEFINITIONS, Counts
from ds4flow.overrides import PROVENANCE, key_of
from ds4flow.report.figure import Chart
from ds4flow.report.figures import run_figures
from ds4flow.report.prompt_set import (
    COLUMNS,
    category_figures,
    category_rows,
    identity_of,
    prompt_rows,
)
from ds4flow.report.render import (
    command_line,
    config_rows,
    drawn,
    flat_facts,
    plain,
    render,
    visible,
)
from ds4flow.report.tokens import KINDS, Token, pieces_of, tokens_of
from ds4flow.report.totals import DECODING, Totals, micros_of
from ds4flow.runs.record import PROMPTS, ROOT, Run, label, natural

TILES = (
    ("tokens_per_second", "tokens/s", ".1f"),
    ("draft_acceptance_rate", "drafts accepted", ".1%"),
    ("mean_acceptance_length", "tokens a cycle", ".2f"),
    ("output_tokens", "output tokens", ",d"),
    ("cycles", "cycles", ",d"),
    ("decode_seconds", "seconds decoding", ".3g"),
)
"""The numbers at the top of a page: key of the summary, words, format."""

_ELSEWHERE = (
    *("definitions", "acceptance_histogram", "accepted_per_position", "verified_per_position"),
    *("break_even", "micros_by_stage", "prompts", "categories", "warnings"),
)
_SHOWN_FACTS = ("status", "error", "command", "config", "identity", "finish_reason")


@dataclass(frozen=True)
class Part:
    """The text of a run, or of one prompt of a set, as the page shows it."""

    title: str
    note: str
    prompt: str
    prompt_tokens: int
    output_tokens: int
    text: str
    tokens: Sequence[Token]
    cycles: Sequence[Mapping[str, Any]]
    pieces: Mapping[int, bytes]

    @property
    def data(self) -> dict[str, Any]:
        """What the details of its tokens are made of, short; times in microseconds."""
        kinds = list(KINDS)
        numbers = {int(cycle.get("cycle", 0)): index for index, cycle in enumerate(self.cycles)}
        named = {id for token in self.tokens for id in _alternatives(token) if id is not None}
        return {
            "pieces": {
                id: visible(self.pieces[id].decode(errors="replace"))
                for id in named
                if id in self.pieces
            },
            "tokens": [
                [
                    kinds.index(token.kind),
                    token.id,
                    token.position,
                    token.depth,
                    *map(_short, (token.gap, token.draft_gap, token.ratio)),
                    numbers[token.cycle],
                    *_alternatives(token),
                ]
                for token in self.tokens
            ],
            "cycles": [
                [
                    cycle.get("cycle"),
                    sum((cycle.get("micros") or {}).values()),
                    *(micros_of(cycle, phase) for phase in DECODING),
                    len(cycle.get("tokens", ())),
                    cycle.get("drafted", 0),
                    cycle.get("reason", ""),
                    cycle.get("draft_end", ""),
                ]
                for cycle in self.cycles
            ],
        }


def run_page(run: Run) -> str:
    """The page of one run, whatever became of it: running, complete, failed or interrupted."""
    parts = list(_parts(run))
    cycles = [cycle for part in parts for cycle in part.cycles]
    summary, counted = _summary(run, cycles)
    return render(
        "run.html.j2",
        title=label(run.path, ROOT),
        status=run.status,
        ending=_ending(run, summary),
        identity=_identity(run, summary),
        notes=_notes(run, counted=counted),
        tiles=[
            (words, _formatted(summary.get(key), form), DEFINITIONS.get(key, ""))
            for key, words, form in TILES
            if isinstance(summary.get(key), int | float)
        ],
        summary=list(_summary_rows(run, summary)),
        categories=category_rows(summary),
        prompts=prompt_rows(summary),
        set_columns=[words for _, words, _ in COLUMNS],
        parts=parts,
        kinds=KINDS,
        shown_kinds=[
            kind for kind in KINDS if any(token.kind == kind for p in parts for token in p.tokens)
        ],
        data={
            "parts": [part.data for part in parts],
            "kinds": list(KINDS.items()),
            "sampled": run.facts.get("identity") == "sampled",
        },
        figures=drawn(_figures(run, parts)),
        stages=_stage_rows(summary),
        config=config_rows(run),
        command=_command(run),
        facts=list(_facts(run)),
    )


def figures_of_run(run: Run) -> list[Chart]:
    """The figures of a run, as its page shows them."""
    return _figures(run, list(_parts(run)))


def _figures(run: Run, parts: Sequence[Part]) -> list[Chart]:
    cycles = [cycle for part in parts for cycle in part.cycles]
    if cycles or "acceptance_histogram" not in run.summary:
        totals = Totals.of(cycles)
    else:  # the trace was off; the summary has the counts all the same
        totals = Totals(Counts.of(run.summary))
    return [*category_figures(run.summary), *run_figures(cycles, totals, parts=len(parts))]


def _parts(run: Run) -> Iterator[Part]:
    """The run itself, or each prompt of its set."""
    if not (run.path / PROMPTS).is_file():
        yield _part(run, "")
        return
    folders = [
        path for path in run.path.iterdir() if path.is_dir() and (path / "prompt.txt").is_file()
    ]
    for folder in sorted(folders, key=natural):
        one = Run.open(folder)
        yield _part(one, str(one.facts.get("prompt_id") or folder.name))


def _part(run: Run, title: str) -> Part:
    cycles, pieces = list(run.cycles()), pieces_of(run)
    sampled = run.facts.get("identity") == "sampled"
    return Part(
        title=title,
        note=_part_note(run) if title else "",
        prompt=run.prompt,
        prompt_tokens=len(run.prompt_tokens),
        output_tokens=len(run.tokens),
        text=run.text,
        tokens=tokens_of(cycles, pieces, sampled=sampled, first_gap=run.summary.get("first_gap")),
        cycles=cycles,
        pieces=pieces,
    )


def _part_note(run: Run) -> str:
    """A prompt of a set in a few words."""
    rate = run.summary.get("draft_acceptance_rate")
    words = [
        str(run.facts.get("prompt_category", "")),
        run.status if run.status != "complete" else "",
    ]
    words.append("" if rate is None else f"{rate:.0%} of drafts accepted")
    return ", ".join(filter(None, words))


def _summary(run: Run, cycles: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """What the run recorded, or else what its cycles tell; and whether it is the latter."""
    if run.summary or not cycles:
        return run.summary, False
    totals = Totals.of(cycles)
    seconds = sum(sum((cycle.get("micros") or {}).values()) for cycle in cycles) / 1e6
    return {
        "output_tokens": totals.counts.output,
        **totals.counts.summary(),
        "decode_seconds": seconds,
        "tokens_per_second": totals.counts.output / seconds if seconds else None,
    }, True


def _ending(run: Run, summary: Mapping[str, Any]) -> str:
    """How the run ended, in words."""
    reasons = {
        "eos": "the model ended the text",
        "stop": "a stop text was produced",
        "limit": "the limit of tokens was reached",
        "context": "the context was full",
    }
    reason = summary.get("finish_reason") or run.facts.get("finish_reason")
    words = {
        "complete": f"Complete: {reasons.get(str(reason), reason)}." if reason else "Complete.",
        "running": "Still running when this page was made; what is on disk so far is shown.",
        "failed": "Failed.",
        "interrupted": "Interrupted; what was produced until then is shown.",
        "killed": "Its process is gone without recording an end; what reached the disk is shown.",
    }
    return words.get(run.status, "It is not recorded how it ended.")


def _identity(run: Run, summary: Mapping[str, Any]) -> dict[str, str]:
    """The badge that says whether the text is that of plain greedy decoding."""
    kind = str(run.facts.get("identity", "exact"))
    lossy = summary.get("relaxed_accepts")
    words = {
        "exact": "The text is bit for bit that of plain greedy decoding.",
        "relaxed": f"{'Some' if lossy is None else lossy} accepted tokens were not the target's "
        "own choice; the text may differ from greedy decoding.",
        "sampled": "The text was sampled; drafts do not change its distribution.",
    }
    told = words.get(kind, "") if summary.get("output_tokens") else ""
    return {"kind": kind, "text": identity_of(kind, lossy), "words": told}


def _notes(run: Run, *, counted: bool) -> list[str]:
    """What a reader must know before believing the page."""
    notes = []
    if run.facts.get("error"):
        notes.append(str(run.facts["error"]).rstrip(": "))
    notes += _proof(run)
    notes += [str(warning) for warning in run.summary.get("warnings") or ()]
    if run.facts.get("mtp_off"):
        notes.append(f"MTP was off: {run.facts['mtp_off']}")
    if run.summary.get("draft_dead"):
        notes.append("Not one draft was accepted: the drafter does not fit the target.")
    if counted:
        notes.append(
            "The run did not write its summary; the numbers here are counted from its cycles."
        )
    if (run.facts.get("git") or {}).get("dirty"):
        notes.append(
            "It ran from a source tree with changes; source.patch in its directory has them."
        )
    return notes


def _proof(run: Run) -> Iterator[str]:
    """What comparisons with a twin that never drafts found in this run."""
    parity, check = run.facts.get("parity"), run.facts.get("check")
    if isinstance(parity, Mapping) and parity.get("equal"):
        yield "Compared with plain greedy decoding in the same run: tokens and logits bits equal."
    elif isinstance(parity, Mapping) and parity.get("equal") is False:
        yield (
            "Compared with plain greedy decoding in the same run: it differs from position "
            f"{parity.get('first_difference')} on."
        )
    if isinstance(check, Mapping):
        different = check.get("different")
        yield (
            f"{check.get('states_compared')} cache states compared with those of a run that never "
            f"drafts: {'they differ' if different else 'all equal'}."
        )


def _summary_rows(run: Run, summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, value and definition of every number that no figure shows."""
    definitions = {**DEFINITIONS, **(run.summary.get("definitions") or {})}
    for key, value in summary.items():
        if key in _ELSEWHERE or value is None or value == {} or value == []:
            continue
        items = value.items() if isinstance(value, dict) else [("", value)]
        for name, item in items:
            full = f"{key}.{name}" if name else key
            yield full, plain(item), str(definitions.get(full, ""))


def _stage_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    micros = summary.get("micros_by_stage") or {}
    whole = sum(micros.values()) or 1
    return [
        (name, f"{value / 1000:,.1f}", f"{value / whole:.1%}") for name, value in micros.items()
    ]


def _command(run: Run) -> str:
    words = list(run.facts.get("command") or ())[1:]
    return command_line([word for word in words if key_of(str(word)) != PROVENANCE])


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Machine, code, files and whatever else the run recorded and the page does not show above."""
    yield "directory", str(run.path)
    others = {key: value for key, value in run.facts.items() if key not in _SHOWN_FACTS}
    yield from flat_facts(others)


def _alternatives(token: Token) -> tuple[int | None, int | None, int | None]:
    """What the target and the drafter thought of beside a token; its own id says nothing new."""
    choice = None if token.choice == token.id else token.choice
    return choice, token.runner, token.draft_runner


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _formatted(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"
