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
_PASS = struct.Struct(f"{(layout.DRAFT_COUNT - layout.DRAFT_TOKENS) // 8}q")
_ONWARD = struct.Struct("qdqqqq")  # what a chain needs beside
_FOUND = struct.Struct("qd")  # results of one row


class WholePasses:
    """Implements `ds4flow.kernels.interface.Passes`, and `layers` of `Kernels`."""

    def __init__(self, context: Context, caches: CacheRecords) -> None:
        self.config = context.config
        self._context = context
        self._caches = caches
        self._heads: dict[int, _Head] = {}
        self._ranking = _Ranking()
        whole = (passes.trunk, passes.head, passes.draft, passes.decide, passes.chain)
        self._trunk, self._head, self._draft, self._decide, self._chain = map(
            library.address, whole
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
        record_ = self._described(made, weights)
        if record_ is None:
            embedded = look_up(self._context, weights.embed, tokens)
            streams = embedded[:, None, :].expand(-1, c.streams, -1)
            return self.layers(streams, tokens, stacked, start)
        check_ids(tokens, weights.embed)
        out = torch.empty((m, c.streams, c.dim))
        failed = self._context.call(
            self._trunk,
            record_.address,
            self._context.numbers(tokens),
            m,
            start,
            out.data_ptr(),
            self._context.between,
        )
        if failed:
            _raise_failed(failed, [layer.index for layer in weights.layers], start)
        return out

    def decide(
        self,
        tokens: Sequence[int],
        weights: TrunkWeights,
        rows: Sequence[LayerRows],
        ropes: Sequence[Rope],
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """`trunk` and `head` in one call: streams, logits, and the row that is not finite or -1."""
        m, c = len(tokens), self.config
        made = self._ready(list(zip(weights.layers, rows, ropes, strict=True)), m, start)
        record_ = self._described(made, weights)
        if record_ is None:
            streams = self.trunk(tokens, weights, rows, ropes, start)
            return streams, *self.head(streams, weights.head, weights.output)
        check_ids(tokens, weights.embed)
        out = torch.empty((m, c.streams, c.dim))
        logits = torch.empty((m, weights.output.shape[0]))
        failed = self._context.call(
            self._decide,
            record_.address,
            self._context.numbers(tokens),
            m,
            start,
            out.data_ptr(),
            logits.data_ptr(),
            self._context.between,
            self._ranking.room(m),
        )
        if failed > 0:
            _raise_failed(failed, [layer.index for layer in weights.layers], start)
        if not failed:
            self._ranking.keep(logits, m)
        return out, logits, -failed - 1

    def _described(self, made: Stack, weights: TrunkWeights) -> Addressed | None:
        """The record of a whole trunk, None when its embedding is not read as stored."""
        if made.trunk is None and readable(weights.embed):
            made.trunk = self._trunk_record(weights, made)
        return made.trunk

    def _trunk_record(self, weights: TrunkWeights, made: Stack) -> Addressed:
        head, records, values = weights.head, self._context.records, record(layout.TRUNK_SIZE)
        lookup, rows_, stride = _lookup(weights.embed)
        for field, value in (
            (layout.TRUNK_LOOKUP, lookup),
            (layout.TRUNK_ROWS, rows_),
            (layout.TRUNK_STRIDE, stride),
            (layout.TRUNK_LAYERS, made.address),
            (layout.TRUNK_COUNT, len(weights.layers)),
            (layout.TRUNK_HYPER, records.hyper(head.hc, head.norm)),
            (layout.TRUNK_OUTPUT, records.matrix(weights.output)),
        ):
            put(values, field, value)
        self._context.reserve(made.rows)  # for columns that were not known before
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
        made = self._drafting(weights, output, None, rows, rope, m, start)
        vocab, rest = output.shape[0], m - written
        logits = torch.empty(vocab) if one else torch.empty((rest, vocab))
        out = torch.empty((c.streams, c.dim) if one else (rest, c.streams, c.dim))
        _PASS.pack_into(
            made.view,
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
        failed = self._context.call(self._draft, made.address)
        if failed > 0:
            _raise_failed(failed, [weights.layer.index], start + written)
        if not failed and rest:
            self._ranking.keep(logits, rest)
        return logits, out, -failed - 1

    def chain(
        self,
        streams: torch.Tensor,
        stale: torch.Tensor | None,
        tokens: Sequence[int],
        weights: MtpWeights,
        embedding: QTensor,
        output: QTensor,
        rows: LayerRows,
        rope: Rope,
        start: int,
        *,
        count: int,
        gate: float,
        end: int,
        forced: Sequence[int] | None,
    ) -> tuple[torch.Tensor, list[int], list[float], int] | None:
        """Draft steps one after the other, the first with the `stale` pairs before its own.

        Returns logits `[steps, V]`, the block's choices and gaps of each step, and -1, or which
        step's logits are not finite; None when the embedding is not read as stored.
        """
        if not readable(embedding):
            return None
        check_ids(tokens, embedding)
        streams, c = streams.contiguous(), self.config
        stale = stale.contiguous() if stale is not None else None
        m, vocab, made_streams = len(tokens), output.shape[0], count * c.streams
        made = self._drafting(weights, output, embedding, rows, rope, m, start, ahead=count)
        logits = torch.empty((count, vocab))
        # each step's streams; then the tokens' parts and the streams of the first pass
        room = torch.empty((made_streams + m * (1 + c.streams), c.dim))
        onward = None if forced is None else np.array(forced, dtype=np.int64)
        _PASS.pack_into(
            made.view,
            layout.DRAFT_TOKENS,
            0,
            streams.data_ptr(),
            self._context.numbers(tokens),
            m,
            m - 1,
            start,
            room.data_ptr(),
            logits.data_ptr(),
            self._context.between,
            self._ranking.room(layout.CHAIN_RESULTS // 16 * count),
        )
        _ONWARD.pack_into(
            made.view,
            layout.DRAFT_COUNT,
            count,
            gate,
            end,
            0 if onward is None else address(onward),
            room.data_ptr() + 4 * c.dim * made_streams,
            0 if stale is None else stale.data_ptr(),
        )
        failed = self._context.call(self._chain, made.address)
        steps = int(made.record[layout.DRAFT_MADE // 8])
        if failed > 0:
            _raise_failed(failed, [weights.layer.index], start + m + steps - 2)
        choices, gaps = self._ranking.chained(steps)
        logits = logits if steps == count else logits[:steps]
        return logits, choices, gaps, steps - 1 if failed else -1

    def _drafting(
        self,
        weights: MtpWeights,
        output: QTensor,
        embedding: QTensor | None,
        rows: LayerRows,
        rope: Rope,
        m: int,
        start: int,
        *,
        ahead: int = 0,
    ) -> Addressed:
        """The record of passes of the MTP block, with room for one of `m` pairs."""
        streams, records = self.config.streams, self._context.records
        made = self._ready([(weights.layer, rows, rope)], streams * m, start + ahead)
        if made.draft is None:
            head, values = weights.head, record(layout.DRAFT_SIZE)
            for field, value in (
                (layout.DRAFT_NORM, records.vector(weights.hnorm)),
                (layout.DRAFT_PROJECTION, records.matrix(weights.h_proj)),
                (layout.DRAFT_HYPER, records.hyper(head.hc, head.norm)),
                (layout.DRAFT_OUTPUT, records.matrix(output)),
                (layout.DRAFT_LAYER, made.address),
            ):
                put(values, field, value)
            made.draft = Addressed(values)
            self._context.reserve(streams * m)  # for columns that were not known before
        if embedding is not None and not made.draft.record[layout.DRAFT_LOOKUP // 8]:
            lookup, first, stride = _lookup(embedding)
            for field, value in (
                (layout.DRAFT_LOOKUP, lookup),
                (layout.DRAFT_EMBEDDING, first),
                (layout.DRAFT_STRIDE, stride),
                (layout.DRAFT_TOKEN_NORM, records.vector(weights.enorm)),
                (layout.DRAFT_TOKEN_PROJECTION, records.matrix(weights.e_proj)),
            ):
                put(made.draft.record, field, value)
            self._context.reserve(streams * m)
        return made.draft

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


def _lookup(embedding: QTensor) -> tuple[int, int, int]:
    """The kernel that looks up rows of an embedding, its first row's address and row stride."""
    data = embedding.data
    kernel = library.address(products.ROW_LOOKUPS[embedding.type])
    return kernel, data.data_ptr(), data.stride(0) * data.element_size()


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
            self._view, self._address = values.data.cast("B"), address(values)
        return self._address

    def keep(self, logits: torch.Tensor, m: int) -> None:
        """Leave with the logits what was found of their `m` rows."""
        form = self._forms.get(m)
        if form is None:
            form = self._forms[m] = struct.Struct(f"{m}q{m}d")
        found = form.unpack_from(self._view)
        remember(logits, found[:m], found[m:])

    def chained(self, steps: int) -> tuple[list[int], list[float]]:
        """Choices and gaps of the steps of a chain."""
        found = [_FOUND.unpack_from(self._view, layout.CHAIN_RESULTS * i) for i in range(steps)]
        return [best for best, _ in found], [gap for _, gap in found]


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
