"""`ds4flow bench`: what to measure, in which order, and where the report goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from ds4flow import chat, origin
from ds4flow.bench.decoding import Arm, measure_decoding, measure_peer
from ds4flow.bench.engine import Engine
from ds4flow.bench.graph import measure_graph
from ds4flow.bench.machine import measure_start, read_bandwidth
from ds4flow.bench.output import csv_text, json_text, show, write_text
from ds4flow.bench.passes import measure_contexts, measure_matmuls, measure_widths
from ds4flow.bench.peer import check_peer
from ds4flow.bench.results import MachineResult, Report, StartResult
from ds4flow.bench.samples import Samples
from ds4flow.bench.settings import Say, Settings, random_tokens
from ds4flow.device import FIXED_SHAPES, DeviceChoice, choose
from ds4flow.errors import UsageError, near_match
from ds4flow.gguf import GgufFile
from ds4flow.model.mtp_weights import find_mtp_layout
from ds4flow.model.trunk import BACKENDS
from ds4flow.synth.presets import SYNTH_FLASH, changed
from ds4flow.synth.unwritten import Unwritten, made_model, planned
from ds4flow.tokenizer import Tokenizer

SECTIONS = ("machine", "start", "speed", "verify", "products", "decoding", "graph")
SYNTH = "synth-flash"
PROMPT_TOKENS = 64  # of a random prompt


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


def bench_command(options: BenchOptions) -> int:
    """Measure, print tables on stdout and progress on stderr, write the files; the exit code.

    Raises UsageError before anything is measured when the options make no sense, Ds4FlowError
    when a file cannot be used or written.
    """
    screen = Console(stderr=True)
    if options.model.removeprefix("model=") == SYNTH:
        with screen.status("making random weights") as status:
            report = rehearse(options, say=status.update)
    else:
        if options.synth:
            raise UsageError("--synth changes synth-flash only", f"use: ds4flow bench {SYNTH}")
        plan = _Plan.of(options)
        with screen.status("opening the model") as status:
            report = measure(plan, say=status.update)
    show(report, Console())
    if options.json:
        write_text(Path(options.json), json_text(report))
    if options.csv:
        write_text(Path(options.csv), csv_text(report))
    return 0


@dataclass(frozen=True)
class _Plan:
    """Checked options."""

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
    def of(cls, options: BenchOptions) -> _Plan:
        if options.peer is not None:
            check_peer(options.peer)
        threads = numbers("threads", options.threads, low=1)
        choice = _choose(options.kernels, graph=options.only.strip() == "graph")
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


def measure(plan: _Plan, *, say: Say) -> Report:
    """Everything that the plan asks for, one number of threads after another."""
    settings = plan.settings
    report = Report(_facts(plan))
    for threads in plan.threads:

        def tell(text: str, n: int = threads) -> None:
            say(f"{n} thread{'s' if n > 1 else ''}, {text}")

        bandwidth: Samples | None = None
        if "machine" in plan.sections:
            tell("read bandwidth")
            bandwidth = read_bandwidth(threads, repeats=settings.repeats, clock=settings.now)
            report.results.append(MachineResult(threads, bandwidth))
        if "start" in plan.sections:
            report.results.append(_starts(plan, threads, tell))
        if not set(SECTIONS[2:]) & set(plan.sections) and not plan.peer:
            continue
        tell("loading the model and its kernels")
        engine = Engine.load(
            plan.main, plan.mtp, choice=plan.choice, profile=plan.profile, threads=threads
        )
        _measure_engine(plan, engine, bandwidth, report, tell)
    return report


def _measure_engine(
    plan: _Plan, engine: Engine, bandwidth: Samples | None, report: Report, say: Say
) -> None:
    settings = plan.settings
    if "speed" in plan.sections:
        report.results += measure_contexts(
            engine, plan.contexts, settings, bandwidth=bandwidth, say=say
        )
    if "verify" in plan.sections:
        report.results += measure_widths(
            engine, plan.widths, settings, context=plan.width_context, say=say
        )
    if "products" in plan.sections:
        for rows in (1, 3):
            report.results += measure_matmuls(
                engine, settings, rows=rows, bandwidth=bandwidth, say=say
            )
    if "graph" in plan.sections:
        report.results += measure_graph(
            engine.model,
            engine.trunk_tensors(),
            plan.contexts,
            _drafts(plan.widths, engine.model.mtp is not None),
            settings,
            say=say,
        )
    prompts = _prompt_ids(plan, engine)
    if "decoding" in plan.sections:
        report.results += measure_decoding(
            engine, prompts, plan.arms, settings, check=plan.check, say=say
        )
    if plan.peer is not None:
        report.results.append(measure_peer(engine, plan.peer, prompts[0], settings, say=say))


def _starts(plan: _Plan, threads: int, say: Say) -> StartResult:
    starts = []
    kinds = [False] * min(3, plan.settings.repeats)
    # A first start may compile; what users wait for every time is the start after it.
    for number, cold in enumerate([True, *kinds] if plan.cold else [None, *kinds]):
        say(f"start {number + 1}/{len(kinds) + 1}")
        start = measure_start(
            plan.main.path,
            None if plan.mtp is None else plan.mtp.path,
            kernels=plan.choice.kernels,
            profile=plan.profile,
            threads=threads,
            cold=bool(cold),
        )
        if cold is not None:
            starts.append(start)
    return StartResult(threads, plan.choice.kernels, tuple(starts))


def _prompt_ids(plan: _Plan, engine: Engine) -> list[list[int]]:
    if not plan.prompts:
        return [random_tokens(engine, PROMPT_TOKENS, plan.settings.seed)]
    tokenizer = Tokenizer.from_metadata(plan.main.metadata)
    return [chat.prompt_ids(tokenizer, text, chat="raw") for text in plan.prompts]


def _facts(plan: _Plan) -> dict[str, object]:
    tree, _ = origin.source_tree()
    return _time_and_place(plan.settings) | {
        "model": str(plan.main.path),
        "model_name": plan.main.metadata.get("general.name"),
        "model_bytes": plan.main.size,
        "mtp": None if plan.mtp is None else str(plan.mtp.path),
        "kernels": plan.choice.kernels,
        "device": plan.choice.name,
        "device_why": plan.choice.why,
        "profile": plan.profile,
        "source": tree,
    }


def _time_and_place(settings: Settings) -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": vars(settings),
        "versions": origin.versions(),
        "machine": origin.machine(),
        "torch_config": torch.__config__.parallel_info().splitlines()[0],
    }


def rehearse(options: BenchOptions, *, say: Say) -> Report:
    """The decode graph on a model of Flash's dimensions with random weights, made on the device.

    Raises UsageError for keys that give no model, Ds4FlowError with the sizes when it does not fit.
    """
    words = (word.partition("=") for word in options.synth)
    made = changed(SYNTH_FLASH, {key: value for key, _, value in words})
    choice = _choose(options.kernels, graph=True)
    torch.set_num_threads(numbers("threads", options.threads, low=1)[0])
    contexts, widths = (
        numbers(name, getattr(options, name), low=1) for name in ("contexts", "widths")
    )
    fix = "use a larger device, or a smaller model: --synth layers=4 --synth experts=16"
    unwritten = Unwritten(made, options.settings.seed)
    model = made_model(unwritten, choice, options.profile, fix=fix)
    tensors = planned(made)
    tree, _ = origin.source_tree()
    facts = _time_and_place(options.settings) | {
        "model": SYNTH,
        "model_bytes": sum(info.nbytes for info in tensors),
        "changes": list(options.synth),
        "kernels": choice.kernels,
        "device": choice.name,
        "device_why": choice.why,
        "profile": options.profile,
        "source": tree,
    }
    drafts = _drafts(widths, True)
    results = measure_graph(model, tensors, contexts, drafts, options.settings, say=say)
    report = Report(facts)
    report.results += results
    return report


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


def _choose(kernels: str, *, graph: bool) -> DeviceChoice:
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


def _drafts(widths: Sequence[int], drafting: bool) -> list[int]:
    """Numbers of drafts from numbers of rows; none without a drafter."""
    return [width - 1 for width in widths] if drafting else [0]


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
