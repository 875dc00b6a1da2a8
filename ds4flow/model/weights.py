"""The weights of a DeepSeek-V4 model as one structure, the same bits from both MTP layouts.

Promise: a file is checked as a whole before any weight is read. Matrices stay as stored (views of
the mapping); vectors become float32 tensors, whatever float type they are stored in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import (
    ARCHITECTURE,
    SUPPORT_ARCHITECTURE,
    ModelConfig,
    check_architecture,
)
from ds4flow.model.slots import Slot, check, check_trunk, hyper_slots, layer_slots, vectors
from ds4flow.quants import QTensor, block_weights, from_gguf

LAYOUTS = "mtp.0.e_proj.weight (support file) and blk.N.nextn.eh_proj.weight (llama.cpp's layout)"
HC_DEGRADED = (
    "trunk and nextn tensors share one file, so output_hc_* are the trunk's: drafts use the "
    "trunk's hyper-connection head instead of the MTP block's own and are accepted less often"
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
    """Mixture of experts: router `(E, D)`, stacks `(E, out, in)`, a shared expert.

    Selection is by router plus `bias (E)`, or by token through `table (V, used)`.
    """

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
    """What lies before the output matrix: hyper-connection head and final norm `(D)`."""

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
    """Bind the main model's tensors; nothing but the small vectors and tables is read.

    Raises ModelFileError with all missing tensors, wrong shapes and wrong types at once.
    """
    check_trunk(file, config)
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
    block, root = _Binder(file, stem), _Binder(file)
    e_proj, h_proj = _split_columns(block.matrix("nextn.eh_proj"))
    return MtpWeights(
        e_proj=e_proj,
        h_proj=h_proj,
        enorm=block.vector("nextn.enorm"),
        hnorm=block.vector("nextn.hnorm"),
        layer=block.layer(c, c.layers, c.mtp_ratio, hashed=False),
        head=HeadWeights(root.hyper("output_hc"), _Binder(norm_file).vector(norm)),
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
