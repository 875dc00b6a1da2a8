"""The weights of a DeepSeek-V4 model as one structure, and the trunk bound to its file.

Promise: a file is checked as a whole before any weight is read. Matrices stay as stored (views of
the mapping); vectors become float32 tensors, whatever float type they are stored in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.model.slots import check_trunk
from ds4flow.quants import QTensor, from_gguf


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


class Binder:
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
    root = Binder(file)
    return TrunkWeights(
        embed=root.matrix("token_embd"),
        output=root.matrix("output"),
        head=HeadWeights(root.hyper("output_hc"), root.vector("output_norm")),
        layers=tuple(
            Binder(file, f"blk.{i}.").layer(config, i, config.ratio(i), i < config.hash_layers)
            for i in range(config.layers)
        ),
    )
