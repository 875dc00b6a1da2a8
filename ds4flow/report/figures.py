"""The figures of one run, from its cycles.jsonl, so that a crashed run has them too."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ds4flow.metrics import Counts
from ds4flow.report.break_even import break_even_figure
from ds4flow.report.figure import Axis, Chart, Layer, Table
from ds4flow.report.totals import DECODING, Cycle, Totals, micros_of

_BINS = 100
_BIN_CYCLES = 8
_POINTS = 800


def run_figures(cycles: Sequence[Cycle], totals: Totals, *, parts: int = 1) -> list[Chart]:
    """All figures of a run; `cycles` are those of all its `parts` (prompts), one after another.

    `totals` are the counts and costs of the same cycles.
    """
    return [
        _by_position(totals.counts),
        _histogram(totals.counts),
        _phases(cycles),
        _speed(cycles, parts),
        break_even_figure(totals, "this run"),
    ]


def _by_position(counts: Counts) -> Chart:
    depths = sorted(counts.verified_at)
    shares = [counts.accepted_at[k] / counts.verified_at[k] for k in depths]
    notes = [f"{counts.accepted_at[k]} of {counts.verified_at[k]}" for k in depths]
    return Chart(
        "acceptance-by-position",
        "Acceptance by position",
        "Of the drafts verified at each depth, the share that was committed. A draft counts as "
        "verified also when one before it was rejected.",
        Axis("draft depth", labels=["", *map(str, range(1, max(depths, default=0) + 1))]),
        Axis("committed", low=0.0, high=1.0, percent=True),
        [Layer("bars", "committed", depths, shares, colour=2, notes=notes)],
        Table(
            ("draft depth", "verified", "committed", "share"),
            [
                (str(k), str(counts.verified_at[k]), str(counts.accepted_at[k]), f"{share:.1%}")
                for k, share in zip(depths, shares, strict=True)
            ],
        ),
        missing="" if depths else "No draft was verified.",
    )


def _histogram(counts: Counts) -> Chart:
    lengths = list(range(max(counts.histogram, default=-1) + 1))
    values = [counts.histogram[k] for k in lengths]
    return Chart(
        "accepted-length",
        "Accepted length",
        "Cycles by the number of drafts they committed; each committed one token more, which was "
        "certain before.",
        Axis("drafts committed in a cycle", labels=list(map(str, lengths))),
        Axis("cycles", whole=True),
        [Layer("bars", "cycles", lengths, values, colour=0, notes=list(map(str, values)))],
        Table(
            ("drafts committed", "cycles", "share"),
            [
                (str(k), str(n), f"{n / counts.cycles:.1%}")
                for k, n in zip(lengths, values, strict=True)
            ],
        ),
        missing="" if lengths else "No cycle was recorded.",
    )


def _bins(cycles: Sequence[Cycle], most: int) -> list[Sequence[Cycle]]:
    size = max(1, -(-len(cycles) // most))
    return [cycles[start : start + size] for start in range(0, len(cycles), size)]


def _phases(cycles: Sequence[Cycle]) -> Chart:
    """Mean milliseconds a cycle, stacked by phase."""
    others = sorted({name for cycle in cycles for name in cycle.get("micros") or {}} - {*DECODING})
    bins = _bins(cycles, _BINS)
    means = {
        name: [fmean(micros_of(cycle, name) for cycle in part) / 1000 for part in bins]
        for name in DECODING
    }
    rest = [
        fmean(sum(micros_of(cycle, name) for name in others) for cycle in part) / 1000
        for part in bins
    ]
    if any(value >= 0.0005 for value in rest):
        means[", ".join(others)] = rest
    # The cycle number at the middle of each bin; numbers start again with each prompt of a set.
    size = len(bins[0]) if bins else 1
    xs = [index * size + (len(part) + 1) / 2 for index, part in enumerate(bins)]
    layers, base = [], [0.0] * len(bins)
    for colour, (name, values) in enumerate(means.items()):
        top = [low + value for low, value in zip(base, values, strict=True)]
        layers.append(Layer("area", name, xs, top, colour=_PHASE_COLOURS[colour], base=base))
        base = top
    ceiling, beyond = _ceiling(base)
    caption = "Milliseconds of a cycle by phase" + (
        f", mean of {size} cycles at a time." if size > 1 else "."
    )
    if beyond:
        caption += f" {beyond} of {len(bins)} are beyond the scale, up to {max(base):.1f} ms."
    return Chart(
        "time-per-phase",
        "Time per phase",
        caption,
        Axis("cycle", low=min(xs, default=0.0), high=max(xs, default=1.0), whole=True),
        Axis("ms per cycle", low=0.0, high=ceiling),
        layers,
        Table(
            ("cycles to", *(f"{name}, ms" for name in means)),
            [
                (
                    str(min(len(cycles), (index + 1) * size)),
                    *(f"{values[index]:.3f}" for values in means.values()),
                )
                for index in range(len(bins))
            ],
        ),
        missing="" if cycles else "No cycle was recorded.",
    )


_PHASE_COLOURS = (1, 0, 2, 6)


def _ceiling(values: Sequence[float]) -> tuple[float | None, int]:
    """A scale that a few outliers do not flatten, and how many values are beyond it."""
    if not values:
        return None, 0
    usual = sorted(values)[int(0.95 * (len(values) - 1))]
    if max(values) <= 2 * usual:
        return None, 0
    top = 1.5 * usual
    return top, sum(value > top for value in values)


def _speed(cycles: Sequence[Cycle], parts: int) -> Chart:
    """Tokens per second of single cycles, and of about eight and more together."""
    timed = sorted(
        (
            cycle
            for cycle in cycles
            if cycle.get("tokens") and sum((cycle.get("micros") or {}).values())
        ),
        key=lambda cycle: int(cycle.get("position", 0)),
    )
    step = max(1, -(-len(timed) // _POINTS))
    shown = timed[::step]
    bins = _bins(timed, min(_BINS, max(1, len(timed) // _BIN_CYCLES)))
    xs = [fmean(int(cycle["position"]) for cycle in part) for part in bins]
    ys = [_rate(part) for part in bins]
    caption = (
        "Committed tokens over the time of the cycle's stages, at the context length where it "
        f"began. Points are cycles{f', every {step}th' if step > 1 else ''}; the line takes "
        f"{len(bins[0]) if bins else 0} together."
    )
    if parts > 1:
        caption += f" All {parts} prompts together."
    ceiling, _ = _ceiling([_rate([cycle]) for cycle in shown])
    return Chart(
        "speed-by-context",
        "Speed against context length",
        caption,
        Axis("context, tokens", whole=True),
        Axis("tokens/s", low=0.0, high=ceiling),
        [
            Layer(
                "points",
                "cycles",
                [int(cycle["position"]) for cycle in shown],
                [_rate([cycle]) for cycle in shown],
                colour=5,
                notes=[
                    f"cycle {cycle.get('cycle')}: {len(cycle['tokens'])} tokens, "
                    f"{_rate([cycle]):.0f} tokens/s"
                    for cycle in shown
                ],
            ),
            Layer("line", f"{len(bins[0]) if bins else 0} together", xs, ys, colour=0),
        ],
        Table(
            ("context", "tokens/s"),
            [(f"{x:.0f}", f"{y:.1f}") for x, y in zip(xs, ys, strict=True)],
        ),
        missing="" if timed else "No cycle with its times was recorded.",
    )


def _rate(part: Sequence[Cycle]) -> float:
    tokens = sum(len(cycle["tokens"]) for cycle in part)
    return tokens * 1e6 / max(1, sum(sum(cycle["micros"].values()) for cycle in part))
