"""From streams to logits, for the trunk and for the MTP block; the one place that checks them.

Promise: logits that come from here are finite.
"""

from __future__ import annotations

import numpy as np
import torch

from ds4flow.errors import NOT_FINITE, NumericsError
from ds4flow.kernels.interface import Kernels
from ds4flow.model.weights import HeadWeights
from ds4flow.quants import QTensor


def head_logits(
    kernels: Kernels, streams: torch.Tensor, head: HeadWeights, output: QTensor, where: str
) -> torch.Tensor:
    """Logits `[M, V]` of streams `[M, N, D]`; NumericsError naming `where` when one is not finite.

    The rows are what the later stages choose tokens from, so nothing after this checks again.
    """
    if kernels.passes is not None:
        logits, bad = kernels.passes.head(streams, head, output)
        if bad >= 0:
            raise not_finite(where, bad)
        return logits
    with torch.inference_mode():
        logits = kernels.linear(kernels.hc_head(streams, head.hc, head.norm), output)
    check_logits(logits, where)
    return logits


def check_logits(logits: torch.Tensor, where: str) -> None:
    """Raise NumericsError with the first row of `logits [M, V]` that holds NaN or Inf."""
    if logits.device.type == "cpu":  # numpy's test takes a tenth of torch's time
        finite = np.isfinite(logits.numpy()).all(-1)
    else:
        finite = torch.isfinite(logits).all(-1).cpu().numpy()
    if not finite.all():
        raise not_finite(where, int(np.flatnonzero(~finite)[0]))


def not_finite(where: str, row: int) -> NumericsError:
    """The error for a row of logits that holds NaN or Inf."""
    return NumericsError(
        f"the {where} gave logits that are not finite in row {row}", NOT_FINITE, row=row
    )
