"""The header of one GGUF file: metadata as plain values and where each tensor lies.

Promise: no length is trusted before it is compared with the bytes that are there, so a damaged
header costs bounded time and memory and ends in a ModelFileError naming file, place and reason.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4flow.errors import ModelFileError, TruncatedFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MIN_ALIGNMENT = 8  # the format asks for a multiple of 8, which also aligns every typed view
GET_AGAIN = "download the file again, or compare its size and sha256 with the published ones"

# Far above any real file (10 MB, 0.4 million elements and 1328 tensors for V4), so that a damaged
# length ends the reading at once instead of after minutes.
HEADER_LIMIT = 256 << 20
NAME_LIMIT = 65535
PAIR_LIMIT = 1 << 16
TENSOR_LIMIT = 1 << 17
ELEMENT_LIMIT = 1 << 21
NESTING_LIMIT = 4

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
_U32, _U64 = SCALARS[GGUFValueType.UINT32], SCALARS[GGUFValueType.UINT64]


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes `offset ..` of shard number `shard`.

    `shape` is in torch order (slowest dimension first), `type` a ggml name such as "Q8_0".
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int = 0


def what_it_is(start: bytes) -> tuple[str, str] | None:
    """(what a file that is not GGUF seems to be, what to do), judged by its first bytes."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the model itself", "run `git lfs pull` in its repository"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--")):
        return "a web page, not a model", "check the address; the site may want a login"
    if text.startswith((b"{", b"[")):
        return "JSON text, not a model", "read it: it may be the server's error message"
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
        return "zeros where the header should be", "the download is incomplete; start it again"
    return None


