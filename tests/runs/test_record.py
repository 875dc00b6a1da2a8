"""Records: a real run read back, and everything that can be missing, cut or foreign."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.runs.record import Run, find_parts, find_runs, label, resolve_run


def make(path: Path, **facts: object) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(facts))
    return path


def test_a_real_run_is_read_back(demo_root: Path) -> None:
    run = Run.open(demo_root / "runs/demo/0002")
    assert run.status == "complete"
    assert run.config["mtp.draft"] == 2
    assert (run.origins["mtp.draft"], run.origins["mtp.margin"]) == ("cli", "default")
    assert len(run.tokens) == run.summary["output_tokens"] == 24
    assert run.text == (run.path / "output.txt").read_text()
    assert run.prompt == run.config["prompt"]
    assert len(run.prompt_tokens) == run.summary["prompt_tokens"]
    cycles = list(run.cycles())
    assert len(cycles) == run.summary["cycles"]
    assert [token for cycle in cycles for token in cycle["tokens"]] == run.tokens


def test_a_killed_run_keeps_what_it_wrote(demo_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(demo_root / "runs/demo/0001", folder)
    whole = Run.open(folder).tokens
    for name in ("summary.json", "tokens.json", "output.txt"):
        (folder / name).unlink()
    lines = (folder / "cycles.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "cycles.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    facts = json.loads((folder / "run.json").read_text())
    facts |= {"status": "running", "pid": int(gone.stdout), "host": socket.gethostname()}
    (folder / "run.json").write_text(json.dumps(facts))
    run = Run.open(folder)
    assert run.status == "killed"
    assert (run.summary, run.text, run.prompt_tokens) == ({}, "", [])
    assert run.tokens == whole[: len(run.tokens)]
    assert 0 < len(run.tokens) < len(whole)


def test_a_run_in_progress_is_running(tmp_path: Path) -> None:
    here = make(tmp_path / "a", status="running", pid=os.getpid(), host=socket.gethostname())
    elsewhere = make(tmp_path / "b", status="running", pid=999_999_999, host="elsewhere")
    assert [Run.open(path).status for path in (here, elsewhere)] == ["running", "running"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_an_unreadable_record_is_unknown_and_not_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    run = Run.open(tmp_path)
    assert (run.status, run.config, run.summary, list(run.cycles())) == ("unknown", {}, {}, [])


def test_a_damaged_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "cycles.jsonl").write_text('{"a":1}\n{"a"\n{"a":3}\n')
    with pytest.raises(Ds4FlowError, match="line 2"):
        list(Run.open(tmp_path / "run").cycles())


def test_a_folder_without_a_record_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(Ds4FlowError, match="holds no run"):
        Run.open(tmp_path)


def test_a_prompt_of_a_set_is_a_run_with_the_facts_of_its_set(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", status="complete", config={"mtp.draft": {"value": 3}})
    (folder / "prompts.jsonl").write_text("")
    part = folder / "prompt-0-easy"
    part.mkdir()
    (part / "prompt.txt").write_text("x")
    (part / "summary.json").write_text('{"cycles": 7}')
    run = Run.open(part)
    assert (run.part, run.config["mtp.draft"], run.summary["cycles"]) == ("prompt-0-easy", 3, 7)
    assert find_runs(tmp_path) == [folder]
    assert resolve_run("set/prompt-0-easy", tmp_path) == part
    (part / "run.json").write_text('{"status": "failed"}')  # as prompts of a set have it
    assert (Run.open(part).status, Run.open(part).part) == ("failed", "prompt-0-easy")
    assert find_runs(tmp_path) == [folder]
    assert find_parts(folder) == [part]
    numbered = make(tmp_path / "n/0003", status="complete")
    (numbered / "prompts.jsonl").write_text("")
    (numbered / "prompt-1-x").mkdir()
    (numbered / "prompt-1-x/prompt.txt").write_text("x")
    assert resolve_run("n/3/prompt-1-x", tmp_path) == numbered / "prompt-1-x"


def test_all_runs_are_found_in_order_and_links_are_not_followed(tmp_path: Path) -> None:
    wanted = [make(tmp_path / name) for name in ("a/0002", "a/0010", "b/0001", "b/0003/2",
                                                 "b/0003/10", "c/x/0001")]  # fmt: skip
    make(tmp_path / "a/0002/inside")
    make(tmp_path / ".hidden")
    (tmp_path / "foreign.txt").write_text("")
    (tmp_path / "a/latest").symlink_to("0010")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs(tmp_path) == wanted
    assert find_runs(tmp_path / "nowhere") == []


def test_words_that_name_a_run(tmp_path: Path) -> None:
    one = make(tmp_path / "a/0001", started="2026-01-01")
    two = make(tmp_path / "a/0002", started="2026-01-03")
    other = make(tmp_path / "b/0002", started="2026-01-02")
    (tmp_path / "a/latest").symlink_to("0002")
    for word, path in {
        str(one): one,
        f"{one}/run.json": one,
        "a/0001": one,
        "0001": one,
        "1": one,
        "a/1": one,
        "a/2/": two,
        "a/latest": two,
        "latest": two,
        "a": two,
        "b": other,
        "b/latest": other,
    }.items():
        assert resolve_run(word, tmp_path) == path, word
    assert label(other, tmp_path) == "b/0002"
    with pytest.raises(UsageError, match="several runs") as several:
        resolve_run("0002", tmp_path)
    assert "a/0002, b/0002" in several.value.fix
    with pytest.raises(UsageError, match="no run a/0009") as none:
        resolve_run("a/0009", tmp_path)
    assert "did you mean a/0001?" in none.value.fix or "did you mean a/0002?" in none.value.fix
    with pytest.raises(UsageError, match="there are no runs"):
        resolve_run("latest", tmp_path / "nowhere")


def test_a_sweep_is_no_run_unless_sweeps_are_wanted(tmp_path: Path) -> None:
    jobs = [make(tmp_path / f"a/0001/{number}", started=f"{number}") for number in (0, 1)]
    (tmp_path / "a/0001/sweep.json").write_text("{}")
    with pytest.raises(UsageError, match="is a sweep") as error:
        resolve_run("a/0001", tmp_path)
    assert "as a/0001/0" in error.value.fix
    assert resolve_run("a/0001/1", tmp_path) == resolve_run("a/1/1", tmp_path) == jobs[1]
    assert resolve_run("latest", tmp_path) == jobs[1]
    for word in ("a/0001", "1", "latest", "a"):
        assert resolve_run(word, tmp_path, sweeps=True) == tmp_path / "a/0001", word
