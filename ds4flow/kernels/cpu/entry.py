"""The way from Python into a kernel."""

from __future__ import annotations

from ds4flow.kernels.cpu.lanes import invoke


def enter(
    kernel: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int
) -> int:
    """Call a kernel of nine int64 arguments by its address."""
    return invoke(kernel, (a, b, c, d, e, f, g, h, i))
