"""Run directories: numbers are never shared, files are whole, a full disk loses nothing written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from ds4flow import rundir
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.rundir import RunDir, allocate


def test_numbers_go_up_and_latest_follows(tmp_path: Path) -> None:
    template = tmp_path / "runs" / "demo" / "NNNN"
    assert [allocate(template).name for _ in range(3)] == ["0001", "0002", "0003"]
    assert (template.parent / "latest").readlink() == Path("0003")
    (template.parent / "0017").mkdir()
    (template.parent / "notes").mkdir()
    assert allocate(template).name == "0018"


def test_a_number_is_never_used_again(tmp_path: Path) -> None:
    template = tmp_path / "NNNN"
    for _ in range(3):
        last = allocate(template)
    last.rmdir()
    assert allocate(template).name == "0004"
    for path in tmp_path.glob("0*"):
        path.rmdir()
    assert allocate(template).name == "0005"


@pytest.mark.parametrize("content", [None, "", "0x10", "0001\n"])
def test_directories_count_where_the_highest_number_is_not_known(
    tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "0006").mkdir()
    if content is not None:
        (tmp_path / ".highest").write_text(content)
    assert allocate(tmp_path / "NNNN").name == "0007"
    assert [path.name for path in tmp_path.glob(".highest*")] == [".highest"]


def test_a_process_that_is_late_does_not_lower_the_highest_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def raced(self: Path, target: Path) -> Path:
        if self.name.startswith(".highest") and not (tmp_path / "0002").exists():
            (tmp_path / "0002").mkdir()
            (tmp_path / ".highest").write_text("0002\n")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", raced)
    assert allocate(tmp_path / "NNNN").name == "0001"
    assert (tmp_path / ".highest").read_text() == "0002\n"


def test_a_number_that_another_process_took_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def raced(self: Path, *args: object, **options: object) -> None:
        if self.name == "0001" and not self.exists():
            mkdir(self)
        mkdir(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", raced)
    assert allocate(tmp_path / "NNNN").name == "0002"


def _allocate_and_mark(template: Path, barrier, names) -> None:  # type: ignore[no-untyped-def]
    barrier.wait()
    path = allocate(template)
    run = RunDir.create(path)
    run.write("mine.txt", str(os.getpid()))
    names.put((path.name, os.getpid()))


def test_report_59_eight_processes_at_once_get_eight_directories(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(8), context.Queue()
    jobs = [
        context.Process(target=_allocate_and_mark, args=(tmp_path / "NNNN", barrier, names))
        for _ in range(8)
    ]
    for job in jobs:
        job.start()
    found = dict(names.get(timeout=60) for _ in jobs)
    for job in jobs:
        job.join()
    assert len(found) == 8
    for name, pid in found.items():
        assert (tmp_path / name / "mine.txt").read_text() == str(pid)
        assert json.loads((tmp_path / name / "run.json").read_text())["pid"] == pid


def test_an_existing_directory_is_refused_unless_empty(tmp_path: Path) -> None:
    assert allocate(tmp_path / "new") == tmp_path / "new"
    assert allocate(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new" / "file").touch()
    with pytest.raises(UsageError, match="exists and is not empty"):
        allocate(tmp_path / "new")


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder must be")
    with pytest.raises(Ds4FlowError, match="cannot write"):
        allocate(tmp_path / "runs" / "demo" / "NNNN")


def test_one_directory_holds_one_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path)
    with pytest.raises(UsageError, match="already holds a run"):
        RunDir.create(tmp_path)


def test_statuses(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, {"identity": "exact"})
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["status"] == "running"
    assert facts["identity"] == "exact"
    run.finish("interrupted", "KeyboardInterrupt: ")
    run.finish("complete")
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["status"] == "interrupted"
    assert facts["error"].startswith("KeyboardInterrupt")
    assert facts["ended"] >= facts["started"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


class _FullDisk:
    """Writes fail with ENOSPC once `room` bytes are used up."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.write(descriptor, bytes(data)[: self.room])
        self.room -= written
        return written


def test_a_full_disk_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path)
    monkeypatch.setattr(rundir.os, "write", _FullDisk(25))
    for number in range(2):
        run.append_json("cycles.jsonl", {"cycle": number})
    with pytest.raises(Ds4FlowError, match="No space left"):
        run.append_json("cycles.jsonl", {"cycle": 2})
    lines = (tmp_path / "cycles.jsonl").read_text().splitlines()
    assert [json.loads(line)["cycle"] for line in lines] == [0, 1]
    monkeypatch.undo()
    run.finish("failed", "no space")
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


def test_an_atomic_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path)
    run.write("notes.txt", "old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rundir.os, "fsync", fail)
    with pytest.raises(Ds4FlowError, match="No space left"):
        run.write("notes.txt", "new")
    assert (tmp_path / "notes.txt").read_text() == "old"
    assert not list(tmp_path.glob(".notes*"))


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path)
    write = os.write
    monkeypatch.setattr(rundir.os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    run.append("output.txt", "grüße 🦜\n")
    assert (tmp_path / "output.txt").read_text(encoding="utf-8") == "grüße 🦜\n"
