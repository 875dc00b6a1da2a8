"""Other launchers and sweepers give what the local one gives; jobs that die there are on record."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from ds4flow import plugins
from ds4flow.config import asks_for_sweep, compose, sweep_words, swept
from ds4flow.runs.record import Run
from ds4flow.runs.sweep import Sweep
from tests.sweeps.commands import CONF, FAKE, SWEEP, run, started, statuses, sweep, wait_for


def outputs(path: Path = SWEEP) -> list[bytes]:
    return [(job.directory / "tokens.json").read_bytes() for job in Sweep.open(path).jobs
            if job.directory]  # fmt: skip


def test_processes_run_the_frozen_config_and_give_the_same_tokens(tmp_path: Path) -> None:
    """Also report 63, in a launcher's process: the YAML is gone before the last job composes."""
    sweep("mtp.draft=0,2,3")
    there = SWEEP.parent / "0002"
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    words = ["--config-dir", "conf", *FAKE[2:], "fakeload.seconds=0.1"]
    process = started(*words, "-m", "mtp.draft=0,2,3", "hydra/launcher=processes")
    wait_for((there / "0" / "cycles.jsonl").exists)
    shutil.rmtree(conf)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert outputs(there) == outputs()
    found = Sweep.open(there)
    assert found.facts["launcher"] == "processes"
    assert b"compare their speeds with care" in errors
    records = [job.run for job in found.jobs if job.run is not None]
    assert [record.config["mtp.draft"] for record in records] == [0, 2, 3]
    assert process.pid not in {record.facts["pid"] for record in records}
    assert all(job.value == record.summary["tokens_per_second"]
               for job, record in zip(found.jobs, records, strict=True))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "package"),
    [
        ("processes", "joblib"),
        ("slurm_local", "submitit"),
        ("submitit_local", "submitit"),
        ("ray_jobs", "ray"),
    ],
)
def test_the_demo_model_on_every_launcher(launcher: str, package: str) -> None:
    pytest.importorskip(package)
    words = ("log=quiet", "commit.max_tokens=24", "-m", "mtp.draft=0,2", "prompt=choice(x,'')")
    assert run(*words).exit_code == 1
    process = started(*words, f"hydra/launcher={launcher}")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert statuses() == statuses(SWEEP.parent / "0002") == ["done", "failed", "done", "failed"]
    assert Sweep.open(SWEEP.parent / "0002").jobs[1].reason == "the prompt is empty"
    assert b"Traceback" not in errors
    for number in "02":
        here, there = (SWEEP.parent / sweep / number for sweep in ("0001", "0002"))
        assert (here / "tokens.json").read_bytes() == (there / "tokens.json").read_bytes()
        assert Run.open(here).config == Run.open(there).config


