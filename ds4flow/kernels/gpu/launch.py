"""Starting Triton kernels: the one place that chooses warps, stages and floating-point options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import triton

Grid = tuple[int, ...]


class Options(NamedTuple):
    """Compile options of one kernel. Fusion of multiply and add is chosen here and nowhere else.

    Products may fuse, which only makes them more exact. Kernels that follow the reference's
    rounding step by step must not, or a cached value rounds to its neighbour.
    """

    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = False


PRODUCT = Options(num_warps=2, num_stages=4, enable_fp_fusion=True)
ATTENTION = Options(num_warps=4, num_stages=2, enable_fp_fusion=True)
ROW = Options()
WIDE_ROW = Options(num_warps=8)


class Launcher(Protocol):
    """Runs a kernel, or does something else with a launch (compile it, count it)."""

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        args: tuple[torch.Tensor | int | float, ...],
        constants: Mapping[str, Any],
        options: Options,
    ) -> None:
        """Launch `kernel` on `grid`; no synchronisation."""


def launch(
    kernel: Any,
    grid: Grid,
    args: tuple[torch.Tensor | int | float, ...],
    constants: Mapping[str, Any],
    options: Options,
) -> None:
    """Launch on the current stream of the arguments' device, or in the interpreter."""
    kernel[grid](*args, **constants, **options._asdict())


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)
