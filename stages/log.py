"""Watching a run: the text on stdout, every cycle on disk, and a table at the end on stderr.

What was produced is on disk when a cycle ends, so a killed run keeps it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds4flow.diagnosis import Diagnosis, explain
from ds4flow.errors import Ds4FlowError
from ds4flow.metrics import DEFINITIONS, Costs, Counts, Probe, repeated, repetition
from ds4flow.pipeline import Stage, State
from ds4flow.tokenizer import Tokenizer
from ds4flow.trace import Tracer, measure_costs

PHASES = ("draft", "verify", "decode", "commit")
"""Stages whose time is that of decoding."""


@dataclass
class Log(Stage):
    """Writes output.txt and cycles.jsonl as the run goes on; at its end tokens.json, summary.json
    and pieces.json, the text of every token id of the run, drafts included.

    `trace` is off (no cycles.jsonl), normal, or full (what ds4flow whatif needs).
    """

    stream: bool
    table: bool
    timing: bool
    spec_log: bool
    conf_log: bool
    full_logits: bool
    trace: str
    counts: Counts = field(default_factory=Counts, init=False)
    costs: Costs = field(default_factory=Costs, init=False)
    diagnosis: Diagnosis = field(default_factory=Diagnosis, init=False)
    probe: Probe = field(default_factory=Probe, init=False)
    tracer: Tracer = field(default_factory=Tracer, init=False)
    shown: int = field(default=0, init=False)
    drafted: set[int] = field(default_factory=set, init=False)  # ids, for their text at the end

    reads = ("tokens", "tokenizer", "cache", "rows", "logits", "verdict", "committed", "drafts")

    def run(self, state: State) -> None:
        """Record one cycle."""
        self._show(state)
        record = self._record(state)
        self.drafted.update(record["drafts"])
        began = time.perf_counter_ns()
        if self.trace == "full":
            record["trace"] = self.tracer.record(state, record["position"])
        if self.trace != "off":
            state.run.append_json("cycles.jsonl", record)
        self.tracer.spent((time.perf_counter_ns() - began) // 1000)
        self.counts.add(
            drafted=record["drafted"],
            committed=len(state.committed),
            relaxed=state.relaxed,
            draft_end=state.draft_end,
        )
        if state.drafts and record["drafted"] and not self.counts.accepted:
            self.diagnosis.add(
                record["position"] + 1,
                state.drafts[0].token,
                state.draft_logits[0] if state.draft_logits else None,
                state.logits[0],
                state.hidden,
            )
        self.costs.add(
            record["drafted"],
            sum(state.micros.get(name, 0) for name in PHASES),
        )
        if len(state.rows) == 1:  # drafts that stayed out of the pass were a probe
            self.probe.add(record["position"] + 1, [draft.token for draft in state.drafts])
        self.probe.settle(state.tokens)
        if self.full_logits:
            state.run.write(f"logits/{state.cycle:06d}.npz", _npz(state))
        if self.spec_log:
            _say(_cycle_line(record))
        if self.conf_log:
            for line in _draft_lines(state, record):
                _say(line)

    def _show(self, state: State) -> None:
        piece = "".join(state.pieces[self.shown :])
        self.shown = len(state.pieces)
        if not piece:
            return
        state.run.append("output.txt", piece)
        if self.stream:
            self._print(piece)

    def _print(self, piece: str) -> None:
        """Write to stdout as bytes: the text is UTF-8, whatever the terminal's settings."""
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(piece.encode())
            sys.stdout.buffer.flush()
        except OSError as error:
            self.stream = False
            _abandon_stdout()
            if isinstance(error, BrokenPipeError):
                raise  # the reader has seen enough, as in `ds4flow run | head`
            raise Ds4FlowError(
                f"cannot write the text to stdout: {error.strerror}",
                "what was produced so far is kept in the run directory",
            ) from None

    def _record(self, state: State) -> dict[str, Any]:
        verdict = state.verdict
        return {
            "cycle": state.cycle,
            "position": len(state.tokens) - len(state.committed),
            "drafted": len(state.rows) - 1,
            "draft_end": state.draft_end,
            "accepted": max(0, len(state.committed) - 1),
            "tokens": list(state.committed),
            "reason": verdict.reason,
            "relaxed": state.relaxed,
            "drafts": [draft.token for draft in state.drafts],
            "draft_gaps": [draft.gap for draft in state.drafts],
            "ratios": list(verdict.ratios),
            "gaps": list(verdict.gaps),
            "micros": dict(state.micros),
            **({"depth_choice": state.depth_choice._asdict()} if state.depth_choice else {}),
        }

    def close(self, state: State) -> None:
        """Write what only the end can tell. A run that never began decoding leaves no summary."""
        if state.tokens is None or state.next_token is None:
            return
        state.run.release_reserve()
        self._show(state)
        prompt, output = state.tokens[: state.prompt_length], state.output
        state.run.write_json("tokens.json", {"prompt": prompt, "output": output})
        summary = self._summary(state)
        state.run.write_json("summary.json", summary)
        state.run.record(
            identity=state.identity,
            drafter=state.drafter or None,
            finish_reason=state.done,
            draft_dead=summary["draft_dead"],
        )
        pieces = _pieces(state.tokenizer, {*prompt, *output, *self.drafted, *self.tracer.ids})
        state.run.write_json("pieces.json", pieces)
        # Without a table whoever shows the numbers tells these, for all prompts of a set at once;
        # a dead drafter is told in any case.
        for warning in summary["warnings"] if self.table or self.counts.dead else ():
            _say(f"note: {warning}")
        if summary["diagnosis"]:
            _say(f"note: {explain(summary['diagnosis'])}")
        if self.timing:
            for line in _timing_lines(summary):
                _say(line)
        if self.table:
            _table(summary, state)

    def _summary(self, state: State) -> dict[str, Any]:
        seconds = state.loop_micros / 1e6
        prefill = state.total_micros.get("prefill", 0) / 1e6
        output = len(state.output)
        return {
            "prompt_tokens": state.prompt_length,
            "output_tokens": output,
            "finish_reason": state.done,
            "context_limit": state.cache.context,
            "identity": state.identity,
            "first_gap": state.first_gap,
            "drafter": state.drafter or None,
            "mtp_off": state.mtp_off or None,
            **self.counts.summary(),
            "repeated_tokens": repeated(state.tokens, state.prompt_length),
            "warnings": self._warnings(state),
            "diagnosis": self.diagnosis.summary(state.tokens) if self.counts.dead else None,
            "probe": self.probe.summary() if self.probe.drafted else None,
            "decode_seconds": seconds,
            "tokens_per_second": output / seconds if seconds else None,
            "prefill_seconds": prefill,
            "prefill_tokens_per_second": state.prompt_length / prefill if prefill else None,
            "micros_by_stage": dict(state.total_micros),
            "break_even": self.costs.break_even(),
            "trace": self._trace(state),
            "peak_memory_bytes": _peak_memory(),
            "definitions": DEFINITIONS,
        }

    def _warnings(self, state: State) -> list[str]:
        """What a reader of the numbers must know before believing them."""
        found = [*(state.run.facts.get("notes") or ()), *self.counts.warnings()]
        if self.counts.drafted:
            output = state.output
            found += repetition(repeated(state.tokens, state.prompt_length), len(output))
        return found

    def _trace(self, state: State) -> dict[str, Any] | None:
        """What tracing itself took, and what passes cost by width; only of a run that was traced.

        A run that was stopped is not kept waiting for timed passes.
        """
        if self.trace != "full":
            return None
        costs = measure_costs(state) if state.done is not None else None
        return {"micros": self.tracer.micros, "costs": costs}


