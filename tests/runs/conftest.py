"""Real runs of the demo model, made once; tests read them and write elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.command import ds4flow

TOKENS = 24


def run_demo(*words: str, exit_code: int = 0) -> str:
    """Run `ds4flow run` with these words in the current folder; what it said on stderr."""
    if not any(word.startswith("commit.max_tokens=") for word in words):
        words = (*words, f"commit.max_tokens={TOKENS}")
    return ds4flow("run", "log=quiet", *words, code=exit_code).stderr


def _make(folder: Path, *runs: tuple[str, ...]) -> Path:
    before = Path.cwd()
    os.chdir(folder)
    try:
        for words in runs:
            run_demo(*words)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(scope="session")
def demo_traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with drafts from every position and a full trace."""
    words = ("mtp.draft=8", "mtp.probe=true", "trace=full", "commit.max_tokens=64")
    return _make(tmp_path_factory.mktemp("traced"), words) / "runs/demo/0001"


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/demo/0001 (depth 1) and 0002 (depth 2), runs/other/0001 (depth 0)."""
    return _make(
        tmp_path_factory.mktemp("demo-runs"),
        ("mtp.draft=1",),
        ("mtp.draft=2", "mtp.full_logits=true"),
        ("mtp.draft=0", "name=other"),
    )
