"""What `ds4flow inspect` does, without its flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from ds4flow.doctor.convert import convert_mtp
from ds4flow.doctor.examine import examine
from ds4flow.doctor.report import FileReport
from ds4flow.doctor.show import print_report
from ds4flow.errors import ModelFileError, TruncatedFileError, UsageError
from ds4flow.gguf import GgufFile


def inspect_command(
    paths: Sequence[Path],
    json_output: bool,
    context: int,
    bandwidth: float | None,
    convert: bool,
    output: Path | None,
) -> int:
    """Print the report on `paths`, as JSON if asked; return the exit code.

    It is 1 if a file cannot run, and that of TruncatedFileError if one is cut short.

    With `convert` the one MTP file among them is written to `output` in the other layout instead;
    a main file among them lends what the nextn layout repeats. Raises UsageError and the errors of
    `convert_mtp`.
    """
    if output is not None and not convert:
        raise UsageError("--output is for --convert-mtp", "add --convert-mtp or drop --output")
    report = examine(paths, context=context, bandwidth_gbs=bandwidth)
    if convert:
        return _convert(report.files, output, json_output)
    if json_output:
        click.echo(report.to_json())
    else:
        print_report(report, Console())
    if any(file.truncated for file in report.files):
        return TruncatedFileError.exit_code
    return 0 if report.ok else 1


def _convert(files: Sequence[FileReport], output: Path | None, json_output: bool) -> int:
    for file in files:
        if file.role == "unreadable":
            kind = TruncatedFileError if file.truncated else ModelFileError
            raise kind(file.problems[0].what, file.problems[0].fix)
    with_block = [file for file in files if file.drafter is not None and file.drafter.layout]
    blocks = [file for file in with_block if file.role == "mtp"] or with_block
    if len(blocks) != 1:
        raise UsageError(
            f"--convert-mtp needs one file with an MTP block, {len(blocks)} were given",
            "ds4flow inspect --convert-mtp MTP.gguf [MAIN.gguf]",
        )
    mains = [file for file in files if file.role == "main" and file is not blocks[0]]
    if len(mains) > 1:
        raise UsageError(
            f"--convert-mtp takes one main file, {len(mains)} were given",
            "give the one that the MTP block belongs to",
        )
    source = GgufFile.open(blocks[0].path)
    main = GgufFile.open(mains[0].path) if mains else None
    layout: Literal["mtp.0", "nextn"] = (
        "nextn" if "mtp.0.e_proj.weight" in source.tensors else "mtp.0"
    )
    ending = "nextn" if layout == "nextn" else "mtp-support"
    target = output or source.path.with_name(f"{source.path.stem}.{ending}.gguf")
    convert_mtp(source, target, layout, main)
    written = GgufFile.open(target)
    if json_output:
        facts = {"path": str(target), "layout": layout, "bytes": written.size}
        click.echo(json.dumps(facts | {"tensors": len(written.tensors)}, indent=2))
    else:
        click.echo(
            f"{target}: {layout} layout, {len(written.tensors)} tensors, {written.size} bytes"
        )
    return 0
