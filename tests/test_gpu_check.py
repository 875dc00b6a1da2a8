"""The script for a GPU, as far as it runs without one."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ds4flow.cli import main
from ds4flow.config import compose

ROOT = Path(__file__).parent.parent


def test_its_steps_stay_under_8_minutes_together():
    script = (ROOT / "tools" / "gpu_check.sh").read_text()
    assert (
        subprocess.run(["bash", "-n", ROOT / "tools" / "gpu_check.sh"], check=False).returncode == 0
    )
    steps = [line.split() for line in script.splitlines() if line.startswith("step ")]
    names = ["machine", "kernels", "parity", "run-graph", "run-eager", "prompts", "run-flash"]
    names += ["speed", "profile"]
    assert [step[1] for step in steps] == names
    assert sum(int(step[2]) for step in steps) <= 480


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run for minutes here")
def test_its_commands_are_commands_of_this_program(tmp_path, monkeypatch):
    """Each `ds4flow` line is accepted as far as a machine without a GPU can tell."""
    script = (ROOT / "tools" / "gpu_check.sh").read_text().replace("\\\n", " ")
    lines = [line for line in script.splitlines() if " -m ds4flow " in line]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line.partition(" -m ds4flow ")[2].replace("$out", "x"))
        if words[0] == "run":
            compose([word for word in words[1:] if "=" in word])
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 1
        assert "cannot be used" in result.stderr  # and not that a word is unknown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("machine", "torch"),
        ("parity", "demo depth 4 eager: the same tokens"),
        ("prompts", "built [] kept [0, 1, 2]"),
        ("profile", "aten::"),
    ],
)
def test_each_step_runs_dry(step, says):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "gpu_check.py", step, "--dry"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stderr[-3000:])
    assert done.returncode == 0
    assert says in done.stdout


def test_the_script_goes_on_after_a_failure_and_tells_it(tmp_path):
    """With a Python that does nothing: every step is tried, each leaves a file, one fails."""
    stub = tmp_path / "python"
    stub.write_text(
        '#!/bin/sh\necho "did $*"\ncase "$*" in *"gpu_check.py parity"*) exit 3;; esac\n'
    )
    stub.chmod(0o755)
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check.sh", tmp_path / "out"],
        env=os.environ | {"PYTHON": str(stub)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert len(summary) == 10
    assert [line for line in summary if "FAILED (3;" in line] == [summary[2]]
    assert summary[-1].endswith("failed: 1")
    assert "did -m ds4flow bench synth-flash" in (tmp_path / "out" / "speed.txt").read_text()
