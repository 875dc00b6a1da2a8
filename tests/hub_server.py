"""A small model hub on this machine: two servers, one request log, and faults on demand.

The *hub* answers `/REPO/resolve/REVISION/FILE` like the real one: metadata in the headers and a
redirect to a signed address of the *store*, which serves ranges and must never see a token. The
next request of a kind takes the first fault that was queued for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass(frozen=True)
class Seen:
    """One request: who got it, method, path without query, Range and Authorization if sent."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Fault:
    """What one request gets instead of the right answer; the store's body faults are counted."""

    status: int | None = None  # answer with this status and no more
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # with `status`: this body
    cut_after: int | None = None  # send so many bytes of the body, then drop the connection
    short_by: int = 0  # announce and send so many bytes fewer
    change: Callable[[bytes], bytes] | None = None  # other bytes, with matching lengths
    no_range: bool = False  # answer 200 with everything, whatever was asked for
    shift: int = 0  # answer another part than the one that was asked for
    no_length: bool = False  # announce no length: the connection's end is the body's end
    gate: threading.Event | None = None  # after half of the body, wait for this
    started: threading.Event | None = None  # set once half of the body is out


class _Server(ThreadingHTTPServer):
    """A server that minds its own mistakes, but not a client that hangs up."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.mistakes: list[BaseException] = []

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError):
            self.mistakes.append(error)


class HubServer:
    """The two servers; use as a context manager. `url` is the endpoint to give to a client."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.seen: list[Seen] = []
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.token: str | None = None  # if set, the hub wants this one
        self.gated = False
        self.headers: dict[str, str | None] = {}  # overrides of the metadata; None leaves one out
        self.direct = False  # serve files from the hub itself, without the redirect
        self._servers: dict[str, _Server] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HubServer:
        for kind in ("hub", "store"):
            handler = type("Handler", (_Handler,), {"hub": self, "kind": kind})
            server = _Server(handler)
            thread = threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
            )
            thread.start()
            self._servers[kind] = server
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()
        for server in self._servers.values():
            for mistake in server.mistakes:
                raise mistake

    @property
    def url(self) -> str:
        return self.address("hub")

    def address(self, kind: str) -> str:
        return f"http://127.0.0.1:{self._servers[kind].server_address[1]}"

    def add(self, repo: str, name: str, data: bytes) -> str:
        """Store a file; return its SHA-256 in hex."""
        self.files[repo, name] = data
        return hashlib.sha256(data).hexdigest()

    def fail(self, what: str, *faults: Fault) -> None:
        """Queue faults for `head` (metadata), `get` (the hub's GET), `body` (store) or `list`."""
        self.faults[what].extend(faults)

    def bodies(self) -> list[Seen]:
        """The requests that asked for the bytes of a file."""
        kind = "hub" if self.direct else "store"
        return [seen for seen in self.seen if seen.server == kind and seen.method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    kind: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub, token = self.hub, self.headers.get("Authorization")
        hub.seen.append(Seen(self.kind, self.command, path, self.headers.get("Range"), token))
        try:
            if self.kind == "store":
                self.send_file(path.strip("/").split("/", 2)[2], self.fault("body"))
            elif path.startswith("/api/models/"):
                self.send_list(path)
            else:
                self.send_resolve(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def fault(self, what: str) -> Fault | None:
        queue = self.hub.faults[what]
        return queue.popleft() if queue else None

    def send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def may_read(self) -> bool:
        hub = self.hub
        if hub.token is None or self.headers.get("Authorization") == f"Bearer {hub.token}":
            return True
        if hub.gated:
            self.send(403, {"X-Error-Code": "GatedRepo"})
        else:
            self.send(401, {"X-Error-Message": "Invalid username or password."})
        return False

    def send_list(self, path: str) -> None:
        repo = path.removeprefix("/api/models/").split("/tree/")[0]
        fault = self.fault("list")
        if fault is not None and fault.status:
            self.send(fault.status, fault.headers)
            return
        if self.may_read():
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for (owner, name), data in self.hub.files.items()
                if owner == repo
            ]
            self.send(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def send_resolve(self, path: str) -> None:
        hub = self.hub
        fault = self.fault("head" if self.command == "HEAD" else "get")
        if fault is not None and fault.status:
            self.send(fault.status, fault.headers, fault.body or b"")
            return
        match = re.fullmatch(r"/(.+?/.+?)/resolve/(.+?)/(.+)", path)
        assert match is not None, path
        repo, revision, name = match.groups()
        if not self.may_read():
            return
        if not any(owner == repo for owner, _ in hub.files):
            self.send(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
        elif (repo, name) not in hub.files:
            self.send(404, {"X-Error-Code": "EntryNotFound"})
        else:
            data = hub.files[repo, name]
            headers: dict[str, str | None] = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{hub.address('store')}/{repo}/{name}?signature=x",
                **hub.headers,
            }
            if hub.direct:
                headers["Location"] = None
            sent = {key: value for key, value in headers.items() if value is not None}
            if "Location" in sent:
                self.send(302, sent)
            elif self.command == "HEAD":
                self.send(200, {**sent, "Content-Length": str(len(data))})
            else:
                self.send_file(name, self.fault("body"))

    def send_file(self, name: str, fault: Fault | None) -> None:
        fault = fault or Fault()
        if fault.status:
            self.send(fault.status, fault.headers, fault.body or b"")
            return
        data = next(data for (_, other), data in self.hub.files.items() if other == name)
        if fault.change is not None:
            data = fault.change(data)
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        status, body = 200, data
        if match is not None and not fault.no_range:
            start = int(match[1]) + fault.shift
            status, body = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = body[: len(body) - fault.short_by]
        headers["Content-Length"] = str(len(body))
        self.send_response(status)
        for key, value in headers.items():
            if not (fault.no_length and key == "Content-Length"):
                self.send_header(key, value)
        if fault.no_length:
            self.send_header("Connection", "close")
        self.end_headers()
        if fault.cut_after is not None:
            self.wfile.write(body[: fault.cut_after])
            self.wfile.flush()
            self.close_connection = True
            # Without an orderly end, but with everything before it delivered.
            self.connection.shutdown(socket.SHUT_WR)
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if fault.started is not None:
            fault.started.set()
        if fault.gate is not None:
            fault.gate.wait(20)
        self.wfile.write(body[half:])
