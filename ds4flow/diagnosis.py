"""Why a drafter is dead: what its drafts were, when none of them was ever accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OFFSETS = (-2, -1, 0, 1, 2)
SHIFTED_FROM = 0.5
"""Share of drafts at one wrong offset from which the drafter is called shifted."""
TOP = 5


@dataclass
class Diagnosis:
    """First drafts of cycles, to be compared with the text once it is known."""

    drafts: list[tuple[int, int]] = field(default_factory=list)  # position, token
    overlaps: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(
        self,
        position: int,
        token: int,
        drafter: torch.Tensor | None,
        target: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        """Take the first draft of a cycle, meant for `position`.

        `drafter` and `target` are the logits `[V]` of that position, `hidden [N, D]` the streams
        that the target left.
        """
        self.drafts.append((position, token))
        if drafter is not None:
            k = min(TOP, target.shape[-1])
            ours = set(torch.topk(drafter, k).indices.tolist())
            theirs = set(torch.topk(target, k).indices.tolist())
            self.overlaps.append(len(ours & theirs) / k)
        if hidden is not None:
            self.norms.append(float(torch.linalg.vector_norm(hidden.float())))

    def summary(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Shares of the drafts that equal the text at an offset, top-5 overlap, mean norm.

        `tokens` are all committed ones, the prompt included.
        """
        hits: Counter[int] = Counter()
        seen: Counter[int] = Counter()
        for position, token in self.drafts:
            for offset in OFFSETS:
                if 0 <= position + offset < len(tokens):
                    seen[offset] += 1
                    hits[offset] += tokens[position + offset] == token
        return {
            "drafts": len(self.drafts),
            "hits_by_offset": {str(o): hits[o] / seen[o] for o in OFFSETS if seen[o]},
            "top5_overlap": sum(self.overlaps) / len(self.overlaps) if self.overlaps else None,
            "hidden_norm": sum(self.norms) / len(self.norms) if self.norms else None,
        }


def explain(found: dict[str, Any]) -> str:
    """The diagnosis as one line."""
    shares = {int(offset): share for offset, share in found["hits_by_offset"].items()}
    wrong = {offset: share for offset, share in shares.items() if offset}
    offset = max(wrong, key=lambda o: wrong[o], default=0)
    parts = []
    if wrong and wrong[offset] >= SHIFTED_FROM:
        where = "before" if offset < 0 else "after"
        parts.append(
            f"{wrong[offset]:.0%} of the drafts are the token {abs(offset)} {where} the one asked "
            "for: the drafter is shifted"
        )
    if found["top5_overlap"] is not None:
        parts.append(f"top-5 overlap with the target {found['top5_overlap']:.0%}")
    if found["hidden_norm"] is not None:
        parts.append(f"norm of the target's streams {found['hidden_norm']:.3g}")
    return "; ".join(parts) or "no draft could be compared"
