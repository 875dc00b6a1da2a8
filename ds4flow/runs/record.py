"""Run directories as records: read what is there, also of runs in progress and crashed ones.

Reads files only, without torch or omegaconf. What a run did not get to write is empty, never an
error; a directory that holds no run is one.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds4flow.errors import Ds4FlowError, UsageError, near_match
from ds4flow.runs import ROOT as ROOT

RECORD, SUMMARY, CYCLES, TOKENS = "run.json", "summary.json", "cycles.jsonl", "tokens.json"
SWEEP, PROMPTS, LATEST = "sweep.json", "prompts.jsonl", "latest"


@dataclass(frozen=True)
class Run:
    """One run directory, or one prompt's directory of a prompt set (`part` is its name then).

    `facts` is the content of run.json, empty where a run was killed before it wrote any.
    """

    path: Path
    facts: dict[str, Any]
    part: str = ""

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Read the record in `path`; Ds4FlowError when no run lies there."""
        path = Path(path)
        part = path.name if (path.parent / PROMPTS).is_file() else ""
        if (path / RECORD).is_file():
            return cls(path, _read_json(path / RECORD), part)
        if part and path.is_dir() and (path.parent / RECORD).is_file():
            return cls(path, _read_json(path.parent / RECORD), part)
        raise Ds4FlowError(f"{path} holds no run", f"a run directory has a file {RECORD}")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key of the resolved config, dotted, with its value."""
        return {key: item["value"] for key, item in self._items.items()}

    @cached_property
    def origins(self) -> dict[str, str]:
        """Where each value of `config` came from: default, group, preset, cli, flag or env."""
        return {key: str(item.get("source", "")) for key, item in self._items.items()}

    @property
    def _items(self) -> dict[str, dict[str, Any]]:
        items = self.facts.get("config")
        if not isinstance(items, dict):
            return {}
        return {
            key: item for key, item in items.items() if isinstance(item, dict) and "value" in item
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty when the run did not get to write it."""
        return _read_json(self.path / SUMMARY)

    @cached_property
    def status(self) -> str:
        """running, complete, failed, interrupted; killed (its process is gone) or unknown."""
        status = str(self.facts.get("status", "unknown"))
        return "killed" if status == "running" and _is_gone(self.facts) else status

    @cached_property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt; empty when the run did not get to write them."""
        return list(_read_json(self.path / TOKENS).get("prompt", ()))

    @cached_property
    def tokens(self) -> list[int]:
        """Token ids of the output; of a run that did not end by itself, those of its cycles."""
        found = _read_json(self.path / TOKENS).get("output")
        if found is not None:
            return list(found)
        return [token for cycle in self.cycles() for token in cycle.get("tokens", ())]

    @cached_property
    def text(self) -> str:
        """The output text."""
        return _read_text(self.path / "output.txt")

    @cached_property
    def prompt(self) -> str:
        """The prompt text."""
        return _read_text(self.path / "prompt.txt")

    @cached_property
    def pieces(self) -> dict[int, str]:
        """The text of every token id of the run; lone surrogates are bytes of split characters."""
        return {int(id): text for id, text in _read_json(self.path / "pieces.json").items()}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` by `pieces`; an id without a piece is shown as <id>."""
        text = "".join(self.pieces.get(token, f"<{token}>") for token in tokens)
        return text.encode(errors="surrogateescape").decode(errors="replace")

    def cycles(self) -> Iterator[dict[str, Any]]:
        """The lines of cycles.jsonl in order; a last line that was cut is left out.

        Raises Ds4FlowError for a line before the last that is not JSON.
        """
        path = self.path / CYCLES
        broken = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if broken:
                        raise Ds4FlowError(
                            f"{path}: line {broken} is not JSON", "the file was damaged or edited"
                        )
                    try:
                        cycle = json.loads(line)
                    except ValueError:
                        broken = number
                        continue
                    if isinstance(cycle, dict):
                        yield cycle
        except FileNotFoundError:
            return
        except OSError as error:
            raise Ds4FlowError(f"cannot read {path}: {error.strerror}", "") from None


def find_runs(root: str | Path = ROOT) -> list[Path]:
    """Every run directory below `root`, jobs of sweeps included, in order of name and number.

    Links are not followed, and nothing inside a run is looked at.
    """
    found: list[Path] = []
    waiting = [os.fspath(root)]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:  # gone meanwhile, or not ours to read
            continue
        if any(entry.name == RECORD for entry in entries):
            found.append(Path(folder))
            continue
        waiting.extend(
            entry.path
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        )
    return sorted(found, key=natural)


