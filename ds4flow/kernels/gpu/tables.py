"""What kernels look up: rotary angles by position, small vectors, the IQ2_XXS codebook, on the
device."""

from __future__ import annotations

import gguf
import torch

from ds4flow.model.rope import BLOCK, Rope


class DeviceVectors:
    """Copies of small tensors on a device, made once per tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """`value` on the device, contiguous; the original is kept alive with it."""
        kept = self._kept.get(id(value))
        if kept is None:
            kept = self._kept[id(value)] = (value, value.to(self.device).contiguous())
        return kept[1]


class AngleTables:
    """Cosines and sines of all positions of a context, by rotary table.

    A table that grows leaves the old one alive, because captured graphs hold its address.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[int, tuple[Rope, torch.Tensor, torch.Tensor]] = {}
        self._retired: list[tuple[Rope, torch.Tensor, torch.Tensor]] = []

    def grow(self, rope: Rope, positions: int) -> None:
        """Cover positions `0 .. positions-1`, with the bits of `rope.block`."""
        kept = self._tables.get(id(rope))
        if kept is not None:
            if kept[1].shape[0] >= positions:
                return
            self._retired.append(kept)
            positions = max(positions, 2 * kept[1].shape[0])
        blocks = [rope.block(i) for i in range(-(-positions // BLOCK))]
        cos = torch.cat([block[0] for block in blocks]).to(self.device)
        sin = torch.cat([block[1] for block in blocks]).to(self.device)
        self._tables[id(rope)] = (rope, cos, sin)

    def table(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos` and `sin`, each float32 `[positions, rope_dim / 2]`."""
        _, cos, sin = self._tables[id(rope)]
        return cos, sin


def codebook(device: torch.device) -> torch.Tensor:
    """The IQ2_XXS grid, int8 `[256, 8]`."""
    gguf.quants.IQ2_XXS.init_grid()
    grid = torch.from_numpy(gguf.quants.IQ2_XXS.grid).reshape(256, 8)
    return grid.to(torch.int8).contiguous().to(device)
