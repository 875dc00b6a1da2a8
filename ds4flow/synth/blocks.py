"""Random weights made directly in their stored block format, with a given standard deviation.

Promise: no float weight is ever quantised; the same generator gives the same bytes, and every
decoded value is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ds4flow.errors import UsageError, near_match

CHUNK_BYTES = 1 << 22  # of temporary arrays; part of what a seed means, so never to be changed


def nbytes_of(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; UsageError for an unknown type and for rows that are not whole blocks."""
    if type_name not in TYPES:
        raise UsageError(
            f"{type_name} is not a weight type that can be made",
            near_match(type_name, TYPES) or f"use one of {', '.join(TYPES)}",
        )
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if shape[-1] % block:
        raise UsageError(
            f"rows of {shape[-1]} weights are not whole {type_name} blocks of {block}",
            f"use widths that are multiples of {block}, or another type",
        )
    count = 1
    for dim in shape:
        count *= dim
    return count // block * size


def random_tensor(
    rng: np.random.Generator, type_name: str, shape: tuple[int, ...], std: float
) -> np.ndarray:
    """A tensor of mean 0 and standard deviation `std`: typed, or uint8 `[.., bytes per row]`.

    BF16 comes as uint16.
    """
    total = nbytes_of(type_name, shape)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = np.empty((total // size, size), np.uint8)
    step = max(1, CHUNK_BYTES // max(size, block))
    make = TYPES[type_name]
    for first in range(0, len(data), step):
        part = data[first : first + step]
        part[:] = make(rng, len(part), std)
    if type_name in _PLAIN:
        return data.reshape(-1).view(_PLAIN[type_name]).reshape(shape)
    return data.reshape(*shape[:-1], -1)


def unit_diagonal(data: np.ndarray) -> None:
    """Turn a square Q8_0 matrix `[rows, bytes]` into one with ones on its diagonal, in place.

    Each block that holds a diagonal element gets zeros beside it.
    """
    rows = np.arange(len(data))
    blocks = data.reshape(len(data), -1, 34)
    blocks[rows, rows // 32] = 0
    blocks[rows, rows // 32, :2] = _halves(np.array([1.0 / 127.0]))
    blocks[rows, rows // 32, 2 + rows % 32] = 127


def random_table(rng: np.random.Generator, rows: int, used: int, experts: int) -> np.ndarray:
    """Int32 `[rows, used]`: distinct ids in each row, every subset equally likely (Floyd)."""
    table = np.empty((rows, used), np.int32)
    for place in range(used):
        last = experts - used + place
        pick = rng.integers(0, last + 1, rows, dtype=np.int32)
        taken = (table[:, :place] == pick[:, None]).any(1)
        table[:, place] = np.where(taken, last, pick)
    return rng.permuted(table, axis=1)


# --- one chunk of blocks: uint8 [count, bytes] ---------------------------------------------------


def _halves(values: np.ndarray) -> np.ndarray:
    """The bytes of float16 `values [n]`: `[n, 2]`."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _steps(rng: np.random.Generator, count: int, mean_square: float, std: float) -> np.ndarray:
    """Block scales `[count]` that vary by a factor of three and give weights the wanted variance.

    `mean_square` is that of a weight at scale one. A uniform factor in 0.5 .. 1.5 has the mean
    square 13/12. Few mantissa bits, so that small multiples of a scale are exact halves too.
    """
    jitter = 0.5 + rng.integers(0, 1024, count) / 1024.0
    values = (jitter * std / np.sqrt(mean_square * 13.0 / 12.0)).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _bytes(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    return rng.integers(0, 256, (count, size), dtype=np.uint8)


def _plain(dtype: str) -> Callable[[np.random.Generator, int, float], np.ndarray]:
    def make(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
        values = (rng.standard_normal(count, dtype=np.float32) * np.float32(std)).astype(dtype)
        return values.view(np.uint8).reshape(count, -1)

    return make


def _bf16(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(std)
    high = ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype("<u2")
    return high.view(np.uint8).reshape(count, 2)


def _q8_0(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    codes = rng.integers(-127, 128, (count, 32), dtype=np.int8)  # no converter writes -128
    steps = _steps(rng, count, 127 * 128 / 3, std)
    return np.concatenate((_halves(steps), codes.view(np.uint8)), axis=1)


def _q2_k(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    # weight = step*a*q - floor*b with floor = 1.5 step and b near a: centred in each group of 16
    a = rng.integers(4, 15, (count, 16), dtype=np.int8)
    b = a + rng.integers(-1, 2, (count, 16), dtype=np.int8)
    squares = np.arange(4, 15, dtype=np.float64) ** 2
    steps = _steps(rng, count, squares.mean() * 1.25 + 2 / 3 * 1.5**2, std)
    scales = (a | (b << 4)).view(np.uint8)
    return np.concatenate(
        (scales, _bytes(rng, count, 64), _halves(steps), _halves(1.5 * steps)), axis=1
    )


def _q4_k(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    # as in Q2_K, with floor = 7.5 step and eight groups of 32
    a = rng.integers(16, 62, (count, 8), dtype=np.int8)
    b = a + rng.integers(-2, 3, (count, 8), dtype=np.int8)
    squares = np.arange(16, 62, dtype=np.float64) ** 2
    steps = _steps(rng, count, squares.mean() * 85 / 4 + 2.0 * 7.5**2, std)
    packed = np.empty((count, 12), np.uint8)
    packed[:, 0:4] = (a[:, :4] | (a[:, 4:] >> 4 << 6)).view(np.uint8)
    packed[:, 4:8] = (b[:, :4] | (b[:, 4:] >> 4 << 6)).view(np.uint8)
    packed[:, 8:12] = (a[:, 4:] & 15 | (b[:, 4:] & 15) << 4).view(np.uint8)
    return np.concatenate(
        (_halves(steps), _halves(7.5 * steps), packed, _bytes(rng, count, 128)), axis=1
    )


def _iq2_xxs(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    # every byte is valid: codebook indices, 7-bit sign fields and a 4-bit scale a group of 32
    gguf.quants.IQ2_XXS.init_grid()
    grid = np.asarray(gguf.quants.IQ2_XXS.grid, np.float64)
    scales = (np.arange(16) + 0.5) * 0.25
    steps = _steps(rng, count, (grid**2).mean() * (scales**2).mean(), std)
    return np.concatenate((_halves(steps), _bytes(rng, count, 64)), axis=1)


def _mxfp4(rng: np.random.Generator, count: int, std: float) -> np.ndarray:
    # powers of two alone: of two neighbouring exponents as many as give the wanted variance
    wanted = std**2 / np.mean(np.square([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]))
    exponent = math.floor(math.log2(wanted) / 2)
    larger = (wanted / 4.0**exponent - 1.0) / 3.0
    exponents = 127 + exponent + (rng.random(count) < larger)
    return np.concatenate((exponents.astype(np.uint8)[:, None], _bytes(rng, count, 16)), axis=1)


_PLAIN: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
TYPES: Mapping[str, Callable[[np.random.Generator, int, float], np.ndarray]] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q2_K": _q2_k,
    "IQ2_XXS": _iq2_xxs,
    "MXFP4": _mxfp4,
}
"""Makers of blocks by type: (generator, number of blocks, standard deviation) to uint8 rows."""
