"""The typed shape of every config group: names, types, ranges and choices.

Defaults are not here but in conf/, once.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, NamedTuple

from omegaconf import MISSING, OmegaConf

PROFILES = ("official", "plain")
CHATS = ("auto", "raw", "nothink", "think", "think-max")
TRACES = ("off", "normal", "full")
KERNELS = ("auto", "cpu", "cpu-int8", "gpu", "reference", "static")
DEVICES = ("auto", "cuda", "rocm", "mps", "cpu")
METRICS = ("tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate")

ROLES = ("setup", "cycle", "observe")
"""The lists of stages in the group `pipeline` that every pipeline has."""


class Limits(NamedTuple):
    """What a value must satisfy beyond its type; `hint` replaces the generated advice.

    `link` names the key that the field follows: it can only be set there. `words` are values that a
    number may also have. `absent` fields are null in those options of their group that lack them.
    """

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    choices: tuple[str, ...] = ()
    hint: str = ""
    link: str = ""
    words: tuple[str, ...] = ()
    absent: bool = False


def knob(
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    choices: tuple[str, ...] = (),
    hint: str = "",
    link: str = "",
    words: tuple[str, ...] = (),
) -> Any:
    """A config field: its value comes from YAML, its limits from here."""
    limits = Limits(low, high, open_low, choices, hint, link, words)
    return field(default=MISSING, metadata={"limits": limits})


def option(*, low: float | None = None, high: float | None = None, link: str = "") -> Any:
    """A field that only some options of its group have; null stands for its absence elsewhere."""
    return field(default=None, metadata={"limits": Limits(low, high, link=link, absent=True)})


@dataclass
class Mtp:
    """Knobs of speculation, shared by the stages."""

    draft: int | str = knob(low=0, high=16, words=("auto",))
    margin: float = knob(
        low=0.0,
        high=1.0,
        open_low=True,
        hint="use a ratio in (0, 1]; a logit gap of the drafter, as ds4 means it, is mtp.gate",
    )
    strict: bool = knob()
    gate: float = knob(low=0.0)
    keep_accepted: bool = knob()
    full_logits: bool = knob()
    probe: bool = knob()
    timing: bool = knob()
    spec_log: bool = knob()
    conf_log: bool = knob()


@dataclass
class Model:
    """Which weights, where they lie, and how text becomes their prompt."""

    name: str = knob()
    path: str | None = knob()
    mtp_path: str | None = knob()
    sha256: str | None = knob()
    mtp_sha256: str | None = knob()
    repo: str | None = knob()
    file: str | None = knob()
    mtp_file: str | None = knob()
    profile: str = knob(choices=PROFILES)
    chat: str = knob(choices=CHATS)
    prompt: str = knob()
    synth: Any = option()  # of model=synth-flash alone: keys of a recipe, checked where it is made


@dataclass
class Runtime:
    """The machine's side of a run."""

    device: str = knob(choices=DEVICES)
    kernels: str = knob(choices=KERNELS)
    eager: bool = knob()
    tensor_parallel: int = knob(low=1)
    threads: int = knob(low=0)
    no_gpu: bool = knob()
    chunk: int = knob(low=1, high=4096)
    context: int | None = knob(low=2)
    memory: float | None = knob(low=0.0, open_low=True)


@dataclass
class Sampling:
    """How the next token is chosen from the target's logits."""

    temperature: float = knob(low=0.0)
    top_k: int = knob(low=0)
    top_p: float = knob(low=0.0, high=1.0, open_low=True)
    min_p: float = knob(low=0.0, high=1.0)
    seed: int = knob(low=0)
    lossless: bool = knob()


@dataclass
class Objective:
    """The one number that a run is judged by; more is better.

    With `max_relaxed`, a run is out of bounds when a larger share of its output tokens was not the
    target's own choice.
    """

    metric: str = knob(choices=METRICS)
    max_relaxed: float | None = knob(low=0.0, high=1.0)


@dataclass
class Pipeline:
    """Names of stages in their order: once, per cycle, and watching each cycle."""

    setup: list[str] = knob()
    cycle: list[str] = knob()
    observe: list[str] = knob()
    on_gpu: list[str] | None = option()  # the cycle where it can be captured as a graph


@dataclass
class StageGroup:
    """Any stage's group: the class that runs."""

    _target_: str = knob()


@dataclass
class Download(StageGroup):
    """Finding and checking the model files."""

    path: str | None = knob(link="model.path")
    mtp_path: str | None = knob(link="model.mtp_path")
    sha256: str | None = knob(link="model.sha256")
    mtp_sha256: str | None = knob(link="model.mtp_sha256")
    repo: str | None = knob(link="model.repo")
    file: str | None = knob(link="model.file")
    mtp_file: str | None = knob(link="model.mtp_file")
    folder: str = knob()
    offline: bool = knob()
    uses_mtp: bool = knob(link="draft.uses_mtp")
    draft: int | str = knob(link="mtp.draft", words=("auto",))
    no_gpu: bool = knob(link="runtime.no_gpu")
    synth: Any = option(link="model.synth")  # of download=synth alone