@pytest.mark.slow
def test_processes_that_are_interrupted_and_resumed_elsewhere() -> None:
    words = [*FAKE, "-m", "mtp.draft=0,1,2,3", "hydra/launcher=processes", "fakeload.seconds=1"]
    process = started(*words)
    wait_for((SWEEP / "0" / "cycles.jsonl").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert set(statuses()) <= {"failed", "missing", "skipped"}
    assert Sweep.open(SWEEP).facts["status"] == "interrupted"
    resumed = started("--resume", str(SWEEP), "hydra/launcher=basic")
    resumed.communicate(timeout=300)
    assert resumed.returncode == 0
    assert statuses() == ["done"] * 4
    assert Sweep.open(SWEEP).facts["launcher"] == "basic"


@pytest.mark.slow
def test_a_process_that_dies_is_a_failed_job() -> None:
    """A worker killed from outside, as by a system out of memory, takes its pool along."""
    words = [*FAKE, "-m", "mtp.draft=0,2", "hydra/launcher=processes"]
    process = started(*words, "fakeload.seconds=1")
    wait_for((SWEEP / "0" / "cycles.jsonl").exists)
    os.kill(Run.open(SWEEP / "0").facts["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert statuses() == ["failed", "failed"]
    assert "TerminatedWorkerError" in str(Sweep.open(SWEEP).jobs[0].reason)


def search(*words: str) -> tuple[str, ...]:
    return ("hydra/sweeper=search", "mtp.draft=range(1,6)", "mtp.gate=interval(0.0,2.0)", *words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*declarative_base:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.MovedIn20Warning")
def test_a_search_maximises_the_objective_and_goes_on_where_it_stopped() -> None:
    result = sweep(*search("hydra.sweeper.n_trials=3", "objective.metric=mean_acceptance_length"))
    assert result.exit_code == 0
    found = Sweep.open(SWEEP)
    assert found.keys == ("mtp.draft", "mtp.gate")
    assert statuses() == ["done"] * 3
    values = [job.value for job in found.jobs]
    for job in found.jobs:
        assert job.run is not None
        assert job.value == job.run.summary["mean_acceptance_length"]
    text = (SWEEP / "optimization_results.yaml").read_text()
    assert f"best_value: {max(value for value in values if value is not None)}" in text
    again = run("--resume", str(SWEEP), "hydra.sweeper.n_trials=4")
    assert again.exit_code == 0, again.stderr
    longer = Sweep.open(SWEEP)
    assert statuses() == ["done"] * 4
    assert longer.jobs[:3] == found.jobs
    assert [row["number"] for row in longer.rows] == [0, 1, 2, 3]
    assert [json.dumps(job.overrides) for job in longer.jobs][3] not in map(
        json.dumps, (job.overrides for job in found.jobs)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.MovedIn20Warning")
@pytest.mark.parametrize("preset", ["tune", "tune-relaxed"])
def test_a_search_on_the_demo_model(preset: str) -> None:
    words = ("prompts=null", "commit.max_tokens=60", "hydra.sweeper.n_trials=4")
    assert run(f"experiment={preset}", *words).exit_code == 0
    jobs = Sweep.open(SWEEP).jobs
    assert [job.status for job in jobs] == ["done"] * 4
    for job in jobs:
        assert job.run is not None
        summary, config = job.run.summary, job.run.config
        assert (summary["identity"] == "exact") == (config["mtp.margin"] == 1.0)
        share = summary["relaxed_accepts"] / summary["output_tokens"]
        bound = config["objective.max_relaxed"]
        within = bound is None or share <= bound
        assert job.value == (summary["tokens_per_second"] if within else -share)


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.MovedIn20Warning")
def test_a_failed_trial_is_kept_and_the_search_goes_on() -> None:
    words = search("hydra.sweeper.n_trials=2", "fakeload.fail_at=choice(9)")
    result = sweep(*words)
    assert result.exit_code == 1
    assert statuses() == ["failed", "failed"]
    assert "job 1 failed: ZeroDivisionError" in result.stderr
    assert "error: no job of the search was done" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("word", "extra"),
    [
        ("hydra/launcher=processes", "joblib"),
        ("hydra/launcher=slurm", "slurm"),
        ("hydra/launcher=slurm_local", "slurm"),
        ("hydra/launcher=ray_jobs", "ray"),
        ("hydra/sweeper=search", "optuna"),
    ],
)
def test_a_missing_plugin_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, word: str, extra: str
) -> None:
    monkeypatch.setattr(plugins, "_is_installed", lambda package: False)
    result = run("-m", word, "mtp.draft=1")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"error: {word} needs a package that is not installed",
        f"  pip install 'ds4flow[{extra}]'",
    ]
    assert not Path("runs").exists()


def test_an_option_of_a_missing_plugin_names_its_extra() -> None:
    error = plugins.missing_for_option("hydra/launcher/submitit_slurm")
    assert error is not None
    assert error.what == "hydra/launcher=submitit_slurm needs a package that is not installed"
    assert error.fix == "pip install 'ds4flow[slurm]'"
    assert plugins.missing_for_option("hydra/launcher/joblob") is None


def test_a_sweeper_that_would_minimise_is_refused() -> None:
    result = sweep("hydra/sweeper=optuna", "mtp.draft=range(1,3)")
    assert result.exit_code == 2
    assert "use hydra/sweeper=search" in result.stderr
    assert not Path("runs").exists()


PRESETS = {
    "draft-depth": ["mtp.draft"],
    "margin": ["mtp.margin"],
    "gate": ["mtp.gate"],
    "context-length": ["commit.max_tokens", "mtp.draft"],
    "tune": ["mtp.draft", "mtp.gate"],
    "tune-relaxed": ["mtp.draft", "mtp.margin", "mtp.gate"],
}


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_are_sweeps_over_their_keys(preset: str) -> None:
    word = f"experiment={preset}"
    assert asks_for_sweep([word])
    assert list(swept(sweep_words([word], compose([word], hydra=True)))) == PRESETS[preset]


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("tune")])
def test_every_value_of_a_preset_runs(preset: str) -> None:
    result = run(f"experiment={preset}", "prompts=null", "commit.max_tokens=2")
    assert result.exit_code == 0
    assert set(statuses()) == {"done"}
