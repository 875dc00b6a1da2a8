"""Compiled kernels on disk: read back by LLVM alone, and made again when damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import numba
import pytest

from ds4flow.kernels.cpu.library import Library
from ds4flow.kernels.cpu.linking import entry
from ds4flow.kernels.cpu.store import ObjectStore, Stored, raising


def summed(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int) -> int:
    return a + 2 * b + 3 * c + i


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_kernel_is_compiled_once_and_then_read(folder: Path) -> None:
    first, second, third = Library(), Library(), Library()
    results = [entry(release=False)(first.address(summed), 1, 2, 3, 0, 0, 0, 0, 0, 10)]
    (file,) = folder.rglob("*.o")
    results.append(entry(release=True)(second.address(summed), 1, 2, 3, 0, 0, 0, 0, 0, 10))
    file.write_bytes(file.read_bytes()[:-1])  # damaged: compiled and written again
    results.append(entry(release=False)(third.address(summed), 1, 2, 3, 0, 0, 0, 0, 0, 10))
    assert results == [24, 24, 24]
    counts = [(one.compiled, one.loaded) for one in (first, second, third)]
    assert counts == [(1, 0), (0, 1), (1, 0)]
    assert [one.name for one in folder.rglob("*") if one.is_file()] == [file.name]


def test_a_folder_that_cannot_be_written_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    numba.config.CACHE_DIR = str(folder / "file")  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "ds4flow.kernels.cpu"):
        Library().build([summed])
    assert "are not kept" in caplog.text
    first, last = capsys.readouterr().err.splitlines()
    assert first == "compiling CPU kernels for this machine, once: 0/1"
    assert last.startswith("compiling CPU kernels for this machine, once: 1/1 (")
    assert last.endswith(" s, not kept)")


@pytest.mark.parametrize("arguments", [(1, 2), ("a", *[0] * 9), (1 << 70, *[0] * 9)])
def test_wrong_arguments_are_python_errors(arguments: tuple[int, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        entry(release=False)(*arguments)


def test_what_is_stored_is_read_as_it_was(tmp_path: Path) -> None:
    store, stored = ObjectStore(tmp_path / "new"), Stored("f", ("numba_x",), b"\n\0code\n")
    assert store.read("f.o") is None
    assert store.write("f.o", stored)
    assert store.read("f.o") == stored


def test_functions_that_raise_are_found_in_assembly() -> None:
    assembly = "declare void @numba_do_raise(ptr)\ndeclare void @memcpy(ptr)\ncall @numba_other()"
    assert raising(assembly) == ("numba_do_raise",)
