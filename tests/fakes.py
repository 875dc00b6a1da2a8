"""Deterministic stand-ins for the engine: a look-up target, scripted drafters, a byte tokenizer.

They keep the contract of the real classes and check that it is kept towards them, so the decoding
loop is tested without weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ds4flow.stages.commit import Commit
from ds4flow.stages.draft import Drafter, MtpDrafter
from ds4flow.stages.log import Log
from ds4flow.stages.prefill import Prefill
from ds4flow.stages.verify import Verify

from ds4flow.model.head import check_logits
from ds4flow.model.mtp import Pairs, step_by_step
from ds4flow.pipeline import Pipeline, Stage, State
from ds4flow.rundir import RunDir
from ds4flow.speculate import Draft
from ds4flow.tokenizer import _CHAR_OF_BYTE, EOS, Tokenizer

BOS_ID, EOS_ID = 0, 1
BYTES = 2  # id of byte 0
VOCAB = BYTES + 256

Target = Callable[[tuple[int, ...]], int]


def byte_tokenizer() -> Tokenizer:
    """One token a byte, after BOS and EOS."""
    tokens = ["<bos>", EOS, *(_CHAR_OF_BYTE[byte] for byte in range(256))]
    return Tokenizer(tokens, [3, 3, *[1] * 256], [], bos=BOS_ID, eos=EOS_ID)


def ids(text: str) -> list[int]:
    """The tokens of `text` in `byte_tokenizer`."""
    return [BYTES + byte for byte in text.encode()]


def chaotic(seed: int, *, letters: int = 8) -> Target:
    """A target whose choice depends on all tokens before it; it never ends the text."""

    def choose(context: tuple[int, ...]) -> int:
        digest = hashlib.sha256(f"{seed}:{context}".encode()).digest()
        return BYTES + ord("a") + digest[0] % letters

    return choose


def reciting(text: str, prompt: int) -> Target:
    """A target that continues a prompt of `prompt` tokens with `text` and EOS, over and over."""
    script = [*ids(text), EOS_ID]
    return lambda context: script[(len(context) - prompt) % len(script)]


class FakeCache:
    """Remembers which token each row was written with; rows beyond the cursor are invisible."""

    def __init__(self, context: int, draft_max: int) -> None:
        self.context, self.draft_max = context, draft_max
        self.length = 0
        self.rows: dict[int, int] = {}
        self.mtp: dict[int, tuple[str, int, int]] = {}  # position: source, stream of q-1, token

    def check_room(self, start: int, rows: int) -> None:
        assert start + rows <= self.context, "a pass left the context"

    def commit(self, rows: int) -> None:
        self.length += rows
        assert all(position in self.rows for position in range(self.length))

    def fork(self) -> FakeCache:
        return copy.deepcopy(self)

    def visible(self) -> tuple[int, ...]:
        return tuple(self.rows[position] for position in range(self.length))

    def state_hash(self, *, mtp: bool = True) -> dict[str, str]:
        lanes: dict[str, object] = {"layer 0": self.visible()}
        if mtp:
            lanes["mtp"] = [self.mtp.get(position) for position in range(self.length)]
        return {
            name: hashlib.sha256(repr(rows).encode()).hexdigest() for name, rows in lanes.items()
        }


class FakeMtp:
    """Drafts what the target would choose, except at positions that `wrong` holds for."""

    def __init__(self, model: FakeModel, wrong: Callable[[int], bool], gap: float = 5.0) -> None:
        self.model, self.wrong, self.gap = model, wrong, gap
        self.steps = 0
        self.warmed: list[int] = []

    def warm(
        self, streams: torch.Tensor, tokens: Sequence[int], first: int, cache: FakeCache
    ) -> None:
        assert len(streams) == len(tokens)
        for i, token in enumerate(tokens):
            self.warmed.append(first + i)
            cache.mtp[first + i] = ("target", int(streams[i, 0, 0]), token)

    def follow(
        self,
        tokens: Sequence[int],
        first: int,
        previous: torch.Tensor,
        streams: torch.Tensor,
        cache: FakeCache,
    ) -> None:
        self.warm(torch.cat((previous[None], streams[:-1])), tokens, first, cache)

    reach = 1 << 20  # its steps look at every row

    def weight_bytes(self) -> float:
        return 5.0

    def step(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: FakeCache,
        stale: Pairs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if stale is not None:
            self.warm(stale[2], stale[1], stale[0], cache)
        self.steps += 1
        # Rows before the cursor must be final: paired with the target's streams.
        visible = cache.visible()
        for q in range(1, cache.length):
            source, stream, paired = cache.mtp[q]
            assert (stream, paired) == (self.model.stream(visible[:q]), visible[q]), q
            assert source == "target" or q in self.own_rows, q
        if position == cache.length:
            assert int(streams[0, 0]) == self.model.stream(visible)
        cache.rows[position] = token
        context = tuple(cache.rows[p] for p in range(position + 1))
        best = self.model.target(context)
        if self.wrong(position):
            best = BYTES + ord("Z")
        logits = torch.zeros(VOCAB)
        logits[best] = self.gap
        source = "target" if position == cache.length else "drafter"
        cache.mtp[position] = (source, int(streams[0, 0]), token)
        return logits, self.model.streams_of([context])[0]

    own_rows: frozenset[int] | range = frozenset()
    chain = step_by_step


@dataclass(eq=False)  # what was learned of a model goes with the object
class FakeModel:
    """A target that looks its choice up. `quirk` may change the logits of a row before use."""

    target: Target
    mtp: FakeMtp | None = None
    quirk: Callable[[tuple[int, ...], torch.Tensor], None] = lambda context, row: None
    passes: list[int] = field(default_factory=list)
    contexts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def stream(self, context: tuple[int, ...]) -> int:
        digest = hashlib.sha256(repr(context).encode()).digest()
        key = int.from_bytes(digest[:3], "big")  # exact in float32
        self.contexts[key] = context
        return key

    def streams_of(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        keys = [float(self.stream(context)) for context in contexts]
        return torch.tensor(keys).reshape(-1, 1, 1)

    def forward(self, tokens: Sequence[int], cache: FakeCache) -> torch.Tensor:
        cache.check_room(cache.length, len(tokens))
        self.passes.append(len(tokens))
        before = cache.visible()
        for i, token in enumerate(tokens):
            cache.rows[cache.length + i] = token
        return self.streams_of([(*before, *tokens[: i + 1]) for i in range(len(tokens))])

    def weight_bytes(self, rows: int) -> float:
        return 90.0 + 10.0 * rows

    def decide(self, tokens: Sequence[int], cache: FakeCache) -> tuple[torch.Tensor, torch.Tensor]:
        streams = self.forward(tokens, cache)
        return streams, self.logits(streams)

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(streams), VOCAB)
        for row, key in zip(rows, streams.flatten().tolist(), strict=True):
            context = self.contexts[int(key)]
            row[self.target(context)] = 4.0
            self.quirk(context, row)
        check_logits(rows, "fake head")
        return rows


@dataclass
class Start(Stage):
    """Stands for download and load."""

    model: Any
    context: int
    tokens: list[int]
    off: str = ""

    writes = ("tokenizer", "tokens", "model", "cache", "mtp_off")

    def run(self, state: State) -> None:
        state.tokenizer = byte_tokenizer()
        state.tokens = list(self.tokens)
        state.model = self.model
        state.cache = FakeCache(self.context, 16)  # type: ignore[assignment]
        if self.off:
            state.switch_mtp_off(self.off)


@dataclass
class Scripted(Drafter):
    """Drafts the target's choice where `right(cycle, depth)`, and `lie` elsewhere."""

    right: Callable[[int, int], bool] = lambda cycle, depth: True
    lie: int = BYTES + ord("Z")
    calls: int = 0

    def propose(self, state: State, depth: int) -> None:
        super().propose(state, depth)
        if not depth:
            return
        self.calls += 1
        context = [*state.tokens, state.next_token]
        drafts = []
        for j in range(1, depth + 1):
            best = state.model.target(tuple(context))  # type: ignore[attr-defined]
            drafts.append(best if self.right(state.cycle, j) else self.lie)
            context.append(drafts[-1])
        state.drafts = tuple(Draft(token, 1.0) for token in drafts)
        state.draft_end = "depth"


