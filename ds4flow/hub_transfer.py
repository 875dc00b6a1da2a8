"""Talk to a model hub: bytes are counted on arrival, every refusal is one clear error.

`huggingface_hub` supplies addresses, tokens, metadata and the HTTP session. The bytes are streamed
here because its own download (version 2) throws a partial file away when it fails, and a model of
80 GB must be able to go on where it stopped, in the same run or in the next one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar
from urllib.parse import urlsplit

from ds4flow.errors import Ds4FlowError, near_match
from ds4flow.hub_files import SHA256, HubFile, PartFile

if TYPE_CHECKING:
    import httpx2

TRIES = 4  # failures in a row without one new byte
WAIT_S = 1.0  # before the second try; doubled after each further failure
LONGEST_WAIT_S = 300.0  # the hub's own rate window
TIMEOUT_S = 30.0  # to connect, and between two pieces of a body
_PAGES = {"text/html", "application/xhtml+xml", "application/json", "application/xml", "text/xml"}
_TOKEN_FIX = (
    "give a token (--token, HF_TOKEN or `hf auth login`) of an account that has accepted the "
    "model's terms, and check the name of the repository"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    """What the hub promises for a file: its address at one commit, its bytes and their SHA-256."""

    url: str
    size: int
    sha256: str


class Hub:
    """One hub as one user reaches it, for one file that is to lie at `target`."""

    def __init__(
        self,
        file: HubFile,
        target: Path,
        *,
        token: str | None,
        endpoint: str | None,
        notice: Callable[[str], None],
    ) -> None:
        self.file = file
        self.target = target
        self.token = token.strip() or None if token else None
        self.endpoint = endpoint.rstrip("/") if endpoint else None
        self.notice = notice
        self._received = 0
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise Ds4FlowError(
                "the hub token holds characters that no token has",
                "copy it again from the hub's page of access tokens; it starts with hf_",
            )
        self.url = self._address(file.revision)

    def resolve(self) -> Remote:
        """Ask the hub for commit, size and SHA-256; Ds4FlowError where it contradicts the pins."""
        from huggingface_hub import get_hf_file_metadata

        meta = self._persist(
            lambda: get_hf_file_metadata(
                self.url,
                token=self.token,
                timeout=TIMEOUT_S,
                endpoint=self.endpoint,
                library_name="ds4flow",
            )
        )
        file = self.file
        if meta.commit_hash is None:
            raise Ds4FlowError(
                f"{urlsplit(self.url).netloc} answers, but not like a model hub",
                "check the endpoint (HF_ENDPOINT), and that no proxy or login page is in between; "
                + self._by_hand(),
            )
        sha256 = meta.etag if meta.etag and SHA256.fullmatch(meta.etag) else file.sha256
        size = meta.size if meta.size is not None else file.size
        if sha256 is None or size is None:
            missing = "SHA-256" if sha256 is None else "size"
            raise Ds4FlowError(
                f"the hub gives no {missing} for {file}, so the file could not be checked",
                f"pin its {missing} in the model's configuration",
            )
        for what, pinned, found in (
            ("SHA-256", file.sha256, sha256),
            ("size", file.size, size),
        ):
            if pinned is not None and pinned != found:
                raise Ds4FlowError(
                    f"{file} has changed on the hub: {what} {found}, but {pinned} is pinned",
                    "pin the revision that you want, or update the pinned values after a look",
                )
        return Remote(self._address(meta.commit_hash), size, sha256)

    def stream(
        self, remote: Remote, part: PartFile, progress: Callable[[int, int], None] | None
    ) -> None:
        """Append to `part` until it has `remote.size` bytes, resuming as often as it takes.

        `progress(bytes so far, bytes in all)` is called after every piece. The bytes are counted
        here and nothing more: whoever calls compares `part.digest`.
        """
        report = progress or (lambda done, total: None)
        report(part.length, remote.size)
        while part.length < remote.size:
            self._persist(lambda: self._receive(remote, part, report))

    def _receive(self, remote: Remote, part: PartFile, report: Callable[[int, int], None]) -> None:
        import httpx2
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        headers = build_hf_headers(token=self.token, library_name="ds4flow")
        headers["Accept-Encoding"] = "identity"  # lengths and offsets are those of the file
        if part.length:
            headers["Range"] = f"bytes={part.length}-"
        # The hub's own address each time, not the storage address behind it: that one expires.
        with get_session().stream(
            "GET", remote.url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            self._check_answer(response, remote, part)
            for block in response.iter_bytes():
                if part.length + len(block) > remote.size:
                    part.restart()
                    raise Ds4FlowError(
                        f"{self.file}: more bytes arrive than the hub announced ({remote.size})",
                        f"try again later; {self._by_hand()}",
                    )
                part.write(block)
                self._received += len(block)
                report(part.length, remote.size)
        if part.length < remote.size:
            raise httpx2.ReadError(f"the answer ended at {part.length} of {remote.size} bytes")

    def _check_answer(self, response: httpx2.Response, remote: Remote, part: PartFile) -> None:
        """Refuse what is not the file before a byte of it is written; rewind if no range came."""
        import httpx2

        kind = response.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind in _PAGES:
            raise Ds4FlowError(
                f"{response.url.host} answered with a page ({kind}) instead of {self.file}",
                "a proxy or login page may be in between; " + self._by_hand(),
            )
        length = response.headers.get("Content-Length", "")
        plain = response.headers.get("Content-Encoding", "identity") == "identity"
        if response.status_code == 206:
            match = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "")
            )
            if match is None or int(match[1]) != part.length:
                raise httpx2.RemoteProtocolError("the answer is not the part that was asked for")
            if match[2] not in ("*", str(remote.size)):
                raise httpx2.RemoteProtocolError(f"the file there has {match[2]} bytes")
            return
        if plain and length.isdigit() and int(length) != remote.size:
            raise httpx2.RemoteProtocolError(f"the answer has {length} of {remote.size} bytes")
        if part.length:
            self.notice(f"{self.file.name}: the server cannot resume; starting from the beginning")
            part.restart()

    def _persist(self, action: Callable[[], T]) -> T:
        """Run `action` again after failures that may pass, `TRIES` times without a new byte."""
        import httpx2
        from huggingface_hub.errors import OfflineModeIsEnabled

        failures = 0
        while True:
            before = self._received
            try:
                return action()
            except (httpx2.HTTPError, httpx2.InvalidURL, OfflineModeIsEnabled) as error:
                failures = 1 if self._received > before else failures + 1
                self._refuse(error)
                reason = _reason(error)
                if failures >= TRIES:
                    raise self._gave_up(error, failures) from error
                wait = min(max(WAIT_S * 2 ** (failures - 1), _asked_wait(error)), LONGEST_WAIT_S)
                self.notice(f"{self.file.name}: {reason}; trying again in {wait:.0f} s")
                time.sleep(wait)

    def _gave_up(self, error: Exception, failures: int) -> Ds4FlowError:
        import httpx2

        host = urlsplit(self.url).netloc
        what = f"gave up on {self.file} after {failures} tries: {_reason(error)}"
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
            what = f"cannot reach {host} (no network?), tried {failures} times: {_reason(error)}"
        return Ds4FlowError(
            what,
            f"check the network and run it again (what has arrived is kept), {self._by_hand()}",
        )

    def _refuse(self, error: Exception) -> None:
        """Raise the Ds4FlowError for a failure that no second try can mend; else return."""
        import httpx2
        from huggingface_hub.errors import (
            GatedRepoError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        if isinstance(error, OfflineModeIsEnabled):
            raise self.offline_error("HF_HUB_OFFLINE is set") from error
        if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
            raise Ds4FlowError(
                f"{self.endpoint or self.url} is not the address of a hub: {error}",
                "give an endpoint like https://huggingface.co",
            ) from error
        response = getattr(error, "response", None)
        if response is None or response.status_code in (408, 429) or response.status_code >= 500:
            return
        status = response.status_code
        at_hub = response.url.netloc == httpx2.URL(self.url).netloc
        gated = isinstance(error, GatedRepoError)
        if status == 403 and not at_hub and not gated:
            return  # a storage address that has expired: the next try gets a new one
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            self._refuse_access(error, status, gated)
        if isinstance(error, RevisionNotFoundError):
            raise Ds4FlowError(
                f"{self.file.repo} has no revision {self.file.revision!r} (404)",
                "give a branch, tag or commit of that repository, like main",
            ) from error
        if status == 404 and at_hub:
            raise Ds4FlowError(
                f"there is no {self.file} on the hub (404)", self._nearest()
            ) from error
        raise Ds4FlowError(
            f"the hub refuses {self.file}: {_reason(error)}",
            f"try again later; {self._by_hand()}",
        ) from error

    def _refuse_access(self, error: Exception, status: int, gated: bool) -> NoReturn:
        from huggingface_hub.utils import build_hf_headers

        if gated:
            why = "is gated: only accounts that have accepted its terms may read it"
        elif "authorization" in build_hf_headers(token=self.token):
            why = "may not be read with this token, or does not exist"
        else:
            why = "may not be read without a token, or does not exist"
        raise Ds4FlowError(f"{self.file.repo} {why} ({status})", _TOKEN_FIX) from error

    def _nearest(self) -> str:
        """The fix for a name that is not there: the nearest one that is, where the hub lists it."""
        import httpx2
        from huggingface_hub import HfApi

        file = self.file
        try:
            api = HfApi(endpoint=self.endpoint, token=self.token)
            names = api.list_repo_files(file.repo, revision=file.revision)
        except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError):
            return "check the repository and the file name on the hub's page"
        # Quantisation names are long and alike, so the nearest one is worth showing even if far.
        hint = near_match(file.filename, names)
        models = [name for name in names if name.endswith(".gguf")]
        if hint or not models:
            return hint or f"{file.repo} holds no GGUF file; check the repository"
        return f"it holds {', '.join(sorted(models)[:8])}"

    def _address(self, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        try:
            return hf_hub_url(
                self.file.repo, self.file.filename, revision=revision, endpoint=self.endpoint
            )
        except ValueError as error:
            raise Ds4FlowError(
                f"{self.file.repo!r} is not the name of a hub repository",
                "give it as owner/name",
            ) from error

    def _by_hand(self) -> str:
        return f"or fetch {self.url} by other means and put it at {self.target}"

    def offline_error(self, why: str) -> Ds4FlowError:
        """The error for a file that is not there while downloads are off because of `why`."""
        return Ds4FlowError(
            f"{self.target} is not there, and nothing may be downloaded: {why}",
            f"switch offline mode off, {self._by_hand()}",
        )


def _reason(error: Exception) -> str:
    """One line for people about a failed request."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    return str(error).strip().split("\n")[0] or type(error).__name__


def _asked_wait(error: Exception) -> float:
    """Seconds that the server asked us to wait, 0 if it did not."""
    from huggingface_hub.utils import parse_ratelimit_headers

    response = getattr(error, "response", None)
    if response is None:
        return 0.0
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    after = response.headers.get("Retry-After", "").strip()
    return float(after) if after.isdigit() else 0.0
