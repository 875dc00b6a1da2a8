"""The int64 records that kernels read: weights, context and cache buffers by address.

A record keeps every tensor that it points to alive; records of weights are made once per object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ds4flow.errors import UsageError
from ds4flow.kernels.cpu import layout
from ds4flow.kernels.cpu.formats import FORMATS
from ds4flow.kernels.cpu.library import Library
from ds4flow.kernels.cpu.products import PRODUCTS, ROUNDED_PRODUCTS
from ds4flow.kernels.cpu.rounding import NATURAL, ORDERS
from ds4flow.model.config import ModelConfig
from ds4flow.model.weights import (
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
)
from ds4flow.quants import QTensor

log = logging.getLogger("ds4flow.kernels.cpu")


def address(array: np.ndarray) -> int:
    """Address of the first element."""
    return int(array.__array_interface__["data"][0])


def record(size: int) -> np.ndarray:
    """A zeroed int64 record of `size` bytes."""
    return np.zeros(size // 8, dtype=np.int64)


def put(target: np.ndarray, field: int, value: int) -> None:
    """Set an int64 field by its byte offset."""
    target[field // 8] = value


def put_float(target: np.ndarray, field: int, value: float) -> None:
    """Set a float32 field by its byte offset."""
    target.view(np.float32)[field // 4] = value


class Records:
    """Records of the weights of one model, by the identity of the weight object.

    `rounded` chooses products with activations rounded to 8 bits where a format has them.
    """

    def __init__(self, config: ModelConfig, library: Library, *, rounded: bool) -> None:
        self._config = config
        self._library = library
        self._rounded = rounded
        self._made: dict[tuple[Any, ...], np.ndarray] = {}
        self._kept: list[Any] = []
        self.most_columns = 0

    def _once(self, key: tuple[Any, ...], objects: Sequence[Any], made: np.ndarray) -> np.ndarray:
        self._made[key] = made
        self._kept.extend(objects)  # an object that lives keeps its id to itself
        return made

    def vector(self, tensor: torch.Tensor | None) -> int:
        """Address of a float32 vector as stored, 0 for None."""
        if tensor is None:
            return 0
        flat = tensor.to(torch.float32).contiguous()
        self._kept.append(flat)
        return flat.data_ptr()

    def _padded(self, values: np.ndarray) -> int:
        """Address of a float32 copy padded to whole vectors."""
        room = np.zeros((values.size + 31) // 16 * 16, dtype=np.float32)
        room[: values.size] = values
        self._kept.append(room)
        return address(room)

    def kernel(self, weight: QTensor) -> Callable[..., int]:
        """The product kernel of a weight's type; that of float32 where a copy will be kept."""
        if self._takes_rounded(weight.type):
            return ROUNDED_PRODUCTS[weight.type]
        return PRODUCTS[weight.type if weight.type in PRODUCTS else "F32"]

    def _takes_rounded(self, type_name: str) -> bool:
        return self._rounded and type_name in ROUNDED_PRODUCTS

    def matrices(self, weight: QTensor, parts: int = 1) -> np.ndarray:
        """Records of a weight's `parts` blocks of rows, or of each matrix of a stack."""
        key = ("matrix", id(weight), parts)
        if key in self._made:
            return self._made[key]
        stored = self._readable(weight)
        data = stored.data
        rows, columns = stored.shape[-2:]
        stacked = data.dim() == 3
        count = data.shape[0] if stacked else parts
        item = data.element_size()
        step = (data.stride(0) if stacked else data.stride(0) * (rows // parts)) * item
        made = record(layout.MATRIX_SIZE * count)
        kernel = self._library.address(self.kernel(stored))
        for i in range(count):
            base = layout.MATRIX_SIZE * i
            put(made, base + layout.MATRIX_KERNEL, kernel)
            put(made, base + layout.MATRIX_ADDRESS, data.data_ptr() + step * i)
            put(made, base + layout.MATRIX_STRIDE, data.stride(-2) * item)
            put(made, base + layout.MATRIX_ROWS, rows if stacked else rows // parts)
            put(made, base + layout.MATRIX_COLUMNS, columns)
            if self._takes_rounded(stored.type):
                order = ORDERS.get(stored.type, NATURAL)
                put(made, base + layout.MATRIX_ROUNDED, 1 + order)
        self.most_columns = max(self.most_columns, columns)
        return self._once(key, (weight, stored), made)

    def matrix(self, weight: QTensor, parts: int = 1) -> int:
        """Address of the matrix records of a weight."""
        return address(self.matrices(weight, parts))

    def _readable(self, weight: QTensor) -> QTensor:
        """The weight itself, or a float32 copy of a type that no kernel reads."""
        columns = weight.shape[-1]
        if columns % 16:
            raise UsageError(
                f"runtime.kernels=cpu: {weight.name} has {columns} columns, not a multiple of 16",
                "use runtime.kernels=reference",
            )
        if weight.type in FORMATS and weight.data.stride(-1) == 1:
            return weight
        log.warning(
            "%s: no kernel reads %s weights as stored; a float32 copy is kept",
            weight.name,
            weight.type,
        )
        values = weight.float().contiguous()
        return QTensor(weight.name, "F32", weight.shape, values)

    def hyper(self, weights: HyperWeights, norm: torch.Tensor) -> int:
        """Record of a hyper-connection and the norm that follows its input mix."""
        key = ("hyper", id(weights), id(norm))
        if key in self._made:
            return address(self._made[key])
        n = self._config.streams
        base, scale = weights.base.float().numpy(), weights.scale.float().numpy()
        widths = (n, n, n * n) if scale.size == 3 else (n,)
        made = record(layout.HYPER_SIZE)
        put(made, layout.HYPER_MATRIX, self.matrix(weights.fn))
        put(made, layout.HYPER_SCALE, self._padded(np.repeat(scale, widths)))
        put(made, layout.HYPER_BASE, self._padded(base))
        put(made, layout.HYPER_NORM, self.vector(norm))
        return address(self._once(key, (weights, norm), made))

    def attention(self, layer: LayerWeights) -> int:
        """Record of the attention projections of a layer."""
        key = ("attention", id(layer))
        if key in self._made:
            return address(self._made[key])
        made = record(layout.ATTENTION_SIZE)
        for field, value in (
            (layout.ATTENTION_Q_A, self.matrix(layer.q_a)),
            (layout.ATTENTION_Q_A_NORM, self.vector(layer.q_a_norm)),
            (layout.ATTENTION_Q_B, self.matrix(layer.q_b)),
            (layout.ATTENTION_KV, self.matrix(layer.kv)),
            (layout.ATTENTION_KV_NORM, self.vector(layer.kv_norm)),
            (layout.ATTENTION_SINKS, self.vector(layer.sinks)),
            (layout.ATTENTION_OUT_A, self.matrix(layer.out_a, self._config.groups)),
            (layout.ATTENTION_OUT_B, self.matrix(layer.out_b)),
        ):
            put(made, field, value)
        return address(self._once(key, (layer,), made))

    def compressor(self, weights: CompressorWeights) -> int:
        """Record of a compressor."""
        key = ("compressor", id(weights))
        if key in self._made:
            return address(self._made[key])
        made = record(layout.COMPRESSOR_SIZE)
        for field, value in (
            (layout.COMPRESSOR_KV, self.matrix(weights.kv)),
            (layout.COMPRESSOR_GATE, self.matrix(weights.gate)),
            (layout.COMPRESSOR_APE, self.vector(weights.ape)),
            (layout.COMPRESSOR_NORM, self.vector(weights.norm)),
        ):
            put(made, field, value)
        return address(self._once(key, (weights,), made))

    def indexer(self, weights: IndexerWeights) -> int:
        """Record of the indexer's projections."""
        key = ("indexer", id(weights))
        if key in self._made:
            return address(self._made[key])
        made = record(layout.INDEXER_SIZE)
        put(made, layout.INDEXER_Q_B, self.matrix(weights.q_b))
        put(made, layout.INDEXER_PROJ, self.matrix(weights.proj))
        return address(self._once(key, (weights,), made))

    def layer(self, layer: LayerWeights) -> np.ndarray:
        """Record of a whole layer; rope and cache fields are still 0. A copy for the caller."""
        key = ("layer", id(layer))
        made = self._made.get(key)
        if made is None:
            made = record(layout.LAYER_SIZE)
            put(made, layout.LAYER_HC_ATTN, self.hyper(layer.hc_attn, layer.attn_norm))
            put(made, layout.LAYER_ATTENTION, self.attention(layer))
            put(made, layout.LAYER_HC_FFN, self.hyper(layer.hc_ffn, layer.ffn_norm))
            put(made, layout.LAYER_MOE, self.experts(layer))
            if layer.compressor is not None:
                put(made, layout.LAYER_COMPRESSOR, self.compressor(layer.compressor))
            if layer.indexer is not None:
                put(made, layout.LAYER_INDEXER, self.indexer(layer.indexer))
                inner = self.compressor(layer.indexer.compressor)
                put(made, layout.LAYER_INDEX_COMPRESSOR, inner)
            self._once(key, (layer,), made)
        return made.copy()

    def experts(self, layer: LayerWeights) -> int:
        """Record of the mixture of experts of a layer."""
        key = ("experts", id(layer))
        if key in self._made:
            return address(self._made[key])
        moe = layer.moe
        table = 0
        if moe.table is not None:
            ids = moe.table.to(torch.int32).contiguous()
            self._kept.append(ids)
            table = ids.data_ptr()
        made = record(layout.MOE_SIZE)
        for field, value in (
            (layout.MOE_ROUTER, self.matrix(moe.router)),
            (layout.MOE_BIAS, self.vector(moe.bias)),
            (layout.MOE_TABLE, table),
            (layout.MOE_GATE, self.matrix(moe.gate)),
            (layout.MOE_UP, self.matrix(moe.up)),
            (layout.MOE_DOWN, self.matrix(moe.down)),
            (layout.MOE_SHARED_GATE, self.matrix(moe.shared_gate)),
            (layout.MOE_SHARED_UP, self.matrix(moe.shared_up)),
            (layout.MOE_SHARED_DOWN, self.matrix(moe.shared_down)),
        ):
            put(made, field, value)
        put_float(made, layout.MOE_CLAMP, layer.clamp)
        put_float(made, layout.MOE_CLAMP_SHARED, layer.clamp_shared)
        return address(self._once(key, (layer,), made))
