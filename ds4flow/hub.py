"""Fetch model files into a folder: what lies there under a model's name is whole and checked.

A file is streamed to a `.part` name, compared with the hub's size and SHA-256 (which must agree
with the pinned ones), put on the disk and only then renamed. The check is remembered beside the
file in `NAME.verified.json`, so that 80 GB are hashed once and not at every run.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4flow.errors import Ds4FlowError
from ds4flow.hub_files import HubFile, PartFile, Verified, disk_error, hash_file, size_text
from ds4flow.hub_transfer import Hub, Remote

__all__ = ["HubFile", "fetch"]

_log = logging.getLogger(__name__)
_LOCK_POLL_S = 0.25


def fetch(
    file: HubFile,
    folder: Path,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
    link: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of `file` in `folder`, downloaded unless it is there and verified.

    A verified file costs no request, so a branch that has moved on is not looked at again; pin
    `sha256` or a commit to ask for other bytes. `token` None means what `huggingface_hub` finds
    (cached login); `endpoint` None its default hub. `offline` forbids every request: a file
    without a pinned checksum is then taken as it is, with a notice. `link` is the name of a
    relative link in `folder` that is set to the file. `progress(bytes so far, bytes in all)` and
    `notice(line)` (default: a logged warning) report. Raises Ds4FlowError for everything that the
    user, the network, the hub or the disk can cause; what had arrived is kept for the next call.
    """
    say = notice or _log.warning
    folder = Path(folder)
    target = folder / file.name
    if link is not None:
        _check_link(folder, link, file.name)
    if not _remembered(target, file):
        if offline:
            _accept_offline(target, file, endpoint, say)
        else:
            _fetch_locked(target, file, token, endpoint, progress, say)
    if link is not None and link != file.name:
        _set_link(folder, link, file.name, say)
    return target


def _fetch_locked(
    target: Path,
    file: HubFile,
    token: str | None,
    endpoint: str | None,
    progress: Callable[[int, int], None] | None,
    say: Callable[[str], None],
) -> None:
    """Download `file` to `target`, or check the one that is there, as the only process doing so."""
    hub = _hub(target, file, token, endpoint, say)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target, say):
            if _remembered(target, file):
                return  # the process that we waited for has done it
            remote = hub.resolve()
            if target.exists():
                _check_present(target, file, remote.size, remote.sha256, say)
                return
            if target.is_symlink():
                raise Ds4FlowError(
                    f"{target} is a link to {os.readlink(target)}, which is not there",
                    "mount or restore what it points to, or remove the link and download again",
                )
            _download(hub, remote, target, progress)
            _remember(target, file, remote.sha256, say)
    except OSError as error:
        raise disk_error(target, error) from error


def _download(
    hub: Hub, remote: Remote, target: Path, progress: Callable[[int, int], None] | None
) -> None:
    # The part's name holds the contents' digest: parts of other versions are never continued.
    path = target.with_name(f"{target.name}.{remote.sha256[:12]}.part")
    for stale in target.parent.glob(f"{glob.escape(target.name)}.{'[0-9a-f]' * 12}.part"):
        if stale != path:
            stale.unlink()
    part = PartFile(path)
    try:
        if part.length > remote.size:
            part.restart()
        _check_space(target, remote.size, part.length)
        if part.length:
            done, size = size_text(part.length), size_text(remote.size)
            hub.notice(f"{target.name}: resuming at {done} of {size}")
        kept = part.length
        hub.stream(remote, part, progress)
        if kept and part.digest.hexdigest() != remote.sha256:
            # A crash can leave a part whose last blocks never reached the disk.
            hub.notice(f"{target.name}: the resumed file is damaged; starting from the beginning")
            part.restart()
            hub.stream(remote, part, progress)
        found = part.digest.hexdigest()
        if found != remote.sha256:
            part.restart()
    finally:
        part.close()
        if not part.length:
            path.unlink(missing_ok=True)
    if found != remote.sha256:
        raise Ds4FlowError(
            f"{hub.file}: wrong bytes arrived (SHA-256 {found}, not {remote.sha256}); thrown away",
            "run it again; if it happens twice, a proxy or the disk is damaging the file",
        )
    os.replace(path, target)


