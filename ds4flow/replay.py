"""`ds4flow replay`: a run again, with the same config and the same weights, in a new directory.

What cannot be the same is refused or said; what came out is compared down to the bits.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ds4flow.config import validate
from ds4flow.errors import Ds4FlowError
from ds4flow.replay_plan import make_plan, recorded_config_dir
from ds4flow.rundir import RunDir
from ds4flow.runs.bits import compare_bits
from ds4flow.runs.compare import difference_lines, first_difference, other_conditions
from ds4flow.runs.record import Run, find_parts, label

_DIGESTS = ("model.sha256", "model.mtp_sha256")


def replay_command(
    run: Run,
    root: Path,
    typed: Sequence[str],
    *,
    drop: Sequence[str],
    other_weights: bool,
    config_dir: str | None,
) -> int:
    """Replay `run` and say what came out; 1 when the output differs and nothing was overridden."""
    from ds4flow.execute import new_directory, run_composed

    name = label(run.path, root)
    folder = config_dir or recorded_config_dir(run)
    if other_weights:  # their recorded digests would refuse them
        drop = [*drop, *(key for key in _DIGESTS if key in run.config)]
    plan = make_plan(run, name, typed, drop=drop, config_dir=folder)
    _, first = validate(plan.words, config_dir=folder)
    for notice in plan.notices:
        print(notice, file=sys.stderr)
    check_weights(run, name, first, other_weights=other_weights)
    path = new_directory(first)
    run_composed(first, path, config_dir=folder)
    same = report_outcome(run, Run.open(path), name)
    return 1 if plan.same and not same else 0


def check_weights(run: Run, name: str, config: DictConfig, *, other_weights: bool) -> None:
    """Refuse weights other than those that the run recorded, before a directory is made.

    The pipeline's own stages find the files, so that what is checked is what will be loaded. Raises
    Ds4FlowError with both digests, unless `other_weights` allows them.
    """
    before = run.facts.get("files")
    if not before:
        return
    now = _files(config)
    for role, key in (("main", "model.path"), ("mtp", "model.mtp_path")):
        old, new = before.get(role), now.get(role)
        if not old or not new:
            if old and run.config.get("mtp.draft") != 0:
                problem = f"there is no {role} file; {name} had {_known(old)}"
            else:
                continue
        elif _known(old) == _known(new):
            if old.get("sha256") is None:
                print(f"note: {new['path']} is compared by size and time only", file=sys.stderr)
            continue
        else:
            problem = f"{new['path']} has {_known(new)}, but {name} ran with {_known(old)}"
        if not other_weights:
            raise Ds4FlowError(
                problem, f"name the same file with {key}=FILE, or add --other-weights"
            )
        print(f"note: {problem}", file=sys.stderr)


def _known(file: dict[str, Any]) -> str:
    """What identifies a file: its digest, or what was recorded instead."""
    if file.get("sha256") is not None:
        return f"the SHA-256 {file['sha256']}"
    return f"{file.get('bytes')} bytes of {file.get('modified')}"


def _files(config: DictConfig) -> dict[str, Any]:
    """The facts of the files that the config leads to, as its own stages record them."""
    from ds4flow.pipeline import State
    from ds4flow.wiring import build_pipeline

    mine = config.copy()
    if mine.model.path is not None:  # a difference is for the caller to judge
        mine.model.sha256 = mine.model.mtp_sha256 = None
    pipeline = build_pipeline(mine)
    with tempfile.TemporaryDirectory() as folder:
        state = State(run=RunDir.create(Path(folder) / "files"), prompt="")
        for stage in pipeline.setup:
            pipeline.stages[stage].run(state)
            if "files" in pipeline.stages[stage].writes:
                break
        return state.run.facts.get("files") or {}


def report_outcome(parent: Run, child: Run, name: str) -> bool:
    """Say whether the outputs are the same bits, or where they part; whether they are the same.

    Of a set of prompts each is compared, and only those that differ are shown.
    """
    others = other_conditions([parent, child])
    if others:
        print(f"note: not the same as {name} had: {', '.join(others)}", file=sys.stderr)
    parts = find_parts(parent.path)
    if not parts:
        same, lines = compared(parent, child, name)
        for line in lines:
            print(line, file=sys.stderr)
        return same
    equal = 0
    for part in parts:
        other = child.path / part.name
        if other.is_dir():
            same, lines = compared(Run.open(part), Run.open(other), f"{name}/{part.name}")
        else:
            same, lines = False, [f"{name}/{part.name}: this run did not get there"]
        equal += same
        for line in () if same else lines:
            print(line, file=sys.stderr)
    print(f"{name}: the same output in {equal} of {len(parts)} prompts", file=sys.stderr)
    return equal == len(parts)


def compared(parent: Run, child: Run, name: str) -> tuple[bool, list[str]]:
    """Whether the output of two runs is the same, to the bit where both kept logits; and in words.

    Of a run that was stopped, what it has is compared.
    """
    found = first_difference(parent, child)
    tokens = len(parent.tokens)
    lines = [f"{name}: the same {tokens} output tokens"]
    if found is not None and found.first is None and parent.status != "complete":
        lines[0] += f", all that it has; it was {parent.status}"
    elif found is not None:
        return False, difference_lines(found, name, "this run")
    bits = compare_bits(parent, child)
    if not bits.compared:
        lines.append("logits: not compared, as both runs must keep them (mtp.full_logits=true)")
    elif bits.different is None:
        lines.append(f"logits: the same bits at {bits.compared} positions")
    else:
        lines.append(f"logits: other bits from output token {bits.different} on")
    return bits.different is None, lines
