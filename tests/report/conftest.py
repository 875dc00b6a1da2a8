"""Runs that the tests of the report look at, made once and left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ds4flow.cli import main

ROOT = Path(__file__).parent.parent.parent
FAKE = ("--config-dir", str(ROOT / "tests/data/conf"), "pipeline=fake", "+fakeload=default")
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{ 7*7 }}\x07é"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with values from everywhere, and its page."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("DS4_MTP_GATE", "0.5")
        words = ("mtp.draft=4", "experiment=relaxed", "-p", NASTY, "-n", "40")
        done = CliRunner().invoke(main, ["run", *FAKE, *words])
        assert done.exit_code == 0, done.stderr
        result = CliRunner().invoke(main, ["report"])
        assert (result.exit_code, result.stdout) == (0, "runs/demo/0001/report.html\n")
    return place / "runs" / "demo" / "0001"
