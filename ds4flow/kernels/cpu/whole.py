"""Whole passes from Python: what `ds4flow.kernels.interface.Passes` promises, one call each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch

from ds4flow.errors import NOT_FINITE, NumericsError
from ds4flow.kernels.cpu import layout, passes, products, stack
from ds4flow.kernels.cpu.caches import Addressed, CacheRecords, Stack, Stacked
from ds4flow.kernels.cpu.context import Context
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.lookup import check_ids, look_up, readable
from ds4flow.kernels.cpu.records import Records, address, put, record
from ds4flow.kernels.interface import LayerRows
from ds4flow.model.rope import BLOCK, Rope
from ds4flow.model.weights import HeadWeights, MtpWeights, TrunkWeights
from ds4flow.quants import QTensor
from ds4flow.ranks import remember

# what changes from pass to pass in the record of a draft
_PASS = struct.Struct(f"{(layout.DRAFT_SIZE - layout.DRAFT_TOKENS) // 8}q")


class WholePasses:
    """Implements `ds4flow.kernels.interface.Passes`, and `layers` of `Kernels`."""

    def __init__(self, context: Context, caches: CacheRecords) -> None:
        self.config = context.config
        self._context = context
        self._caches = caches
        self._heads: dict[int, _Head] = {}
        self._ranking = _Ranking()
        self._trunk, self._head, self._draft = (
            library.address(kernel) for kernel in (passes.trunk, passes.head, passes.draft)
        )

    def layers(
        self,
        streams: torch.Tensor,
        tokens: Sequence[int],
        stacked: Stacked,
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` after some layers, in one call; writes their cache rows.

        Raises NumericsError naming the layer when a value is not finite.
        """
        m = streams.shape[0]
        made = self._ready(stacked, m, start)
        out = streams.clone(memory_format=torch.contiguous_format)
        failed = self._context.call(
            library.address(stack.stack),
            made.address,
            len(stacked),
            out.data_ptr(),
            m,
            start,
            self._context.numbers(tokens),
            self._context.between,
        )
        if failed:
            _raise_failed(failed, [layer.index for layer, _, _ in stacked], start)
        return out

    def trunk(
        self,
        tokens: Sequence[int],
        weights: TrunkWeights,
        rows: Sequence[LayerRows],
        ropes: Sequence[Rope],
        start: int,
    ) -> torch.Tensor:
        """Streams `[M, N, D]` of tokens at positions `start ..` after all layers."""
        m, c = len(tokens), self.config
        stacked = list(zip(weights.layers, rows, ropes, strict=True))
        made = self._ready(stacked, m, start)
        if made.trunk is None:
            if not readable(weights.embed):
                embedded = look_up(self._context, weights.embed, tokens)
                streams = embedded[:, None, :].expand(-1, c.streams, -1)
                return self.layers(streams, tokens, stacked, start)
            made.trunk = self._trunk_record(weights.embed, made, len(rows))
        check_ids(tokens, weights.embed)
        out = torch.empty((m, c.streams, c.dim))
        failed = self._context.call(
            self._trunk,
            made.trunk.address,
            self._context.numbers(tokens),
            m,
            start,
            out.data_ptr(),
            self._context.between,
        )
        if failed:
            _raise_failed(failed, [layer.index for layer in weights.layers], start)
        return out

    def _trunk_record(self, embedding: QTensor, made: Stack, count: int) -> Addressed:
        data, values = embedding.data, record(layout.TRUNK_SIZE)
        for field, value in (
            (layout.TRUNK_LOOKUP, library.address(products.ROW_LOOKUPS[embedding.type])),
            (layout.TRUNK_ROWS, data.data_ptr()),
            (layout.TRUNK_STRIDE, data.stride(0) * data.element_size()),
            (layout.TRUNK_LAYERS, made.address),
            (layout.TRUNK_COUNT, count),
        ):
            put(values, field, value)
        return Addressed(values)

    def head(
        self, streams: torch.Tensor, weights: HeadWeights, output: QTensor
    ) -> tuple[torch.Tensor, int]:
        """Logits `[M, V]` of streams `[M, N, D]`, and the first row that is not finite or -1."""
        streams = streams.contiguous()
        m = streams.shape[0]
        known = self._heads.get(id(weights))
        if known is None or known.weights is not weights or known.output is not output:
            known = _Head(weights, output, self._context.records)
            self._heads[id(weights)] = known
        if m > known.rows:
            self._context.reserve(m)
            self._context.reserve_between(4 * m * self.config.dim)
            known.rows = m
        out = torch.empty((m, known.vocab))
        failed = self._context.call(
            self._head,
            known.hyper,
            known.matrix,
            streams.data_ptr(),
            m,
            out.data_ptr(),
            self._context.between,
            self._ranking.room(m),
        )
        if not failed:
            self._ranking.keep(out, m)
        return out, failed - 1

    def draft(
        self,
        embedded: torch.Tensor,
        streams: torch.Tensor,
        tokens: Sequence[int],
        weights: MtpWeights,
        output: QTensor,
        rows: LayerRows,
        rope: Rope,
        start: int,
        *,
        written: int,
        one: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Logits `[M - written, V]` and streams of pairs at `start ..`, after `written` rows.

        `embedded [M, D]` is the tokens' part of the input, normed and projected. `one`: there is
        one result, and it needs no axis of its own. Also the first row of logits that is not finite
        or -1.
        """
        embedded, streams, c = embedded.contiguous(), streams.contiguous(), self.config
        m = len(tokens)
        made = self._ready([(weights.layer, rows, rope)], c.streams * m, start)
        if made.draft is None:
            values = record(layout.DRAFT_SIZE)
            head, records = weights.head, self._context.records
            for field, value in (
                (layout.DRAFT_NORM, records.vector(weights.hnorm)),
                (layout.DRAFT_PROJECTION, records.matrix(weights.h_proj)),
                (layout.DRAFT_HYPER, records.hyper(head.hc, head.norm)),
                (layout.DRAFT_OUTPUT, records.matrix(output)),
                (layout.DRAFT_LAYER, made.address),
            ):
                put(values, field, value)
            made.draft = Addressed(values)
            self._context.reserve(c.streams * m)  # for columns that were not known before
        vocab, rest = output.shape[0], m - written
        logits = torch.empty(vocab) if one else torch.empty((rest, vocab))
        out = torch.empty((c.streams, c.dim) if one else (rest, c.streams, c.dim))
        _PASS.pack_into(
            made.draft.view,
            layout.DRAFT_TOKENS,
            embedded.data_ptr(),
            streams.data_ptr(),
            self._context.numbers(tokens),
            m,
            written,
            start,
            out.data_ptr(),
            logits.data_ptr(),
            self._context.between,
            self._ranking.room(rest),
        )
        failed = self._context.call(self._draft, made.draft.address)
        if failed > 0:
            _raise_failed(failed, [weights.layer.index], start + written)
        if not failed and rest:
            self._ranking.keep(logits, rest)
        return logits, out, -failed - 1

    def _ready(self, stacked: Stacked, m: int, start: int) -> Stack:
        """Records and room for a pass of `m` rows through some layers."""
        self._caches.forget()
        made = self._caches.stack(stacked, start + m)
        if m <= made.rows and start + m <= made.last:
            return made
        c, last = self.config, start + m + BLOCK
        keys, visible = 0, 0
        for _, rows_, rope in stacked:
            self._caches.rope(rope, last)
            if rows_.index is not None:
                visible = max(visible, last // rows_.index.ratio)
                keys = max(keys, c.top_k)
            elif rows_.compressed is not None:
                keys = max(keys, last // rows_.compressed.ratio)
        self._context.reserve(m, c.window + keys, visible)
        each = 3 * c.dim + c.heads * c.head_dim + c.q_rank + 16 + c.top_k
        self._context.reserve_between(8 * m * (each + c.streams * c.dim))
        made.rows, made.last = m, last
        return made


class _Head:
    """Addresses of a head's records, and how many rows room has been made for."""

    def __init__(self, weights: HeadWeights, output: QTensor, records: Records) -> None:
        self.weights, self.output = weights, output
        self.hyper = records.hyper(weights.hc, weights.norm)
        self.matrix = records.matrix(output)
        self.vocab = output.shape[0]
        self.rows = 0


class _Ranking:
    """Room for what the head finds of its rows, as `top_two` lays it out."""

    def __init__(self) -> None:
        self._rows = 0
        self._forms: dict[int, struct.Struct] = {}
        self.room(1)

    def room(self, m: int) -> int:
        """Address of room for `m` rows."""
        if m > self._rows:
            self._rows = 2 * m
            values = np.empty(2 * self._rows + 16, dtype=np.int64)
            self._view, self._address = values.data, address(values)
        return self._address

    def keep(self, logits: torch.Tensor, m: int) -> None:
        """Leave with the logits what was found of their `m` rows."""
        form = self._forms.get(m)
        if form is None:
            form = self._forms[m] = struct.Struct(f"{m}q{2 * m}f")
        found = form.unpack_from(self._view)
        remember(logits, found[:m], found[m:])


def _raise_failed(failed: int, indices: Sequence[int], start: int) -> NoReturn:
    """Say which layer of a stack, and which position, gave a value that is not finite."""
    number, row = (failed & ~stack.ROUTER) >> 32, (failed & 0xFFFFFFFF) - 1
    if failed & stack.ROUTER:
        raise NumericsError(f"layer {indices[number]}: the router's scores are not finite")
    raise NumericsError(
        f"layer {indices[number]} gave a value that is not finite at position {start + row} "
        f"(row {row} of the pass)",
        NOT_FINITE,
    )
