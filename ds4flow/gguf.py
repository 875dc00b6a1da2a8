"""Memory-mapped, validated, read-only GGUF files, split ones included.

Promise: a file either opens with every tensor inside its bytes, or fails with a ModelFileError naming
the file, the place and the reason. No length read from a file is trusted before it is compared with the
bytes that are there, and no tensor is read at open.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4flow.errors import ModelFileError, TruncatedFileError, near_match

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT = 256 << 20  # bytes; the header of the largest published models is about 10 MB
ELEMENT_LIMIT = 1 << 23  # metadata array elements in all; a vocabulary of 129280 has 0.4 million
NESTING_LIMIT = 4
MAX_DIMENSIONS = 4
MIN_ALIGNMENT = 8  # the format asks for a multiple of 8, which also aligns every typed view

SCALARS: Mapping[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
    GGUFValueType.BOOL: struct.Struct("<B"),
}
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
GET_AGAIN = "download the file again, or compare its size and sha256 with the published ones"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: shape in torch order (slowest first), bytes `offset ..` of shard `shard`."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int = 0


class GgufFile:
    """One model file, or all shards of a split one; nothing is copied until a tensor is asked for.

    `path` is the file (of a split model: its first shard), `size` the bytes of all shards together,
    `metadata` plain python values (str, int, float, bool, list), `tensors` name to TensorInfo.
    """

    def __init__(self, parts: list[_Part]) -> None:
        self.path: Path = parts[0].path
        self.shards: tuple[Path, ...] = tuple(part.path for part in parts)
        self.size: int = sum(part.data.size for part in parts)
        self.metadata: Mapping[str, object] = MappingProxyType(parts[0].metadata)
        tensors: dict[str, TensorInfo] = {}
        for index, part in enumerate(parts):
            for info in part.tensors:
                if info.name in tensors:
                    first = parts[tensors[info.name].shard].path
                    raise ModelFileError(
                        f"{part.path}: tensor {info.name} is already in {first.name}",
                        "the shards belong to different models; get all of them from one place",
                    )
                tensors[info.name] = replace(info, shard=index)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._data = [part.data for part in parts]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Open a file, any shard of a split model, or a folder that holds exactly one model.

        Raises ModelFileError, or TruncatedFileError when bytes are missing at the end.
        """
        found = _locate(Path(path).expanduser())
        shards = _shard_paths(found)
        parts = [_Part(shard) for shard in shards]
        _check_split(parts, named=len(shards) > 1 or bool(SHARD_NAME.fullmatch(found.name)))
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
                near_match(name, self.tensors) or "use the file that this model needs",
            )
        raw = self._data[info.shard][info.offset : info.offset + info.nbytes]
        if info.type in PLAIN_TYPES:
            return raw.view(PLAIN_TYPES[info.type]).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], -1)

    def sha256(self) -> str:
        """Hex digest of the file's bytes (of all shards in order, for a split model), streamed.

        Cached in this process by path, size and time of change of every shard.
        """
        key = tuple((str(p.resolve()), *_size_and_time(p)) for p in self.shards)
        if key not in _DIGESTS:
            digest = hashlib.sha256()
            for shard in self.shards:
                with shard.open("rb") as stream:
                    while block := stream.read(1 << 22):
                        digest.update(block)
            _DIGESTS[key] = digest.hexdigest()
        return _DIGESTS[key]


_DIGESTS: dict[tuple[tuple[str, int, int], ...], str] = {}


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# --- finding the files ---------------------------------------------------------------------------


