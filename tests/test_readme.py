"""The README's commands are real: each is run, shortened, or composed where it needs weights."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ds4flow

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """The ds4flow commands of the shell blocks in `text`."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        line
        for body in blocks
        for line in body.splitlines()
        if re.match(r"(\w+=\S+ )*ds4flow ", line)
    ]


EXPERIMENT = re.search(r"^## From a question.*?(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
assert EXPERIMENT is not None
SEQUENCE = commands(EXPERIMENT[0])
"""These build on each other."""
COMMANDS = commands(TEXT.replace(EXPERIMENT[0], ""))
NEEDS_WEIGHTS = ("model=flash", "download", "inspect gguf")


def run(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DS4_")}
    return subprocess.run(
        [sys.executable, "-m", "ds4flow", *arguments],
        cwd=folder,
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words after `ds4flow`."""
    words = shlex.split(line)
    place = words.index("ds4flow")
    return dict(word.split("=", 1) for word in words[:place]), words[place + 1 :]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10
    assert TEXT.index("pip install -c constraints.txt -e . && ds4flow run") < 2000


def shortened(words: list[str]) -> list[str]:
    """The same command for fewer tokens, and fewer jobs and pairs."""
    if "-n" in words:
        words[words.index("-n") + 1] = "12"
    elif words[0] == "run" and "--cfg" not in words:
        words += ["commit.max_tokens=6"]
    if "--repeats" in words:
        words[words.index("--repeats") + 1] = "1"
        words[1:1] = ["--warmup", "0"]
    words = [re.sub(r"^(mtp\.draft=\d+,\d+),[\d,]+$", r"\1", word) for word in words]
    return [re.sub(r"^(commit\.max_tokens)=\d+$", r"\1=6", word) for word in words]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("line", [c for c in COMMANDS if not any(w in c for w in NEEDS_WEIGHTS)])
def test_command_runs(line: str) -> None:
    variables, words = split(line)
    words = shortened(words)
    if words[0] == "verify":
        words[words.index("--depths") + 1] = "2"
        words += ["commit.max_tokens=6"]
    done = ds4flow(*words, env=variables)
    assert done.exit_code == 0, done.stderr
    assert done.stdout


@pytest.mark.usefixtures("alone")
def test_the_way_from_a_question_to_an_answer() -> None:
    assert len(SEQUENCE) >= 8
    for line in SEQUENCE:
        variables, words = split(line)
        assert not variables
        done = ds4flow(*shortened(words))
        assert done.exit_code == 0, (line, done.stderr)
        assert done.output, line


@pytest.mark.parametrize("line", [c for c in COMMANDS if "run model=flash" in c])
def test_command_with_weights_composes(line: str, tmp_path: Path) -> None:
    done = run([*split(line)[1], "--cfg", "job"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deepseek-v4-gguf" in done.stdout


@pytest.mark.parametrize(
    "line", [c for c in COMMANDS if re.search(r"ds4flow (download|inspect)", c)]
)
def test_command_is_declared(line: str, tmp_path: Path) -> None:
    done = run([split(line)[1][0], "--help"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_new_stage_needs_the_files_that_it_shows(tmp_path: Path) -> None:
    names = ["longest.py", "longest/default.yaml", "pipeline/mine.yaml"]
    for name in names:
        body = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S)
        assert body is not None, name
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(body[1])
    assert len((tmp_path / "longest.py").read_text().splitlines()) <= 17
    command = re.search(r"`PYTHONPATH=\. ds4flow (run [^`]+)`", TEXT)
    assert command is not None
    words = [*shlex.split(command[1]), "commit.max_tokens=6", "longest.unit=drafts"]
    done = run(words, tmp_path, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    record = next((tmp_path / "runs").rglob("run.json")).read_text()
    assert re.search(r'"longest_commit": "\d drafts"', record)


def test_the_tree_names_what_there_is() -> None:
    section = TEXT.split("## The tree")[1]
    for folder in ("ds4flow", "stages", "conf", "tools", "tests"):
        assert f"{folder}/" in section
        assert (ROOT / folder).is_dir()
    for module in (ROOT / "stages").glob("*.py"):
        if module.stem != "__init__":
            assert module.stem in section, module
