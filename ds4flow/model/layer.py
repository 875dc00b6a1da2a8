"""One transformer layer over hyper-connection streams, written against the kernel interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds4flow.kernels.interface import Kernels, LayerRows
from ds4flow.model.rope import Rope
from ds4flow.model.weights import LayerWeights
from ds4flow.quants import QTensor


def attention(
    kernels: Kernels,
    x: torch.Tensor,
    layer: LayerWeights,
    rows: LayerRows,
    rope: Rope,
    start: int,
) -> torch.Tensor:
    """Attention sublayer for rows at positions `start ..`: `x [M, D]` (normalised) to `[M, D]`.

    The rows' own KV, compressor and indexer entries are written before anything is attended, so a
    query sees the compressed row that its own position finishes.
    """
    q, low_rank = kernels.queries(x, layer, rope, start)
    kernels.kv_rows(x, layer, rope, rows.window, start)
    selected: list[torch.Tensor | None] | None = None
    if layer.compressor is not None and rows.compressed is not None:
        kernels.compress(x, layer.compressor, rows.compressed, rope, start, index=False)
    if layer.indexer is not None and rows.index is not None:
        kernels.compress(x, layer.indexer.compressor, rows.index, rope, start, index=True)
        selected = kernels.index_topk(x, low_rank, layer.indexer, rows.index, rope, start)
    heads = kernels.attend(q, layer, rows, rope, start, selected)
    return kernels.attention_output(heads, layer)


def layer_matrices(layer: LayerWeights) -> Iterator[QTensor]:
    """The weights of a layer that enter a matrix product."""
    yield from (layer.hc_attn.fn, layer.hc_ffn.fn)
    yield from (layer.q_a, layer.q_b, layer.kv, layer.out_a, layer.out_b)
    moe = layer.moe
    yield from (moe.router, moe.gate, moe.up, moe.down)
    yield from (moe.shared_gate, moe.shared_up, moe.shared_down)
    for compressor in (layer.compressor, layer.indexer and layer.indexer.compressor):
        if compressor:
            yield from (compressor.kv, compressor.gate)
    if layer.indexer:
        yield from (layer.indexer.q_b, layer.indexer.proj)


def layer_forward(
    kernels: Kernels,
    streams: torch.Tensor,
    tokens: Sequence[int],
    layer: LayerWeights,
    rows: LayerRows,
    rope: Rope,
    start: int,
) -> torch.Tensor:
    """Streams `[M, N, D]` after one layer; writes its cache rows of positions `start ..`."""
    whole = kernels.layers
    if whole is not None:  # in the order below
        return whole(streams, tokens, [(layer, rows, rope)], start)
    x, post, comb = kernels.hc_pre(streams, layer.hc_attn, layer.attn_norm)
    block = attention(kernels, x, layer, rows, rope, start)
    streams = kernels.hc_post(block, streams, post, comb)
    x, post, comb = kernels.hc_pre(streams, layer.hc_ffn, layer.ffn_norm)
    block = kernels.moe(x, tokens, layer)
    return kernels.hc_post(block, streams, post, comb)
