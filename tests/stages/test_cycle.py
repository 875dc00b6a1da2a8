"""The decoding loop on fakes: any drafter gives the greedy text, and every count is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ds4flow.stages.draft import LyingDrafter, MtpDrafter, NoDrafter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow.errors import NumericsError
from ds4flow.pipeline import State
from tests.fakes import (
    BOS_ID,
    BYTES,
    EOS_ID,
    FakeModel,
    Scripted,
    byte_tokenizer,
    chaotic,
    decode,
    fake,
    fake_with_mtp,
    greedy,
    ids,
    reciting,
)

PROMPT = (BOS_ID, *range(40, 45))


def right_first(cycle: int, depth: int) -> bool:
    return depth == 1


def never(cycle: int, depth: int) -> bool:
    return False


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_partial_accept_never_injects_a_token(tmp_path: Path, depth: int) -> None:
    """Right on the first draft and wrong on the second, every cycle; ids 0 must not appear."""
    target = chaotic(1)
    result = decode(tmp_path / "run", fake(target), depth=depth, right=right_first)
    assert result.state.output == greedy(target, PROMPT, 24)
    assert BOS_ID not in result.state.output


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("drafter", [Scripted, LyingDrafter])
def test_a_drafter_that_always_lies_costs_speed_never_text(
    tmp_path: Path, depth: int, drafter: type
) -> None:
    target = chaotic(2)
    options = {"right": never} if drafter is Scripted else {}
    result = decode(tmp_path / "run", fake(target), depth=depth, drafter=drafter, **options)
    assert result.state.output == greedy(target, PROMPT, 24)
    assert result.summary["num_accepted_draft_tokens"] == 0
    assert result.summary["num_draft_tokens"] > 0
    assert result.summary["cycles"] == 24


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(0, 9),
    share=st.floats(0, 1),
    max_tokens=st.integers(1, 40),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=2),
    room=st.integers(1, 50),
)
def test_any_script_gives_the_greedy_run(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    depth: int,
    share: float,
    max_tokens: int,
    stop: list[str],
    room: int,
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    common = {"max_tokens": max_tokens, "stop": stop, "context": len(PROMPT) + room}

    def right(cycle: int, j: int) -> bool:
        return np.random.default_rng([seed, cycle, j]).random() < share

    target = chaotic(seed)
    plain = decode(folder / "plain", fake(target), **common)
    fast = decode(folder / "fast", fake(target), depth=depth, right=right, **common)
    assert fast.state.output == plain.state.output
    assert fast.state.text == plain.state.text
    assert fast.state.done == plain.state.done
    assert fast.state.cache.length == len(PROMPT) + len(plain.state.output)
    assert fast.state.cache.state_hash() == plain.state.cache.state_hash()
    check_counts(fast.summary, fast.state)


def check_counts(summary: dict, state: State) -> None:
    """What must hold between the counts of any run."""
    histogram = summary["acceptance_histogram"]
    assert sum((k + 1) * count for k, count in enumerate(histogram)) == len(state.output)
    assert sum(histogram) == summary["cycles"]
    assert summary["num_accepted_draft_tokens"] <= summary["num_draft_tokens"]
    assert summary["draft_n"] == summary["num_draft_tokens"]
    assert summary["output_tokens"] == len(state.output)
    assert summary["cycles_with_draft"] + sum(summary["skipped"].values()) == summary["cycles"]


@pytest.mark.parametrize("end_at", range(1, 8))
def test_nothing_is_kept_after_the_end_of_text(tmp_path: Path, end_at: int) -> None:
    """EOS inside a block of accepted drafts: tokens, cache and counts stop before it."""
    text = "abcdefg"[:end_at]
    model = fake(reciting(text, len(PROMPT)))
    result = decode(tmp_path / "run", model, depth=4)
    assert result.state.output == ids(text)
    assert result.state.text == text
    assert result.state.done == "eos"
    assert result.state.next_token == EOS_ID
    assert result.state.cache.length == len(PROMPT) + len(text)
    check_counts(result.summary, result.state)


def test_an_end_of_text_right_after_the_prompt_gives_an_empty_run(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(lambda context: EOS_ID), depth=2)
    assert result.state.output == []
    assert result.state.done == "eos"
    assert result.summary["cycles"] == 0
    assert result.summary["draft_acceptance_rate"] is None


def test_ignore_eos_goes_on(tmp_path: Path) -> None:
    model = fake(reciting("ab", len(PROMPT)))
    result = decode(tmp_path / "run", model, depth=3, max_tokens=7, ignore_eos=True)
    assert result.state.output == [*ids("ab"), EOS_ID, *ids("ab"), EOS_ID, *ids("a")]
    assert result.state.text == "ababa"


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_exact_and_clamps_the_drafts(tmp_path: Path, max_tokens: int) -> None:
    target = chaotic(3)
    result = decode(tmp_path / "run", fake(target), depth=4, max_tokens=max_tokens)
    assert len(result.state.output) == max_tokens
    assert result.state.done == "limit"
    left = max_tokens
    for cycle in result.cycles:
        assert cycle["drafted"] <= left - 1
        left -= len(cycle["tokens"])


@pytest.mark.parametrize("room", range(1, 9))
def test_the_context_is_filled_to_the_last_token(tmp_path: Path, room: int) -> None:
    context = len(PROMPT) + room
    result = decode(tmp_path / "run", fake(chaotic(4)), depth=4, context=context)
    assert result.state.cache.length == context
    assert result.state.done == "context"


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("stop", ["cd", "fgh", "h"])
def test_tokens_end_with_the_one_that_completes_a_stop_string(
    tmp_path: Path, depth: int, stop: str
) -> None:
    model = fake(reciting("abcdefgh", len(PROMPT)))
    result = decode(tmp_path / "run", model, depth=depth, stop=[stop, "xyz"])
    text = "abcdefgh"[: "abcdefgh".index(stop)]
    assert result.state.text == text
    assert byte_tokenizer().decode(result.state.output) == text + stop
    assert result.state.done == "stop"
    assert result.state.cache.length == len(PROMPT) + len(result.state.output)
    check_counts(result.summary, result.state)


def test_text_held_back_for_a_stop_string_appears_at_the_end(tmp_path: Path) -> None:
    model = fake(reciting("abc", len(PROMPT)))
    result = decode(tmp_path / "run", model, depth=1, stop=["cd"])
    assert result.state.text == "abc"


def test_the_context_limit_does_not_depend_on_speculation(tmp_path: Path) -> None:
    plain = decode(tmp_path / "plain", fake(chaotic(5)), context=300)
    fast = decode(tmp_path / "fast", fake(chaotic(5)), depth=8, context=300)
    assert plain.summary["context_limit"] == fast.summary["context_limit"] == 300


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("shift", range(4))
def test_an_emoji_over_four_tokens_is_never_broken(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], depth: int, shift: int
) -> None:
    text = "x" * shift + "a🦜é" * 3
    model = fake(reciting(text, len(PROMPT)))
    result = decode(tmp_path / "run", model, depth=depth, max_tokens=99, log={"stream": True})
    assert capfdbinary.readouterr().out.decode() == text
    assert (result.run.path / "output.txt").read_text(encoding="utf-8") == text
    assert all("\ufffd" not in piece for piece in result.state.pieces)


@pytest.mark.parametrize("row", range(4))
def test_a_row_that_is_not_finite_stops_the_run_with_its_place(tmp_path: Path, row: int) -> None:
    position = len(PROMPT) + 8 + row

    def quirk(context: tuple[int, ...], logits: torch.Tensor) -> None:
        if len(context) == position + 1:
            logits[:] = float("nan")

    model = fake(chaotic(6), quirk=quirk)
    with pytest.raises(NumericsError, match=f"cycle 3, row {row}, position {position}"):
        decode(tmp_path / "run", model, depth=3)


@pytest.mark.parametrize("tie", [(0, 1), (5, 256), (256, 257)])
def test_ties_go_to_the_lowest_id_in_every_path(tmp_path: Path, tie: tuple[int, int]) -> None:
    def quirk(context: tuple[int, ...], logits: torch.Tensor) -> None:
        logits[:] = 0.0
        logits[list(tie)] = 4.0

    outputs = [
        decode(
            tmp_path / str(depth),
            FakeModel(lambda context: tie[0], quirk=quirk),
            depth=depth,
            max_tokens=6,
            ignore_eos=True,
        ).state.output
        for depth in (0, 3)
    ]
    assert outputs == [[tie[0]] * 6] * 2


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_rates_of_an_oracle_and_of_a_liar(tmp_path: Path, depth: int) -> None:
    """Report 33: an acceptance rate cannot exceed 1, as the certain token is no draft."""
    count = 12 * (depth + 1)
    oracle = decode(tmp_path / "o", fake(chaotic(7)), depth=depth, max_tokens=count).summary
    assert oracle["draft_acceptance_rate"] == 1.0
    assert oracle["mean_acceptance_length"] == depth + 1
    assert oracle["acceptance_histogram"] == [0] * depth + [12]
    assert oracle["accepted_per_position"] == [1.0] * depth
    liar = decode(tmp_path / "l", fake(chaotic(7)), depth=depth, right=never).summary
    assert liar["draft_acceptance_rate"] == 0.0
    assert liar["mean_acceptance_length"] == 1.0
    assert liar["definitions"]


def test_a_gate_changes_counts_and_never_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report 35: a gate that skips nine of ten cycles is visible in the summary and announced."""
    target = chaotic(8)
    model = fake_with_mtp(target, wrong=lambda position: False)
    assert model.mtp is not None
    original = model.mtp.step
    model.mtp.step = lambda s, t, p, c, stale: (  # type: ignore[method-assign]
        original(s, t, p, c, stale)[0] * (1.0 if p % 10 == 0 else 0.1),
        original(s, t, p, c)[1],
    )
    result = decode(
        tmp_path / "run",
        model,
        depth=1,
        drafter=MtpDrafter,
        gate=2.0,
        max_tokens=60,
        log={"table": True},
    )
    assert result.state.output == greedy(target, PROMPT, 60)
    summary = result.summary
    assert any("cycles had a draft" in warning for warning in summary["warnings"])
    assert summary["skipped"]["gate"] > 0.8 * summary["cycles"]
    assert summary["cycles"] == summary["cycles_with_draft"] + sum(summary["skipped"].values())
    assert summary["cycles_with_draft"] < 0.2 * summary["cycles"]
    assert summary["draft_acceptance_rate"] == 1.0
    assert summary["accepted_per_cycle"] == summary["draft_n_accepted"] / summary["cycles"] < 0.2
    assert "cycles had a draft" in capsys.readouterr().err