def _pieces(tokenizer: Tokenizer, ids: set[int]) -> dict[int, str]:
    """The text of each id; bytes that are not UTF-8 alone are lone surrogates, as Python does."""
    return {id: tokenizer.token_bytes(id).decode(errors="surrogateescape") for id in sorted(ids)}


def _abandon_stdout() -> None:
    """Let what is still buffered go nowhere, instead of failing once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _npz(state: State) -> bytes:
    buffer = io.BytesIO()
    verify = state.logits.cpu().numpy()
    drafts = [row.cpu().numpy() for row in state.draft_logits]
    np.savez(buffer, verify=verify, draft=np.array(drafts, np.float32).reshape(-1, verify.shape[1]))
    return buffer.getvalue()


def _cycle_line(record: dict[str, Any]) -> str:
    return (
        f"cycle {record['cycle']}: position {record['position']}, drafted {record['drafted']} "
        f"({record['draft_end']}), accepted {record['accepted']}, {record['reason']}"
    )


def _draft_lines(state: State, record: dict[str, Any]) -> list[str]:
    """One line a draft: position, token, how likely under the target, drafter's gap, verdict."""
    lines = []
    for depth, draft in enumerate(state.drafts, 1):
        ratio = state.verdict.ratios[depth - 1 : depth]
        verdict = "accepted" if depth <= record["accepted"] else record["reason"]
        if not ratio:
            verdict = "unused" if record["drafted"] == 0 else "after a rejected draft"
        lines.append(
            f"draft {record['position'] + depth}: {draft.token} "
            f"'{state.tokenizer.piece(draft.token)}' "
            f"ratio {ratio[0] if ratio else float('nan'):.4g} gap {draft.gap:.4g} {verdict}"
        )
    return lines


