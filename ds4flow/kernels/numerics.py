"""Small arithmetic of the reference kernels, written so that a row never sees its neighbours.

`torch.sigmoid`, `silu` and `softplus` use another exponential in the vector body than in the scalar
tail, so their bits depend on where a row lies in memory; `exp`, `log` and plain arithmetic do not.
"""

from __future__ import annotations

import torch

FP8_BLOCK = 64
FP4_BLOCK = 32


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function, elementwise."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`, elementwise."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))`, elementwise; linear above 20, accurate for the smallest exponentials.

    `log1p` is written as `log(u) * e / (u - 1)` with `u = 1 + e` (Kahan), from operations whose
    bits do not depend on the position in memory.
    """
    e = torch.exp(torch.clamp(x, max=20.0))
    u = 1.0 + e
    small = u == 1.0
    log1p = torch.where(small, e, torch.log(u) * e / torch.where(small, 1.0, u - 1.0))
    return torch.where(x > 20.0, x, log1p)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis of `x`, float32; `weight` multiplies as stored."""
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """`2 ** ceil(log2(amax / largest))`, exact at powers of two (from the float's own exponent)."""
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def fp8_round_trip(x: torch.Tensor) -> torch.Tensor:
    """E4M3 round trip over blocks of 64 channels with power-of-two scales; `x [..., 64 * n]`."""
    blocks = x.unflatten(-1, (-1, FP8_BLOCK))
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    codes = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def fp4_round_trip(x: torch.Tensor) -> torch.Tensor:
    """E2M1 round trip over blocks of 32 channels with power-of-two scales; `x [..., 32 * n]`.

    Ties go to the value with the even code (0, 1, 2, 4).
    """
    blocks = x.unflatten(-1, (-1, FP4_BLOCK))
    tiny = 6.0 * 2.0**-126
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp(min=tiny), 6.0)
    y = (blocks / scale).clamp(-6.0, 6.0)
    a = y.abs()
    code = torch.zeros_like(a, dtype=torch.int64)
    for bound, tie_goes_up in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (a >= bound) if tie_goes_up else (a > bound)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
    return (torch.copysign(values[code], y) * scale).flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform (natural order) of the last axis, 2^n wide."""
    width = x.shape[-1]
    y = x
    span = 1
    while span < width:
        y = y.unflatten(-1, (-1, 2, span))
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), dim=-2)
        y = y.flatten(-3)
        span *= 2
    return y * width**-0.5


def sinkhorn(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Doubly stochastic mixing matrices from `scores [M, N, N]` (row: old stream, column: new one).

    Softmax over each row, then column and row normalisations in turn, ending on a column one, as
    the manifold-constrained hyper-connections paper prescribes.
    """
    mix = torch.softmax(scores, dim=-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix
