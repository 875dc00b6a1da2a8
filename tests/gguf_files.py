"""GGUF files written byte by byte, so that tests can also write wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4flow.gguf import GgufFile

FORMS = {
    "UINT8": "<B",
    "INT8": "<b",
    "UINT16": "<H",
    "INT16": "<h",
    "UINT32": "<I",
    "INT32": "<i",
    "UINT64": "<Q",
    "INT64": "<q",
    "FLOAT32": "<f",
    "FLOAT64": "<d",
    "BOOL": "<?",
}


@dataclass(frozen=True)
class As:
    """A metadata value of an explicit type; a list becomes an array of that type."""

    kind: str
    value: object


@dataclass(frozen=True)
class Raw:
    """A tensor as stored: type name, shape in torch order, bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "BOOL"
    if isinstance(value, int):
        return "UINT32" if 0 <= value < 1 << 32 else "INT64"
    return "FLOAT32" if isinstance(value, float) else "STRING"


def payload(kind: str, value: object) -> bytes:
    return string(value) if kind == "STRING" else struct.pack(FORMS[kind], value)  # type: ignore


def encode(value: object) -> bytes:
    """Type and payload of one metadata value."""
    kind = None
    if isinstance(value, As):
        kind, value = value.kind, value.value
    if not isinstance(value, list):
        kind = kind or kind_of(value)
        return struct.pack("<I", GGUFValueType[kind]) + payload(kind, value)
    kind = kind or (kind_of(value[0]) if value else "UINT32")
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType[kind], len(value))
    return head + b"".join(payload(kind, v) for v in value)


def tensor(array: np.ndarray, type_name: str | None = None) -> Raw:
    """A plain tensor from an array of float32, float16, int32 or int64."""
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}
    return Raw(type_name or names[str(array.dtype)], array.shape, array.tobytes())


def bfloat16(array: np.ndarray) -> Raw:
    """A float32 array whose low halves are dropped."""
    return Raw("BF16", array.shape, (array.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def encode_file(
    metadata: Mapping[str, object],
    tensors: Mapping[str, Raw],
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """The bytes of a sound file (wrong ones are made by changing these)."""
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    out += [string(key) + encode(value) for key, value in metadata.items()]
    offset = 0
    for name, raw in tensors.items():
        kind = GGMLQuantizationType[raw.type]
        dims = raw.shape[::-1]
        out.append(string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        out.append(struct.pack("<IQ", kind, offset))
        block, size = GGML_QUANT_SIZES[kind]
        assert len(raw.data) == int(np.prod(raw.shape)) // block * size, name
        offset += -(-len(raw.data) // alignment) * alignment
    head = b"".join(out)
    body = b"".join(raw.data + b"\0" * (-len(raw.data) % alignment) for raw in tensors.values())
    return head + b"\0" * (-len(head) % alignment) + body


def write(
    path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Raw], **options: int
) -> Path:
    path.write_bytes(encode_file(metadata, tensors, **options))
    return path


def contents(path: Path) -> tuple[dict[str, object], dict[str, Raw]]:
    """Metadata and tensors of a file, to be changed and written again."""
    file = GgufFile.open(path)
    tensors = {
        name: Raw(info.type, info.shape, file.array(name).tobytes())
        for name, info in file.tensors.items()
    }
    return dict(file.metadata), tensors


def split(
    folder: Path, stem: str, metadata: Mapping[str, object], tensors: Mapping[str, Raw], count: int
) -> list[Path]:
    """Write a model as `count` shards; the first one holds the metadata and no tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    paths = []
    for number in range(count):
        mine = names[number - 1 :: count - 1] if number else []
        keys: dict[str, object] = dict(metadata) if number == 0 else {}
        keys["split.no"] = As("UINT16", number)
        keys["split.count"] = As("UINT16", count)
        keys["split.tensors.count"] = As("INT32", len(tensors))
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, keys, {name: tensors[name] for name in mine}))
    return paths
