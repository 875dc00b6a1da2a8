"""Sweeps: a row a job, failures kept, nothing overwritten, resumed only as what they were."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from ds4flow import origin
from ds4flow.runs.record import Run, find_runs
from ds4flow.runs.sweep import Sweep
from tests.gguf_files import encode_file, tensor
from tests.sweeps.commands import CONF, FAKE, SWEEP, run, started, statuses, sweep, wait_for


def value(job: int | str, key: str) -> object:
    return Run.open(SWEEP / str(job)).config[key]


def model(number: int) -> bytes:
    return encode_file({"general.name": "m"}, {"w": tensor(np.full(8, number, np.float32))})


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sweep of two jobs, the second failed for want of a file, and its inputs."""
    folder = tmp_path_factory.mktemp("half")
    shutil.copytree(CONF, folder / "conf")
    (folder / "m.gguf").write_bytes(model(1))
    (folder / "a.txt").write_text("there")
    words = ["model=file", "model.path=m.gguf", "name=demo", "prompt_file=choice(a.txt,b.txt)"]
    with chdir(folder):
        run("--config-dir", "conf", *FAKE[2:4], *FAKE[5:], "-m", *words)
        assert statuses() == ["done", "failed"]
    return folder


@pytest.fixture
def here(half_done: Path, tmp_path: Path) -> Path:
    """A copy of `half_done` in the working directory."""
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True, symlinks=True)
    file = SWEEP / "sweep.json"
    file.write_text(file.read_text().replace(str(half_done), str(tmp_path)))
    return tmp_path


def test_a_sweep_leaves_a_row_and_a_directory_for_each_job() -> None:
    low = "0.5123456789012345"
    result = sweep("mtp.draft=0,2", f"mtp.margin=1.0,{low}")
    assert result.exit_code == 0
    found = Sweep.open(SWEEP)
    assert found.facts["status"] == "complete"
    assert found.keys == ("mtp.draft", "mtp.margin")
    assert [job.values for job in found.jobs] == [
        {"mtp.draft": draft, "mtp.margin": margin} for draft in "02" for margin in ("1.0", low)
    ]
    assert statuses() == ["done"] * 4
    assert [str(job.directory) for job in found.jobs] == [str(SWEEP / n) for n in "0123"]
    assert all("provenance" not in word for job in found.jobs for word in job.overrides)
    for number, wanted in enumerate((draft, m) for draft in (0, 2) for m in (1.0, float(low))):
        assert (value(number, "mtp.draft"), value(number, "mtp.margin")) == wanted
    assert find_runs(".") == [job.directory for job in found.jobs]
    for job in found.jobs:
        assert job.run is not None
        assert job.value == job.run.summary["tokens_per_second"]
    rows = (SWEEP / "jobs.jsonl").read_text().splitlines()
    assert [json.loads(row)["number"] for row in rows] == [0, 1, 2, 3]

    lines = result.stderr.splitlines()
    header = next(line for line in lines if line.startswith("job "))
    words = ("mtp.draft", "mtp.margin", "status", "tokens/s", "acceptance", "identity")
    assert [word in header for word in words] == [True] * 6
    line = next(line for line in lines if line.split()[:3] == ["3", "2", "0.512346"])
    summary = Run.open(SWEEP / "3").summary
    assert f"{summary['draft_acceptance_rate']:.1%}" in line
    assert f"{summary['tokens_per_second']:.1f}" in line
    assert "relaxed" in line
    assert lines[-1] == f"4 of 4 jobs done in {SWEEP}"


def test_a_failed_job_is_kept_and_stops_no_other() -> None:
    """A bug and a mistake of the user's, in batches of one that must all be run."""
    result = sweep("fakeload.fail_at=9,-1", "prompt=choice('',y)", "hydra.sweeper.max_batch_size=1")
    assert result.exit_code == 1
    assert statuses() == ["failed", "failed", "failed", "done"]
    found = Sweep.open(SWEEP)
    assert [job.reason for job in found.jobs] == [
        "the prompt is empty",
        "the prompt is empty",
        "ZeroDivisionError: a bug in a kernel",
        None,
    ]
    assert "Traceback" in (SWEEP / "2" / "run.log").read_text()
    assert "Traceback" not in result.stderr
    assert (found.facts["status"], found.facts["missing"]) == ("failed", [0, 1, 2])
    assert "job 2 failed: ZeroDivisionError: a bug in a kernel" in result.stderr
    assert f"run the rest with: ds4flow run --resume {SWEEP}" in result.stderr


