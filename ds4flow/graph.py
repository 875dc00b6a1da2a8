"""One speculative cycle on the device: draft, verify, accept and commit, captured once per verify
width.

Promise: inside a cycle nothing waits for the host and nothing depends on a value that the host
would have to read; the counters live on the device, and one small copy per cycle tells the host
what happened. The eager mode runs the same operations uncaptured and gives the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ds4flow.cache import KVCache
from ds4flow.errors import NumericsError, UsageError
from ds4flow.kernels.gpu.static import DeviceKernels, StaticKernels
from ds4flow.kernels.interface import LayerRows
from ds4flow.model.layer import layer_forward
from ds4flow.model.mtp import MtpBlock
from ds4flow.model.trunk import Model
from ds4flow.speculate import Draft


class Cycle(NamedTuple):
    """What one cycle did. `tokens` are committed: t0 and the accepted drafts; `next_token` is the
    next t0.

    `gaps` are the target's top-2 logit gaps per verified row, `ratios` the target's probability of
    each draft relative to its own choice.
    """

    tokens: tuple[int, ...]
    next_token: int
    drafts: tuple[Draft, ...]
    accepted: int
    gaps: tuple[float, ...]
    ratios: tuple[float, ...]


@dataclass
class DecodeBuffers:
    """Everything that outlives a cycle on the device, at fixed addresses.

    `position [1]` (int64) counts the committed tokens, `token [1]` (int64) is the target's choice
    for that position, `hidden [1, N, D]` are the target's streams of the position before, `report`
    (float64) is what the host reads: accepted, next token, position, entries that were not finite,
    then per row the token, the target's gap, the draft's gap and the draft's ratio.
    """

    position: torch.Tensor
    token: torch.Tensor
    hidden: torch.Tensor
    report: torch.Tensor

    @classmethod
    def make(cls, streams: int, dim: int, rows: int, device: torch.device) -> DecodeBuffers:
        """Buffers for verify passes of up to `rows` rows."""
        return cls(
            position=torch.zeros(1, dtype=torch.int64, device=device),
            token=torch.zeros(1, dtype=torch.int64, device=device),
            hidden=torch.zeros(1, streams, dim, device=device),
            report=torch.zeros(HEADER + 4 * rows, dtype=torch.float64, device=device),
        )

    def counters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of what a cycle moves on."""
        return self.position.clone(), self.token.clone(), self.hidden.clone()

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Put the copies back."""
        self.position.copy_(saved[0])
        self.token.copy_(saved[1])
        self.hidden.copy_(saved[2])


HEADER = 4


class _DeviceMtp(MtpBlock):
    """The MTP block with positions on the device and checks left to the report."""

    def draft(
        self, streams: torch.Tensor, token: torch.Tensor, position: torch.Tensor, rows: LayerRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[1, V]` and streams `[1, N, D]` of one draft step."""
        joined = self._join(streams, cast(Any, token))
        layer, head = self.weights.layer, self.weights.head
        out = layer_forward(
            self.kernels, joined, cast(Any, token), layer, rows, self.rope, cast(Any, position)
        )
        return self.kernels.linear(self.kernels.hc_head(out, head.hc, head.norm), self.output), out


