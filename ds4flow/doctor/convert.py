"""One MTP layout into the other, by bytes.

Promise: no weight is decoded or rounded, so that converting back gives the same tensor bytes; the
new file appears whole or not at all and never replaces another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4flow.doctor.write import (
    StoredTensor,
    array,
    byte_rows,
    scalar,
    stored_pairs,
    text,
    write_file,
)
from ds4flow.errors import ModelFileError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ARCHITECTURE, SUPPORT_ARCHITECTURE, ModelConfig

SUPPORT = "mtp.0."
RENAMED = {"enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "norm": "nextn.shared_head_norm"}
ROOT = ("token_embd.weight", "output.weight", "output_norm.weight")
"""Tensors of the trunk that a sidecar repeats."""
NO_PLACE = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


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
    from ds4flow.model.mtp_weights import find_mtp_layout, load_mtp
    from ds4flow.model.slots import check_trunk

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
    write_file(Path(target), pairs, tensors)
    return Path(target)


# --- tensors -------------------------------------------------------------------------------------


def _copied(file: GgufFile, name: str, new_name: str | None = None) -> StoredTensor:
    info = file.tensors[name]
    return StoredTensor(new_name or name, info.type, info.shape, byte_rows(file, name))


def _sidecar_tensors(source: GgufFile, config: ModelConfig, main: GgufFile) -> list[StoredTensor]:
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
    joined = np.concatenate((byte_rows(source, e.name), byte_rows(source, h.name)), axis=1)
    tensors.append(
        StoredTensor(f"{block}nextn.eh_proj.weight", e.type, (e.shape[0], 2 * e.shape[1]), joined)
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


def _support_tensors(
    source: GgufFile, config: ModelConfig, main: GgufFile | None
) -> list[StoredTensor]:
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
    joined = byte_rows(source, info.name)
    middle = joined.shape[1] // 2
    tensors = [
        StoredTensor(f"{SUPPORT}e_proj.weight", info.type, (rows, half), joined[:, :middle]),
        StoredTensor(f"{SUPPORT}h_proj.weight", info.type, (rows, half), joined[:, middle:]),
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


def _support_pairs(source: GgufFile) -> dict[str, bytes]:
    """The few keys that a support file has."""
    name = source.metadata.get("general.name")
    experts = next(
        info.shape[0] for key, info in source.tensors.items() if key.endswith("ffn_gate_inp.weight")
    )
    one = scalar(GGUFValueType.UINT32, 1)
    return {
        "general.architecture": text(SUPPORT_ARCHITECTURE),
        "general.name": text(f"{name if isinstance(name, str) else 'DeepSeek V4'} MTP support"),
        f"{ARCHITECTURE}.expert_count": scalar(GGUFValueType.UINT32, experts),
        f"{ARCHITECTURE}.mtp_layer_count": one,
        f"{ARCHITECTURE}.nextn_predict_layers": one,
    }


def _sidecar_pairs(main: GgufFile, config: ModelConfig) -> dict[str, bytes]:
    """The main file's metadata, as they are stored, but for one block more."""
    pairs = {
        key: value
        for key, value in stored_pairs(main).items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    blocks = config.layers + 1
    pairs[f"{ARCHITECTURE}.block_count"] = scalar(GGUFValueType.UINT32, blocks)
    pairs[f"{ARCHITECTURE}.nextn_predict_layers"] = scalar(GGUFValueType.UINT32, 1)
    ratios = f"{ARCHITECTURE}.attention.compress_ratios"
    stored = main.metadata[ratios]
    if not isinstance(stored, list) or len(stored) < blocks:
        longer = [*config.ratios[: config.layers], config.mtp_ratio]
        pairs[ratios] = array(GGUFValueType.INT32, longer)
    for key, values in (("exp", config.clamp), ("shexp", config.clamp_shared)):
        name = f"{ARCHITECTURE}.swiglu_clamp_{key}"
        pairs[name] = array(GGUFValueType.FLOAT32, values[:blocks])
    return pairs
