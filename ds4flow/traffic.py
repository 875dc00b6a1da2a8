"""Which weight bytes one pass reads, by group: the yardstick for the cost of a pass of M rows.

Promise: counted from the stored tensors, not from a formula of their sizes; only the number of
distinct experts is an expectation (independent uniform routing).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ds4flow.model.config import ModelConfig

OUTPUT = "output"
INDEXER_QUERY = "indexer query"
ROUTED_IN, ROUTED_DOWN = "routed gate and up", "routed down"
SMALL = "vectors and rows"

# The first match decides; what matches nothing is small.
_GROUPS = (
    (r"attn_q_b\.", "attn_q_b"),
    (r"attn_output_a\.", "attn_output_a"),
    (r"attn_output_b\.", "attn_output_b"),
    (r"ffn_(gate|up|down)_shexp\.", "shared expert"),
    (r"output\.weight", OUTPUT),
    (r"attn_compressor_", "attention compressors"),
    (r"indexer\.", INDEXER_QUERY),
    (r"attn_q_a\.", "attn_q_a"),
    (r"attn_kv\.", "attn_kv"),
    (r"ffn_gate_inp\.", "router"),
    (r"indexer_compressor_", "indexer compressors"),
    (r"hc_(attn|ffn)_", "hyper-connections"),
    (r"[eh]_proj\.|nextn\.eh_proj\.", "mtp projections"),
    (r"ffn_(gate|up)_exps\.", ROUTED_IN),
    (r"ffn_down_exps\.", ROUTED_DOWN),
)
GROUPS = (*(group for _, group in _GROUPS), SMALL)
_PREFIX = re.compile(r"(blk\.\d+|mtp\.0)\.")
# One row a token is read: of embeddings, of routing tables, of position biases (by phase).
_BY_ROW = re.compile(r"token_embd\.|ffn_gate_tid2eid\.|.*_ape\.|nextn\.embed_tokens\.")


class Traffic(NamedTuple):
    """Weight bytes of one pass by group."""

    groups: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all groups."""
        return sum(self.groups.values())

    def shares(self) -> dict[str, float]:
        """Each group's part of the total, in 0..1."""
        return {group: nbytes / self.total for group, nbytes in self.groups.items()}


def distinct_experts(experts: int, used: int, rows: int) -> float:
    """Expected number of distinct experts of one layer that `rows` rows choose.

    `E * (1 - (1 - used/E) ** rows)`: independent rows, every expert equally likely. Neighbouring
    tokens of real text share more, so this is an upper estimate.
    """
    return experts * (1.0 - (1.0 - used / experts) ** rows)


class Stored(Protocol):
    """A weight as stored: a tensor of a file's header, or a loaded one."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in torch order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""


def weight_traffic(
    tensors: Iterable[Stored], config: ModelConfig, *, rows: int = 1, indexer: bool = True
) -> Traffic:
    """Weight bytes that a pass of `rows` rows reads of the given tensors.

    `indexer`: whether a selection takes place, i.e. more compressed rows are visible than top-k;
    without one the indexer's query weights are not needed.
    """
    groups = dict.fromkeys(GROUPS, 0.0)
    for info in tensors:
        name = _PREFIX.sub("", info.name, count=1)
        group = next((g for pattern, g in _GROUPS if re.match(pattern, name)), SMALL)
        if group == INDEXER_QUERY and not indexer:
            continue
        nbytes = float(info.nbytes)
        if group in (ROUTED_IN, ROUTED_DOWN):
            experts = info.shape[0]
            used = min(config.experts_used, experts)
            nbytes *= distinct_experts(experts, used, rows) / experts
        elif _BY_ROW.match(name):
            nbytes *= min(rows, info.shape[0]) / info.shape[0]
        groups[group] += nbytes
    return Traffic({group: nbytes for group, nbytes in groups.items() if nbytes})


def selects(config: ModelConfig, position: int) -> bool:
    """Whether the indexer has more compressed rows than it keeps at `position`."""
    return 4 in config.ratios and (position + 1) // 4 > config.top_k


def kv_traffic(config: ModelConfig, position: int, *, item_bytes: int = 4) -> float:
    """Cache bytes that one row at `position` reads: window, compressed and indexer rows.

    `item_bytes`: of one stored channel; the cache of this program holds float32.
    """
    rows = config.layers * min(position + 1, config.window)
    indexed = 0
    for ratio in config.ratios[: config.layers]:
        visible = (position + 1) // ratio if ratio else 0
        if ratio == 4 and visible > config.top_k:
            indexed += visible
            visible = config.top_k
        rows += visible
    return float(item_bytes * (rows * config.head_dim + indexed * config.index_dim))
