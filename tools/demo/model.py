"""The demo network in plain differentiable torch, parameters keyed by their GGUF tensor names.

Promise: one set of functions serves training (bfloat16 matmuls) and reference evaluation
(float32), and it shares no code with the engine, so that either can check the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]


@dataclass(frozen=True)
class DemoConfig:
    """Dimensions of the demo model; names follow the GGUF keys where one exists."""

    embedding: int = 256
    vocab: int = 4096
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    streams: int = 4
    sinkhorn: int = 20
    heads: int = 8
    head_dim: int = 128
    rope_dim: int = 64
    q_rank: int = 128
    groups: int = 4
    o_rank: int = 128
    window: int = 64
    index_heads: int = 4
    index_dim: int = 128
    top_k: int = 64
    experts: int = 8
    experts_used: int = 2
    ffn: int = 256
    hash_layers: int = 1
    route_scale: float = 1.5
    clamp: float = 10.0
    rope_base: float = 10000.0
    compress_rope_base: float = 160000.0
    yarn_factor: float = 16.0
    yarn_context: int = 65536
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0
    context: int = 2048
    eps: float = 1e-6

    @property
    def layers(self) -> int:
        """Number of trunk layers."""
        return len(self.ratios)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for checkpoints."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> DemoConfig:
        """Inverse of :meth:`to_dict`."""
        return replace(DemoConfig(), **{**values, "ratios": tuple(values["ratios"])})


@dataclass
class Mode:
    """How a forward pass is evaluated.

    ``dtype`` is the matmul type, ``select`` switches the indexer's hard top-k on, ``index_loss``
    asks ratio-4 layers for the indexer's training loss, ``weight_filter`` may replace an expert
    tensor by its quantised image (straight-through).
    """

    dtype: torch.dtype = torch.float32
    select: bool = True
    index_loss: bool = False
    weight_filter: Callable[[Tensor], Tensor] | None = None


@dataclass
class Trace:
    """Side results of a forward pass: indexer losses and the router's load per layer."""

    index_losses: list[Tensor]
    loads: dict[str, Tensor]


# --------------------------------------------------------------------------------------------
# parameters


def block_shapes(cfg: DemoConfig, ratio: int, hashed: bool) -> dict[str, tuple[int, ...]]:
    """Torch shapes of one layer's tensors, keyed by GGUF suffix."""
    dim, head, mix = cfg.embedding, cfg.head_dim, (2 + cfg.streams) * cfg.streams
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("attn", "ffn"):
        shapes[f"hc_{part}_fn.weight"] = (mix, cfg.streams * dim)
        shapes[f"hc_{part}_base.weight"] = (mix,)
        shapes[f"hc_{part}_scale.weight"] = (3,)
        shapes[f"{part}_norm.weight"] = (dim,)
    shapes |= {
        "attn_q_a.weight": (cfg.q_rank, dim),
        "attn_q_a_norm.weight": (cfg.q_rank,),
        "attn_q_b.weight": (cfg.heads * head, cfg.q_rank),
        "attn_kv.weight": (head, dim),
        "attn_kv_a_norm.weight": (head,),
        "attn_sinks.weight": (cfg.heads,),
        "attn_output_a.weight": (cfg.groups * cfg.o_rank, head * cfg.heads // cfg.groups),
        "attn_output_b.weight": (dim, cfg.groups * cfg.o_rank),
        "ffn_gate_inp.weight": (cfg.experts, dim),
        "ffn_gate_exps.weight": (cfg.experts, cfg.ffn, dim),
        "ffn_up_exps.weight": (cfg.experts, cfg.ffn, dim),
        "ffn_down_exps.weight": (cfg.experts, dim, cfg.ffn),
        "ffn_gate_shexp.weight": (cfg.ffn, dim),
        "ffn_up_shexp.weight": (cfg.ffn, dim),
        "ffn_down_shexp.weight": (dim, cfg.ffn),
    }
    if hashed:
        shapes["ffn_gate_tid2eid.weight"] = (cfg.vocab, cfg.experts_used)
    else:
        shapes["exp_probs_b.bias"] = (cfg.experts,)
    if ratio:
        coff = 2 if ratio == 4 else 1
        shapes |= {
            "attn_compressor_kv.weight": (coff * head, dim),
            "attn_compressor_gate.weight": (coff * head, dim),
            "attn_compressor_ape.weight": (ratio, coff * head),
            "attn_compressor_norm.weight": (head,),
        }
    if ratio == 4:
        width = cfg.index_dim
        shapes |= {
            "indexer.attn_q_b.weight": (cfg.index_heads * width, cfg.q_rank),
            "indexer.proj.weight": (cfg.index_heads, dim),
            "indexer_compressor_kv.weight": (2 * width, dim),
            "indexer_compressor_gate.weight": (2 * width, dim),
            "indexer_compressor_ape.weight": (ratio, 2 * width),
            "indexer_compressor_norm.weight": (width,),
        }
    return shapes


def trunk_shapes(cfg: DemoConfig) -> dict[str, tuple[int, ...]]:
    """Torch shapes of the main file's tensors by GGUF name."""
    dim, flat = cfg.embedding, cfg.streams * cfg.embedding
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (cfg.vocab, dim),
        "output.weight": (cfg.vocab, dim),
        "output_norm.weight": (dim,),
        "output_hc_fn.weight": (cfg.streams, flat),
        "output_hc_base.weight": (cfg.streams,),
        "output_hc_scale.weight": (1,),
    }
    for layer, ratio in enumerate(cfg.ratios):
        block = block_shapes(cfg, ratio, layer < cfg.hash_layers)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def mtp_shapes(cfg: DemoConfig) -> dict[str, tuple[int, ...]]:
    """Torch shapes of the MTP support file's 32 tensors by GGUF name."""
    dim, flat = cfg.embedding, cfg.streams * cfg.embedding
    shapes: dict[str, tuple[int, ...]] = {
        "e_proj.weight": (dim, dim),
        "h_proj.weight": (dim, dim),
        "enorm.weight": (dim,),
        "hnorm.weight": (dim,),
        "norm.weight": (dim,),
        "hc_head_fn.weight": (cfg.streams, flat),
        "hc_head_base.weight": (cfg.streams,),
        "hc_head_scale.weight": (1,),
        **block_shapes(cfg, 0, False),
    }
    return {f"mtp.0.{name}": shape for name, shape in shapes.items()}


