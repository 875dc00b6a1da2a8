"""Another engine on the same file, asked through a child process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ds4flow.errors import Ds4FlowError, UsageError, near_match

PEERS = ("llama.cpp",)


@dataclass(frozen=True)
class PeerRun:
    """One run of the peer: seconds of prefill and of the greedy steps, and the tokens."""

    prefill: float
    decode: float
    tokens: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Decoded tokens per second."""
        return len(self.tokens) / self.decode


class PeerStoppedError(Ds4FlowError):
    """The peer's process ended before it answered."""


class Peer:
    """llama.cpp through llama-cpp-python with its defaults; a context manager.

    On some CPUs (with AMX) its repacked weights do not fit this architecture and its process ends
    at loading. It is then started again without them, and `note` says so.

    Raises UsageError for a peer that is unknown or not installed, Ds4FlowError when it cannot
    load the file or stops.
    """

    def __init__(self, name: str, path: Path, *, threads: int, context: int) -> None:
        check_peer(name)
        self.name = name
        self.note = ""
        job = {"path": str(path), "threads": threads, "context": context}
        try:
            answer = self._load({**job, "repack": True})
        except PeerStoppedError:
            answer = self._load({**job, "repack": False})
            self.note = "without repacked weights, with which it stopped"
        self.version = str(answer["version"])
        self.load_seconds = float(answer["seconds"])

    def _load(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds4flow.bench.peer_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            return self._ask(op="load", **job)
        except Ds4FlowError:
            self.close()
            raise

    def run(self, prompt: Sequence[int], count: int, *, clock: str = "wall") -> PeerRun:
        """Prefill `prompt`, then `count` greedy steps; `clock` is a name of CLOCKS."""
        answer = self._ask(op="run", prompt=list(prompt), count=count, clock=clock)
        return PeerRun(
            float(answer["prefill"]), float(answer["decode"]), tuple(map(int, answer["tokens"]))
        )

    def _ask(self, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerStoppedError(
                f"{self.name} stopped at {request['op']} (exit code {self._process.wait()})",
                "its build may not know this architecture; leave --peer out",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Ds4FlowError(
                f"{self.name} cannot run this file: {answer['error']}",
                "its build may not know this architecture; leave --peer out",
            )
        return answer

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_peer(name: str) -> None:
    """Raise UsageError unless the peer is known and installed."""
    if name not in PEERS:
        raise UsageError(
            f"--peer {name} is not a known engine",
            near_match(name, PEERS) or f"use one of {', '.join(PEERS)}",
        )
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError(
            "--peer llama.cpp needs llama-cpp-python, which is not installed",
            "pip install 'ds4flow[peer]' (it compiles for some minutes)",
        )
