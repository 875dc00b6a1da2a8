"""The commands beside `run`: each is a click declaration over a function that does the work.

Nothing heavy is imported before a command is chosen.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import click

from ds4flow import completion
from ds4flow.flags import REQUEST_FLAGS, flag_options, given_flags
from ds4flow.runs.group import root_option, runs

TARGETS = {
    "mtp": ("flash-q2", True),
    "q2": ("flash-q2", False),
    "q2-imatrix": ("flash-q2-imatrix", False),
    "q4": ("flash-q4", False),
    "q4-imatrix": ("flash-q4-imatrix", False),
}
"""Download target to the model option that names its repository, and whether it is the MTP file."""


@click.command("download")
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.option("--to", "folder", metavar="DIR", help="Folder for the file. [DS4_GGUF_DIR, gguf]")
@click.option("--token", help="Access token of the hub. [HF_TOKEN, cached login]")
@click.option("--endpoint", metavar="URL", help="Another hub.")
@click.option("--offline", is_flag=True, help="No request; check what is there.")
def download(
    target: str, folder: str | None, token: str | None, endpoint: str | None, offline: bool
) -> None:
    """Fetch a model file of DeepSeek-V4-Flash, resumed and checked; what is there is kept."""
    from ds4flow import env
    from ds4flow.config import compose
    from ds4flow.fetching import fetch_shown
    from ds4flow.hub import HubFile

    option, is_mtp = TARGETS[target]
    words = [f"{v.key}={v.value}" for v in env.read() if v.key.startswith("download.")]
    config = compose([f"model={option}", *words])
    model = config.model
    file = HubFile(
        model.repo,
        model.mtp_file if is_mtp else model.file,
        sha256=model.mtp_sha256 if is_mtp else model.sha256,
    )
    path = fetch_shown(
        file,
        Path(folder or config.download.folder),
        token=token,
        endpoint=endpoint,
        offline=offline,
        link=None if is_mtp else "ds4flash.gguf",
    )
    click.echo(path)


@click.command("inspect")
@click.argument(
    "paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
)
@click.option("--json", "json_output", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--ctx",
    "context",
    type=click.IntRange(min=1),
    default=32768,
    show_default=True,
    metavar="N",
    help="Context to size the cache for, in tokens.",
)
@click.option(
    "--bandwidth", type=float, metavar="GB/S", help="Memory bandwidth, for the speed it allows."
)
@click.option(
    "--convert-mtp",
    "convert",
    is_flag=True,
    help="Write the MTP block in the other layout; nextn needs the main file too.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="The converted file."
)
def inspect(
    paths: tuple[Path, ...],
    json_output: bool,
    context: int,
    bandwidth: float | None,
    convert: bool,
    output: Path | None,
) -> None:
    """Say what GGUF files are, whether they run and what that costs.

    Exit 1 when one cannot run, 3 when one is cut short.
    """
    from ds4flow.doctor import inspect_command

    sys.exit(inspect_command(paths, json_output, context, bandwidth, convert, output))


@click.command("synth")
@click.argument("path", metavar="FILE")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
def synth(path: str, words: tuple[str, ...]) -> None:
    """Write a random-weight model and its MTP file: preset=tiny|medium|flash-slice|flash-shares.

    Every dimension and weight type of the preset can be changed by KEY=VALUE.
    """
    from ds4flow.synth import synth_command

    sys.exit(synth_command(path, words))


@click.command("verify")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--depths", default="1-8", show_default=True, help="Draft depths, as 1-8 or 0,2,4.")
@click.option(
    "-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be repeated."
)
@click.option(
    "--drafter", type=click.Choice(["mtp", "lying", "oracle"]), default="mtp", show_default=True
)
def verify(overrides: tuple[str, ...], depths: str, prompts: tuple[str, ...], drafter: str) -> None:
    """Prove that speculation equals greedy decoding here: tokens, logits bits and cache state.

    Runs pipeline=parity for every depth and prompt and prints a table; exit 1 on a difference. With
    pipeline=graph, and where a run would take the decode graph, that is what is verified.
    """
    from ds4flow.verification import verify_command

    sys.exit(verify_command(overrides, depths, prompts, drafter))


@click.command("bench")
@click.argument("model", metavar="[FILE]", default="demo")
@click.option("--mtp", metavar="FILE", help="GGUF file with the MTP block.")
@click.option(
    "--kernels",
    default="auto",
    show_default=True,
    help="cpu, cpu-int8, gpu, reference or static.",
)
@click.option(
    "--synth",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of synth-flash: a changed dimension or weight type. May be repeated.",
)
@click.option("--profile", help="official or plain.  [official; plain for the demo model]")
@click.option("--threads", default="1", show_default=True, metavar="N,..")
@click.option("--only", default="", help="Of machine,start,speed,verify,products,decoding,graph.")
@click.option("--contexts", default="64,1024", show_default=True, metavar="N,..")
@click.option("--widths", default="1-8", show_default=True, help="Rows of a verify pass.")
@click.option("--width-context", default=1024, show_default=True, metavar="N")
@click.option("--drafts", default="1,2,auto", show_default=True, help="Depths to compare.")
@click.option(
    "--oracle",
    multiple=True,
    default=("0.8,0.8",),
    show_default=True,
    help="Synthetic drafts: acceptance by position. May be repeated.",
)
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option("--peer", type=click.Choice(["llama.cpp"]), help="Interleave another engine.")
@click.option("--cold", is_flag=True, help="Also time a start without compiled kernels.")
@click.option("--check/--no-check", default=True, help="Compare with greedy bit by bit.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--warmup", default=1, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Generated in a run.")
@click.option("--chunk", default=64, show_default=True)
@click.option("--fill-cap", default=2048, show_default=True, help="Rows really prefilled.")
@click.option("--seed", default=0, show_default=True)
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
@click.option("--json", metavar="FILE", help="Write the results as JSON.")
@click.option("--csv", metavar="FILE", help="Write the results as CSV.")
def bench(**options: Any) -> None:
    """Measure FILE (the demo model without one): speeds, cost by width, speculation, start.

    FILE may be synth-flash: Flash's dimensions with random weights, made on the device.

    What is compared is interleaved in one run; medians and spread are shown.
    """
    from ds4flow.bench.command import bench_command
    from ds4flow.bench.plan import BenchOptions
    from ds4flow.bench.settings import Settings

    names = ("repeats", "warmup", "tokens", "chunk", "fill_cap", "seed", "clock")
    settings = Settings(**{name: options.pop(name) for name in names})
    if options["model"] == "demo":
        folder = resources.files("ds4flow.demo")
        options["model"] = str(folder / "ds4flow-demo.gguf")
        options["mtp"] = options["mtp"] or str(folder / "ds4flow-demo-mtp.gguf")
        options["profile"] = options["profile"] or "plain"
    options["profile"] = options["profile"] or "official"
    sys.exit(bench_command(BenchOptions(settings=settings, **options)))


@click.command("report")
@click.argument("word", metavar="[RUN|SWEEP]", default="latest")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The page.  [report.html in the run directory]",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the charts as PNG and SVG too; needs ds4flow[report].",
)
def report(word: str, output: Path | None, plots: Path | None) -> None:
    """Write one HTML page about a run or a sweep; it opens offline.

    RUN is a path, latest, NAME, NNNN or NAME/NNNN.
    """
    from ds4flow.report.command import report_command

    click.echo(report_command(word, output, plots))


@click.command("replay")
@click.argument("word", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--drop", multiple=True, metavar="KEY", help="Leave out a key that is gone.")
@click.option("--other-weights", is_flag=True, help="Run with model files other than the run's.")
@click.option("--config-dir", metavar="DIR", help="A folder with more YAML.  [the run's own]")
@root_option
def replay(word: str, overrides: tuple[str, ...], root: Path, **options: Any) -> None:
    """Do RUN again in a new directory, and compare what comes out; exit 1 when it differs.

    Config and weights are the run's. With KEY=VALUE, which changes them, a difference is no error.
    """
    from ds4flow.replay import replay_command
    from ds4flow.runs.record import Run, resolve_run

    sys.exit(replay_command(Run.open(resolve_run(word, root)), root, overrides, **options))


class _WithArms(click.Command):
    """Keeps apart what follows each `--`; click itself would lose where the first one stood."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parts: list[list[str]] = [[]]
        for word in args:
            if word == "--":
                parts.append([])
            else:
                parts[-1].append(word)
        ctx.meta["ds4flow.arms"] = parts[1:]
        return super().parse_args(ctx, parts[0])


