"""From a traced run to the counts of runs with other depths, margins and gates.

What is exact: with margin 1 the text of any run is the traced one, and a draft depends on the text
before it alone. Where the trace has drafts from every place (mtp.probe), walking over the text
gives each cycle of the other run as it would be. That holds for a margin below 1 too, as long as it
accepts no token that is not the target's choice: until then the text is the same.

What is estimated: behind such a token the text is another one. The walk goes on over the traced
text, and the rest of that cycle's drafts are counted at the average acceptance of their position.
Without drafts from every place, cycles are counted as the traced ones are on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ds4flow.depth import DepthPolicy, Experience
from ds4flow.pace import AUTO_DEPTH_MAX, Pace
from ds4flow.whatif.costs import CostModel
from ds4flow.whatif.traced import Start, Traced


class Setting(NamedTuple):
    """What a prediction is asked for; `depth` may be auto."""

    depth: int | str
    margin: float = 1.0
    gate: float = 0.0


@dataclass
class Prediction:
    """Counts as metrics.py defines them; estimates need not be whole numbers.

    `micros` is the time of all cycles, None where the run did not measure costs.
    """

    setting: Setting
    exact: bool = True
    cycles: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    relaxed: float = 0.0
    tokens: int = 0
    micros: float | None = None

    @property
    def acceptance(self) -> float | None:
        """Accepted of the drafts verified, None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        """Output tokens per cycle."""
        return self.tokens / self.cycles if self.cycles else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of decoding, None without costs."""
        return self.tokens / self.micros * 1e6 if self.micros else None


class Cycle(NamedTuple):
    """One cycle as it would be; `known` is False where averages had to be taken."""

    drafted: int
    steps: int
    accepted: float
    relaxed: float
    known: bool


@dataclass(frozen=True)
class Averages:
    """Shares of drafts by position, over the traced drafts whose predecessors were all right."""

    accepted: dict[int, float]
    relaxed: dict[int, float]

    @classmethod
    def of(cls, traced: Traced, margin: float) -> Averages:
        """Count the traced drafts under `margin`."""
        seen: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        relaxed: Counter[int] = Counter()
        for start in traced.starts:
            for depth, draft, ratio in _looked_at(traced, start):
                right = _is_right(traced, start, depth, draft)
                passes = right or (ratio is not None and margin < 1.0 and ratio >= margin)
                seen[depth] += 1
                accepted[depth] += passes
                relaxed[depth] += passes and not right
                if not right:
                    break
        return cls(
            {depth: accepted[depth] / count for depth, count in seen.items()},
            {depth: relaxed[depth] / count for depth, count in seen.items()},
        )


def _looked_at(traced: Traced, start: Start) -> Iterator[tuple[int, int, float | None]]:
    return zip(range(1, len(start.drafts) + 1), start.drafts, start.ratios, strict=True)


def _is_right(traced: Traced, start: Start, depth: int, draft: int) -> bool:
    """Whether a draft is the token of the text; behind the end of the text none is."""
    place = start.index + depth
    return place < len(traced.output) and traced.output[place] == draft


def would_be(traced: Traced, start: Start, setting: Setting, averages: Averages) -> Cycle:
    """The cycle that begins where `start` did, with other knobs; `setting.depth` is a number."""
    assert isinstance(setting.depth, int)
    drafted, steps = _drafted(start, setting)
    accepted = relaxed = 0
    on_text = True
    for depth in range(1, drafted + 1):
        draft, ratio = start.drafts[depth - 1], start.ratios[depth - 1]
        right = on_text and _is_right(traced, start, depth, draft)
        if right:
            accepted += 1
            continue
        if setting.margin >= 1.0:
            break
        if ratio is None:
            # Not judged: behind a token that the traced run did not take.
            more, others = _expected(depth, drafted, averages) if not on_text else (0.0, 0.0)
            return Cycle(drafted, steps, accepted + more, relaxed + others, False)
        if ratio < setting.margin:
            break
        accepted += 1
        relaxed += ratio < 1.0
        on_text = False
    return Cycle(drafted, steps, accepted, relaxed, on_text)


def _drafted(start: Start, setting: Setting) -> tuple[int, int]:
    """How many drafts would be verified, and how many steps the block would take for them."""
    depth = min(int(setting.depth), len(start.drafts))
    for place, gap in enumerate(start.gaps[:depth]):
        if gap < setting.gate:
            return place, place + 1
    ended = depth < int(setting.depth) and start.end in ("gate", "eos")
    return depth, depth + ended


def _expected(depth: int, drafted: int, averages: Averages) -> tuple[float, float]:
    """Drafts from `depth` on that are accepted on average, and how many of them are relaxed."""
    accepted = relaxed = 0.0
    reach = 1.0
    for place in range(depth, drafted + 1):
        relaxed += reach * averages.relaxed.get(place, 0.0)
        reach *= averages.accepted.get(place, 0.0)
        accepted += reach
    return accepted, relaxed


def predict(traced: Traced, setting: Setting, costs: CostModel | None) -> Prediction | None:
    """What a run with `setting` would count; None for what the trace cannot tell.

    That is a depth beyond the traced one, a gate below it, and the auto policy without costs or
    without drafts from every place.
    """
    if setting.gate < traced.gate:
        return None
    if setting.depth == "auto":
        return _automatic(traced, setting, costs)
    assert isinstance(setting.depth, int)
    if setting.depth > traced.depth:
        return None
    averages = Averages.of(traced, setting.margin)
    walked = _walk(traced, setting, costs, averages)
    return walked or _on_average(traced, setting, costs, averages)


def _count(found: Prediction, cycle: Cycle, share: float = 1.0) -> None:
    found.cycles += share
    found.drafted += share * cycle.drafted
    found.accepted += share * cycle.accepted
    found.relaxed += share * cycle.relaxed


def _walk(
    traced: Traced, setting: Setting, costs: CostModel | None, averages: Averages
) -> Prediction | None:
    """Go over the text from cycle to cycle; None when the trace has no drafts where one begins."""
    found = Prediction(setting, exact=traced.pure, tokens=len(traced.output))
    found.micros = None if costs is None else 0.0
    index, carry, stale = 0, 0.0, 0
    while index < len(traced.output):
        start = traced.by_index.get(index)
        if start is None and setting.depth == 0:
            start = Start(index, (), (), (), "off", 1, 0, 0, 0, None)
        if start is None:
            return None
        cycle = would_be(traced, start, setting, averages)
        found.exact &= cycle.known
        _count(found, cycle)
        if costs is not None and found.micros is not None:
            found.micros += costs.cycle(cycle.drafted, cycle.steps, stale)
        carry += cycle.accepted
        accepted = int(carry + 1e-9)
        carry -= accepted
        stale = accepted
        index += 1 + accepted
    found.exact &= traced.run.status == "complete"
    return found


def _on_average(
    traced: Traced, setting: Setting, costs: CostModel | None, averages: Averages
) -> Prediction:
    """As many cycles as the text needs when they are like the traced ones on average."""
    starts = [start for start in traced.starts if start.end != "room"]
    cycles = [would_be(traced, start, setting, averages) for start in starts]
    mean = sum(1 + cycle.accepted for cycle in cycles) / len(cycles)
    share = len(traced.output) / mean / len(cycles)
    found = Prediction(setting, exact=False, tokens=len(traced.output))
    for cycle in cycles:
        _count(found, cycle, share)
    if costs is not None:
        stale = round(mean - 1)
        found.micros = sum(
            share * costs.cycle(cycle.drafted, cycle.steps, stale) for cycle in cycles
        )
    return found


def _automatic(traced: Traced, setting: Setting, costs: CostModel | None) -> Prediction | None:
    """Let the depth policy choose over the traced text, at the costs of the model.

    Always an estimate: a real run chooses by times that jitter. None without costs or without
    drafts from every place.
    """
    if costs is None or setting.margin < 1.0 or not traced.probe:
        return None
    policy = DepthPolicy(min(AUTO_DEPTH_MAX, traced.depth), Experience(Pace(costs.prior)))
    averages = Averages.of(traced, 1.0)
    found = Prediction(setting, exact=False, tokens=len(traced.output), micros=0.0)
    index = stale = 0
    while index < len(traced.output):
        start = traced.by_index.get(index)
        if start is None:
            return None
        depth = policy.choose(traced.room(index)).depth
        cycle = would_be(traced, start, setting._replace(depth=depth), averages)
        drafting = costs.drafting(cycle.steps, stale)
        whole = costs.cycle(cycle.drafted, cycle.steps, stale)
        _count(found, cycle)
        assert found.micros is not None
        found.micros += whole
        accepted = int(cycle.accepted)
        policy.observe(
            drafted=cycle.drafted,
            accepted=accepted,
            steps=cycle.steps,
            draft_s=drafting / 1e6,
            verify_s=(whole - drafting) / 1e6,
        )
        stale = accepted if depth else stale + 1
        index += 1 + accepted
    return found