@dataclass
class Result:
    """A finished run: its state, directory and records."""

    state: State
    run: RunDir
    drafter: Stage

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run.path / "summary.json").read_text())

    @property
    def cycles(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.run.path / "cycles.jsonl").read_text().splitlines()
        ]


KNOBS = {"gate": 0.0, "keep_accepted": False}


def decode(
    folder: Path,
    model: Any,
    *,
    depth: int | str = 0,
    drafter: type[Drafter] = Scripted,
    tokens: Sequence[int] = (BOS_ID, *range(40, 45)),
    max_tokens: int = 24,
    context: int = 1000,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    margin: float = 1.0,
    strict: bool = False,
    probe: bool = False,
    off: str = "",
    log: dict[str, Any] | None = None,
    extra: dict[str, Stage] | None = None,
    cycle: Sequence[str] = (),
    observe: dict[str, Stage] | None = None,
    **options: Any,
) -> Result:
    """Run the real loop on a fake model; `log` sets log's keys.

    `extra` stages follow the prefill and end each cycle, or stand in it where `cycle` says;
    those of `observe` follow the log.
    """
    run = RunDir.create(folder)
    uses = issubclass(drafter, MtpDrafter)
    draft = drafter(
        **{"uses_mtp": uses, "depth": depth, "max_tokens": max_tokens, "ignore_eos": ignore_eos},
        **{**KNOBS, **options},
    )
    off_keys = dict.fromkeys(
        ("stream", "table", "timing", "spec_log", "conf_log", "full_logits"), False
    )
    stages: dict[str, Stage] = {
        "start": Start(model, context, list(tokens), off),
        "prefill": Prefill(chunk=4, ignore_eos=ignore_eos, progress_after=1e9),
        "draft": draft,
        "verify": Verify(margin=margin, strict=strict, probe=probe),
        "commit": Commit(max_tokens=max_tokens, stop=list(stop), ignore_eos=ignore_eos),
        **(extra or {}),
        "log": Log(**{**off_keys, "trace": "normal", **(log or {})}),
        **(observe or {}),
    }
    state = State(run=run, prompt="prompt")
    pipeline = Pipeline(
        stages,
        setup=["start", "prefill", *(extra or {})],
        cycle=cycle or ["draft", "verify", "commit", *(extra or {})],
        observe=["log", *(observe or {})],
    )
    pipeline.run(state)
    run.finish("complete")
    return Result(state, run, draft)


