"""The DeepSeek-V4 trunk: tokens to hyper-connection streams to logits, for any number of rows.

Promise: the bits of a row do not depend on how many rows are in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ds4flow.device import ON_THE_CPU, check_fits, free_bytes
from ds4flow.errors import NOT_FINITE, NumericsError, UsageError, near_match
from ds4flow.gguf import GgufFile
from ds4flow.kernels.gpu.static import StaticKernels
from ds4flow.kernels.interface import Cache, Kernels
from ds4flow.kernels.reference import ReferenceKernels
from ds4flow.kernels.sharded import sharded_kernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.head import head_logits, not_finite
from ds4flow.model.layer import layer_forward, layer_matrices
from ds4flow.model.mtp import MtpBlock
from ds4flow.model.mtp_weights import load_mtp
from ds4flow.model.profile import Profile, find_profile
from ds4flow.model.rope import Rope
from ds4flow.model.shard import Shard
from ds4flow.model.transfer import on_device, report_progress
from ds4flow.model.weights import MtpWeights, TrunkWeights, load_trunk
from ds4flow.parallel import Group
from ds4flow.quants import QTensor
from ds4flow.traffic import weight_traffic


def _cpu_kernels(config: ModelConfig, profile: Profile, activations: str = "f32") -> Kernels:
    """The numba backend; imported when chosen, because numba takes a moment to load."""
    try:
        from ds4flow.kernels.cpu import CpuKernels
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("numba", "llvmlite"):
            raise
        raise UsageError(
            f"runtime.kernels=cpu needs {error.name}, which is not installed",
            "pip install numba, or use runtime.kernels=reference",
        ) from error
    return CpuKernels(config, profile, activations=activations)


def _gpu_kernels(
    config: ModelConfig, profile: Profile, device: torch.device | None = None
) -> Kernels:
    """The Triton backend; imported when chosen, because Triton is optional and slow to load."""
    try:
        from ds4flow.kernels.gpu.backend import GpuKernels
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise UsageError(
            "runtime.kernels=gpu needs triton, which is not installed",
            "pip install 'ds4flow[gpu]', or use runtime.kernels=reference",
        ) from error
    return GpuKernels(config, profile, device=device, progress=report_progress)


BACKENDS: dict[str, Callable[..., Kernels]] = {
    "reference": ReferenceKernels,
    "static": StaticKernels,
    "cpu": _cpu_kernels,
    "cpu-int8": partial(_cpu_kernels, activations="int8"),
    "gpu": _gpu_kernels,
}
"""Kernels by name, made from `(config, profile)`; those that can leave the CPU take `device`."""

HEAD = "output head"


class Model:
    """A loaded model: the trunk, and the MTP block when its weights are there.

    It holds weights and kernels only; everything that changes during a run is in the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: TrunkWeights,
        mtp_weights: MtpWeights | None,
        profile: Profile,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.weights = weights
        self.profile = profile
        self.kernels = kernels
        # other backends keep rotary tables of their own
        where = kernels.device if isinstance(kernels, ReferenceKernels) else None
        exact = profile.exact_angles
        self._plain_rope = Rope(config, compressed=False, exact=exact, device=where)
        self._compressed_rope = Rope(config, compressed=True, exact=exact, device=where)
        self._ropes = [self.rope(layer.ratio) for layer in weights.layers]
        self.mtp: MtpBlock | None = None
        if mtp_weights is not None:
            ratio = config.mtp_ratio
            rope = self._compressed_rope if ratio else self._plain_rope
            self.mtp = MtpBlock(config, mtp_weights, weights, kernels, rope)

    @classmethod
    def load(
        cls,
        main: GgufFile,
        mtp: GgufFile | None = None,
        *,
        profile: str = "official",
        kernels: str = "reference",
        device: torch.device | None = None,
        beside: int = 0,
        group: Group | None = None,
    ) -> Model:
        """Bind the tensors of a main file and of an optional MTP file and prepare the kernels.

        On a `device` other than the CPU the weights are copied there as stored; `beside` are the
        bytes that the cache will need there. In a `group` only this process's heads and experts are
        kept, and there is no MTP block. Raises ModelFileError for what the files lack, UsageError
        for an unknown profile or backend, Ds4FlowError when it does not all fit.
        """
        config = ModelConfig.from_gguf(main)
        numerics = find_profile(profile)
        if kernels not in BACKENDS:
            raise UsageError(
                f"runtime.kernels={kernels} is not a kernel backend",
                f"use one of: {', '.join(BACKENDS)} {near_match(kernels, BACKENDS)}".rstrip(),
            )
        if numerics.kv_fp8 and (config.head_dim - config.rope_dim) % 64:
            raise UsageError(
                f"model.profile={profile} rounds KV rows in blocks of 64 channels, and this has "
                f"{config.head_dim - config.rope_dim} non-rotary ones",
                "use model.profile=plain",
            )
        weights = load_trunk(main, config)
        mtp_weights = None if mtp is None else load_mtp(mtp, config, main)
        options = {} if device is None or kernels in ON_THE_CPU else {"device": device}
        if group is None:
            backend = BACKENDS[kernels](config, numerics, **options)
        else:
            shard = Shard(config, group.rank, group.world)
            weights, mtp_weights = shard.trunk(weights), None
            backend = sharded_kernels(kernels, numerics, group, shard, device)
        model = cls(config, weights, mtp_weights, numerics, backend)
        matrices = list(model.matrices())
        if device is not None:
            _check_room(matrices, weights.embed, beside, free_bytes(device))
        if device is not None and device.type != "cpu" and kernels != "gpu":
            # the Triton backend packs and keeps its own copies
            weights, mtp_weights = on_device((weights, mtp_weights), device, report_progress)
            model = cls(config, weights, mtp_weights, numerics, backend)
            matrices = list(model.matrices())
        backend.prepare(matrices)
        return model

    @property
    def device(self) -> torch.device:
        """Where activations and cache lie."""
        found: torch.device = getattr(self.kernels, "device", torch.device("cpu"))
        return found

    def matrices(self) -> Iterator[QTensor]:
        """Every weight that enters a matrix product, MTP included; the embedding is none."""
        yield from self._trunk_matrices()
        if self.mtp is not None:
            yield from self.mtp.matrices()

    def _trunk_matrices(self) -> Iterator[QTensor]:
        yield self.weights.output
        yield self.weights.head.hc.fn
        for layer in self.weights.layers:
            yield from layer_matrices(layer)

    def weight_bytes(self, rows: int) -> float:
        """Bytes of the matrices that a pass of `rows` rows reads (`ds4flow.traffic`)."""
        return weight_traffic(self._trunk_matrices(), self.config, rows=rows).total

    def rope(self, ratio: int) -> Rope:
        """The rotary table of layers with compression `ratio`."""
        return self._compressed_rope if ratio else self._plain_rope

    def forward(self, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
        """Run the trunk on `tokens` at positions `cache.length ..`; the cursor does not move.

        Returns the float32 streams `[M, N, D]` after the last layer. The cache rows of these
        positions are written and become visible when the cache commits them. Raises NumericsError
        naming the layer when a value is not finite.
        """
        start = cache.length
        cache.check_room(start, len(tokens))
        if self.kernels.passes is not None:
            return self.kernels.passes.trunk(tokens, self.weights, cache.layers, self._ropes, start)
        embedded = self.kernels.embed(self.weights.embed, tokens)
        streams = embedded[:, None, :].expand(-1, self.config.streams, -1).contiguous()
        whole = self.kernels.layers
        if whole is not None:
            stacked = list(zip(self.weights.layers, cache.layers, self._ropes, strict=True))
            return whole(streams, tokens, stacked, start)
        for layer, rows in zip(self.weights.layers, cache.layers, strict=True):
            streams = layer_forward(
                self.kernels, streams, tokens, layer, rows, self.rope(layer.ratio), start
            )
            if not bool(torch.isfinite(streams).all()):
                row = int(torch.nonzero(~torch.isfinite(streams).flatten(1).all(1))[0])
                raise NumericsError(
                    f"layer {layer.index} gave a value that is not finite at position "
                    f"{start + row} (row {row} of the pass)",
                    NOT_FINITE,
                )
        return streams

    def decide(self, tokens: Sequence[int], cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` and `logits` of all its rows, in one call where the kernels can."""
        passes, weights, start = self.kernels.passes, self.weights, cache.length
        if passes is None:
            streams = self.forward(tokens, cache)
            return streams, self.logits(streams)
        cache.check_room(start, len(tokens))
        streams, logits, bad = passes.decide(tokens, weights, cache.layers, self._ropes, start)
        if bad >= 0:
            raise not_finite(HEAD, bad)
        return streams, logits

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Logits `[M, V]` of streams `[M, N, D]`; NumericsError when one is not finite."""
        weights = self.weights
        return head_logits(self.kernels, streams, weights.head, weights.output, HEAD)


def _check_room(matrices: Sequence[QTensor], embed: QTensor, beside: int, free: int | None) -> None:
    """Raise Ds4FlowError unless weights, cache and the copy of one weight on its way fit."""
    total = sum(weight.nbytes for weight in matrices) + embed.nbytes
    largest = max(weight.nbytes for weight in matrices)
    check_fits(total + beside + largest, free, "the weights and the cache")
