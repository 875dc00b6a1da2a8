"""Hub files on the disk: what is asked for, what has arrived, and what has been verified.

A partial file has a name that no model has, and a verification is believed only while the file
still has the size and the modification time that it was verified with.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from ds4flow.errors import Ds4FlowError

SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 22


@dataclass(frozen=True)
class HubFile:
    """One file of a hub repository; `sha256` (hex) and `size` (bytes) pin its contents if given.

    `filename` is the path inside the repository; the file is stored under its last part, `name`.
    """

    repo: str
    filename: str
    revision: str = "main"
    sha256: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        path = PurePosixPath(self.filename)
        if not path.name or path.is_absolute() or ".." in path.parts or "\\" in self.filename:
            raise Ds4FlowError(
                f"{self.filename!r} is not the name of a file in a hub repository",
                "give the path of the file inside the repository, like model-q2.gguf",
            )
        if self.sha256 is not None:
            object.__setattr__(self, "sha256", self.sha256.lower())
            if not SHA256.fullmatch(self.sha256):
                raise Ds4FlowError(
                    f"the SHA-256 of {self.filename} is {self.sha256!r}",
                    "give 64 hexadecimal digits, or leave it out",
                )

    @property
    def name(self) -> str:
        """The name under which the file is stored."""
        return PurePosixPath(self.filename).name

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f" at revision {self.revision}"
        return f"{self.repo}/{self.filename}{at}"


@dataclass(frozen=True)
class Verified:
    """What `NAME.verified.json` says: these bytes were checked when the file looked like this."""

    repo: str
    filename: str
    revision: str
    sha256: str
    size: int
    mtime_ns: int

    @staticmethod
    def path(target: Path) -> Path:
        """Where the note on `target` lies."""
        return target.with_name(f"{target.name}.verified.json")

    @classmethod
    def read(cls, target: Path) -> Verified | None:
        """The note on `target`, or None if there is none that fits the file as it is now."""
        try:
            note = cls(**json.loads(cls.path(target).read_text(encoding="utf-8")))
            now = target.stat()
        except (OSError, ValueError, TypeError):
            return None
        same = target.is_file() and (note.size, note.mtime_ns) == (now.st_size, now.st_mtime_ns)
        return note if same else None

    @classmethod
    def write(cls, target: Path, file: HubFile, sha256: str) -> None:
        """Note in one step that `target`, as it is now, is `file` and has this digest."""
        now = target.stat()
        size, mtime_ns = now.st_size, now.st_mtime_ns
        note = cls(file.repo, file.filename, file.revision, sha256, size, mtime_ns)
        path = cls.path(target)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(asdict(note), indent=2) + "\n", encoding="utf-8")
        os.replace(fresh, path)

    def covers(self, file: HubFile) -> bool:
        """Whether this note answers for `file`: same digest if pinned, else same origin."""
        if file.size not in (None, self.size):
            return False
        if file.sha256 is not None:
            return self.sha256 == file.sha256
        origin = (file.repo, file.filename, file.revision)
        return (self.repo, self.filename, self.revision) == origin


def size_text(size: int) -> str:
    """`size` bytes for people: 999 B, 3.8 GB (decimal units, as the hub shows them)."""
    if size < 1000:
        return f"{size} B"
    value = size / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def hash_file(path: Path) -> str:
    """SHA-256 of the file `path`, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def disk_error(path: Path, error: OSError) -> Ds4FlowError:
    """The error for a file operation that failed, on `path` unless `error` names another file."""
    if error.filename is not None:
        path = Path(os.fsdecode(error.filename))
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return Ds4FlowError(
            f"the disk is full: cannot write {path}",
            "free some space, or choose another folder with DS4_GGUF_DIR; the next try resumes",
        )
    return Ds4FlowError(
        f"cannot write {path}: {error.strerror or error}",
        "choose a folder that you may write to, with DS4_GGUF_DIR",
    )


class PartFile:
    """The bytes of a file that have arrived so far, on disk under a name that no model has.

    What an earlier run left is kept: `length` is its size in bytes, and `digest` covers it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        self.digest = hashlib.sha256()
        try:
            # Unbuffered, so that an error belongs to the write that caused it.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise disk_error(path, error) from error
        try:
            while block := os.read(self._file, _BLOCK):
                self.digest.update(block)
                self.length += len(block)
        except OSError as error:
            os.close(self._file)
            raise disk_error(path, error) from error

    def write(self, block: bytes) -> None:
        """Append `block`; Ds4FlowError when the disk does not take it."""
        rest = memoryview(block)
        try:
            while rest:
                count = os.write(self._file, rest)
                self.digest.update(rest[:count])
                self.length += count
                rest = rest[count:]
        except OSError as error:
            raise disk_error(self.path, error) from error

    def restart(self) -> None:
        """Forget every byte."""
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        self.length = 0
        self.digest = hashlib.sha256()

    def close(self) -> None:
        """Put the bytes on the disk itself and close; Ds4FlowError when that fails."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise disk_error(self.path, error) from error
        finally:
            os.close(self._file)
