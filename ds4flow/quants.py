"""GGUF block formats to float32 in vectorised torch, on any device.

Promise: bit-identical to `gguf.quants.dequantize` for every type; a weight stays in its stored form
until it is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ds4flow.errors import ModelFileError
from ds4flow.gguf import PLAIN_TYPES, GgufFile

FLOAT_TYPES = ("F32", "F16", "BF16")
INTEGER_TYPES = ("I32", "I64")


@dataclass(frozen=True, eq=False)
class QTensor:
    """One weight as stored: `shape` in torch order, `data` uint8 `[.., bytes per row]` or typed."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: torch.Tensor

    def float(self) -> torch.Tensor:
        """The weight as float32 `[shape]`, with the bits of the reference decoder."""
        return dequantize(self.data, self.type, self.shape)

    def rows(self, index: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Float32 `[len(index), width]` of some rows of a 2-D tensor; only they are decoded."""
        where = torch.as_tensor(index, dtype=torch.long, device=self.data.device)
        picked = self.data.index_select(0, where)
        return dequantize(picked, self.type, (where.numel(), *self.shape[1:]))

    def expert(self, number: int) -> QTensor:
        """Slice `number` of a 3-D stack, as a view."""
        return replace(
            self, name=f"{self.name}[{number}]", shape=self.shape[1:], data=self.data[number]
        )

    def to(self, device: torch.device | str) -> QTensor:
        """The same stored form on another device."""
        return replace(self, data=self.data.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""
        return self.data.numel() * self.data.element_size()


def from_gguf(file: GgufFile, name: str) -> QTensor:
    """A tensor of a file as a view of the mapping; read-only, so it must not be written to."""
    array = file.array(name)
    info = file.tensors[name]
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; nothing in this program writes to a weight
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        data = torch.from_numpy(array)
    if info.type == "BF16":
        data = data.view(torch.bfloat16)
    return QTensor(name, info.type, info.shape, data)


def block_weights(type_name: str) -> int:
    """Weights in one block of a type; 1 for plain types."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]


def can_decode(type_name: str) -> bool:
    """Whether `dequantize` knows a type."""
    if type_name in FLOAT_TYPES or type_name in _DECODERS:
        return True
    return type_name in GGMLQuantizationType.__members__ and hasattr(gguf.quants, type_name)


def dequantize(data: torch.Tensor, type_name: str, shape: Sequence[int]) -> torch.Tensor:
    """Float32 `[shape]` of stored weights, on the device of `data`.

    `data` is typed for plain types and uint8 for block types. Raises ModelFileError for a type
    without a decoder and for rows that are not whole blocks.
    """
    shape = tuple(shape)
    if type_name in PLAIN_TYPES:
        return data.to(torch.float32).reshape(shape)
    if not can_decode(type_name):
        raise ModelFileError(
            f"weights of type {type_name} cannot be decoded", "get a file with another quantisation"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    width = shape[-1] if shape else 0
    if width == 0 or width % block:
        raise ModelFileError(
            f"rows of {width} weights are not whole {type_name} blocks of {block}",
            "get a file with another quantisation",
        )
    count = width // block
    for dim in shape[:-1]:
        count *= dim
    if data.dtype != torch.uint8 or data.numel() != count * block_bytes:
        raise ModelFileError(
            f"{type_name} weights of shape {shape} need {count * block_bytes} bytes, got "
            f"{data.numel()} values of {data.dtype}",
            "the file is damaged; download it again",
        )
    decode = _DECODERS.get(type_name)
    if decode is None:
        return _by_gguf(data, type_name).reshape(shape)
    return decode(data.reshape(count, block_bytes)).reshape(shape)


def _by_gguf(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """Types outside the published V4 files: the reference decoder itself, in numpy."""
    blocks = np.ascontiguousarray(data.cpu().numpy())
    with np.errstate(all="ignore"):  # NaN from a damaged scale is reported where it is used
        values = gguf.quants.dequantize(blocks, GGMLQuantizationType[type_name])
    return torch.from_numpy(values).to(data.device)


# --- decoders: uint8 [blocks, bytes] to float32 [blocks, weights]; the order of operations is fixed


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half at byte `at` of every block, as float32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifts(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    low = (_half(blocks, 80) * (scales & 15).float())[..., None]
    floor = (_half(blocks, 82) * (scales >> 4).float())[..., None]
    quads = blocks[:, 16:80].reshape(-1, 2, 1, 32)
    codes = (quads >> _shifts((0, 2, 4, 6), quads).view(1, 1, 4, 1)) & 3
    return low * codes.reshape(-1, 16, 16).float() - floor


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=-1)
    least = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=-1)
    step = (_half(blocks, 0) * scale.float())[..., None]
    floor = (_half(blocks, 2) * least.float())[..., None]
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = (pairs >> _shifts((0, 4), pairs).view(1, 1, 2, 1)) & 15
    return step * codes.reshape(-1, 8, 32).float() - floor


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    grid, signs = _iq2_xxs_tables(blocks.device)
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    words = groups[..., 4:].contiguous().view(torch.int32)  # [blocks, 8, 1]
    scale = _half(blocks, 0) * (0.5 + ((words[..., 0] >> 28) & 15).float()) * 0.25
    which = (words >> _shifts((0, 7, 14, 21), words)) & 127
    values = grid[groups[..., :4].int()]  # [blocks, 8, 4, 8]
    return scale[..., None, None] * values * signs[which]


@lru_cache(maxsize=8)
def _iq2_xxs_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The codebook `[256, 8]` and the signs `[128, 8]` (an even number of minus signs each)."""
    gguf.quants.IQ2_XXS.init_grid()
    grid = torch.tensor(gguf.quants.IQ2_XXS.grid).reshape(256, 8)
    codes = torch.arange(128)[:, None] >> torch.arange(8) & 1
    codes[:, 7] = codes.sum(1) % 2
    return grid.to(device), (1.0 - 2.0 * codes.float()).to(device)


_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # the table is doubled, so the scale is half of 2^(e-127): subnormal below e = 2
    exponent = blocks[:, :1].int()
    small = 0x00200000 << exponent.clamp(max=1)
    bits = torch.where(exponent < 2, small, (exponent.clamp(min=1) - 1) << 23)
    table = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32, device=blocks.device)
    pairs = blocks[:, None, 1:]
    codes = (pairs >> _shifts((0, 4), pairs).view(1, 2, 1)) & 15
    return bits.view(torch.float32) * table[codes.reshape(-1, 32).int()]


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "IQ2_XXS": _iq2_xxs,
    "MXFP4": _mxfp4,
}
