"""One job: from a composed config to a finished run directory.

Whatever stops a run, its directory keeps what was produced and says how it ended.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import run_and_report
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, run_job
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from ds4flow import origin, rundir
from ds4flow.checks import check
from ds4flow.config import initialized  # registers the schema, also in a launcher's process
from ds4flow.errors import Ds4FlowError
from ds4flow.explain import explained
from ds4flow.objective import score
from ds4flow.overrides import key_of, quoted, refuse_two_prompts
from ds4flow.provenance import PARENT, provenance
from ds4flow.quoting import uninterpolated
from ds4flow.recorded import exit_code, recorded, terminable
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run

_log = logging.getLogger("ds4flow")

RUN_DIRECTORY = "hydra.run.dir"


class JobFailed(CompactHydraException):
    """A job of a sweep that failed; Hydra shows it without a traceback and goes on."""


@hydra.main(version_base="1.3", config_path="pkg://ds4flow.conf", config_name="config")
def job(config: DictConfig) -> float | None:
    """What Hydra calls for a run, and for each job of a sweep; returns the value of `objective`.

    More is better. None when the run has no such number.
    """
    node = HydraConfig.get()
    try:
        if node.mode == RunMode.MULTIRUN:
            return _job_of_a_sweep(config, node)
        return execute(config, node)
    except Ds4FlowError as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except BrokenPipeError:
        raise SystemExit(141) from None


def _job_of_a_sweep(config: DictConfig, node: HydraConf) -> float | None:
    """One job, with its row in the sweep's record; what fails it, fails it alone."""
    from ds4flow.sweeps import rows

    with rows.recorded(node) as ending:
        try:
            rows.refuse_changed(config, node)
            ending.value = execute(config, node)
        except Ds4FlowError as error:
            error.show()
            raise JobFailed("\n".join(error.lines)) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            print(
                f"error: {rows.reason_of(error)}\n"
                f"  the traceback is in {node.runtime.output_dir}/run.log",
                file=sys.stderr,
            )
            raise
    return ending.value


def new_directory(config: DictConfig, key: str = RUN_DIRECTORY) -> Path:
    """Make the directory that `key` of a composed config asks for."""
    with explained():
        template = str(OmegaConf.select(config, key))
    return rundir.allocate(template)


def run_composed(
    config: DictConfig, path: str | Path, *, config_dir: str | Path | None = None
) -> None:
    """Run a checked config in the directory `path`, as Hydra would after composing it again.

    `config` carries Hydra's node, which becomes what it would be if `path` had been typed;
    `config_dir` is what it was composed with.
    """
    node = config.hydra
    words = [word for word in node.overrides.hydra if key_of(word) != RUN_DIRECTORY]
    words.append(f"{RUN_DIRECTORY}={quoted(str(path))}")
    if node.mode is None:
        node.mode = RunMode.RUN
        words.append("hydra.mode=RUN")
    node.run.dir = uninterpolated(str(path))
    node.overrides.hydra = words
    with initialized(config_dir):
        run_and_report(lambda: _run_job(config))


def _run_job(config: DictConfig) -> None:
    """The part of Hydra's own start of a run that follows composing."""
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name="config")
    done = run_job(
        task_function=job,
        config=config,
        job_dir_key=RUN_DIRECTORY,
        job_subdir_key=None,
        hydra_context=HydraContext(GlobalHydra.instance().config_loader(), callbacks),
    )
    callbacks.on_run_end(config=config, config_name="config", job_return=done)
    _ = done.return_value  # raises what stopped the job


def hand_over(arguments: list[str]) -> None:
    """Call Hydra's entry point, which reads `sys.argv`: for a sweep, and to show a config."""
    before = sys.argv
    sys.argv = ["ds4flow", *arguments]
    try:
        job()
    finally:
        sys.argv = before


def execute(config: DictConfig, node: HydraConf) -> float | None:
    """Run the pipeline of `config` in the directory that Hydra made; `node` is Hydra's own part.

    Returns the value of `objective`, None when the run has none.
    """
    run = RunDir.create(node.runtime.output_dir, _facts(config, node))
    with recorded(run), terminable():
        with ThreadPoolExecutor(3) as pool, _origin_recorded(run, pool):
            if node.mode == RunMode.MULTIRUN:
                check(config)  # a single run's config was checked when it was composed
            refuse_two_prompts([*node.overrides.task, f"prompts={config.prompts or 'null'}"])
            _import_torch(pool)
        from ds4flow.prompt_run import perform

        _log.info("run started in %s", run.path)
        perform(config, run)
    return score(Run.open(run.path).summary, config.objective.metric, config.objective.max_relaxed)


@contextmanager
def _origin_recorded(run: RunDir, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Record machine and source tree; commands that tell them run during what is done inside."""
    machine, tree = pool.submit(origin.machine), pool.submit(origin.source_tree)
    try:
        yield
    finally:
        facts, patch = tree.result()
        run.record(machine=machine.result(), git=facts)
        if patch:
            run.write("source.patch", patch)


def _import_torch(pool: ThreadPoolExecutor) -> None:
    """Import torch, which a wrong config need not wait for.

    On a thread with an empty stack: as deep in calls as a job of Hydra is, CPython may map and
    unmap a piece of its stack at every other call, thousands of times during this import.
    """
    if "torch" not in sys.modules:
        pool.submit(importlib.import_module, "torch").result()
        gc.freeze()  # what is imported stays
    gc.enable()


def _facts(config: DictConfig, node: HydraConf) -> dict[str, Any]:
    parent = OmegaConf.select(config, PARENT)
    return {
        **({} if parent is None else {"parent": OmegaConf.to_container(parent)}),
        "command": ["ds4flow", *node.overrides.task],
        "identity": "exact",
        "versions": origin.versions(),
        "choices": {
            group: option
            for group, option in OmegaConf.to_container(node.runtime.choices).items()  # type: ignore[union-attr]
            if not str(group).startswith("hydra/")
        },
        "config": provenance(config, node),
    }