@pytest.mark.parametrize("gate", [0.0, 1.0, 4.9, 5.1, 1000.0])
def test_the_text_is_the_same_for_any_gate(tmp_path: Path, gate: float) -> None:
    target = chaotic(9)
    model = fake_with_mtp(target, wrong=lambda position: position % 3 == 0)
    result = decode(tmp_path / "run", model, depth=3, drafter=MtpDrafter, gate=gate)
    assert result.state.output == greedy(target, PROMPT, 24)
    assert result.summary["relaxed_accepts"] == 0
    assert bool(result.summary["num_draft_tokens"]) == (gate <= 5.0)


def test_speculation_switched_off_never_calls_the_drafter(tmp_path: Path) -> None:
    target = chaotic(10)
    for number, options in enumerate(({"depth": 0}, {"depth": 3, "off": "a reason"})):
        model = fake_with_mtp(target, wrong=never)
        result = decode(tmp_path / str(number), model, drafter=MtpDrafter, **options)
        assert model.mtp is not None
        assert model.mtp.steps == 0
        assert result.state.output == greedy(target, PROMPT, 24)
        assert model.passes[2:] == [1] * 24
    assert result.run.facts["mtp_off"] == "a reason"
    none = decode(tmp_path / "none", fake(target), depth=3, drafter=NoDrafter)
    assert none.summary["num_draft_tokens"] == 0


