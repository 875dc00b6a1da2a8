"""`ds4flow bench`: measures what a plan asks for, shows it and writes it to files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from ds4flow import chat, origin
from ds4flow.bench.decoding import measure_decoding, measure_peer
from ds4flow.bench.engine import Engine
from ds4flow.bench.graph import measure_graph
from ds4flow.bench.machine import measure_start, read_bandwidth
from ds4flow.bench.output import csv_text, json_text, show, write_text
from ds4flow.bench.passes import measure_contexts, measure_matmuls, measure_widths
from ds4flow.bench.plan import SECTIONS, BenchOptions, Plan, choose_kernels, numbers
from ds4flow.bench.results import MachineResult, Report, StartResult
from ds4flow.bench.samples import Samples
from ds4flow.bench.settings import Say, Settings, random_tokens
from ds4flow.errors import UsageError
from ds4flow.synth.presets import SYNTH_FLASH, changed
from ds4flow.synth.unwritten import Unwritten, made_model, planned
from ds4flow.tokenizer import Tokenizer

SYNTH = "synth-flash"
PROMPT_TOKENS = 64  # of a random prompt


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
        plan = Plan.of(options)
        with screen.status("opening the model") as status:
            report = measure(plan, say=status.update)
    show(report, Console())
    if options.json:
        write_text(Path(options.json), json_text(report))
    if options.csv:
        write_text(Path(options.csv), csv_text(report))
    return 0


def measure(plan: Plan, *, say: Say) -> Report:
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
    plan: Plan, engine: Engine, bandwidth: Samples | None, report: Report, say: Say
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


def _starts(plan: Plan, threads: int, say: Say) -> StartResult:
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


def _prompt_ids(plan: Plan, engine: Engine) -> list[list[int]]:
    if not plan.prompts:
        return [random_tokens(engine, PROMPT_TOKENS, plan.settings.seed)]
    tokenizer = Tokenizer.from_metadata(plan.main.metadata)
    return [chat.prompt_ids(tokenizer, text, chat="raw") for text in plan.prompts]


def _facts(plan: Plan) -> dict[str, object]:
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
    choice = choose_kernels(options.kernels, graph=True)
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


def _drafts(widths: Sequence[int], drafting: bool) -> list[int]:
    """Numbers of drafts from numbers of rows; none without a drafter."""
    return [width - 1 for width in widths] if drafting else [0]
