"""The commands beside `run`, as typed: what they print, write and exit with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import Result
from ds4flow.stages import download as download_stage
from huggingface_hub import constants

from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError
from ds4flow.hub import HubFile
from ds4flow.pipeline import State
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline
from tests import command
from tests.hub_server import HubServer

DATA = random.Random(2).randbytes(200_000)


pytestmark = pytest.mark.usefixtures("alone")


def ds4flow(*arguments: str) -> Result:
    result = command.ds4flow(*arguments)
    assert "Traceback" not in result.stderr
    return result


def said(result: Result) -> list[str]:
    """The lines on stderr that say something."""
    return [line for line in result.stderr.splitlines() if line.strip()]


# --- download


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that nothing of this machine's login or proxies gets near."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login" / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "login" / "stored"))
    huggingface_hub.close_session()
    with HubServer() as server:
        yield server
    huggingface_hub.close_session()


def stored(hub: HubServer, option: str, key: str = "file") -> str:
    """Put the file that conf/model names into the hub; its name."""
    model = compose([f"model={option}"]).model
    hub.add(model.repo, model[key], DATA)
    return str(model[key])


@pytest.mark.parametrize(
    ("target", "option", "key"),
    [
        ("q2", "flash-q2", "file"),
        ("q2-imatrix", "flash-q2-imatrix", "file"),
        ("q4", "flash-q4", "file"),
        ("q4-imatrix", "flash-q4-imatrix", "file"),
        ("mtp", "flash-q2", "mtp_file"),
    ],
)
def test_download_fetches_what_the_config_names_and_then_skips_it(
    hub: HubServer, target: str, option: str, key: str
) -> None:
    name = stored(hub, option, key)
    words = ("download", target, "--endpoint", hub.url, "--to", "models")
    result = ds4flow(*words)
    assert result.exit_code == 0
    path = Path("models") / name
    assert result.stdout == f"{path}\n"
    assert path.read_bytes() == DATA
    link = Path("models/ds4flash.gguf")
    assert link.is_symlink() == (target != "mtp")
    assert target == "mtp" or link.resolve() == path.resolve()
    asked = len(hub.seen)
    again = ds4flow(*words)
    assert (again.exit_code, again.stdout) == (0, result.stdout)
    assert len(hub.seen) == asked


def test_download_goes_where_the_variable_says(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stored(hub, "flash-q2")
    monkeypatch.setenv("DS4_GGUF_DIR", "it's, my ${models}")
    assert ds4flow("download", "q2", "--endpoint", hub.url).exit_code == 0
    assert (Path("it's, my ${models}") / name).read_bytes() == DATA
    assert ds4flow("download", "q2", "--endpoint", hub.url, "--to", "here").exit_code == 0
    assert (Path("here") / name).exists()


def test_download_says_what_to_do_when_there_is_no_such_file(hub: HubServer) -> None:
    hub.add(compose(["model=flash-q2"]).model.repo, "other.gguf", DATA)
    result = ds4flow("download", "q2", "--endpoint", hub.url, "--to", "models")
    assert result.exit_code == 1
    what, fix = said(result)
    assert what.startswith("error: ")
    assert fix.strip()
    assert not list(Path("models").glob("*.gguf"))


def test_download_of_nobody_and_offline() -> None:
    result = ds4flow("download", "q3")
    assert result.exit_code == 2
    assert "q2-imatrix" in result.stderr
    offline = ds4flow("download", "q2", "--offline", "--to", "models")
    assert offline.exit_code == 1
    assert len(said(offline)) == 2


def fetching(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden_dir: Path, *words: str
) -> tuple[list[tuple[HubFile, Path, bool]], State]:
    """Run the download stage of a composed config; what it asked the hub for."""
    asked: list[tuple[HubFile, Path, bool]] = []

    def fetch(file: HubFile, folder: Path, *, offline: bool = False) -> Path:
        asked.append((file, folder, offline))
        kind = "mtp-support.gguf" if "MTP" in file.filename else "gguf"
        return golden_dir / f"tiny-f32.{kind}"

    monkeypatch.setattr(download_stage, "fetch_shown", fetch)
    config = compose(["model=flash-q2", *words])
    state = State(run=RunDir.create(tmp_path / "run"), prompt="x")
    build_pipeline(config).stages["download"].run(state)
    return asked, state


def test_a_flash_model_comes_from_its_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden_dir: Path
) -> None:
    words = ("mtp.draft=2", "download.folder='a b'", "download.offline=true")
    asked, state = fetching(monkeypatch, tmp_path, golden_dir, *words)
    model = compose(["model=flash-q2"]).model
    assert [(file.repo, file.filename) for file, _, _ in asked] == [
        (model.repo, model.file),
        (model.repo, model.mtp_file),
    ]
    assert {(folder, offline) for _, folder, offline in asked} == {(Path("a b"), True)}
    assert state.files.mtp is not None
    assert state.run.facts["files"]["main"]["path"].endswith("tiny-f32.gguf")


@pytest.mark.parametrize("word", ["draft=off", "mtp.draft=0", "runtime.no_gpu=true"])
def test_the_mtp_file_is_left_where_no_run_drafts_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden_dir: Path, word: str
) -> None:
    asked, state = fetching(monkeypatch, tmp_path, golden_dir, word)
    assert len(asked) == 1
    assert state.files.mtp is None


def test_a_file_of_the_users_own_is_never_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden_dir: Path
) -> None:
    path = golden_dir / "tiny-f32.gguf"
    asked, _ = fetching(monkeypatch, tmp_path, golden_dir, f"model.path='{path}'")
    assert asked == []
    with pytest.raises(Ds4FlowError, match="download=local fetches nothing"):
        fetching(monkeypatch, tmp_path / "local", golden_dir, "download=local")


# --- synth, inspect, verify


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model written by the command itself."""
    path = tmp_path_factory.mktemp("synth") / "tiny.gguf"
    result = ds4flow("synth", str(path), "preset=tiny", "seed=3")
    assert result.exit_code == 0
    assert "weight bytes read" in result.stdout
    assert path.exists()
    assert path.with_name("tiny.mtp-support.gguf").exists()
    return path


