"""draft=oracle: greedy's text at exact rates, after steps of the MTP block, and labelled so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ds4flow.stages.draft import MtpDrafter, OracleDrafter

from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.oracle import Oracle
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline
from tests.fakes import (
    BOS_ID,
    EOS_ID,
    FakeModel,
    Result,
    chaotic,
    decode,
    fake,
    fake_with_mtp,
    greedy,
    reciting,
)

OWN = {"accept": [0.8], "tokens": None, "seed": 0}
PROMPT = (BOS_ID, *range(40, 45))


def oracle(folder: Path, model: FakeModel, **options: Any) -> Result:
    own = {key: options.pop(key, value) for key, value in OWN.items()}

    class Bound(OracleDrafter):
        """With its own keys, one of which `decode` has for the prompt as well."""

        def __init__(self, **shared: Any) -> None:
            super().__init__(**own, **shared)

    return decode(folder, model, drafter=Bound, **options)


def with_block(seed: int) -> FakeModel:
    """A model whose own drafts are never right, so that what is accepted is the oracle's."""
    return fake_with_mtp(chaotic(seed), wrong=lambda position: True)


@pytest.mark.parametrize("accept", [[0.8, 0.5], [1.0], [0.0], [0.3, 1.0, 0.6]])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_text_is_greedys_and_the_rates_are_met(
    tmp_path: Path, depth: int, accept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_block(3)
    result = oracle(tmp_path / "run", model, depth=depth, accept=accept, max_tokens=120)
    assert result.state.output == greedy(chaotic(3), PROMPT, 120)
    reached = [0] * depth
    right = [0] * depth
    for cycle in result.cycles:
        for place in range(cycle["drafted"]):
            if cycle["accepted"] >= place:
                reached[place] += 1
                right[place] += cycle["accepted"] > place
    for place in range(depth):
        rate = accept[min(place, len(accept) - 1)]
        assert abs(right[place] - rate * reached[place]) < 1.0 + 1e-6
    assert "before the run itself" in capsys.readouterr().err


def test_the_mtp_block_runs_for_its_cost(tmp_path: Path) -> None:
    model = with_block(4)
    result = oracle(tmp_path / "run", model, depth=2, max_tokens=30)
    assert model.mtp is not None
    assert model.mtp.steps == sum(cycle["drafted"] for cycle in result.cycles) > 20


def test_records_say_that_it_is_synthetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = {"table": True}
    result = oracle(tmp_path / "run", with_block(5), depth=2, accept=[0.75, 0.5], log=log)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["drafter"] == result.summary["drafter"] == "oracle, synthetic"
    assert facts["oracle"]["synthetic"] is True
    assert facts["oracle"]["accept"] == [0.75, 0.5]
    assert "oracle, synthetic" in capsys.readouterr().err
    own = decode(tmp_path / "own", with_block(5), depth=2, drafter=MtpDrafter, log=log)
    assert own.summary["drafter"] == "mtp"
    assert "synthetic" not in capsys.readouterr().err


def test_a_recorded_run_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    decode(tmp_path / "runs" / "x" / "0001", with_block(6), max_tokens=24)
    passes = {}
    for name, tokens in (("recorded", "x/0001"), ("decoded", None)):
        model = with_block(6)
        result = oracle(tmp_path / name, model, depth=2, accept=[1.0], tokens=tokens)
        assert result.state.output == greedy(chaotic(6), PROMPT, 24)
        assert result.summary["draft_acceptance_rate"] == 1.0
        passes[name] = len(model.passes)
    assert passes["decoded"] == passes["recorded"] + 24


def test_a_shorter_recording_ends_the_drafts(tmp_path: Path) -> None:
    decode(tmp_path / "short", with_block(7), max_tokens=10)
    result = oracle(
        tmp_path / "run", with_block(7), depth=2, accept=[1.0], tokens=str(tmp_path / "short")
    )
    assert result.state.output == greedy(chaotic(7), PROMPT, 24)
    assert result.summary["skipped"]["recording"] > 5


def test_a_recording_of_another_text_drafts_nothing_once_it_strays(tmp_path: Path) -> None:
    decode(tmp_path / "other", with_block(8), max_tokens=24)
    result = oracle(tmp_path / "run", with_block(9), depth=2, tokens=str(tmp_path / "other"))
    assert result.state.output == greedy(chaotic(9), PROMPT, 24)
    assert result.summary["skipped"]["recording"] > 10


def test_a_run_of_another_prompt_is_refused(tmp_path: Path) -> None:
    decode(tmp_path / "other", with_block(8), tokens=(BOS_ID, 50, 51))
    with pytest.raises(Ds4FlowError, match="a run of another prompt"):
        oracle(tmp_path / "run", with_block(8), depth=2, tokens=str(tmp_path / "other"))
    with pytest.raises(UsageError, match="is this run itself"):
        oracle(tmp_path / "self", with_block(8), depth=2, tokens=str(tmp_path / "self"))


def test_the_text_ends_where_greedys_does(tmp_path: Path) -> None:
    target = reciting("abcdef", len(PROMPT))
    model = fake_with_mtp(target, wrong=lambda position: True)
    result = oracle(tmp_path / "run", model, depth=4, accept=[1.0])
    assert (result.state.text, result.state.done) == ("abcdef", "eos")
    assert EOS_ID not in [draft for cycle in result.cycles for draft in cycle["drafts"]]


def test_without_a_block_nothing_is_drafted_or_recorded(tmp_path: Path) -> None:
    model = fake(chaotic(10))
    result = oracle(tmp_path / "run", model, depth=2, max_tokens=8)
    assert "no MTP weights" in result.summary["mtp_off"]
    assert len(model.passes) == 2 + 8  # the prompt's chunks and the cycles


def test_rates_are_checked_before_a_model_is_loaded() -> None:
    for rates in ("[]", "[1.5]", "[-0.1,0.5]"):
        with pytest.raises(UsageError, match="not probabilities"):
            build_pipeline(compose(["draft=oracle", f"draft.accept={rates}"]))
    with pytest.raises(UsageError, match=r"draft\.accept=x is not a list of numbers"):
        compose(["draft=oracle", "draft.accept=x"])
    with pytest.raises(UsageError, match=r"draft\.accept is not a key of .*MtpDrafter"):
        build_pipeline(compose(["draft.accept=[0.5]"]))


def test_another_seed_is_another_pattern_of_the_same_rate() -> None:
    def pattern(seed: int) -> list[bool]:
        source = Oracle(list(range(1, 200)), 0, (0.6,), vocab=300, seed=seed)
        found = []
        for position in range(100):
            source.chain()
            found.append(source.propose(position) == position + 1)
        return found

    patterns = [pattern(seed) for seed in range(5)]
    assert len(set(map(tuple, patterns))) > 1
    assert all(59 <= sum(one) <= 61 for one in patterns)
    assert pattern(3) == patterns[3]


def test_a_lie_is_never_the_token_nor_the_end_of_text() -> None:
    source = Oracle([5] * 400, 0, (0.0,), vocab=7, avoid=6)
    for position in range(400):
        source.chain()
        assert source.propose(position) not in (5, 6)


@pytest.mark.parametrize("depth", [1, 4])
def test_the_same_bits_as_greedy_on_a_model(tmp_path: Path, golden_dir: Path, depth: int) -> None:
    from tests.test_parity import golden, run

    words = [*golden("tiny-f32", golden_dir), "model.profile=official", "draft.accept=[0.7]"]
    case = run(tmp_path, words, depth=depth, prompt="Q" * 123, drafter="oracle", tokens=16)
    assert case.problem == ""
    assert case.rollbacks > 0
    assert case.accepted is not None
    assert case.accepted > 0.3
    facts = RunDir(tmp_path / "0001", {}).path / "run.json"
    assert json.loads(facts.read_text())["drafter"] == "oracle, synthetic"
