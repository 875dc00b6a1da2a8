"""Downloads that a person watches: a progress bar and notices on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from ds4flow.hub import HubFile, fetch


def fetch_shown(
    file: HubFile,
    folder: Path,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
    link: str | None = None,
) -> Path:
    """`ds4flow.hub.fetch` with a bar that appears with the first bytes; returns the file's path."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(file.name, total=None, visible=False)
        return fetch(
            file,
            folder,
            token=token,
            endpoint=endpoint,
            offline=offline,
            link=link,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total, visible=True
            ),
            notice=lambda line: print(line, file=sys.stderr),
        )
