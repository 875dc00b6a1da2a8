"""A synthetic model that is small enough to be measured many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4flow.bench.engine import Engine
from ds4flow.gguf import GgufFile
from ds4flow.synth import synthesize

SMALL = {"layers": "2", "ratios": "4,128", "vocab": "300", "top_k": "4", "window": "16"}
SMALL |= {"sinkhorn": "2", "heads": "2", "experts": "4", "hash_layers": "0"}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Main file and MTP support file."""
    folder = tmp_path_factory.mktemp("bench")
    main, mtp = folder / "small.gguf", folder / "small.mtp-support.gguf"
    synthesize("tiny", main, mtp_path=mtp, seed=1, changes=SMALL)
    return main, mtp


@pytest.fixture(scope="session")
def engine(files: tuple[Path, Path]) -> Engine:
    """The model on the reference kernels."""
    return Engine.load(GgufFile.open(files[0]), GgufFile.open(files[1]))


@pytest.fixture(scope="session")
def engine_without_mtp(files: tuple[Path, Path]) -> Engine:
    """The model without its MTP block."""
    return Engine.load(GgufFile.open(files[0]))
