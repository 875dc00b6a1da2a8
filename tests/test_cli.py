"""The command as a user meets it: flags, overrides, variables, sweeps, endings, completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from omegaconf import OmegaConf

from ds4flow import rundir
from ds4flow.overrides import literal
from tests.command import ds4flow

ROOT = Path(__file__).parent.parent
CONF = str(ROOT / "tests" / "data" / "conf")
BARE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default")
FAKE = (*BARE, "prompt=hello", "commit.max_tokens=12")


pytestmark = pytest.mark.usefixtures("alone")


def facts(run: str | Path = "runs/demo/0001") -> dict[str, Any]:
    return json.loads((Path(run) / "run.json").read_text())


def error_lines(result: Result) -> list[str]:
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()


def test_help_is_quick_to_import() -> None:
    code = (
        "import sys, ds4flow.cli\n"
        "slow = {'torch', 'hydra', 'omegaconf', 'numpy', 'rich', 'gguf'} & set(sys.modules)\n"
        "sys.exit(', '.join(slow) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "speculative decoding" in ds4flow("--help").stdout
    assert "--mtp-draft" in ds4flow("run", "--help").stdout


def test_a_run_leaves_a_complete_directory() -> None:
    result = ds4flow("run", *FAKE, "mtp.draft=2")
    assert result.exit_code == 0
    folder = Path("runs/demo/0001")
    assert (folder / "output.txt").read_text() == result.stdout
    assert len(result.stdout) == 12
    assert (folder / "prompt.txt").read_text() == "hello"
    assert Path("runs/demo/latest").resolve() == folder.resolve()
    record = facts(folder)
    assert record["status"] == "complete"
    assert record["identity"] == "exact"
    assert record["finish_reason"] == "limit"
    assert record["choices"]["pipeline"] == "fake"
    assert record["config"]["mtp.draft"] == {"value": 2, "source": "cli"}
    assert record["config"]["mtp.margin"] == {"value": 1.0, "source": "default"}
    assert record["config"]["pipeline.setup"]["source"] == "group pipeline=fake"
    assert {"versions", "machine", "git"} <= set(record)
    there = {path.name for path in folder.iterdir()}
    assert {".hydra", "cycles.jsonl", "summary.json", "tokens.json", "run.log"} <= there
    assert not {".reserve"} & there
    for word in ("tokens/s", "acceptance", "mean acceptance length", "identity", "runs/demo/0001"):
        assert word in result.stderr


def test_greedy_and_speculative_print_the_same_text() -> None:
    greedy = ds4flow("run", *FAKE, "draft=off").stdout
    assert ds4flow("run", *FAKE, "draft=lying", "mtp.draft=3").stdout == greedy


@pytest.mark.parametrize(
    "arguments",
    [
        ["mtp.drfat=2"],
        ["model=dmeo"],
        ["mtp.draft=abc"],
        ["hello"],
        ["--multirun", "mtp.draft=0,abc"],
        ["--mtp-margin", "3"],
        ["mtp.draft=3", "--mtp-draft", "2"],
        ["--config-dir", "nowhere"],
        ["hydra.sweep.dir=${nothing}", "--multirun"],
    ],
)
def test_mistakes_are_two_lines_and_make_no_directory(arguments: list[str]) -> None:
    result = ds4flow("run", *arguments)
    assert result.exit_code == 2
    assert [line[:2] for line in error_lines(result)] == ["er", "  "]
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["model.path=missing.gguf", "prompt_file=missing.txt", "prompt="])
def test_bad_input_fails_with_code_1_and_is_recorded(name: str) -> None:
    result = ds4flow("run", "name=bad", "model=file", "model.path=nowhere.gguf", name)
    assert result.exit_code == 1
    assert len(error_lines(result)) == 2
    assert facts("runs/bad/0001")["status"] == "failed"
    assert facts("runs/bad/0001")["error"]


def test_report_49_a_complete_file_is_not_called_truncated(golden_dir: Path) -> None:
    data = (golden_dir / "tiny-f32.gguf").read_bytes()
    lacks = data.replace(b"blk.3.attn_norm.weight", b"blk.3.attn_mean.weight")
    for name, content, code, words in (
        ("cut.gguf", data[:-1000], 3, "found"),
        ("lacks.gguf", lacks, 1, "missing: blk.3.attn_norm.weight"),
    ):
        Path(name).write_bytes(content)
        result = ds4flow("run", "-p", "x", "--model", name, code=code)
        assert words in " ".join(error_lines(result))
        assert words in " ".join(ds4flow("inspect", name, code=code).stdout.split())
    ds4flow("inspect", "--convert-mtp", "cut.gguf", code=3)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x): return {x}",
        "it's \"quoted\", [a] (b) = $HOME ${x} \\ \\' \\n",
        " two\nlines ",
        "null",
        "a,b",
        "ü🦜",
    ],
)
def test_a_prompt_arrives_as_typed(text: str) -> None:
    words = ["-p", text] if len(text) % 2 else [f"prompt={text}"]
    result = ds4flow("run", *BARE, "-n", "1", *words)
    assert result.exit_code == 0
    assert Path("runs/demo/0001/prompt.txt").read_bytes() == text.encode()
    assert OmegaConf.load("runs/demo/0001/.hydra/config.yaml").prompt == text


def test_flags_set_keys_and_say_so() -> None:
    result = ds4flow("run", *FAKE, "--mtp-draft", "2", "--mtp-margin", "0.5", "--mtp-timing",
                     "--ctx", "99", "--temp", "0", "--nothink", "--mtp", "x.gguf")  # fmt: skip
    assert result.exit_code == 0
    config = facts()["config"]
    assert config["mtp.draft"] == {"value": 2, "source": "flag --mtp-draft"}
    assert config["mtp.margin"] == {"value": 0.5, "source": "flag --mtp-margin"}
    assert config["mtp.timing"] == {"value": True, "source": "flag --mtp-timing"}
    assert config["runtime.context"]["value"] == 99
    assert config["model.chat"] == {"value": "nothink", "source": "flag --nothink"}
    assert config["model.mtp_path"]["value"] == "x.gguf"
    assert "microseconds per cycle" in result.stderr


def shown(*arguments: str) -> str:
    result = ds4flow("run", "--cfg", "job", *arguments)
    assert result.exit_code == 0
    return result.stdout


def test_the_two_meanings_of_m() -> None:
    model = shown("--package", "model", "-m", "main.gguf")
    assert "path: main.gguf" in model
    assert "profile: official" in model
    result = ds4flow("run", *FAKE, "-m", "mtp.draft=0,2")
    assert result.exit_code == 0
    values = [facts(f"runs/demo/0001/{job}")["config"]["mtp.draft"]["value"] for job in (0, 1)]
    assert values == [0, 2]
    alone = ds4flow("run", *FAKE, "mtp.draft=0,abc", "-m")
    assert error_lines(alone)[0] == "error: mtp.draft=abc is not an integer"


LAYERS = {
    "mtp.draft": ("DS4_MTP_DRAFT", {"default": 1, "file": 3, "cli": 5, "env": 7}),
    "download.folder": (
        "DS4_GGUF_DIR",
        {"default": "gguf", "file": "of a file", "cli": "it's, typed", "env": "/of ${nobody}"},
    ),
}


@pytest.mark.parametrize("key", list(LAYERS))
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("in_environment", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_report_61_precedence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    in_file: bool,
    in_environment: bool,
    typed: bool,
) -> None:
    """File, then command line, then environment; what lost is on record, and announced if typed."""
    variable, values = LAYERS[key]
    group, leaf = key.split(".")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    preset = tmp_path / "conf" / "experiment" / "mine.yaml"
    preset.write_text(f"# @package _global_\n{group}: {{{leaf}: {values['file']}}}\n")
    words = ["--config-dir", "conf", f"hydra.searchpath=[file://{CONF}]", *BARE[2:], "-n", "2"]
    words += ["experiment=mine"] if in_file else []
    words += [f"{key}={values['cli']}"] if typed else []
    if in_environment:
        monkeypatch.setenv(variable, str(values["env"]))
    result = ds4flow("run", *words)
    assert result.exit_code == 0
    winner, source = "default", "default"
    if in_file:
        winner, source = "file", "preset mine"
    if typed:
        winner, source = "cli", "cli"
    loser = literal(f"{key}={values['cli']}")
    if in_environment:
        winner, source = "env", f"env {variable}" + (f" over {loser}" if typed else "")
    assert facts()["config"][key] == {"value": values[winner], "source": source}
    spelled = literal(f"{key}={values['env']}").partition("=")[2]
    announced = result.stderr.count(f"{variable}={spelled} overrides {loser}")
    assert announced == (in_environment and typed)


def test_a_variable_may_not_override_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_MTP_DRAFT", "1")
    result = ds4flow("run", *FAKE, "--multirun", "mtp.draft=0,2")
    assert result.exit_code == 2
    assert "would override the sweep" in error_lines(result)[0]


def test_a_variable_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_MTP_DRAFTS", "1")
    result = ds4flow("run", *FAKE)
    assert result.exit_code == 2
    assert "did you mean DS4_MTP_DRAFT?" in error_lines(result)[1]


def test_a_failed_job_of_a_sweep_stops_no_other() -> None:
    result = ds4flow("run", *FAKE, "--multirun", "prompt=choice('',y)")
    assert result.exit_code == 1
    states = [facts(f"runs/demo/0001/{job}")["status"] for job in range(2)]
    assert states == ["failed", "complete"]
    assert "the prompt is empty" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_run_directory_can_be_named() -> None:
    assert ds4flow("run", *FAKE, "hydra.run.dir=my runs/a b").exit_code == 0
    assert facts("my runs/a b")["status"] == "complete"
    result = ds4flow("run", *FAKE, "hydra.run.dir=my runs/a b")
    assert result.exit_code == 2
    assert "exists and is not empty" in error_lines(result)[0]


def test_showing_the_config_runs_nothing() -> None:
    assert "draft: 3" in shown("--package", "mtp", "--resolve", "mtp.draft=3")
    assert ds4flow("run", "--info", "defaults", *FAKE).exit_code == 0
    assert not Path("runs").exists()
    assert ds4flow("run", "--resolve", *FAKE).exit_code == 2


def test_parity_on_the_command_line() -> None:
    words = ["pipeline.setup=[fakeload,prefill,parity]", "mtp.draft=3",
             "pipeline.cycle=[draft,verify,commit,parity]"]  # fmt: skip
    result = ds4flow("run", *FAKE, *words)
    assert result.exit_code == 0
    assert "tokens and logits bits equal at 12 positions" in result.stderr
    assert facts()["parity"]["equal"] is True
    assert facts()["parity"]["rollbacks"] > 0


def test_a_bug_shows_its_traceback_and_is_recorded(tmp_path: Path) -> None:
    result = ds4flow("run", *FAKE, "fakeload.fail_at=9")
    assert result.exit_code == 1
    assert "ZeroDivisionError: a bug in a kernel" in result.stderr
    assert facts()["status"] == "failed"
    assert "ZeroDivisionError" in facts()["error"]
    assert "Traceback" in Path("runs/demo/0001/run.log").read_text()
    tokens = json.loads(Path("runs/demo/0001/tokens.json").read_text())
    assert len(tokens["output"]) == 9 - len(tokens["prompt"])


def test_a_full_disk_keeps_what_was_produced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write

    def full(descriptor: int, data: bytes) -> int:
        if full.left <= 0:  # type: ignore[attr-defined]
            raise OSError(28, os.strerror(28))
        full.left -= 1  # type: ignore[attr-defined]
        return written(descriptor, data)

    full.left = 9  # type: ignore[attr-defined]
    monkeypatch.setattr(rundir.os, "write", full)
    result = ds4flow("run", *FAKE, "mtp.draft=0")
    assert result.exit_code == 1
    assert "No space left on device" in error_lines(result)[-2]
    assert facts()["status"] == "failed"
    kept = Path("runs/demo/0001/output.txt").read_text()
    assert 0 < len(kept) < 12
    assert result.stdout.startswith(kept)
    assert len(Path("runs/demo/0001/cycles.jsonl").read_text().splitlines()) >= len(kept) - 1


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ds4flow", "run", *FAKE, "commit.max_tokens=900", *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options
    )


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError


def cycles() -> Sequence[str]:
    file = Path("runs/demo/0001/cycles.jsonl")
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted"),
        (signal.SIGKILL, -9, "running"),
    ],
)
def test_a_run_that_is_stopped_keeps_everything(number: int, code: int, status: str) -> None:
    process = start("fakeload.seconds=0.05")
    wait_for(lambda: len(cycles()) > 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert facts()["status"] == status
    recorded = [token for line in cycles() for token in json.loads(line)["tokens"]]
    assert len(recorded) > 5
    text = Path("runs/demo/0001/output.txt").read_text()
    assert out.decode().startswith(text)
    if number != signal.SIGKILL:
        tokens = json.loads(Path("runs/demo/0001/tokens.json").read_text())["output"]
        assert tokens[: len(recorded)] == recorded
        assert json.loads(Path("runs/demo/0001/summary.json").read_text())["finish_reason"] is None


def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    process = start("fakeload.seconds=0.05")
    assert process.stdout is not None
    process.stdout.read(3)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    assert facts()["status"] == "interrupted"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_an_error_of_two_lines() -> None:
    command = [sys.executable, "-m", "ds4flow", "run", *FAKE, "log.table=false"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 1
    assert b"cannot write the text to stdout: No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_a_new_stage_is_one_module_one_yaml_and_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shouting.py").write_text(
        "from dataclasses import dataclass\n"
        "from ds4flow.pipeline import Stage\n"
        "@dataclass\n"
        "class Shout(Stage):\n"
        "    mark: str\n"
        "    reads = ('committed',)\n"
        "    def run(self, state):\n"
        "        state.run.append('shout.txt', self.mark * len(state.committed))\n"
    )
    conf = tmp_path / "conf"
    for name, text in {
        "shout/default.yaml": "_target_: shouting.Shout\nmark: '!'\n",
        "pipeline/loud.yaml": "setup: [fakeload, prefill]\ncycle: [draft, verify, commit]\n"
        "observe: [log, shout]\n",
        "fakeload/default.yaml": (Path(CONF) / "fakeload/default.yaml").read_text(),
    }.items():
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    result = ds4flow("run", "--config-dir", "conf", "pipeline=loud", "shout.mark=?", "-n", "7")
    assert result.exit_code == 0
    assert Path("runs/demo/0001/shout.txt").read_text() == "?" * 7
    assert facts()["config"]["shout.mark"] == {"value": "?", "source": "cli"}


def complete(line: str) -> list[str]:
    """Complete `line` in a real bash with the script that ds4flow prints."""
    script = f"""
        PATH={Path(sys.executable).parent}:$PATH
        eval "$({sys.executable} -m ds4flow completion bash)"
        compopt() {{ :; }}
        COMP_LINE={json.dumps(line)} COMP_POINT=${{#COMP_LINE}} _ds4flow_completion ds4flow
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    script = script.replace("COMP_LINE=", "COMP_LINE=", 1).replace(
        " COMP_POINT=${#COMP_LINE}", f" COMP_POINT={len(line)}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not Path(sys.executable).with_name("ds4flow").exists(), reason="not installed")
def test_bash_completes_keys_and_values_after_the_equals_sign() -> None:
    assert "run" in complete("ds4flow r")
    assert complete("ds4flow run mtp.dr") == ["mtp.draft="]
    assert complete("ds4flow ab -- mtp.draft=0 -- mtp.ma") == ["mtp.margin="]
    assert complete("ds4flow run model=fl") == [
        "flash-q2", "flash-q2-imatrix", "flash-q4", "flash-q4-imatrix",
    ]  # fmt: skip
    assert complete("ds4flow run mtp.draft=2 mtp.strict=") == ["true", "false"]
    assert complete("ds4flow run runtime.kernels=c") == ["cpu", "cpu-int8"]
    assert complete("ds4flow run --mtp-dr") == ["--mtp-draft"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    assert "_DS4FLOW_COMPLETE" in ds4flow("completion", shell).stdout
