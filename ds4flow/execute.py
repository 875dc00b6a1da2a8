"""One job: from a composed config to a finished run directory.

Whatever stops a run, its directory keeps what was produced and says how it ended.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import ds4flow.config  # noqa: F401 - registers the schema, also in a launcher's process
from ds4flow import origin
from ds4flow.checks import check
from ds4flow.errors import Ds4FlowError
from ds4flow.provenance import provenance
from ds4flow.rundir import RunDir, Status

_log = logging.getLogger("ds4flow")


class JobFailed(CompactHydraException):
    """A job of a sweep that failed; Hydra shows it without a traceback and goes on."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def report(error: Ds4FlowError) -> None:
    """Show an error of the user's as two lines on stderr."""
    for line in (f"error: {error.what}", f"  {error.fix}" if error.fix else ""):
        if line:
            print(line.replace("\n", "\\n"), file=sys.stderr)


@hydra.main(version_base="1.3", config_path="pkg://ds4flow.conf", config_name="config")
def job(config: DictConfig) -> None:
    """What Hydra calls for a run, and for each job of a sweep."""
    node = HydraConfig.get()
    try:
        execute(config, node)
    except Ds4FlowError as error:
        if node.mode == RunMode.MULTIRUN:
            raise JobFailed(f"error: {error.what}\n  {error.fix}") from None
        report(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(143 if isinstance(error, Terminated) else 130) from None
    except BrokenPipeError:
        raise SystemExit(141) from None


def execute(config: DictConfig, node: HydraConf) -> None:
    """Run the pipeline of `config` in the directory that Hydra made; `node` is Hydra's own part."""
    run = RunDir.create(node.runtime.output_dir, _facts(config, node))
    with _recorded(run), _terminable():
        tree, patch = origin.source_tree()
        run.record(git=tree)
        if patch:
            run.write("source.patch", patch)
        check(config)
        # These import torch, which a wrong config must not wait for.
        from ds4flow.pipeline import State
        from ds4flow.wiring import build_pipeline, read_prompt

        prompt = read_prompt(config)
        run.write("prompt.txt", prompt)
        pipeline = build_pipeline(config)
        _log.info("run started in %s", run.path)
        pipeline.run(State(run=run, prompt=prompt))


def _facts(config: DictConfig, node: HydraConf) -> dict[str, Any]:
    return {
        "command": [Path(sys.argv[0]).name, *node.overrides.task],
        "identity": "exact",
        "versions": origin.versions(),
        "machine": origin.machine(),
        "choices": {
            group: option
            for group, option in OmegaConf.to_container(node.runtime.choices).items()  # type: ignore[union-attr]
            if not str(group).startswith("hydra/")
        },
        "config": provenance(config, node),
    }


@contextmanager
def _recorded(run: RunDir) -> Iterator[None]:
    """Write into run.json how the run ended, whichever way it did."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | BrokenPipeError)
        status: Status = "interrupted" if stopped else "failed"
        text = f"{type(error).__name__}: {error}"
        expected = stopped or isinstance(error, Ds4FlowError)
        _log.error("run %s: %s", status, text, exc_info=not expected)
        # What stopped the run is what the user must see, not a disk that is full on top.
        with suppress(Ds4FlowError, OSError):
            run.finish(status, text)
        raise
    _log.info("run complete")
    run.finish("complete")


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a run that a scheduler ends is recorded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