def test_a_model_without_mtp_weights_decodes_greedily_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = decode(tmp_path / "run", fake(chaotic(11)), depth=3, drafter=MtpDrafter)
    assert result.state.output == greedy(chaotic(11), PROMPT, 24)
    assert capsys.readouterr().err.count("MTP is off") == 1
    assert "no MTP weights" in result.run.facts["mtp_off"]


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("period", [2, 3, 5, 99])
def test_mtp_rows_of_accepted_drafts_come_from_the_target(
    tmp_path: Path, depth: int, period: int
) -> None:
    """The fake block checks at each step that every row before the cursor is final."""
    target = chaotic(12)
    model = fake_with_mtp(target, wrong=lambda position: position % period == 0)
    result = decode(tmp_path / "run", model, depth=depth, drafter=MtpDrafter, max_tokens=40)
    assert result.state.output == greedy(target, PROMPT, 40)
    assert result.summary["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_keep_accepted_leaves_the_drafters_own_rows(tmp_path: Path, depth: int) -> None:
    target = chaotic(13)
    model = fake_with_mtp(target, wrong=lambda position: position % 5 == 0)
    assert model.mtp is not None
    model.mtp.own_rows = range(1000)
    kept = decode(tmp_path / "kept", model, depth=depth, drafter=MtpDrafter, keep_accepted=True)
    assert kept.state.output == greedy(target, PROMPT, 24)
    sources = [model and kept.state.cache.mtp[q][0] for q in range(6, 25)]  # type: ignore[attr-defined]
    assert ("drafter" in sources) == (depth > 1)


def test_relaxed_acceptance_is_counted_and_named(tmp_path: Path) -> None:
    """The second most likely token has ratio exp(-1): accepted at margin 0.3, not at 0.4."""
    runner_up = BYTES + ord("R")

    def quirk(context: tuple[int, ...], logits: torch.Tensor) -> None:
        logits[runner_up] = 3.0

    def run(name: str, **options: float | bool):
        model = fake(chaotic(14), quirk=quirk)
        return decode(tmp_path / name, model, depth=1, right=never, lie=runner_up, **options)

    relaxed = run("relaxed", margin=0.3)
    assert relaxed.summary["identity"] == relaxed.run.facts["identity"] == "relaxed"
    assert relaxed.summary["relaxed_accepts"] == relaxed.summary["num_accepted_draft_tokens"] == 12
    assert relaxed.cycles[0]["ratios"] == pytest.approx([0.36787944])
    tight = run("tight", margin=0.4)
    assert tight.summary["identity"] == "relaxed"
    assert tight.summary["relaxed_accepts"] == 0
    assert tight.state.output == greedy(chaotic(14), PROMPT, 24)
    strict = run("strict", margin=0.3, strict=True)
    assert strict.summary["identity"] == "exact"
    assert strict.state.output == greedy(chaotic(14), PROMPT, 24)


def test_a_probe_counts_hits_and_changes_nothing(tmp_path: Path) -> None:
    target = chaotic(15)
    model = fake_with_mtp(target, wrong=lambda position: position % 2 == 0)
    result = decode(tmp_path / "run", model, depth=2, drafter=MtpDrafter, probe=True)
    assert result.state.output == greedy(target, PROMPT, 24)
    assert set(model.passes[2:]) == {1}
    assert result.summary["num_draft_tokens"] == 0
    probe = result.summary["probe"]
    # Right at odd positions only, so never twice in a row.
    assert probe["hits_per_position"] == [pytest.approx(0.5, abs=0.05), 0.0]


def test_full_logits_and_line_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fake_with_mtp(chaotic(16), wrong=lambda position: position % 4 == 0)
    log = {"full_logits": True, "spec_log": True, "conf_log": True, "timing": True, "table": True}
    result = decode(tmp_path / "run", model, depth=2, drafter=MtpDrafter, max_tokens=9, log=log)
    files = sorted((result.run.path / "logits").iterdir())
    assert len(files) == len(result.cycles)
    for file, cycle in zip(files, result.cycles, strict=True):
        arrays = np.load(file)
        assert arrays["verify"].shape == (cycle["drafted"] + 1, 258)
        assert arrays["draft"].shape == (cycle["drafted"], 258)
        assert arrays["draft"].argmax(-1).tolist() == cycle["drafts"]
    err = capsys.readouterr().err
    assert err.count("cycle ") >= len(result.cycles)
    assert err.count("draft 1") + err.count("draft 7") > 0
    assert "microseconds per cycle: draft" in err
    assert "mean acceptance length" in err


def test_a_dead_drafter_is_called_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = decode(tmp_path / "run", fake(chaotic(17)), depth=4, right=never)
    assert result.summary["draft_dead"] is True
    assert "does not fit the target" in capsys.readouterr().err


def test_records_of_a_run(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(chaotic(18)), depth=2)
    tokens = json.loads((tmp_path / "run" / "tokens.json").read_text())
    assert tokens == {"prompt": list(PROMPT), "output": result.state.output}
    assert [t for cycle in result.cycles for t in cycle["tokens"]] == result.state.output
    assert {"draft", "verify", "commit"} <= set(result.cycles[0]["micros"])


def test_the_text_of_every_token_is_kept_drafts_and_torn_characters_included(
    tmp_path: Path,
) -> None:
    text = "ab\u00e9"  # the last character is two tokens
    result = decode(tmp_path / "run", fake(reciting(text, len(PROMPT))), depth=2, right=never)
    pieces = json.loads((tmp_path / "run" / "pieces.json").read_text())
    drafted = {draft for cycle in result.cycles for draft in cycle["drafts"]}
    assert drafted - set(result.state.output)
    assert {int(id) for id in pieces} == {*PROMPT, *result.state.output, *drafted}
    raw = "".join(pieces[str(id)] for id in result.state.output)
    assert raw.encode(errors="surrogateescape") == text.encode()
