"""Rows of the embedding by token number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4flow.kernels.cpu import products
from ds4flow.kernels.cpu.context import Context
from ds4flow.kernels.cpu.formats import FORMATS
from ds4flow.kernels.cpu.library import library
from ds4flow.quants import QTensor


def look_up(context: Context, weight: QTensor, tokens: Sequence[int]) -> torch.Tensor:
    """Rows `[M, D]` of `weight`, float32; IndexError for a token that has none."""
    if not readable(weight):
        return weight.rows(list(tokens))
    check_ids(tokens, weight)
    columns = weight.shape[1]
    out = torch.empty((len(tokens), columns))
    data = weight.data
    context.enter(
        library.address(products.ROW_LOOKUPS[weight.type]),
        context.numbers(tokens),
        len(tokens),
        columns // 16,
        data.data_ptr(),
        data.stride(0) * data.element_size(),
        out.data_ptr(),
        context.tables,
        0,
        0,
    )
    return out


def readable(embedding: QTensor) -> bool:
    """Whether a kernel looks up rows of this weight as stored."""
    return embedding.type in FORMATS and embedding.data.stride(-1) == 1


def check_ids(tokens: Sequence[int], embedding: QTensor) -> None:
    """IndexError for a token that has no row."""
    rows_ = embedding.shape[0]
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < rows_:
        raise IndexError(f"token ids must lie in 0 .. {rows_ - 1}")