def test_resume_runs_what_failed_in_new_directories(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in SWEEP.glob("[0-9]/**/*") if path.is_file()}
    (here / "b.txt").write_text("now there")
    monkeypatch.setattr(origin, "source_tree", lambda: ({"revision": "other"}, b""))
    second = run("--resume", str(SWEEP))
    assert second.exit_code == 0
    assert "note: the code is not the revision" in second.stderr
    assert {path: path.read_bytes() for path in before} == before
    found = Sweep.open(SWEEP)
    assert [(job.status, job.attempt) for job in found.jobs] == [("done", 1), ("done", 2)]
    assert [job.directory for job in found.jobs] == [SWEEP / "0", SWEEP / "1.2"]
    assert (SWEEP / "1.2" / "prompt.txt").read_text() == "now there"
    assert found.facts["status"] == "complete"
    assert [(row["number"], row["status"]) for row in found.rows] == [
        (0, "done"), (1, "failed"), (1, "done"),
    ]  # fmt: skip


def test_resuming_a_complete_sweep_runs_nothing(here: Path) -> None:
    rows = SWEEP / "jobs.jsonl"
    rows.write_text(rows.read_text().replace("failed", "done"))
    result = run("-m", "--resume", "demo/0001")
    assert result.exit_code == 0
    assert "every job of this sweep is done" in result.stderr
    assert statuses() == ["done", "done"]
    assert len(Sweep.open(SWEEP).rows) == 2


