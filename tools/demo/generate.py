"""Greedy continuation with full re-evaluation, for samples and draft agreement.

Promise: no caches, so there is nothing to get out of step; slow on purpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from demo import model
from demo.model import DemoConfig, Mode, Params


def _padded(cfg: DemoConfig, ids: Tensor) -> Tensor:
    """Pad (B, T) to whole windows; later positions cannot change earlier ones."""
    return F.pad(ids, (0, -ids.shape[1] % cfg.window))


@torch.no_grad()
def greedy_batch(cfg: DemoConfig, params: Params, ids: Tensor, count: int) -> Tensor:
    """Append ``count`` argmax tokens to every row of ids (B, T); ties to the lowest id."""
    for _ in range(count):
        batch, length = ids.shape
        tokens = _padded(cfg, ids)
        _, head = model.trunk_forward(cfg, params, tokens, Mode())
        rows = head.view(batch, tokens.shape[1], -1)[:, length - 1]
        ids = torch.cat((ids, F.linear(rows, params["output.weight"]).argmax(-1)[:, None]), 1)
    return ids


def greedy(cfg: DemoConfig, params: Params, prompt: list[int], count: int) -> list[int]:
    """Prompt plus up to ``count`` greedy tokens, cut at the end-of-sentence token (id 1)."""
    out: list[int] = greedy_batch(cfg, params, torch.tensor([prompt]), count)[0].tolist()
    tail = out[len(prompt) :]
    return prompt + (tail[: tail.index(1)] if 1 in tail else tail)


@torch.no_grad()
def greedy_agreement(
    cfg: DemoConfig, params: Params, prompts: Tensor, count: int, depths: int = 3
) -> dict[str, float]:
    """Draft agreement inside greedy continuations of prompts (B, T): chained drafts, own tokens.

    ``greedy_k`` is the share of positions where draft k of a chain is right given that drafts
    1..k-1 were; ``greedy_chain_k`` the share where all of 1..k are.
    """
    ids = greedy_batch(cfg, params, prompts, count + depths)
    batch, total = ids.shape
    tokens = _padded(cfg, ids)
    streams, _ = model.trunk_forward(cfg, params, tokens, Mode())
    state, older = model.previous(streams, batch), list[Tensor]()
    begin = prompts.shape[1]
    alive = torch.ones(batch, count, dtype=torch.bool)
    found: dict[str, float] = {}
    # Along a greedy continuation the true tokens are the accepted drafts, so the teacher-forced
    # chain is the real one for as long as every earlier draft was right.
    for depth in range(depths):
        state, out, rows = model.mtp_forward(
            cfg, params, state, tokens, Mode(), None, older or None
        )
        drafts = F.linear(out, params["output.weight"]).argmax(-1).view(batch, -1)
        first = begin + depth
        right = drafts[:, first : first + count] == ids[:, first + 1 : first + 1 + count]
        right = right[:, : total - first - 1]
        alive = alive[:, : right.shape[1]]
        found[f"greedy_{depth + 1}"] = float((right & alive).sum() / alive.sum().clamp_min(1))
        alive = alive & right
        found[f"greedy_chain_{depth + 1}"] = float(alive.float().mean())
        older.append(rows)
        state = model.previous(state, batch)
    return found
