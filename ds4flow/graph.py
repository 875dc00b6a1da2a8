"""One speculative cycle on the device: draft, verify, accept and commit, captured once per verify
width.

Promise: inside a cycle nothing waits for the host and nothing depends on a value that the host
would have to read; the counters live on the device, and one small copy per cycle tells the host
what happened. The eager mode runs the same operations uncaptured and gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from ds4flow.cache import KVCache
from ds4flow.device import DeviceChoice, graph_obstacle
from ds4flow.errors import NumericsError, UsageError
from ds4flow.kernels.gpu.static import DeviceKernels, StaticKernels
from ds4flow.kernels.interface import LayerRows
from ds4flow.model.config import ModelConfig
from ds4flow.model.layer import layer_forward
from ds4flow.model.mtp import MtpBlock
from ds4flow.model.trunk import Model
from ds4flow.speculate import Draft


class Rules(NamedTuple):
    """What ends drafting and what is accepted; fixed when a graph is made.

    `margin` below 1 accepts a draft whose probability is at least that part of the target's own
    choice; `gate` ends drafting below this gap of the drafter's logits; `eos` (None: no token is
    special) ends drafting and the text; with `keep_accepted` the drafter's own cache rows stay;
    with `probe` the drafts stay out of the verify pass.
    """

    margin: float = 1.0
    gate: float = 0.0
    eos: int | None = None
    keep_accepted: bool = False
    probe: bool = False


class Cycle(NamedTuple):
    """What one cycle did, as `stages` without a graph would tell it.

    `rows` are the tokens of the verify pass: t0 and the drafts that counted; `tokens` of them are
    committed. `next_token` is the next t0. `drafts` are those proposed; `draft_end` says why no
    more were (depth, gate, eos). `gaps` are the target's top-2 logit gaps by row, `ratios` the
    target's probability of each draft that was looked at relative to its own choice. `relaxed`
    counts accepted drafts that were not its choice. `done` is eos or limit when the text ended.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    next_token: int
    drafts: tuple[Draft, ...]
    draft_end: str
    accepted: int
    relaxed: int
    gaps: tuple[float, ...]
    ratios: tuple[float, ...]
    done: str | None


@dataclass
class DecodeBuffers:
    """Everything that outlives a cycle on the device, at fixed addresses.

    `position [1]` (int64) counts the committed tokens, `token [1]` (int64) is the target's choice
    for that position, `hidden [1, N, D]` are the target's streams of the position before, `limit
    [1]` (int64) is the position where the text must end. `streams [R, N, D]`, `logits [R, V]` and
    `draft_logits [R-1, V]` are those of the last cycle. `report` (float64) is what the host reads:
    accepted, next token, position, entries that were not finite, drafts that counted, 1 at the end
    of the text and 2 at the limit; then per row of the pass its token, the target's choice and its
    gap; then per draft its token, gap and ratio.
    """

    position: torch.Tensor
    token: torch.Tensor
    hidden: torch.Tensor
    limit: torch.Tensor
    streams: torch.Tensor
    logits: torch.Tensor
    draft_logits: torch.Tensor
    report: torch.Tensor

    @classmethod
    def make(cls, config: ModelConfig, rows: int, device: torch.device) -> DecodeBuffers:
        """Buffers for verify passes of up to `rows` rows."""
        shape, vocab = (config.streams, config.dim), config.vocab
        return cls(
            position=torch.zeros(1, dtype=torch.int64, device=device),
            token=torch.zeros(1, dtype=torch.int64, device=device),
            hidden=torch.zeros(1, *shape, device=device),
            limit=torch.zeros(1, dtype=torch.int64, device=device),
            streams=torch.zeros(rows, *shape, device=device),
            logits=torch.zeros(rows, vocab, device=device),
            draft_logits=torch.zeros(rows - 1, vocab, device=device),
            report=torch.zeros(HEADER + 6 * rows, dtype=torch.float64, device=device),
        )

    def counters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of what a cycle moves on."""
        return self.position.clone(), self.token.clone(), self.hidden.clone()

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Put the copies back."""
        self.position.copy_(saved[0])
        self.token.copy_(saved[1])
        self.hidden.copy_(saved[2])


HEADER = 6
ENDS = (None, "eos", "limit")


@dataclass
class Usage:
    """What was done with a graph since someone began to count: by width of drafts.

    `built` are the widths that were captured (or, where nothing is captured, made ready), `kept`
    those that were there before, `replays` the cycles of each width.
    """

    built: list[int] = field(default_factory=list)
    kept: tuple[int, ...] = ()
    replays: dict[int, int] = field(default_factory=dict)


class _Recording(Protocol):
    """One cycle of a fixed width that can be done again and again."""

    def replay(self) -> None: ...


