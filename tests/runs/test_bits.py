"""Bits of logits: one changed bit is found, and only comparable rows are compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ds4flow.runs.bits import compare_bits
from ds4flow.runs.record import Run


@pytest.fixture
def pair(demo_root: Path, tmp_path: Path) -> tuple[Run, Run]:
    """A run that kept its logits, and a copy of it."""
    shutil.copytree(demo_root / "runs/demo/0002", tmp_path / "copy")
    return Run.open(demo_root / "runs/demo/0002"), Run.open(tmp_path / "copy")


def test_a_copy_has_the_same_bits(pair: tuple[Run, Run]) -> None:
    found = compare_bits(*pair)
    assert (found.compared, found.different) == (len(pair[0].tokens), None)


def test_one_changed_bit_is_found_where_it_is(pair: tuple[Run, Run]) -> None:
    run, copy = pair
    first, second = list(run.cycles())[:2]
    file = copy.path / "logits" / f"{second['cycle']:06d}.npz"
    with np.load(file) as arrays:
        rows = {name: array.copy() for name, array in arrays.items()}
    rows["verify"][0, 7] = np.nextafter(rows["verify"][0, 7], np.float32(np.inf))
    np.savez(file, **rows)
    assert compare_bits(run, copy).different == len(first["tokens"]) + 1


def test_rows_behind_another_token_are_not_compared(pair: tuple[Run, Run]) -> None:
    run, copy = pair
    tokens = json.loads((copy.path / "tokens.json").read_text())
    tokens["output"][3] += 1
    (copy.path / "tokens.json").write_text(json.dumps(tokens))
    found = compare_bits(run, copy)
    assert (found.compared, found.different) == (3, None)  # outputs 1, 2, 3


def test_without_logits_nothing_is_compared(demo_root: Path, pair: tuple[Run, Run]) -> None:
    other = Run.open(demo_root / "runs/demo/0001")
    assert compare_bits(pair[0], other).compared == 0