def _timing_lines(summary: dict[str, Any]) -> list[str]:
    cycles = max(1, summary["cycles"])
    phases = {
        name: summary["micros_by_stage"][name]
        for name in PHASES
        if name in summary["micros_by_stage"]
    }
    host = max(0, round(summary["decode_seconds"] * 1e6) - sum(phases.values()))
    return [
        f"timing: {summary['cycles']} cycles, {summary['num_draft_tokens']} drafts, "
        f"{summary['num_accepted_draft_tokens']} accepted",
        "timing: microseconds per cycle: "
        + ", ".join(f"{name} {micros / cycles:.0f}" for name, micros in phases.items())
        + f", host {host / cycles:.0f}",
        _break_even_line(summary["break_even"]),
    ]


def _break_even_line(found: dict[str, Any] | None) -> str:
    if found is None:
        return (
            "timing: break-even is unknown, as cycles with and without drafts are both needed; "
            "mtp.draft=auto has both"
        )
    start = (
        f"timing: a cycle with {found['depth']} drafts costs {found['tokens_needed']:.2f} times "
        "one without"
    )
    if found["acceptance"] is None:
        return f"{start}: it cannot break even, whatever is accepted"
    return f"{start}: it breaks even at an acceptance of {found['acceptance']:.0%} per draft"


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _table(summary: dict[str, Any], state: State) -> None:
    from rich.console import Console
    from rich.table import Table

    if sys.stdout.isatty():
        print(file=sys.stderr)
    identity = summary["identity"]
    if identity == "relaxed":
        identity += f" ({summary['relaxed_accepts']} tokens were not the target's choice)"
    rows = {
        "tokens": f"{summary['output_tokens']} ({summary['finish_reason'] or 'stopped'})",
        "tokens/s": _number(summary["tokens_per_second"], ".1f"),
        "cycles": str(summary["cycles"]),
        "acceptance": _number(summary["draft_acceptance_rate"], ".1%")
        + f" of {summary['num_draft_tokens']} drafts",
        "mean acceptance length": _number(summary["mean_acceptance_length"], ".2f"),
        "identity": identity,
        **({"drafter": state.drafter} if "synthetic" in state.drafter else {}),
        **({"runs on": state.runs_on} if state.runs_on else {}),
        "run directory": os.path.relpath(state.run.path),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    Console(stderr=True, highlight=False, soft_wrap=True).print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
