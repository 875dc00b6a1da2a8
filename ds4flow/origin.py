"""Where a run came from: versions, machine, and the source tree with its uncommitted changes.

Promise: applying the recorded patch to the recorded revision gives the code that ran, except for
large untracked files, which are named.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("ds4flow", "torch", "numpy", "gguf", "tokenizers", "hydra-core", "omegaconf", "numba")
_LARGEST_UNTRACKED = 1 << 20
_TIMEOUT = 20


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a result; None when not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """The machine, in words and numbers that matter for speed."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "executable": sys.executable,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def source_tree(start: Path | None = None) -> tuple[dict[str, Any], bytes]:
    """The git state of the tree that holds the code, and its uncommitted changes as a patch.

    Untracked files up to 1 MiB are part of the patch; larger ones are listed. Outside a repository
    the facts say so and the patch is empty.
    """
    start = Path(__file__).parent if start is None else start
    if _git(start, "ls-files", "--error-unmatch", "__init__.py") is None:
        start = Path.cwd()
    top = _git(start, "rev-parse", "--show-toplevel")
    revision = _git(start, "rev-parse", "--verify", "HEAD")
    if top is None or revision is None:
        return {"revision": None, "note": "not in a git repository with a commit"}, b""
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    diff = _git(root, "diff", *_DIFF, "HEAD") or b""
    patch, skipped = _untracked(root)
    patch = diff + patch
    facts: dict[str, Any] = {
        "root": str(root),
        "revision": revision.decode().strip(),
        "dirty": bool(patch or skipped),
    }
    if skipped:
        facts["untracked_not_in_patch"] = skipped
    return facts, patch


# Whatever the user's git settings, the patch must be one that `git apply` takes.
_DIFF = (
    *("--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--no-renames", "--src-prefix=a/", "--dst-prefix=b/"),
)


def _untracked(root: Path) -> tuple[bytes, list[str]]:
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or b""
    patch, skipped = b"", []
    for raw in sorted(filter(None, listed.split(b"\0"))):
        name = os.fsdecode(raw)
        path = root / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_UNTRACKED:
            skipped.append(os.fsencode(name).decode("utf-8", "replace"))
            continue
        patch += _git(root, "diff", *_DIFF, "--no-index", "--", os.devnull, name) or b""
    return patch, skipped


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of one git command, or None when git is missing, fails or hangs.

    `diff --no-index` exits with 1 when it found a difference, which is what it was asked for.
    """
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    wanted = (0, 1) if "--no-index" in arguments else (0,)
    return done.stdout if done.returncode in wanted else None
