"""Tokens of a run: every committed one once, and the right kind for each, by the loop itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds4flow.stages.draft import LyingDrafter

from ds4flow.report.tokens import COMMITTED, KINDS, Token, pieces_of, tokens_of
from ds4flow.runs.record import Run
from tests.fakes import BYTES, FakeModel, Result, chaotic, decode, fake, ids, reciting

PROMPT = (0, *range(40, 45))


def tokens(result: Result, **options: Any) -> list[Token]:
    run = Run.open(result.run.path)
    return tokens_of(run.cycles(), pieces_of(run), **options)


def kinds(found: list[Token]) -> list[str]:
    return [token.kind for token in found]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("margin", [1.0, 0.01])
def test_the_committed_tokens_are_the_output(tmp_path: Path, depth: int, margin: float) -> None:
    result = decode(tmp_path / "run", fake(chaotic(3)), depth=depth, margin=margin)
    found = tokens(result)
    kept = [token for token in found if token.committed]
    assert [token.id for token in kept] == result.state.output
    first = result.state.prompt_length
    assert [token.position for token in kept] == list(range(first, first + len(kept)))
    assert "".join(token.text for token in kept) == result.state.text


def test_counts_agree_with_the_summary(tmp_path: Path) -> None:
    result = decode(
        tmp_path / "run", fake(chaotic(4)), depth=4, right=lambda cycle, depth: depth <= cycle % 4
    )
    found, summary = tokens(result), result.summary
    accepted = [token for token in found if token.kind == "accepted"]
    assert len(accepted) == summary["num_accepted_draft_tokens"]
    assert sum(token.depth > 0 for token in found) == summary["num_draft_tokens"]
    refused = [cycle for cycle in result.cycles if cycle["reason"] == "mismatch"]
    assert kinds(found).count("rejected") == len(refused) > 0
    # What replaces a rejected draft is at its position, and is the target's choice.
    for index, token in enumerate(found):
        if token.kind == "rejected":
            after = next((one for one in found[index:] if one.committed), None)
            if after is not None:
                assert (after.kind, after.position) == ("corrected", token.position)
                assert token.choice == after.id


def test_kinds_in_a_cycle(tmp_path: Path) -> None:
    """Right, wrong, and a draft behind it; then all right; then the token that came free."""
    right = {1: 1, 2: 3}
    result = decode(
        tmp_path / "run",
        fake(chaotic(5)),
        depth=3,
        max_tokens=12,
        right=lambda cycle, depth: depth <= right.get(cycle, 0),
    )
    found = tokens(result)
    by_cycle = [kinds([t for t in found if t.cycle == number]) for number in (1, 2, 3, 4)]
    assert by_cycle == [
        ["certain", "accepted", "rejected", "unused"],
        ["corrected", "accepted", "accepted", "accepted"],
        ["bonus", "rejected", "unused", "unused"],
        ["corrected", "rejected", "unused", "unused"],
    ]


def test_drafts_beyond_the_end_are_not_called_rejected(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(reciting("abcdefgh", len(PROMPT))), depth=4, stop=["b"])
    found = tokens(result)
    assert kinds(found) == ["certain", "accepted", "beyond", "beyond", "beyond"]


def test_a_margin_lets_tokens_pass_that_are_called_relaxed(tmp_path: Path) -> None:
    def second(context: tuple[int, ...], row: torch.Tensor) -> None:
        row[BYTES + ord("Z")] = 3.9  # the scripted lie is nearly as likely as the choice

    model = FakeModel(chaotic(6), quirk=second)
    result = decode(
        tmp_path / "run", model, depth=2, margin=0.5, right=lambda cycle, depth: depth == 1
    )
    found = tokens(result)
    relaxed = [token for token in found if token.kind == "relaxed"]
    assert len(relaxed) == result.summary["relaxed_accepts"] > 0
    assert all(token.ratio is not None and 0.5 <= token.ratio < 1 for token in relaxed)
    assert {token.depth for token in relaxed} == {2}


def test_a_probe_leaves_the_text_alone(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(chaotic(7)), depth=2, probe=True)
    found = tokens(result)
    assert set(kinds(found)) == {"certain", "probe"}
    assert [token.id for token in found if token.committed] == result.state.output


def test_numbers_are_those_of_the_row_that_decided(tmp_path: Path) -> None:
    result = decode(tmp_path / "run", fake(chaotic(8)), depth=3, right=lambda c, d: d == 1)
    first, second = result.cycles[:2]
    found = tokens(result, first_gap=result.summary["first_gap"])
    one, two, three, four = (token for token in found if token.cycle == 1)
    assert one.gap == result.summary["first_gap"] == 4.0
    assert (two.gap, two.ratio, two.draft_gap) == (first["gaps"][0], 1.0, first["draft_gaps"][0])
    assert (three.gap, three.ratio) == (first["gaps"][1], first["ratios"][1])
    assert (four.gap, four.ratio) == (first["gaps"][2], None)
    five = next(token for token in found if token.cycle == 2)
    assert (five.id, five.gap, five.depth) == (second["tokens"][0], first["gaps"][1], 0)


def test_a_full_trace_tells_what_else_was_likely(tmp_path: Path) -> None:
    result = decode(
        tmp_path / "run",
        fake(chaotic(9)),
        depth=3,
        drafter=LyingDrafter,
        log={"trace": "full"},
    )
    trace = result.cycles[0]["trace"]
    _, two, three, four = (token for token in tokens(result) if token.cycle == 1)
    assert (two.kind, two.choice, two.runner) == (
        "rejected",
        trace["choices"][0],
        trace["runners"][0],
    )
    assert (three.kind, three.ratio) == ("unused", trace["draft_ratios"][1])
    assert four.choice == trace["choices"][2]


def test_torn_characters_are_whole_and_missing_pieces_are_ids(tmp_path: Path) -> None:
    text = "\u00e9\u20ac"
    result = decode(tmp_path / "run", fake(reciting(text, len(PROMPT))), depth=2)
    found = tokens(result)
    assert [token.text for token in found if token.committed] == ["", "\u00e9", "", "", "\u20ac"]
    (result.run.path / "pieces.json").write_text("{cut")
    run = Run.open(result.run.path)
    assert pieces_of(run) == {}
    again = tokens_of(run.cycles(), {})
    assert again[0].text == f"<{ids(text)[0]}>"


def test_cycles_of_other_versions_do_not_break_it() -> None:
    found = tokens_of([{"cycle": 1, "tokens": [5, 6], "drafts": [6, 7], "drafted": 2}], {})
    assert kinds(found) == ["certain", "accepted", "unused"]
    assert found[0].gap is None
    assert json.dumps([token.text for token in found]) == '["<5>", "<6>", "<7>"]'
    assert set(COMMITTED) < set(KINDS)
