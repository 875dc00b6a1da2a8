"""The Triton backend behind the kernel interface, on a GPU or in Triton's interpreter.

Promise: nothing here waits for the device. `start` and `tokens` may be device tensors, so that a
captured graph can move on by itself; shapes and launch grids then depend on the number of rows
only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds4flow.device import check_fits, missing
from ds4flow.errors import Ds4FlowError, ModelFileError
from ds4flow.kernels.gpu import attention, products, rows
from ds4flow.kernels.gpu.launch import (
    ATTENTION,
    PRODUCT,
    ROW,
    WIDE_ROW,
    Launcher,
    interpreting,
    launch,
)
from ds4flow.kernels.gpu.pack import Planes, check, pack
from ds4flow.kernels.gpu.static import Chosen, Top2
from ds4flow.kernels.gpu.tables import AngleTables, DeviceVectors, codebook
from ds4flow.kernels.gpu.tiles import ROWS
from ds4flow.kernels.interface import CompressedRows, LayerRows
from ds4flow.kernels.reference import ROUTER_FLOOR
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import Rope
from ds4flow.model.weights import (
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
)
from ds4flow.quants import QTensor

COLUMNS = 32  # weight rows of a product tile
LAUNCHES = 512  # tiles that a product should have; long rows are split to get there
LEAST_SPLIT = 512  # weights of a row below which it is not split further
KEYS = 32  # keys of an attention tile
HEADS = 16
LOGITS = 1024  # logits of a tile of the argmax
SCORES = 1024  # scores that the selection reads at once


class GpuKernels:
    """Implements `ds4flow.kernels.interface.Kernels` with Triton.

    Weights are copied to the device once, as stored. Raises Ds4FlowError where there is neither a
    GPU nor Triton's interpreter. `launcher` and `device` are for tests and tools.
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        *,
        device: torch.device | None = None,
        launcher: Launcher = launch,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.profile = profile
        if device is None:
            device = _device()
        self.device = device
        self.columns = COLUMNS
        self._launch = launcher
        self._progress = progress
        # the interpreter's bfloat16 dot is wrong, and AMD's compiler knows no threefold tf32
        if interpreting():
            self._dot, self._scores = "ieee", "ieee"
        elif torch.version.hip is not None:
            self._dot, self._scores = "split-rocm", "ieee"
        else:
            self._dot, self._scores = "split", "tf32x3"
        self._weights: dict[int, tuple[QTensor, Planes]] = {}
        self._vectors = DeviceVectors(device)
        self._angles = AngleTables(device)
        self._codebook = codebook(device)

    # --- weights ---------------------------------------------------------------------------------

    def prepare(self, weights: Sequence[QTensor]) -> None:
        """Check every type, then copy all weights to the device; Ds4FlowError when they do not
        fit."""
        for weight in weights:
            check(weight)
        total = sum(weight.nbytes for weight in weights)
        if self.device.type == "cuda":
            check_fits(total, torch.cuda.mem_get_info(self.device)[0], "the weights")
        done = 0
        for weight in weights:
            self._planes(weight)
            done += weight.nbytes
            if self._progress is not None:
                self._progress(done, total)

    def adopt(self, weight: QTensor) -> QTensor:
        """Take over a weight that is made on the device; what is returned stands for it, without
        data.

        For weights that exist nowhere else, so that the device never holds them twice.
        """
        light = replace(weight, data=weight.data.to("meta"))
        self._weights[id(light)] = (light, pack(weight, self.device))
        return light

    def reserve(self, rope: Rope, context: int) -> None:
        """Make the rotary table of all positions below `context`; needed before device
        positions."""
        self._angles.grow(rope, context)

    def _planes(self, weight: QTensor) -> Planes:
        kept = self._weights.get(id(weight))
        if kept is None:
            kept = self._weights[id(weight)] = (weight, pack(weight, self.device))
        return kept[1]

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _position(self, start: int | torch.Tensor) -> torch.Tensor:
        """`start` as an int64 tensor on the device."""
        if isinstance(start, torch.Tensor):
            return start
        return torch.full((1,), start, dtype=torch.int64, device=self.device)

    def _ids(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            return tokens
        return torch.tensor(list(tokens), dtype=torch.int64).to(self.device)

    def _turns(
        self, rope: Rope, start: int | torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables that cover the pass."""
        if not isinstance(start, torch.Tensor):
            self._angles.grow(rope, start + count)
        return self._angles.table(rope)

    # --- matrix products -------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """`x [M, in]` times the transposed weight `(out, in)`: `[M, out]`."""
        return self._product(x, weight, 1)

    def _product(self, x: torch.Tensor, weight: QTensor, groups: int) -> torch.Tensor:
        """`x [M, groups * in]`, group by group, times `weight (groups * out, in)`."""
        planes = self._planes(weight)
        count, width = x.shape[0], planes.rows
        out = width // groups
        tiles = _tiles(out, self.columns)
        splits = 1
        while (
            tiles * groups * splits * 2 <= LAUNCHES
            and planes.width >= LEAST_SPLIT * splits * 2
            and planes.units >= splits * 2
        ):
            splits *= 2
        x = x.contiguous()
        parts = self._empty(splits, count, width)
        self._launch(
            products.linear,
            (tiles, splits * groups, _tiles(count, ROWS)),
            (
                x,
                planes.codes,
                planes.scales,
                planes.factors,
                self._codebook,
                parts,
                count,
                x.shape[1],
            ),
            dict(N=out, K=planes.width, UNITS=planes.units, GROUPS=groups, SPLITS=splits)
            | dict(TYPE=planes.type, DOT=self._dot, BN=self.columns, ROWS=ROWS),
            PRODUCT,
        )
        if splits == 1:
            return parts[0]
        y = self._empty(count, width)
        self._launch(
            products.add_splits,
            (_tiles(count * width, 256),),
            (parts, y, count * width),
            dict(SPLITS=splits, BLOCK=256),
            PRODUCT,
        )
        return y

    def embed(self, weight: QTensor, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Embedding rows `[M, D]`, float32; ModelFileError for a table of another block type."""
        if weight.type not in ("F32", "F16", "BF16", "Q8_0"):
            raise ModelFileError(
                f"{weight.name} is stored as {weight.type}; the gpu kernels look up F32, F16, BF16 "
                "and Q8_0 embeddings",
                "use runtime.kernels=reference",
            )
        planes, ids = self._planes(weight), self._ids(tokens)
        y = self._empty(ids.shape[0], planes.width)
        self._launch(
            products.embed,
            (ids.shape[0], _tiles(planes.width, 1024)),
            (ids, planes.codes, planes.scales, y),
            dict(D=planes.width, TYPE=planes.type, BLOCK=1024),
            ROW,
        )
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm over the last axis."""
        x = x.contiguous()
        width = x.shape[-1]
        y = torch.empty_like(x)
        self._launch(
            rows.rms_norm,
            (x.numel() // width,),
            (x, x if weight is None else self._vectors.get(weight), y, self.config.eps),
            dict(WIDTH=width, WEIGHTED=weight is not None, BLOCK=_block(width)),
            ROW,
        )
        return y

    # --- hyper-connections -----------------------------------------------------------------------

    def _hc_in(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor, head: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, n, width = streams.shape
        streams = streams.contiguous()
        mix = self.linear(streams.flatten(1), hyper.fn)
        x, post, comb = (
            self._empty(count, width), self._empty(count, n), self._empty(count, n, n)
        )  # fmt: skip
        vectors = [self._vectors.get(v) for v in (hyper.base, hyper.scale, norm)]
        self._launch(
            rows.hc_in,
            (count,),
            (streams, mix, *vectors, x, post, comb, self.config.eps, self.config.eps_hc),
            dict(S=n, D=width, ITERATIONS=self.config.sinkhorn, HEAD=head, BLOCK=_block(width)),
            WIDE_ROW,
        )
        return x, post, comb

    def hc_pre(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised input `[M, D]` of a block, `post [M, N]` and `comb [M, N, N]`."""
        return self._hc_in(streams, hyper, norm, head=False)

    def hc_head(
        self, streams: torch.Tensor, hyper: HyperWeights, norm: torch.Tensor
    ) -> torch.Tensor:
        """Collapse the streams for an output head: normalised `[M, D]`."""
        return self._hc_in(streams, hyper, norm, head=True)[0]

    def hc_post(
        self, block: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams `[M, N, D]`."""
        count, n, width = streams.shape
        y = torch.empty_like(streams)
        self._launch(
            rows.hc_out,
            (count, _tiles(width, 512)),
            (block, streams, post, comb, y),
            dict(S=n, D=width, BLOCK=512),
            ROW,
        )
        return y

    # --- attention -------------------------------------------------------------------------------

    def kv_rows(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        rope: Rope,
        window: torch.Tensor,
        start: int | torch.Tensor,
    ) -> None:
        """Write the KV rows of `x [M, D]` to the window ring."""
        width = self.config.head_dim
        self._launch(
            rows.kv_rows,
            (x.shape[0],),
            (
                self.linear(x, layer.kv),
                self._vectors.get(layer.kv_norm),
                *self._turns(rope, start, x.shape[0]),
                self._position(start),
                window,
                window.shape[0],
                self.config.eps,
            ),
            self._row_shape(width),
            ROW,
        )

    def _row_shape(self, width: int) -> dict[str, Any]:
        return dict(
            WIDTH=width,
            ROPE=self.config.rope_dim,
            BLOCKS=_power(_tiles(width, 64)),
            ROUND=self.profile.kv_fp8,
            NORM=_block(width),
        )

    def queries(
        self, x: torch.Tensor, layer: LayerWeights, rope: Rope, start: int | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries `[M, H, d]` and the low-rank query `[M, Q]`."""
        heads, width = self.config.heads, self.config.head_dim
        low_rank = self.rms_norm(self.linear(x, layer.q_a), layer.q_a_norm)
        q = self.linear(low_rank, layer.q_b)
        self._launch(
            rows.queries,
            (x.shape[0], heads),
            (q, *self._turns(rope, start, x.shape[0]), self._position(start), self.config.eps),
            dict(HEADS=heads, WIDTH=width, ROPE=self.config.rope_dim, BLOCK=_power(width)),
            ROW,
        )
        return q.unflatten(-1, (heads, width)), low_rank

    def compress(
        self,
        x: torch.Tensor,
        weights: CompressorWeights,
        rows_: CompressedRows,
        rope: Rope,
        start: int | torch.Tensor,
        *,
        index: bool,
    ) -> None:
        """Write the projections of each position and every row whose block is finished by them."""
        count, ratio, width = x.shape[0], rows_.ratio, rows_.pool.shape[-1]
        line, slots = rows_.values.shape[-1], rows_.values.shape[0]
        position = self._position(start)
        self._launch(
            attention.compress_write,
            (count, _tiles(line, 256)),
            (
                self.linear(x, weights.kv),
                self.linear(x, weights.gate),
                self._vectors.get(weights.ape),
                rows_.values,
                rows_.scores,
                position,
                slots,
            ),
            dict(RATIO=ratio, WIDTH=line, BLOCK=256),
            ROW,
        )
        blocks = count // ratio + 1  # as many as can end in this many positions
        pooled = self._empty(blocks, width)
        self._launch(
            attention.pool_blocks,
            (blocks, _tiles(width, 64)),
            (rows_.values, rows_.scores, pooled, position, count, slots),
            dict(RATIO=ratio, WIDTH=width, OVERLAP=rows_.overlapping, BLOCK=64),
            ROW,
        )
        finish = rows.index_rows if index else rows.pooled_rows
        shape = self._index_shape() if index else self._row_shape(width)
        self._launch(
            finish,
            (blocks,),
            (
                pooled,
                self._vectors.get(weights.norm),
                *self._turns(rope, start, count),
                position,
                rows_.pool,
                count,
                self.config.eps,
            ),
            {"RATIO": ratio} | shape,
            ROW,
        )

    def _index_shape(self) -> dict[str, Any]:
        width = self.config.index_dim
        return dict(
            WIDTH=width,
            ROPE=self.config.rope_dim,
            STAGES=width.bit_length() - 1,
            FACTOR=width**-0.5,
            ROUND=self.profile.index_fp4,
        )

    def index_topk(
        self,
        x: torch.Tensor,
        low_rank: torch.Tensor,
        weights: IndexerWeights,
        rows_: CompressedRows,
        rope: Rope,
        start: int | torch.Tensor,
    ) -> Any:
        """Blocks to attend, as `Chosen`: all visible ones, or the `top_k` best, lower blocks on
        ties."""
        config, count = self.config, x.shape[0]
        heads, width, capacity = config.index_heads, config.index_dim, rows_.pool.shape[0]
        position = self._position(start)
        chosen = self._empty(count, config.top_k, dtype=torch.int32)
        counts = self._empty(count, dtype=torch.int32)
        scores = chosen  # never read while the cache holds no more blocks than are selected
        if capacity > config.top_k:
            q = self.linear(low_rank, weights.q_b)
            self._launch(
                rows.index_queries,
                (count, heads),
                (q, *self._turns(rope, start, count), position),
                {"HEADS": heads} | self._index_shape(),
                ROW,
            )
            scores = self._empty(count, capacity)
            self._launch(
                attention.index_scores,
                (count, _tiles(capacity, 64)),
                (
                    q,
                    self.linear(x, weights.proj),
                    rows_.pool,
                    scores,
                    position,
                    capacity,
                    (config.index_dim * config.index_heads) ** (-0.5),
                ),
                dict(RATIO=rows_.ratio, HEADS=heads, WIDTH=width, HP=max(16, _power(heads)))
                | dict(BT=64, DC=32, TOP=config.top_k, DOT=self._scores),
                ATTENTION,
            )
        self._launch(
            attention.select_blocks,
            (count,),
            (scores, chosen, counts, position, capacity),
            dict(RATIO=rows_.ratio, TOP=config.top_k, BLOCK=SCORES),
            ROW,
        )
        return Chosen(chosen, counts)

    def attend(
        self,
        q: torch.Tensor,
        layer: LayerWeights,
        rows_: LayerRows,
        rope: Rope,
        start: int | torch.Tensor,
        selected: Any,
    ) -> torch.Tensor:
        """Sink attention over window and compressed rows, de-rotated: `[M, H, d]`."""
        config = self.config
        count, heads, width = q.shape
        window, position = rows_.window, self._position(start)
        near = _tiles(config.window, KEYS)
        ratio, pool, far = 0, window, 0
        if rows_.compressed is not None:
            ratio, pool = rows_.compressed.ratio, rows_.compressed.pool
            far = pool.shape[0]
        blocks = counts = position
        if selected is not None:
            blocks, counts = selected
            far = min(far, config.top_k)
        splits = near + _tiles(far, KEYS)
        parts = self._empty(count, heads, splits, width)
        tops, totals = self._empty(count, heads, splits), self._empty(count, heads, splits)
        shape = dict(HEADS=heads, WIDTH=width, WINDOW_SPLITS=near, RATIO=ratio, BT=KEYS)
        shape |= dict(LISTED=selected is not None)
        self._launch(
            attention.attend_parts,
            (count, _tiles(heads, HEADS), splits),
            (
                q.contiguous(),
                window,
                pool,
                blocks,
                counts,
                parts,
                tops,
                totals,
                position,
                window.shape[0],
                config.top_k,
                splits,
                config.head_dim ** (-0.5),
            ),
            shape | dict(WINDOW=config.window, BH=HEADS, DC=64, DOT=self._scores),
            ATTENTION,
        )
        y = self._empty(count, heads, width)
        self._launch(
            attention.attend_join,
            (count, heads),
            (
                parts,
                tops,
                totals,
                self._vectors.get(layer.sinks),
                counts,
                *self._turns(rope, start, count),
                y,
                position,
                splits,
            ),
            shape | dict(ROPE=config.rope_dim, BLOCK=_power(width)),
            ROW,
        )
        return y

    def attention_output(self, heads: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Grouped low-rank output projection of `[M, H, d]`: `[M, D]`."""
        return self.linear(
            self._product(heads.flatten(1), layer.out_a, self.config.groups), layer.out_b
        )

    # --- mixture of experts ----------------------------------------------------------------------

    def route(
        self, x: torch.Tensor, tokens: Sequence[int] | torch.Tensor, layer: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected experts `[M, used]` (int32) and their weights `[M, used]`."""
        config, moe, count = self.config, layer.moe, x.shape[0]
        ids = self._empty(count, config.experts_used, dtype=torch.int32)
        weights = self._empty(count, config.experts_used)
        logits = self.linear(x, moe.router)
        self._launch(
            rows.route,
            (count,),
            (
                logits,
                logits if moe.bias is None else self._vectors.get(moe.bias),
                ids if moe.table is None else self._vectors.get(moe.table),
                self._ids(tokens),
                ids,
                weights,
                config.expert_scale,
                ROUTER_FLOOR,
            ),
            dict(E=config.experts, USED=config.experts_used, SLOTS=_power(config.experts_used))
            | dict(BLOCK=_power(config.experts), BIASED=moe.bias is not None)
            | dict(HASHED=moe.table is not None, NORMED=config.expert_norm),
            ROW,
        )
        return ids, weights

    def moe(
        self, x: torch.Tensor, tokens: Sequence[int] | torch.Tensor, layer: LayerWeights
    ) -> torch.Tensor:
        """Routed experts plus the shared expert: `[M, D]`."""
        config, moe, count = self.config, layer.moe, x.shape[0]
        x = x.contiguous()
        used, width = config.experts_used, x.shape[-1]
        ids, weights = self.route(x, tokens, layer)
        gate, up, down = self._planes(moe.gate), self._planes(moe.up), self._planes(moe.down)
        if gate.units != up.units:
            raise ModelFileError(
                f"{gate.name} is {gate.type} and {up.name} is {up.type}; the gpu kernels read them "
                "in equal steps",
                "use runtime.kernels=reference",
            )
        pairs = min(count, ROWS) * used
        shape = dict(USED=used, PAIRS=_power(ROWS * used), DOT=self._dot, BN=self.columns)
        shape |= dict(ROWS=ROWS)
        inner = moe.gate.shape[1]
        h = self._empty(count, used, inner)
        self._launch(
            products.experts_in,
            (_tiles(inner, self.columns), pairs, _tiles(count, ROWS)),
            (
                x,
                ids,
                gate.codes,
                gate.scales,
                gate.factors,
                up.codes,
                up.scales,
                up.factors,
                self._codebook,
                h,
                count,
                float(layer.clamp),
            ),
            shape | dict(N=inner, K=width, UNITS=gate.units, GATE=gate.type, UP=up.type),
            PRODUCT,
        )
        parts = self._empty(count, used, width)
        self._launch(
            products.experts_out,
            (_tiles(width, self.columns), pairs, _tiles(count, ROWS)),
            (h, ids, down.codes, down.scales, down.factors, self._codebook, parts, count),
            shape | dict(N=width, K=inner, UNITS=down.units, TYPE=down.type),
            PRODUCT,
        )
        y = self._empty(count, width)
        self._launch(
            products.add_experts,
            (count, _tiles(width, 512)),
            (self._shared(x, layer), parts, weights, y),
            dict(D=width, USED=used, BLOCK=512),
            ROW,
        )
        return y

    def _shared(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        g, u = self.linear(x, layer.moe.shared_gate), self.linear(x, layer.moe.shared_up)
        h = torch.empty_like(g)
        self._launch(
            products.swiglu,
            (_tiles(g.numel(), 256),),
            (g, u, h, g.numel(), float(layer.clamp_shared)),
            dict(BLOCK=256),
            ROW,
        )
        return self.linear(h, layer.moe.shared_down)

    # --- head ------------------------------------------------------------------------------------

    def top2(self, logits: torch.Tensor) -> Top2:
        """Argmax, its logit, its lead over the next one and the entries that are not finite, by
        row."""
        count, vocab = logits.shape
        tiles = _tiles(vocab, LOGITS)
        first, second = self._empty(count, tiles), self._empty(count, tiles)
        index, bad = (self._empty(count, tiles, dtype=torch.int32) for _ in range(2))
        self._launch(
            rows.top2_parts,
            (count, tiles),
            (logits.contiguous(), first, index, second, bad, vocab, tiles),
            dict(BLOCK=LOGITS),
            ROW,
        )
        token = self._empty(count, dtype=torch.int64)
        top, gap = self._empty(count), self._empty(count)
        flag = self._empty(count, dtype=torch.int32)
        self._launch(
            rows.top2_join,
            (count,),
            (first, index, second, bad, token, top, gap, flag, vocab, tiles),
            dict(BLOCK=_power(tiles)),
            ROW,
        )
        return Top2(token, top, gap, flag)


def _device() -> torch.device:
    """The device of this process; Ds4FlowError when it has neither a GPU nor the interpreter."""
    if interpreting():
        return torch.device("cpu")
    lacks = missing("cuda" if torch.version.hip is None else "rocm")
    if lacks:
        raise Ds4FlowError(
            f"runtime.kernels=gpu cannot be used: {lacks}",
            "use runtime.kernels=cpu or runtime.kernels=reference",
        )
    return torch.device("cuda")


def report_progress(done: int, total: int) -> None:
    """Show on stderr how much of the weights lies on the device; off a terminal only the end."""
    if done == total or sys.stderr.isatty():
        sizes = f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB"
        print(f"\rweights to the device: {sizes}", end="\n" if done == total else "",
              file=sys.stderr, flush=True)  # fmt: skip


def _tiles(count: int, tile: int) -> int:
    return -(-count // tile)


def _power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()


def _block(width: int) -> int:
    """Channels that a row kernel reads at once."""
    return min(_power(width), 2048)
