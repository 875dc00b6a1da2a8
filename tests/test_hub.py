"""Downloads against a small hub on this machine: a model's name never stands on wrong bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from ds4flow import hub_transfer
from ds4flow.errors import Ds4FlowError
from ds4flow.hub import HubFile, fetch
from ds4flow.hub_files import size_text
from tests.hub_server import COMMIT, Fault, HubServer

REPO = "owner/models"
NAME = "model-q2.gguf"
DATA = random.Random(1).randbytes(600_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
FILE = HubFile(REPO, NAME)


@pytest.fixture(autouse=True, scope="module")
def session() -> Iterator[None]:
    """One HTTP session for this module, which no proxy of the machine's gets in the way of."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        huggingface_hub.close_session()
        yield
        huggingface_hub.close_session()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with one file, seen by a user who has not logged in."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login" / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "login" / "stored"))
    with HubServer() as server:
        server.add(REPO, NAME, DATA)
        yield server


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, in seconds, which are not slept."""
    waited: list[float] = []
    monkeypatch.setattr(hub_transfer, "time", SimpleNamespace(sleep=waited.append))
    return waited


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gguf"


def get(hub: HubServer, folder: Path, file: HubFile = FILE, **options: object) -> Path:
    notices: list[str] = []
    options = {"endpoint": hub.url, "notice": notices.append, **options}
    return fetch(file, folder, **options)  # type: ignore[arg-type]


def refused(hub: HubServer, folder: Path, file: HubFile = FILE, **options: object) -> Ds4FlowError:
    """The error of a fetch that must fail, with both of its lines and exit code 1."""
    with pytest.raises(Ds4FlowError) as caught:
        get(hub, folder, file, **options)
    assert caught.value.what
    assert caught.value.fix
    assert "\n" not in caught.value.what + caught.value.fix
    assert caught.value.exit_code == 1
    return caught.value


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.part"))


def ranges(hub: HubServer) -> list[str | None]:
    return [seen.range for seen in hub.bodies()]


# --- the plain way


def test_download(hub: HubServer, folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    path = get(hub, folder, progress=lambda done, total: steps.append((done, total)))
    assert path == folder / NAME
    assert path.read_bytes() == DATA
    assert steps[0] == (0, len(DATA))
    assert steps[-1] == (len(DATA), len(DATA))
    assert steps == sorted(steps)
    assert {entry.name for entry in folder.iterdir()} == {
        NAME,
        f"{NAME}.verified.json",
        f".{NAME}.lock",
    }
    note = json.loads((folder / f"{NAME}.verified.json").read_text())
    assert note["sha256"] == SHA256
    assert note["size"] == len(DATA)
    # The bytes are asked for at the commit that was described, so a push in between cannot mix.
    resolves = [seen.path for seen in hub.seen if seen.server == "hub"]
    assert resolves == [f"/{REPO}/resolve/main/{NAME}", f"/{REPO}/resolve/{COMMIT}/{NAME}"]


def test_download_without_redirect_and_in_a_sub_folder(hub: HubServer, folder: Path) -> None:
    hub.direct = True
    hub.add(REPO, f"quants/{NAME}", DATA[:1000])
    hub.headers = {"ETag": f'"{hashlib.sha256(DATA[:1000]).hexdigest()}"', "X-Linked-ETag": None}
    hub.headers["X-Linked-Size"] = None
    path = get(hub, folder, HubFile(REPO, f"quants/{NAME}"))
    assert path == folder / NAME
    assert path.read_bytes() == DATA[:1000]


def test_verified_file_costs_no_request(hub: HubServer, folder: Path) -> None:
    get(hub, folder)
    asked = len(hub.seen)
    assert get(hub, folder) == folder / NAME
    assert get(hub, folder, HubFile(REPO, NAME, sha256=SHA256.upper())) == folder / NAME
    assert fetch(FILE, folder, endpoint="http://127.0.0.1:9") == folder / NAME
    assert len(hub.seen) == asked


def test_verified_file_is_asked_about_if_another_is_pinned(hub: HubServer, folder: Path) -> None:
    get(hub, folder)
    assert "size" in refused(hub, folder, HubFile(REPO, NAME, size=7)).what
    assert "SHA-256" in refused(hub, folder, HubFile(REPO, NAME, sha256="0" * 64)).what
    assert (folder / NAME).read_bytes() == DATA


def test_touched_file_is_hashed_again(hub: HubServer, folder: Path) -> None:
    path = get(hub, folder)
    os.utime(path, ns=(1, 1))
    bodies = len(hub.bodies())
    notices: list[str] = []
    get(hub, folder, notice=notices.append)
    assert len(hub.bodies()) == bodies
    assert "checking" in notices[0]
    notices.clear()
    get(hub, folder, notice=notices.append)
    assert not notices


def test_changed_bytes_with_the_old_size_are_seen(hub: HubServer, folder: Path) -> None:
    path = get(hub, folder)
    path.write_bytes(bytes(len(DATA)))
    os.utime(path, ns=(1, 1))
    error = refused(hub, folder)
    assert "SHA-256" in error.what
    assert "move it away" in error.fix
    assert path.read_bytes() == bytes(len(DATA))


@pytest.mark.parametrize("note", ["", "[1]", "{}", '{"size": 3}', "\x00"])
def test_damaged_note_is_no_verification(hub: HubServer, folder: Path, note: str) -> None:
    path = get(hub, folder)
    (folder / f"{NAME}.verified.json").write_text(note)
    path.write_bytes(DATA[:-1])
    error = refused(hub, folder)
    assert str(len(DATA) - 1) in error.what
    assert str(len(DATA)) in error.what


def test_file_put_there_by_hand_is_checked_and_kept(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    get(hub, folder)
    assert not hub.bodies()
    assert (folder / f"{NAME}.verified.json").exists()


def test_other_origin_is_asked_about(hub: HubServer, folder: Path) -> None:
    get(hub, folder)
    hub.add("other/models", NAME, DATA[::-1])
    assert SHA256 in refused(hub, folder, HubFile("other/models", NAME)).what


def test_link_that_leads_nowhere_is_left_alone(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).symlink_to("/nowhere/model.gguf")
    assert "/nowhere/model.gguf" in refused(hub, folder).what
    assert not hub.bodies()


# --- connections that end


def test_cut_connection_is_resumed_with_a_range(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(cut_after=200_000), Fault(cut_after=100_000))
    assert get(hub, folder).read_bytes() == DATA
    assert ranges(hub) == [None, "bytes=200000-", "bytes=300000-"]


def test_progress_renews_the_patience(hub: HubServer, folder: Path) -> None:
    hub.fail("body", *[Fault(cut_after=1000)] * (2 * hub_transfer.TRIES))
    assert get(hub, folder).read_bytes() == DATA


def test_gives_up_and_the_next_run_resumes(
    hub: HubServer, folder: Path, waits: list[float]
) -> None:
    hub.fail("body", Fault(cut_after=250_000), *[Fault(cut_after=0)] * (hub_transfer.TRIES - 1))
    error = refused(hub, folder)
    assert f"{hub_transfer.TRIES} tries" in error.what
    assert "kept" in error.fix
    assert waits == sorted(waits)
    assert len(waits) == hub_transfer.TRIES - 1
    assert not (folder / NAME).exists()
    assert [part.stat().st_size for part in parts(folder)] == [250_000]
    notices: list[str] = []
    steps: list[tuple[int, int]] = []
    get(hub, folder, notice=notices.append, progress=lambda *step: steps.append(step))
    assert (folder / NAME).read_bytes() == DATA
    assert ranges(hub)[-1] == "bytes=250000-"
    assert steps[0] == (250_000, len(DATA))
    assert "resuming" in notices[0]
    assert not parts(folder)


def test_interrupt_keeps_the_part_and_frees_the_lock(hub: HubServer, folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(hub, folder, progress=stop)
    (part,) = parts(folder)
    have = part.stat().st_size
    assert have > 100_000
    assert get(hub, folder).read_bytes() == DATA
    assert ranges(hub)[-1] == f"bytes={have}-"


def test_stalled_server_is_left(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_transfer, "TIMEOUT_S", 0.3)
    gate = threading.Event()
    hub.fail("body", Fault(gate=gate))
    assert get(hub, folder).read_bytes() == DATA
    assert ranges(hub) == [None, f"bytes={len(DATA) // 2}-"]
    gate.set()


def test_server_that_ignores_ranges(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(cut_after=200_000), Fault(no_range=True))
    notices: list[str] = []
    assert get(hub, folder, notice=notices.append).read_bytes() == DATA
    assert "cannot resume" in notices[-1]


def test_wrong_part_is_not_taken(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(cut_after=200_000), Fault(shift=-7))
    assert get(hub, folder).read_bytes() == DATA
    assert len(hub.bodies()) == 3


def test_part_of_a_file_of_another_length_is_not_taken(hub: HubServer, folder: Path) -> None:
    longer = Fault(change=lambda data: data + b"x")
    hub.fail("body", Fault(cut_after=200_000), *[longer] * hub_transfer.TRIES)
    assert str(len(DATA) + 1) in refused(hub, folder).what
    assert not (folder / NAME).exists()


@pytest.mark.parametrize(
    "fault",
    [Fault(short_by=5), Fault(no_length=True, short_by=5), Fault(cut_after=599_999)],
    ids=["announced", "unannounced", "cut"],
)
def test_truncated_answers(hub: HubServer, folder: Path, fault: Fault) -> None:
    hub.fail("body", fault)
    assert get(hub, folder).read_bytes() == DATA
    assert len(hub.bodies()) == 2


def test_always_truncated_is_no_model(hub: HubServer, folder: Path) -> None:
    hub.fail("body", *[Fault(short_by=5)] * 20)
    assert f"of {len(DATA)} bytes" in refused(hub, folder).what
    assert not (folder / NAME).exists()


# --- wrong answers


def test_wrong_bytes_are_thrown_away(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(change=lambda data: data[:-1] + bytes([data[-1] ^ 1])))
    error = refused(hub, folder)
    assert SHA256 in error.what
    assert not (folder / NAME).exists()
    assert not parts(folder)
    assert get(hub, folder).read_bytes() == DATA


def test_more_bytes_than_announced(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(change=lambda data: data + b"x", no_length=True))
    assert "more bytes" in refused(hub, folder).what
    assert not (folder / NAME).exists()
    assert not parts(folder)


def test_damaged_part_of_an_earlier_run(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{NAME}.{SHA256[:12]}.part").write_bytes(bytes(1000))
    notices: list[str] = []
    assert get(hub, folder, notice=notices.append).read_bytes() == DATA
    assert ranges(hub) == ["bytes=1000-", None]
    assert "damaged" in notices[-1]


def test_part_that_is_too_long(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{NAME}.{SHA256[:12]}.part").write_bytes(DATA + b"x")
    assert get(hub, folder).read_bytes() == DATA


def test_complete_part_of_an_earlier_run(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{NAME}.{SHA256[:12]}.part").write_bytes(DATA)
    assert get(hub, folder).read_bytes() == DATA
    assert not hub.bodies()


def test_part_of_another_version_is_never_continued(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{NAME}.{'0' * 12}.part").write_bytes(bytes(1000))
    neighbour = folder / f"other-{NAME}.{'0' * 12}.part"
    neighbour.write_bytes(bytes(1000))
    get(hub, folder)
    assert ranges(hub) == [None]
    assert parts(folder) == [neighbour]


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/json"])
def test_page_instead_of_the_file(hub: HubServer, folder: Path, kind: str) -> None:
    page = b"<html>log in</html>".ljust(len(DATA))  # even with the right length
    hub.fail("body", Fault(status=200, headers={"Content-Type": kind}, body=page))
    error = refused(hub, folder)
    assert kind.split(";")[0] in error.what
    assert "proxy" in error.fix
    assert str(folder / NAME) in error.fix
    assert not (folder / NAME).exists()
    assert not parts(folder)


def test_answer_of_another_length_is_not_begun(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(status=200, headers={"Content-Type": "text/plain"}, body=b"busy"))
    assert get(hub, folder).read_bytes() == DATA
    assert ranges(hub) == [None, None]


def test_page_keeps_what_had_arrived(hub: HubServer, folder: Path) -> None:
    page = Fault(status=200, headers={"Content-Type": "text/html"}, body=b"<html>")
    hub.fail("body", Fault(cut_after=200_000), page)
    refused(hub, folder)
    get(hub, folder)
    assert ranges(hub)[-1] == "bytes=200000-"


def test_page_instead_of_the_metadata(hub: HubServer, folder: Path) -> None:
    hub.fail("head", Fault(status=200, headers={"Content-Type": "text/html"}))
    assert "not like a model hub" in refused(hub, folder).what
    assert not hub.bodies()


# --- what the hub promises, and pins


def test_pins_that_agree(hub: HubServer, folder: Path) -> None:
    pinned = HubFile(REPO, NAME, revision=COMMIT, sha256=SHA256, size=len(DATA))
    assert get(hub, folder, pinned).read_bytes() == DATA


@pytest.mark.parametrize("pin", [{"sha256": "0" * 64}, {"size": 5}])
def test_pins_that_differ(hub: HubServer, folder: Path, pin: dict[str, object]) -> None:
    error = refused(hub, folder, HubFile(REPO, NAME, **pin))  # type: ignore[arg-type]
    assert str(next(iter(pin.values()))) in error.what
    assert not hub.bodies()


def test_hub_without_a_checksum_needs_a_pin(hub: HubServer, folder: Path) -> None:
    hub.headers = {"X-Linked-ETag": '"' + "1" * 40 + '"'}
    assert "no SHA-256" in refused(hub, folder).what
    assert get(hub, folder, HubFile(REPO, NAME, sha256=SHA256)).read_bytes() == DATA


def test_hub_without_a_checksum_cannot_slip_bytes_past_the_pin(
    hub: HubServer, folder: Path
) -> None:
    hub.headers = {"X-Linked-ETag": '"' + "1" * 40 + '"'}
    assert "0" * 64 in refused(hub, folder, HubFile(REPO, NAME, sha256="0" * 64)).what
    assert not (folder / NAME).exists()


def test_hub_without_a_size_needs_a_pin(hub: HubServer, folder: Path) -> None:
    hub.headers = {"X-Linked-Size": None}
    assert "no size" in refused(hub, folder).what
    assert get(hub, folder, HubFile(REPO, NAME, size=len(DATA))).read_bytes() == DATA


@pytest.mark.parametrize("name", ["", "/etc/x", "../x.gguf", "a/../x.gguf", "a\\x.gguf", "."])
def test_names_that_are_no_files(name: str) -> None:
    with pytest.raises(Ds4FlowError, match="not the name of a file"):
        HubFile(REPO, name)


def test_checksum_that_is_none() -> None:
    with pytest.raises(Ds4FlowError, match="64 hexadecimal"):
        HubFile(REPO, NAME, sha256="abc")


# --- who may read


def test_token_goes_to_the_hub_and_not_to_the_store(hub: HubServer, folder: Path) -> None:
    hub.token = "hf_secret"
    get(hub, folder, token=" hf_secret\n")
    tokens = {(seen.server, seen.token) for seen in hub.seen}
    assert tokens == {("hub", "Bearer hf_secret"), ("store", None)}


def test_cached_login_is_used(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.token = "hf_cached"
    (tmp_path / "login").mkdir()
    (tmp_path / "login" / "token").write_text("hf_cached\n")
    assert get(hub, folder, token="").read_bytes() == DATA


def test_without_token(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.token = "hf_secret"
    error = refused(hub, folder)
    assert "without a token" in error.what
    assert REPO in error.what
    for way in ("--token", "HF_TOKEN", "hf auth login"):
        assert way in error.fix
    assert not waits


def test_wrong_token(hub: HubServer, folder: Path) -> None:
    hub.token = "hf_secret"
    error = refused(hub, folder, token="hf_wrong")
    assert "with this token" in error.what
    assert "hf_wrong" not in error.what + error.fix


def test_gated_repository(hub: HubServer, folder: Path) -> None:
    hub.token, hub.gated = "hf_member", True
    error = refused(hub, folder, token="hf_stranger")
    assert "gated" in error.what
    assert "terms" in error.fix


@pytest.mark.parametrize("token", ["hf a", "hf_\x00", "hf_\u00e9"])
def test_token_that_is_none(hub: HubServer, folder: Path, token: str) -> None:
    assert "characters" in refused(hub, folder, token=token).what
    assert not hub.seen


# --- what is not there


def test_missing_file_names_the_nearest(hub: HubServer, folder: Path) -> None:
    error = refused(hub, folder, HubFile(REPO, "model-q22.gguf"))
    assert f"{REPO}/model-q22.gguf" in error.what
    assert NAME in error.fix


def test_missing_file_far_from_all_names_what_there_is(hub: HubServer, folder: Path) -> None:
    hub.add(REPO, "README.md", b"x")
    error = refused(hub, folder, HubFile(REPO, "zzz"))
    assert NAME in error.fix
    assert "README" not in error.fix


def test_missing_file_of_a_hub_that_lists_nothing(hub: HubServer, folder: Path) -> None:
    hub.fail("list", Fault(status=404))
    assert "check the repository" in refused(hub, folder, HubFile(REPO, "model-q22.gguf")).fix


def test_missing_revision(hub: HubServer, folder: Path) -> None:
    assert "'nope'" in refused(hub, folder, HubFile(REPO, NAME, revision="nope")).what


def test_missing_repository(hub: HubServer, folder: Path) -> None:
    error = refused(hub, folder, HubFile("owner/nothing", NAME))
    assert "owner/nothing" in error.what
    assert "does not exist" in error.what


@pytest.mark.parametrize("repo", ["", "a/b/c", "owner/mo dels", "-x/y"])
def test_repository_names_that_are_none(hub: HubServer, folder: Path, repo: str) -> None:
    assert "owner/name" in refused(hub, folder, HubFile(repo, NAME)).fix
    assert not hub.seen


# --- trouble that passes, and trouble that stays


def test_busy_hub_is_asked_again(hub: HubServer, folder: Path, waits: list[float]) -> None:
    limit = {"RateLimit": '"resolvers";r=0;t=42'}
    hub.fail("head", Fault(status=429, headers={"Retry-After": "17"}), Fault(status=503))
    hub.fail("get", Fault(status=429, headers=limit), Fault(status=500))
    hub.fail("body", Fault(status=502))
    notices: list[str] = []
    assert get(hub, folder, notice=notices.append).read_bytes() == DATA
    assert waits[0] == 17
    assert 42 in waits
    assert any("429" in line for line in notices)


def test_wait_that_the_server_asks_for_has_a_bound(
    hub: HubServer, folder: Path, waits: list[float]
) -> None:
    hub.fail("head", Fault(status=429, headers={"Retry-After": "999999999"}))
    get(hub, folder)
    assert waits == [hub_transfer.LONGEST_WAIT_S]


def test_hub_that_stays_broken(hub: HubServer, folder: Path) -> None:
    hub.fail("head", *[Fault(status=503)] * 20)
    error = refused(hub, folder)
    assert "HTTP 503" in error.what
    assert len(hub.seen) == hub_transfer.TRIES


def test_expired_storage_address_is_renewed(hub: HubServer, folder: Path) -> None:
    hub.fail("body", Fault(cut_after=1000), Fault(status=403))
    assert get(hub, folder).read_bytes() == DATA
    asked = [seen for seen in hub.seen if seen.server == "hub" and seen.method == "GET"]
    assert len(asked) == 3


def test_refusal_of_another_kind(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.fail("get", Fault(status=451))
    assert "HTTP 451" in refused(hub, folder).what
    assert not waits


def test_no_network(hub: HubServer, folder: Path) -> None:
    error = refused(hub, folder, endpoint="http://127.0.0.1:9/")
    assert "cannot reach 127.0.0.1:9" in error.what
    assert f"http://127.0.0.1:9/{REPO}/resolve/main/{NAME}" in error.fix
    assert str(folder / NAME) in error.fix


@pytest.mark.parametrize("endpoint", ["example.org", "ftp://example.org", "http://"])
def test_endpoint_that_is_none(hub: HubServer, folder: Path, endpoint: str) -> None:
    assert endpoint in refused(hub, folder, endpoint=endpoint).what


# --- offline


def test_offline_without_the_file(hub: HubServer, folder: Path) -> None:
    error = refused(hub, folder, offline=True)
    assert str(folder / NAME) in error.what
    assert f"{hub.url}/{REPO}/resolve/main/{NAME}" in error.fix
    assert not hub.seen


def test_offline_with_a_verified_file(hub: HubServer, folder: Path) -> None:
    get(hub, folder)
    notices: list[str] = []
    get(hub, folder, offline=True, notice=notices.append)
    assert not notices


def test_offline_with_a_pinned_checksum(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    get(hub, folder, HubFile(REPO, NAME, sha256=SHA256), offline=True)
    assert (folder / f"{NAME}.verified.json").exists()
    error = refused(hub, folder, HubFile(REPO, NAME, sha256="0" * 64), offline=True)
    assert SHA256 in error.what
    assert not hub.seen


def test_offline_without_a_pin_says_so(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    notices: list[str] = []
    get(hub, folder, offline=True, notice=notices.append)
    assert "unchecked" in notices[0]
    assert not (folder / f"{NAME}.verified.json").exists()
    assert "600000 bytes" in refused(hub, folder, HubFile(REPO, NAME, size=7), offline=True).what
    assert not hub.seen


def test_offline_mode_of_the_hub_library(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(hub, folder).what


def test_notices_are_logged_without_a_taker(
    hub: HubServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    fetch(FILE, folder, endpoint=hub.url, offline=True)
    assert "unchecked" in caplog.text


# --- the disk


def test_too_little_space(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = len(DATA) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    error = refused(hub, folder)
    assert "needs 600.0 kB" in error.what
    assert f"only {size_text(free)} free" in error.what
    assert str(folder) in error.what
    assert not hub.bodies()
    assert not parts(folder)


def test_space_is_needed_only_for_what_is_missing(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / f"{NAME}.{SHA256[:12]}.part").write_bytes(DATA[:400_000])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=199_999))
    error = refused(hub, folder)
    assert "200.0 kB of it still to come" in error.what
    assert parts(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    assert get(hub, folder).read_bytes() == DATA


def test_disk_that_fills_up(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, [300_000]

    def limited(file: int, data: bytes) -> int:
        if len(data) > 1000:
            if room[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: room[0]]  # a nearly full disk takes less than it is given
            room[0] -= len(data)
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        error = refused(hub, folder)
    assert "disk is full" in error.what
    assert str(folder) in error.what
    assert not (folder / NAME).exists()
    assert [part.stat().st_size for part in parts(folder)] == [300_000]
    assert get(hub, folder).read_bytes() == DATA
    assert ranges(hub)[-1] == "bytes=300000-"


def test_disk_that_takes_little_at_a_time(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
        assert get(hub, folder).read_bytes() == DATA


def test_disk_that_fails_at_the_last_moment(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        assert os.strerror(errno.EIO) in refused(hub, folder).what
    assert not (folder / NAME).exists()


def test_folder_that_is_a_file(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "gguf").write_text("x")
    assert str(tmp_path / "gguf") in refused(hub, tmp_path / "gguf").what


def test_verification_that_cannot_be_noted(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{NAME}.verified.json").mkdir(parents=True)
    notices: list[str] = []
    assert get(hub, folder, notice=notices.append).read_bytes() == DATA
    assert "cannot be noted" in notices[-1]


# --- the link


def test_link_is_relative_and_follows_the_newest(hub: HubServer, folder: Path) -> None:
    hub.add(REPO, "model-q4.gguf", DATA[:1000])
    link = folder / "ds4flash.gguf"
    get(hub, folder, link=link.name)
    assert os.readlink(link) == NAME
    get(hub, folder, HubFile(REPO, "model-q4.gguf"), link=link.name)
    assert os.readlink(link) == "model-q4.gguf"
    get(hub, folder, link=link.name)  # already there: the link moves all the same
    assert link.read_bytes() == DATA
    get(hub, folder, HubFile(REPO, "model-q4.gguf"))
    assert link.read_bytes() == DATA
    assert not list(folder.glob(".ds4flash*"))


def test_link_replaces_a_dangling_one(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / "ds4flash.gguf").symlink_to("gone.gguf")
    get(hub, folder, link="ds4flash.gguf")
    assert (folder / "ds4flash.gguf").read_bytes() == DATA


def test_link_never_replaces_a_real_file(hub: HubServer, folder: Path) -> None:
    folder.mkdir()
    (folder / "ds4flash.gguf").write_bytes(b"mine")
    error = refused(hub, folder, link="ds4flash.gguf")
    assert "real file" in error.what
    assert (folder / "ds4flash.gguf").read_bytes() == b"mine"
    assert not hub.seen  # said before 80 GB are read, not after


def test_file_that_has_the_name_of_the_link(hub: HubServer, folder: Path) -> None:
    assert not get(hub, folder, link=NAME).is_symlink()
    assert not get(hub, folder, link=NAME).is_symlink()


@pytest.mark.parametrize("link", ["a/b", "/tmp/x", "", ".", ".."])
def test_link_names_that_are_none(hub: HubServer, folder: Path, link: str) -> None:
    refused(hub, folder, link=link)
    assert not hub.seen


def test_nothing_of_the_hub_library_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ds4flow.hub; print({'huggingface_hub', 'httpx2', 'filelock'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parent.parent
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert said == "set()\n"


# --- two at once, and anything at all


_CHILD = """
import sys
from pathlib import Path
from ds4flow.hub import HubFile, fetch
def say(line): print(line, flush=True)
path = fetch(HubFile(sys.argv[1], sys.argv[2]), Path(sys.argv[3]), endpoint=sys.argv[4], notice=say)
print("done", path.stat().st_size, flush=True)
"""


def test_second_process_waits_and_finds_it(hub: HubServer, folder: Path) -> None:
    started, gate = threading.Event(), threading.Event()
    hub.fail("body", Fault(started=started, gate=gate))
    command = [sys.executable, "-c", _CHILD, REPO, NAME, str(folder), hub.url]
    root = Path(__file__).parent.parent
    first = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    with first:
        assert started.wait(20)
        assert not (folder / NAME).exists()
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            gate.set()
            said, _ = second.communicate(timeout=20)
            assert said == f"done {len(DATA)}\n"
            assert first.communicate(timeout=20)[0] == f"done {len(DATA)}\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert (folder / NAME).read_bytes() == DATA
    assert [seen.server for seen in hub.seen] == ["hub", "hub", "store"]  # the first one's


def test_process_that_was_killed_leaves_no_lock(hub: HubServer, folder: Path) -> None:
    started, gate = threading.Event(), threading.Event()
    hub.fail("body", Fault(started=started, gate=gate))
    command = [sys.executable, "-c", _CHILD, REPO, NAME, str(folder), hub.url]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent) as killed:
        assert started.wait(20)
        killed.kill()
    gate.set()
    assert not (folder / NAME).exists()
    assert get(hub, folder).read_bytes() == DATA


@pytest.mark.parametrize("seed", range(25))
def test_any_trouble_ends_with_the_right_bytes_or_with_none(
    hub: HubServer, folder: Path, seed: int
) -> None:
    chance = random.Random(seed)
    page = {"Content-Type": chance.choice(["text/html", "application/json", "text/plain"])}
    choices = (
        lambda: Fault(cut_after=chance.randrange(len(DATA))),
        lambda: Fault(short_by=chance.randrange(1, 1000)),
        lambda: Fault(short_by=chance.randrange(1, 1000), no_length=True),
        lambda: Fault(no_range=True),
        lambda: Fault(shift=chance.randrange(-9, 9)),
        lambda: Fault(status=chance.choice([403, 416, 429, 500, 503])),
        lambda: Fault(status=200, headers=page, body=b"<html>"),
        lambda: Fault(change=lambda data: bytes(len(data))),
        lambda: Fault(change=lambda data: data + b"x", no_length=True),
    )
    hub.fail("body", *[chance.choice(choices)() for _ in range(6)])
    for _ in range(12):
        try:
            get(hub, folder)
            break
        except Ds4FlowError:
            assert not (folder / NAME).exists()
            assert not (folder / f"{NAME}.verified.json").exists()
    assert (folder / NAME).read_bytes() == DATA
