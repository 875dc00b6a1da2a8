"""`ds4flow report`: where the page goes, and what is printed."""

from __future__ import annotations

import os
from pathlib import Path

from ds4flow.errors import Ds4FlowError
from ds4flow.report.page import figures_of_run, run_page
from ds4flow.runs.record import ROOT, Run, resolve_run

PAGE = "report.html"


def report_command(word: str, output: Path | None, plots: Path | None) -> Path:
    """Write the page of the run or sweep that `word` names, and return its path.

    Without `output` it goes into the run's own directory. `plots` is a folder for PNG and SVG
    images.
    """
    path = resolve_run(word, ROOT, sweeps=True)
    run = Run.open(path)
    target = output or path / PAGE
    page = run_page(run)
    if plots is not None:
        from ds4flow.report.plots import write_plots

        write_plots(figures_of_run(run), plots)
    try:
        _write(target, page)
    except OSError as error:
        raise Ds4FlowError(
            f"cannot write {target}: {error.strerror}", "choose another place with -o FILE"
        ) from None
    return target


def _write(target: Path, page: str) -> None:
    """Write a whole page or none; characters that no text may hold become question marks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_bytes(page.encode(errors="replace"))
    fresh.replace(target)
