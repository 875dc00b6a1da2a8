"""Model files by content: what a run records of one, and a sweep compares."""

from __future__ import annotations

from typing import Any

from ds4flow.gguf import GgufFile

_HASHED_BELOW = 1 << 30
"""Larger files are hashed only when a checksum was given; their size and date stand for them."""


def facts(file: GgufFile, checked: str | None = None) -> dict[str, Any]:
    """What a run records of a model file: path, bytes, shards, date, and SHA-256.

    `checked` is the digest that the file was found to have; a large file without has none.
    """
    if checked is None and file.size < _HASHED_BELOW:
        checked = file.sha256()
    return {
        "path": str(file.path.resolve()),
        "bytes": file.size,
        "shards": len(file.shards),
        "modified": file.path.stat().st_mtime,
        "sha256": checked and checked.lower(),
    }