def test_synth_refuses_what_is_no_key(tmp_path: Path) -> None:
    result = ds4flow("synth", "x.gguf", "preset=tniy")
    assert result.exit_code == 2
    assert "tiny" in said(result)[1]
    assert not list(tmp_path.glob("*.gguf"))


def test_inspect_prints_and_exits(tiny: Path, tmp_path: Path) -> None:
    support = tiny.with_name("tiny.mtp-support.gguf")
    result = ds4flow("inspect", str(tiny), str(support), "--ctx", "512", "--bandwidth", "50")
    assert result.exit_code == 0
    assert "Q2_K" in result.stdout
    report = json.loads(ds4flow("inspect", "--json", str(tiny)).stdout)
    assert report["ok"] is True
    bad = tmp_path / "cut.gguf"
    bad.write_bytes(tiny.read_bytes()[:5000])
    assert ds4flow("inspect", str(bad)).exit_code == 3
    assert ds4flow("inspect").exit_code == 2


def proving(tiny: Path, *words: str) -> Result:
    support = tiny.with_name("tiny.mtp-support.gguf")
    return ds4flow(
        "verify",
        *("model=file", f"model.path={tiny}", f"model.mtp_path={support}", "model.chat=raw"),
        *("commit.ignore_eos=true", *words),
    )


def test_verify_prints_its_table(tiny: Path) -> None:
    words = ("commit.max_tokens=8", "--depths", "1-2", "-p", "hello world", "-p", "abc")
    result = proving(tiny, *words)
    assert result.exit_code == 0
    head, *rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert head[:5] == ["depth", "tokens", "cycles", "acceptance", "rollbacks"]
    assert [row[0] for row in rows] == ["1", "2"]
    assert [row[1] for row in rows] == ["16", "16"]
    assert all(row[-2:] == ["equal", "equal"] for row in rows)
    assert "depth 2, prompt 1: 8 tokens, equal" in result.stderr
    record = json.loads(Path("runs/verify/0001/run.json").read_text())
    assert record["parity"]["equal"] is True


def test_verify_with_a_liar_sees_rollbacks(tiny: Path) -> None:
    words = ("commit.max_tokens=6", "--depths", "2", "-p", "abc", "--drafter", "lying")
    result = proving(tiny, *words)
    assert result.exit_code == 0
    row = result.stdout.splitlines()[-1].split()
    assert int(row[4]) > 0
    assert row[3] == "0.0%"


def test_verify_exits_1_on_a_relaxed_margin(tiny: Path) -> None:
    words = ("mtp.margin=0.000001", "commit.max_tokens=30", "--depths", "4", "-p", "hello world")
    result = proving(tiny, *words)
    assert result.exit_code == 1
    assert "differ" in result.stdout
    assert "first difference at position" in result.stderr
    record = json.loads(Path("runs/verify/0001/run.json").read_text())
    assert record["status"] == "failed"


@pytest.mark.parametrize(
    "words", [("mtp.draft=2",), ("--depths", "x"), ("--depths", "1-99"), ("prompt=x",)]
)
def test_verify_refuses_what_it_sets_itself(words: tuple[str, ...]) -> None:
    assert ds4flow("verify", *words).exit_code == 2
    assert not Path("runs").exists()


# --- run --mtp-verify-depth


def test_the_verify_depth_flag_is_the_parity_pipeline_at_that_depth(tiny: Path) -> None:
    support = tiny.with_name("tiny.mtp-support.gguf")
    words = ("-m", str(tiny), "--mtp", str(support), "model.chat=raw", "commit.ignore_eos=true")
    result = ds4flow("run", *words, "-p", "abc", "-n", "6", "--mtp-verify-depth", "2")
    assert result.exit_code == 0
    assert "tokens and logits bits equal at 6 positions" in result.stderr
    record = json.loads(Path("runs/file/0001/run.json").read_text())
    assert record["choices"]["pipeline"] == "parity"
    source = "flag --mtp-verify-depth"
    assert record["config"]["mtp.draft"] == {"value": 2, "source": source}
    assert record["parity"]["equal"] is True


@pytest.mark.parametrize("words", [("--mtp-draft", "3"), ("mtp.draft=3",), ("pipeline=greedy",)])
def test_the_verify_depth_flag_goes_with_no_other_choice(words: tuple[str, ...]) -> None:
    result = ds4flow("run", "--mtp-verify-depth", "2", *words)
    assert result.exit_code == 2
    assert "is given twice" in said(result)[0]
    assert not Path("runs").exists()
