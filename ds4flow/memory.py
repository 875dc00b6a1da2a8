"""How much memory this process may still take, and whether weights and cache fit into it.

Promise: a limit is found where there is one (the machine's, and that of every control group around
the process); where none can be read, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds4flow import origin
from ds4flow.errors import Ds4FlowError

GIB = 1 << 30
MIB = 1 << 20


class _Layout(NamedTuple):
    """Where a version of control groups keeps its numbers; `cold` are file pages that can go."""

    base: str
    limit: str
    usage: str
    cold: str


_GROUPS_V1 = _Layout(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_GROUPS_V2 = _Layout("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: str | Path = "/") -> int | None:
    """Bytes that can be used without swapping, file pages that can be dropped included.

    The least of what the machine has and what control groups (v1 and v2) leave. None where the
    system does not tell. `root` is where /proc and /sys lie.
    """
    root = Path(root)
    found = list(_group_limits(root))
    machine = _fields(root / "proc/meminfo").get("MemAvailable")
    if machine is not None:
        found.append(machine * 1024)
    elif root == Path("/") and (total := origin.machine()["memory_bytes"]):
        found.append(int(total))
    return min(found, default=None)


def _group_limits(root: Path) -> Iterator[int]:
    """What the control groups of this process leave, file pages that can be dropped included."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            layout = _GROUPS_V2
        elif "memory" in names.split(","):
            layout = _GROUPS_V1
        else:
            continue
        # in a container the groups above may be hidden, and the path may start above the mount
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            folder = root / layout.base / group
            most, used = _number(folder / layout.limit), _number(folder / layout.usage)
            if most is not None and used is not None:
                yield max(0, most - used + _fields(folder / "memory.stat").get(layout.cold, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # `max` is no limit


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name value` or `name: value unit`."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def check_memory(
    *, weights: int, cache: int, context: int, per_token: float, available: int | None
) -> None:
    """Raise Ds4FlowError with all sizes (bytes) when weights and cache exceed what is available.

    `per_token` is what one more token of context adds to the cache.
    """
    if available is None or weights + cache <= available:
        return
    what = (
        f"the weights ({size(weights)}) and a cache for runtime.context={context} ({size(cache)}) "
        f"exceed the {size(available)} of memory that are available"
    )
    if weights > available:
        fix = (
            "use a file with a smaller quantisation, free memory, or set runtime.memory to the GiB "
            "to go ahead with"
        )
    else:
        tokens = int((available - weights) / per_token * 0.95) if per_token else 0
        fix = f"lower runtime.context (about {tokens} tokens would fit), or free memory"
        if tokens < 2:
            fix = "free memory, or use a file with a smaller quantisation"
    raise Ds4FlowError(what, fix)


def size(count: float) -> str:
    """Bytes in GiB, or in MiB when there are few."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
