"""Ranks of rows of logits in one call: what `ds4flow.ranks` does, compiled."""

from __future__ import annotations

import numpy as np
import torch

from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.linking import entry
from ds4flow.kernels.cpu.rows import top_two
from ds4flow.ranks import Ranks

ROOM = 32  # float32 behind the results, which the kernel works in


def ranks(logits: torch.Tensor) -> Ranks:
    """Choices and gaps of contiguous float32 `logits [M, V]`, which are finite."""
    m, vocab = logits.shape
    best = np.empty(m, dtype=np.int64)
    values = np.empty(2 * m + ROOM, dtype=np.float32)
    results = (best.ctypes.data, values.ctypes.data)
    enter = entry(release=False)
    enter(library.address(top_two), logits.data_ptr(), m, vocab, *results, 0, 0, 0, 0)
    pairs = values[: 2 * m].tolist()
    gaps = tuple(top - second for top, second in zip(pairs[::2], pairs[1::2], strict=True))
    return Ranks(tuple(best.tolist()), gaps)
