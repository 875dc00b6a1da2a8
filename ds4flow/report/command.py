"""`ds4flow report`: where the page goes, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ds4flow.errors import Ds4FlowError
from ds4flow.report.figure import Figure
from ds4flow.report.page import figures_of_run, run_page
from ds4flow.report.sweep_figures import sweep_figures
from ds4flow.report.sweep_page import sweep_page
from ds4flow.runs.record import ROOT, SWEEP, Run, resolve_run
from ds4flow.runs.sweep import Sweep

PAGE = "report.html"


def report_command(word: str, output: Path | None, plots: Path | None) -> Path:
    """Write the page of the run or sweep that `word` names, and return its path.

    Without `output` it goes into the run's own directory. `plots` is a folder for PNG and SVG
    images.
    """
    path = resolve_run(word, ROOT, sweeps=True)
    target = output or path / PAGE
    page, figures = _drawn(path)
    if plots is not None:
        from ds4flow.report.plots import write_plots

        write_plots(figures, plots)
    try:
        _write(target, page)
    except OSError as error:
        raise Ds4FlowError(
            f"cannot write {target}: {error.strerror}", "choose another place with -o FILE"
        ) from None
    return target


def _drawn(path: Path) -> tuple[str, Sequence[Figure]]:
    """The page of a run or a sweep, and the figures on it."""
    if (path / SWEEP).is_file():
        sweep = Sweep.open(path)
        return sweep_page(sweep), sweep_figures(sweep)
    run = Run.open(path)
    return run_page(run), figures_of_run(run)


def _write(target: Path, page: str) -> None:
    """Write a whole page or none; characters that no text may hold become question marks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_bytes(page.encode(errors="replace"))
    fresh.replace(target)