def greedy(model_target: Target, tokens: Sequence[int], count: int) -> list[int]:
    """The plain greedy continuation, computed without any of the loop."""
    context = list(tokens)
    for _ in range(count):
        context.append(model_target(tuple(context)))
    return context[len(tokens) :]


def fake(target: Target, **options: Any) -> FakeModel:
    """A model without an MTP block."""
    return FakeModel(target, **options)


def fake_with_mtp(target: Target, wrong: Callable[[int], bool], gap: float = 5.0) -> FakeModel:
    """A model whose MTP block is wrong at the positions that `wrong` holds for."""
    model = FakeModel(target)
    model.mtp = FakeMtp(model, wrong, gap)
    return model


@dataclass
class FakeLoad(Stage):
    """Start, as a stage with a config group: its model can be slow, and can fail at a position."""

    seed: int
    seconds: float
    fail_at: int

    writes = Start.writes

    def run(self, state: State) -> None:
        model = fake_with_mtp(chaotic(self.seed), wrong=lambda position: position % 3 == 0)
        forward = model.forward

        def slow(tokens: Sequence[int], cache: FakeCache) -> torch.Tensor:
            time.sleep(self.seconds)
            if cache.length <= self.fail_at < cache.length + len(tokens):
                raise ZeroDivisionError("a bug in a kernel")
            return forward(tokens, cache)

        model.forward = slow  # type: ignore[method-assign]
        Start(model, 1000, [BOS_ID, *ids(state.prompt)]).run(state)


@dataclass
class LoopingLoad(Stage):
    """Start, as a stage with a config group: the target loops after a prompt of one letter.

    The drafter is right there, and wrong at every other position after other prompts.
    """

    writes = Start.writes

    def run(self, state: State) -> None:
        tokens = [BOS_ID, *ids(state.prompt)]
        loops = len(state.prompt) == 1
        target = reciting("abc" * 100, len(tokens)) if loops else chaotic(3)
        model = fake_with_mtp(target, wrong=lambda position: not loops and position % 2 == 0)
        Start(model, 1000, tokens).run(state)
