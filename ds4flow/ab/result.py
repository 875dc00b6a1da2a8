"""What two arms' runs say: ratio pair by pair with its interval, and whether the texts agree.

Pure functions on recorded runs, so that a comparison can be judged again from its directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4flow.bench.samples import Samples
from ds4flow.errors import UsageError
from ds4flow.metrics import repetition
from ds4flow.runs.compare import CONDITIONS, Difference, first_difference
from ds4flow.runs.record import Run
from ds4flow.runs.sets import parts

RATE = "tokens_per_second"
METHOD = "order statistics of the pairs' ratios; holds their median whatever their distribution"
SURE = 0.9  # coverage from which the interval may carry a verdict
ENOUGH = 6  # pairs from which the interval covers 95%
ALLOWABLE = ("weights", "prompts", "machine")


def conditions(run: Run) -> dict[str, Any]:
    """What must be the same in both arms, by the name under which --allow waives it.

    The device counts as a part of the machine, chat format and system text as parts of a prompt.
    """
    machine = run.facts.get("machine") or {}
    named = ("system", "processor", "cores", "memory_bytes")
    return {
        "weights": CONDITIONS["weights"](run),
        "prompts": (
            run.facts.get("prompt_set"),
            {name: (part.prompt, part.prompt_tokens) for name, part in parts(run).items()},
        ),
        "machine": (
            run.facts.get("host"),
            [machine.get(key) for key in named],
            run.facts.get("device"),
        ),
    }


def unlike(first: Run, second: Run) -> list[str]:
    """The conditions in which two runs differ.

    The weights of an MTP block count when both arms have one: drafting without is no other model.
    """
    a, b = conditions(first), conditions(second)
    found = [name for name in ALLOWABLE if a[name] != b[name]]
    blocks = [CONDITIONS["MTP weights"](run) for run in (first, second)]
    if "weights" not in found and None not in blocks and blocks[0] != blocks[1]:
        found.insert(0, "weights")
    return found


def refuse_unlike(first: Run, second: Run, allowed: Sequence[str]) -> list[str]:
    """Return the conditions in which the arms differ by permission; UsageError for any other."""
    found = unlike(first, second)
    refuse(found, allowed)
    return found


def refuse(found: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise UsageError for conditions that differ without permission."""
    refused = [name for name in found if name not in allowed]
    if refused:
        raise UsageError(
            f"the arms have different {' and '.join(refused)}, so their speeds say nothing about "
            "the change",
            f"make them equal, or compare all the same with --allow {','.join(found)}",
        )


# --- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextCheck:
    """Whether every run of both arms gave the same tokens.

    `compared` are output tokens of one run of the baseline. `must` says that they had to be equal,
    and why not otherwise. `difference` is the first one found, in `prompt` between `runs`.
    """

    equal: bool | None  # None: not compared
    compared: int
    must: bool
    why: str
    prompt: str = ""
    runs: tuple[Run, Run] | None = None
    difference: Difference | None = None

    @property
    def fault(self) -> bool:
        """Texts part that had to be equal; one that only ended earlier is its prefix."""
        found = self.difference
        parted = found is not None and found.first is not None and found.second is not None
        return self.must and parted


def check_texts(first: Sequence[Run], second: Sequence[Run], unlike_in: Sequence[str]) -> TextCheck:
    """Compare all runs with the first one of the baseline, token by token."""
    base = parts(first[0])
    compared = sum(len(part.tokens) for part in base.values())
    if {"weights", "prompts"} & set(unlike_in):
        why = f"the arms have different {' and '.join(unlike_in)}"
        return TextCheck(None, 0, False, f"not compared: {why}")
    identities = sorted({str(run.facts.get("identity")) for run in (*first, *second)})
    kernels = [
        (run.facts.get("kernels"), run.facts.get("device"), run.config.get("model.profile"))
        for run in (first[0], second[0])
    ]
    must = identities == ["exact"] and kernels[0] == kernels[1]
    why = "" if must else "other kernels" if identities == ["exact"] else " and ".join(identities)
    for run in (*second, *first[1:]):
        for name, part in parts(run).items():
            found = first_difference(base[name], part)
            if found is not None:
                return TextCheck(False, compared, must, why, name, (first[0], run), found)
    return TextCheck(True, compared, must, why)


# --- speeds ---------------------------------------------------------------------------------------


def rates(runs: Sequence[Run], category: str = "") -> Samples | None:
    """Tokens per second of an arm's runs, or of one category of them; None where one has none."""
    summaries = [
        run.summary.get("categories", {}).get(category, {}) if category else run.summary
        for run in runs
    ]
    values = [float(summary.get(RATE) or 0.0) for summary in summaries]
    return Samples(tuple(values)) if values and all(values) else None


def categories(runs: Sequence[Run]) -> list[str]:
    """The categories of a set's run, none for a single prompt."""
    return list(runs[0].summary.get("categories", ())) if runs else []


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """An arm in numbers; counts are those of its last run."""
    speed, summary = rates(runs), runs[-1].summary
    shown = ("output_tokens", "draft_acceptance_rate", "mean_acceptance_length", "identity")
    return {RATE: _spread(speed), **{name: summary.get(name) for name in shown}}


def ratio(first: Samples, second: Samples) -> dict[str, Any]:
    """Candidate over baseline, pair by pair: values, median, ends and interval of the median."""
    values = second.over(first)
    low, high, coverage = values.interval()
    return {
        "values": list(values.values),
        "median": values.median,
        "min": min(values.values),
        "max": max(values.values),
        "interval": {"low": low, "high": high, "coverage": coverage, "method": METHOD},
    }


def _spread(speed: Samples | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    return {
        "values": list(speed.values),
        "median": speed.median,
        "lower_quartile": speed.low,
        "upper_quartile": speed.high,
    }


def verdict(found: Mapping[str, Any], *, same: bool) -> str:
    """What the ratio shows, in words."""
    low, high = found["interval"]["low"], found["interval"]["high"]
    if same:
        far = max(abs(found["min"] - 1.0), abs(found["max"] - 1.0))
        return f"A/A: this is noise alone, up to {far:.1%} in a pair"
    if low <= 1.0 <= high:
        return "no difference is shown: the interval holds 1"
    what = "faster" if low > 1.0 else "slower"
    if found["interval"]["coverage"] < SURE:
        return f"B was {what} in every pair, but these are too few to be sure: --repeats {ENOUGH}"
    return f"B is {what}"


def warnings(first: Sequence[Run], second: Sequence[Run]) -> list[str]:
    """What a reader of the ratio must know before believing it."""
    found: list[str] = []
    if "categories" in first[0].summary:
        found += first[0].summary.get("warnings", [])
    else:
        found.append("one prompt only: the ratio speaks for that prompt; prompts=FILE runs a set")
        output = first[0].summary.get("output_tokens", 0)
        found += repetition(first[0].summary.get("repeated_tokens", 0), output)
    lengths = [run[0].summary.get("output_tokens") for run in (first, second)]
    if lengths[0] != lengths[1]:
        found.append(f"the arms wrote {lengths[0]} and {lengths[1]} tokens")
    return found
