"""A loaded model with starting points that it can be rewound to, and the loops that are timed.

The loops do what decoding needs between two tokens, with nothing around it: a run's calls of the
model, its exact verdicts, its refresh of the MTP block's rows; none of its records.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ds4flow.bench.drafters import Drafter
from ds4flow.bench.samples import Clock
from ds4flow.cache import KVCache
from ds4flow.depth import DepthPolicy
from ds4flow.device import DeviceChoice
from ds4flow.errors import UsageError
from ds4flow.gguf import GgufFile, TensorInfo
from ds4flow.model.mtp_weights import find_mtp_layout
from ds4flow.model.trunk import Model
from ds4flow.ranks import ranks
from ds4flow.speculate import agreed, argmax
from ds4flow.stale import Fresh, StaleRows

LogitsSink = Callable[[int, torch.Tensor], None]


@dataclass
class Engine:
    """A model, the files it came from, and how it was loaded."""

    model: Model
    main: GgufFile
    mtp: GgufFile | None
    kernels: str
    threads: int

    @classmethod
    def load(
        cls,
        main: GgufFile,
        mtp: GgufFile | None = None,
        *,
        kernels: str = "reference",
        choice: DeviceChoice | None = None,
        profile: str = "official",
        threads: int = 1,
    ) -> Engine:
        """Load for a number of threads, which holds for the process until the next load.

        `choice` names a device too.
        """
        if threads < 1:
            raise UsageError(f"threads={threads} is not a number of threads", "use 1 or more")
        torch.set_num_threads(threads)
        device = None
        if choice is not None:
            kernels, device = choice.kernels, torch.device(choice.name)
        model = Model.load(main, mtp, profile=profile, kernels=kernels, device=device)
        return cls(model, main, mtp, kernels, threads)

    def trunk_tensors(self) -> list[TensorInfo]:
        """The tensors of the trunk; an MTP block in the same file is left out."""
        block = f"blk.{self.model.config.layers}."
        return [
            info for info in self.main.tensors.values() if not info.name.startswith((block, "mtp."))
        ]

    def draft_tensors(self) -> list[TensorInfo]:
        """What one draft step reads: the MTP block and the output matrix that it uses."""
        if self.mtp is None or self.model.mtp is None:
            return []
        block = f"blk.{self.model.config.layers}."
        own = [i for i in self.mtp.tensors.values() if i.name.startswith((block, "mtp."))]
        if find_mtp_layout(self.mtp) == "nextn":
            own = [i for i in own if "nextn.embed_tokens" not in i.name]
        if any("shared_head_head" in info.name for info in own):
            return own
        return [*own, self.main.tensors["output.weight"]]


@dataclass
class Start:
    """A prefilled sequence that runs can be started from again and again.

    `next_token` is the target's choice after the prompt, `hidden [N, D]` the streams of its last
    row.
    """

    cache: KVCache
    length: int
    next_token: int
    hidden: torch.Tensor
    seconds: float  # of the prefill

    def rewind(self) -> KVCache:
        """The cache with everything after the prompt forgotten."""
        self.cache.length = self.length
        return self.cache


def prepare(
    model: Model,
    prompt: Sequence[int],
    *,
    room: int,
    chunk: int = 64,
    mtp: bool = True,
    length: int = 0,
    clock: Clock = time.perf_counter,
) -> Start:
    """Prefill `prompt` into a new cache in which `room` more rows can be written and forgotten.

    `mtp`: also write the rows of the MTP block, where the model has one. `length`: of the sequence
    that the cache must hold beside the room, when it is more than the prompt.
    """
    if not prompt:
        raise UsageError("a prompt is empty", "give at least one token")
    cache = KVCache(
        model.config,
        context=max(len(prompt), length) + room,
        draft_max=0,
        chunk=max(chunk, room),  # rings that survive writing all of the room and going back
        device=model.device,
    )
    hidden: torch.Tensor | None = None
    started = clock()
    for first in range(0, len(prompt), chunk):
        part = list(prompt[first : first + chunk])
        streams = model.forward(part, cache)
        if mtp and model.mtp is not None:
            model.mtp.follow(part, first, hidden, streams, cache)
        cache.commit(len(part))
        hidden = streams[-1]
    assert hidden is not None
    token = int(argmax(model.logits(hidden[None]))[0])
    seconds = clock() - started
    return Start(cache, len(prompt), token, hidden, seconds)


@dataclass
class Run:
    """One timed generation: what was committed and how."""

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cycles: int = 0
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # drafts that were committed
    depths: dict[int, int] = field(default_factory=dict)  # cycles by number of drafts

    def add(self, kept: Sequence[int], drafted: int) -> None:
        """Count a cycle that kept tokens after `drafted` drafts."""
        self.tokens.extend(kept)
        self.cycles += 1
        self.drafted += drafted
        self.accepted += len(kept) - 1
        self.depths[drafted] = self.depths.get(drafted, 0) + 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / self.seconds

    @property
    def acceptance(self) -> float:
        """Accepted drafts of those verified; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Committed tokens a cycle."""
        return len(self.tokens) / self.cycles if self.cycles else 0.0


def greedy(
    model: Model,
    start: Start,
    count: int,
    *,
    sink: LogitsSink | None = None,
    clock: Clock = time.perf_counter,
) -> Run:
    """Generate `count` tokens one by one; `sink` gets (position, logits [V]) of every row."""
    cache, token, run = start.rewind(), start.next_token, Run()
    started = clock()
    for _ in range(count):
        _, logits = model.decide([token], cache)
        if sink is not None:
            sink(cache.length, logits[0])
        cache.commit(1)
        run.tokens.append(token)
        token = ranks(logits).choices[0]
    run.seconds = clock() - started
    run.cycles = count
    run.depths = {0: count}
    return run


def speculative(
    model: Model,
    start: Start,
    count: int,
    drafter: Drafter,
    depth: int | DepthPolicy,
    *,
    sink: LogitsSink | None = None,
    clock: Clock = time.perf_counter,
) -> Run:
    """Generate at least `count` tokens in draft, verify, commit cycles; all of them count.

    `depth` is the number of drafts a cycle, or the policy that chooses it. The text is the greedy
    one, whatever the drafter proposes.
    """
    block = model.mtp
    if block is None:
        raise UsageError(
            "the model files hold no MTP weights", "give an MTP file to measure drafting"
        )
    cache, token = start.rewind(), start.next_token
    behind = start.hidden[None]  # the streams before the token
    run = Run()
    drafter.begin()
    waiting = StaleRows(block.reach)
    policy, wanted = (depth, 0) if isinstance(depth, DepthPolicy) else (None, depth)
    begun = drafted_at = refreshed = started = clock()
    while len(run.tokens) < count:
        awake = policy is not None and not policy.sleeps()
        if policy is not None:
            wanted = policy.choose(policy.depth_max).depth if awake else 0
        if awake:
            begun = refreshed = clock()
        drafts: list[int] = []
        if wanted:
            backlog, stale = waiting.take()
            for part in backlog:
                block.warm(part.streams, part.tokens, part.first, cache)
            if backlog:
                refreshed = clock()
            drafts = drafter.propose(block, behind[0], token, wanted, cache, stale)
        if awake:
            drafted_at = clock()
        streams, logits = model.decide([token, *drafts], cache)
        accepted, following = agreed(logits, drafts)
        kept = (token, *drafts[:accepted])
        if sink is not None:
            for row in range(len(kept)):
                sink(cache.length + row, logits[row])
        before = torch.cat((behind, streams[:accepted])) if accepted else behind
        # the first row of a draft pass came from the target's streams and is final
        waiting.note(Fresh(cache.length, kept, before), 1 if drafts else 0)
        cache.commit(len(kept))
        behind = streams[accepted : accepted + 1] if drafts else streams
        token = following
        run.add(kept, len(drafts))
        if policy is not None and awake:
            policy.observe(
                drafted=len(drafts),
                accepted=accepted,
                steps=len(drafts),
                draft_s=drafted_at - refreshed,
                verify_s=clock() - drafted_at,
                backlog_s=refreshed - begun,
            )
    run.seconds = clock() - started
    return run


class Digest:
    """A sink that keeps a digest of the logits' bits by position."""

    def __init__(self) -> None:
        self.by_position: dict[int, str] = {}

    def __call__(self, position: int, logits: torch.Tensor) -> None:
        """Keep the digest of `logits [V]`."""
        raw = logits.contiguous().cpu().numpy().tobytes()
        self.by_position[position] = hashlib.sha256(raw).hexdigest()


def same_bits(
    model: Model,
    start: Start,
    count: int,
    drafter: Drafter,
    depth: int | DepthPolicy,
) -> tuple[bool, bool, bool]:
    """Whether speculation gives greedy's (tokens, logits bits, cache bits). Not timed."""
    ours, theirs = Digest(), Digest()
    fast = speculative(model, start, count, drafter, depth, sink=ours)
    state = start.cache.state_hash(mtp=False)
    slow = greedy(model, start, len(fast.tokens), sink=theirs)
    return (
        fast.tokens == slow.tokens,
        ours.by_position == theirs.by_position,
        state == start.cache.state_hash(mtp=False),
    )
