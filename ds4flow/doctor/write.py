"""Writing a GGUF file from stored bytes.

Promise: metadata and tensors are taken over as they are stored; the file appears whole, checked and
under its name, or not at all, and never replaces another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from ds4flow.errors import Ds4FlowError
from ds4flow.gguf import GgufFile
from ds4flow.gguf_header import SCALARS

ALIGNMENT = 32
PIECE = 1 << 24  # bytes written at a time


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written: `data` are its bytes `[rows, bytes per row]`, views of a mapping."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray


def byte_rows(file: GgufFile, name: str) -> np.ndarray:
    """The bytes of a tensor along its first dimension, `[rows, bytes per row]`; a view."""
    return file.array(name).view(np.uint8).reshape(file.tensors[name].shape[0], -1)


# --- metadata values: type and payload -----------------------------------------------------------


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: GGUFValueType, value: float | bool) -> bytes:
    """A number or a bool of an explicit type."""
    return struct.pack("<I", kind) + SCALARS[kind].pack(value)


def text(value: str) -> bytes:
    """A string."""
    return struct.pack("<I", GGUFValueType.STRING) + _string(value)


def array(kind: GGUFValueType, values: Sequence[float]) -> bytes:
    """A list of numbers of an explicit type."""
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(values))
    return head + b"".join(SCALARS[kind].pack(value) for value in values)


def stored_pairs(file: GgufFile) -> dict[str, bytes]:
    """Every metadata key with the bytes of its type and value.

    The header has been validated at opening, so lengths are not checked again.
    """
    starts = [info.offset for info in file.tensors.values() if info.shard == 0]
    with file.shards[0].open("rb") as stream:
        data = stream.read(min(starts, default=-1))
    count = struct.unpack_from("<Q", data, 16)[0]
    at, pairs = 24, {}
    for _ in range(count):
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length].decode()
        start = at + 8 + length
        at = _end_of_value(data, start + 4, struct.unpack_from("<I", data, start)[0])
        pairs[key] = data[start:at]
    return pairs


def _end_of_value(data: bytes, at: int, kind: int) -> int:
    """Where the value of a type that starts at `at` ends."""
    if kind == GGUFValueType.STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != GGUFValueType.ARRAY:
        return at + SCALARS[kind].size
    element, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if element in SCALARS:
        return at + int(count) * SCALARS[element].size
    for _ in range(count):
        at = _end_of_value(data, at, element)
    return at


# --- the file ------------------------------------------------------------------------------------


def write_file(target: Path, pairs: Mapping[str, bytes], tensors: list[StoredTensor]) -> None:
    """Write a GGUF file under another name beside `target`, check it, and give it its name.

    `pairs` maps metadata keys to type and payload. Raises Ds4FlowError when `target` exists or
    cannot be written; nothing is left behind then.
    """
    if os.path.lexists(target):
        raise Ds4FlowError(f"{target} exists and is not overwritten", "choose another file name")
    if not target.parent.is_dir():
        raise Ds4FlowError(f"there is no folder {target.parent}", "make it, or choose another one")
    size = sum(tensor.data.size for tensor in tensors)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part.gguf")
    try:
        free = shutil.disk_usage(target.parent).free
        if size > free:
            raise Ds4FlowError(
                f"{target} needs {size} bytes, {free} are free in {target.parent}",
                "make room there",
            )
        with partial.open("xb") as stream:
            _write_header(stream, pairs, tensors)
            for tensor in tensors:
                for piece in _pieces(tensor.data):
                    stream.write(piece)
                stream.write(bytes(-tensor.data.size % ALIGNMENT))
            stream.flush()
            os.fsync(stream.fileno())
        _check_written(partial, tensors)
        _name(partial, target)
    except OSError as error:
        raise Ds4FlowError(
            f"{target} cannot be written: {error.strerror or error}",
            "check the folder and the disk",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _write_header(
    stream: BinaryIO, pairs: Mapping[str, bytes], tensors: list[StoredTensor]
) -> None:
    stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
    for key, value in pairs.items():
        stream.write(_string(key) + value)
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        kind = GGMLQuantizationType[tensor.type]
        stream.write(
            _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        )
        offset += tensor.data.size + -tensor.data.size % ALIGNMENT
    stream.write(bytes(-stream.tell() % ALIGNMENT))


def _pieces(data: np.ndarray) -> Iterator[bytes]:
    """The bytes of `[rows, bytes per row]` in order, about PIECE of them at a time."""
    rows = max(1, PIECE // data.shape[1])
    for start in range(0, data.shape[0], rows):
        yield data[start : start + rows].tobytes()


def _check_written(path: Path, tensors: list[StoredTensor]) -> None:
    """Every tensor must read back with the bytes that were meant."""
    written = GgufFile.open(path)
    for tensor in tensors:
        info = written.tensors[tensor.name]
        pairs = zip(_pieces(byte_rows(written, tensor.name)), _pieces(tensor.data), strict=True)
        if (info.type, info.shape) != (tensor.type, tensor.shape) or any(a != b for a, b in pairs):
            raise Ds4FlowError(
                f"{path}: {tensor.name} does not read back as it was written", "check the disk"
            )


def _name(partial: Path, target: Path) -> None:
    """Give `partial` its name, without ever replacing a file that came there meanwhile."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise Ds4FlowError(
            f"{target} exists and is not overwritten", "choose another file name"
        ) from None
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise Ds4FlowError(
                f"{target} exists and is not overwritten", "choose another file name"
            ) from None
        os.rename(partial, target)
