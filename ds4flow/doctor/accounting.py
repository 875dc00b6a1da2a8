"""Bytes: in memory, per decoded token and per verify pass, computed from shapes and stored types.

Promise: nothing is estimated but the number of distinct experts of several rows, which assumes that
rows route independently and uniformly, and so is an upper estimate for neighbouring tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds4flow.doctor.report import CacheSize, Group, Traffic, Width
from ds4flow.gguf import GgufFile, TensorInfo
from ds4flow.model.config import ModelConfig
from ds4flow.model.slots import hyper_slots, layer_slots, trunk_slots

F32, F16 = 4, 2
CHUNK = 64
"""Rows of a prefill pass where nothing else is asked for; more than any verify pass has."""
WIDTHS = (1, 2, 3, 4)

ROUTED_IN, ROUTED_OUT = "routed gate+up", "routed down"
INDEX_QUERIES = "indexer queries"
SMALL = "norms, sinks, biases, head, one embedding row"
GROUPS = {
    "attn_q_a.weight": "attn_q_a",
    "attn_q_b.weight": "attn_q_b",
    "attn_kv.weight": "attn_kv",
    "attn_output_a.weight": "attn_output_a",
    "attn_output_b.weight": "attn_output_b",
    "attn_compressor_kv.weight": "attention compressors",
    "attn_compressor_gate.weight": "attention compressors",
    "attn_compressor_ape.weight": "attention compressors",
    "attn_compressor_norm.weight": "attention compressors",
    "indexer.attn_q_b.weight": INDEX_QUERIES,
    "indexer.proj.weight": INDEX_QUERIES,
    "indexer_compressor_kv.weight": "indexer compressors",
    "indexer_compressor_gate.weight": "indexer compressors",
    "indexer_compressor_ape.weight": "indexer compressors",
    "indexer_compressor_norm.weight": "indexer compressors",
    "hc_attn_fn.weight": "hyper-connections",
    "hc_attn_base.weight": "hyper-connections",
    "hc_attn_scale.weight": "hyper-connections",
    "hc_ffn_fn.weight": "hyper-connections",
    "hc_ffn_base.weight": "hyper-connections",
    "hc_ffn_scale.weight": "hyper-connections",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_shexp.weight": "shared expert",
    "ffn_up_shexp.weight": "shared expert",
    "ffn_down_shexp.weight": "shared expert",
    "ffn_gate_exps.weight": ROUTED_IN,
    "ffn_up_exps.weight": ROUTED_IN,
    "ffn_down_exps.weight": ROUTED_OUT,
    "output.weight": "output",
}
"""Group of a tensor by its name without `blk.N.`; all others are small."""


# --- memory --------------------------------------------------------------------------------------


def trunk_bytes(tensors: Mapping[str, TensorInfo], c: ModelConfig) -> int:
    """Bytes of the trunk's tensors as stored."""
    return sum(tensors[slot.name].nbytes for slot in trunk_slots(c))


def cache_size(c: ModelConfig, context: int, chunk: int = CHUNK) -> CacheSize:
    """The cache of one sequence, by this program's layout and by the published account."""
    halves = {4: 2, 128: 1}  # blocks of ratio 4 overlap: two halves, and a reach of two blocks
    total = (c.layers + 1) * (c.window + chunk) * c.head_dim * F32
    published = (c.layers + 1) * c.window * c.head_dim * F16
    for ratio in c.ratios[: c.layers]:
        if not ratio:
            continue
        for width in (c.head_dim, c.index_dim) if ratio == 4 else (c.head_dim,):
            reach, row = halves[ratio] * ratio, halves[ratio] * width
            total += (2 * (reach + chunk) * row + context // ratio * width) * F32
            published += 2 * reach * row * F32 + context // ratio * width * F16
    growth = c.cache_growth
    return CacheSize(context, chunk, total, growth * F32, published, growth * F16)


# --- traffic -------------------------------------------------------------------------------------


def weight_groups(tensors: Mapping[str, TensorInfo], c: ModelConfig) -> tuple[Group, ...]:
    """Weight bytes that one token reads, by group, indexer queries included; largest first."""
    found: dict[str, list[tuple[str, int]]] = {}
    for slot in trunk_slots(c):
        suffix = _suffix(slot.name)
        info = tensors[slot.name]
        name = GROUPS.get(suffix, SMALL)
        found.setdefault(name, []).append((info.type, _read_of(info, suffix, c)))
    groups = [
        Group(
            name,
            tuple(sorted({kind for kind, _ in parts})),
            len(parts),
            sum(size for _, size in parts),
        )
        for name, parts in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.bytes, group.name)))


