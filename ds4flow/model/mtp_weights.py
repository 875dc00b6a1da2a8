"""The MTP block of a file: which layout it has, whose block it is, and its weights.

Promise: both layouts give the same bits; the block of another model, or another kind of drafter, is
refused by name before any weight is read.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import (
    ARCHITECTURE,
    SUPPORT_ARCHITECTURE,
    ModelConfig,
    check_architecture,
)
from ds4flow.model.slots import Slot, check, hyper_slots, layer_slots, vectors
from ds4flow.model.weights import Binder, HeadWeights, MtpWeights
from ds4flow.quants import QTensor, block_weights, from_gguf

LAYOUTS = "mtp.0.e_proj.weight (support file) and blk.N.nextn.eh_proj.weight (llama.cpp's layout)"
HC_DEGRADED = (
    "trunk and nextn tensors share one file, so output_hc_* are the trunk's: drafts use the "
    "trunk's hyper-connection head instead of the MTP block's own and are accepted less often"
)


def find_mtp_layout(file: GgufFile) -> str | None:
    """ "mtp.0" (support file), "nextn" (llama.cpp's layout), or None without an MTP block."""
    if "mtp.0.e_proj.weight" in file.tensors:
        return "mtp.0"
    return "nextn" if _nextn_blocks(file) else None


def _nextn_blocks(file: GgufFile) -> list[int]:
    pattern = re.compile(r"blk\.(\d{1,6})\.nextn\.eh_proj\.weight")
    return sorted(int(m[1]) for name in file.tensors if (m := pattern.fullmatch(name)))


def load_mtp(file: GgufFile, config: ModelConfig, trunk_file: GgufFile | None = None) -> MtpWeights:
    """Bind the MTP block of a support file, a sidecar, or a file that holds trunk and block.

    `config` is the main model's; `trunk_file`, when given, must have the same vocabulary and lends
    the final norm that a sidecar may leave out. Raises ModelFileError for another kind of drafter,
    for the block of another model, and with everything missing or wrong at once.
    """
    _refuse_dspark(file)
    layout = find_mtp_layout(file)
    if layout is None:
        raise ModelFileError(
            f"{file.path} holds no MTP block; looked for {LAYOUTS}",
            "give an MTP file made for this model, or set mtp.draft=0",
        )
    if file.metadata.get("general.architecture") != SUPPORT_ARCHITECTURE:
        check_architecture(file)
    if trunk_file is None or trunk_file.path != file.path:
        _check_belongs(file, config, layout, trunk_file)
    if layout == "mtp.0":
        return _load_support(file, config)
    return _load_nextn(file, config, trunk_file)


def _refuse_dspark(file: GgufFile) -> None:
    """The later drafter: three stages, a main projection, a Markov head; not this block."""
    if "mtp.0.e_proj.weight" in file.tensors:
        return
    pattern = re.compile(r"mtp\.0\.main_proj\.|mtp\.[12]\.|dspark\.|.*markov_head")
    sign = next((f"tensor {name}" for name in file.tensors if pattern.match(name)), None)
    architecture = file.metadata.get("general.architecture")
    if architecture in ("dflash", "dspark"):
        sign = f"architecture {architecture}"
    if sign:
        raise ModelFileError(
            f"{file.path} holds a DSpark drafter ({sign}), which is not covered",
            "give the MTP block of the first release, or set mtp.draft=0",
        )


def _check_belongs(
    file: GgufFile, c: ModelConfig, layout: str, trunk_file: GgufFile | None
) -> None:
    """Raise ModelFileError when the block was made for other dimensions or another vocabulary."""
    wrong = []
    stem = "mtp.0."
    if layout == "nextn":
        blocks = _nextn_blocks(file)
        stem = f"blk.{blocks[0]}."
        if blocks != [c.layers]:
            found = ", ".join(f"blk.{n}" for n in blocks)
            wrong.append(f"its MTP block is {found}, after {c.layers} layers it is blk.{c.layers}")
        ratios = file.metadata.get(f"{ARCHITECTURE}.attention.compress_ratios")
        own = ratios[blocks[0]] if isinstance(ratios, list) and len(ratios) > blocks[0] else None
        if own is not None and own != c.mtp_ratio:
            wrong.append(f"its block has the ratio {own}, the model gives it {c.mtp_ratio}")
    wrong += _other_dimensions(file, c, stem)
    if trunk_file is not None:
        wrong += _other_tokens(file, trunk_file)
    if wrong:
        name = trunk_file.path.name if trunk_file is not None else "the model"
        raise ModelFileError(
            f"{file.path} was made for another model than {name}: {'; '.join(wrong)}",
            "give the MTP file that belongs to the model",
        )


def _other_dimensions(file: GgufFile, c: ModelConfig, stem: str) -> list[str]:
    """Differences in what a block shares with its trunk, by metadata and by tensors."""
    keys = {
        "embedding_length": c.dim,
        "vocab_size": c.vocab,
        "expert_count": c.experts,
        "expert_used_count": c.experts_used,
        "attention.head_count": c.heads,
        "attention.key_length": c.head_dim,
        "attention.sliding_window": c.window,
        "hyper_connection.count": c.streams,
    }
    wrong = []
    for key, wanted in keys.items():
        value = file.metadata.get(f"{ARCHITECTURE}.{key}")
        if isinstance(value, int) and value != wanted:
            wrong.append(f"{key} is {value}, the model's {wanted}")
    widths = {
        f"{stem}attn_norm.weight": (-1, c.dim, "embedding width"),
        f"{stem}ffn_gate_inp.weight": (0, c.experts, "number of experts"),
        "token_embd.weight": (0, c.vocab, "vocabulary"),
    }
    for name, (axis, wanted, what) in widths.items():
        info = file.tensors.get(name)
        if info is not None and info.shape[axis] != wanted:
            wrong.append(f"its {what} ({name}) is {info.shape[axis]}, the model's {wanted}")
    return wrong


def _other_tokens(file: GgufFile, trunk_file: GgufFile) -> list[str]:
    key = "tokenizer.ggml.tokens"
    own, trunk = file.metadata.get(key), trunk_file.metadata.get(key)
    if not isinstance(own, list) or not isinstance(trunk, list) or own == trunk:
        return []
    if len(own) != len(trunk):
        return [f"its tokenizer has {len(own)} tokens, the model's {len(trunk)}"]
    at = next(i for i, (a, b) in enumerate(zip(own, trunk, strict=True)) if a != b)
    return [f"token {at} is {own[at]!r} in its tokenizer and {trunk[at]!r} in the model's"]


def _load_support(file: GgufFile, c: ModelConfig) -> MtpWeights:
    """The `mtp.0.*` layout: two projections, the block's own head."""
    stem = "mtp.0."
    check(
        file,
        [
            Slot(f"{stem}e_proj.weight", (c.dim, c.dim)),
            Slot(f"{stem}h_proj.weight", (c.dim, c.dim)),
            *vectors([f"{stem}enorm", f"{stem}hnorm", f"{stem}norm"], c.dim),
            *hyper_slots(f"{stem}hc_head", c, head=True),
            *layer_slots(stem, c, c.mtp_ratio, hashed=False),
        ],
    )
    block = Binder(file, stem)
    return MtpWeights(
        e_proj=block.matrix("e_proj"),
        h_proj=block.matrix("h_proj"),
        enorm=block.vector("enorm"),
        hnorm=block.vector("hnorm"),
        layer=block.layer(c, c.layers, c.mtp_ratio, hashed=False),
        head=HeadWeights(block.hyper("hc_head"), block.vector("norm")),
        layout="mtp.0",
    )


def _load_nextn(file: GgufFile, c: ModelConfig, trunk_file: GgufFile | None) -> MtpWeights:
    """The `blk.N.nextn.*` layout: one joined projection, the head in the file's `output_hc_*`.

    In a sidecar the root `output_hc_*` are the block's own; beside a trunk they are the trunk's.
    """
    stem = f"blk.{c.layers}."
    norm, norm_file = f"{stem}nextn.shared_head_norm", file
    if f"{norm}.weight" not in file.tensors:
        norm = "output_norm"
        if trunk_file is not None and "output_norm.weight" not in file.tensors:
            norm_file = trunk_file
    own = {
        field: Slot(name, (c.vocab, c.dim))
        for field, name in (
            ("embed", f"{stem}nextn.embed_tokens.weight"),
            ("output", f"{stem}nextn.shared_head_head.weight"),
        )
        if name in file.tensors
    }
    slots = [
        Slot(f"{stem}nextn.eh_proj.weight", (c.dim, 2 * c.dim)),
        *vectors([f"{stem}nextn.enorm", f"{stem}nextn.hnorm"], c.dim),
        *(vectors([norm], c.dim) if norm_file is file else []),
        *hyper_slots("output_hc", c, head=True),
        *layer_slots(stem, c, c.mtp_ratio, hashed=False),
        *own.values(),
    ]
    check(file, slots)
    check(norm_file, vectors([norm], c.dim))
    block, root = Binder(file, stem), Binder(file)
    e_proj, h_proj = _split_columns(block.matrix("nextn.eh_proj"))
    return MtpWeights(
        e_proj=e_proj,
        h_proj=h_proj,
        enorm=block.vector("nextn.enorm"),
        hnorm=block.vector("nextn.hnorm"),
        layer=block.layer(c, c.layers, c.mtp_ratio, hashed=False),
        head=HeadWeights(root.hyper("output_hc"), Binder(norm_file).vector(norm)),
        layout="nextn",
        embed=from_gguf(file, own["embed"].name) if "embed" in own else None,
        output=from_gguf(file, own["output"].name) if "output" in own else None,
        degraded=HC_DEGRADED if "blk.0.attn_norm.weight" in file.tensors else None,
    )


def _split_columns(joined: QTensor) -> tuple[QTensor, QTensor]:
    """Left and right half of the columns: on bytes, unless a block lies across the middle."""
    rows, width = joined.shape
    half = width // 2
    if half % block_weights(joined.type):
        joined = replace(joined, type="F32", data=joined.float())
    middle = joined.data.shape[1] // 2

    def part(mark: str, data: torch.Tensor) -> QTensor:
        name = f"{joined.name}[{mark}]"
        return replace(joined, name=name, shape=(rows, half), data=data.contiguous())

    return part("e", joined.data[:, :middle]), part("h", joined.data[:, middle:])
