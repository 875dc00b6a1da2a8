"""Model files by content: what a run records of one, and a sweep compares."""

from __future__ import annotations

from typing import Any

from ds4flow.gguf import GgufFile

_HASHED_BELOW = 1 << 30
"""Larger files are hashed only when a checksum was given; their size and date stand for them."""


def facts(file: GgufFile) -> dict[str, Any]:
    """What a run records of a model file: path, bytes, shards, date, and SHA-256 if small."""
    return {
        "path": str(file.path.resolve()),
        "bytes": file.size,
        "shards": len(file.shards),
        "modified": file.path.stat().st_mtime,
        "sha256": file.sha256() if file.size < _HASHED_BELOW else None,
    }
