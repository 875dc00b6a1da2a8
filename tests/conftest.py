"""Shared fixtures: the golden models, unpacked once per test session."""

from __future__ import annotations

import os
import signal
import tarfile
from pathlib import Path

import pytest

GOLDEN_NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
GOLDEN_ARCHIVES = Path(__file__).parent / "data" / "golden"

# Test processes share the cores, so each computes with one thread, and so do those that it starts.
# With more threads than cores torch mostly waits: on a busy machine the same tests took eight times
# the work. The user's own large models get all cores.
if os.environ.get("DS4_TEST_MTP") != "1":
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite that a shell started in the background ignores Ctrl-C, and so would the runs that
    # tests start and stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def golden_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.gguf, NAME.mtp-support.gguf and NAME.llama-mtp.gguf of the golden models.

    Tests must not change these files; copy one to change it.
    """
    folder = tmp_path_factory.mktemp("golden")
    for name in GOLDEN_NAMES:
        with tarfile.open(GOLDEN_ARCHIVES / f"{name}.tar.xz") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
            archive.extractall(folder, **safe)
    return folder


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line in a folder of its own, without variables of the user's."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DS4_")]:
        monkeypatch.delenv(name)
