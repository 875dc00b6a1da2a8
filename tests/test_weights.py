"""The parity check on model files of the user's own: DS4_TEST_MTP=1 pytest -m weights.

DS4_TEST_MODEL names the main file and DS4_TEST_MTP_FILE the one with the MTP block.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4flow.cli import main

DEPTHS = ("1", "2", "3", "4")


def asked_for() -> dict[str, Path]:
    """The files by config key, or a skip that says what is missing."""
    if os.environ.get("DS4_TEST_MTP") != "1":
        pytest.skip("set DS4_TEST_MTP=1, DS4_TEST_MODEL and DS4_TEST_MTP_FILE")
    names = {"model.path": "DS4_TEST_MODEL", "model.mtp_path": "DS4_TEST_MTP_FILE"}
    files = {key: Path(os.environ.get(name, "")).absolute() for key, name in names.items()}
    for key, path in files.items():
        if not path.is_file():
            pytest.skip(f"{names[key]} does not name a file")
    return files


@pytest.mark.weights
def test_speculation_equals_greedy_on_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{key}={path}" for key, path in asked_for().items()]
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DS4_MTP_")]:
        monkeypatch.delenv(name)
    result = CliRunner().invoke(
        main, ["verify", "model=file", *words, "--depths", ",".join(DEPTHS)]
    )
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()][1:]
    assert tuple(row[0] for row in rows) == DEPTHS
    assert all(row[-2:] == ["equal", "equal"] for row in rows), result.stdout
