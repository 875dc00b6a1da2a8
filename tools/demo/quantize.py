"""Weight formats of the shipped files: Q4_K by a least-squares search, Q8_0, F16, F32.

Promise: what :func:`encode` returns decodes with ``gguf.quants.dequantize`` to exactly what
:func:`decode` returns; Q4_K scales are chosen to minimise the squared error per block.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from demo.model import Params

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_SHRINK = np.linspace(0.72, 1.12, 21, dtype=np.float32)


def _fit(x: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """Least squares of x ~ scale * codes - low with scale, low >= 0; last axis is the block."""
    count = np.float32(x.shape[-1])
    sum_q, sum_x = codes.sum(-1), x.sum(-1)
    sum_qq, sum_qx = (codes * codes).sum(-1), (codes * x).sum(-1)
    det = count * sum_qq - sum_q * sum_q
    safe = np.where(det > 0, det, 1)
    scale = np.where(det > 0, (count * sum_qx - sum_q * sum_x) / safe, 0)
    low = np.where(det > 0, (sum_q * sum_qx - sum_qq * sum_x) / safe, 0)
    # A negative offset is not representable: refit through zero.
    through = np.where(sum_qq > 0, sum_qx / np.where(sum_qq > 0, sum_qq, 1), 0)
    scale = np.where(low < 0, through, scale)
    return np.maximum(scale, 0).astype(np.float32), np.maximum(low, 0).astype(np.float32)


def _codes(x: Floats, scale: Floats, low: Floats) -> Floats:
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
    return np.clip(np.rint((x + low[..., None]) * inverse[..., None]), 0, 15).astype(np.float32)


def _error(x: Floats, codes: Floats, scale: Floats, low: Floats) -> Floats:
    gap = scale[..., None] * codes - low[..., None] - x
    return np.asarray((gap * gap).sum(-1), dtype=np.float32)


def _search_blocks(x: Floats) -> tuple[Floats, Floats]:
    """Best real-valued scale and offset for every 32-block of x (K, 8, 32)."""
    low0 = np.maximum(-x.min(-1), 0)
    span = np.maximum(x.max(-1), 0) + low0
    best = np.full(x.shape[:-1], np.inf, dtype=np.float32)
    best_scale, best_low = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINK:
        scale, low = (span * shrink / 15).astype(np.float32), (low0 * shrink).astype(np.float32)
        for _ in range(2):
            scale, low = _fit(x, _codes(x, scale, low))
        error = _error(x, _codes(x, scale, low), scale, low)
        better = error < best
        best = np.where(better, error, best)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, low, best_low)
    return best_scale, best_low


def _search_steps(
    x: Floats, top_s: Floats, top_m: Floats, scale: Floats, low: Floats
) -> tuple[Floats, Floats, Floats]:
    """6-bit scale and offset per block near the wanted values, and the codes they give."""
    inv_s = np.where(top_s > 0, 1 / np.where(top_s > 0, top_s, 1), 0)[:, None]
    inv_m = np.where(top_m > 0, 1 / np.where(top_m > 0, top_m, 1), 0)[:, None]
    base_s, base_m = np.rint(scale * inv_s), np.rint(low * inv_m)
    best = np.full(x.shape[:-1], np.inf, dtype=np.float32)
    best_s, best_m = base_s, base_m
    for move_s in (0, -1, 1):
        for move_m in (0, -1, 1):
            try_s = np.clip(base_s + move_s, 0, 63).astype(np.float32)
            try_m = np.clip(base_m + move_m, 0, 63).astype(np.float32)
            real_s, real_m = top_s[:, None] * try_s, top_m[:, None] * try_m
            error = _error(x, _codes(x, real_s, real_m), real_s, real_m)
            better = error < best
            best = np.where(better, error, best)
            best_s = np.where(better, try_s, best_s)
            best_m = np.where(better, try_m, best_m)
    return best_s, best_m, _codes(x, top_s[:, None] * best_s, top_m[:, None] * best_m)


def _refit_tops(x: Floats, step_s: Floats, step_m: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """Least-squares super-block factors for x ~ top_s * (step_s * codes) - top_m * step_m."""
    a = (step_s[..., None] * codes).reshape(len(x), -1).astype(np.float64)
    b = np.repeat(step_m, 32, axis=-1).reshape(len(x), -1).astype(np.float64)
    y = x.reshape(len(x), -1).astype(np.float64)
    aa, ab, bb = (a * a).sum(-1), (a * b).sum(-1), (b * b).sum(-1)
    ay, by = (a * y).sum(-1), (b * y).sum(-1)
    det = aa * bb - ab * ab
    safe = np.where(det > 0, det, 1)
    top_s = np.where(det > 0, (bb * ay - ab * by) / safe, ay / np.where(aa > 0, aa, 1))
    top_m = np.where(det > 0, (ab * ay - aa * by) / safe, 0)
    return np.maximum(top_s, 0).astype(np.float32), np.maximum(top_m, 0).astype(np.float32)


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def quantize_q4_k(weights: Floats) -> Bytes:
    """Q4_K bytes of weights (..., n) with n a multiple of 256; shape (..., n / 256 * 144)."""
    if weights.shape[-1] % 256:
        raise ValueError(f"Q4_K needs rows of a multiple of 256 weights, not {weights.shape[-1]}")
    x = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, 8, 32)
    scale, low = _search_blocks(x)
    top_s, top_m = _half(scale.max(-1) / 63), _half(low.max(-1) / 63)
    step_s, step_m, codes = _search_steps(x, top_s, top_m, scale, low)
    error = _error(x, codes, top_s[:, None] * step_s, top_m[:, None] * step_m).sum(-1)
    for _ in range(3):
        new_s, new_m = _refit_tops(x, step_s, step_m, codes)
        new_s, new_m = _half(new_s), _half(new_m)
        found = _search_steps(x, new_s, new_m, scale, low)
        real_s, real_m = new_s[:, None] * found[0], new_m[:, None] * found[1]
        after = _error(x, found[2], real_s, real_m).sum(-1)
        better = after < error
        error = np.where(better, after, error)
        top_s, top_m = np.where(better, new_s, top_s), np.where(better, new_m, top_m)
        pick = better[:, None]
        step_s, step_m = np.where(pick, found[0], step_s), np.where(pick, found[1], step_m)
        codes = np.where(pick[..., None], found[2], codes)
    return _pack_q4_k(top_s, top_m, step_s, step_m, codes).reshape(*weights.shape[:-1], -1)


def _pack_q4_k(
    top_s: Floats, top_m: Floats, step_s: Floats, step_m: Floats, codes: Floats
) -> Bytes:
    """Assemble 144-byte blocks: two halves, 12 bytes of 6-bit steps, 128 bytes of nibbles."""
    out = np.zeros((len(codes), 144), dtype=np.uint8)
    out[:, 0:2] = top_s.astype("<f2")[:, None].view(np.uint8)
    out[:, 2:4] = top_m.astype("<f2")[:, None].view(np.uint8)
    a, b = step_s.astype(np.uint8), step_m.astype(np.uint8)
    out[:, 4:8] = a[:, :4] | ((a[:, 4:] >> 4) << 6)
    out[:, 8:12] = b[:, :4] | ((b[:, 4:] >> 4) << 6)
    out[:, 12:16] = (a[:, 4:] & 15) | ((b[:, 4:] & 15) << 4)
    q = codes.astype(np.uint8)
    out[:, 16:] = (q[:, 0::2] | (q[:, 1::2] << 4)).reshape(len(codes), 128)
    return out


def kind_of(name: str) -> Kind:
    """Stored type of a tensor by its GGUF name, as in the published files."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    if leaf.endswith("tid2eid"):
        return Kind.I32
    if leaf.endswith("_exps"):
        return Kind.Q4_K
    mtp = name.startswith("mtp.")
    if leaf in ("ffn_gate_inp", "token_embd") or leaf.endswith("_fn"):
        return Kind.F32 if mtp else Kind.F16
    plain = ("norm", "sinks", "bias", "base", "scale", "ape")
    if leaf.endswith(plain):
        return Kind.F32
    if leaf == "proj":
        return Kind.F16
    return Kind.Q8_0


