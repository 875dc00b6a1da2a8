"""The files that a sweep's jobs read, as they were at its start: weights and prompts.

A job that finds another file under the same name fails instead of mixing results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ds4flow import model_files, packaged
from ds4flow.errors import Ds4FlowError
from ds4flow.gguf import GgufFile
from ds4flow.prompt_set import SHIPPED


def identify(configs: Iterable[DictConfig]) -> dict[str, dict[str, Any]]:
    """`{path: facts}` of the files that the configs name and that are here already."""
    found: dict[str, dict[str, Any]] = {}
    for config in configs:
        for _, path in _named(config):
            if path.as_posix() not in found:
                facts = _facts(path)
                if facts is not None:
                    found[path.as_posix()] = facts
    return found


def changed(frozen: Mapping[str, Mapping[str, Any]], config: DictConfig) -> dict[str, Path]:
    """`{key: path}` of the files of `config` that are not the frozen ones any more."""
    found = {}
    for key, path in _named(config):
        before = frozen.get(path.as_posix())
        if before is not None and not _same(before, path):
            found[key] = path
    return found


def refuse_changed(frozen: Mapping[str, Mapping[str, Any]], config: DictConfig) -> None:
    """Raise Ds4FlowError for a file that is not the one the sweep began with."""
    for key, path in changed(frozen, config).items():
        raise Ds4FlowError(
            f"{key}: {path} is not the file that the sweep began with",
            "put that file back and resume, or start a new sweep",
        )


def _named(config: DictConfig) -> Iterator[tuple[str, Path]]:
    model = config.model
    for key, path, name in (
        ("model.path", model.path, model.file),
        ("model.mtp_path", model.mtp_path, model.mtp_file),
    ):
        if path is not None:
            yield key, packaged.resolve(path, key)
        elif name is not None and (key == "model.path" or model.path is None):
            yield key, Path(config.download.folder) / Path(name).name
    if config.prompt_file is not None:
        yield "prompt_file", Path(config.prompt_file)
    if config.prompts is not None:
        yield "prompts", packaged.resolve(SHIPPED.get(config.prompts, config.prompts), "prompts")


def _facts(path: Path) -> dict[str, Any] | None:
    """None for a file that is not there or that no job can read; the jobs will say so."""
    try:
        if path.suffix == ".gguf":
            return model_files.facts(GgufFile.open(path))
        content = path.read_bytes()
        return {
            "path": str(path.resolve()),
            "bytes": len(content),
            "modified": path.stat().st_mtime,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    except (OSError, Ds4FlowError):
        return None


def _same(before: Mapping[str, Any], path: Path) -> bool:
    """Whether the file is what it was: unchanged by size and date, or of the same digest."""
    now = _facts(path)
    if now is None or now["bytes"] != before["bytes"]:
        return False
    if before["sha256"] and now["sha256"]:
        return bool(now["sha256"] == before["sha256"])
    return bool(now["modified"] == before["modified"])
