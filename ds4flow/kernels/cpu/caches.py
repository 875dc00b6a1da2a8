"""Records of cache buffers and of stacks of layers that use them.

Kept by identity and made anew when a buffer has been exchanged: a kernel never sees an address of a
tensor that is gone.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from ds4flow.kernels.cpu import layout
from ds4flow.kernels.cpu.records import Records, address, put, record
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.rope import BLOCK, Rope
from ds4flow.model.weights import LayerWeights

MOST_CACHE_RECORDS = 1 << 14

Stacked = Sequence[tuple[LayerWeights, LayerRows, Rope]]


class Addressed:
    """A record and its address."""

    def __init__(self, values: np.ndarray) -> None:
        self.record = values
        self.view = values.data.cast("B")
        self.address = address(values)


class Stack:
    """Records of a stack of layers, and what they were made from (buffers by weak reference)."""

    def __init__(self, stacked: Stacked, records: np.ndarray) -> None:
        self.records = records
        self.address = address(records)
        self.trunk: Addressed | None = None  # records of whole passes through these layers
        self.draft: Addressed | None = None
        self.rows = self.last = 0  # what room has been made for
        self._fixed = [part for layer, _, rope in stacked for part in (layer, rope)]
        self._buffers = [weakref.ref(tensor) for tensor in _buffers(stacked)]

    def describes(self, stacked: Stacked) -> bool:
        """Whether the layers, ropes and buffers are those that the records were made from."""
        fixed = [part for layer, _, rope in stacked for part in (layer, rope)]
        found = _buffers(stacked)
        return (
            len(found) == len(self._buffers)
            and all(map(operator.is_, fixed, self._fixed))
            and all(map(operator.is_, found, map(operator.call, self._buffers)))
        )


def _buffers(stacked: Stacked) -> list[torch.Tensor]:
    """All tensors of the layers' cache rows."""
    found = []
    for _, rows_, _ in stacked:
        found.append(rows_.window)
        for part in (rows_.compressed, rows_.index):
            if part is not None:
                found += (part.values, part.scores, part.pool)
    return found


class CacheRecords:
    """Records of the rotary tables, cache buffers and stacks that passes of a model have used."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._ropes: dict[int, tuple[Rope, np.ndarray, list[np.ndarray]]] = {}
        self._pools: dict[tuple[int, ...], np.ndarray] = {}
        self._rows: dict[tuple[int, ...], np.ndarray] = {}
        self._stacks: dict[tuple[int, ...], Stack] = {}

    def rope(self, rope: Rope, last: int) -> int:
        """Address of a record that points to the rotary tables of all positions below `last`."""
        entry = self._ropes.get(id(rope))
        if entry is None:
            entry = (rope, record(8), [np.empty((0, 2), dtype=np.int64)])
            self._ropes[id(rope)] = entry
        _, made, tables = entry
        have, want = tables[0].shape[0], (last + BLOCK - 1) // BLOCK
        if want > have:
            grown = np.empty((want, 2), dtype=np.int64)
            grown[:have] = tables[0]
            for index in range(have, want):
                cos, sin = rope.block(index)  # the Rope keeps them
                grown[index] = cos.data_ptr(), sin.data_ptr()
            tables[0] = grown
            put(made, 0, address(grown))
        return address(made)

    def forget(self) -> None:
        """Drop the records of cache buffers when many caches have come and gone."""
        if len(self._pools) + len(self._rows) + len(self._stacks) > MOST_CACHE_RECORDS:
            self._pools.clear()
            self._rows.clear()
            self._stacks.clear()

    def compressed(self, compressed: CompressedRows) -> int:
        """Address of the record of a compressor's buffers."""
        values, pool = compressed.values, compressed.pool
        width = pool.shape[-1]
        key = (
            values.data_ptr(),
            compressed.scores.data_ptr(),
            pool.data_ptr(),
            compressed.ratio,
            values.shape[0],
            width,
            values.shape[-1],
        )
        made = self._pools.get(key)
        if made is None:
            made = record(layout.POOL_SIZE)
            for field, value in (
                (layout.POOL_VALUES, key[0]),
                (layout.POOL_SCORES, key[1]),
                (layout.POOL_ROWS, key[2]),
                (layout.POOL_RATIO, compressed.ratio),
                (layout.POOL_SLOTS, values.shape[0]),
                (layout.POOL_WIDTH, width),
                (layout.POOL_OVERLAPPING, int(values.shape[-1] == 2 * width)),
            ):
                put(made, field, value)
            self._pools[key] = made
        return address(made)

    def rows(self, rows: LayerRows) -> int:
        """Address of the record of a layer's cache rows."""
        window = rows.window
        pool = 0 if rows.compressed is None else self.compressed(rows.compressed)
        key = (window.data_ptr(), window.shape[0], pool)
        made = self._rows.get(key)
        if made is None:
            made = np.array(key, dtype=np.int64)
            self._rows[key] = made
        return address(made)

    def stack(self, stacked: Stacked, last: int) -> Stack:
        """The records of some layers with their ropes and cache rows filled in.

        Kept by the identity of the cache rows, as long as their buffers are still the same objects.
        """
        key = tuple([id(rows_) for _, rows_, _ in stacked])
        known = self._stacks.get(key)
        if known is not None and known.describes(stacked):
            return known
        parts = []
        for layer, rows_, rope in stacked:
            part = self._records.layer(layer)
            put(part, layout.LAYER_ROPE, self.rope(rope, last))
            put(part, layout.LAYER_ROWS, self.rows(rows_))
            if rows_.index is not None:
                put(part, layout.LAYER_INDEX_POOL, self.compressed(rows_.index))
            parts.append(part)
        made = Stack(stacked, np.concatenate(parts))
        self._stacks[key] = made
        return made
