"""What `ds4flow bench` is asked for: its options, read and checked before anything is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ds4flow.bench.decoding import Arm
from ds4flow.bench.peer import check_peer
from ds4flow.bench.settings import Settings
from ds4flow.device import FIXED_SHAPES, DeviceChoice, choose
from ds4flow.errors import UsageError, near_match
from ds4flow.gguf import GgufFile
from ds4flow.model.mtp_weights import find_mtp_layout
from ds4flow.model.trunk import BACKENDS

SECTIONS = ("machine", "start", "speed", "verify", "products", "decoding", "graph")


@dataclass(frozen=True)
class BenchOptions:
    """Everything that can be asked of `ds4flow bench`; lists as text, the way they are typed."""

    model: str = ""
    mtp: str | None = None
    kernels: str = "auto"
    profile: str = "official"
    threads: str = "1"
    only: str = ""  # sections, all when empty
    contexts: str = "64,1024"
    widths: str = "1-8"
    width_context: int = 1024
    drafts: str = "1,2,auto"
    oracle: tuple[str, ...] = ("0.8,0.8",)  # rates by position; as many drafts as rates
    prompts: tuple[str, ...] = ()  # texts; one of random tokens when empty
    peer: str | None = None
    synth: tuple[str, ...] = ()  # KEY=VALUE, changes of synth-flash
    cold: bool = False  # also a start with an empty cache of compiled kernels
    check: bool = True  # compare speculation with greedy bit by bit
    json: str | None = None
    csv: str | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Plan:
    """What to measure, with which files and kernels: options that were checked."""

    main: GgufFile
    mtp: GgufFile | None
    choice: DeviceChoice
    profile: str
    threads: tuple[int, ...]
    sections: tuple[str, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    width_context: int
    arms: tuple[Arm, ...]
    prompts: tuple[str, ...]
    peer: str | None
    cold: bool
    check: bool
    settings: Settings

    @classmethod
    def of(cls, options: BenchOptions) -> Plan:
        """Raises UsageError for options that make no sense, and what opening the files raises."""
        if options.peer is not None:
            check_peer(options.peer)
        threads = numbers("threads", options.threads, low=1)
        choice = choose_kernels(options.kernels, graph=options.only.strip() == "graph")
        sections = _sections(options.only, choice.kernels)
        main = GgufFile.open(options.model)
        mtp = None if options.mtp is None else GgufFile.open(options.mtp)
        if mtp is None and find_mtp_layout(main) is not None:
            mtp = main
        if options.settings.clock == "cpu" and threads != (1,):
            raise UsageError(
                f"clock=cpu measures one thread, not --threads {options.threads}",
                "use --threads 1, or clock=wall",
            )
        return cls(
            main=main,
            mtp=mtp,
            choice=choice,
            profile=options.profile,
            threads=threads,
            sections=sections,
            contexts=numbers("contexts", options.contexts, low=1),
            widths=numbers("widths", options.widths, low=1),
            width_context=options.width_context,
            arms=_arms(options, drafting=mtp is not None),
            prompts=options.prompts,
            peer=options.peer,
            cold=options.cold,
            check=options.check,
            settings=options.settings,
        )


# --- reading options -----------------------------------------------------------------------------


def numbers(name: str, text: str, *, low: int) -> tuple[int, ...]:
    """Integers from a list such as `1,2,8` or `1-8`; UsageError names the option."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise UsageError(f"--{name} {text}: {part!r} is not a number", "use e.g. 1,2,8 or 1-8")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < low or last < first or last - first > 10_000:
            raise UsageError(f"--{name} {text}: {part} is out of range", f"use {low} or more")
        found += range(first, last + 1)
    if not found:
        raise UsageError(f"--{name} is empty", "use e.g. 1,2,8 or 1-8")
    return tuple(dict.fromkeys(found))


def _sections(text: str, kernels: str) -> tuple[str, ...]:
    """The sections that were asked for; of all, those that the kernels can do."""
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    for section in wanted:
        if section not in SECTIONS:
            raise UsageError(
                f"--only {section} is not a section",
                near_match(section, SECTIONS) or f"use some of {', '.join(SECTIONS)}",
            )
    if "graph" in wanted and kernels not in FIXED_SHAPES:
        raise _unfit(kernels)
    able = SECTIONS if kernels in FIXED_SHAPES else SECTIONS[:-1]
    return tuple(section for section in SECTIONS if section in wanted) or able


def choose_kernels(kernels: str, *, graph: bool) -> DeviceChoice:
    """Device and kernels; with `graph` only those that the decode graph can use."""
    if kernels not in ("auto", *BACKENDS):
        raise UsageError(
            f"--kernels {kernels} is not a kernel backend",
            near_match(kernels, BACKENDS) or f"use one of auto, {', '.join(BACKENDS)}",
        )
    if graph and kernels not in ("auto", *FIXED_SHAPES):
        raise _unfit(kernels)
    return choose("auto", kernels, graph=graph)


def _unfit(kernels: str) -> UsageError:
    return UsageError(
        f"the decode graph needs kernels of fixed shapes, and --kernels {kernels} has none",
        f"use --kernels {' or '.join(FIXED_SHAPES)}",
    )


def _arms(options: BenchOptions, *, drafting: bool) -> tuple[Arm, ...]:
    if not drafting:
        return ()
    arms: list[Arm] = []
    for part in filter(None, (part.strip() for part in options.drafts.split(","))):
        if part == "auto":
            arms.append(Arm(None))
        elif part.isdecimal() and int(part) <= 16:
            arms.append(Arm(int(part)))
        else:
            raise UsageError(
                f"--drafts {options.drafts}: {part!r} is no depth", "use numbers up to 16, or auto"
            )
    for rates in options.oracle:
        values = _rates(rates)
        arms.append(Arm(len(values), values))
    return tuple(arm for arm in dict.fromkeys(arms) if arm.depth != 0)


def _rates(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or len(values) > 16 or not all(0.0 <= value <= 1.0 for value in values):
        raise UsageError(
            f"--oracle {text} is not a list of acceptance rates", "use e.g. 0.8,0.8 for two drafts"
        )
    return values
