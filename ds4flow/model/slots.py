"""Which tensors a DeepSeek-V4 file must hold, and the check that it does.

Promise: everything missing, of a wrong shape or of a wrong type is reported in one error that never
confuses a missing tensor with a truncated file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.quants import FLOAT_TYPES, INTEGER_TYPES, can_decode

ALLOWED = {
    "table": " or ".join(INTEGER_TYPES),
    "vector": ", ".join(FLOAT_TYPES),
    "matrix": f"{', '.join(FLOAT_TYPES)} or a block type with a decoder",
}
_BLOCK = re.compile(r"(blk\.\d+|mtp\.0)\.")


class Slot(NamedTuple):
    """A tensor that must be there: name, shape in torch order, kind (a key of ALLOWED)."""

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"


def vectors(names: Iterable[str], width: int) -> list[Slot]:
    """Slots of the vectors `NAME.weight`, each of `width` values."""
    return [Slot(f"{name}.weight", (width,), "vector") for name in names]


def hyper_slots(stem: str, c: ModelConfig, *, head: bool) -> list[Slot]:
    """A hyper-connection: pre, post and comb coefficients in a layer, pre only in a head."""
    mix = c.streams if head else (2 + c.streams) * c.streams
    return [
        Slot(f"{stem}_fn.weight", (mix, c.streams * c.dim)),
        *vectors([f"{stem}_base"], mix),
        *vectors([f"{stem}_scale"], 1 if head else 3),
    ]


def _compressor_slots(stem: str, c: ModelConfig, ratio: int, width: int) -> list[Slot]:
    columns = width * (2 if ratio == 4 else 1)  # blocks of ratio 4 overlap and have two halves
    return [
        Slot(f"{stem}_kv.weight", (columns, c.dim)),
        Slot(f"{stem}_gate.weight", (columns, c.dim)),
        Slot(f"{stem}_ape.weight", (ratio, columns), "vector"),
        *vectors([f"{stem}_norm"], width),
    ]


def layer_slots(prefix: str, c: ModelConfig, ratio: int, *, hashed: bool) -> list[Slot]:
    """Every tensor of one layer; all names start with `prefix`."""
    shared = c.expert_dim * c.experts_shared
    slots = [
        *hyper_slots("hc_attn", c, head=False),
        *hyper_slots("hc_ffn", c, head=False),
        *vectors(["attn_norm", "ffn_norm"], c.dim),
        *vectors(["attn_q_a_norm"], c.q_rank),
        *vectors(["attn_kv_a_norm"], c.head_dim),
        *vectors(["attn_sinks"], c.heads),
        Slot("attn_q_a.weight", (c.q_rank, c.dim)),
        Slot("attn_q_b.weight", (c.heads * c.head_dim, c.q_rank)),
        Slot("attn_kv.weight", (c.head_dim, c.dim)),
        Slot("attn_output_a.weight", (c.groups * c.o_rank, c.head_dim * c.heads // c.groups)),
        Slot("attn_output_b.weight", (c.dim, c.groups * c.o_rank)),
        Slot("ffn_gate_inp.weight", (c.experts, c.dim)),
        Slot("ffn_gate_exps.weight", (c.experts, c.expert_dim, c.dim)),
        Slot("ffn_up_exps.weight", (c.experts, c.expert_dim, c.dim)),
        Slot("ffn_down_exps.weight", (c.experts, c.dim, c.expert_dim)),
        Slot("ffn_gate_shexp.weight", (shared, c.dim)),
        Slot("ffn_up_shexp.weight", (shared, c.dim)),
        Slot("ffn_down_shexp.weight", (c.dim, shared)),
    ]
    if hashed:
        slots.append(Slot("ffn_gate_tid2eid.weight", (c.vocab, c.experts_used), "table"))
    else:
        slots.append(Slot("exp_probs_b.bias", (c.experts,), "vector"))
    if ratio:
        slots += _compressor_slots("attn_compressor", c, ratio, c.head_dim)
    if ratio == 4:
        slots.append(Slot("indexer.attn_q_b.weight", (c.index_heads * c.index_dim, c.q_rank)))
        slots.append(Slot("indexer.proj.weight", (c.index_heads, c.dim)))
        slots += _compressor_slots("indexer_compressor", c, ratio, c.index_dim)
    return [slot._replace(name=prefix + slot.name) for slot in slots]


def trunk_slots(c: ModelConfig) -> list[Slot]:
    """Every tensor of a main file."""
    slots = [
        Slot("token_embd.weight", (c.vocab, c.dim)),
        Slot("output.weight", (c.vocab, c.dim)),
        *vectors(["output_norm"], c.dim),
        *hyper_slots("output_hc", c, head=True),
    ]
    for index in range(c.layers):
        slots += layer_slots(f"blk.{index}.", c, c.ratio(index), hashed=index < c.hash_layers)
    return slots


def check_trunk(file: GgufFile, config: ModelConfig) -> None:
    """Raise ModelFileError unless `file` holds exactly the trunk that its metadata describe."""
    numbers = {int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,6})\.", name))}
    nextn = {n for n in numbers if f"blk.{n}.nextn.eh_proj.weight" in file.tensors}
    if numbers and numbers == nextn:
        raise ModelFileError(
            f"{file.path} is an MTP sidecar (its only block, blk.{min(nextn)}, has nextn tensors), "
            "not a main model",
            "give it as the MTP file and the main model as the model",
        )
    covered = len(numbers - nextn)
    differ = f"metadata says {config.layers} blocks, tensors cover {covered}"
    check(file, trunk_slots(config), differ if covered != config.layers else "")


def check(file: GgufFile, slots: Sequence[Slot], problem: str = "") -> None:
    """Raise one ModelFileError with `problem` and all that is missing or wrong in `slots`."""
    missing, wrong = [], []
    for slot in slots:
        info = file.tensors.get(slot.name)
        if info is None:
            missing.append(slot.name)
            continue
        if not _same_shape(info.shape, slot):
            wrong.append(f"{slot.name} has shape {info.shape}, the metadata ask for {slot.shape}")
        if not _allowed(info.type, slot.kind):
            wrong.append(f"{slot.name} is of type {info.type}, allowed: {ALLOWED[slot.kind]}")
    if missing:
        wrong.insert(0, f"tensors missing: {', '.join(_summary(missing, slots))}")
    if problem:
        wrong.insert(0, problem)
    if wrong:
        raise ModelFileError(
            f"{file.path}: {'; '.join(wrong)}",
            "get a file whose tensors and metadata were written together",
        )


def _same_shape(found: Sequence[int], slot: Slot) -> bool:
    """Equal; for vectors up to dimensions of one, which converters add and drop."""
    if slot.kind != "vector":
        return tuple(found) == slot.shape
    return [n for n in found if n > 1] == [n for n in slot.shape if n > 1]


def _allowed(type_name: str, kind: str) -> bool:
    if kind == "table":
        return type_name in INTEGER_TYPES
    return type_name in FLOAT_TYPES if kind == "vector" else can_decode(type_name)


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[1] if match else ""


def _summary(missing: Sequence[str], slots: Sequence[Slot]) -> list[str]:
    """The missing names, shortened to `blk.N.* (all K)` where nothing of a block is there."""
    wanted: dict[str, int] = {}
    for slot in slots:
        wanted[_block(slot.name)] = wanted.get(_block(slot.name), 0) + 1
    by_block: dict[str, list[str]] = {}
    for name in missing:
        by_block.setdefault(_block(name), []).append(name)
    lines = []
    for stem, names in by_block.items():
        whole = stem and len(names) == wanted[stem]
        lines += [f"{stem}.* (all {len(names)})"] if whole else names
    return lines
