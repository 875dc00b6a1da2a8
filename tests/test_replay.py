"""Replay: the same run again, or a reason why it cannot be the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ds4flow.errors import UsageError
from ds4flow.replay import compared
from ds4flow.replay_plan import Plan, make_plan
from ds4flow.runs.record import Run, find_parts
from tests import command

CONF = str(Path(__file__).parent / "data" / "conf")
FAKE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default", "commit.max_tokens=12")
LONG = "it's ${a} {b}, [c]\\\n\"d\" 'e' é"


pytestmark = pytest.mark.usefixtures("alone")


def ds4flow(*words: str, code: int = 0) -> Result:
    return command.ds4flow(*words, code=code)


def made_in(folder: Path, *words: str) -> Path:
    before = Path.cwd()
    os.chdir(folder)
    try:
        ds4flow("run", "log=quiet", *words)
    finally:
        os.chdir(before)
    return folder / "runs"


@pytest.fixture(scope="module")
def fake_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = (*FAKE, f"prompt={LONG}", "mtp.draft=2", "mtp.gate=0.125", "commit.stop=['a,b','~']")
    return made_in(tmp_path_factory.mktemp("fake"), *words)


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("mtp.full_logits=true", "mtp.draft=2", "commit.max_tokens=16")
    return made_in(tmp_path_factory.mktemp("demo"), *words)


@pytest.fixture
def run(fake_runs: Path) -> Run:
    """A run of the fake model in runs/demo/0001."""
    shutil.copytree(fake_runs, "runs", symlinks=True)
    return Run.open("runs/demo/0001")


def change(run: Run, **facts: Any) -> Run:
    (run.path / "run.json").write_text(json.dumps(run.facts | facts))
    return Run.open(run.path)


def with_config(run: Run, *gone: str, source: str = "cli", **values: Any) -> Run:
    """The run as if its config had had these values, and not the keys `gone`."""
    keys = {key: item for key, item in run.facts["config"].items() if key not in gone}
    for key, value in values.items():
        keys[key.replace("__", ".")] = {"value": value, "source": source}
    return change(run, config=keys)


def plan(run: Run, *typed: str, drop: tuple[str, ...] = ()) -> Plan:
    return make_plan(run, "demo/0001", typed, drop=drop, config_dir=CONF)


def test_a_saved_config_runs_again_with_the_same_config_and_output(run: Run) -> None:
    """Report 65: neither place, nor types, nor the choice of groups is lost."""
    said = ds4flow("replay", "demo/1").stderr
    assert "demo/0001: the same 12 output tokens" in said
    again = Run.open("runs/demo/0002")
    assert again.config == run.config
    assert [type(value) for value in again.config.values()] == [
        type(value) for value in run.config.values()
    ]
    assert again.prompt == LONG == run.prompt
    assert (again.tokens, again.text) == (run.tokens, run.text)
    assert again.facts["choices"] == run.facts["choices"]
    parent = {"path": str(run.path.resolve()), "started": run.facts["started"]}
    assert again.facts["parent"] == parent
    assert again.origins["mtp.draft"] == "demo/0001: cli"
    assert again.origins["mtp.margin"] == "default"
    again_plan = plan(again)  # a replay can be replayed
    assert again_plan.same
    assert "mtp.draft=2" in again_plan.words


def test_an_override_changes_just_that_key(run: Run) -> None:
    """Report 65 again: new overrides are not ignored."""
    said = ds4flow("replay", "demo/1", "mtp.draft=4").stderr
    again = Run.open("runs/demo/0002")
    changed = {key for key in run.config if run.config[key] != again.config[key]}
    assert changed == {"mtp.draft"}
    assert (again.config["mtp.draft"], again.origins["mtp.draft"]) == (4, "cli")
    assert "the same 12 output tokens" in said  # exact, at any depth
    assert list(again.config) == list(run.config)


def test_a_difference_fails_unless_something_was_overridden(run: Run) -> None:
    tokens = json.loads((run.path / "tokens.json").read_text())
    tokens["output"][4] += 1
    (run.path / "tokens.json").write_text(json.dumps(tokens))
    said = ds4flow("replay", "demo/1", "log.table=true", code=1).stderr  # shows more, no more
    assert "this run and demo/0001 part at output token 4" in said
    assert "top-2 gap" in said
    assert not plan(run, "mtp.draft=3").same


def test_a_key_that_is_gone_is_named_and_can_be_dropped(run: Run) -> None:
    old = with_config(run, mtp__drafts=7, commit__old=[1], other__thing=None)
    with pytest.raises(UsageError) as error:
        plan(old)
    assert error.value.what == (
        "demo/0001 was made with mtp.drafts, commit.old, other.thing, which no longer exist"
    )
    assert "--drop mtp.drafts --drop commit.old --drop other.thing" in error.value.fix
    found = plan(old, drop=("mtp.drafts", "commit.old", "other.thing"))
    assert not any("drafts" in word or "old" in word for word in found.words[:-2])
    with pytest.raises(UsageError, match="has no such key"):
        plan(old, drop=("mtp.depth",))
    assert ds4flow("replay", "demo/1", code=2).stderr.startswith("error: demo/0001 was made with")
    assert [path.name for path in Path("runs/demo").glob("0*")] == ["0001"]  # nothing was made


def test_the_key_that_replaced_a_lost_one_is_suggested(run: Run) -> None:
    with pytest.raises(UsageError) as error:
        plan(with_config(run, "mtp.gate", mtp__gates=0.5))
    assert "for mtp.gates=0.5, did you mean mtp.gate?" in error.value.fix


def test_a_value_that_is_no_longer_allowed_is_an_error_of_two_lines(run: Run) -> None:
    with_config(run, runtime__kernels="abacus")
    what, fix = ds4flow("replay", "demo/1", code=2).stderr.splitlines()
    assert "runtime.kernels=abacus is not one of its choices" in what
    assert "cpu" in fix
    assert not any("abacus" in word for word in plan(run, "runtime.kernels=auto").words)


def test_todays_defaults_stand_only_for_what_is_new(run: Run) -> None:
    found = plan(with_config(run, "mtp.strict", source="default", mtp__margin=0.5))
    assert found.notices == ["new since demo/0001, at today's defaults: mtp.strict"]
    assert "mtp.margin=0.5" in found.words  # 1.0 is a default of later
    assert any("mtp.margin:'demo/0001: default'" in word for word in found.words)


def test_the_class_behind_a_group_is_todays(run: Run) -> None:
    moved = with_config(run, source="default", commit___target_="ds4flow.stages.old.Commit")
    assert not any("stages.old" in word for word in plan(moved).words)
    typed = with_config(run, source="cli", commit___target_="mine.Commit")
    assert "commit._target_='mine.Commit'" in plan(typed).words


def test_a_group_that_is_typed_replaces_what_was_recorded_of_it(run: Run) -> None:
    old = with_config(run, source="group model=file", model__path="/gone.gguf")
    old = change(old, choices=old.facts["choices"] | {"model": "file"})
    assert "model='file'" in plan(old).words
    found = plan(old, "model=demo")
    assert "model=demo" in found.words
    assert not any(word.startswith(("model='", "model.path")) for word in found.words)
    assert not found.same


def test_a_variable_overrides_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_MTP_DRAFT", "3")
    said = ds4flow("replay", "demo/1").stderr
    assert "DS4_MTP_DRAFT=3 overrides mtp.draft=2 of demo/0001" in said
    again = Run.open("runs/demo/0002")
    assert again.config["mtp.draft"] == 3
    assert again.origins["mtp.draft"] == "env DS4_MTP_DRAFT over mtp.draft=2 of demo/0001"
    typed = plan(run, "mtp.draft=4")
    assert typed.notices == ["DS4_MTP_DRAFT=3 overrides mtp.draft=4"]
    assert [word for word in typed.words if word.startswith("mtp.draft=")] == ["mtp.draft=3"]
    assert not typed.same
    monkeypatch.setenv("DS4_MTP_DRAFT", "2")
    assert plan(run) == plan(run)._replace(notices=[], same=True)
    monkeypatch.delenv("DS4_MTP_DRAFT")
    assert "mtp.draft=3" in plan(again).words  # set by a variable then, recorded now


def test_the_prompt_is_that_of_the_run_not_of_its_file_today(run: Run) -> None:
    Path("prompt.txt").write_text("after")
    (run.path / "prompt.txt").write_text("before")
    words = plan(with_config(run, prompt_file="prompt.txt")).words
    assert "prompt='before'" in words
    assert not any(word.startswith("prompt_file") for word in words)


def test_a_preset_and_an_automatic_depth_replay() -> None:
    ds4flow("run", *FAKE, "log=quiet", "experiment=draft-four", "mtp.draft=auto")
    assert "the same 12 output tokens" in ds4flow("replay", "demo/1").stderr
    first, again = Run.open("runs/demo/0001"), Run.open("runs/demo/0002")
    assert again.config == first.config
    assert again.config["mtp.draft"] == "auto"


@pytest.mark.slow
def test_a_job_of_a_sweep_replays_as_a_run() -> None:
    ds4flow("run", *FAKE, "log=quiet", "-m", "mtp.draft=1,2")
    said = ds4flow("replay", "runs/demo/0001/1").stderr
    assert "the same 12 output tokens" in said
    again = Run.open("runs/demo/0002")
    assert (again.config["mtp.draft"], again.status) == (2, "complete")
    assert Path(again.facts["parent"]["path"]).name == "1"


@pytest.mark.slow
def test_a_set_of_prompts_replays_prompt_by_prompt() -> None:
    rows = [{"id": name, "category": "c", "prompt": name * 3} for name in ("a", "b")]
    Path("set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds4flow("run", *FAKE, "log=quiet", "prompts=set.jsonl", "mtp.draft=2")
    first = Run.open("runs/demo/0001")
    parts = find_parts(first.path)
    assert "prompts='set.jsonl'" in plan(first).words  # it is still the same set
    Path("set.jsonl").write_text(json.dumps(rows[0]) + "\n")  # the file changed since
    tokens = json.loads((parts[1] / "tokens.json").read_text())
    tokens["output"][2] += 1
    (parts[1] / "tokens.json").write_text(json.dumps(tokens))
    said = ds4flow("replay", "demo/1", code=1).stderr
    assert f"this run and demo/0001/{parts[1].name} part at output token 2" in said
    assert "demo/0001: the same output in 1 of 2 prompts" in said
    again = Run.open("runs/demo/0002")
    assert again.facts["prompt_set"] == first.facts["prompt_set"]
    assert len(find_parts(again.path)) == 2
    compared = ds4flow("runs", "compare", "demo/1", "demo/2").stdout
    assert "the same output tokens as demo/0001 in 1 of 2 prompts" in compared
    assert "the same 12 output tokens" in ds4flow("replay", f"demo/1/{parts[0].name}").stderr


def test_an_interrupted_run_is_compared_as_far_as_it_went(run: Run) -> None:
    shutil.copytree("runs/demo/0001", "runs/demo/0002")
    cut = Path("runs/demo/0002")
    for name in ("tokens.json", "summary.json"):
        (cut / name).unlink()
    lines = (cut / "cycles.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "cycles.jsonl").write_bytes(b"".join(lines[:3]))
    parent = change(Run.open(cut), status="interrupted")
    kept = len(parent.tokens)
    assert 0 < kept < len(run.tokens)
    same, told = compared(parent, run, "demo/0002")
    assert same
    assert told[0] == (
        f"demo/0002: the same {kept} output tokens, all that it has; it was interrupted"
    )
    longer = compared(run, Run.open(cut), "demo/0001")  # a complete run that is cut is different
    assert not longer[0]


def test_a_run_without_a_config_cannot_be_replayed() -> None:
    Path("runs/verify/0001").mkdir(parents=True)
    Path("runs/verify/0001/run.json").write_text('{"status": "complete"}')
    assert "did not record its config" in ds4flow("replay", "verify/1", code=1).stderr


def test_other_weights_are_refused_with_both_digests(demo_runs: Path) -> None:
    shutil.copytree(demo_runs, "runs", symlinks=True)
    run = Run.open("runs/demo/0001")
    now = run.facts["files"]["mtp"]["sha256"]
    change(run, files=run.facts["files"] | {"mtp": run.facts["files"]["mtp"] | {"sha256": "0"}})
    with_config(Run.open(run.path), source="group model=demo", model__mtp_sha256="0" * 64)
    said = ds4flow("replay", "demo/1", code=1).stderr
    assert f"SHA-256 {now}, but demo/0001 ran with the SHA-256 0" in said
    assert "--other-weights" in said
    assert not Path("runs/demo/0002").exists()
    said = ds4flow("replay", "demo/1", "--other-weights", "mtp.draft=3").stderr
    assert now in said
    assert "note: not the same as demo/0001 had: MTP weights" in said
    # They are the same in truth, so any depth gives the same bits.
    assert "demo/0001: the same 16 output tokens" in said
    assert "logits: the same bits at 16 positions" in said