def _locate(path: Path) -> Path:
    """The file to read for `path`: itself, or the model of a folder."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(path) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error}", "check the path and its permissions"
        ) from None
    if stat.S_ISDIR(mode):
        return _only_model_of(path)
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path} is not a regular file", "give the path of a .gguf file")
    return path


def _not_found(path: Path) -> ModelFileError:
    if not path.parent.is_dir():
        return ModelFileError(
            f"{path} does not exist, nor does the folder {path.parent}", "check the path"
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
    names = _gguf_names(folder)
    models: dict[str, str] = {}
    for name in names:
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


def _shard_paths(path: Path) -> list[Path]:
    """All shards of the split model that `path` is one of, or just `path`."""
    match = SHARD_NAME.fullmatch(path.name)
    if not match:
        return [path]
    number, total = int(match["number"]), int(match["total"])
    if not 1 <= number <= total:
        return [path]
    present = set(_gguf_names(path.parent))
    wanted = [f"{match['stem']}-{i:05d}-of-{total:05d}.gguf" for i in range(1, total + 1)]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelFileError(
            f"{path} is one of {total} shards; missing in {path.parent}: {_listed(missing)}",
            "put all shards into one folder",
        )
    return [path.parent / name for name in wanted]


def _check_split(parts: list[_Part], named: bool) -> None:
    """Compare the shards' own numbering (0-based `split.no`) with their names (1-based)."""
    for index, part in enumerate(parts):
        number, count = part.metadata.get("split.no"), part.metadata.get("split.count")
        if count is not None and count != len(parts) and (named or count not in (0, 1)):
            raise ModelFileError(
                f"{part.path} is shard {_ordinal(number)} of {count} by its key split.count, but its "
                f"name says {'1 of 1' if len(parts) == 1 else f'{index + 1} of {len(parts)}'}",
                "give all shards their original names NAME-00001-of-0000N.gguf in one folder",
            )
        if len(parts) > 1 and number is not None and number != index:
            raise ModelFileError(
                f"{part.path} is shard {_ordinal(number)} by its key split.no, but its name says "
                f"{index + 1}",
                "give the shards their original names",
            )
    total = parts[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if len(parts) > 1 and isinstance(total, int) and total != found:
        raise ModelFileError(
            f"{parts[0].path}: split.tensors.count is {total}, the {len(parts)} shards hold {found}",
            "the shards belong to different models; get all of them from one place",
        )


def _ordinal(number: object) -> str:
    return str(number + 1) if isinstance(number, int) else "?"


def _listed(names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# --- one file ------------------------------------------------------------------------------------


class _Part:
    """One mapped file: its metadata and tensors, every offset inside the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        reader = _Header(path, self.data)
        self.metadata = reader.metadata
        self.tensors = reader.tensors


def _map(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            raise ModelFileError(f"{path} is empty", GET_AGAIN)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be mapped: {error}", "check the path and its permissions"
        ) from None


def _what_it_is(start: bytes) -> tuple[str, str] | None:
    """(what a file that is not GGUF seems to be, what to do), from its first bytes."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the model itself", "run `git lfs pull` in its repository"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return (
            "a web page, not a model",
            "the download returned a page; log in or check the address",
        )
    if text.startswith((b"{", b"[")):
        return "JSON text, not a model", "the server answered with a message; open it in an editor"
    if start[8:9] == b"{":
        return "a safetensors file", "convert it to GGUF first"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a PyTorch or zip archive", "convert it to GGUF first"
    if start.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd")):
        return "a compressed file", "unpack it first"
    if start[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg", b"ggml", b"ggjt"):
        return "a GGML file of the time before GGUF", "get a GGUF version of the model"
    if start[:4] == MAGIC[::-1]:
        return "GGUF with its bytes swapped", "convert it to little endian"
    if not any(start):
        return (
            "zero bytes where the header should be",
            "the download never wrote it; start it again",
        )
    return None


class _Header:
    """Parses the header of one mapped file; `self.at` never passes the end of the data."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data.data
        self.size = len(self.data)
        self.at = 0
        self.elements = 0
        self.metadata: dict[str, object] = {}
        self._check_magic()
        tensor_count = self._number("<Q", "tensor count")
        pair_count = self._number("<Q", "metadata count")
        self._check_count(pair_count, 13, "metadata count")
        self._check_count(tensor_count, 32, "tensor count")
        for index in range(pair_count):
            key = self._string(f"name of metadata key {index + 1} of {pair_count}", 65535)
            if key in self.metadata:
                self._fail(f"metadata key {key} is there twice")
            self.metadata[key] = self._value(self._number("<I", f"type of {key}"), key)
        entries = [self._tensor(index, tensor_count) for index in range(tensor_count)]
        self.tensors = self._place(entries)

    # --- errors ---

    def _fail(self, reason: str, fix: str = GET_AGAIN) -> NoReturn:
        raise ModelFileError(f"{self.path}: {reason} (at byte {self.at})", fix)

    def _take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes; the only place that advances."""
        if count > HEADER_LIMIT or self.at + count > HEADER_LIMIT:
            self._fail(f"{what} claims {count} bytes, more than any model header has")
        if self.at + count > self.size:
            raise TruncatedFileError(
                f"{self.path}: the file ends inside its header: {what} needs {count} bytes at byte "
                f"{self.at}; expected at least {self.at + count} bytes, found {self.size}",
                GET_AGAIN,
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def _check_count(self, count: int, least: int, what: str) -> None:
        """A count of entries of at least `least` bytes each must fit into the header limit."""
        if count * least > HEADER_LIMIT:
            self._fail(f"{what} is {count}, more than any model has")
        if self.at + count * least > self.size:
            raise TruncatedFileError(
                f"{self.path}: the file ends inside its header: {what} is {count}; expected at least "
                f"{self.at + count * least} bytes, found {self.size}",
                GET_AGAIN,
            )

    # --- fields ---

    def _check_magic(self) -> None:
        start = bytes(self.data[:64])
        if start[:4] != MAGIC:
            known = _what_it_is(start)
            if known:
                raise ModelFileError(f"{self.path} is {known[0]}", known[1])
            raise ModelFileError(
                f"{self.path} is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}",
                "give the path of a .gguf file",
            )
        self.at = 4
        version = self._number("<I", "version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0 and version:
                self._fail("this is a big-endian GGUF file", "convert it to little endian")
            self._fail(
                f"GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read",
                "get a current GGUF version of the model",
            )

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form), what))[0])

    def _string(self, what: str, longest: int = HEADER_LIMIT) -> str:
        length = self._number("<Q", f"length of {what}")
        if length > longest:
            self._fail(f"{what} claims {length} bytes, more than the format allows")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind == GGUFValueType.STRING:
            return self._string(key)
        if kind == GGUFValueType.ARRAY:
            return self._list(key, depth)
        if kind not in SCALARS:
            self._fail(f"{key} has the unknown value type {kind}")
        value = SCALARS[kind].unpack(self._take(SCALARS[kind].size, key))[0]
        return bool(value) if kind == GGUFValueType.BOOL else value

    def _list(self, key: str, depth: int) -> list:
        kind, count = self._number("<I", f"type of {key}"), self._number("<Q", f"length of {key}")
        least = SCALARS[kind].size if kind in SCALARS else 8
        self._check_count(count, least, f"length of {key}")
        self.elements += count
        if self.elements > ELEMENT_LIMIT:
            self._fail(f"{key} has {count} elements, more than any model has")
        if kind in SCALARS:
            raw = self._take(count * least, key)
            values = list(struct.unpack(f"<{count}{SCALARS[kind].format[1:]}", raw))
            return [bool(v) for v in values] if kind == GGUFValueType.BOOL else values
        if kind == GGUFValueType.ARRAY and depth >= NESTING_LIMIT:
            self._fail(f"{key} is nested too deeply")
        return [self._value(kind, f"{key}[{i}]", depth + 1) for i in range(count)]

    # --- tensors ---

    def _tensor(self, index: int, total: int) -> TensorInfo:
        """One entry of the tensor list; `offset` is still relative to the data section."""
        name = self._string(f"name of tensor {index + 1} of {total}", 65535)
        rank = self._number("<I", f"rank of {name}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            self._fail(f"tensor {name} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        dims = struct.unpack(f"<{rank}Q", self._take(8 * rank, f"shape of {name}"))
        kind = self._number("<I", f"type of {name}")
        offset = self._number("<Q", f"offset of {name}")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            known = None
        if known is None or known not in GGML_QUANT_SIZES:
            self._fail(f"tensor {name} has the unknown type {kind}", "get a file with other types")
        block, block_bytes = GGML_QUANT_SIZES[known]
        count = 1
        for dim in dims:
            count *= dim
        if count == 0:
            self._fail(f"tensor {name} has a dimension of 0: {dims[::-1]}")
        if dims[0] % block:
            self._fail(
                f"tensor {name}: rows of {dims[0]} are not a multiple of the {block} weights of a "
                f"{known.name} block"
            )
        return TensorInfo(name, known.name, dims[::-1], offset, count // block * block_bytes)

    def _place(self, entries: list[TensorInfo]) -> list[TensorInfo]:
        """Entries with offsets from the start of the file; all inside it, none over another."""
        alignment = self.metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < MIN_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            self._fail(f"general.alignment is {alignment!r}; it must be a power of two from 8")
        start = -(-self.at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in placed:
                self._fail(f"tensor {entry.name} is there twice")
            if entry.offset % alignment:
                self._fail(
                    f"tensor {entry.name} has offset {entry.offset}, not a multiple of the alignment "
                    f"{alignment}"
                )
            placed[entry.name] = replace(entry, offset=start + entry.offset)
        in_order = sorted(placed.values(), key=lambda info: info.offset)
        for before, after in zip(in_order, in_order[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                self._fail(f"tensors {before.name} and {after.name} overlap")
        if in_order and (end := in_order[-1].offset + in_order[-1].nbytes) > self.size:
            raise TruncatedFileError(
                f"{self.path} is cut off: its header describes {end} bytes, the file has {self.size} "
                f"(tensor {in_order[-1].name} ends last)",
                "finish or repeat the download",
            )
        return list(placed.values())