class Header:
    """Parses the header of `data`, the bytes of the file `path`.

    Afterwards `metadata` holds str, int, float, bool and lists of them, and `tensors` one entry per
    tensor, each inside the file and none over another.
    """

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.metadata: dict[str, object] = {}
        self.tensors: list[TensorInfo] = []
        self._data = data
        self._size = len(data)
        self._at = 0
        self._elements = 0
        self._read_magic()
        tensor_count = self._number(_U64, "tensor count")
        pair_count = self._number(_U64, "metadata count")
        self._check_count(pair_count, PAIR_LIMIT, 13, "metadata count")
        self._check_count(tensor_count, TENSOR_LIMIT, 33, "tensor count")
        for index in range(pair_count):
            key = self._string(f"name of metadata key {index + 1} of {pair_count}", NAME_LIMIT)
            if key in self.metadata:
                self._fail(f"metadata key {key!r} is there twice")
            self.metadata[key] = self._value(self._number(_U32, f"type of {key}"), key)
        self.tensors = self._place([self._entry(i, tensor_count) for i in range(tensor_count)])

    # --- bytes ---

    def _fail(self, reason: str, fix: str = GET_AGAIN) -> NoReturn:
        raise ModelFileError(f"{self.path}: {reason} (at byte {self._at})", fix)

    def _ends_early(self, what: str, needed: int) -> NoReturn:
        raise TruncatedFileError(
            f"{self.path}: the file ends inside its header, in {what} at byte {self._at}; "
            f"expected at least {needed} bytes, found {self._size}",
            GET_AGAIN,
        )

    def _take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        end = self._at + count
        if end > HEADER_LIMIT:
            self._fail(f"{what} claims {count} bytes, more than any model's header has")
        if end > self._size:
            self._ends_early(what, end)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _check_count(self, count: int, most: int, least_bytes: int, what: str) -> None:
        """A number of entries must be plausible and fit, at `least_bytes` each, into the file."""
        if count > most:
            self._fail(f"{what} is {count}, more than any model has")
        if self._at + count * least_bytes > self._size:
            self._ends_early(f"the entries after {what} {count}", self._at + count * least_bytes)

    # --- values ---

    def _read_magic(self) -> None:
        start = bytes(self._data[:64])
        if len(start) < len(MAGIC) and MAGIC.startswith(start):
            self._ends_early("the magic", len(MAGIC))
        if start[:4] != MAGIC:
            known = what_it_is(start)
            if known:
                raise ModelFileError(f"{self.path} is {known[0]}", known[1])
            raise ModelFileError(
                f"{self.path} is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}",
                "give the path of a .gguf file",
            )
        self._at = len(MAGIC)
        version = self._number(_U32, "version")
        if version in VERSIONS:
            return
        if version and version & 0xFFFF == 0:
            self._fail("this is a big-endian GGUF file", "convert it to little endian")
        self._fail(
            f"GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read",
            "get a current GGUF version of the model",
        )

    def _number(self, form: struct.Struct, what: str) -> int:
        return int(form.unpack(self._take(form.size, what))[0])

    def _string(self, what: str, longest: int = HEADER_LIMIT) -> str:
        length = self._number(_U64, f"length of {what}")
        if length > longest:
            self._fail(f"{what} claims {length} bytes, more than any model has")
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
        form = SCALARS[kind]
        value = form.unpack(self._take(form.size, key))[0]
        return bool(value) if kind == GGUFValueType.BOOL else value

    def _list(self, key: str, depth: int) -> list[object]:
        kind = self._number(_U32, f"element type of {key}")
        count = self._number(_U64, f"length of {key}")
        nested = kind == GGUFValueType.ARRAY
        if not (kind in SCALARS or nested or kind == GGUFValueType.STRING):
            self._fail(f"{key} has the unknown element type {kind}")
        least = SCALARS[kind].size if kind in SCALARS else 12 if nested else 8
        if nested and depth >= NESTING_LIMIT:
            self._fail(f"{key} has lists in lists to a depth that no model has")
        self._check_count(count, ELEMENT_LIMIT - self._elements, least, f"length of {key}")
        self._elements += count
        if kind == GGUFValueType.STRING:
            return self._strings(key, count)
        if nested:
            return [self._value(kind, f"{key}[{i}]", depth + 1) for i in range(count)]
        raw = self._take(count * least, key)
        values = struct.unpack(f"<{count}{SCALARS[kind].format[1:]}", raw)
        return [bool(v) for v in values] if kind == GGUFValueType.BOOL else list(values)

    def _strings(self, key: str, count: int) -> list[object]:
        """Vocabularies have a hundred thousand entries, so the sound case is one tight loop."""
        values: list[object] = []
        data, at, unpack = self._data, self._at, _U64.unpack_from
        last = min(self._size, HEADER_LIMIT)
        for _ in range(count):
            start = at + 8
            end = start + unpack(data, at)[0] if start <= last else last + 1
            if end > last:
                break
            try:
                values.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError:
                break
            at = end
        self._at = at
        while len(values) < count:  # only after a fault: say exactly which one
            values.append(self._string(f"{key}[{len(values)}]"))
        return values

    # --- tensors ---

    def _entry(self, index: int, total: int) -> TensorInfo:
        """One entry of the tensor list; its offset still counts from the start of the data."""
        name = self._string(f"name of tensor {index + 1} of {total}", NAME_LIMIT)
        rank = self._number(_U32, f"rank of tensor {name}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            self._fail(f"tensor {name} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        dims = struct.unpack(f"<{rank}Q", self._take(8 * rank, f"shape of tensor {name}"))
        kind = self._number(_U32, f"type of tensor {name}")
        offset = self._number(_U64, f"offset of tensor {name}")
        known = _KINDS.get(kind)
        if known is None:
            self._fail(f"tensor {name} has the unknown type {kind}", "get a file with other types")
        block, block_bytes = GGML_QUANT_SIZES[known]
        count = 1
        for dim in dims:
            count *= dim
        if count == 0:
            self._fail(f"tensor {name} has a dimension of 0: {dims[::-1]}")
        if dims[0] % block:
            self._fail(
                f"tensor {name}: a row of {dims[0]} weights is not a multiple of the {block} of a "
                f"{known.name} block"
            )
        return TensorInfo(name, known.name, dims[::-1], offset, count // block * block_bytes)

    def _place(self, entries: list[TensorInfo]) -> list[TensorInfo]:
        """The entries with offsets from the start of the file, checked against its size."""
        alignment = self.metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < MIN_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            self._fail(f"general.alignment is {alignment!r}, not a power of two from 8")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in placed:
                self._fail(f"tensor {entry.name} is there twice")
            if entry.offset % alignment:
                self._fail(
                    f"tensor {entry.name} has the offset {entry.offset}, not a multiple of the "
                    f"alignment {alignment}"
                )
            placed[entry.name] = replace(entry, offset=start + entry.offset)
        in_order = sorted(placed.values(), key=lambda info: info.offset)
        for before, after in pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                self._fail(f"tensors {before.name} and {after.name} overlap")
        end = in_order[-1].offset + in_order[-1].nbytes if in_order else 0
        if end > self._size:
            raise TruncatedFileError(
                f"{self.path} is cut off: expected at least {end} bytes, found {self._size} "
                f"(tensor {in_order[-1].name} ends last)",
                "finish or repeat the download",
            )
        return list(placed.values())


_KINDS = {kind.value: kind for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}
