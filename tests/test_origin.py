"""Where a run came from: the recorded patch on the recorded revision gives the tree that ran."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ds4flow import origin


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "__init__.py").write_text("one\n")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def tree_of(folder: Path) -> str:
    git(folder, "add", "-A")
    return git(folder, "write-tree")


def test_report_67_the_patch_reproduces_a_dirty_tree(repository: Path, tmp_path: Path) -> None:
    (repository / "__init__.py").write_text("two\n")
    (repository / "binary").write_bytes(b"\x00\xff" * 99)
    (repository / "new file ü.py").write_text("new\n")
    (repository / "sub").mkdir()
    (repository / "sub" / "raw").write_bytes(b"\x00\x01")
    (repository / "ignored").write_text("left out")
    facts, patch = origin.source_tree(repository)
    assert facts["dirty"] is True
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    git(clone, "checkout", "-q", facts["revision"])
    (tmp_path / "source.patch").write_bytes(patch)
    git(clone, "apply", str(tmp_path / "source.patch"))
    assert tree_of(clone) == tree_of(repository)


def test_a_clean_tree_has_no_patch(repository: Path) -> None:
    facts, patch = origin.source_tree(repository)
    assert facts["dirty"] is False
    assert facts["revision"] == git(repository, "rev-parse", "HEAD")
    assert patch == b""


def test_large_untracked_files_are_named_instead(repository: Path) -> None:
    (repository / "model.gguf").write_bytes(bytes((1 << 20) + 1))
    facts, patch = origin.source_tree(repository)
    assert facts["untracked_not_in_patch"] == ["model.gguf"]
    assert facts["dirty"] is True
    assert patch == b""


def test_report_67_outside_a_repository_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts, patch = origin.source_tree(tmp_path)
    assert facts["revision"] is None
    assert "not in a git repository" in facts["note"]
    assert patch == b""


def test_a_missing_git_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert origin.source_tree(tmp_path)[0]["revision"] is None


def test_versions_and_machine() -> None:
    assert origin.versions()["torch"]
    assert origin.machine()["cores"]