class _Uncaptured(NamedTuple):
    """The same operations, issued anew each time."""

    step: Callable[[], None]

    def replay(self) -> None:
        self.step()


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
    """Greedy decoding of one sequence by fixed rules, one call per cycle.

    `mode` is "graph" or "eager", `why` says why. Capture needs a CUDA device; it is written from
    documentation and has not run on one. On other devices the eager mode runs torch operations of
    the same fixed shapes.
    """

    def __init__(
        self, model: Model, cache: KVCache, *, eager: bool = False, rules: Rules | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self.rules = rules or Rules()
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
        self.eager = eager
        self.mode, self.why = _mode(device, kernels, eager)
        self.buffers = DecodeBuffers.make(model.config, cache.draft_max + 1, device)
        self._host = torch.zeros_like(self.buffers.report, device="cpu")
        if self.mode == "graph":
            self._host = self._host.pin_memory()
        self._recordings: dict[int, _Recording] = {}
        self._pool: Any = None  # memory that the graphs of all widths share
        self.usage = Usage()
        self._mtp: _DeviceMtp | None = None
        if model.mtp is not None:
            block = model.mtp
            self._mtp = _DeviceMtp(model.config, block.weights, model.weights, kernels, block.rope)
        self._length = -1

    def start(self, token: int, hidden: torch.Tensor, limit: int | None = None) -> None:
        """Begin, or go on after the host changed the sequence, at the cache's cursor.

        `token` is the target's choice for that position, `hidden [N, D]` its streams of the one
        before, `limit` the position where the text must end (the context's end by default). The
        MTP block's rows up to the cursor must be written.
        """
        context = self.cache.context
        self.buffers.position.fill_(self.cache.length)
        self.buffers.token.fill_(token)
        self.buffers.hidden.copy_(hidden[None])
        self.buffers.limit.fill_(context if limit is None else min(limit, context))
        self._length = self.cache.length

    def choose(self, token: int) -> None:
        """Let `token` stand next instead of the target's choice, for the host's sampling."""
        self.buffers.token.fill_(token)

    def count(self) -> Usage:
        """Begin to count anew; the result is filled as the graph is used."""
        self.usage = Usage(kept=tuple(sorted(self._recordings)))
        return self.usage

    def capture(self, widths: range | None = None) -> None:
        """Make these widths ready (default: all) ahead of their first use; once is enough."""
        for width in widths if widths is not None else range(self.cache.draft_max + 1):
            self._check(width)
            self._recording(width)

    def cycle(self, width: int) -> Cycle:
        """One `step`, and the cache's cursor moved over what it committed."""
        done = self.step(width)
        self.cache.commit(len(done.tokens))
        return done

    def step(self, width: int) -> Cycle:
        """Draft `width` tokens, verify them, and move the device past t0 and what was accepted.

        The caller moves the cache's cursor before the next step; committing less is only possible
        at the end of a text. Raises UsageError for a width that cannot be drafted, Ds4FlowError
        when the context has no room, NumericsError when a logit was not finite (nothing is
        committed then).
        """
        self._check(width)
        if self._length != self.cache.length:
            raise ValueError(
                f"the cursor moved from {self._length} to {self.cache.length}: start()"
            )
        self._recording(width).replay()
        self.usage.replays[width] = self.usage.replays.get(width, 0) + 1
        self._host.copy_(self.buffers.report, non_blocking=self.mode == "graph")
        if self.mode == "graph":
            torch.cuda.current_stream().synchronize()
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
        buffers, rules = self.buffers, self.rules
        start = buffers.position
        drafts, draft_gaps, bad = self._draft(width)
        alive = self._alive(drafts, draft_gaps)
        rows = buffers.token if rules.probe else torch.cat((buffers.token, drafts))
        count = rows.shape[0]
        streams = self._trunk(rows, start)
        logits = self._logits(streams)
        best = self.kernels.top2(logits)
        bad = bad + best.bad.sum()
        ratios = self._ratios(logits[: count - 1], drafts[: count - 1], best.top)
        hits = best.token[: count - 1] == drafts[: count - 1]
        if rules.margin < 1.0:
            hits = hits | (ratios >= rules.margin)
        # a draft counts while it and all before it were accepted, and the text has room
        passed = torch.cumprod(hits.long() * alive[: count - 1], 0).sum(0, keepdim=True)
        accepted = torch.minimum(passed, buffers.limit - start - 1)
        following = best.token.index_select(0, accepted)
        self._refresh(rows, streams, start)
        after = start + accepted + 1
        ended = (after >= buffers.limit).long() * 2
        if rules.eos is not None:
            hit = (following == rules.eos).long()
            ended = ended * (1 - hit) + hit
        report = [accepted, following, after, bad, alive.sum(0, keepdim=True), ended]
        report += [rows, best.token, best.gap, drafts, draft_gaps, ratios]
        flat = torch.cat([part.double() for part in report])
        buffers.report[: flat.shape[0]].copy_(flat)
        buffers.streams[:count].copy_(streams)
        buffers.logits[:count].copy_(logits)
        buffers.hidden.copy_(streams.index_select(0, accepted))
        buffers.token.copy_(following)
        buffers.position.copy_(after)

    def _draft(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft tokens and their gaps, `[width]` each, and the entries that were not finite."""
        buffers, kernels = self.buffers, self.kernels
        token, streams = buffers.token, buffers.hidden
        tokens, gaps = [token[:0]], [buffers.report[:0]]
        bad = torch.zeros_like(buffers.position)
        for depth in range(width):
            assert self._mtp is not None  # _check
            at = buffers.position + depth
            logits, streams = self._mtp.draft(streams, token, at, self.cache.mtp)
            best = kernels.top2(logits)
            token, bad = best.token, bad + best.bad
            tokens.append(token)
            gaps.append(best.gap.double())
            buffers.draft_logits[depth : depth + 1].copy_(logits)
        return torch.cat(tokens), torch.cat(gaps), bad

    def _alive(self, drafts: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """1 for each draft before the first that ends drafting, 0 from there on (int64)."""
        stops = gaps < self.rules.gate
        if self.rules.eos is not None:
            stops = stops | (drafts == self.rules.eos)
        return torch.cumprod((~stops).long(), 0)

    @staticmethod
    def _ratios(logits: torch.Tensor, drafts: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """The target's probability of each draft relative to its own choice, float64."""
        chosen = logits.gather(1, drafts[:, None])[:, 0]
        return torch.exp(chosen.double() - top[: drafts.shape[0]].double())

    def _refresh(self, rows: torch.Tensor, streams: torch.Tensor, start: torch.Tensor) -> None:
        """Write the MTP block's rows from the target's streams; without a need those that it wrote
        itself stay."""
        if self._mtp is None:
            return
        previous, first = torch.cat((self.buffers.hidden, streams[:-1])), start
        if self.rules.keep_accepted:  # all but the last were written while drafting
            kept = rows.shape[0] - 1
            previous, rows, first = previous[kept:], rows[kept:], start + kept
        self._mtp.warm(previous, cast(Any, rows), cast(Any, first), self.cache)

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

    def _recording(self, width: int) -> _Recording:
        """What does a cycle of this width; made when it is asked for first."""
        if width not in self._recordings:
            captured = self.mode == "graph"
            self._recordings[width] = (
                self._captured(width) if captured else _Uncaptured(partial(self._step, width))
            )
            self.usage.built.append(width)
        return self._recordings[width]

    def _captured(self, width: int) -> torch.cuda.CUDAGraph:
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
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(width)
        if self._pool is None:
            self._pool = graph.pool()
        return graph

    def _read(self, width: int) -> Cycle:
        values = self._host.tolist()
        accepted, following, length, bad, alive, ended = (int(value) for value in values[:HEADER])
        if bad:
            self._length = -1
            raise NumericsError(
                f"{bad} logits were not finite in the cycle at position {self.cache.length}",
                "use runtime.kernels=reference to learn the layer; check the file with its digest",
            )
        count = 1 if self.rules.probe else width + 1
        lengths, parts, at = (count, count, count, width, width, count - 1), [], HEADER
        for size in lengths:
            parts.append(values[at : at + size])
            at += size
        rows, choices = ([int(value) for value in part] for part in parts[:2])
        gaps, drafts, draft_gaps, ratios = parts[2:]
        verified = min(alive, count - 1)
        if self._length + accepted + 1 != length:
            raise RuntimeError(f"the device is at position {length}, the host at {self._length}")
        self._length = length
        proposed = zip(drafts[:alive], draft_gaps[:alive], strict=True)
        return Cycle(
            rows=tuple(rows[: verified + 1]),
            tokens=tuple(rows[: accepted + 1]),
            next_token=following,
            drafts=tuple(Draft(int(token), gap) for token, gap in proposed),
            draft_end=self._draft_end(drafts, alive),
            accepted=accepted,
            relaxed=sum(a != b for a, b in zip(rows[1 : accepted + 1], choices, strict=False)),
            gaps=tuple(gaps[: verified + 1]),
            ratios=tuple(ratios[: min(accepted + 1, verified)]),
            done=ENDS[ended],
        )

    def _draft_end(self, drafts: list[float], alive: int) -> str:
        if alive == len(drafts):
            return "depth"
        return "eos" if int(drafts[alive]) == self.rules.eos else "gate"


def _mode(device: torch.device, kernels: DeviceKernels, eager: bool) -> tuple[str, str]:
    if eager:
        return "eager", "runtime.eager=true asks for it"
    name = "static" if isinstance(kernels, StaticKernels) else "gpu"
    group = getattr(kernels, "group", None)
    choice = DeviceChoice(device.type, name, "the kernels of the model")
    obstacle = graph_obstacle(choice, 1 if group is None else group.world)
    return ("eager", obstacle) if obstacle else ("graph", "captured once per verify width")
