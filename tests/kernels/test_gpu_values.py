"""Runs `triton_values.py` in a process of its own, with Triton's interpreter on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install 'ds4flow[gpu]' for the Triton kernels")

HERE = Path(__file__).parent


def run(selection: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            selection,
            "--durations=5",
            str(HERE / "triton_values.py"),
        ],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout


def test_kernels_match_the_reference_in_the_interpreter():
    run("not slow")


@pytest.mark.slow
def test_kernels_match_the_reference_in_the_interpreter_everywhere():
    run("slow")
