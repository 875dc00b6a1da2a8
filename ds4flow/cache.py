"""Cache state addressed by absolute position: rolling back is moving one integer.

Every stored row is a function of the tokens up to its own position. Rings are as long as what a
later read can need plus the rows of one pass, so a pass never overwrites a row that is still
visible after any part of it is rejected. Which rows are valid is derived from the cursor, never
stored. No row ever moves: finished rows have their place from the start, but on the CPU a place
takes memory only once it is written, so memory grows with the text and not with the context.
"""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import torch

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.model.config import ModelConfig

ALIGNMENT = 64  # bytes; rows begin where vectors load best


class KVCache:
    """All cache rows of one sequence. `length` is the cursor: the number of committed tokens.

    `context` bounds the positions, `draft_max` the drafts of one verify pass and `chunk` the rows
    of one prefill pass. A pass of up to `rows_max = max(chunk, draft_max + 1)` rows may be written
    and then committed to any length between none and all of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        context: int,
        draft_max: int,
        chunk: int = 64,
        device: torch.device | None = None,
    ) -> None:
        if context < 1:
            raise UsageError(f"runtime.context={context} is not a length", "use a positive number")
        self.config = config
        self.context = context
        self.draft_max = draft_max
        self.chunk = chunk
        self.rows_max = max(chunk, draft_max + 1)
        self.length = 0
        self.layers = [self._layer(config.ratio(index), device) for index in range(config.layers)]
        self.mtp = LayerRows(self._window(device))

    def _window(self, device: torch.device | None) -> torch.Tensor:
        slots = self.config.window + self.rows_max
        return torch.zeros(slots, self.config.head_dim, device=device)

    def _compressed(self, ratio: int, width: int, device: torch.device | None) -> CompressedRows:
        halves = 2 if ratio == 4 else 1
        # an overlapping row reaches back over the block before its own
        slots = halves * ratio + self.rows_max
        ring = (slots, halves * width)
        pool = _untouched(self.context // ratio, width, device)
        return CompressedRows(
            ratio, torch.zeros(ring, device=device), torch.zeros(ring, device=device), pool
        )

    def _layer(self, ratio: int, device: torch.device | None) -> LayerRows:
        rows = LayerRows(self._window(device))
        if ratio:
            rows.compressed = self._compressed(ratio, self.config.head_dim, device)
        if ratio == 4:
            rows.index = self._compressed(ratio, self.config.index_dim, device)
        return rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """What all buffer sizes follow from: context, `draft_max` and `chunk`."""
        return self.context, self.draft_max, self.chunk

    def clear(self) -> None:
        """Make all rows zeros and the cursor 0, in place.

        Places of finished rows that no pass can have reached stay untouched, as `_untouched` left
        them.
        """
        reached = self.length + self.rows_max
        for layer in (*self.layers, self.mtp):
            layer.window.zero_()
            for rows in (layer.compressed, layer.index):
                if rows is not None:
                    rows.values.zero_()
                    rows.scores.zero_()
                    rows.pool[: reached // rows.ratio + 1].zero_()
        self.length = 0

    def check_room(self, start: int, rows: int) -> None:
        """Raise when a pass of `rows` rows from `start` would leave the context or the rings."""
        if rows > self.rows_max:
            raise Ds4FlowError(
                f"a pass of {rows} rows exceeds the cache's {self.rows_max}",
                "raise runtime.chunk or mtp.draft, or pass fewer rows",
            )
        if start + rows > self.context:
            raise Ds4FlowError(
                f"position {start + rows} exceeds the context of {self.context} tokens",
                "raise runtime.context or shorten the prompt",
            )

    def commit(self, rows: int) -> None:
        """Move the cursor over the first `rows` rows of the pass just written.

        What lies beyond is invisible from now on and will be overwritten before it is read.
        """
        if not 0 <= rows <= self.rows_max or self.length + rows > self.context:
            raise ValueError(f"cannot commit {rows} rows at {self.length} of {self.context}")
        self.length += rows

    def fork(self) -> KVCache:
        """A cache of its own with the rows that are visible here, and the same cursor.

        Both go on independently. What lies beyond the cursor is not taken along.
        """
        other = copy.copy(self)
        other.layers = [self._forked(layer) for layer in self.layers]
        other.mtp = self._forked(self.mtp)
        return other

    def _forked(self, layer: LayerRows) -> LayerRows:
        return LayerRows(
            layer.window.clone(),
            self._forked_rows(layer.compressed),
            self._forked_rows(layer.index),
        )

    def _forked_rows(self, rows: CompressedRows | None) -> CompressedRows | None:
        if rows is None:
            return None
        finished = self.length // rows.ratio
        pool = _untouched(rows.pool.shape[0], rows.pool.shape[1], rows.pool.device)
        pool[:finished] = rows.pool[:finished]
        return CompressedRows(rows.ratio, rows.values.clone(), rows.scores.clone(), pool)

    # --- state, for comparison --------------------------------------------------------------------

    def lanes(self, *, mtp: bool = True) -> dict[str, torch.Tensor]:
        """Everything a later pass can read, in position order, by layer and lane."""
        n = self.length
        visible: dict[str, torch.Tensor] = {}
        reach = self.config.window - 1
        for index, layer in enumerate(self.layers):
            name = f"layer {index}"
            visible[f"{name} window"] = _span(layer.window, max(0, n - reach), n)
            for lane, rows in (("compressor", layer.compressed), ("indexer", layer.index)):
                if rows is None:
                    continue
                first = rows.ratio * (n // rows.ratio) - (rows.ratio if rows.overlapping else 0)
                visible[f"{name} {lane} values"] = _span(rows.values, max(0, first), n)
                visible[f"{name} {lane} scores"] = _span(rows.scores, max(0, first), n)
                visible[f"{name} {lane} rows"] = rows.pool[: n // rows.ratio]
        if mtp:
            visible["mtp window"] = _span(self.mtp.window, max(0, n - reach), n)
        return visible

    def state_hash(self, *, mtp: bool = True) -> dict[str, str]:
        """SHA-256 of the visible state by layer and lane; equal bits give equal digests."""
        return {
            lane: hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()
            for lane, rows in self.lanes(mtp=mtp).items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers when the context is full."""
        total = self.mtp.window.nbytes
        for layer in self.layers:
            total += layer.window.nbytes
            for rows in (layer.compressed, layer.index):
                if rows is not None:
                    total += rows.values.nbytes + rows.scores.nbytes + rows.pool.nbytes
        return total


def _untouched(rows: int, width: int, device: torch.device | None) -> torch.Tensor:
    """Zeros `[rows, width]` (float32) whose pages the system hands out when they are written."""
    if device is not None and device.type != "cpu":
        return torch.zeros(rows, width, device=device)
    spare = ALIGNMENT // 4
    flat = torch.from_numpy(np.zeros(rows * width + spare, dtype=np.float32))
    first = -flat.data_ptr() % ALIGNMENT // 4
    return flat[first : first + rows * width].view(rows, width)


def _span(ring: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows of positions `first .. last-1` of a ring, in order."""
    return ring[torch.arange(first, last, device=ring.device) % ring.shape[0]]
