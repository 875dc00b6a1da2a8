"""The state that all kernels share: the context record, room for temporaries, the thread pool.

Promise: room only grows, so an address that a call has been given stays good for that call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ds4flow.errors import UsageError
from ds4flow.kernels.cpu import (
    attention,
    experts,
    hyper,
    layout,
    passes,
    products,
    rows,
    stack,
    threads,
    tiles,
)
from ds4flow.kernels.cpu.iq2_xxs import lookup_tables
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.linking import entry
from ds4flow.kernels.cpu.records import Records, address, put, put_float, record
from ds4flow.kernels.cpu.rounding import row_size
from ds4flow.kernels.cpu.threads import pool
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile

OPERATIONS: tuple[Callable[..., int], ...] = (
    products.linear,
    products.batch,
    products.products_job,
    rows.rms_norm,
    hyper.hc_pre,
    hyper.hc_post,
    hyper.hc_head,
    attention.queries,
    attention.kv_rows,
    attention.compress,
    attention.index_topk,
    attention.index_job,
    attention.attend,
    attention.attend_job,
    attention.attention_output,
    experts.moe,
    stack.stack,
    passes.trunk,
    passes.head,
    passes.draft,
    passes.decide,
    passes.chain,
)
ONE = struct.Struct("q")
NOTHING = (0,) * 8  # the arguments of a kernel after the context
SPARE = 4096  # bytes beyond the computed size of a buffer


class Context:
    """The context record of a model, and the way into compiled code.

    `at` is the record's address. `threads` 0 means as many as torch uses. `rounded`: activations
    that meet block formats are rounded to 8 bits.
    """

    def __init__(
        self, config: ModelConfig, profile: Profile, *, threads: int, rounded: bool
    ) -> None:
        check_dimensions(config)
        self.config = config
        self.profile = profile
        self.threads = threads if threads > 0 else torch.get_num_threads()
        library.build(OPERATIONS)
        self.records = Records(config, library, rounded=rounded)
        self._rounding = rounded
        self._tables = lookup_tables()
        self.tables = address(self._tables)
        self._arena = np.empty(0, dtype=np.uint8)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._rounded = np.empty(0, dtype=np.uint8)
        self._between = np.empty(0, dtype=np.uint8)
        self.between = 0  # address of what `reserve_between` made room for
        self._ids = np.empty(0, dtype=np.int64)
        self._ids_address = 0
        self._pool = pool(self.threads) if self.threads > 1 else None
        self._record = self._make()
        self.at = address(self._record)
        self._call = entry(release=self._pool is not None)

    def _make(self) -> np.ndarray:
        config, made = self.config, record(layout.CONTEXT_SIZE)
        for field, value in (
            (layout.CONTEXT_THREADS, self.threads),
            (layout.CONTEXT_TABLES, self.tables),
            (layout.CONTEXT_BATCH, library.address(products.batch)),
            (layout.CONTEXT_PRODUCTS_JOB, library.address(products.products_job)),
            (layout.CONTEXT_ATTEND_JOB, library.address(attention.attend_job)),
            (layout.CONTEXT_INDEX_JOB, library.address(attention.index_job)),
            (layout.CONTEXT_HC_PRE, library.address(hyper.hc_pre)),
            (layout.CONTEXT_HC_POST, library.address(hyper.hc_post)),
            (layout.CONTEXT_QUERIES, library.address(attention.queries)),
            (layout.CONTEXT_KV_ROWS, library.address(attention.kv_rows)),
            (layout.CONTEXT_COMPRESS, library.address(attention.compress)),
            (layout.CONTEXT_INDEX_TOPK, library.address(attention.index_topk)),
            (layout.CONTEXT_ATTEND, library.address(attention.attend)),
            (layout.CONTEXT_ATTENTION_OUTPUT, library.address(attention.attention_output)),
            (layout.CONTEXT_MOE, library.address(experts.moe)),
            (layout.CONTEXT_STACK, library.address(stack.stack)),
            (layout.CONTEXT_HC_HEAD, library.address(hyper.hc_head)),
            (layout.CONTEXT_DIM, config.dim),
            (layout.CONTEXT_HEADS, config.heads),
            (layout.CONTEXT_HEAD_DIM, config.head_dim),
            (layout.CONTEXT_ROPE_DIM, config.rope_dim),
            (layout.CONTEXT_Q_RANK, config.q_rank),
            (layout.CONTEXT_GROUPS, config.groups),
            (layout.CONTEXT_O_RANK, config.o_rank),
            (layout.CONTEXT_WINDOW, config.window),
            (layout.CONTEXT_INDEX_HEADS, config.index_heads),
            (layout.CONTEXT_INDEX_DIM, config.index_dim),
            (layout.CONTEXT_TOP_K, config.top_k),
            (layout.CONTEXT_EXPERTS, config.experts),
            (layout.CONTEXT_USED, config.experts_used),
            (layout.CONTEXT_SINKHORN, config.sinkhorn),
            (layout.CONTEXT_KV_FP8, self.profile.kv_fp8),
            (layout.CONTEXT_INDEX_FP4, self.profile.index_fp4),
            (layout.CONTEXT_EXPERT_NORM, config.expert_norm),
        ):
            put(made, field, int(value))
        put_float(made, layout.CONTEXT_EPS, config.eps)
        put_float(made, layout.CONTEXT_EPS_HC, config.eps_hc)
        put_float(made, layout.CONTEXT_EXPERT_SCALE, config.expert_scale)
        if self._pool is not None:
            put(made, layout.CONTEXT_CONTROL, self._pool.address)
            put(made, layout.CONTEXT_RUNNER, library.address(threads.runner))
        return made

    def enter(self, *arguments: int) -> int:
        """Call any kernel by its address with its nine arguments."""
        if self._pool is not None:
            self._pool.wake()
        return int(self._call(*arguments))

    def call(self, kernel: int, *arguments: int) -> int:
        """Call a kernel whose first argument is the context; arguments left out are 0."""
        return self.enter(kernel, self.at, *arguments, *NOTHING[len(arguments) :])

    @property
    def arena(self) -> int:
        """Address of the kernels' room for temporaries."""
        return int(self._record[layout.CONTEXT_ARENA // 8])

    def reserve(self, m: int, keys: int = 0, visible: int = 0, columns: int = 0) -> None:
        """Make room for the temporaries of an operation on `m` rows.

        At most `keys` keys a row, `visible` blocks to rank; input rows have as many columns as the
        configuration says, or `columns`.
        """
        c = self.config
        shared = c.expert_dim * c.experts_shared
        pairs = m * c.experts_used
        sizes = (
            96 * m + 256,
            4 * m * (c.head_dim + 4 * max(c.head_dim, c.index_dim)) + 16 * 128,
            4 * m * c.index_heads * (c.index_dim + 1)
            + 8 * 2048
            + attention.INDEX_ROWS * (4 * visible + 64 * 8)
            + 16 * visible,
            m * (16 + 8 * keys),
            4 * m * c.groups * c.o_rank + layout.TASK_SIZE * c.groups,
            pairs * (4 * (2 * c.dim + 2 * c.expert_dim) + 20 + 2 * layout.TASK_SIZE)
            + 12 * c.experts
            + m * (8 * shared + 4 * c.experts + 64),
        )
        self._arena = self._room(self._arena, max(sizes) + SPARE, layout.CONTEXT_ARENA)
        if self._rounding:
            size = m * max(
                (c.experts_used + 1) * row_size(max(c.dim, c.expert_dim, shared)),
                row_size(c.streams * c.dim),
                c.groups * row_size(max(c.heads * c.head_dim // c.groups, c.o_rank)),
                row_size(max(c.heads * c.head_dim, c.groups * c.o_rank, c.q_rank, columns)),
            )
            self._rounded = self._room(self._rounded, size + SPARE, layout.CONTEXT_ROUNDED)
        each = max(
            tiles.scratch_bytes(self.records.most_columns),
            4 * attention.HEADS_TOGETHER * (keys + 17),
            attention.INDEX_ROWS * attention.KEYS_TOGETHER * 4 * c.index_heads,
        )
        each = (each + SPARE) // 64 * 64
        if each > self._record[layout.CONTEXT_SCRATCH_STRIDE // 8]:
            self._scratch = self._room(self._scratch, each * self.threads, layout.CONTEXT_SCRATCH)
            put(self._record, layout.CONTEXT_SCRATCH_STRIDE, each)

    def _room(self, buffer: np.ndarray, size: int, field: int) -> np.ndarray:
        if buffer.size >= size + 64:
            return buffer
        buffer = np.empty(size + size // 2 + 64, dtype=np.uint8)
        put(self._record, field, (address(buffer) + 63) // 64 * 64)
        return buffer

    def reserve_between(self, size: int) -> None:
        """Make room for what passes from one kernel to the next inside a call."""
        if self._between.size < size + 64:
            self._between = np.empty(size + size // 2 + 64, dtype=np.uint8)
            self.between = (address(self._between) + 63) // 64 * 64

    def numbers(self, tokens: Sequence[int]) -> int:
        """Address of the token numbers as int64."""
        m = len(tokens)
        if m > self._ids.size:
            self._ids = np.empty(2 * m, dtype=np.int64)
            self._ids_address = address(self._ids)
            self._ids_view = self._ids.data.cast("B")
        if m == 1:  # numpy takes several times as long
            ONE.pack_into(self._ids_view, 0, tokens[0])
        else:
            self._ids[:m] = tokens
        return self._ids_address


def check_dimensions(config: ModelConfig) -> None:
    """Refuse dimensions that do not fit the kernels' vectors."""
    if config.streams != hyper.STREAMS:
        raise UsageError(
            f"runtime.kernels=cpu: the model has {config.streams} streams, the kernels handle "
            f"{hyper.STREAMS}",
            "use runtime.kernels=reference",
        )
    for name in ("dim", "head_dim", "rope_dim", "q_rank", "index_dim", "expert_dim", "o_rank"):
        value = getattr(config, name)
        if value % 16:
            raise UsageError(
                f"runtime.kernels=cpu: the model's {name} is {value}, not a multiple of 16",
                "use runtime.kernels=reference",
            )