@click.command("ab", cls=_WithArms)
@click.argument(
    "words",
    nargs=-1,
    metavar="[KEY=VALUE].. {A.yaml B.yaml | -- [KEY=VALUE].. -- [KEY=VALUE]..}",
    shell_complete=completion.complete_override,
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Pairs that are measured.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Pairs that are run first and discarded.",
)
@click.option(
    "--allow", default="", metavar="NAME,..", help="Of weights,prompts,machine: may differ."
)
@click.option("--json", "as_json", is_flag=True, help="Print ab.json instead of the table.")
@flag_options(REQUEST_FLAGS)
@click.option("--config-dir", metavar="DIR", help="A folder with more YAML, searched as well.")
@click.pass_context
def ab(click_context: click.Context, words: tuple[str, ...], allow: str, **options: Any) -> None:
    """Compare two configs, run in turn (ABBA): speed pair by pair, and whether the texts agree.

    The arms are YAML files of overrides or stand after --; words and flags before hold for both,
    where an arm does not say otherwise. Exit 1 when texts differ that had to be equal.
    """
    from ds4flow.ab.command import Options, ab_command, parse_allow

    flags = given_flags(REQUEST_FLAGS, options, words)
    for flag in REQUEST_FLAGS:
        del options[flag.parameter]
    made = Options(allow=parse_allow(allow), **options)
    sys.exit(ab_command(words, flags, click_context.meta["ds4flow.arms"], made))


@click.command("whatif")
@click.argument("word", metavar="RUN", default="latest")
@click.option("--depth", "depths", default="", metavar="N,..", help="As 0-8 or 1,2,auto.  [all]")
@click.option("--margin", "margins", default="", metavar="F,..", help="Margins.  [1]")
@click.option("--gate", "gates", default="", metavar="F,..", help="Gates.  [the run's own]")
@click.option("--json", "as_json", is_flag=True, help="Print the predictions as JSON.")
@root_option
def whatif(word: str, root: Path, **options: Any) -> None:
    """Tell from one traced RUN what other depths, margins and gates would do, without the model.

    Trace one with: ds4flow run mtp.draft=8 mtp.probe=true trace=full
    """
    from ds4flow.runs.record import Run, resolve_run
    from ds4flow.whatif.command import whatif_command

    whatif_command(Run.open(resolve_run(word, root)), root, **options)


COMMANDS = (ab, bench, download, inspect, replay, report, runs, synth, verify, whatif)
