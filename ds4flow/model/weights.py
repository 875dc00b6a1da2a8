"""The tensors of a DeepSeek-V4 model, bound by name to one structure; both MTP layouts give the same one.

Promise: all missing tensors, wrong shapes and wrong types of a file are reported together, before any
weight is read. Matrices stay as stored (views of the mapping); vectors become float32 tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import (
    ARCHITECTURE,
    SUPPORT_ARCHITECTURE,
    ModelConfig,
    check_architecture,
)
from ds4flow.quants import FLOAT_TYPES, INTEGER_TYPES, QTensor, block_weights, can_decode, from_gguf

LAYOUTS = "mtp.0.e_proj.weight (a support file) and blk.N.nextn.eh_proj.weight (llama.cpp's layout)"
HC_DEGRADED = (
    "trunk and nextn tensors share one file, so output_hc_* are the trunk's: drafts use the trunk's "
    "hyper-connection head instead of the MTP block's own, and fewer of them will be accepted"
)


@dataclass(frozen=True, eq=False)
class HyperWeights:
    """Hyper-connection parameters of one use: `fn (mix, N*D)`, `base (mix)`, `scale (3 or 1)`.

    mix is (2+N)*N (pre, post, comb) inside a layer and N (pre only) in a head.
    """

    fn: QTensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """A compressor of ratio r and row width w; c = 2 when blocks overlap (r = 4), else 1."""

    kv: QTensor  # (c*w, D)
    gate: QTensor  # (c*w, D)
    ape: torch.Tensor  # (r, c*w), position bias of the gate scores
    norm: torch.Tensor  # (w)


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """Selects compressed rows: `q_b (Hi*di, Q)`, head gains `proj (Hi, D)`, its own compressor."""

    q_b: QTensor
    proj: QTensor
    compressor: CompressorWeights


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """Router `(E, D)`, selection `bias (E)` or token `table (V, used)`, expert stacks `(E, out, in)`."""

    router: QTensor
    bias: torch.Tensor | None
    table: torch.Tensor | None  # int32
    gate: QTensor
    up: QTensor
    down: QTensor
    shared_gate: QTensor
    shared_up: QTensor
    shared_down: QTensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One transformer layer; vectors are float32."""

    index: int
    ratio: int
    clamp: float
    clamp_shared: float
    hc_attn: HyperWeights
    attn_norm: torch.Tensor  # (D)
    q_a: QTensor  # (Q, D)
    q_a_norm: torch.Tensor  # (Q)
    q_b: QTensor  # (H*d, Q)
    kv: QTensor  # (d, D)
    kv_norm: torch.Tensor  # (d)
    sinks: torch.Tensor  # (H)
    out_a: QTensor  # (G*O, d*H/G), group after group
    out_b: QTensor  # (D, G*O)
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    hc_ffn: HyperWeights
    ffn_norm: torch.Tensor  # (D)
    moe: MoeWeights


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Collapse of the streams before the output matrix: hyper-connection head and final norm `(D)`."""

    hc: HyperWeights
    norm: torch.Tensor


@dataclass(frozen=True, eq=False)
class TrunkWeights:
    """The main model."""

    embed: QTensor  # (V, D)
    output: QTensor  # (V, D)
    head: HeadWeights
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, eq=False)
class MtpWeights:
    """The multi-token-prediction block; `embed` and `output` are None where the trunk's are used.

    `degraded` says why drafts will be worse than they should be, None if they will not.
    """

    e_proj: QTensor  # (D, D), on the normalised embedding
    h_proj: QTensor  # (D, D), on the normalised streams
    enorm: torch.Tensor
    hnorm: torch.Tensor
    layer: LayerWeights
    head: HeadWeights
    layout: str  # "mtp.0" or "nextn"
    embed: QTensor | None = None
    output: QTensor | None = None
    degraded: str | None = None


# --- what must be there --------------------------------------------------------------------------


class Slot(NamedTuple):
    """A tensor that must be there: full name, shape in torch order, kind matrix, vector or table."""

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"


def _hyper_slots(stem: str, c: ModelConfig, head: bool) -> list[Slot]:
    mix = c.streams if head else (2 + c.streams) * c.streams
    return [
        Slot(f"{stem}_fn.weight", (mix, c.streams * c.dim)),
        Slot(f"{stem}_base.weight", (mix,), "vector"),
        Slot(f"{stem}_scale.weight", (1 if head else 3,), "vector"),
    ]


def _compressor_slots(stem: str, c: ModelConfig, ratio: int, width: int) -> list[Slot]:
    columns = width * (2 if ratio == 4 else 1)
    return [
        Slot(f"{stem}_kv.weight", (columns, c.dim)),
        Slot(f"{stem}_gate.weight", (columns, c.dim)),
        Slot(f"{stem}_ape.weight", (ratio, columns), "vector"),
        Slot(f"{stem}_norm.weight", (width,), "vector"),
    ]


def _layer_slots(prefix: str, c: ModelConfig, ratio: int, hashed: bool) -> list[Slot]:
    """Every tensor of one layer, with names starting with `prefix`."""
    shared = c.expert_dim * c.experts_shared
    slots = [
        *_hyper_slots("hc_attn", c, head=False),
        Slot("attn_norm.weight", (c.dim,), "vector"),
        Slot("attn_q_a.weight", (c.q_rank, c.dim)),
        Slot("attn_q_a_norm.weight", (c.q_rank,), "vector"),
        Slot("attn_q_b.weight", (c.heads * c.head_dim, c.q_rank)),
        Slot("attn_kv.weight", (c.head_dim, c.dim)),
        Slot("attn_kv_a_norm.weight", (c.head_dim,), "vector"),
        Slot("attn_sinks.weight", (c.heads,), "vector"),
        Slot("attn_output_a.weight", (c.groups * c.o_rank, c.head_dim * c.heads // c.groups)),
        Slot("attn_output_b.weight", (c.dim, c.groups * c.o_rank)),
        *_hyper_slots("hc_ffn", c, head=False),
        Slot("ffn_norm.weight", (c.dim,), "vector"),
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


def _trunk_slots(c: ModelConfig) -> list[Slot]:
    slots = [
        Slot("token_embd.weight", (c.vocab, c.dim)),
        Slot("output.weight", (c.vocab, c.dim)),
        Slot("output_norm.weight", (c.dim,), "vector"),
        *_hyper_slots("output_hc", c, head=True),
    ]
    for index in range(c.layers):
        slots += _layer_slots(f"blk.{index}.", c, c.ratio(index), index < c.hash_layers)
    return slots


# --- checking ------------------------------------------------------------------------------------


def _allowed(type_name: str, kind: str) -> bool:
    if kind == "table":
        return type_name in INTEGER_TYPES
    return type_name in FLOAT_TYPES if kind == "vector" else can_decode(type_name)


_ALLOWED_TEXT = {
    "table": " or ".join(INTEGER_TYPES),
    "vector": ", ".join(FLOAT_TYPES),
    "matrix": f"{', '.join(FLOAT_TYPES)} or a block type with a decoder",
}


def _same_shape(found: Sequence[int], wanted: Sequence[int], kind: str) -> bool:
    """Equal; for vectors up to dimensions of one, which converters add and drop."""
    if kind != "vector":
        return tuple(found) == tuple(wanted)
    return [n for n in found if n > 1] == [n for n in wanted if n > 1]


def _check(file: GgufFile, slots: Iterable[Slot], header: str = "") -> None:
    """Raise one ModelFileError with all missing tensors, wrong shapes and wrong types."""
    slots = list(slots)
    missing, problems = [], []
    for slot in slots:
        info = file.tensors.get(slot.name)
        if info is None:
            missing.append(slot.name)
            continue
        if not _same_shape(info.shape, slot.shape, slot.kind):
            problems.append(
                f"{slot.name} has shape {info.shape}, the metadata ask for {slot.shape}"
            )
        if not _allowed(info.type, slot.kind):
            problems.append(f"{slot.name} is {info.type}, allowed: {_ALLOWED_TEXT[slot.kind]}")
    if not missing and not problems and not header:
        return
    parts = [header] if header else []
    if missing:
        parts.append(f"tensors missing: {', '.join(_summary(missing, slots))}")
    raise ModelFileError(
        f"{file.path}: {'; '.join(parts + problems)}",
        "get a file whose tensors and metadata were written together",
    )


_BLOCK = re.compile(r"(blk\.\d+|mtp\.0)\.")


def _summary(missing: Sequence[str], slots: Sequence[Slot]) -> list[str]:
    """The missing names, with `blk.N.* (all K)` for blocks of which nothing is there."""

    def block(name: str) -> str:
        match = _BLOCK.match(name)
        return match[1] if match else ""

    wanted: dict[str, int] = {}
    for slot in slots:
        wanted[block(slot.name)] = wanted.get(block(slot.name), 0) + 1
    found: dict[str, list[str]] = {}
    for name in missing:
        found.setdefault(block(name), []).append(name)
    lines = []
    for stem, names in found.items():
        whole = stem and len(names) == wanted[stem]
        lines += [f"{stem}.* (all {len(names)})"] if whole else names
    return lines


def _coverage(file: GgufFile, c: ModelConfig) -> str:
    """What to say when the number of blocks in the metadata is not that of the tensors."""
    numbers = {int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,6})\.", name))}
    nextn = {n for n in numbers if f"blk.{n}.nextn.eh_proj.weight" in file.tensors}
    covered = len(numbers - nextn)
    if covered == c.layers:
        return ""
    if numbers and numbers == nextn:
        return (
            f"this is an MTP sidecar (blk.{min(nextn)}.nextn.*), not a main model: give it as the MTP "
            "file and the main model as the model"
        )
    return f"metadata says {c.layers} blocks, tensors cover {covered}"


# --- binding -------------------------------------------------------------------------------------


class _Binder:
    """Makes weights from the checked tensors of one file whose names start with `prefix`."""

    def __init__(self, file: GgufFile, prefix: str = "") -> None:
        self.file = file
        self.prefix = prefix

    def matrix(self, name: str) -> QTensor:
        return from_gguf(self.file, f"{self.prefix}{name}.weight")

    def vector(self, name: str, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
        full = f"{self.prefix}{name}" + ("" if name.endswith(".bias") else ".weight")
        # a copy: these are small, and a view of the mapping must never be written to
        return from_gguf(self.file, full).float().reshape(shape).clone()

    def table(self, name: str, experts: int) -> torch.Tensor:
        tensor = self.matrix(name)
        ids = tensor.data.to(torch.int32, copy=True)
        if int(ids.min()) < 0 or int(ids.max()) >= experts:
            raise ModelFileError(
                f"{self.file.path}: {tensor.name} has expert ids from {int(ids.min())} to "
                f"{int(ids.max())}, the model has {experts} experts",
                "the file is damaged or was made for another model",
            )
        return ids

    def hyper(self, stem: str) -> HyperWeights:
        return HyperWeights(
            self.matrix(f"{stem}_fn"), self.vector(f"{stem}_base"), self.vector(f"{stem}_scale")
        )

    def compressor(self, stem: str, ratio: int) -> CompressorWeights:
        return CompressorWeights(
            kv=self.matrix(f"{stem}_kv"),
            gate=self.matrix(f"{stem}_gate"),
            ape=self.vector(f"{stem}_ape", (ratio, -1)),
            norm=self.vector(f"{stem}_norm"),
        )

    def indexer(self) -> IndexerWeights:
        return IndexerWeights(
            q_b=self.matrix("indexer.attn_q_b"),
            proj=self.matrix("indexer.proj"),
            compressor=self.compressor("indexer_compressor", 4),
        )

    def moe(self, c: ModelConfig, hashed: bool) -> MoeWeights:
        return MoeWeights(
            router=self.matrix("ffn_gate_inp"),
            bias=None if hashed else self.vector("exp_probs_b.bias"),
            table=self.table("ffn_gate_tid2eid", c.experts) if hashed else None,
            gate=self.matrix("ffn_gate_exps"),
            up=self.matrix("ffn_up_exps"),
            down=self.matrix("ffn_down_exps"),
            shared_gate=self.matrix("ffn_gate_shexp"),
            shared_up=self.matrix("ffn_up_shexp"),
            shared_down=self.matrix("ffn_down_shexp"),
        )

    def layer(self, c: ModelConfig, index: int, ratio: int, hashed: bool) -> LayerWeights:
        return LayerWeights(
            index=index,
            ratio=ratio,
            clamp=c.clamp[index],
            clamp_shared=c.clamp_shared[index],
            hc_attn=self.hyper("hc_attn"),
            attn_norm=self.vector("attn_norm"),
            q_a=self.matrix("attn_q_a"),
            q_a_norm=self.vector("attn_q_a_norm"),
            q_b=self.matrix("attn_q_b"),
            kv=self.matrix("attn_kv"),
            kv_norm=self.vector("attn_kv_a_norm"),
            sinks=self.vector("attn_sinks"),
            out_a=self.matrix("attn_output_a"),
            out_b=self.matrix("attn_output_b"),
            compressor=self.compressor("attn_compressor", ratio) if ratio else None,
            indexer=self.indexer() if ratio == 4 else None,
            hc_ffn=self.hyper("hc_ffn"),
            ffn_norm=self.vector("ffn_norm"),
            moe=self.moe(c, hashed),
        )


def load_trunk(file: GgufFile, config: ModelConfig) -> TrunkWeights:
    """Bind the main model's tensors; nothing but the small vectors is read.

    Raises ModelFileError with all missing tensors, wrong shapes and wrong types at once.
    """
    _check(file, _trunk_slots(config), _coverage(file, config))
    root = _Binder(file)
    return TrunkWeights(
        embed=root.matrix("token_embd"),
        output=root.matrix("output"),
        head=HeadWeights(root.hyper("output_hc"), root.vector("output_norm")),
        layers=tuple(
            _Binder(file, f"blk.{i}.").layer(config, i, config.ratio(i), i < config.hash_layers)
            for i in range(config.layers)
        ),
    )


# --- the MTP block -------------------------------------------------------------------------------


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

    `config` is the main model's. `trunk_file` serves to compare vocabularies and as the source of a final
    norm that the sidecar leaves out. Raises ModelFileError for another drafter, for a block of another
    model, and for everything missing or wrong at once.
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
    _compare(file, config, layout, trunk_file)
    return (
        _load_support(file, config) if layout == "mtp.0" else _load_nextn(file, config, trunk_file)
    )


def _refuse_dspark(file: GgufFile) -> None:
    architecture = str(file.metadata.get("general.architecture", ""))
    sign = re.compile(r"mtp\.0\.main_proj\.|dspark\.|mtp\.[12]\.|.*markov_head")
    found = next((name for name in file.tensors if sign.match(name)), None)
    if architecture in ("dflash", "dspark") or (
        found and "mtp.0.e_proj.weight" not in file.tensors
    ):
        raise ModelFileError(
            f"{file.path} holds a DSpark drafter ({found or f'architecture {architecture}'}), "
            "which is not covered",
            "use the MTP block of the first release, or set mtp.draft=0",
        )


def _compare(file: GgufFile, c: ModelConfig, layout: str, trunk_file: GgufFile | None) -> None:
    """Raise ModelFileError when the block was made for a model of other dimensions or vocabulary."""
    if trunk_file is not None and trunk_file.path == file.path:
        return
    wrong = []
    blocks = _nextn_blocks(file)
    block = blocks[0] if layout == "nextn" else 0
    if layout == "nextn" and blocks != [c.layers]:
        wrong.append(f"its MTP block is blk.{blocks[-1]}, the model has {c.layers} layers")
    stem = "mtp.0." if layout == "mtp.0" else f"blk.{block}."
    wrong += _other_dimensions(file, c, stem)
    ratios = file.metadata.get(f"{ARCHITECTURE}.attention.compress_ratios")
    if layout == "nextn" and isinstance(ratios, list) and len(ratios) > block:
        if ratios[block] != c.mtp_ratio:
            wrong.append(f"its block has ratio {ratios[block]}, the model gives it {c.mtp_ratio}")
    if trunk_file is not None:
        wrong += _other_tokens(file, trunk_file)
    if wrong:
        name = trunk_file.path.name if trunk_file is not None else "the model"
        raise ModelFileError(
            f"{file.path} was made for another model than {name}: {'; '.join(wrong)}",
            "give the MTP file that belongs to the model",
        )


def _other_dimensions(file: GgufFile, c: ModelConfig, stem: str) -> list[str]:
    """Differences in the dimensions that a block shares with its trunk, by metadata and tensors."""
    wrong = []
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
    for key, wanted in keys.items():
        value = file.metadata.get(f"{ARCHITECTURE}.{key}")
        if isinstance(value, int) and value != wanted:
            wrong.append(f"{key} is {value}, the model has {wanted}")
    widths = {
        f"{stem}attn_norm.weight": (-1, c.dim, "embedding width"),
        f"{stem}ffn_gate_inp.weight": (0, c.experts, "number of experts"),
        "token_embd.weight": (0, c.vocab, "vocabulary"),
    }
    for name, (axis, wanted, what) in widths.items():
        info = file.tensors.get(name)
        if info is not None and info.shape[axis] != wanted:
            wrong.append(f"its {what} is {info.shape[axis]} ({name}), the model's {wanted}")
    return wrong


def _other_tokens(file: GgufFile, trunk_file: GgufFile) -> list[str]:
    key = "tokenizer.ggml.tokens"
    ours, theirs = file.metadata.get(key), trunk_file.metadata.get(key)
    if not isinstance(ours, list) or not isinstance(theirs, list) or ours == theirs:
        return []
    if len(ours) != len(theirs):
        return [f"its tokenizer has {len(ours)} tokens, the model's {len(theirs)}"]
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return [f"its tokenizer differs from the model's at token {at}: {ours[at]!r}, {theirs[at]!r}"]


def _load_support(file: GgufFile, c: ModelConfig) -> MtpWeights:
    """The `mtp.0.*` layout: projections apart, the block's own head."""
    stem = "mtp.0."
    _check(
        file,
        [
            Slot(f"{stem}e_proj.weight", (c.dim, c.dim)),
            Slot(f"{stem}h_proj.weight", (c.dim, c.dim)),
            *(Slot(f"{stem}{n}.weight", (c.dim,), "vector") for n in ("enorm", "hnorm", "norm")),
            *_hyper_slots(f"{stem}hc_head", c, head=True),
            *_layer_slots(stem, c, c.mtp_ratio, hashed=False),
        ],
    )
    block = _Binder(file, stem)
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
    """The `blk.N.nextn.*` layout: one joined projection, the head in the file's `output_hc_*`."""
    stem = f"blk.{c.layers}."
    slots = [
        Slot(f"{stem}nextn.eh_proj.weight", (c.dim, 2 * c.dim)),
        *(Slot(f"{stem}nextn.{n}.weight", (c.dim,), "vector") for n in ("enorm", "hnorm")),
        *_hyper_slots("output_hc", c, head=True),
        *_layer_slots(stem, c, c.mtp_ratio, hashed=False),
    ]
    norm_name, norm_file = f"{stem}nextn.shared_head_norm.weight", file
    if norm_name not in file.tensors:
        norm_name = "output_norm.weight"
        if norm_name not in file.tensors and trunk_file is not None:
            norm_file = trunk_file
    own = {}
    for name in ("embed_tokens", "shared_head_head"):
        if f"{stem}nextn.{name}.weight" in file.tensors:
            own[name] = Slot(f"{stem}nextn.{name}.weight", (c.vocab, c.dim))
    norm_slot = Slot(norm_name, (c.dim,), "vector")
    _check(file, [*slots, *own.values(), *([norm_slot] if norm_file is file else [])])
    _check(norm_file, [norm_slot])
    block, root = _Binder(file, stem), _Binder(file)
    e_proj, h_proj = _split_columns(block.matrix("nextn.eh_proj"))
    return MtpWeights(
        e_proj=e_proj,
        h_proj=h_proj,
        enorm=block.vector("nextn.enorm"),
        hnorm=block.vector("nextn.hnorm"),
        layer=block.layer(c, c.layers, c.mtp_ratio, hashed=False),
        head=HeadWeights(
            root.hyper("output_hc"), _Binder(norm_file).vector(norm_name.removesuffix(".weight"))
        ),
        layout="nextn",
        embed=from_gguf(file, own["embed_tokens"].name) if "embed_tokens" in own else None,
        output=from_gguf(file, own["shared_head_head"].name) if "shared_head_head" in own else None,
        degraded=HC_DEGRADED if "blk.0.attn_norm.weight" in file.tensors else None,
    )


def _split_columns(joined: QTensor) -> tuple[QTensor, QTensor]:
    """Left and right half of the columns, as stored; decoded only if a block lies across the middle."""
    rows, width = joined.shape
    half = width // 2
    if half % block_weights(joined.type):
        joined = replace(joined, type="F32", data=joined.float())
    middle = joined.data.shape[1] // 2
    return (
        replace(
            joined,
            name=f"{joined.name}[e]",
            shape=(rows, half),
            data=joined.data[:, :middle].contiguous(),
        ),
        replace(
            joined,
            name=f"{joined.name}[h]",
            shape=(rows, half),
            data=joined.data[:, middle:].contiguous(),
        ),
    )
