"""Whether two runs are the same down to the bits of the logits that they kept."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ds4flow.runs.record import Run


class Bits(NamedTuple):
    """How many output positions have logits in both runs, and the first that is not equal."""

    compared: int
    different: int | None


def compare_bits(first: Run, second: Run) -> Bits:
    """Compare the target's logits behind each output token, of runs with mtp.full_logits.

    Positions count from the first output token, whose logits belong to the prompt and are not kept.
    Nothing is compared behind the first token that differs: those rows answer another text.
    """
    same = 0
    for a, b in zip(first.tokens, second.tokens, strict=False):
        if a != b:
            break
        same += 1
    mine, others = _rows(first), _rows(second)
    both = sorted(index for index in mine.keys() & others.keys() if index <= same)
    different = next((index for index in both if mine[index] != others[index]), None)
    return Bits(len(both), different)


def _rows(run: Run) -> dict[int, bytes]:
    """Digest of the logits that decided each output token, as far as they were kept."""
    import numpy as np

    found: dict[int, bytes] = {}
    index = 0
    for cycle in run.cycles():
        file = run.path / "logits" / f"{cycle['cycle']:06d}.npz"
        if file.is_file():
            with np.load(file) as arrays:
                rows = arrays["verify"]
            for row, logits in enumerate(rows[: len(cycle["tokens"])]):
                found[index + row + 1] = hashlib.sha256(logits.tobytes()).digest()
        index += len(cycle["tokens"])
    return found
