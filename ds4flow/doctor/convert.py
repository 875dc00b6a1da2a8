"""One MTP layout into the other, by bytes.

Promise: no weight is decoded or rounded, so that converting back gives the same tensor bytes; the
new file appears whole or not at all and never replaces another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4flow.errors import Ds4FlowError, ModelFileError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.gguf_header import SCALARS
from ds4flow.model.config import ARCHITECTURE, SUPPORT_ARCHITECTURE, ModelConfig

ALIGNMENT = 32
PIECE = 1 << 24  # bytes written at a time
SUPPORT = "mtp.0."
RENAMED = {"enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "norm": "nextn.shared_head_norm"}
ROOT = ("token_embd.weight", "output.weight", "output_norm.weight")
"""Tensors of the trunk that a sidecar repeats."""
NO_PLACE = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be written: `data` are its bytes `[rows, bytes per row]`, views of a mapping."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray


def convert_mtp(
    source: GgufFile, target: Path, layout: Literal["mtp.0", "nextn"], main: GgufFile | None = None
) -> Path:
    """Write the MTP block of `source` to the new file `target` in `layout`; return `target`.

    "nextn" (llama.cpp's sidecar) needs `main`, the main file, for the configuration, the tokenizer
    and the copies of the trunk's embedding, output matrix and norm. Raises UsageError for a request
    that makes no sense, ModelFileError for a block that is incomplete or has parts without a place
    in the other layout, Ds4FlowError when the file cannot be written.
    """
    # it imports torch, which nothing else here needs
    from ds4flow.model.slots import check_trunk
    from ds4flow.model.weights import find_mtp_layout, load_mtp

    found = find_mtp_layout(source)
    if found == layout:
        raise UsageError(f"{source.path} has the layout {layout} already", "use it as it is")
    if main is None and layout == "nextn":
        raise UsageError(
            "a sidecar in the nextn layout repeats parts of the main file, which was not given",
            "give the main file as well",
        )
    if found == "nextn" and "blk.0.attn_norm.weight" in source.tensors:
        raise ModelFileError(
            f"{source.path} holds trunk and MTP block: its hyper-connection head is the trunk's, "
            "so the block is incomplete",
            "convert a sidecar, a file that holds nothing but the block",
        )
    config = ModelConfig.from_gguf(source if main is None else main)
    if main is not None:
        check_trunk(main, config)
    load_mtp(source, config, main)  # complete, and made for this model
    if main is None or layout == "mtp.0":
        tensors, pairs = _support_tensors(source, config, main), _support_pairs(source)
    else:
        tensors, pairs = _sidecar_tensors(source, config, main), _sidecar_pairs(main, config)
    _write(Path(target), pairs, tensors)
    return Path(target)


# --- tensors -------------------------------------------------------------------------------------


def _rows(file: GgufFile, name: str) -> np.ndarray:
    """The bytes of a tensor along its first dimension, `[rows, bytes per row]`; a view."""
    return file.array(name).view(np.uint8).reshape(file.tensors[name].shape[0], -1)


def _copied(file: GgufFile, name: str, new_name: str | None = None) -> _Tensor:
    info = file.tensors[name]
    return _Tensor(new_name or name, info.type, info.shape, _rows(file, name))


def _sidecar_tensors(source: GgufFile, config: ModelConfig, main: GgufFile) -> list[_Tensor]:
    """The tensors of a sidecar from those of a support file."""
    e, h = source.tensors[f"{SUPPORT}e_proj.weight"], source.tensors[f"{SUPPORT}h_proj.weight"]
    if e.type != h.type:
        raise ModelFileError(
            f"{source.path}: {e.name} is {e.type} and {h.name} is {h.type}; joined they would have "
            "one type",
            "get a file with the same type for both",
        )
    block = f"blk.{config.layers}."
    tensors = [_copied(main, name) for name in ROOT]
    joined = np.concatenate((_rows(source, e.name), _rows(source, h.name)), axis=1)
    tensors.append(
        _Tensor(f"{block}nextn.eh_proj.weight", e.type, (e.shape[0], 2 * e.shape[1]), joined)
    )
    for name in source.tensors:
        stem, _, end = name.removeprefix(SUPPORT).rpartition(".")
        if name in (e.name, h.name):
            continue
        if not name.startswith(SUPPORT):
            raise _no_place(source, name, "nextn")
        if stem.startswith("hc_head_"):
            new = f"output_hc_{stem.removeprefix('hc_head_')}"
        else:
            new = block + RENAMED.get(stem, stem)
        tensors.append(_copied(source, name, f"{new}.{end}"))
    return tensors


def _support_tensors(source: GgufFile, config: ModelConfig, main: GgufFile | None) -> list[_Tensor]:
    """The tensors of a support file from those of a sidecar."""
    block = f"blk.{config.layers}."
    info = source.tensors[f"{block}nextn.eh_proj.weight"]
    rows, half = info.shape[0], info.shape[1] // 2
    if half % GGML_QUANT_SIZES[GGMLQuantizationType[info.type]][0]:
        raise ModelFileError(
            f"{source.path}: {info.name} cannot be split: a block of {info.type} lies across the "
            "middle",
            "get a file with another type for it",
        )
    joined = _rows(source, info.name)
    middle = joined.shape[1] // 2
    tensors = [
        _Tensor(f"{SUPPORT}e_proj.weight", info.type, (rows, half), joined[:, :middle]),
        _Tensor(f"{SUPPORT}h_proj.weight", info.type, (rows, half), joined[:, middle:]),
    ]
    back = {new: old for old, new in RENAMED.items()}
    for name in source.tensors:
        stem, _, end = name.removeprefix(block).rpartition(".")
        if name == info.name or name in ROOT:
            continue
        if name.startswith("output_hc_"):
            new = f"hc_head_{name.removeprefix('output_hc_')}"
        elif name.startswith(block) and name.removeprefix(block) not in NO_PLACE:
            new = f"{back.get(stem, stem)}.{end}"
        else:
            raise _no_place(source, name, "mtp.0")
        tensors.append(_copied(source, name, SUPPORT + new))
    norm = f"{block}nextn.shared_head_norm.weight"
    if norm not in source.tensors:  # the sidecar uses the trunk's
        lender = source if "output_norm.weight" in source.tensors or main is None else main
        tensors.append(_copied(lender, "output_norm.weight", f"{SUPPORT}norm.weight"))
    return tensors


def _no_place(source: GgufFile, name: str, layout: str) -> ModelFileError:
    return ModelFileError(
        f"{source.path}: tensor {name} has no place in the {layout} layout",
        "this file cannot be converted without losing it",
    )


# --- metadata ------------------------------------------------------------------------------------


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _scalar(kind: GGUFValueType, value: float | bool) -> bytes:
    return struct.pack("<I", kind) + SCALARS[kind].pack(value)


def _text(value: str) -> bytes:
    return struct.pack("<I", GGUFValueType.STRING) + _string(value)


def _array(kind: GGUFValueType, values: Sequence[float]) -> bytes:
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(values))
    return head + b"".join(SCALARS[kind].pack(value) for value in values)


def _support_pairs(source: GgufFile) -> dict[str, bytes]:
    """The few keys that a support file has."""
    name = source.metadata.get("general.name")
    experts = next(
        info.shape[0] for key, info in source.tensors.items() if key.endswith("ffn_gate_inp.weight")
    )
    one = _scalar(GGUFValueType.UINT32, 1)
    return {
        "general.architecture": _text(SUPPORT_ARCHITECTURE),
        "general.name": _text(f"{name if isinstance(name, str) else 'DeepSeek V4'} MTP support"),
        f"{ARCHITECTURE}.expert_count": _scalar(GGUFValueType.UINT32, experts),
        f"{ARCHITECTURE}.mtp_layer_count": one,
        f"{ARCHITECTURE}.nextn_predict_layers": one,
    }


def _sidecar_pairs(main: GgufFile, config: ModelConfig) -> dict[str, bytes]:
    """The main file's metadata, as they are stored, but for one block more."""
    pairs = {
        key: value
        for key, value in _stored_pairs(main).items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    blocks = config.layers + 1
    pairs[f"{ARCHITECTURE}.block_count"] = _scalar(GGUFValueType.UINT32, blocks)
    pairs[f"{ARCHITECTURE}.nextn_predict_layers"] = _scalar(GGUFValueType.UINT32, 1)
    ratios = f"{ARCHITECTURE}.attention.compress_ratios"
    stored = main.metadata[ratios]
    if not isinstance(stored, list) or len(stored) < blocks:
        longer = [*config.ratios[: config.layers], config.mtp_ratio]
        pairs[ratios] = _array(GGUFValueType.INT32, longer)
    for key, values in (("exp", config.clamp), ("shexp", config.clamp_shared)):
        name = f"{ARCHITECTURE}.swiglu_clamp_{key}"
        pairs[name] = _array(GGUFValueType.FLOAT32, values[:blocks])
    return pairs


def _stored_pairs(file: GgufFile) -> dict[str, bytes]:
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


# --- writing -------------------------------------------------------------------------------------


def _write(target: Path, pairs: Mapping[str, bytes], tensors: list[_Tensor]) -> None:
    """Write a GGUF file under another name beside `target`, check it, and give it its name."""
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


def _write_header(stream: BinaryIO, pairs: Mapping[str, bytes], tensors: list[_Tensor]) -> None:
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


def _check_written(path: Path, tensors: list[_Tensor]) -> None:
    """Every tensor must read back with the bytes that were meant."""
    written = GgufFile.open(path)
    for tensor in tensors:
        info = written.tensors[tensor.name]
        pairs = zip(_pieces(_rows(written, tensor.name)), _pieces(tensor.data), strict=True)
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
