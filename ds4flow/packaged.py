"""Files inside installed packages: `pkg://PACKAGE/NAME` as a path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ds4flow.errors import UsageError

PREFIX = "pkg://"


def resolve(path: str, key: str) -> Path:
    """The path that the value of `key` names; UsageError when there is no such package."""
    if not path.startswith(PREFIX):
        return Path(path)
    package, _, name = path.removeprefix(PREFIX).partition("/")
    try:
        return Path(str(resources.files(package) / name))
    except ModuleNotFoundError:
        raise UsageError(f"{path}: there is no package {package}", f"check {key}") from None