def find_parts(path: str | Path) -> list[Path]:
    """The directories of the prompts of a set, in order; empty for a run of one prompt."""
    parts = [part for part in Path(path).glob("prompt-*-*") if part.is_dir()]
    return sorted(parts, key=natural)


def resolve_run(word: str | Path, root: str | Path = ROOT, *, sweeps: bool = False) -> Path:
    """The directory that a user means: a path, `latest`, NAME, NAME/NNNN, NNNN or NAME/latest.

    With `sweeps` a sweep's directory is an answer too. Raises UsageError for none and for several.
    """
    root, word = Path(root), str(word).rstrip("/") or "/"
    for path in (Path(word), root / word):
        path = path.parent if path.name == RECORD else path
        if _is_run(path) or (path / SWEEP).is_file():
            return _chosen(path, word, sweeps=sweeps)
    above, _, last = word.rpartition("/")
    if above and last.startswith("prompt-"):  # a prompt of a set, whose run may be named shortly
        part = resolve_run(above, root) / last
        if _is_run(part):
            return part
    runs = find_runs(root)
    if not runs:
        raise UsageError(f"there are no runs in {root}", "make one with: ds4flow run")
    folder = word.removesuffix(f"/{LATEST}")  # where the file system has no links
    if word == LATEST or (root / folder).is_dir():
        below = runs if word == LATEST else [run for run in runs if (root / folder) in run.parents]
        if below:
            newest = max(below, key=_started)
            return newest.parent if sweeps and (newest.parent / SWEEP).is_file() else newest
    parts = Path(word).parts
    places = [path for path in _numbered(runs) if _is_named(path.relative_to(root).parts, parts)]
    if len(places) == 1:
        return _chosen(places[0], word, sweeps=sweeps)
    known = [label(run, root) for run in runs]
    if places:
        names = ", ".join(label(path, root) for path in places)
        raise UsageError(f"{word} is the number of several runs", f"type one of {names}")
    raise UsageError(
        f"there is no run {word} in {root}",
        near_match(word, known) or "see what there is with: ds4flow runs ls",
    )


def is_running(record: Path) -> bool:
    """Whether a record (run.json, sweep.json) says running and its process is not known to be gone.

    False without a record.
    """
    facts = _read_json(record)
    return facts.get("status") == "running" and not _is_gone(facts)


def label(path: Path, root: str | Path = ROOT) -> str:
    """How a run is named on screen: below `root` NAME/NNNN, elsewhere its path."""
    try:
        return str(path.relative_to(root))
    except ValueError:
        return str(path)


def natural(path: Path) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Sort key that puts the number 10 after 9 in every part of a path."""
    return tuple(
        tuple(
            (int(piece), "") if index % 2 else (0, piece)
            for index, piece in enumerate(re.split(r"([0-9]+)", part))
        )
        for part in path.parts
    )


def _is_run(path: Path) -> bool:
    return (path / RECORD).is_file() or (
        (path.parent / PROMPTS).is_file() and (path / "prompt.txt").is_file()
    )


def _chosen(path: Path, word: str, *, sweeps: bool) -> Path:
    path = path.parent / path.readlink() if path.is_symlink() else path
    if sweeps or _is_run(path):
        return path
    raise UsageError(
        f"{word} is a sweep, not a run",
        f"name one of its jobs, as {word}/0; ds4flow runs ls 'run~{path.name}/' lists them",
    )


def _numbered(runs: list[Path]) -> list[Path]:
    """Numbered directories: runs, and the sweeps that hold runs."""
    sweeps = {run.parent: None for run in runs if (run.parent / SWEEP).is_file()}
    return [path for path in (*runs, *sweeps) if path.name.isdecimal()]


def _is_named(parts: Sequence[str], typed: Sequence[str]) -> bool:
    """Whether `typed` is a run's name, with numbers written as one likes.

    A number alone names the run or sweep of any NAME, but no job of a sweep.
    """
    if len(typed) == 1:
        parts = parts[-1:] if len(parts) == 2 else ()
    return len(parts) == len(typed) and all(
        part == word or (part.isdecimal() and word.isdecimal() and int(part) == int(word))
        for part, word in zip(parts, typed, strict=True)
    )


def _started(path: Path) -> tuple[str, Any]:
    return str(_read_json(path / RECORD).get("started", "")), natural(path)


def _is_gone(facts: dict[str, Any]) -> bool:
    """Whether a run's process is known to be gone; of another host that cannot be told."""
    pid = facts.get("pid")
    if facts.get("host") != socket.gethostname() or not isinstance(pid, int) or os.name == "nt":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # someone else's process
        return False
    return False


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when it is missing, cut or of another kind."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
