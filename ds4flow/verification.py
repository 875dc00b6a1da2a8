"""`ds4flow verify`: the parity pipeline over draft depths and prompts, as one table.

Every case is a run of its own in a numbered directory, so a difference can be looked at afterwards.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.overrides import key_of, quoted

if TYPE_CHECKING:
    from omegaconf import DictConfig

PROMPTS = (
    "def count(words):\n    total = {}\n    for word in words:\n",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "# 1 2 3 4 5 6 7 8 9\nx = [1, 2, 3, 4, 5, 6, 7, 8, 9]\ny = [1, 2, 3",
)
"""Beside the model's own prompt: of different lengths, so that blocks end at different places."""

PIPELINES = ("auto", "speculative", "graph")

DEPTH_LIMIT = 16


@dataclass(frozen=True)
class Case:
    """One run of the table. `problem` is empty when everything was equal."""

    depth: int
    prompt: int
    tokens: int
    cycles: int
    accepted: float | None
    rollbacks: int
    problem: str


def parse_depths(text: str) -> list[int]:
    """`1-8` or `0,2,4` as a list; UsageError for anything else."""
    depths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise UsageError(f"--depths {text} is not a list of depths", "type 1-8 or 0,2,4")
        low, high = int(match[1]), int(match[2] or match[1])
        depths.extend(range(low, high + 1))
    if not depths or max(depths) > DEPTH_LIMIT:
        raise UsageError(f"--depths {text} leaves 0..{DEPTH_LIMIT}", "type 1-8 or 0,2,4")
    return depths


def verify_command(
    overrides: Sequence[str], depths: str, prompts: Sequence[str], drafter: str
) -> int:
    """Run all cases and print the table on stdout; 1 when a case differs or fails."""
    from ds4flow import env
    from ds4flow.config import compose
    from ds4flow.overrides import assemble

    wanted = parse_depths(depths)
    for word in overrides:
        if key_of(word) in ("mtp.draft", "prompt", "draft"):
            raise UsageError(
                f"{word}: ds4flow verify sets {key_of(word)} itself",
                "use --depths, --prompt or --drafter",
            )
        if key_of(word) == "pipeline" and word.partition("=")[2] not in PIPELINES:
            raise UsageError(
                f"{word} is not what ds4flow verify can verify",
                f"use pipeline={' or pipeline='.join(PIPELINES)}",
            )
    variables = [v for v in env.read() if v.key not in ("mtp.draft", "runtime.no_gpu")]
    words, notices = assemble(overrides, [], variables)
    for notice in notices:
        print(notice, file=sys.stderr)
    base = [*words, f"draft={drafter}", "log=quiet", "name=verify"]
    base = [*(w for w in base if key_of(w) != "pipeline"), f"pipeline={parity_of(base)}"]
    if not any(key_of(word) == "commit.max_tokens" for word in words):
        base.append("commit.max_tokens=48")
    texts = list(prompts) or [str(compose(base).prompt), *PROMPTS]
    cases = []
    for depth in wanted:
        for number, text in enumerate(texts):
            config = compose([*base, f"mtp.draft={depth}", f"prompt={quoted(text)}"])
            cases.append(run_case(config, depth, number))
            print(_line(cases[-1]), file=sys.stderr)
    _print_table(cases)
    return int(any(case.problem for case in cases))


def parity_of(words: Sequence[str]) -> str:
    """The pipeline that proves what a run with these overrides would do, graph or stage by stage.

    Raises UsageError.
    """
    from ds4flow.config import compose
    from ds4flow.wiring import Wiring

    cycle = Wiring.of(compose(words)).roles["cycle"]
    found = "graph-parity" if "decode" in cycle else "parity"
    print(f"verifying {', '.join(cycle)}: pipeline={found}", file=sys.stderr)
    return found


def run_case(
    config: DictConfig, depth: int, number: int, root: Path = Path("runs") / "verify"
) -> Case:
    """Run the composed parity pipeline in the next numbered directory of `root`."""
    from ds4flow import origin, rundir
    from ds4flow.pipeline import State
    from ds4flow.rundir import RunDir
    from ds4flow.wiring import build_pipeline, read_prompt

    path = rundir.allocate(root / rundir.NUMBER)
    facts = {
        "command": ["ds4flow", "verify"],
        "versions": origin.versions(),
        "machine": origin.machine(),
        "depth": depth,
    }
    run = RunDir.create(path, facts)
    pipeline = build_pipeline(config)
    state = State(run=run, prompt=read_prompt(config))
    run.write("prompt.txt", state.prompt)
    problem = ""
    try:
        pipeline.run(state)
    except Ds4FlowError as error:
        if state.cycle == 0:  # not a difference: the request itself is wrong
            run.finish("failed", error.what)
            raise
        problem = error.what
        run.finish("failed", problem)
    except BaseException:
        run.finish("interrupted", "stopped")
        raise
    else:
        run.finish("complete")
    parity, log = pipeline.stages["parity"], pipeline.stages["log"]
    counts = log.counts.summary()  # type: ignore[attr-defined]
    return Case(
        depth,
        number,
        len(state.output),
        state.cycle,
        counts["draft_acceptance_rate"],
        parity.rollbacks,  # type: ignore[attr-defined]
        problem,
    )


def _line(case: Case) -> str:
    verdict = case.problem or "equal"
    return f"depth {case.depth}, prompt {case.prompt}: {case.tokens} tokens, {verdict}"


def _print_table(cases: Sequence[Case]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("depth", "tokens", "cycles", "acceptance", "rollbacks", "logits bits", "state"):
        table.add_column(column, justify="right")
    for depth in dict.fromkeys(case.depth for case in cases):
        mine = [case for case in cases if case.depth == depth]
        rates = [case.accepted for case in mine if case.accepted is not None]
        verdict = "differ" if any(case.problem for case in mine) else "equal"
        rollbacks = sum(case.rollbacks for case in mine)
        table.add_row(
            str(depth),
            str(sum(case.tokens for case in mine)),
            str(sum(case.cycles for case in mine)),
            f"{sum(rates) / len(rates):.1%}" if rates else "-",
            str(rollbacks) if rollbacks or not depth else "0 (proves little)",
            verdict,
            verdict,
        )
    Console(highlight=False).print(table)
