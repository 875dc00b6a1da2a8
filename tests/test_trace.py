"""Traces: what trace=full adds to a cycle is true, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ds4flow.stages.draft import MtpDrafter

from tests.fakes import Result, chaotic, decode, fake_with_mtp


def traced(folder: Path, level: str, *, depth: int = 4, **options: object) -> Result:
    model = fake_with_mtp(chaotic(3), wrong=lambda position: position % 5 == 0)
    assert model.mtp is not None
    model.mtp.own_rows = range(1000)  # timed steps do not wait for rows to be refreshed
    return decode(folder, model, depth=depth, drafter=MtpDrafter, log={"trace": level}, **options)


def test_a_full_trace_judges_every_draft_of_the_pass(tmp_path: Path) -> None:
    for cycle in traced(tmp_path / "run", "full").cycles:
        trace = cycle["trace"]
        rows = cycle["drafted"] + 1
        assert len(trace["choices"]) == len(trace["runners"]) == rows
        assert len(trace["draft_ratios"]) == cycle["drafted"]
        assert trace["draft_ratios"][: len(cycle["ratios"])] == cycle["ratios"]
        assert all(a != b for a, b in zip(trace["choices"], trace["runners"], strict=True))
        assert len(trace["draft_runners"]) == len(cycle["drafts"])
        for j, draft in enumerate(cycle["drafts"][: cycle["drafted"]]):
            assert (trace["draft_ratios"][j] == 1.0) == (draft == trace["choices"][j])
        assert trace["late"] == []


def test_a_probe_learns_later_how_its_drafts_are_judged(tmp_path: Path) -> None:
    result = traced(tmp_path / "run", "full", probe=True)
    output, start = result.state.output, result.state.prompt_length
    by_position = {cycle["position"]: cycle for cycle in result.cycles}
    assert len(by_position) == len(output)
    seen = 0
    for position, cycle in by_position.items():
        assert cycle["trace"]["draft_ratios"] == []
        for depth, ratio in cycle["trace"]["late"]:
            made = by_position[position + 1 - depth]
            index = made["position"] - start
            before = output[index + 1 : index + depth]
            assert made["drafts"][: depth - 1] == before  # else it would be moot
            right = made["drafts"][depth - 1] == cycle["trace"]["choices"][0]
            assert (ratio == 1.0) == right
            seen += 1
    assert seen > len(output)
    assert any(ratio < 1.0 for c in result.cycles for _, ratio in c["trace"]["late"])


def test_tracing_changes_nothing_but_the_trace(tmp_path: Path) -> None:
    full, normal, off = (traced(tmp_path / level, level) for level in ("full", "normal", "off"))
    assert full.state.output == normal.state.output == off.state.output
    for a, b in zip(full.cycles, normal.cycles, strict=True):
        del a["trace"], a["micros"], b["micros"]
        assert a == b
    assert not (off.run.path / "cycles.jsonl").exists()
    assert off.summary["num_draft_tokens"] == normal.summary["num_draft_tokens"]
    assert (normal.summary["trace"], off.summary["trace"]) == (None, None)


def test_costs_are_measured_for_every_width(tmp_path: Path) -> None:
    result = traced(tmp_path / "run", "full")
    costs = result.summary["trace"]["costs"]
    assert result.summary["trace"]["micros"] > 0
    widths = result.state.cache.draft_max + 1
    assert len(costs["verify_micros_by_width"]) == widths
    assert len(costs["step_micros_by_stale_rows"]) == widths
    assert min(*costs["verify_micros_by_width"], *costs["step_micros_by_stale_rows"]) > 0
    assert min(costs["plain_micros"], costs["next_step_micros"]) > 0


def test_a_full_context_leaves_no_room_for_timed_passes(tmp_path: Path) -> None:
    result = traced(tmp_path / "run", "full", context=16, max_tokens=100)
    assert result.state.done == "context"
    assert result.summary["trace"]["costs"] is None


def test_a_stopped_run_is_not_kept_waiting_for_timed_passes(tmp_path: Path) -> None:
    def stop(context: tuple[int, ...], row: torch.Tensor) -> None:
        if len(context) > 20:
            raise KeyboardInterrupt

    model = fake_with_mtp(chaotic(3), wrong=lambda position: False)
    model.quirk = stop
    with pytest.raises(KeyboardInterrupt):
        decode(tmp_path / "run", model, depth=2, drafter=MtpDrafter, log={"trace": "full"})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trace"]["costs"] is None
    assert summary["output_tokens"] > 0


def test_the_gap_where_the_prompt_ends_is_kept(tmp_path: Path) -> None:
    assert traced(tmp_path / "run", "normal").summary["first_gap"] == 4.0
