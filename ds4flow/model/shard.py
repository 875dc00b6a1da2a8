"""The part of a model's weights that one of several processes keeps: heads and experts.

Promise: parts are views of whole rows or whole experts of the stored weight; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds4flow.errors import UsageError
from ds4flow.model.config import ModelConfig
from ds4flow.model.weights import LayerWeights, TrunkWeights
from ds4flow.quants import QTensor


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `world` equal ones of the heads (with their output groups) and experts.

    Raises UsageError when they cannot be divided.
    """

    config: ModelConfig  # of the whole model
    rank: int
    world: int

    def __post_init__(self) -> None:
        c = self.config
        counts = {"heads": c.heads, "output groups": c.groups, "experts": c.experts}
        bad = [f"{count} {what}" for what, count in counts.items() if count % self.world]
        if bad:
            raise UsageError(
                f"runtime.tensor_parallel={self.world} does not divide {' and '.join(bad)}",
                "use a number of processes that divides heads, output groups and experts",
            )

    @property
    def local(self) -> ModelConfig:
        """The configuration that this process's attention sees."""
        c = self.config
        return replace(c, heads=c.heads // self.world, groups=c.groups // self.world)

    def span(self, count: int) -> tuple[int, int]:
        """First and last plus one of this process's part of `count` things."""
        each = count // self.world
        return self.rank * each, (self.rank + 1) * each

    def trunk(self, weights: TrunkWeights) -> TrunkWeights:
        """The trunk with this process's heads and experts; all else is whole."""
        return replace(weights, layers=tuple(self._layer(layer) for layer in weights.layers))

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        moe = layer.moe
        first, last = self.span(self.config.heads)
        return replace(
            layer,
            q_b=self._part(layer.q_b),
            sinks=layer.sinks[first:last],
            out_a=self._part(layer.out_a),
            moe=replace(
                moe, gate=self._part(moe.gate), up=self._part(moe.up), down=self._part(moe.down)
            ),
        )

    def _part(self, weight: QTensor) -> QTensor:
        """This process's part of the first axis."""
        first, last = self.span(weight.shape[0])
        return replace(
            weight,
            name=f"{weight.name}[{first}:{last}]",
            shape=(last - first, *weight.shape[1:]),
            data=weight.data[first:last],
        )
