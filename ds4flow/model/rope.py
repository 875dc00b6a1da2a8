"""Rotary position tables: interleaved pairs on the last channels, YaRN on compressed layers only.

The table of a position is computed in blocks of fixed size, so its bits never depend on how many
positions were asked for.
"""

from __future__ import annotations

import math

import torch

from ds4flow.model.config import ModelConfig

BLOCK = 256  # positions per lazily computed table block


def frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """Angular frequencies of the rotary pairs, float64 `[rope_dim / 2]`.

    Layers without compression use the plain base; compressed layers use their own base with the
    YaRN interpolation (no magnitude factor).
    """
    half = config.rope_dim // 2
    pair = torch.arange(half, dtype=torch.float64)
    base = config.rope_base_compress if compressed else config.rope_base
    plain = torch.pow(torch.tensor(base, dtype=torch.float64), -2.0 * pair / config.rope_dim)
    if not compressed or config.yarn_factor == 1.0:
        return plain

    def correction(rotations: float) -> float:
        turns = config.yarn_original / (2.0 * math.pi * rotations)
        return config.rope_dim * math.log(turns) / (2.0 * math.log(base))

    low = max(math.floor(correction(config.yarn_beta_fast)), 0)
    high = min(math.ceil(correction(config.yarn_beta_slow)), config.rope_dim - 1)
    width = float(high - low) if high != low else 0.001
    ramp = ((pair - low) / width).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / config.yarn_factor * ramp


class Rope:
    """Cosines and sines by absolute position for one kind of layer.

    `exact` forms the angle in float64; otherwise frequency and product are rounded to float32
    first.
    """

    def __init__(
        self,
        config: ModelConfig,
        compressed: bool,
        exact: bool,
        device: torch.device | None = None,
    ) -> None:
        self.width = config.rope_dim
        self.frequencies = frequencies(config, compressed)
        self.exact = exact
        self.device = device
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def block(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of positions `index*BLOCK ..`, each float32 `[BLOCK, rope_dim / 2]`."""
        if index not in self._blocks:
            positions = torch.arange(index * BLOCK, (index + 1) * BLOCK, dtype=torch.float64)
            if self.exact:
                angles = positions[:, None] * self.frequencies[None, :]
            else:
                angles = (positions.float()[:, None] * self.frequencies.float()[None, :]).double()
            self._blocks[index] = (
                torch.cos(angles).float().to(self.device),
                torch.sin(angles).float().to(self.device),
            )
        return self._blocks[index]

    def rows(self, start: int, count: int, step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of positions `start, start+step, ..`, each float32 `[count, rope_dim / 2]`."""
        cosines, sines = [], []
        for position in range(start, start + count * step, step):
            cos, sin = self.block(position // BLOCK)
            cosines.append(cos[position % BLOCK])
            sines.append(sin[position % BLOCK])
        return torch.stack(cosines), torch.stack(sines)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last `2 * cos.shape[-1]` channels of `x [..., width]` by adjacent pairs.

    `cos` and `sin` must broadcast against `x[..., : rope_dim / 2]`. Pass `-sin` for the inverse.
    """
    width = 2 * cos.shape[-1]
    kept, turned = x[..., :-width], x[..., -width:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2)), dim=-1)