def _check_space(target: Path, size: int, kept: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < size - kept:
        more = f", {size_text(size - kept)} of it still to come" if kept else ""
        raise Ds4FlowError(
            f"{target.name} needs {size_text(size)}{more}, "
            f"but {target.parent} has only {size_text(free)} free",
            "free some space, or choose another folder with DS4_GGUF_DIR",
        )


def _check_present(
    target: Path, file: HubFile, size: int | None, sha256: str, say: Callable[[str], None]
) -> None:
    """Accept and remember the file at `target`, or raise: a file of the user's is not replaced."""
    left = "it is left alone; move it away or delete it, then download again"
    try:
        found = target.stat().st_size
        if size is not None and found != size:
            raise Ds4FlowError(f"{target} is not {file}: {found} bytes, not {size}", left)
        note = Verified.read(target)
        if note is None:
            say(f"{target.name}: checking {size_text(found)} that are already there")
        digest = note.sha256 if note else hash_file(target)
    except OSError as error:
        raise Ds4FlowError(
            f"cannot read {target}: {error.strerror or error}", "make it a file that you may read"
        ) from error
    if digest != sha256:
        raise Ds4FlowError(f"{target} is not {file}: SHA-256 {digest}, not {sha256}", left)
    _remember(target, file, sha256, say)


def _accept_offline(
    target: Path, file: HubFile, endpoint: str | None, say: Callable[[str], None]
) -> None:
    if not target.is_file():
        raise _hub(target, file, None, endpoint, say).offline_error("offline mode is on")
    if file.sha256 is not None:
        _check_present(target, file, file.size, file.sha256, say)
        return
    if file.size is not None and target.stat().st_size != file.size:
        raise Ds4FlowError(
            f"{target} has {target.stat().st_size} bytes, not {file.size}",
            "it is not complete, or another file: copy it again or download it",
        )
    say(f"{target.name}: taken unchecked (offline, and no SHA-256 is pinned)")


def _hub(
    target: Path,
    file: HubFile,
    token: str | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> Hub:
    try:
        return Hub(file, target, token=token, endpoint=endpoint, notice=say)
    except ImportError as error:
        raise Ds4FlowError(
            f"{target} is not there, and downloads need huggingface_hub: {error}",
            "pip install 'huggingface_hub>=2,<3', or put the file there by hand",
        ) from error


@contextmanager
def _only_one(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `target` against every other process; waiting is announced once."""
    import filelock

    lock = filelock.FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"{target.name}: another process is downloading it; waiting")
        lock.acquire(poll_interval=_LOCK_POLL_S)
    try:
        yield
    finally:
        lock.release()


def _remembered(target: Path, file: HubFile) -> bool:
    """Whether `target` was verified as `file` and has not been touched since."""
    note = Verified.read(target)
    return note is not None and note.covers(file)


def _remember(target: Path, file: HubFile, sha256: str, say: Callable[[str], None]) -> None:
    try:
        Verified.write(target, file, sha256)
    except OSError as error:  # a folder that may only be read: check again next time
        say(f"{target.name}: verified, but this cannot be noted: {error.strerror or error}")


def _check_link(folder: Path, link: str, name: str) -> None:
    """Refuse a link name that would replace a real file: it may be the user's only copy."""
    path = folder / link
    if not link or link in (".", "..") or link != Path(link).name:
        raise Ds4FlowError(f"{link!r} is not a plain file name", "give a name like ds4flash.gguf")
    if link != name and path.exists() and not path.is_symlink():
        raise Ds4FlowError(
            f"{path} is a real file, so it cannot become the link to {name}",
            "move or rename it first; it is left alone",
        )


def _set_link(folder: Path, link: str, name: str, say: Callable[[str], None]) -> None:
    """Point `folder/link` at `name` in one step, so that no moment has neither old nor new."""
    _check_link(folder, link, name)
    path = folder / link
    if path.is_symlink() and os.readlink(path) == name:
        return
    fresh = folder / f".{link}.{os.getpid()}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        os.replace(fresh, path)
    except OSError as error:
        say(f"{path} could not be made a link to {name}: {error.strerror or error}")
