"""Sampling through the stages: seeds, the switch-off of MTP, and the target's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ds4flow.stages import draft as draft_stage
from ds4flow.stages.commit import Commit
from ds4flow.stages.draft import MtpDrafter
from ds4flow.stages.load import LoadGguf
from ds4flow.stages.parity import Parity
from ds4flow.stages.verify import Verify

from ds4flow import sampling as s
from ds4flow.config import compose
from ds4flow.errors import UsageError
from ds4flow.model.mtp import step_by_step
from ds4flow.overrides import quoted
from ds4flow.pipeline import Stage, State
from ds4flow.rundir import RunDir
from ds4flow.sampling import Sampling, distribution
from ds4flow.speculate import Draft
from ds4flow.wiring import build_pipeline
from tests.fakes import BOS_ID, BYTES, EOS_ID, FakeModel, chaotic, decode, fake, fake_with_mtp

# --- a whole run on the fakes


@dataclass
class Sample(Stage):
    """Sets what the load stage would."""

    sampling: Sampling
    writes = ("sampling", "identity")

    def run(self, state: State) -> None:
        state.sampling, state.identity = self.sampling, "sampled"


def flat(context: tuple[int, ...], row: torch.Tensor) -> None:
    """Make eight letters likely, one more than the others, so that sampling varies."""
    row[BYTES + ord("a") : BYTES + ord("a") + 8] += 2.5


def sampled(folder: Path, seed: int, *, depth: int = 0, mtp: bool = False) -> list[int]:
    model: FakeModel = fake(chaotic(1), quirk=flat)
    options: dict[str, Any] = {}
    if mtp:
        model = fake_with_mtp(chaotic(1), wrong=lambda position: position % 3 == 0)
        model.quirk = flat
        options = {"drafter": MtpDrafter}
    stage = Sample(Sampling(temperature=1.0, seed=seed))
    result = decode(folder, model, depth=depth, extra={"sample": stage}, cycle=CYCLE, **options)
    assert result.run.facts["status"] == "complete"
    return result.state.output


CYCLE = ("draft", "verify", "commit")


@pytest.mark.parametrize(("depth", "mtp"), [(0, False), (3, False), (3, True)])
def test_the_same_seed_gives_the_same_text(tmp_path: Path, depth: int, mtp: bool) -> None:
    def text(name: str, seed: int) -> list[int]:
        return sampled(tmp_path / name, seed, depth=depth, mtp=mtp)

    first = text("a", 5)
    assert text("b", 5) == first
    assert text("c", 6) != first
    assert len(first) == 24


# --- the load stage's switch


@cache
def load_stage() -> LoadGguf:
    stage = build_pipeline(compose(["mtp.draft=2", "runtime.kernels=reference"])).stages["load"]
    assert isinstance(stage, LoadGguf)
    return stage


def load_of(**values: Any) -> LoadGguf:
    stage = load_stage()
    sampling = {key: values.pop(key, value) for key, value in stage.sampling.items()}
    return replace(stage, **values, sampling=sampling)


def run_sampling(folder: Path, golden: Path, *words: str) -> tuple[State, Any]:
    config = compose(
        [
            *("model=file", "model.chat=raw", "model.profile=plain", "log=quiet", "mtp.draft=2"),
            f"model.path={quoted(str(golden / 'tiny-f32.gguf'))}",
            f"model.mtp_path={quoted(str(golden / 'tiny-f32.mtp-support.gguf'))}",
            *("runtime.kernels=reference", "prompt=QQQQ", "commit.max_tokens=8"),
            *("commit.ignore_eos=true", *words),
        ]
    )
    pipeline = build_pipeline(config)
    state = State(run=RunDir.create(folder), prompt=str(config.prompt))
    pipeline.run(state)
    return state, pipeline


def test_sampling_switches_mtp_off_with_one_notice(
    tmp_path: Path, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, pipeline = run_sampling(tmp_path / "run", golden_dir, "sampling.temperature=1")
    assert capsys.readouterr().err.count("MTP is off: sampling") == 1
    assert "sampling.lossless=true" in state.run.facts["mtp_off"]
    assert state.run.facts["identity"] == "sampled"
    assert pipeline.stages["log"].counts.summary()["num_draft_tokens"] == 0
    assert state.model.mtp is None
    assert len(state.output) == 8


def test_lossless_sampling_drafts_and_is_not_announced(
    tmp_path: Path, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("sampling.temperature=1", "sampling.lossless=true", "sampling.seed=3")
    state, pipeline = run_sampling(tmp_path / "run", golden_dir, *words)
    assert "MTP is off" not in capsys.readouterr().err
    assert "mtp_off" not in state.run.facts
    assert state.run.facts["identity"] == "sampled"
    assert pipeline.stages["log"].counts.summary()["num_draft_tokens"] > 0
    again, _ = run_sampling(tmp_path / "again", golden_dir, *words)
    assert again.output == state.output


@pytest.mark.parametrize(
    ("values", "off"),
    [
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "lossless": True}, False),
        ({"temperature": 1.0, "draft": 0}, False),
        ({"temperature": 1.0, "uses_mtp": False}, False),
        ({"temperature": 1.0, "draft": "auto"}, True),
        ({"temperature": 0.0}, False),
    ],
)
def test_when_the_switch_is_thrown(tmp_path: Path, values: dict[str, Any], off: bool) -> None:
    state = State(run=RunDir.create(tmp_path / "run"), prompt="x")
    load_of(**values)._choose_sampling(state)
    assert bool(state.mtp_off) == off
    assert (state.sampling is None) == (values["temperature"] == 0.0)
    assert state.identity == ("exact" if state.sampling is None else "sampled")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"draft": 1}, {"draft": 4}, True),
        ({"draft": 1}, {"draft": "auto"}, True),
        ({"draft": 1}, {"draft": 0}, False),
        ({"seed": 1}, {"seed": 2, "system": "x", "chunk": 4, "context": 9, "chat": "think"}, True),
        ({"temperature": 1.0}, {"temperature": 0.0}, False),  # the first one loads no block
        ({"temperature": 1.0, "lossless": True}, {"temperature": 0.0}, True),
        ({"threads": 1}, {"threads": 2}, False),
        ({"profile": "plain"}, {"profile": "official"}, False),
        ({"no_gpu": True}, {"no_gpu": False}, False),
    ],
)
def test_what_one_load_can_serve(one: dict[str, Any], other: dict[str, Any], equal: bool) -> None:
    assert (load_of(**one).share_key() == load_of(**other).share_key()) == equal
    hash(load_of(**one).share_key())


def test_parity_refuses_sampling(tmp_path: Path, golden_dir: Path) -> None:
    with pytest.raises(UsageError, match="this run samples") as caught:
        run_sampling(tmp_path / "run", golden_dir, "sampling.temperature=1", "pipeline=parity")
    assert caught.value.exit_code == 2
    assert caught.value.fix == "set sampling.temperature=0"
    state = State(run=RunDir.create(tmp_path / "bare"), prompt="x", sampling=Sampling(1.0))
    with pytest.raises(UsageError, match="this run samples"):
        Parity(state=True).run(state)


# --- the distribution of draft, verify and commit together

VOCAB = 6  # BOS, EOS, and four more
DRAWS = 4000


class Table:
    """A target and an MTP block on six tokens that depend on the last token only."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.target = 1.2 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.block = self.target + 0.9 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.target[:, BOS_ID] = self.block[:, BOS_ID] = -30.0
        # Likely enough for a mistake with it to show.
        self.target[:, EOS_ID], self.block[:, EOS_ID] = 1.0, 1.4
        self.mtp, self.reach = self, 64

    def forward(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        return torch.tensor([float(token) for token in tokens]).reshape(-1, 1, 1)

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        return self.target[streams.flatten().long()]

    def warm(self, *arguments: Any) -> None:
        pass

    def step(
        self, streams: torch.Tensor, token: int, position: int, cache: Any, stale: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block[token], streams

    chain = step_by_step

    def decide(self, tokens: Sequence[int], cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        streams = self.forward(tokens, cache)
        return streams, self.logits(streams)


class Cursor:
    """A cache without rows."""

    context = 1000

    def __init__(self) -> None:
        self.length = 1

    def commit(self, rows: int) -> None:
        self.length += rows


class DropsEos(MtpDrafter):
    """The mistake to be found: a drawn end of text is not proposed, as greedy drafting may do."""

    def propose(self, state: State, depth: int) -> None:
        super().propose(state, depth)
        if state.drafts and state.drafts[-1].token == EOS_ID:
            state.drafts, state.draft_from = state.drafts[:-1], state.draft_from[:-1]


class TakesTheBest(MtpDrafter):
    """Another one: the drafter's argmax is proposed as if it had been drawn."""

    def propose(self, state: State, depth: int) -> None:
        sampling, state.sampling = state.sampling, None
        super().propose(state, depth)
        state.sampling = sampling
        assert sampling is not None
        state.draft_from = tuple(distribution(row, sampling) for row in state.draft_logits)


def first_two(folder: Path, drafter: type[MtpDrafter], depth: int) -> np.ndarray:
    """How often each pair of tokens follows token 2; a text that ended repeats the end."""
    table, start = Table(), 2
    run = RunDir.create(folder)
    tokenizer = SimpleNamespace(eos=EOS_ID)
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(DRAWS):
        state = State(run=run, prompt="x", identity="sampled")
        state.model, state.tokenizer, state.cache = table, tokenizer, Cursor()  # type: ignore[assignment]
        state.sampling = Sampling(temperature=1.0, seed=seed)
        state.tokens, state.prompt_length, state.next_token = [0], 1, start
        state.hidden = torch.zeros(1, 1)
        draft = drafter(True, depth, 0.0, False, 3, False)
        verify, commit = Verify(1.0, False, False), Commit(3, [], False)
        commit.stream = SimpleNamespace(push=lambda tokens: "", finish=lambda: "")  # type: ignore[assignment]
        while state.done is None:
            for stage in (draft, verify, commit):
                stage.run(state)
        found = [*state.output[1:], EOS_ID, EOS_ID]
        counts[found[0], found[1]] += 1
    return counts


def chi_square(counts: np.ndarray) -> float:
    table, plain = Table(), Sampling(temperature=1.0)
    first = distribution(table.target[2], plain)
    expected = np.zeros((VOCAB, VOCAB))
    for token in range(VOCAB):
        if token == EOS_ID:
            expected[token, EOS_ID] = first[token]
        else:
            expected[token] = first[token] * distribution(table.target[token], plain)
    seen = expected * DRAWS >= 1.0
    assert counts[~seen].sum() <= 2
    return float((((counts - expected * DRAWS) ** 2)[seen] / (expected * DRAWS)[seen]).sum())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the distribution of each of the few rows once."""
    known: dict[bytes, np.ndarray] = {}

    def cached(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
        key = logits.numpy().tobytes()
        if key not in known:
            known[key] = distribution(logits, sampling)
        return known[key]

    monkeypatch.setattr(s, "distribution", cached)
    monkeypatch.setattr(s, "top_gap", lambda row: 0.0)
    monkeypatch.setattr(draft_stage, "top_two", lambda row: (int(row.argmax()), 0.0))


# At most 21 cells, 20 degrees of freedom: 45.3 is the 0.1% point.
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.usefixtures("quick")
def test_lossless_sampling_has_the_targets_distribution(tmp_path: Path, depth: int) -> None:
    assert chi_square(first_two(tmp_path / "run", MtpDrafter, depth)) < 45.3


@pytest.mark.parametrize("mistake", [DropsEos, TakesTheBest])
@pytest.mark.usefixtures("quick")
def test_the_distribution_test_finds_mistakes(tmp_path: Path, mistake: type[MtpDrafter]) -> None:
    assert chi_square(first_two(tmp_path / "run", mistake, 2)) > 100.0


def test_an_end_of_text_is_proposed_when_drawn_and_not_when_greedy(tmp_path: Path) -> None:
    table = Table()
    table.block[2, EOS_ID] = 50.0
    state = State(run=RunDir.create(tmp_path / "run"), prompt="x", next_token=2)
    state.model, state.cache, state.hidden = table, Cursor(), torch.zeros(1, 1)  # type: ignore[assignment]
    state.tokenizer, state.tokens = SimpleNamespace(eos=EOS_ID), [0]  # type: ignore[assignment]
    draft = MtpDrafter(True, 3, 0.0, False, 9, False)
    draft.run(state)
    assert (state.drafts, state.draft_end) == ((), "eos")
    state.sampling = Sampling(temperature=1.0)
    draft.run(state)
    assert [one.token for one in state.drafts] == [EOS_ID]
    assert isinstance(state.drafts[0], Draft)
    assert state.draft_from[0][EOS_ID] > 0.99
    assert state.draft_end == "eos"
