"""`ds4flow runs`, as typed: what it prints, writes, removes and refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import duckdb
import pytest
from click.testing import Result

from ds4flow import rundir
from ds4flow.device import choose_device
from ds4flow.runs.compare import first_difference
from ds4flow.runs.record import Run
from tests.command import ds4flow


@pytest.fixture
def here(demo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the demo runs, as the current one."""
    shutil.copytree(demo_root / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(*words: str, code: int = 0, answer: str | None = None) -> Result:
    return ds4flow("runs", *words, code=code, answer=answer)


def change(path: Path, **facts: object) -> None:
    file = path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


@pytest.mark.usefixtures("here")
def test_ls_shows_a_line_a_run() -> None:
    lines = runs("ls").stdout.splitlines()
    assert lines[0].split() == ["run", "status", "started", "draft", "margin", "gate", "tokens",
                                "tok/s", "accepted", "length", "identity"]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == ["demo/0001", "demo/0002", "other/0001"]
    found = runs("ls", "mtp.draft>0", "--sort", "-mtp.draft", "--limit", "1", "--json").stdout
    assert [row["mtp.draft"] for row in json.loads(found)] == [2]
    chosen = f"kernels={choose_device('cpu').kernels}"
    columns = runs("ls", chosen, "--columns", "commit.max_tokens,acceptance").stdout
    assert columns.splitlines()[0].split() == ["run", "commit.max_tokens", "accepted"]
    assert "no run here has acceptanse" in runs("ls", "--columns", "acceptanse", code=2).stderr
    assert "kernels" in runs("ls", chosen).stdout.splitlines()[0]
    assert "mtp.draft" in runs("ls", "--keys").stdout
    assert runs("ls", "mtp.draft=9").stderr == "no runs satisfy that\n"
    assert "no run here has mtp.drift" in runs("ls", "mtp.drift=2", code=2).stderr


@pytest.mark.usefixtures("here")
def test_show_says_what_ran_and_what_numbers_mean() -> None:
    shown = runs("show", "demo/2").stdout
    assert "mtp.full_logits" in shown
    assert "cli" in shown
    assert "mtp.margin" not in shown  # a default
    assert "num_accepted_draft_tokens / num_draft_tokens" in shown
    assert "complete (limit)" in shown
    assert Run.open("runs/demo/0002").text in shown
    record = json.loads(runs("show", "demo/2", "--json").stdout)
    assert record["summary"]["cycles"] > 0


def test_show_of_a_killed_run_says_so(here: Path) -> None:
    folder = here / "runs/demo/0001"
    change(folder, status="running", pid=2**22 + 1, host=socket.gethostname())
    (folder / "summary.json").unlink()
    assert "killed (its process is gone" in runs("show", "demo/1").stdout


@pytest.mark.usefixtures("here")
def test_compare_of_exact_runs_finds_the_same_tokens() -> None:
    said = runs("compare", "demo/1", "demo/2", "other/1").stdout
    assert "demo/0002: the same 24 output tokens as demo/0001" in said
    assert "other/0001: the same 24 output tokens as demo/0001" in said
    assert "not the same" not in said
    changed = [line.split() for line in said.splitlines() if line.startswith("mtp.draft ")]
    assert changed == [["mtp.draft", "1", "2", "0"]]
    assert "mtp.margin" not in said


def test_compare_shows_the_first_other_token_and_the_gap_there(here: Path) -> None:
    first, folder = Run.open("runs/demo/0001"), here / "runs/demo/0002"
    tokens = json.loads((folder / "tokens.json").read_text())
    index = 5
    other = tokens["output"][3]
    assert other != tokens["output"][index]
    tokens["output"][index] = other
    (folder / "tokens.json").write_text(json.dumps(tokens))
    second = Run.open(folder)
    found = first_difference(first, second)
    assert found is not None
    assert found.index == index
    assert found.before == first.decode(first.tokens[:index])
    assert found.first is not None
    assert found.second is not None
    assert found.first.text == first.pieces[first.tokens[index]]
    assert (found.second.token, found.second.text) == (other, second.pieces[other])
    gaps = [gap for cycle in first.cycles() for gap in cycle["gaps"][: len(cycle["tokens"])]]
    assert found.first.gap == gaps[index - 1] == found.second.gap
    said = runs("compare", "demo/1", "demo/2").stdout
    assert f"part at output token {index}, after" in said
    assert f"top-2 gap {gaps[index - 1]:.4g}" in said


def test_compare_of_a_shorter_output_says_which_ended(here: Path) -> None:
    file = here / "runs/demo/0002/tokens.json"
    tokens = json.loads(file.read_text())
    file.write_text(json.dumps(tokens | {"output": tokens["output"][:7]}))
    said = runs("compare", "demo/1", "demo/2").stdout
    assert "part at output token 7" in said
    assert "demo/0002  ended before" in said


def test_compare_says_when_conditions_differ(here: Path) -> None:
    folder = here / "runs/demo/0002"
    facts = json.loads((folder / "run.json").read_text())
    facts["files"]["main"]["sha256"] = "f" * 64
    facts["machine"]["cores"] = 512
    facts["versions"]["torch"] = "0.1"
    change(folder, **facts)
    tokens = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(tokens | {"prompt": [1, 2]}))
    said = runs("compare", "demo/1", "demo/2").stdout
    for name in ("weights", "machine", "prompt"):
        assert f"note: not the same {name}:" in said
    assert "note: not the same versions: torch" in said
    assert "another prompt than demo/0001, so the outputs are not compared" in said
    assert "note: not the same MTP weights" not in said
    assert "one run cannot be compared" in runs("compare", "demo/1", code=2).stderr