def _suffix(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith(("blk.", "mtp.")) else name


def _read_of(info: TensorInfo, suffix: str, c: ModelConfig) -> int:
    """Bytes of a tensor that one token reads."""
    if suffix.endswith("_exps.weight"):
        return info.nbytes // c.experts * c.experts_used
    if suffix.endswith("_ape.weight"):  # one row of the block that the token is in
        return info.nbytes // (info.shape[-2] if len(info.shape) > 1 else 1)
    if suffix in ("token_embd.weight", "ffn_gate_tid2eid.weight", "nextn.embed_tokens.weight"):
        return info.nbytes // c.vocab
    return info.nbytes


def mtp_tensors(
    file: GgufFile, main: Mapping[str, TensorInfo], c: ModelConfig, layout: str
) -> dict[str, TensorInfo]:
    """The tensors of an MTP block that has been found complete, by their names in its file.

    `main` are the tensors of the main file, which lends what the block's own file leaves out.
    """
    if layout == "mtp.0":
        stem, head = "mtp.0.", "mtp.0.hc_head"
        own = ["e_proj", "h_proj", "enorm", "hnorm", "norm"]
    else:
        stem, head = f"blk.{c.layers}.", "output_hc"
        own = ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm"]
    names = [f"{stem}{name}.weight" for name in own]
    names += [slot.name for slot in hyper_slots(head, c, head=True)]
    names += [slot.name for slot in layer_slots(stem, c, c.mtp_ratio, hashed=False)]
    if layout == "nextn":
        norm = f"{stem}nextn.shared_head_norm.weight"
        names.append(norm if norm in file.tensors else "output_norm.weight")
        extra = (f"{stem}nextn.embed_tokens.weight", f"{stem}nextn.shared_head_head.weight")
        names += [name for name in extra if name in file.tensors]
    return {name: file.tensors[name] if name in file.tensors else main[name] for name in names}


def own_bytes(
    block: Mapping[str, TensorInfo], main: Mapping[str, TensorInfo], c: ModelConfig
) -> int:
    """Bytes of an MTP block's tensors, less those that it has in common with the trunk."""
    shared = {slot.name for slot in trunk_slots(c) if block.get(slot.name) is main[slot.name]}
    return sum(info.nbytes for name, info in block.items() if name not in shared)


def draft_bytes(
    block: Mapping[str, TensorInfo], main: Mapping[str, TensorInfo], c: ModelConfig
) -> int:
    """Weight bytes of one draft step: the block, the output matrix, one embedding row."""
    total = sum(_read_of(info, _suffix(name), c) for name, info in block.items())
    if not any(name.endswith("nextn.shared_head_head.weight") for name in block):
        total += main["output.weight"].nbytes
    if not any(name.endswith("nextn.embed_tokens.weight") for name in block):
        total += main["token_embd.weight"].nbytes // c.vocab
    return total


def distinct_experts(c: ModelConfig, rows: int) -> float:
    """Expected distinct experts of a layer for `rows` tokens: E (1 - (1 - used/E)^rows)."""
    return c.experts * (1.0 - (1.0 - c.experts_used / c.experts) ** rows)


def cache_read(c: ModelConfig, position: int, element: int = F32) -> int:
    """Bytes of cache rows that the token at `position` (from 0) reads, `element` bytes a value."""
    values = 0
    for ratio in c.ratios[: c.layers]:
        values += min(position + 1, c.window) * c.head_dim
        if ratio:
            rows = (position + 1) // ratio
            chosen = ratio == 4 and rows > c.top_k
            values += (c.top_k if chosen else rows) * c.head_dim
            values += rows * c.index_dim if chosen else 0
    return values * element


def traffic(
    tensors: Mapping[str, TensorInfo],
    c: ModelConfig,
    context: int,
    draft: int | None,
    bandwidth_gbs: float | None,
) -> Traffic:
    """What decoding the last token of `context` reads, and passes of one to four rows there."""
    position = context - 1
    first = 4 * (c.top_k + 1) - 1 if 4 in c.ratios[: c.layers] else None
    groups = tuple(
        group
        for group in weight_groups(tensors, c)
        if group.name != INDEX_QUERIES or (first is not None and position >= first)
    )
    routed = sum(group.bytes for group in groups if group.name in (ROUTED_IN, ROUTED_OUT))
    fixed = sum(group.bytes for group in groups) - routed
    rows_read = cache_read(c, position)
    plain = fixed + routed + rows_read
    widths = []
    for rows in WIDTHS:
        experts = distinct_experts(c, rows)
        size = fixed + round(routed * experts / c.experts_used) + rows_read
        cycle = size + (rows - 1) * (draft or 0)
        speed = rows * bandwidth_gbs * 1e9 / cycle if bandwidth_gbs is not None else None
        widths.append(Width(rows, experts, size, cycle, cycle / plain, speed))
    return Traffic(
        position,
        groups,
        fixed,
        routed,
        fixed + routed,
        rows_read,
        first,
        draft,
        bandwidth_gbs,
        tuple(widths),
    )
