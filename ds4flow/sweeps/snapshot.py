"""A copy of all YAML that a sweep can compose from, made before its first job.

Every job, in whatever process and however late, composes from the copy; so editing the originals
changes no job of a sweep that has started.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from omegaconf import DictConfig

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.quoting import quoted

FOLDER = ".frozen"
"""Below the sweep's directory; hidden, so that nothing looks for runs in it."""

SHIPPED = "conf"
_MOST_FILES = 5000
_SEARCHED = "hydra.searchpath"


def take(composed: DictConfig, sweep: Path) -> list[str]:
    """Copy the YAML that `composed` could come from; return the names of the further folders.

    `composed` carries Hydra's node, which lists the places. The packages of Hydra and its plugins
    are left where they are.
    """
    further: list[str] = []
    for source in composed.hydra.runtime.config_sources:
        if source.provider == "main":
            _copy(_root(source.schema, source.path), sweep / FOLDER / SHIPPED)
        elif source.provider.startswith(("command-line", _SEARCHED)):
            name = f"more-{len(further) + 1}"
            _copy(_root(source.schema, source.path), sweep / FOLDER / name)
            further.append(name)
    return further


def arguments(sweep: Path, further: list[str]) -> list[str]:
    """What makes Hydra compose from the copy instead of the originals."""
    folder = (sweep / FOLDER).resolve()
    words = ["--config-path", str(folder / SHIPPED)]
    if further:
        paths = ",".join(quoted(f"file://{folder / name}") for name in further)
        words.append(f"{_SEARCHED}=[{paths}]")
    return words


def _root(schema: str, path: str) -> Traversable:
    return resources.files(path) if schema == "pkg" else Path(path)


def _copy(root: Traversable, target: Path) -> None:
    count = 0
    try:
        target.mkdir(parents=True)
        for file, name in _yaml_files(root, ()):
            count += 1
            if count > _MOST_FILES:
                raise UsageError(
                    f"{root} holds more than {_MOST_FILES} YAML files",
                    "give a folder that holds config alone as --config-dir",
                )
            path = target.joinpath(*name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read_bytes())
    except OSError as error:
        raise Ds4FlowError(
            f"cannot copy the config in {root} to {target}: {error.strerror or error}",
            "make room, or make the files readable",
        ) from None


def _yaml_files(
    folder: Traversable, name: tuple[str, ...]
) -> Iterator[tuple[Traversable, tuple[str, ...]]]:
    """YAML files below a folder; not those in run directories, nor in links that may circle."""
    entries = list(folder.iterdir())
    if any(entry.name in ("run.json", "sweep.json") for entry in entries):
        return
    for entry in entries:
        if entry.name.endswith((".yaml", ".yml")) and entry.is_file():
            yield entry, (*name, entry.name)
        elif entry.is_dir() and not entry.name.startswith((".", "__pycache__")):
            if name and isinstance(entry, Path) and entry.is_symlink():
                continue
            yield from _yaml_files(entry, (*name, entry.name))