def test_the_first_token_has_a_gap_and_a_traced_run_names_the_runner_up(
    demo_traced: Path, tmp_path: Path
) -> None:
    shutil.copytree(demo_traced, tmp_path / "copy")
    run = Run.open(tmp_path / "copy")
    for index in (0, 4):
        tokens = json.loads((demo_traced / "tokens.json").read_text())
        tokens["output"][index] += 1
        (tmp_path / "copy/tokens.json").write_text(json.dumps(tokens))
        found = first_difference(Run.open(demo_traced), Run.open(tmp_path / "copy"))
        assert found is not None
        assert found.first is not None
        assert found.first.gap is not None
        assert (found.first.runner is not None) == (index > 0)
    assert found.first.runner in run.pieces.values()


@pytest.mark.usefixtures("here")
def test_export_writes_every_key(here: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(runs("export").stdout)))
    assert [row["mtp.draft"] for row in rows] == ["1", "2", "0"]
    assert rows[0]["run"] == "demo/0001"
    whole = json.loads(runs("export", "mtp.draft=2", "--format", "json").stdout)
    assert [row["run"] for row in whole] == ["demo/0002"]
    runs("export", "-o", "all.csv")
    assert Path("all.csv").read_text() == runs("export").stdout
    assert "cannot write" in runs("export", "-o", "nowhere/all.csv", code=1).stderr


@pytest.mark.usefixtures("here")
def test_export_to_parquet_keeps_types() -> None:
    runs("export", "-o", "all.parquet")
    with duckdb.connect() as db:
        found = db.execute(
            'select run, "mtp.draft", "mtp.margin", "mtp.strict", prompt, acceptance_histogram '
            "from 'all.parquet' order by 1"
        ).fetchall()
    assert [row[:4] for row in found] == [
        ("demo/0001", 1, 1.0, False),
        ("demo/0002", 2, 1.0, False),
        ("other/0001", 0, 1.0, False),
    ]
    run = Run.open("runs/demo/0001")
    assert found[0][4] == run.prompt
    assert json.loads(found[0][5]) == run.summary["acceptance_histogram"]


@pytest.mark.usefixtures("here")
def test_parquet_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "pip install 'ds4flow[data]'" in runs("export", "-o", "x.parquet", code=1).stderr
    assert "give a file" in runs("export", "--format", "parquet", code=2).stderr


def test_rm_asks_and_corrects_the_link(here: Path) -> None:
    folder = here / "runs/demo"
    assert runs("rm", "demo/2", answer="n\n", code=1).stdout == ""
    assert (folder / "0002").exists()
    runs("rm", "demo/2", answer="y\n")
    assert not (folder / "0002").exists()
    assert os.readlink(folder / "latest") == "0001"
    runs("rm", "latest", "demo/latest", "--yes")
    assert list(Path("runs").rglob("run.json")) == []
    assert not (folder / "latest").is_symlink()


def test_a_removed_number_stays_taken(here: Path) -> None:
    (here / "runs/demo/.highest").unlink()  # as in runs of an older version
    runs("rm", "demo/2", "demo/1", "--yes")
    assert rundir.allocate(here / "runs/demo/NNNN").name == "0003"