class DecodeGraph:
    """Greedy decoding of one sequence with the exact acceptance rule, one call per cycle.

    `mode` is "graph" or "eager", `why` says why. Capture needs a CUDA device; it is written from
    documentation and has not run on one. On other devices the eager mode runs torch operations of
    the same fixed shapes.
    """

    def __init__(self, model: Model, cache: KVCache, *, eager: bool = False) -> None:
        self.model = model
        self.cache = cache
        device = cache.mtp.window.device
        kernels = model.kernels
        if not isinstance(kernels, DeviceKernels):
            kernels = StaticKernels(model.config, model.profile, device)
            kernels.prepare(list(model.matrices()))
        if kernels.device.type != device.type:
            raise ValueError(f"the cache lies on {device}, the kernels work on {kernels.device}")
        self.kernels = kernels
        for ratio in {*model.config.ratios}:
            kernels.reserve(model.rope(ratio), cache.context)
        self.mode, self.why = _mode(device, eager)
        config = model.config
        self.buffers = DecodeBuffers.make(config.streams, config.dim, cache.draft_max + 1, device)
        self._host = torch.zeros_like(self.buffers.report, device="cpu")
        if self.mode == "graph":
            self._host = self._host.pin_memory()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._mtp: _DeviceMtp | None = None
        if model.mtp is not None:
            block = model.mtp
            self._mtp = _DeviceMtp(config, block.weights, model.weights, kernels, block.rope)
        self._length = -1

    def start(self, token: int, hidden: torch.Tensor) -> None:
        """Begin, or go on after the host changed the sequence, at the cache's cursor.

        `token` is the target's choice for that position, `hidden [N, D]` its streams of the one
        before. The MTP block's rows up to the cursor must be written.
        """
        self.buffers.position.fill_(self.cache.length)
        self.buffers.token.fill_(token)
        self.buffers.hidden.copy_(hidden[None])
        self._length = self.cache.length

    def capture(self, widths: range | None = None) -> None:
        """Capture the graphs of these widths (default: all) ahead of their first use."""
        if self.mode == "graph":
            for width in widths if widths is not None else range(self.cache.draft_max + 1):
                self._check(width)
                self._graph(width)

    def cycle(self, width: int) -> Cycle:
        """Draft `width` tokens, verify them, commit t0 and what was accepted, and move the cache's
        cursor.

        Raises UsageError for a width that cannot be drafted, Ds4FlowError when the context has no
        room, NumericsError when a logit was not finite (nothing is committed then).
        """
        self._check(width)
        if self._length != self.cache.length:
            raise ValueError(
                f"the cursor moved from {self._length} to {self.cache.length}: start()"
            )
        if self.mode == "graph":
            self._graph(width).replay()
            self._host.copy_(self.buffers.report, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        else:
            self._step(width)
            self._host.copy_(self.buffers.report)
        return self._read(width)

    def _check(self, width: int) -> None:
        if not 0 <= width <= self.cache.draft_max:
            raise UsageError(
                f"a verify width of {width} drafts is outside 0..{self.cache.draft_max}",
                "lower mtp.draft, or give the cache a larger draft_max",
            )
        if width and self._mtp is None:
            raise UsageError(
                f"{width} drafts need MTP weights", "set mtp.draft=0 or give an MTP file"
            )
        self.cache.check_room(self.cache.length, width + 1)

    # --- the captured part: no value is read back in here ---

    @torch.inference_mode()
    def _step(self, width: int) -> None:
        buffers, kernels = self.buffers, self.kernels
        start, streams = buffers.position, buffers.hidden
        tokens, draft_gaps = [buffers.token], []
        bad = torch.zeros_like(start)
        for depth in range(width):
            assert self._mtp is not None  # _check
            logits, streams = self._mtp.draft(streams, tokens[-1], start + depth, self.cache.mtp)
            best = kernels.top2(logits)
            tokens.append(best.token)
            draft_gaps.append(best.gap)
            bad = bad + best.bad
        rows = torch.cat(tokens)
        streams = self._trunk(rows, start)
        logits = self._logits(streams)
        best = kernels.top2(logits)
        bad = bad + best.bad.sum()
        drafts = rows[1:]
        # a draft counts while it and all before it are the target's own choice
        hits = (best.token[:-1] == drafts).long()
        accepted = torch.cumprod(hits, 0).sum(0, keepdim=True) if width else torch.zeros_like(start)
        following = best.token.index_select(0, accepted)
        if self._mtp is not None:
            previous = torch.cat((buffers.hidden, streams[:-1]))
            self._mtp.warm(previous, cast(Any, rows), cast(Any, start), self.cache)
        chosen = logits[:-1].gather(1, drafts[:, None])[:, 0]
        ratios = torch.exp(chosen - best.top[:-1])
        report = [
            accepted,
            following,
            start + accepted + 1,
            bad,
            rows,
            best.gap,
            *draft_gaps,
            ratios,
        ]
        flat = torch.cat([part.double() for part in report])
        buffers.report[: flat.shape[0]].copy_(flat)
        buffers.hidden.copy_(streams.index_select(0, accepted))
        buffers.token.copy_(following)
        buffers.position.add_(accepted + 1)

    def _trunk(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Streams `[M, N, D]` after the last layer; rows not finite show up in the logits."""
        model, kernels = self.model, self.kernels
        embedded = kernels.embed(model.weights.embed, cast(Any, tokens))
        streams = embedded[:, None, :].expand(-1, model.config.streams, -1).contiguous()
        for layer, rows in zip(model.weights.layers, self.cache.layers, strict=True):
            # a layer hands tokens and position on to the kernels, which take them from the device
            streams = layer_forward(
                kernels,
                streams,
                cast(Any, tokens),
                layer,
                rows,
                model.rope(layer.ratio),
                cast(Any, start),
            )
        return streams

    def _logits(self, streams: torch.Tensor) -> torch.Tensor:
        head = self.model.weights.head
        return self.kernels.linear(
            self.kernels.hc_head(streams, head.hc, head.norm), self.model.weights.output
        )

    # --- capture and read-out ---

    def _graph(self, width: int) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get(width)
        if graph is None:
            # warm up on a side stream: kernels are compiled and buffers grown before the capture
            saved = self.buffers.counters()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step(width)
                    self.buffers.restore(saved)  # its rows lie beyond the cursor
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._step(width)
            self._graphs[width] = graph
        return graph

    def _read(self, width: int) -> Cycle:
        values = self._host.tolist()
        accepted, following, length, bad = (int(value) for value in values[:HEADER])
        at = HEADER
        tokens, at = [int(value) for value in values[at : at + width + 1]], at + width + 1
        gaps, at = values[at : at + width + 1], at + width + 1
        draft_gaps, at = values[at : at + width], at + width
        ratios = values[at : at + width]
        if bad:
            self._length = -1
            raise NumericsError(
                f"{bad} logits were not finite in the cycle at position {self.cache.length}",
                "use runtime.kernels=reference to learn the layer; check the file with its digest",
            )
        self.cache.commit(accepted + 1)
        self._length = self.cache.length
        if self._length != length:
            raise RuntimeError(f"the device is at position {length}, the host at {self._length}")
        return Cycle(
            tokens=tuple(tokens[: accepted + 1]),
            next_token=following,
            drafts=tuple(
                Draft(token, gap) for token, gap in zip(tokens[1:], draft_gaps, strict=True)
            ),
            accepted=accepted,
            gaps=tuple(gaps),
            ratios=tuple(ratios),
        )


def _mode(device: torch.device, eager: bool) -> tuple[str, str]:
    if device.type != "cuda":
        return "eager", f"graphs are captured on CUDA devices only, and the cache lies on {device}"
    if eager:
        return "eager", "runtime.eager=true asks for it"
    return "graph", "captured once per verify width"
