"""A model of the published dimensions and block formats with random weights, made where it is used.

For measuring speed and for compiling kernels at their real shapes; its text means nothing. On the
`meta` device it takes no memory at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ds4flow.model.config import ModelConfig
from ds4flow.model.weights import (
    CompressorWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    MoeWeights,
    MtpWeights,
    TrunkWeights,
)
from ds4flow.quants import QTensor
from ds4flow.synth.presets import MTP, Q2, Q4

MIXES: Mapping[str, Mapping[str, str]] = {
    "q2": {**Q2, **MTP},
    "q4": {**Q4, **MTP},
    "mxfp4": {**Q4, **MTP, "gate_up": "MXFP4", "down": "MXFP4"},
    "q8": {**Q4, **MTP, "gate_up": "Q8_0", "down": "Q8_0", "mtp_experts": "Q8_0"},
}
"""Weight types by role: the two published files, the experts as they were trained, and one for
small dimensions."""

_FACTORS = {"Q8_0": (0, 1), "Q4_K": (0, 2), "Q2_K": (80, 2), "IQ2_XXS": (0, 1)}
"""Byte and number of the halves that scale a block."""
_SPREAD = {"Q8_0": 74.0, "Q4_K": 290.0, "Q2_K": 14.0, "IQ2_XXS": 62.0, "MXFP4": 5.6}
"""Standard deviation of random codes times their inner scales, roughly."""


class Synthesis:
    """Makes random weights of given types on a device; the same seed gives the same bits there.

    `mix` is one of MIXES, or the types by role.
    `adopt` may take each matrix over as soon as it is made and return what stands for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        mix: str | Mapping[str, str],
        device: torch.device,
        seed: int = 0,
        adopt: Callable[[QTensor], QTensor] | None = None,
    ) -> None:
        self.config = config
        self.types = MIXES[mix] if isinstance(mix, str) else mix
        self.device = device
        self._adopt = adopt
        self._count = 0
        self._generator: torch.Generator | None = None
        if device.type != "meta":
            self._generator = torch.Generator(device).manual_seed(seed)

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=self._generator, device=self.device)

    def matrix(self, kind: str, *shape: int, gain: float = 1.0) -> QTensor:
        """A weight whose products have about the size of their input, times `gain`."""
        weight = self._matrix(kind, shape, gain)
        return weight if self._adopt is None else self._adopt(weight)

    def _matrix(self, kind: str, shape: tuple[int, ...], gain: float) -> QTensor:
        self._count += 1
        name = f"synth.{self._count}"
        scale = gain / math.sqrt(shape[-1])
        if kind in ("F32", "F16"):
            value = self._normal(*shape, scale=scale)
            return QTensor(name, kind, shape, value if kind == "F32" else value.half())
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = math.prod(shape[:-1]) * (shape[-1] // block)
        data = torch.randint(
            0, 256, (blocks, size), dtype=torch.uint8, generator=self._generator, device=self.device
        )
        if kind == "MXFP4":  # an exponent, of the doubled values
            data[:, 0] = 128 + round(math.log2(scale / _SPREAD[kind]))
            return QTensor(name, kind, shape, data.reshape(*shape[:-1], -1))
        at, count = _FACTORS[kind]
        factor = torch.full((blocks, count), scale / _SPREAD[kind], device=self.device).half()
        data[:, at : at + 2 * count] = factor.view(torch.uint8)
        return QTensor(name, kind, shape, data.reshape(*shape[:-1], -1))

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, device=self.device)

    def hyper(self, *, head: bool, mtp: bool = False) -> HyperWeights:
        """A hyper-connection near the identity."""
        c, kind = self.config, self.types["mtp_side" if mtp else "side"]
        mix = c.streams if head else (2 + c.streams) * c.streams
        scale = torch.full((1 if head else 3,), 0.1, device=self.device)
        return HyperWeights(
            self.matrix(kind, mix, c.streams * c.dim), self._normal(mix, scale=0.1), scale
        )

    def _compressor(self, ratio: int, width: int) -> CompressorWeights:
        line, side = width * (2 if ratio == 4 else 1), self.types["side"]
        return CompressorWeights(
            self.matrix(side, line, self.config.dim),
            self.matrix(side, line, self.config.dim),
            self._normal(ratio, line, scale=0.1),
            self._ones(width),
        )

    def _moe(self, hashed: bool, mtp: bool) -> MoeWeights:
        c, types = self.config, self.types
        into, out = ("mtp_experts",) * 2 if mtp else ("gate_up", "down")
        table = None
        if hashed:
            shape = (c.vocab, c.experts_used)
            table = torch.randint(
                0,
                c.experts,
                shape,
                dtype=torch.int32,
                generator=self._generator,
                device=self.device,
            )
        inner = (c.experts, c.expert_dim, c.dim)
        return MoeWeights(
            router=self.matrix(types["mtp_side" if mtp else "side"], c.experts, c.dim),
            bias=None if hashed else self._normal(c.experts, scale=0.1),
            table=table,
            gate=self.matrix(types[into], *inner),
            up=self.matrix(types[into], *inner),
            down=self.matrix(types[out], c.experts, c.dim, c.expert_dim),
            shared_gate=self.matrix(types["dense"], c.expert_dim, c.dim),
            shared_up=self.matrix(types["dense"], c.expert_dim, c.dim),
            shared_down=self.matrix(types["dense"], c.dim, c.expert_dim),
        )

    def layer(self, index: int, ratio: int, *, hashed: bool, mtp: bool = False) -> LayerWeights:
        """One layer, with the types of the main file or of the MTP file."""
        c, dense, side = self.config, self.types["dense"], self.types["side"]
        indexer = None
        if ratio == 4:
            indexer = IndexerWeights(
                self.matrix(side, c.index_heads * c.index_dim, c.q_rank),
                self.matrix(side, c.index_heads, c.dim),
                self._compressor(4, c.index_dim),
            )
        return LayerWeights(
            index=index,
            ratio=ratio,
            clamp=c.clamp[index],
            clamp_shared=c.clamp_shared[index],
            hc_attn=self.hyper(head=False, mtp=mtp),
            attn_norm=self._ones(c.dim),
            q_a=self.matrix(dense, c.q_rank, c.dim),
            q_a_norm=self._ones(c.q_rank),
            q_b=self.matrix(dense, c.heads * c.head_dim, c.q_rank),
            kv=self.matrix(dense, c.head_dim, c.dim),
            kv_norm=self._ones(c.head_dim),
            sinks=self._normal(c.heads),
            out_a=self.matrix(dense, c.groups * c.o_rank, c.head_dim * c.heads // c.groups),
            out_b=self.matrix(dense, c.dim, c.groups * c.o_rank),
            compressor=self._compressor(ratio, c.head_dim) if ratio else None,
            indexer=indexer,
            hc_ffn=self.hyper(head=False, mtp=mtp),
            ffn_norm=self._ones(c.dim),
            moe=self._moe(hashed, mtp),
        )

    def trunk(self) -> TrunkWeights:
        """All layers, embedding and head."""
        c = self.config
        return TrunkWeights(
            embed=self.matrix(self.types["embed"], c.vocab, c.dim, gain=math.sqrt(c.dim)),
            output=self.matrix(self.types["output"], c.vocab, c.dim),
            head=HeadWeights(self.hyper(head=True), self._ones(c.dim)),
            layers=tuple(
                self.layer(i, c.ratio(i), hashed=i < c.hash_layers) for i in range(c.layers)
            ),
        )

    def mtp(self) -> MtpWeights:
        """The MTP block in the support file's layout."""
        c = self.config
        return MtpWeights(
            e_proj=self.matrix(self.types["dense"], c.dim, c.dim),
            h_proj=self.matrix(self.types["dense"], c.dim, c.dim),
            enorm=self._ones(c.dim),
            hnorm=self._ones(c.dim),
            layer=self.layer(c.layers, c.mtp_ratio, hashed=False, mtp=True),
            head=HeadWeights(self.hyper(head=True, mtp=True), self._ones(c.dim)),
            layout="mtp.0",
        )


def shortened(config: ModelConfig, layers: int) -> ModelConfig:
    """The first layers of a model and its MTP block, all else unchanged."""
    keep = (*range(layers), config.layers)
    return replace(
        config,
        layers=layers,
        ratios=tuple(config.ratios[i] for i in keep),
        clamp=tuple(config.clamp[i] for i in keep),
        clamp_shared=tuple(config.clamp_shared[i] for i in keep),
        hash_layers=min(config.hash_layers, layers),
    )
