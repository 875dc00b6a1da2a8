"""Real runs of the demo model, made once; tests read them and write elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4flow.cli import main

TOKENS = 24


def run_demo(*words: str, exit_code: int = 0) -> str:
    """Run `ds4flow run` with these words in the current folder; what it said on stderr."""
    result = CliRunner().invoke(main, ["run", "log=quiet", f"commit.max_tokens={TOKENS}", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.stderr
    return result.stderr


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/demo/0001 (depth 1) and 0002 (depth 2), runs/other/0001 (depth 0)."""
    folder = tmp_path_factory.mktemp("demo-runs")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_demo("mtp.draft=1")
        run_demo("mtp.draft=2", "mtp.full_logits=true")
        run_demo("mtp.draft=0", "name=other")
    finally:
        os.chdir(before)
    return folder
