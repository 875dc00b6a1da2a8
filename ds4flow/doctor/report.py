"""What the doctor found, as plain typed records that turn into JSON.

Promise: every number is in the unit that its docstring names; None means that it cannot be known
from the files given, never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Role = Literal["main", "mtp", "dspark", "other", "unreadable"]
Layout = Literal["mtp.0", "nextn"]


@dataclass(frozen=True)
class Problem:
    """A reason why a file does not run, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class TypeCount:
    """How many tensors have a ggml type, and their bytes."""

    type: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Split:
    """A split model by its file names: number of shards and the names that are not there."""

    total: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Number of tokens, and SHA-256 over tokens, types and merges (None: it cannot be built)."""

    tokens: int
    digest: str | None


@dataclass(frozen=True)
class Drafter:
    """What a file says and holds about drafting.

    `claimed` is the number of MTP layers in the metadata, `layout` that of the MTP tensors that are
    there, `dspark` a tensor or architecture that betrays the later drafter, `degraded` why drafts
    will be accepted less often than they could be.
    """

    claimed: int
    layout: Layout | None
    dspark: str | None
    degraded: str | None


@dataclass(frozen=True)
class Fit:
    """Whether an MTP file belongs to a main file; `same_tokenizer` is None where it carries none.

    `draft_bytes` are the weight bytes of one draft step, the output matrix and one embedding row
    included; `weight_bytes` the block's own tensors.
    """

    main: str
    ok: bool
    problems: tuple[Problem, ...]
    same_tokenizer: bool | None
    draft_bytes: int | None
    weight_bytes: int | None


@dataclass(frozen=True)
class CacheSize:
    """Bytes of the cache of one sequence of `context` tokens, with prefill passes of `chunk` rows.

    `bytes` is this program's (float32 rows, MTP window included). `published_bytes` is the usual
    account of the architecture: half-precision rows, float32 compressor state, MTP window included.
    The `per_token` fields are the growth of each.
    """

    context: int
    chunk: int
    bytes: int
    per_token: float
    published_bytes: int
    published_per_token: float


@dataclass(frozen=True)
class Memory:
    """Bytes needed in memory: tensors that are used, the MTP block's own, the cache, the sum."""

    weights: int
    mtp: int
    cache: int
    total: int


@dataclass(frozen=True)
class Group:
    """Weight bytes of one group of tensors that one token at batch 1 reads.

    `types` are the ggml types; of routed experts only the active share counts, of tables one row.
    """

    name: str
    types: tuple[str, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Width:
    """One pass over `rows` positions: one is plain decoding, K+1 verifies K drafts.

    `experts` is the expected number of distinct routed experts per layer when the rows route
    independently, `bytes` the weights and cache rows of the pass, `cycle_bytes` the same with the K
    draft steps before it. `break_even` is `cycle_bytes` over the bytes of plain decoding: as many
    tokens must a cycle yield to pay. `tokens_per_second` is bandwidth-bound, all drafts accepted.
    """

    rows: int
    experts: float
    bytes: int
    cycle_bytes: int
    break_even: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Traffic:
    """Bytes that decoding must read, at the last position of the context.

    `fixed` are weights read once per pass, `routed` the active experts of one token, `weights`
    their sum, `cache` the cache rows that one token reads. Indexer queries are read from position
    `index_queries_from` on (None: there is no indexer) and count only from there.
    `draft` is one draft step (None: no MTP block was given, so cycles count none).
    """

    position: int
    groups: tuple[Group, ...]
    fixed: int
    routed: int
    weights: int
    cache: int
    index_queries_from: int | None
    draft: int | None
    bandwidth_gbs: float | None
    widths: tuple[Width, ...]


@dataclass(frozen=True)
class FileReport:
    """One model file (all shards of a split one); sizes in bytes.

    `ok` is the verdict, `problems` all reasons against it, `notes` what is worth knowing. Fields
    that cannot be known for this role or because of a problem are None or empty.
    """

    path: str
    role: Role
    ok: bool
    verdict: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    size: int | None = None
    split: Split | None = None
    truncated: bool = False
    architecture: str | None = None
    name: str | None = None
    census: tuple[TypeCount, ...] = ()
    dimensions: Mapping[str, object] | None = None
    vocabulary: Vocabulary | None = None
    drafter: Drafter | None = None
    fits: tuple[Fit, ...] = ()
    cache: CacheSize | None = None
    memory: Memory | None = None
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Report:
    """All files together; `ok` when every one of them can be used."""

    files: tuple[FileReport, ...]
    ok: bool

    def to_json(self) -> str:
        """The whole report as JSON text; keys are the field names."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)
