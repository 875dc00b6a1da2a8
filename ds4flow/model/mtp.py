"""The multi-token-prediction block: drafts from the trunk's streams, one token deeper a step.

Alignment is the trained one: row q pairs the streams of position q-1 with the token at q and
predicts the token at q+1. Row 0 has no predecessor and gets zero streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ds4flow.kernels.interface import Cache, Kernels, Passes
from ds4flow.model.config import ModelConfig
from ds4flow.model.head import head_logits, not_finite
from ds4flow.model.layer import layer_forward, layer_matrices
from ds4flow.model.rope import Rope
from ds4flow.model.weights import MtpWeights, TrunkWeights
from ds4flow.quants import QTensor
from ds4flow.ranks import ranks
from ds4flow.traffic import weight_traffic

MEMO_TOKENS = 512  # tokens whose projected embedding is kept
MEMO_ROWS = 16  # a pass of more rows than this is a prompt, whose tokens are not looked up

Pairs = tuple[int, Sequence[int], torch.Tensor]
"""Position `first`, tokens at `first ..`, and the trunk's streams `[M, N, D]` of `first-1 ..`."""


class Chain(NamedTuple):
    """Draft steps: what each proposed, its top-2 gap, and its logits `[steps, V]`."""

    tokens: list[int]
    gaps: list[float]
    logits: torch.Tensor