def _init_one(cfg: DemoConfig, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    leaf = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    count = cfg.streams
    if leaf.endswith("norm"):
        return torch.ones(shape)
    if leaf in ("attn_sinks", "exp_probs_b") or leaf.endswith("ape"):
        return torch.zeros(shape)
    if leaf.startswith(("hc_", "output_hc")):
        if leaf.endswith("scale"):
            return torch.full(shape, 0.1)
        if leaf.endswith("fn"):
            return torch.randn(shape, generator=rng) * 0.02
        base = torch.zeros(shape)
        # sigmoid(-1.0986) = 1/4: the block reads about the mean of the streams
        base[:count] = -math.log(count - 1)
        if shape[0] > count:
            # A preferred stream per sublayer breaks the symmetry of the four equal copies.
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            turn = 2 * layer + ("ffn" in leaf)
            base[turn % count] += 0.75
            base[count + (turn + 1) % count] += 0.5
            base[2 * count :] = 4.0 * torch.eye(count).reshape(-1)
        return base
    if leaf == "token_embd":
        return torch.randn(shape, generator=rng) * 0.3
    if leaf == "output":
        return torch.randn(shape, generator=rng) * 0.02
    fan_in = shape[-1]
    gain = 0.3 if ("down" in leaf or leaf == "attn_output_b") else 1.0
    return torch.randn(shape, generator=rng) * (gain / math.sqrt(fan_in))


def hash_table(cfg: DemoConfig, counts: Tensor, seed: int) -> Tensor:
    """Token-to-expert table, int32 (vocab, used), balanced by corpus frequency, distinct per row.

    Tokens are dealt in order of falling frequency to the experts with the smallest load so far.
    """
    rng = torch.Generator().manual_seed(seed)
    table = torch.zeros(cfg.vocab, cfg.experts_used, dtype=torch.int32)
    load = torch.rand(cfg.experts, generator=rng).double()
    for token in torch.argsort(counts, descending=True, stable=True).tolist():
        jitter = torch.rand(cfg.experts, generator=rng).double()
        pick = torch.argsort(load + jitter)[: cfg.experts_used]
        table[token] = pick.int()
        load[pick] += float(counts[token]) + 0.5
    return table


def init_trunk(cfg: DemoConfig, seed: int, counts: Tensor) -> Params:
    """Fresh trunk parameters, float32 (the hash table int32)."""
    rng = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in trunk_shapes(cfg).items():
        if name.endswith("tid2eid.weight"):
            params[name] = hash_table(cfg, counts, seed)
        else:
            params[name] = _init_one(cfg, name, shape, rng)
    return params


def init_mtp(cfg: DemoConfig, trunk: Params, seed: int) -> Params:
    """MTP parameters: the last trunk layer's where shapes agree, near-identity projections."""
    rng = torch.Generator().manual_seed(seed)
    params: Params = {}
    last = f"blk.{cfg.layers - 1}."
    for name, shape in mtp_shapes(cfg).items():
        source = trunk.get(name.replace("mtp.0.", last))
        params[name] = (
            source.detach().float().clone()
            if source is not None and tuple(source.shape) == shape
            else _init_one(cfg, name, shape, rng)
        )
    eye = torch.eye(cfg.embedding)
    params["mtp.0.h_proj.weight"] = eye + 0.02 * torch.randn(eye.shape, generator=rng)
    params["mtp.0.e_proj.weight"] = 0.3 * eye + 0.02 * torch.randn(eye.shape, generator=rng)
    for part in ("fn", "base", "scale"):
        params[f"mtp.0.hc_head_{part}.weight"] = trunk[f"output_hc_{part}.weight"].clone()
    params["mtp.0.norm.weight"] = trunk["output_norm.weight"].clone()
    return params


# --------------------------------------------------------------------------------------------
# elementwise pieces (compiled when training)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last axis in float32."""
    x = x.float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def turn(x: Tensor, swapped: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation x*cos + swapped*sin in float32, stored in x's type; see :func:`rotate`."""
    return (x.float() * cos + swapped.float() * sin).to(x.dtype)


def norm_turn(x: Tensor, swapped: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Weightless RMSNorm and rotation at once (they commute), stored in x's type."""
    wide = x.float()
    inv = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((wide * cos + swapped.float() * sin) * inv).to(x.dtype)


_SWAPS: dict[tuple[int, int, torch.dtype], Tensor] = {}


def swap_pairs(x: Tensor, rope: int) -> Tensor:
    """(-x1, x0, -x3, x2, ...) on the last ``rope`` channels, 0 elsewhere.

    A product with a signed permutation is exact in any type, and much faster here than strided
    elementwise code.
    """
    width = x.shape[-1]
    key = (width, rope, x.dtype)
    if key not in _SWAPS:
        matrix = torch.zeros(width, width)
        for even in range(width - rope, width, 2):
            matrix[even, even + 1] = -1.0
            matrix[even + 1, even] = 1.0
        _SWAPS[key] = matrix.to(x.dtype)
    return F.linear(x, _SWAPS[key])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: int) -> Tensor:
    """Rotary embedding of adjacent pairs of the last ``rope`` channels; full-width cos and sin."""
    return turn(x, swap_pairs(x, rope), cos, sin)


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """Sinkhorn normalisation of (N, N, M) logits, axis 0 source, axis 1 destination stream."""
    comb = torch.softmax(logits, 1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run many tiny operations without waking the second thread for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sinkhorn(torch.autograd.Function):
    """Sinkhorn with hand-written reverse pass (keeps 40 small normalisers, not 80 matrices)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        """See :func:`sinkhorn`."""
        with _one_thread():
            soft = torch.softmax(logits, 1)
            comb = soft + eps
            norms: list[Tensor] = []
            for step in range(2 * rounds - 1):
                total = comb.sum(step % 2, keepdim=True).add_(eps)
                comb = comb / total
                norms.append(total)
        ctx.save_for_backward(soft, comb, *norms)
        return comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Reverse the normalisations, rebuilding each matrix from its successor."""
        soft, comb, *norms = ctx.saved_tensors
        with _one_thread():
            grad = grads[0].contiguous()
            for step in range(len(norms) - 1, -1, -1):
                # y = x / t, t = sum x + eps:  dx = (dy - sum(dy * y)) / t
                inner = (grad * comb).sum(step % 2, keepdim=True)
                grad = (grad - inner).div_(norms[step])
                if step:
                    comb = comb * norms[step]
            grad = soft * (grad - (grad * soft).sum(1, keepdim=True))
        return grad, None, None


def hc_mix(flat: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Hyper-connection coefficients before the nonlinearity: (M, mix)."""
    inv = torch.rsqrt(flat.float().pow(2).mean(-1, keepdim=True) + eps)
    return F.linear(flat, fn.to(flat.dtype)).float() * inv


def hc_gather(state: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of the pre-weighted sum of streams; state (M, N, D), pre (M, N)."""
    mixed = state[:, 0] * pre[:, 0:1]
    for s in range(1, state.shape[1]):
        mixed = mixed + state[:, s] * pre[:, s : s + 1]
    return rms_norm(mixed, norm, eps)


def hc_scatter(state: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams post_j * out + sum_i comb[i, j] * state_i; comb (N, N, M), post (M, N)."""
    out = out.float()
    count = state.shape[1]
    rows = []
    for j in range(count):
        row = post[:, j : j + 1] * out
        for i in range(count):
            row = row + comb[i, j][:, None] * state[:, i]
        rows.append(row)
    return torch.stack(rows, 1).to(state.dtype)


def hc_coefficients(
    mix: Tensor, base: Tensor, scale: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the mix into pre (M, N), post (M, N) and Sinkhorn logits (N, N, M)."""
    pre = torch.sigmoid(mix[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(mix[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (mix[:, 2 * count :] * scale[2] + base[2 * count :]).t().reshape(count, count, -1)
    return pre, post, logits


def swiglu(gate_up: Tensor, weight: Tensor | None, clamp: float) -> Tensor:
    """Clamped SwiGLU of stacked (gate, up), optionally scaled per row; keeps the dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    mid = F.silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)
    if weight is not None:
        mid = mid * weight
    return mid.to(gate_up.dtype)


def sink_forward(
    scores: Tensor, bias: Tensor, keep: Tensor | None, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Probabilities (the scores' type) and the sink's own share (float32, last axis 1)."""
    scaled = scores.float() * scale + bias
    if keep is not None:
        scaled = scaled + keep
    top = torch.maximum(scaled.amax(-1, keepdim=True), sinks[:, None])
    expo = torch.exp(scaled - top)
    sink = torch.exp(sinks[:, None] - top)
    total = expo.sum(-1, keepdim=True) + sink
    return (expo / total).to(scores.dtype), sink / total


def sink_backward(
    grad: Tensor, probs: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and, unsummed (last axis 1), of the sinks."""
    wide, slope = probs.float(), grad.float()
    inner = (wide * slope).sum(-1, keepdim=True)
    return (wide * (slope - inner) * scale).to(probs.dtype), -share * inner


class SinkSoftmax(torch.autograd.Function):
    """Softmax of scores*scale + bias (+ keep) with a per-head sink in the denominator.

    scores (B, C, W, H, K), bias and keep broadcastable additive masks, sinks (H). Float32 inside,
    result in the scores' type; only scores and sinks receive gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, bias: Tensor, keep: Tensor | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """Probabilities."""
        probs, share = sink_forward(scores, bias, keep, sinks, scale)
        ctx.save_for_backward(probs, share)
        ctx.scale = scale
        return probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Softmax gradient; the sink is one more row whose value is zero."""
        probs, share = ctx.saved_tensors
        d_scores, d_sinks = sink_backward(grads[0], probs, share, ctx.scale)
        return d_scores, None, None, d_sinks.sum((0, 1, 2, 4)), None


_PIECES = (
    "turn",
    "norm_turn",
    "hc_mix",
    "hc_gather",
    "hc_scatter",
    "hc_coefficients",
    "swiglu",
    "sink_forward",
    "sink_backward",
)


def compile_pieces() -> None:
    """Replace the elementwise pieces by their compiled versions (process-wide, for training)."""
    # One specialised version per shape; the experts' capacity varies, so swiglu is dynamic.
    torch._dynamo.config.recompile_limit = 64
    for name in _PIECES:
        globals()[name] = torch.compile(globals()[name], dynamic=name == "swiglu")


# --------------------------------------------------------------------------------------------
# layers


def linear(x: Tensor, weight: Tensor, mode: Mode) -> Tensor:
    """Matmul in the mode's type."""
    return F.linear(x.to(mode.dtype), weight.to(mode.dtype))


def frequencies(cfg: DemoConfig, ratio: int) -> Tensor:
    """Rotary frequencies, float64 (R/2): plain for ratio 0, YaRN otherwise."""
    idx = torch.arange(cfg.rope_dim // 2, dtype=torch.float64)
    base = cfg.compress_rope_base if ratio else cfg.rope_base
    freq = base ** (-2 * idx / cfg.rope_dim)
    if not ratio:
        return freq

    def corner(beta: float) -> float:
        turns = math.log(cfg.yarn_context / (2 * math.pi * beta))
        return cfg.rope_dim * turns / (2 * math.log(base))

    low = max(math.floor(corner(cfg.yarn_fast)), 0)
    high = min(math.ceil(corner(cfg.yarn_slow)), cfg.rope_dim - 1)
    ramp = ((idx - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return freq * (1 - ramp) + freq / cfg.yarn_factor * ramp


_TABLES: dict[tuple[DemoConfig, int, int, int, int], tuple[Tensor, Tensor]] = {}


def tables(
    cfg: DemoConfig, ratio: int, length: int, width: int, step: int = 1
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, width) of positions 0, step, ...; 1 and 0 on unrotated channels."""
    key = (cfg, min(ratio, 1), length, width, step)
    if key not in _TABLES:
        angle = torch.outer(torch.arange(length).double() * step, frequencies(cfg, ratio))
        angle = F.pad(angle.repeat_interleave(2, -1), (width - cfg.rope_dim, 0))
        _TABLES[key] = (angle.cos().float(), angle.sin().float())
    return _TABLES[key]


def compress(cfg: DemoConfig, p: Params, prefix: str, x: Tensor, ratio: int, mode: Mode) -> Tensor:
    """Compressed rows (B, T // ratio, w) of x (B, T, D); rotated by their block's start."""
    value = linear(x, p[prefix + "_kv.weight"], mode).float()
    score = linear(x, p[prefix + "_gate.weight"], mode).float()
    rows = x.shape[1] // ratio
    value = value[:, : rows * ratio].unflatten(1, (rows, ratio))
    score = score[:, : rows * ratio].unflatten(1, (rows, ratio)) + p[prefix + "_ape.weight"]
    if ratio == 4:
        width = value.shape[-1] // 2
        # A halves belong to the next block: shift them by one block, first block masked.
        old_v = F.pad(value[..., :width], (0, 0, 0, 0, 1, 0))[:, :-1]
        old_s = F.pad(score[..., :width], (0, 0, 0, 0, 1, 0), value=-math.inf)[:, :-1]
        value = torch.cat((old_v, value[..., width:]), 2)
        score = torch.cat((old_s, score[..., width:]), 2)
    pooled = (torch.softmax(score, 2) * value).sum(2)
    cos, sin = tables(cfg, ratio, rows, pooled.shape[-1], ratio)
    pooled = rms_norm(pooled, p[prefix + "_norm.weight"], cfg.eps)
    return rotate(pooled, cos, sin, cfg.rope_dim)


def index_scores(
    cfg: DemoConfig, p: Params, pre: str, x: Tensor, low: Tensor, mode: Mode
) -> Tensor:
    """Indexer scores (B, T, rows); inputs are used detached."""
    x, low = x.detach(), low.detach()
    batch, length, _ = x.shape
    keys = compress(cfg, p, pre + "indexer_compressor", x, 4, mode)
    query = linear(low, p[pre + "indexer.attn_q_b.weight"], mode)
    query = query.view(batch, length, cfg.index_heads, cfg.index_dim)
    cos, sin = tables(cfg, 4, length, cfg.index_dim)
    query = rotate(query, cos[:, None], sin[:, None], cfg.rope_dim)
    weight = F.linear(x.float(), p[pre + "indexer.proj.weight"])
    weight = weight * (cfg.index_dim * cfg.index_heads) ** -0.5
    dots = torch.bmm(query.flatten(1, 2), keys.transpose(1, 2).to(mode.dtype))
    dots = F.relu(dots.float()).view(batch, length, cfg.index_heads, -1)
    return (dots * weight[..., None]).sum(2)


def top_k_mask(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Boolean mask of the k best visible rows per query (stable: ties to the lower row)."""
    ranked = torch.where(visible, scores, torch.full_like(scores, -math.inf))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True)[1][..., :k]
    mask = torch.zeros_like(visible.expand_as(scores)).contiguous()
    return mask.scatter_(-1, order, True) & visible


def window_bias(window: int, chunks: int, lag: int = 0) -> Tensor:
    """Additive mask (chunks, window, 1, 2*window) of banded blocks; keys newer than -lag hidden.

    Chunk c's keys are positions (c-1)*window .. (c+1)*window - 1.
    """
    query = torch.arange(window)[:, None] + window
    key = torch.arange(2 * window)[None]
    seen = (key <= query - lag) & (key > query - window)
    bias = torch.where(seen, 0.0, -1e30).repeat(chunks, 1, 1)
    bias[0, :, :window] = -1e30
    return bias[:, :, None]


_BIAS: dict[tuple[int, int, int], Tensor] = {}


def banded(rows: Tensor, window: int) -> Tensor:
    """Keys of each chunk: (B, T, d) -> (B, T/window, 2*window, d), previous chunk first."""
    blocks = rows.unflatten(1, (-1, window))
    before = F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((before, blocks), 2)


def attention(
    cfg: DemoConfig,
    p: Params,
    pre: str,
    ratio: int,
    x: Tensor,
    mode: Mode,
    trace: Trace | None,
    older: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention sublayer on x (B, T, D), T a multiple of the window; returns output and KV rows.

    ``older`` (MTP recursion only) holds the KV rows of the shallower drafts of the same chain,
    depth 1 first: depth-1 rows serve the past window, deeper ones a single diagonal each.
    """
    batch, length, _ = x.shape
    win, head, heads = cfg.window, cfg.head_dim, cfg.heads
    chunks = length // win
    cos, sin = tables(cfg, ratio, length, head)
    low = rms_norm(
        linear(x, p[pre + "attn_q_a.weight"], mode), p[pre + "attn_q_a_norm.weight"], cfg.eps
    )
    query = linear(low, p[pre + "attn_q_b.weight"], mode).view(batch, length, heads, head)
    swapped = swap_pairs(query, cfg.rope_dim)
    query = norm_turn(query, swapped, cos[:, None], sin[:, None], cfg.eps)
    rows = linear(x, p[pre + "attn_kv.weight"], mode)
    rows = rms_norm(rows, p[pre + "attn_kv_a_norm.weight"], cfg.eps)
    rows = rotate(rows, cos, sin, cfg.rope_dim).to(mode.dtype)
    depth = len(older) if older else 0
    near = banded(older[0] if older else rows, win).flatten(0, 1)
    blocks = query.view(batch * chunks, win * heads, head)
    shape = (batch, chunks, win, heads, -1)
    key = (win, chunks, depth)
    if key not in _BIAS:
        _BIAS[key] = window_bias(win, chunks, depth)
    parts = [torch.bmm(blocks, near.transpose(1, 2)).view(shape)]
    biases = [_BIAS[key].expand(chunks, win, 1, 2 * win)]
    wide = query.reshape(batch, length * heads, head)
    keep: Tensor | None = None
    guess: Tensor | None = None
    packed: Tensor | None = None
    seen = torch.empty(0)
    if ratio and length >= ratio:
        packed = compress(cfg, p, pre + "attn_compressor", x, ratio, mode).to(mode.dtype)
        count = packed.shape[1]
        parts.append(torch.bmm(wide, packed.transpose(1, 2)).view(shape))
        seen = (torch.arange(1, length + 1)[:, None] // ratio) > torch.arange(count)
        biases.append(torch.where(seen, 0.0, -1e30).view(chunks, win, 1, count))
        if ratio == 4 and (count > cfg.top_k or mode.index_loss):
            guess = index_scores(cfg, p, pre, x, low, mode)
            if mode.select and count > cfg.top_k:
                kept = top_k_mask(guess.detach(), seen, cfg.top_k)
                keep = torch.where(kept, 0.0, -1e30).view(batch, chunks, win, 1, count)
                keep = F.pad(keep, (2 * win, 0))
    diagonals: list[Tensor] = []
    if older:
        for back, old in enumerate([rows, *reversed(older[1:])]):
            shifted = F.pad(old, (0, 0, back, 0))[:, :length]
            diagonals.append(shifted)
            parts.append(
                (query * shifted[:, :, None])
                .float()
                .sum(-1, keepdim=True)
                .to(mode.dtype)
                .view(shape)
            )
            hidden = torch.arange(length) < back
            biases.append(torch.where(hidden, -1e30, 0.0).view(chunks, win, 1, 1))
    edge = 2 * win
    scores, bias = torch.cat(parts, -1), torch.cat(biases, -1)
    sinks = p[pre + "attn_sinks.weight"]
    if guess is not None and packed is not None and trace is not None and mode.index_loss:
        with torch.no_grad():
            # The target is the attention before selection, so that dropped rows can return.
            full, _ = sink_forward(scores.detach(), bias, None, sinks.detach(), head**-0.5)
            mass = full[..., edge:].sum(3, dtype=torch.float32).view(batch, length, -1)
            mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        logp = torch.log_softmax(guess.masked_fill(~seen, -1e30), -1)
        gap = (mass * (mass.clamp_min(1e-9).log() - logp)).masked_fill(~seen, 0.0)
        trace.index_losses.append(gap.sum(-1)[:, ratio - 1 :].mean())
    probs: Tensor = SinkSoftmax.apply(scores, bias, keep, sinks, head**-0.5)
    out = torch.bmm(probs[..., :edge].reshape(batch * chunks, win * heads, edge), near)
    out = out.view(batch, length, heads, head)
    if packed is not None:
        count = packed.shape[1]
        tail = probs[..., edge : edge + count].reshape(batch, length * heads, count)
        out = out + torch.bmm(tail, packed).view(batch, length, heads, head)
    for index, shifted in enumerate(diagonals):
        part = probs[..., edge + index].reshape(batch, length, heads, 1)
        out = out + part * shifted[:, :, None]
    out = rotate(out, cos[:, None], -sin[:, None], cfg.rope_dim)
    grouped = out.flatten(2).split(head * heads // cfg.groups, -1)
    first = p[pre + "attn_output_a.weight"].split(cfg.o_rank)
    inner = torch.cat([linear(o, a, mode) for o, a in zip(grouped, first, strict=True)], -1)
    return linear(inner, p[pre + "attn_output_b.weight"], mode), rows


class Permute(torch.autograd.Function):
    """Rows gathered by one index; the reverse pass gathers by the inverse lists, never scatters.

    Forward (expand): out[s] = x[token[s]] with an extra zero row for empty slots.
    Forward (reduce): out[m] = sum_k x[slot[m, k]]. Each is the other's transpose.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, slot: Tensor, expand: bool) -> Tensor:
        """Gather rows."""
        ctx.save_for_backward(token, slot)
        ctx.expand = expand
        return Permute.apply_plain(x, token, slot, expand)

    @staticmethod
    def apply_plain(x: Tensor, token: Tensor, slot: Tensor, expand: bool) -> Tensor:
        """The gather itself."""
        if expand:
            return F.pad(x, (0, 0, 0, 1)).index_select(0, token)
        out = x.index_select(0, slot[:, 0])
        for k in range(1, slot.shape[1]):
            out = out + x.index_select(0, slot[:, k])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Transposed gather."""
        token, slot = ctx.saved_tensors
        return Permute.apply_plain(grads[0], token, slot, not ctx.expand), None, None, None


def moe(
    cfg: DemoConfig,
    p: Params,
    pre: str,
    x: Tensor,
    tokens: Tensor,
    mode: Mode,
    trace: Trace | None,
) -> Tensor:
    """Mixture of experts on x (M, D) float32, tokens (M); output in the mode's type."""
    count, used = cfg.experts, cfg.experts_used
    logits = F.linear(x, p[pre + "ffn_gate_inp.weight"])
    affinity = torch.sqrt(F.softplus(logits))
    if pre + "ffn_gate_tid2eid.weight" in p:
        chosen = p[pre + "ffn_gate_tid2eid.weight"][tokens].long()
    else:
        ranked = affinity.detach() + p[pre + "exp_probs_b.bias"]
        chosen = torch.sort(ranked, dim=-1, descending=True, stable=True)[1][:, :used]
    weight = affinity.gather(1, chosen)
    weight = cfg.route_scale * weight / weight.sum(-1, keepdim=True).clamp_min(6.103515625e-5)
    flat = chosen.flatten()
    load = torch.bincount(flat, minlength=count)
    if trace is not None:
        trace.loads[pre] = load
    # Slots: expert-major, each expert padded to one common capacity so that one bmm serves all.
    capacity = -(-int(load.max()) // 128) * 128
    order = torch.argsort(flat, stable=True)
    start = torch.cumsum(load, 0) - load
    place = torch.arange(flat.numel()) - start[flat[order]] + flat[order] * capacity
    slot = torch.empty_like(flat)
    slot[order] = place
    token = torch.full((count * capacity,), x.shape[0])
    token[place] = order // used
    source = torch.full((count * capacity,), flat.numel())
    source[place] = order
    scale = F.pad(weight.flatten(), (0, 1)).index_select(0, source)
    low = x.to(mode.dtype)

    def expert(name: str) -> Tensor:
        full = p[f"{pre}ffn_{name}_exps.weight"]
        return (mode.weight_filter(full) if mode.weight_filter else full).to(mode.dtype)

    spread = Permute.apply(low, token, slot.view(-1, used), True).view(count, capacity, -1)
    both = torch.cat((expert("gate"), expert("up")), 1).transpose(1, 2)
    mid = swiglu(torch.bmm(spread, both), scale.view(count, capacity, 1), cfg.clamp)
    out = torch.bmm(mid, expert("down").transpose(1, 2)).flatten(0, 1)
    out = Permute.apply(out, token, slot.view(-1, used), False)
    shared = torch.cat((p[pre + "ffn_gate_shexp.weight"], p[pre + "ffn_up_shexp.weight"]))
    side = swiglu(linear(low, shared, mode), None, cfg.clamp)
    return out + linear(side, p[pre + "ffn_down_shexp.weight"], mode)


def hc_open(
    cfg: DemoConfig, p: Params, pre: str, part: str, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised block input (M, D), post (M, N) and comb (N, N, M) of one sublayer."""
    mix = hc_mix(state.flatten(1), p[f"{pre}hc_{part}_fn.weight"], cfg.eps)
    gate, post, logits = hc_coefficients(
        mix,
        p[f"{pre}hc_{part}_base.weight"],
        p[f"{pre}hc_{part}_scale.weight"],
        cfg.streams,
        cfg.eps,
    )
    comb = Sinkhorn.apply(logits, cfg.sinkhorn, cfg.eps)
    return hc_gather(state, gate, p[f"{pre}{part}_norm.weight"], cfg.eps), post, comb


def layer(
    cfg: DemoConfig,
    p: Params,
    pre: str,
    ratio: int,
    state: Tensor,
    tokens: Tensor,
    mode: Mode,
    trace: Trace | None = None,
    older: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One transformer layer on streams (B*T, N, D); tokens (B, T). Returns streams, KV rows."""
    batch, length = tokens.shape
    x, post, comb = hc_open(cfg, p, pre, "attn", state)
    out, rows = attention(cfg, p, pre, ratio, x.view(batch, length, -1), mode, trace, older)
    state = hc_scatter(state, out.reshape(batch * length, -1), post, comb)
    x, post, comb = hc_open(cfg, p, pre, "ffn", state)
    out = moe(cfg, p, pre, x, tokens.flatten(), mode, trace)
    return hc_scatter(state, out, post, comb), rows


def hc_head(cfg: DemoConfig, p: Params, pre: str, norm: str, state: Tensor) -> Tensor:
    """Head input (M, D): normalised mixture of the streams; pre names the three hc tensors."""
    mix = hc_mix(state.flatten(1), p[pre + "fn.weight"], cfg.eps)
    gate = torch.sigmoid(mix * p[pre + "scale.weight"] + p[pre + "base.weight"]) + cfg.eps
    return hc_gather(state, gate, p[norm], cfg.eps)


def trunk_forward(
    cfg: DemoConfig, p: Params, tokens: Tensor, mode: Mode, trace: Trace | None = None
) -> tuple[Tensor, Tensor]:
    """Streams after the last layer (B*T, N, D) and head input (B*T, D) for tokens (B, T)."""
    embedded = F.embedding(tokens.flatten(), p["token_embd.weight"])
    state = embedded[:, None].expand(-1, cfg.streams, -1).to(mode.dtype).contiguous()
    for index, ratio in enumerate(cfg.ratios):
        state, _ = layer(cfg, p, f"blk.{index}.", ratio, state, tokens, mode, trace)
    return state, hc_head(cfg, p, "output_hc_", "output_norm.weight", state)


def mtp_forward(
    cfg: DemoConfig,
    p: Params,
    streams: Tensor,
    tokens: Tensor,
    mode: Mode,
    trace: Trace | None = None,
    older: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """MTP block: streams (B*T, N, D) of the previous position, tokens (B, T) of this one.

    Returns output streams, head input (B*T, D) and the block's KV rows (B, T, d).
    """
    pre = "mtp.0."
    embedded = F.embedding(tokens.flatten(), p["token_embd.weight"]).detach()
    first = linear(
        rms_norm(embedded, p[pre + "enorm.weight"], cfg.eps), p[pre + "e_proj.weight"], mode
    ).float()
    second = linear(
        rms_norm(streams, p[pre + "hnorm.weight"], cfg.eps), p[pre + "h_proj.weight"], mode
    ).float()
    state = (first[:, None] + second).to(mode.dtype)
    state, rows = layer(cfg, p, pre, 0, state, tokens, mode, trace, older)
    return state, hc_head(cfg, p, pre + "hc_head_", pre + "norm.weight", state), rows


def previous(x: Tensor, batch: int) -> Tensor:
    """Shift (B*T, ...) by one position inside each sequence; position 0 gets zeros."""
    seq = x.unflatten(0, (batch, -1))
    return torch.cat((torch.zeros_like(seq[:, :1]), seq[:, :-1]), 1).flatten(0, 1)
