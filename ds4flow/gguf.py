"""Memory-mapped, validated, read-only GGUF files, split ones included.

Promise: a file either opens with every tensor inside its bytes or fails with a ModelFileError that
names the file and the reason; no tensor is read at open and none is ever copied.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ds4flow.errors import ModelFileError, near_match
from ds4flow.gguf_header import GET_AGAIN, Header, TensorInfo

__all__ = ["PLAIN_TYPES", "GgufFile", "TensorInfo"]

PLAIN_TYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.ASCII)
ONE_SOURCE = "the shards belong to different models; get all of them from one place"


class GgufFile:
    """One model file, or all shards of a split one.

    `path` is the file (of a split model: its first shard), `size` the bytes of all shards together,
    `metadata` plain python values (str, int, float, bool, list), `tensors` name to TensorInfo.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.path: Path = parts[0].path
        self.shards: tuple[Path, ...] = tuple(part.path for part in parts)
        self.size: int = sum(part.data.size for part in parts)
        self.metadata: Mapping[str, object] = MappingProxyType(parts[0].metadata)
        tensors: dict[str, TensorInfo] = {}
        for index, part in enumerate(parts):
            for info in part.tensors:
                if info.name in tensors:
                    first = self.shards[tensors[info.name].shard].name
                    raise ModelFileError(
                        f"{part.path}: tensor {info.name} is already in {first}", ONE_SOURCE
                    )
                tensors[info.name] = replace(info, shard=index)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._data = [part.data for part in parts]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Open a file, any shard of a split model, or a folder that holds exactly one model.

        Raises ModelFileError, or TruncatedFileError when bytes are missing at the end.
        """
        parts = [_Part(shard) for shard in _shard_paths(_locate(path))]
        _check_split(parts)
        return cls(parts)

    def array(self, name: str) -> np.ndarray:
        """A read-only view of one tensor, in torch order.

        Plain types come typed (BF16 as uint16); block types as uint8 `[.., rows, bytes per row]`.
        Raises ModelFileError for a name that is not there.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(
                f"{self.path}: there is no tensor {name}",
                near_match(name, self.tensors) or "give a file that holds it",
            )
        raw = self._data[info.shard][info.offset : info.offset + info.nbytes]
        if info.type in PLAIN_TYPES:
            return raw.view(PLAIN_TYPES[info.type]).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], -1)

    def sha256(self) -> str:
        """Hex digest of the file's bytes (of all shards in order, for a split model), streamed.

        Kept in this process by path, size and time of change of every shard.
        """
        try:
            key = tuple((str(p.resolve()), *_size_and_time(p)) for p in self.shards)
            if key not in _DIGESTS:
                digest = hashlib.sha256()
                for shard in self.shards:
                    with shard.open("rb") as stream:
                        while block := stream.read(1 << 22):
                            digest.update(block)
                _DIGESTS[key] = digest.hexdigest()
            return _DIGESTS[key]
        except OSError as error:
            raise _unreadable(self.path, error) from None


_DIGESTS: dict[tuple[tuple[str, int, int], ...], str] = {}


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class _Part:
    """One mapped file with its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        header = Header(path, self.data.data)
        self.metadata = header.metadata
        self.tensors = header.tensors


def _map(path: Path) -> np.ndarray:
    """The bytes of a file as a read-only uint8 array on a shared mapping."""
    try:
        status = path.stat()
        # opening a pipe or a device could wait for ever
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file", "give the path of a .gguf file")
        if status.st_size == 0:
            raise ModelFileError(f"{path} is empty", GET_AGAIN)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ModelFileError:
    reason = getattr(error, "strerror", None) or str(error)
    return ModelFileError(f"{path} cannot be read: {reason}", "check the path and its permissions")


# --- finding the files ---------------------------------------------------------------------------


def _locate(given: str | Path) -> Path:
    """The file to read for a path: itself, or the model in a folder."""
    if not str(given):
        raise ModelFileError("the path of the model is empty", "give the path of a .gguf file")
    path = Path(given)
    try:
        path = path.expanduser()
        if stat.S_ISDIR(path.stat().st_mode):
            return _only_model_of(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(path) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(path, error) from None
    return path


def _not_found(path: Path) -> ModelFileError:
    if not path.parent.is_dir():
        return ModelFileError(
            f"{path} does not exist, and there is no folder {path.parent}", "check the path"
        )
    names = _gguf_names(path.parent)
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        fix = f"did you mean {' or '.join(close)}?"
    elif names:
        fix = f"{path.parent} has: {_listed(names)}"
    else:
        fix = f"there is no .gguf file in {path.parent}; check the path"
    return ModelFileError(f"{path} does not exist", fix)


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf")
    except OSError:
        return []


def _only_model_of(folder: Path) -> Path:
    models: dict[str, str] = {}
    for name in _gguf_names(folder):
        match = SHARD_NAME.fullmatch(name)
        models.setdefault(f"{match['stem']} of {match['total']}" if match else name, name)
    if not models:
        raise ModelFileError(
            f"{folder} is a folder without a .gguf file", "give the path of a .gguf file"
        )
    if len(models) > 1:
        raise ModelFileError(
            f"{folder} is a folder with {len(models)} models",
            f"give the path of one of: {_listed(sorted(models.values()))}",
        )
    return folder / next(iter(models.values()))


def _listed(names: Sequence[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _shard_paths(path: Path) -> list[Path]:
    """All shards of the split model that `path` is one of, or just `path`."""
    match = SHARD_NAME.fullmatch(path.name)
    if not match or not 1 <= int(match["number"]) <= int(match["total"]):
        return [path]
    total = int(match["total"])
    present = set(_gguf_names(path.parent)) | {path.name}
    wanted = [f"{match['stem']}-{i:05d}-of-{total:05d}.gguf" for i in range(1, total + 1)]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelFileError(
            f"{path} is one of {total} shards; missing in {path.parent}: {_listed(missing, 100)}",
            "put all shards into one folder",
        )
    return [path.parent / name for name in wanted]


def _check_split(parts: Sequence[_Part]) -> None:
    """Compare the shards' own numbering (`split.no` counts from 0) with their names (from 1)."""
    for index, part in enumerate(parts):
        number, count = part.metadata.get("split.no"), part.metadata.get("split.count")
        if isinstance(count, int) and max(count, 1) != len(parts):
            raise ModelFileError(
                f"{part.path} says that it is one of {count} shards (split.count), but by its name "
                f"there are {len(parts)}",
                "give all shards their original names, NAME-00001-of-0000N.gguf, in one folder",
            )
        if len(parts) > 1 and isinstance(number, int) and number != index:
            raise ModelFileError(
                f"{part.path} says that it is shard {number + 1} (split.no), its name {index + 1}",
                "give the shards their original names",
            )
    total = parts[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if len(parts) > 1 and isinstance(total, int) and total != found:
        raise ModelFileError(
            f"{parts[0].path}: split.tensors.count is {total}, but the {len(parts)} shards hold "
            f"{found} tensors",
            ONE_SOURCE,
        )
