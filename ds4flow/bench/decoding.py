"""Greedy decoding against speculation with real or synthetic drafts, and against another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ds4flow.bench.drafters import Drafter, OracleDrafter, OwnDrafter
from ds4flow.bench.engine import Engine, Run, Start, greedy, prepare, same_bits, speculative
from ds4flow.bench.peer import Peer, PeerRun
from ds4flow.bench.results import PeerResult, SpeculationResult
from ds4flow.bench.samples import Samples, interleave, samples
from ds4flow.bench.settings import Say, Settings, check_context, quiet
from ds4flow.depth import DepthPolicy, Experience
from ds4flow.oracle import Oracle
from ds4flow.pace import AUTO_DEPTH_MAX
from ds4flow.traffic import selects, weight_traffic


@dataclass(frozen=True)
class Arm:
    """One way of decoding: `depth` drafts a cycle (0: greedy, None: auto).

    With `rates` the drafts come from the oracle, which spoils them at these rates by position.
    """

    depth: int | None
    rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """How tables call it."""
        if self.depth == 0:
            return "greedy"
        depth = "auto" if self.depth is None else str(self.depth)
        if self.rates:
            return f"oracle {depth} at {','.join(f'{rate:g}' for rate in self.rates)}"
        return f"mtp {depth}"

    @property
    def deepest(self) -> int:
        """The most drafts a cycle can have."""
        return AUTO_DEPTH_MAX if self.depth is None else self.depth


GREEDY = Arm(0)


def measure_decoding(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    arms: Sequence[Arm],
    settings: Settings,
    *,
    check: bool = True,
    say: Say = quiet,
) -> list[SpeculationResult]:
    """Greedy decoding and `arms` on the same prompts, interleaved; greedy comes first.

    `check`: compare tokens, logits and cache of each arm with greedy's bit by bit, outside the
    timing.
    """
    arms = [arm for arm in dict.fromkeys(arms) if arm != GREEDY]
    deepest = max((arm.deepest for arm in arms), default=0)
    room = settings.tokens + 2 * deepest + 2
    starts = []
    for number, prompt in enumerate(prompts):
        check_context(engine, len(prompt) + room)
        say(f"prefill of prompt {number + 1}/{len(prompts)}")
        starts.append(prepare(engine.model, prompt, room=room, chunk=settings.chunk))
    # What the oracle replays: every position that a draft of the last cycle can have.
    recorded = [
        greedy(engine.model, start, settings.tokens + deepest + 1).tokens for start in starts
    ]
    runners: dict[Arm, Callable[[], Run]] = {GREEDY: lambda: _greedy(engine, starts, settings)}
    same: dict[Arm, tuple[bool, bool, bool]] = {}
    for arm in arms:
        drafters = [
            _drafter(engine, arm, start, tokens)
            for start, tokens in zip(starts, recorded, strict=True)
        ]
        runners[arm] = partial(_speculate, engine, arm, starts, drafters, settings)
        if check:
            say(f"comparing {arm.name} with greedy")
            found = [
                same_bits(engine.model, start, settings.tokens, drafter, _depth(engine, arm))
                for start, drafter in zip(starts, drafters, strict=True)
            ]
            tokens_, logits_, state_ = zip(*found, strict=True)
            same[arm] = (all(tokens_), all(logits_), all(state_))
    got = interleave(
        {arm.name: run for arm, run in runners.items()},
        repeats=settings.repeats,
        warmup=settings.warmup,
        say=lambda text: say(f"decoding: {text}"),
    )
    base = samples(got[GREEDY.name], lambda run: run.rate)
    return [_decoding_result(engine, arm, got[arm.name], base, same, starts) for arm in runners]


def _greedy(engine: Engine, starts: Sequence[Start], settings: Settings) -> Run:
    return _together(
        greedy(engine.model, start, settings.tokens, clock=settings.now) for start in starts
    )


def _speculate(
    engine: Engine,
    arm: Arm,
    starts: Sequence[Start],
    drafters: Sequence[Drafter],
    settings: Settings,
) -> Run:
    model, count = engine.model, settings.tokens
    return _together(
        speculative(model, start, count, drafter, _depth(engine, arm), clock=settings.now)
        for start, drafter in zip(starts, drafters, strict=True)
    )


def _depth(engine: Engine, arm: Arm) -> int | DepthPolicy:
    if arm.depth is not None:
        return arm.depth
    # as in any process, costs are known from the texts before; this very text must not be
    return DepthPolicy(AUTO_DEPTH_MAX, Experience(Experience.of(engine.model).pace))


def _drafter(engine: Engine, arm: Arm, start: Start, recorded: Sequence[int]) -> Drafter:
    if not arm.rates:
        return OwnDrafter()
    return OracleDrafter(Oracle(recorded, start.length, arm.rates, engine.model.config.vocab))


def _together(runs: Iterable[Run]) -> Run:
    """The runs on all prompts as one."""
    total = Run()
    for run in runs:
        total.tokens += run.tokens
        total.seconds += run.seconds
        total.cycles += run.cycles
        total.drafted += run.drafted
        total.accepted += run.accepted
        for depth, count in run.depths.items():
            total.depths[depth] = total.depths.get(depth, 0) + count
    return total


def _decoding_result(
    engine: Engine,
    arm: Arm,
    runs: Sequence[Run],
    base: Samples,
    same: dict[Arm, tuple[bool, bool, bool]],
    starts: Sequence[Start],
) -> SpeculationResult:
    rate = samples(runs, lambda run: run.rate)
    # Every round of an arm with a fixed depth drafts the same; `auto` may not.
    last = runs[-1]
    flags = same.get(arm, (None, None, None))
    return SpeculationResult(
        threads=engine.threads,
        arm=arm.name,
        depth="auto" if arm.depth is None else str(arm.depth),
        rates=arm.rates,
        synthetic=bool(arm.rates),
        prompts=len(starts),
        tokens=len(last.tokens),
        distinct=len(set(last.tokens)),
        rate=rate,
        ratio=None if arm == GREEDY else rate.over(base),
        drafted=last.drafted,
        accepted=last.accepted,
        acceptance=last.acceptance,
        mean_length=last.mean_length,
        byte_cost=_byte_cost(engine, arm, starts[0].length),
        same_tokens=flags[0],
        same_logits=flags[1],
        same_state=flags[2],
    )


def _byte_cost(engine: Engine, arm: Arm, position: int) -> float | None:
    """Weight bytes of a cycle over those of a greedy step."""
    if arm.depth is None:
        return None
    config = engine.model.config
    indexer = selects(config, position)
    tensors = engine.trunk_tensors()
    one = weight_traffic(tensors, config, indexer=indexer).total
    cycle = weight_traffic(tensors, config, rows=arm.depth + 1, indexer=indexer).total
    draft = weight_traffic(engine.draft_tensors(), config).total
    return (cycle + arm.depth * draft) / one


# --- another engine ------------------------------------------------------------------------------


def measure_peer(
    engine: Engine, peer: str, prompt: Sequence[int], settings: Settings, *, say: Say = quiet
) -> PeerResult:
    """Greedy decoding by us and by the peer, in turn, on the same file, prompt and threads."""
    context = len(prompt) + settings.tokens + 8
    check_context(engine, context)
    path = engine.main.path

    def ours() -> PeerRun:
        start = prepare(engine.model, prompt, room=settings.tokens, chunk=settings.chunk, mtp=False)
        run = greedy(engine.model, start, settings.tokens, clock=settings.now)
        return PeerRun(start.seconds, run.seconds, tuple(run.tokens))

    say(f"loading {path.name} into {peer}")
    with Peer(peer, path, threads=engine.threads, context=context) as other:
        got = interleave(
            {
                "ours": ours,
                "theirs": lambda: other.run(prompt, settings.tokens, clock=settings.clock),
            },
            repeats=settings.repeats,
            warmup=settings.warmup,
            say=lambda text: say(f"{peer}: {text}"),
        )
        version, note = other.version, other.note
    decode = {name: samples(runs, lambda run: run.rate) for name, runs in got.items()}
    prefill = {
        name: samples(runs, lambda run: len(prompt) / run.prefill) for name, runs in got.items()
    }
    pairs = zip(got["ours"][-1].tokens, got["theirs"][-1].tokens, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), settings.tokens)
    return PeerResult(
        threads=engine.threads,
        peer=peer,
        version=version,
        prompt=len(prompt),
        tokens=settings.tokens,
        ours=decode["ours"],
        theirs=decode["theirs"],
        ratio=decode["ours"].over(decode["theirs"]),
        prefill_ours=prefill["ours"],
        prefill_theirs=prefill["theirs"],
        prefill_ratio=prefill["ours"].over(prefill["theirs"]),
        same_prefix=same,
        note=note,
    )
