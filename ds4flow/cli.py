"""The `ds4flow` command: click owns the flags, Hydra owns `key=value`.

Starting is fast: nothing heavy is imported before it is known what to do.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import click

from ds4flow import __version__, commands, completion
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.flags import FLAGS, flag_options, given_flags


class _Reporting(click.Group):
    """Shows a Ds4FlowError of any command as two lines, and exits with its code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Ds4FlowError as error:
            error.show()
            sys.exit(error.exit_code)
        finally:
            gc.enable()


@click.group(cls=_Reporting, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ds4flow")
def main() -> None:
    """Exact speculative decoding for DeepSeek-V4 GGUF models."""


@main.command(
    epilog="Texts are taken literally: prompt='def f(x): return {x}'. A DS4_* variable overrides "
    "the command line."
)
@click.argument(
    "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completion.complete_override
)
@flag_options(FLAGS)
@click.option(
    "-m",
    "short_m",
    is_flag=False,
    flag_value="",
    metavar="FILE|KEY=V1,V2",
    help="Before a word with '=', or alone: --multirun. Before a file: --model.",
)
@click.option("--multirun", is_flag=True, help="Sweep over the values of KEY=V1,V2.")
@click.option("--resume", metavar="DIR", help="Run what is missing or failed in a sweep.")
@click.option("--cfg", type=click.Choice(["job", "hydra", "all"]), help="Print the config only.")
@click.option("--resolve", is_flag=True, help="With --cfg: resolve interpolations.")
@click.option("--package", metavar="KEY", help="With --cfg: print this part only.")
@click.option(
    "--info",
    type=click.Choice(["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]),
    help="Print how the config is made up.",
)
@click.option("--config-dir", metavar="DIR", help="A folder with more YAML, searched as well.")
def run(overrides: tuple[str, ...], short_m: str | None, **options: Any) -> None:
    """Generate text, in a run directory of its own.

    KEY=VALUE changes any key of the config and GROUP=OPTION any group; --cfg job shows them.
    """
    # What is imported stays: looking for garbage among it takes a twentieth of the start.
    gc.disable()  # until torch is imported
    gc.set_threshold(100_000, 50, 100)
    words = list(overrides)
    multirun = bool(options["multirun"])
    if short_m is not None:
        if short_m and "=" not in short_m:
            options["model"] = short_m
        else:
            multirun = True
            words = ([short_m] if short_m else []) + words
    multirun = multirun or any(word.lower() == "hydra.mode=multirun" for word in words)

    showing = _showing(options)
    if not showing:
        from ds4flow import preload

        preload.begin()
    from ds4flow import env
    from ds4flow.config import asks_for_sweep, validate_all
    from ds4flow.execute import hand_over, new_directory, run_composed
    from ds4flow.overrides import assemble

    flags, config_dir = given_flags(FLAGS, options, words), options["config_dir"]
    if options["resume"]:
        if showing:
            raise click.UsageError("--resume goes without --cfg and --info")
        from ds4flow import sweeps

        given = sweeps.Given(tuple(words), tuple(flags), config_dir)
        sys.exit(sweeps.resume(options["resume"], given))
    multirun = multirun or asks_for_sweep(words, config_dir=config_dir)
    typed = tuple(words)
    words, notices = assemble(words, flags, env.read(), multirun=multirun)
    if multirun and env.ranks() is not None:
        raise UsageError(
            "a sweep cannot run in the processes of torchrun",
            "give torchrun one run, without several values for a key",
        )
    words, configs = validate_all(words, config_dir=config_dir, multirun=multirun)
    ranks = env.ranks()
    if ranks is not None and ranks.rank > 0:
        if not showing:
            from ds4flow.followers import silent

            with silent(ranks.rank) as folder:
                run_composed(configs[0], folder, config_dir=config_dir)
        return
    for notice in notices:
        click.echo(notice, err=True)
    if showing:
        hand_over([*showing, *(["--config-dir", config_dir] if config_dir else []), *words])
    elif multirun:
        from ds4flow import sweeps

        sys.exit(sweeps.start(sweeps.Given(typed, tuple(flags), config_dir), words, configs))
    else:
        run_composed(configs[0], new_directory(configs[0]), config_dir=config_dir)


def _showing(options: dict[str, Any]) -> list[str]:
    """Hydra's own flags, when the config is only to be shown."""
    shown = [
        word for name in ("cfg", "info") if options[name] for word in (f"--{name}", options[name])
    ]
    if not shown and (options["resolve"] or options["package"]):
        raise click.UsageError("--resolve and --package go with --cfg")
    if options["resolve"]:
        shown.append("--resolve")
    if options["package"]:
        shown += ["--package", options["package"]]
    return shown


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion(shell: str) -> None:
    """Print the script that makes SHELL complete ds4flow's words.

    bash: eval "$(ds4flow completion bash)" in ~/.bashrc; zsh likewise; fish: pipe it into source.
    """
    click.echo(completion.script(shell, main))


for _command in commands.COMMANDS:
    main.add_command(_command)
