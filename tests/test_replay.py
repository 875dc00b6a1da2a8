"""Replay: the same run again, or a reason why it cannot be the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4flow.cli import main
from ds4flow.runs.record import Run

CONF = str(Path(__file__).parent / "data" / "conf")
FAKE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default", "commit.max_tokens=12")
LONG = "it's ${a} {b}, [c]\\\n\"d\" 'e' é"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DS4_")]:
        monkeypatch.delenv(name)


def ds4flow(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result


def run_fake(*words: str) -> Run:
    ds4flow("run", *FAKE, "log=quiet", *words)
    return Run.open("runs/demo/0001")


def change(run: Run, **facts: Any) -> None:
    (run.path / "run.json").write_text(json.dumps(run.facts | facts))


def change_config(run: Run, **values: Any) -> None:
    keys = {
        key.replace("__", "."): {"value": value, "source": "cli"} for key, value in values.items()
    }
    change(run, config=run.facts["config"] | keys)


def test_a_saved_config_runs_again_with_the_same_config_and_output() -> None:
    """Report 65: neither place, nor types, nor the choice of groups is lost."""
    first = run_fake(f"prompt={LONG}", "mtp.draft=3", "mtp.gate=0.125", "commit.stop=['a,b','~']")
    said = ds4flow("replay", "demo/1").stderr
    assert "demo/0001: the same 12 output tokens" in said
    second = Run.open("runs/demo/0002")
    assert second.config == first.config
    assert {type(value) for value in second.config.values()} == {
        type(value) for value in first.config.values()
    }
    assert second.prompt == LONG == first.prompt
    assert (second.tokens, second.text) == (first.tokens, first.text)
    assert second.facts["choices"] == first.facts["choices"]
    assert second.facts["parent"] == {
        "path": str(first.path.resolve()),
        "started": first.facts["started"],
    }
    assert second.origins["mtp.draft"] == "demo/0001: cli"
    assert second.origins["mtp.margin"] == "default"
    third = ds4flow("replay", "latest").stderr
    assert "demo/0002: the same 12 output tokens" in third
    assert Run.open("runs/demo/0003").config == first.config


def test_an_override_changes_just_that_key() -> None:
    """Report 65 again: new overrides are not ignored."""
    first = run_fake("mtp.draft=1", "mtp.gate=0.125")
    said = ds4flow("replay", "demo/1", "mtp.draft=4").stderr
    second = Run.open("runs/demo/0002")
    changed = {key for key in first.config if first.config[key] != second.config[key]}
    assert changed == {"mtp.draft"}
    assert (second.config["mtp.draft"], second.origins["mtp.draft"]) == (4, "cli")
    assert "the same 12 output tokens" in said  # exact, at any depth
    assert list(second.config) == list(first.config)


def test_a_difference_fails_unless_something_was_overridden() -> None:
    first = run_fake()
    tokens = json.loads((first.path / "tokens.json").read_text())
    tokens["output"][4] += 1
    (first.path / "tokens.json").write_text(json.dumps(tokens))
    said = ds4flow("replay", "demo/1", code=1).stderr
    assert "this run and demo/0001 part at output token 4" in said
    assert "top-2 gap" in said
    assert "part at output token 4" in ds4flow("replay", "demo/1", "mtp.draft=2").stderr
    ds4flow("replay", "demo/1", "log.table=true", code=1)  # what is shown changes no output


def test_other_text_is_no_error_when_it_was_asked_for() -> None:
    run_fake()
    said = ds4flow("replay", "demo/1", "fakeload.seed=9").stderr
    assert "part at output token" in said


def test_a_key_that_is_gone_is_named_and_can_be_dropped() -> None:
    run = run_fake("mtp.draft=2")
    change_config(run, mtp__drafts=7, commit__old=[1], other__thing=None)
    what, fix = ds4flow("replay", "demo/1", code=2).stderr.splitlines()
    assert what == (
        "error: demo/0001 was made with mtp.drafts, commit.old, other.thing, which no longer exist"
    )
    assert "--drop mtp.drafts --drop commit.old --drop other.thing" in fix
    drops = ["--drop", "mtp.drafts", "--drop", "commit.old", "--drop", "other.thing"]
    assert "the same 12 output tokens" in ds4flow("replay", "demo/1", *drops).stderr
    assert "has no such key" in ds4flow("replay", "demo/1", "--drop", "mtp.depth", code=2).stderr
    assert len(list(Path("runs/demo").glob("0*"))) == 2  # what was refused left no directory


def test_the_key_that_replaced_a_lost_one_is_suggested() -> None:
    run = run_fake()
    keys = dict(run.facts["config"])
    keys["mtp.gates"] = keys.pop("mtp.gate")  # as if the key had been renamed since
    change(run, config=keys)
    fix = ds4flow("replay", "demo/1", code=2).stderr.splitlines()[1]
    assert "for mtp.gates=0.0, did you mean mtp.gate?" in fix


def test_a_value_that_is_no_longer_allowed_is_an_error_of_two_lines() -> None:
    change_config(run_fake(), runtime__kernels="abacus")
    what, fix = ds4flow("replay", "demo/1", code=2).stderr.splitlines()
    assert "runtime.kernels=abacus is not one of its choices" in what
    assert "cpu" in fix
    ds4flow("replay", "demo/1", "runtime.kernels=auto")


def test_a_key_that_is_new_since_is_said_and_takes_todays_default() -> None:
    run = run_fake()
    keys = dict(run.facts["config"])
    del keys["mtp.gate"]
    change(run, config=keys)
    said = ds4flow("replay", "demo/1").stderr
    assert "new since demo/0001, at today's defaults: mtp.gate" in said


def test_a_default_that_changed_since_is_not_taken() -> None:
    run = run_fake()
    keys = dict(run.facts["config"])
    keys["mtp.draft"] = {"value": 5, "source": "default"}
    change(run, config=keys)
    ds4flow("replay", "demo/1")
    again = Run.open("runs/demo/0002")
    assert (again.config["mtp.draft"], again.origins["mtp.draft"]) == (5, "demo/0001: default")


def test_a_variable_overrides_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run_fake("mtp.draft=2")
    monkeypatch.setenv("DS4_MTP_DRAFT", "3")
    said = ds4flow("replay", "demo/1").stderr
    assert "DS4_MTP_DRAFT=3 overrides mtp.draft=2 of demo/0001" in said
    again = Run.open("runs/demo/0002")
    assert again.config["mtp.draft"] == 3
    assert again.origins["mtp.draft"] == "env DS4_MTP_DRAFT over mtp.draft=2 of demo/0001"
    said = ds4flow("replay", "demo/1", "mtp.draft=4").stderr
    assert "DS4_MTP_DRAFT=3 overrides mtp.draft=4" in said
    assert Run.open("runs/demo/0003").config["mtp.draft"] == 3
    monkeypatch.setenv("DS4_MTP_DRAFT", "2")
    assert "DS4_MTP_DRAFT" not in ds4flow("replay", "demo/1").stderr
    monkeypatch.delenv("DS4_MTP_DRAFT")
    ds4flow("replay", "demo/2")
    assert Run.open("runs/demo/0005").config["mtp.draft"] == 3  # set by a variable, then recorded


def test_the_prompt_is_that_of_the_run_not_of_its_file_today() -> None:
    Path("prompt.txt").write_text("before")
    run_fake("prompt_file=prompt.txt")
    Path("prompt.txt").write_text("after")
    ds4flow("replay", "demo/1")
    assert Run.open("runs/demo/0002").prompt == "before"
    Path("prompt.txt").unlink()
    ds4flow("replay", "demo/1")


def test_a_preset_and_an_automatic_depth_replay() -> None:
    first = run_fake("experiment=draft-four")
    assert first.origins["mtp.draft"] == "preset draft-four"
    ds4flow("replay", "demo/1")
    assert Run.open("runs/demo/0002").config == first.config
    ds4flow("run", *FAKE, "log=quiet", "mtp.draft=auto", "name=auto")
    assert "the same 12 output tokens" in ds4flow("replay", "auto/1").stderr
    assert Run.open("runs/auto/0002").config["mtp.draft"] == "auto"


def test_a_job_of_a_sweep_replays_as_a_run() -> None:
    ds4flow("run", *FAKE, "log=quiet", "-m", "mtp.draft=1,2")
    said = ds4flow("replay", "runs/demo/0001/1").stderr
    assert "the same 12 output tokens" in said
    again = Run.open("runs/demo/0002")
    assert (again.config["mtp.draft"], again.facts["status"]) == (2, "complete")
    assert Path(again.facts["parent"]["path"]).name == "1"


def test_an_interrupted_run_is_compared_as_far_as_it_went() -> None:
    run = run_fake()
    for name in ("tokens.json", "summary.json"):
        (run.path / name).unlink()
    lines = (run.path / "cycles.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "cycles.jsonl").write_bytes(b"".join(lines[:3]))
    change(run, status="interrupted")
    kept = len(Run.open(run.path).tokens)
    said = ds4flow("replay", "demo/1").stderr
    assert f"the same {kept} output tokens, all that it has; it was interrupted" in said
    assert len(Run.open("runs/demo/0002").tokens) == 12 > kept


def test_a_run_without_a_config_cannot_be_replayed() -> None:
    Path("runs/verify/0001").mkdir(parents=True)
    Path("runs/verify/0001/run.json").write_text('{"status": "complete"}')
    assert "did not record its config" in ds4flow("replay", "verify/1", code=1).stderr


def test_other_weights_are_refused_with_both_digests(demo_run: Path) -> None:
    shutil.copytree(demo_run, "runs/demo/0001")
    run = Run.open("runs/demo/0001")
    now = run.facts["files"]["mtp"]["sha256"]
    files = run.facts["files"] | {"mtp": run.facts["files"]["mtp"] | {"sha256": "0" * 64}}
    change(run, files=files)
    said = ds4flow("replay", "demo/1", code=1).stderr
    assert now in said
    assert "0" * 64 in said
    assert "--other-weights" in said
    assert not Path("runs/demo/0002").exists()
    said = ds4flow("replay", "demo/1", "--other-weights").stderr
    assert now in said
    assert "the same 16 output tokens" in said


def test_a_replay_of_the_demo_model_has_the_same_bits(demo_run: Path) -> None:
    shutil.copytree(demo_run, "runs/demo/0001")
    said = ds4flow("replay", "demo/1").stderr
    assert "demo/0001: the same 16 output tokens" in said
    assert "logits: the same bits at 16 positions" in said
    said = ds4flow("replay", "demo/1", "mtp.draft=3").stderr
    assert "logits: the same bits at 16 positions" in said


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the demo model that kept its logits."""
    folder = tmp_path_factory.mktemp("demo")
    before = Path.cwd()
    os.chdir(folder)
    try:
        words = ("log=quiet", "mtp.full_logits=true", "mtp.draft=2", "commit.max_tokens=16")
        ds4flow("run", *words)
    finally:
        os.chdir(before)
    return folder / "runs/demo/0001"