def test_rm_by_condition(here: Path) -> None:
    runs("rm", "mtp.draft>0", "--yes")
    assert [path.name for path in (here / "runs").rglob("run.json")] == ["run.json"]
    assert runs("rm", "mtp.draft=7", "--yes").stderr == "no runs satisfy that\n"
    assert "give one kind only" in runs("rm", "other/1", "mtp.draft=0", code=2).stderr


def test_rm_leaves_alone_what_runs_and_what_lies_elsewhere(here: Path) -> None:
    change(here / "runs/demo/0001", status="running", pid=os.getpid(), host=socket.gethostname())
    assert "demo/0001 is running" in runs("rm", "demo/1", "--yes", code=2).stderr
    outside = here / "outside"
    shutil.copytree(here / "runs/demo/0002", outside)
    (here / "runs/demo/0009").symlink_to(outside)
    for word in ("outside", "demo/0009"):
        assert "does not lie in runs" in runs("rm", word, "--yes", code=2).stderr, word
    (here / "runs/demo/0002/link").symlink_to(outside)
    runs("rm", "demo/2", "--yes")
    assert (outside / "run.json").exists()
    assert (here / "runs/demo/0001").exists()


def test_rm_takes_a_sweep_whole_and_no_job_of_it(here: Path) -> None:
    sweep = here / "runs/swept/0001"
    for number in ("0", "1"):
        shutil.copytree(here / "runs/demo/0001", sweep / number)
    (sweep / "sweep.json").write_text("{}")
    assert "is a job of a sweep" in runs("rm", "swept/1/0", "--yes", code=2).stderr
    change(sweep / "1", status="running", pid=os.getpid(), host=socket.gethostname())
    assert "swept/0001/1 is running" in runs("rm", "swept/1", "--yes", code=2).stderr
    change(sweep / "1", status="complete")
    facts = {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    (sweep / "sweep.json").write_text(json.dumps(facts))
    assert "swept/0001 is a sweep that runs" in runs("rm", "swept/1", "--yes", code=2).stderr
    (sweep / "sweep.json").write_text("{}")
    runs("rm", "swept/1", "--yes")
    assert not sweep.exists()


def whatif(*words: str, code: int = 0) -> Result:
    return ds4flow("whatif", *words, code=code)


def test_whatif_prints_a_line_a_setting(demo_traced: Path) -> None:
    said = whatif(str(demo_traced), "--gate", "0,1").stdout.splitlines()
    assert "64 tokens traced at mtp.draft=8, drafts from every place" in said[0]
    assert said[1].split()[:3] == ["draft", "margin", "gate"]
    rows = [line.split() for line in said[2:22]]
    assert [row[0] for row in rows] == [*map(str, range(9)), "auto"] * 2
    assert [row[2] for row in rows] == ["0"] * 10 + ["1"] * 10
    assert [row[-1] for row in rows] == [*["exact"] * 9, "estimated"] * 2
    assert said[22].startswith("fastest: mtp.draft=")


def test_whatif_as_json_has_the_names_of_a_summary(demo_traced: Path) -> None:
    found = json.loads(whatif(str(demo_traced), "--depth", "2,9", "--json").stdout)
    assert [one["mtp.draft"] for one in found] == [2, 9]
    assert found[1] == {"mtp.draft": 9, "mtp.margin": 1.0, "mtp.gate": 0.0, "counts": None}
    assert found[0]["counts"] == "exact"
    assert found[0]["num_accepted_draft_tokens"] + found[0]["cycles"] == 64
    assert found[0]["speed_against_greedy"] > 0


@pytest.mark.usefixtures("here")
def test_whatif_of_a_normal_run_says_what_it_lacks(demo_traced: Path) -> None:
    said = whatif("demo/2", "--depth", "1,2").stdout
    assert "no speeds" in said
    assert "exact: mtp.draft=8 mtp.probe=true trace=full" in said
    assert "mtp.probe=true trace=full" in whatif("other/1", code=1).stderr  # it drafted nothing
    for words in (("--margin", "2"), ("--margin", "0"), ("--gate", "-1"), ("--gate", "x")):
        assert "is out of range" in whatif(str(demo_traced), *words, code=2).stderr
    assert "is not a list of depths" in whatif(str(demo_traced), "--depth", "x", code=2).stderr