@dataclass
class Load(StageGroup):
    """Files to model, tokenizer, prompt ids and cache."""

    profile: str = knob(link="model.profile")
    device: str = knob(link="runtime.device")
    kernels: str = knob(link="runtime.kernels")
    graph: bool = knob()
    tensor_parallel: int = knob(link="runtime.tensor_parallel")
    threads: int = knob(link="runtime.threads")
    no_gpu: bool = knob(link="runtime.no_gpu")
    uses_mtp: bool = knob(link="draft.uses_mtp")
    draft: int | str = knob(link="mtp.draft", words=("auto",))
    chunk: int = knob(link="runtime.chunk")
    context: int | None = knob(link="runtime.context")
    memory: float | None = knob(link="runtime.memory")
    chat: str = knob(link="model.chat")
    sampling: Any = knob(link="sampling")  # the group as it is
    system: str = knob(link="system")
    synth: Any = option(link="model.synth")  # of load=synth alone


@dataclass
class Prefill(StageGroup):
    """The prompt through the target."""

    chunk: int = knob(link="runtime.chunk")
    ignore_eos: bool = knob(link="commit.ignore_eos")
    progress_after: float = knob(low=0.0)


@dataclass
class Draft(StageGroup):
    """Proposing tokens; `uses_mtp` says whether this drafter needs the model's MTP block."""

    uses_mtp: bool = knob()
    depth: int | str = knob(link="mtp.draft", words=("auto",))
    gate: float = knob(link="mtp.gate")
    keep_accepted: bool = knob(link="mtp.keep_accepted")
    max_tokens: int = knob(link="commit.max_tokens")
    ignore_eos: bool = knob(link="commit.ignore_eos")
    # of draft=oracle alone
    accept: list[float] | None = option()
    tokens: str | None = option()
    seed: int | None = option(low=0)


@dataclass
class Verify(StageGroup):
    """Deciding which proposals the target accepts."""

    margin: float = knob(link="mtp.margin")
    strict: bool = knob(link="mtp.strict")
    probe: bool = knob(link="mtp.probe")


@dataclass
class Decode(StageGroup):
    """Drafting and verifying as one step on the device."""

    drafter: str = knob(link="draft._target_")
    depth: int | str = knob(link="mtp.draft", words=("auto",))
    gate: float = knob(link="mtp.gate")
    keep_accepted: bool = knob(link="mtp.keep_accepted")
    margin: float = knob(link="mtp.margin")
    strict: bool = knob(link="mtp.strict")
    probe: bool = knob(link="mtp.probe")
    max_tokens: int = knob(link="commit.max_tokens")
    ignore_eos: bool = knob(link="commit.ignore_eos")
    sampling: Any = knob(link="sampling")  # the group as it is
    eager: bool = knob(link="runtime.eager")


@dataclass
class Commit(StageGroup):
    """Making tokens permanent and deciding when to stop."""

    max_tokens: int = knob(low=1)
    stop: list[str] = knob()
    ignore_eos: bool = knob()


@dataclass
class Log(StageGroup):
    """Text, records and the closing table."""

    stream: bool = knob()
    table: bool = knob()
    timing: bool = knob(link="mtp.timing")
    spec_log: bool = knob(link="mtp.spec_log")
    conf_log: bool = knob(link="mtp.conf_log")
    full_logits: bool = knob(link="mtp.full_logits")
    trace: str = knob(link="trace")


@dataclass
class Parity(StageGroup):
    """Comparing with a plain greedy twin."""

    state: bool = knob()


@dataclass
class Check(StageGroup):
    """Comparing every committed cache state with a plain twin's."""

    keep_accepted: bool = knob(link="mtp.keep_accepted")


@dataclass
class Root:
    """Keys that belong to no group."""

    name: str = knob()
    prompt: str = knob()
    prompt_file: str | None = knob()
    prompts: str | None = knob()
    system: str = knob()
    trace: str = knob(choices=TRACES)


GROUPS: Mapping[str, type] = {
    "mtp": Mtp,
    "model": Model,
    "runtime": Runtime,
    "sampling": Sampling,
    "objective": Objective,
    "pipeline": Pipeline,
    "download": Download,
    "load": Load,
    "prefill": Prefill,
    "draft": Draft,
    "verify": Verify,
    "decode": Decode,
    "commit": Commit,
    "log": Log,
    "parity": Parity,
    "check": Check,
}


class Key(NamedTuple):
    """One typed leaf: dotted name, Python type, whether null is allowed, limits."""

    name: str
    type: type
    optional: bool
    limits: Limits


def _keys_of(cls: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        kind = hints[item.name]
        arguments = typing.get_args(kind)
        optional = isinstance(kind, UnionType) and type(None) in arguments
        if isinstance(kind, UnionType):
            kind = next(arg for arg in arguments if arg is not type(None))
        yield Key(prefix + item.name, kind, optional, item.metadata["limits"])


def _all_keys() -> dict[str, Key]:
    keys = {key.name: key for key in _keys_of(Root, "")}
    for group, cls in GROUPS.items():
        keys |= {key.name: key for key in _keys_of(cls, f"{group}.")}
    return keys


KEYS: Mapping[str, Key] = _all_keys()


def root_node() -> dict[str, Any]:
    """The untyped root with typed groups, which composed YAML is merged into.

    The root stays open so that a new stage needs no schema of its own.
    """
    node: dict[str, Any] = {group: OmegaConf.structured(cls) for group, cls in GROUPS.items()}
    return dict(OmegaConf.structured(Root)._content) | node  # typed leaves, not their values