class Steps(Protocol):
    """What drafts one token after the other."""

    def step(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: Any,
        stale: Pairs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[V]` and streams `[N, D]`, as of `MtpBlock.step`."""


def step_by_step(
    block: Steps,
    streams: torch.Tensor,
    token: int,
    position: int,
    cache: Any,
    stale: Pairs | None = None,
    *,
    count: int,
    gate: float = 0.0,
    end: int | None = None,
    forced: Sequence[int] | None = None,
) -> Chain:
    """A chain (see `MtpBlock.chain`) of single steps."""
    tokens: list[int] = []
    gaps: list[float] = []
    rows: list[torch.Tensor] = []
    while len(tokens) < count:
        at = position + len(tokens)
        logits, streams = block.step(streams, token, at, cache, stale)
        stale = None
        found = ranks(logits)
        token = found.choices[0] if forced is None else forced[len(tokens)]
        tokens.append(token)
        gaps.append(found.gaps[0])
        rows.append(logits)
        if token == end or gaps[-1] < gate:
            break
    return Chain(tokens, gaps, torch.stack(rows))


class MtpBlock:
    """One transformer layer with its own window rows, hyper-connection head and final norm.

    Embedding and output matrix are the trunk's unless the file brings its own. What a token alone
    decides (its embedding, normed and projected) is remembered for the tokens seen last: a row has
    the same bits in any company, so this changes none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MtpWeights,
        trunk: TrunkWeights,
        kernels: Kernels,
        rope: Rope,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.rope = rope
        self.embedding = weights.embed or trunk.embed
        self.output = weights.output or trunk.output
        self._known: dict[int, torch.Tensor] = {}  # token: its row [1, D]

    @property
    def reach(self) -> int:
        """How many rows before its own a draft can see, its own included."""
        return self.config.window

    def matrices(self) -> Iterator[QTensor]:
        """Its weights that enter a matrix product, without an output matrix that is the trunk's."""
        weights = self.weights
        yield from (weights.e_proj, weights.h_proj, weights.head.hc.fn)
        yield from layer_matrices(weights.layer)
        if weights.output is not None:
            yield weights.output

    def weight_bytes(self) -> float:
        """Bytes of the matrices that one draft step reads, output included."""
        read = {id(matrix): matrix for matrix in (*self.matrices(), self.output)}
        return weight_traffic(read.values(), self.config).total

    def _join(self, streams: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Input streams `[M, N, D]` of the block from the paired streams and tokens."""
        normed = self.kernels.rms_norm(streams, self.weights.hnorm)
        hidden = self.kernels.linear(normed.flatten(0, 1), self.weights.h_proj)
        return self._embedded(tokens)[:, None, :] + hidden.unflatten(0, streams.shape[:2])

    def _embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """The tokens' part `[M, D]` of the input, from memory where it is known."""
        if isinstance(tokens, torch.Tensor) or len(tokens) > MEMO_ROWS:  # ids on a device: unknown
            return self._project(tokens)
        known = self._known
        new = [token for token in dict.fromkeys(tokens) if token not in known]
        if new:
            if len(known) + len(new) > MEMO_TOKENS:
                known.clear()
                new = list(dict.fromkeys(tokens))
            known.update(zip(new, self._project(new).split(1), strict=True))
        rows = [known[token] for token in tokens]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _project(self, tokens: Sequence[int]) -> torch.Tensor:
        kernels, weights = self.kernels, self.weights
        embedded = kernels.rms_norm(kernels.embed(self.embedding, tokens), weights.enorm)
        return kernels.linear(embedded, weights.e_proj)

    def warm(self, streams: torch.Tensor, tokens: Sequence[int], first: int, cache: Cache) -> None:
        """Write the window rows of positions `first ..` without running the whole block.

        `streams [M, N, D]` are the trunk's of positions `first-1 ..`; `tokens` lie at `first ..`. A
        row depends on its own pair only. Rows that no later draft can see are skipped.
        """
        skipped = max(0, len(tokens) - self.config.window)
        streams, tokens, first = streams[skipped:], tokens[skipped:], first + skipped
        if self.kernels.passes is not None:
            self._whole(self.kernels.passes, streams, tokens, first, cache, len(tokens))
            return
        with torch.inference_mode():
            self._write(self._join(streams, tokens), first, cache)

    def _write(self, joined: torch.Tensor, first: int, cache: Cache) -> None:
        layer = self.weights.layer
        x, _, _ = self.kernels.hc_pre(joined, layer.hc_attn, layer.attn_norm)
        self.kernels.kv_rows(x, layer, self.rope, cache.mtp.window, first)

    def follow(
        self,
        tokens: Sequence[int],
        first: int,
        previous: torch.Tensor | None,
        streams: torch.Tensor,
        cache: Cache,
    ) -> None:
        """Write the rows of `tokens` (positions `first ..`) that the trunk has just processed.

        `streams [M, N, D]` are the trunk's of the same positions, `previous [N, D]` those of
        position `first-1` (None at position 0).
        """
        head = torch.zeros_like(streams[0]) if previous is None else previous
        self.warm(torch.cat((head[None], streams[:-1])), tokens, first, cache)

    def forward(
        self,
        streams: torch.Tensor,
        tokens: Sequence[int],
        first: int,
        cache: Cache,
        *,
        written: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block on M pairs at positions `first ..`; of the first `written` of them only the
        window rows are needed, as by `warm`.

        Returns draft logits `[M - written, V]` and the block's own streams `[M - written, N, D]`,
        the input of the next depth. Raises NumericsError when a logit is not finite.
        """
        cache.check_room(first + written, len(tokens) - written)
        if self.kernels.passes is None:
            return self._by_operations(streams, tokens, first, cache, written)
        return self._whole(self.kernels.passes, streams, tokens, first, cache, written)

    def _whole(
        self,
        passes: Passes,
        streams: torch.Tensor,
        tokens: Sequence[int],
        first: int,
        cache: Cache,
        written: int,
        *,
        one: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, out, bad = passes.draft(
            self._embedded(tokens),
            streams,
            tokens,
            self.weights,
            self.output,
            cache.mtp,
            self.rope,
            first,
            written=written,
            one=one,
        )
        if bad >= 0:
            raise not_finite(f"MTP block at position {first + written}", bad)
        return logits, out

    @torch.inference_mode()
    def _by_operations(
        self,
        streams: torch.Tensor,
        tokens: Sequence[int],
        first: int,
        cache: Cache,
        written: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self._join(streams, tokens)
        if written:
            self._write(joined[:written], first, cache)
            joined, tokens, first = joined[written:], tokens[written:], first + written
        layer, head = self.weights.layer, self.weights.head
        out = layer_forward(self.kernels, joined, tokens, layer, cache.mtp, self.rope, first)
        where = f"MTP block at position {first}"
        return head_logits(self.kernels, out, head, self.output, where), out

    def step(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: Cache,
        stale: Pairs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: logits `[V]` and streams `[N, D]` for (`streams [N, D]`, `token`).

        `stale` are pairs, at most a window of them, whose rows are to be written before: when they
        end at `position` they go through the block's projections together with the step.
        """
        first, tokens, pairs = self._joined(streams, token, position, cache, stale)
        written = len(tokens) - 1
        cache.check_room(position, 1)
        if self.kernels.passes is not None:
            return self._whole(self.kernels.passes, pairs, tokens, first, cache, written, one=True)
        pairs = pairs if written else pairs[None]
        logits, out = self._by_operations(pairs, tokens, first, cache, written)
        return logits[0], out[0]

    def _joined(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: Cache,
        stale: Pairs | None,
    ) -> Pairs:
        """The pair of a step with the stale ones that end there; others are written at once."""
        if stale is None:
            return position, [token], streams
        if stale[0] + len(stale[1]) == position:
            return stale[0], [*stale[1], token], torch.cat((stale[2], streams[None]))
        self.warm(stale[2], stale[1], stale[0], cache)
        return position, [token], streams

    def chain(
        self,
        streams: torch.Tensor,
        token: int,
        position: int,
        cache: Cache,
        stale: Pairs | None = None,
        *,
        count: int,
        gate: float = 0.0,
        end: int | None = None,
        forced: Sequence[int] | None = None,
    ) -> Chain:
        """Up to `count` steps, each on the token that the one before proposed.

        Ends early after a step whose two largest logits lie less than `gate` apart, and after one
        that proposes `end`. `forced` are tokens to propose instead of the block's own.
        """
        passes = self.kernels.passes
        if passes is not None:
            if stale is not None and stale[0] + len(stale[1]) != position:
                self.warm(stale[2], stale[1], stale[0], cache)
                stale = None
            first, before, behind = stale or (position, (), None)
            cache.check_room(position + count - 1, 1)
            made = passes.chain(
                streams,
                behind,
                [*before, token],
                self.weights,
                self.embedding,
                self.output,
                cache.mtp,
                self.rope,
                first,
                count=count,
                gate=gate,
                end=-1 if end is None else end,
                forced=forced,
            )
            if made is not None:
                logits, choices, chain_gaps, bad = made
                if bad >= 0:
                    raise not_finite(f"MTP block at position {position + bad}", 0)
                steps = len(choices)
                return Chain(
                    choices if forced is None else list(forced[:steps]), chain_gaps, logits
                )
        return step_by_step(
            self,
            streams,
            token,
            position,
            cache,
            stale,
            count=count,
            gate=gate,
            end=end,
            forced=forced,
        )