def test_resume_refuses_another_config(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed, by a variable and in YAML; every key is named."""
    monkeypatch.setenv("DS4_MTP_MIN_MARGIN", "0.5")
    yaml = here / "conf" / "fakeload" / "default.yaml"
    yaml.write_text(yaml.read_text().replace("seed: 1", "seed: 2"))
    result = run("--resume", str(SWEEP), "mtp.gate=0.5", "hydra.sweeper.max_batch_size=1")
    assert result.exit_code == 2
    for said in (
        "mtp.gate is 0.5, was 0.0",
        "mtp.margin is 0.5, was 1.0",
        "fakeload.seed is 2, was 1",
        "hydra.sweeper.max_batch_size is 1, was None",
    ):
        assert said in result.stderr
    assert "draft.gate" not in result.stderr  # it follows mtp.gate
    assert len(result.stderr.splitlines()) == 2
    assert len(Sweep.open(SWEEP).rows) == 2


def test_resume_refuses_another_sweep(here: Path) -> None:
    result = run("--resume", str(SWEEP), "mtp.draft=1,2", "prompt_file=a.txt")
    assert result.exit_code == 2
    assert "prompt_file is not there, was a.txt,b.txt; mtp.draft is 1,2, was not there" in (
        result.stderr
    )


def test_resume_refuses_exchanged_files(here: Path) -> None:
    (here / "m.gguf").write_bytes(model(2))
    (here / "a.txt").write_text("changed")
    result = run("--resume", str(SWEEP))
    assert result.exit_code == 2
    assert "the file m.gguf of model.path has changed" in result.stderr
    assert "the file a.txt of prompt_file has changed" in result.stderr


def test_resuming_what_is_no_sweep(tmp_path: Path) -> None:
    assert run("--resume", str(tmp_path)).exit_code == 2
    (tmp_path / "run.json").write_text("{}")
    result = run("--resume", str(tmp_path))
    assert result.exit_code == 1
    assert "holds no sweep" in result.stderr
    assert run("--resume", str(tmp_path), "--cfg", "job").exit_code == 2


@pytest.mark.slow
def test_an_interrupted_sweep_says_what_is_missing() -> None:
    process = started(*FAKE, "-m", "mtp.draft=0,1,2", "fakeload.seconds=2",
                      "hydra.sweeper.max_batch_size=1")  # fmt: skip
    wait_for((SWEEP / "0" / "cycles.jsonl").exists)
    second = run("--resume", str(SWEEP))
    assert second.exit_code == 2
    assert "is a sweep that still runs" in second.stderr
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"not run: 1, 2" in errors
    found = Sweep.open(SWEEP)
    assert (found.facts["status"], found.facts["missing"]) == ("interrupted", [0, 1, 2])
    assert statuses() == ["failed", "skipped", "skipped"]
    assert found.jobs[0].reason == "interrupted"


@pytest.mark.slow
def test_a_sweep_that_was_killed_is_resumed() -> None:
    process = started(*FAKE, "-m", "mtp.draft=0,2", "fakeload.seconds=1")
    wait_for((SWEEP / "0" / "cycles.jsonl").exists)
    process.kill()
    process.communicate()
    assert statuses() == ["missing", "missing"]
    assert Sweep.open(SWEEP).jobs[0].directory == SWEEP / "0"
    assert run("--resume", str(SWEEP)).exit_code == 0
    assert [(job.status, job.attempt) for job in Sweep.open(SWEEP).jobs] == [
        ("done", 2), ("done", 1),
    ]  # fmt: skip


def test_report_59_two_sweeps_at_once_have_two_directories() -> None:
    processes = [started(*FAKE, "-m", "mtp.draft=0,2") for _ in range(2)]
    for process in processes:
        process.communicate(timeout=300)
    assert [process.returncode for process in processes] == [0, 0]
    sweeps = [Sweep.open(SWEEP.parent / name) for name in ("0001", "0002")]
    assert {found.facts["pid"] for found in sweeps} == {process.pid for process in processes}
    for found in sweeps:
        assert [job.status for job in found.jobs] == ["done", "done"]
        assert len(found.rows) == 2
        for job in found.jobs:
            assert job.run is not None
            assert job.run.facts["pid"] == found.facts["pid"]
    refused = sweep("mtp.draft=0,2", f"hydra.sweep.dir={SWEEP}")
    assert refused.exit_code == 2
    assert "exists and is not empty" in refused.stderr


def write_preset(conf: Path, *params: str) -> None:
    (conf / "experiment").mkdir(parents=True)
    lines = "".join(f"      {line}\n" for line in params)
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nmtp: {margin: 0.5}\n"
        f"hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n{lines}"
    )


@pytest.mark.slow
def test_a_preset_is_a_sweep_that_the_command_line_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_preset(tmp_path / "conf", "mtp.draft: 0,2", "fakeload.seed: 1,2")
    words = ["--config-dir", "conf", f"hydra.searchpath=[file://{CONF}]", *FAKE[2:]]
    words += ["experiment=mine", "fakeload.seed=3"]
    assert run(*words).exit_code == 0
    found = Sweep.open(SWEEP)
    assert found.keys == ("mtp.draft",)
    assert [(value(job, "mtp.draft"), value(job, "fakeload.seed")) for job in range(2)] == [
        (0, 3), (2, 3),
    ]  # fmt: skip
    assert Run.open(SWEEP / "0").origins["mtp.margin"] == "preset mine"
    assert "draft: 1" in run("--cfg", "job", "--package", "mtp", *words).stdout

    too_deep = run(*words, "mtp.draft=0,99")
    assert too_deep.exit_code == 2
    assert "mtp.draft=99 is too large" in too_deep.stderr
    monkeypatch.setenv("DS4_MTP_DRAFT", "1")
    over_preset = run(*words)
    assert over_preset.exit_code == 2
    assert "DS4_MTP_DRAFT=1 would override the sweep mtp.draft=0,2" in over_preset.stderr
    assert not (SWEEP.parent / "0002").exists()


def test_report_63_editing_config_during_a_sweep_changes_no_job(tmp_path: Path) -> None:
    """A folder of the user's, its presets and a prompt, all edited during job 0."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    write_preset(conf, "mtp.draft: 0,2", "prompt_file: choice(a.txt,b.txt)")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    words = ["--config-dir", "conf", *FAKE[2:4], *FAKE[5:], "experiment=mine"]
    process = started(*words, "fakeload.seconds=0.1")
    wait_for((SWEEP / "0" / "cycles.jsonl").exists)
    (conf / "fakeload" / "default.yaml").write_text("nonsense: true\n")
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nmtp: {gate: 9}\n")
    shutil.rmtree(conf / "pipeline")
    (tmp_path / "b.txt").write_text("changed")
    process.communicate(timeout=300)
    assert statuses() == ["done", "failed", "done", "failed"]
    assert "b.txt is not the file that the sweep began with" in str(
        Sweep.open(SWEEP).jobs[1].reason
    )
    first, last = (Run.open(SWEEP / name).config for name in "02")
    assert {key for key in first if first[key] != last[key]} == {"mtp.draft"}
    assert last["mtp.margin"] == 0.5


@pytest.mark.parametrize(
    "word", ["hydra.sweep.subdir=x", "hydra/launcher=joblob", "mtp.gate=interval(0,1)"]
)
def test_what_cannot_be_a_sweep_is_refused_before_it_starts(word: str) -> None:
    result = sweep("mtp.draft=0,2", word)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert not Path("runs").exists()
