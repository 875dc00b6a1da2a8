"""Stored weight blocks as aligned planes of the same bits: codes, scales, block factors.

Promise: a permutation of the stored bytes, nothing is rounded or re-quantised. GGUF blocks are 34,
66 or 84 bytes long, which no wide load can address; planes are what a GPU reads at full width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds4flow.errors import ModelFileError
from ds4flow.quants import QTensor

UNIT = {"F32": 32, "F16": 32, "BF16": 32, "Q8_0": 32, "MXFP4": 32}
UNIT |= {"Q4_K": 64, "Q2_K": 128, "IQ2_XXS": 32}
"""Weights along a row that a product consumes in one step."""
TYPES = tuple(UNIT)


@dataclass(frozen=True, eq=False)
class Planes:
    """One weight on a device: `rows` rows (all experts of a stack together) of `width` weights.

    `codes` are the values or quants, `scales` the inner scales, `factors` the halves that scale a
    whole block; types without one of them repeat `codes`, so that every kernel has the same
    arguments.
    """

    name: str
    type: str
    rows: int
    width: int
    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    @property
    def units(self) -> int:
        """Steps of a product along a row."""
        return self.width // UNIT[self.type]


def check(weight: QTensor) -> None:
    """Raise ModelFileError for a type or a width that these kernels do not cover."""
    if weight.type not in TYPES:
        raise ModelFileError(
            f"{weight.name} is stored as {weight.type}, which the gpu kernels do not read",
            f"use runtime.kernels=reference, or a file with {', '.join(TYPES)}",
        )
    if weight.shape[-1] % UNIT[weight.type]:
        raise ModelFileError(
            f"{weight.name} has rows of {weight.shape[-1]} weights; for {weight.type} the gpu "
            f"kernels need a multiple of {UNIT[weight.type]}",
            "use runtime.kernels=reference",
        )


def pack(weight: QTensor, device: torch.device) -> Planes:
    """Copy a weight to `device` and sort its bytes into planes there."""
    check(weight)
    width = weight.shape[-1]
    rows = 1
    for size in weight.shape[:-1]:
        rows *= size
    raw = weight.data.to(device)
    codes = scales = factors = None
    if weight.type in ("F32", "F16", "BF16"):
        codes = raw.reshape(rows, width).contiguous()
    elif weight.type == "Q8_0":
        blocks = raw.reshape(rows, width // 32, 34)
        codes = blocks[..., 2:].contiguous().view(torch.int8)
        scales = blocks[..., :2].contiguous().view(torch.float16)
    elif weight.type == "MXFP4":
        blocks = raw.reshape(rows, width // 32, 17)
        codes, scales = blocks[..., 1:].contiguous(), blocks[..., 0].contiguous()
    elif weight.type == "Q4_K":
        blocks = raw.reshape(rows, width // 256, 144)
        codes, scales = blocks[..., 16:].contiguous(), blocks[..., 4:16].contiguous()
        factors = blocks[..., :4].contiguous().view(torch.float16)
    elif weight.type == "Q2_K":
        blocks = raw.reshape(rows, width // 256, 84)
        codes, scales = blocks[..., 16:80].contiguous(), blocks[..., :16].contiguous()
        factors = blocks[..., 80:].contiguous().view(torch.float16)
    else:
        blocks = raw.reshape(rows, width // 256, 66)
        codes = blocks[..., 2:].contiguous().view(torch.int32)
        factors = blocks[..., :2].contiguous().view(torch.float16)
    return Planes(
        weight.name,
        weight.type,
        rows,
        width,
        codes,
        codes if scales is None else scales,
        codes if factors is None else factors,
    )
