"""Rows, conditions and order: any key of any run, and never a wrong answer from an old one."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ds4flow.errors import UsageError
from ds4flow.runs.table import load_rows, parse_condition, select


def make(path: Path, summary: dict[str, object] | None = None, **config: object) -> Path:
    path.mkdir(parents=True)
    keys = {key.replace("__", "."): {"value": value} for key, value in config.items()}
    facts = {"status": "complete", "started": f"2026-01-{path.name[-2:]}", "config": keys}
    (path / "run.json").write_text(json.dumps(facts))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path / "a/0001", {"draft_acceptance_rate": 0.5, "micros_by_stage": {"draft": 7}},
         mtp__draft=1, prompt="Sky?", mtp__strict=True, commit__stop=["x"])  # fmt: skip
    make(tmp_path / "a/0002", {"draft_acceptance_rate": 0.75}, mtp__draft="auto", prompt="a=b,c")
    make(tmp_path / "a/0003", {"draft_acceptance_rate": None}, mtp__draft=2)
    make(tmp_path / "b/0004", None, mtp__draft=10)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "1234"),
        (["mtp.draft=1"], "1"),
        (["mtp.draft=1.0"], "1"),
        (["mtp.draft=auto"], "2"),
        (["mtp.draft!=1"], "234"),
        (["mtp.draft>1"], "34"),
        (["mtp.draft>=2", "mtp.draft<10"], "3"),
        (["acceptance>0.5"], "2"),
        (["draft_acceptance_rate<=0.75"], "12"),
        (["acceptance=null"], "34"),
        (["micros_by_stage.draft=7"], "1"),
        (["prompt=a=b,c"], "2"),
        (["prompt~SKY"], "1"),
        (["mtp.strict=true"], "1"),
        (["mtp.strict=1"], ""),
        (['commit.stop=["x"]'], "1"),
        (["run~b/"], "4"),
        (["started>2026-01-02"], "34"),
        (["status=complete", "mtp.draft=7"], ""),
    ],
)
def test_conditions(root: Path, words: list[str], wanted: str) -> None:
    assert "".join(row["run"][-1] for row in select(load_rows(root), words)) == wanted


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [("acceptance", "1234"), ("-acceptance", "2134"), ("-mtp.draft", "2431"), ("-run", "4321")],
)
def test_order_puts_what_is_missing_last(root: Path, sort: str, wanted: str) -> None:
    assert "".join(row["run"][-1] for row in select(load_rows(root), sort=sort)) == wanted
    assert len(select(load_rows(root), sort=sort, limit=2)) == 2


def test_a_key_that_no_run_has_is_an_error_and_not_an_empty_answer(root: Path) -> None:
    with pytest.raises(UsageError, match=r"no run here has mtp\.drift") as error:
        select(load_rows(root), ["mtp.drift=2"])
    assert error.value.fix == "did you mean mtp.draft?"
    with pytest.raises(UsageError, match="no run here has acceptence"):
        select(load_rows(root), sort="-acceptence")
    with pytest.raises(UsageError, match="is not a condition"):
        parse_condition("mtp.draft")


def test_an_answer_is_never_stale(root: Path) -> None:
    assert select(load_rows(root), ["acceptance=0.25"]) == []
    before = os.stat(root / "a/0001/summary.json")
    (root / "a/0001/summary.json").write_text('{"draft_acceptance_rate": 0.25}')
    os.utime(root / "a/0001/summary.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [row["run"] for row in select(load_rows(root), ["acceptance=0.25"])] == ["a/0001"]


def test_crashed_running_and_unreadable_runs_are_listed(tmp_path: Path) -> None:
    for name, text in {
        "a/0001": json.dumps({"status": "running", "pid": os.getpid(),
                              "host": socket.gethostname()}),
        "a/0002": "",
        "a/0003": '{"status": "complete", "files": null, "git": null, "parent": null}',
    }.items():  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(text)
    rows = load_rows(tmp_path)
    assert [row["status"] for row in rows] == ["running", "unknown", "complete"]


def test_prompts_of_a_set_are_rows_of_their_own_when_wanted(root: Path) -> None:
    (root / "a/0001/prompts.jsonl").write_text("")
    for number in (0, 10, 2):
        part = root / f"a/0001/prompt-{number}-x"
        part.mkdir()
        (part / "summary.json").write_text(json.dumps({"cycles": number}))
    names = [row["run"] for row in load_rows(root, parts=True)]
    assert names[:4] == [f"a/0001/prompt-{number}-x" for number in (0, 2, 10)] + ["a/0002"]
    assert select(load_rows(root, parts=True), ["cycles=10"])[0]["mtp.draft"] == 1
    assert len(load_rows(root)) == 4


def test_a_real_run_has_what_people_ask_for(demo_root: Path) -> None:
    rows = load_rows(demo_root / "runs")
    assert [row["run"] for row in rows] == ["demo/0001", "demo/0002", "other/0001"]
    fast = ["mtp.draft=2", "decode_tokens_per_second>0", "status=complete", "identity=exact"]
    assert [row["run"] for row in select(rows, fast)] == ["demo/0002"]
    assert {len(str(row["weights"])) for row in rows} == {64}
    assert rows[1]["mean_acceptance_length"] > 1
