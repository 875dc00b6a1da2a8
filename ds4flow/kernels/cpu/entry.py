"""The way from Python into a kernel."""

from __future__ import annotations

from ds4flow.kernels.cpu.lanes import invoke


def enter(
    kernel: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int
) -> int:
    """Call a kernel of nine int64 arguments by its address."""
    return invoke(kernel, (a, b, c, d, e, f, g, h, i))


def enter_and_release(
    kernel: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int
) -> int:
    """The same without the interpreter's lock, which a sleeping worker needs to wake up."""
    return invoke(kernel, (a, b, c, d, e, f, g, h, i))


def serve(kernel: int, control: int, thread: int, patience: int) -> int:
    """Run a worker's loop (compiled so that other Python threads go on meanwhile)."""
    return invoke(kernel, (control, thread, patience))
