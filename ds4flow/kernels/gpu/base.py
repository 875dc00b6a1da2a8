"""Weights on a device, and the products, norms and look-ups that the other operations are built on.

Promise: a product's tiles and splits follow from its weight alone, so a row's bits never depend on
M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ds4flow.device import missing
from ds4flow.errors import Ds4FlowError, ModelFileError
from ds4flow.kernels.gpu import products, rows
from ds4flow.kernels.gpu.launch import (
    PRODUCT,
    ROW,
    Launcher,
    interpreting,
    launch,
)
from ds4flow.kernels.gpu.pack import Planes, check, pack
from ds4flow.kernels.gpu.tables import AngleTables, DeviceVectors, codebook
from ds4flow.kernels.gpu.tiles import ROWS
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import Profile
from ds4flow.model.rope import Rope
from ds4flow.quants import QTensor

COLUMNS = 32  # weight rows of a product tile
LAUNCHES = 512  # tiles that a product should have; long rows are split to get there
LEAST_SPLIT = 512  # weights of a row below which it is not split further
KEYS = 32  # keys of an attention tile
HEADS = 16
LOGITS = 1024  # logits of a tile of the argmax
SCORES = 1024  # scores that the selection reads at once


class KernelBase:
    """What all operations share. `columns` is the number of weight rows of a product tile.

    Raises Ds4FlowError where there is neither a GPU nor Triton's interpreter. `launcher` and
    `device` are for tests and tools.
    """

    layers = passes = None  # the operations of a layer are captured one by one

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
        self.shares = 1  # processes that share the heads
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
        """Check every type, then copy all weights to the device, each once it is its turn."""
        for weight in weights:
            check(weight)
        total = sum(weight.nbytes for weight in weights)
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

    def _splits(self, planes: Planes, rows: int, groups: int) -> int:
        """Parts into which the sums over rows as those of `planes` are split, when there are `rows`
        of them in `groups`."""
        tiles = ceil_div(rows // groups, self.columns) * groups
        splits = 1
        while (
            tiles * splits * 2 <= LAUNCHES
            and planes.width >= LEAST_SPLIT * splits * 2
            and planes.units >= splits * 2
        ):
            splits *= 2
        return splits

    def _product(
        self, x: torch.Tensor, weight: QTensor, groups: int, whole_groups: int | None = None
    ) -> torch.Tensor:
        """`x [M, groups * in]`, group by group, times `weight (groups * out, in)`.

        With `whole_groups` the weight is one of `shares` equal parts of a whole with that many
        groups, and its sums are split as the whole's would be, so that they have its bits.
        """
        planes = self._planes(weight)
        count, width = x.shape[0], planes.rows
        out = width // groups
        tiles = ceil_div(out, self.columns)
        if whole_groups is None:
            splits = self._splits(planes, width, groups)
        else:
            splits = self._splits(planes, width * self.shares, whole_groups)
        x = x.contiguous()
        parts = self._empty(splits, count, width)
        self._launch(
            products.linear,
            (tiles, splits * groups, ceil_div(count, ROWS)),
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
            (ceil_div(count * width, 256),),
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
            (ids.shape[0], ceil_div(planes.width, 1024)),
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
            dict(WIDTH=width, WEIGHTED=weight is not None, BLOCK=row_block(width)),
            ROW,
        )
        return y


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


def ceil_div(count: int, tile: int) -> int:
    return -(-count // tile)


def next_power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()


def row_block(width: int) -> int:
    """Channels that a row kernel reads at once."""
    return min(next_power(width), 2048)
