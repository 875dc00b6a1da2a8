"""Look at model files without reading their weights, and say whether they run.

Promise: whatever lies under a path becomes an entry of the report with its reason; only a wrong
argument raises. A file that is no DeepSeek-V4 model costs no more than its header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds4flow.doctor.report import FileReport, Problem, Report, Split, TypeCount
from ds4flow.errors import ModelFileError, TruncatedFileError, UsageError
from ds4flow.gguf import SHARD_NAME, GgufFile, TensorInfo
from ds4flow.model.config import ARCHITECTURE, SUPPORT_ARCHITECTURE, check_architecture

LARGEST_CONTEXT = 1 << 31


def examine(
    paths: Sequence[Path], *, context: int = 32768, bandwidth_gbs: float | None = None
) -> Report:
    """Report on files, shards of split models and folders of them, and on how they fit together.

    `context` is the number of tokens that the cache is sized for, `bandwidth_gbs` the memory
    bandwidth in 1e9 bytes per second. Raises UsageError for an impossible argument only.
    """
    if not paths:
        raise UsageError("no file was given", "ds4flow inspect FILE.gguf ...")
    if not 1 <= context <= LARGEST_CONTEXT:
        raise UsageError(f"context {context} is not a number of tokens", "use a positive number")
    if bandwidth_gbs is not None and not (math.isfinite(bandwidth_gbs) and bandwidth_gbs > 0):
        raise UsageError(
            f"bandwidth {bandwidth_gbs} is not a speed", "give GB/s, for example --bandwidth 400"
        )
    reports: list[FileReport | None] = []
    models: list[GgufFile] = []
    for path in _distinct(paths):
        try:
            file = GgufFile.open(path)
        except ModelFileError as error:
            reports.append(_unreadable(path, error))
            continue
        if file.metadata.get("general.architecture") in (ARCHITECTURE, SUPPORT_ARCHITECTURE):
            models.append(file)
            reports.append(None)
        else:
            reports.append(_of_another_kind(file))
    found = iter(_models(models, context, bandwidth_gbs))
    files = tuple(report if report is not None else next(found) for report in reports)
    return Report(files, all(file.ok for file in files))


def _models(files: list[GgufFile], context: int, bandwidth: float | None) -> list[FileReport]:
    if not files:
        return []
    # what checks the tensors imports torch, which takes longer than all the rest
    from ds4flow.doctor.models import examine_models

    return examine_models(files, context, bandwidth)


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """The paths with folders opened, and only one path of each split model and each file."""
    found: dict[object, Path] = {}
    for path in paths:
        for file in _files_of(Path(path)):
            found.setdefault(_identity(file), file)
    return list(found.values())


def _files_of(path: Path) -> list[Path]:
    try:
        path = path.expanduser()
        if path.is_dir():
            return sorted(p for p in path.iterdir() if p.suffix == ".gguf") or [path]
    except (OSError, ValueError, RuntimeError):
        pass  # opening it will say why
    return [path]


def _identity(path: Path) -> object:
    try:
        path = path.resolve()
    except (OSError, ValueError, RuntimeError):
        return path
    match = SHARD_NAME.fullmatch(path.name)
    return (path.parent, match["stem"], match["total"]) if match else path


def _unreadable(path: Path, error: ModelFileError) -> FileReport:
    try:
        size = path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        size = None
    return FileReport(
        path=str(path),
        role="unreadable",
        ok=False,
        verdict="does not run: the file cannot be read",
        problems=(Problem(error.what, error.fix),),
        size=size,
        split=_split(path),
        truncated=isinstance(error, TruncatedFileError),
    )


def _split(path: Path) -> Split | None:
    """Which shards are there, judged by their names alone."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["total"]) < 2:
        return None
    total = int(match["total"])
    names = [f"{match['stem']}-{i:05d}-of-{total:05d}.gguf" for i in range(1, total + 1)]
    return Split(total, tuple(name for name in names if not (path.parent / name).exists()))


def _of_another_kind(file: GgufFile) -> FileReport:
    architecture = file.metadata.get("general.architecture")
    problem = Problem("", "")
    try:
        check_architecture(file)
    except ModelFileError as error:
        problem = Problem(error.what, error.fix)
    drafter = isinstance(architecture, str) and (
        "dflash" in architecture or "dspark" in architecture
    )
    return FileReport(
        path=str(file.path),
        role="dspark" if drafter else "other",
        ok=False,
        verdict="does not run: "
        + ("a DSpark drafter is not covered" if drafter else "another architecture"),
        problems=(problem,),
        size=file.size,
        split=Split(len(file.shards), ()) if len(file.shards) > 1 else None,
        architecture=architecture if isinstance(architecture, str) else None,
        name=text_of(file, "general.name"),
        census=census(file.tensors),
    )


def text_of(file: GgufFile, key: str) -> str | None:
    """A text value of the metadata, None when it is absent or of another type."""
    value = file.metadata.get(key)
    return value if isinstance(value, str) else None


def census(tensors: Mapping[str, TensorInfo]) -> tuple[TypeCount, ...]:
    """Tensors and bytes by ggml type, the most bytes first."""
    found: dict[str, list[int]] = {}
    for info in tensors.values():
        found.setdefault(info.type, []).append(info.nbytes)
    counts = [TypeCount(kind, len(sizes), sum(sizes)) for kind, sizes in found.items()]
    return tuple(sorted(counts, key=lambda count: (-count.bytes, count.type)))
