"""Kernels of one process among several: its heads and experts are computed, the rest received.

Promise: the bits of one process alone. Products of whole rows or whole experts do not depend on the
rows and experts that lie elsewhere, which `prepare` checks where a library chooses the order of
sums; what is received is put in its place before anything is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ds4flow.errors import Ds4FlowError
from ds4flow.kernels.gpu.static import StaticKernels
from ds4flow.kernels.interface import Kernels, LayerRows
from ds4flow.kernels.reference import BLOCK_ROWS, ReferenceKernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import Rope
from ds4flow.model.shard import Shard
from ds4flow.model.weights import LayerWeights
from ds4flow.parallel import Group
from ds4flow.quants import QTensor

if TYPE_CHECKING:
    _Base = ReferenceKernels
else:
    _Base = object


class Exchange(_Base):
    """What is received from the other processes; mixed into the kernels that compute the parts."""

    group: Group
    shard: Shard

    def share(self, group: Group, shard: Shard) -> None:
        """Take part in `group` with the part `shard`."""
        self.group, self.shard = group, shard

    def _grouped(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        return torch.cat(self.group.gather(super()._grouped(heads, layer)), dim=-1)

    def _expert_parts(
        self, x: torch.Tensor, chosen: torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        each = self.shard.config.experts // self.shard.world
        parts = self.group.gather(self.own_parts(x, chosen, layer))
        owner = (chosen // each).long()[None, :, :, None].expand(1, -1, -1, x.shape[-1])
        return torch.stack(parts).gather(0, owner)[0]

    def own_parts(self, x: torch.Tensor, chosen: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """`[M, used, D]`, right where the expert is this process's; elsewhere anything."""
        first, last = self.shard.span(self.shard.config.experts)
        return super()._expert_parts(x, self._own(chosen, first, last), layer)

    def _own(self, chosen: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Numbers in this process's part of the stacks; what lies elsewhere computes anything."""
        return (chosen - first).clamp(0, last - first - 1)


class _WholeHeads(Exchange):
    """The torch kernels: a product over heads keeps its shape, so that the library's order of sums
    does."""

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Check also that a part of the query rows has the bits of the whole."""
        super().prepare(weights)
        config = self.shard.config
        shape = (config.heads * config.head_dim, config.q_rank)
        generator = torch.Generator().manual_seed(shape[0])
        weight, rows = (
            torch.randn(*size, generator=generator).to(self.device)
            for size in (shape, (BLOCK_ROWS, config.q_rank))
        )
        first, last = self.shard.span(shape[0])
        whole = functional.linear(rows, weight)[:, first:last]
        if not torch.equal(functional.linear(rows, weight[first:last].contiguous()), whole):
            raise Ds4FlowError(
                f"products of this machine's torch change bits when split over {self.shard.world} "
                "processes, so the text could differ from one process's",
                "use one process, or runtime.kernels=gpu",
            )

    def attend(
        self,
        q: torch.Tensor,
        layer: LayerWeights,
        rows: LayerRows,
        rope: Rope,
        start: Any,
        selected: Any,
    ) -> torch.Tensor:
        """As for all heads; those of other processes are zeros."""
        heads = self.shard.config.heads
        first, last = self.shard.span(heads)
        padded = q.new_zeros(q.shape[0], heads, q.shape[2])
        padded[:, first:last] = q
        sinks = layer.sinks.new_zeros(heads)
        sinks[first:last] = layer.sinks
        whole = replace(layer, sinks=sinks)
        return super().attend(padded, whole, rows, rope, start, selected)[:, first:last]


class ShardedReference(_WholeHeads, ReferenceKernels):
    """The reference kernels of one process among several."""


class ShardedStatic(_WholeHeads, StaticKernels):
    """The fixed-shape kernels of one process among several."""


def sharded_kernels(
    name: str, profile: Profile, group: Group, shard: Shard, device: torch.device | None
) -> Kernels:
    """The kernels `name` (reference, static or gpu) of this process."""
    made: Any
    if name == "gpu":
        made = _sharded_gpu(shard.local, profile, device)
        made.shares = shard.world
    else:
        classes = {"reference": ShardedReference, "static": ShardedStatic}
        made = classes[name](shard.local, profile, device)
    made.share(group, shard)
    kernels: Kernels = made
    return kernels


def _sharded_gpu(config: ModelConfig, profile: Profile, device: torch.device | None) -> Any:
    from ds4flow.kernels.gpu.backend import GpuKernels
    from ds4flow.model.transfer import report_progress

    class ShardedGpu(Exchange, GpuKernels):  # type: ignore[misc]  # not torch kernels after all
        """The Triton kernels of one process among several."""

        def _own(self, chosen: torch.Tensor, first: int, last: int) -> torch.Tensor:
            """-1 for what lies elsewhere, which the kernels leave out."""
            mine = (chosen >= first) & (chosen < last)
            return torch.where(mine, chosen - first, -1)

    made: Any = ShardedGpu
    return made(config, profile, device=device, progress=report_progress)
