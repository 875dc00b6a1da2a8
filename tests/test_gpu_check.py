"""The script for a GPU, as far as it runs without one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_its_steps_stay_under_8_minutes_together():
    script = (ROOT / "tools" / "gpu_check.sh").read_text()
    assert (
        subprocess.run(["bash", "-n", ROOT / "tools" / "gpu_check.sh"], check=False).returncode == 0
    )
    steps = [line.split() for line in script.splitlines() if line.startswith("step ")]
    assert [step[1] for step in steps] == ["machine", "kernels", "parity", "speed", "profile"]
    assert sum(int(step[2]) for step in steps) <= 480


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("machine", "torch"),
        ("parity", "depth 4 eager: the golden tokens"),
        ("speed", "tokens_per_second"),
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