def encode(name: str, tensor: Tensor) -> tuple[npt.NDArray[np.generic], Kind]:
    """Array for ``GGUFWriter.add_tensor`` and its type."""
    kind = kind_of(name)
    array = tensor.detach().cpu().numpy()
    if kind == Kind.I32:
        return array.astype(np.int32), kind
    if kind == Kind.Q4_K:
        return quantize_q4_k(array), kind
    if kind == Kind.F16:
        return array.astype(np.float16), kind
    if kind == Kind.F32:
        return array.astype(np.float32), kind
    return gguf.quants.quantize(np.ascontiguousarray(array, dtype=np.float32), kind), kind


def decode(array: npt.NDArray[np.generic], kind: Kind) -> Tensor:
    """What a reader computes with: float32 (int32 for the hash table)."""
    if kind == Kind.I32:
        return torch.from_numpy(np.array(array, dtype=np.int32))
    if kind in (Kind.F16, Kind.F32):
        return torch.from_numpy(np.array(array, dtype=np.float32))
    return torch.from_numpy(np.array(gguf.quants.dequantize(array, kind), dtype=np.float32))


def shipped(params: Params) -> Params:
    """Parameters after a round trip through their stored types."""
    return {name: decode(*encode(name, tensor)) for name, tensor in params.items()}
