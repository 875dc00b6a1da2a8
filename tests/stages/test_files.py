"""Finding and loading model files: what is wrong is said before any weight is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError, ModelFileError, UsageError
from ds4flow.model.trunk import Model
from ds4flow.overrides import literal
from ds4flow.pipeline import State
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline

TINY = "tiny-q4k.gguf"
SUPPORT = "tiny-q4k.mtp-support.gguf"
NEXTN = "tiny-q4k.llama-mtp.gguf"


def load(folder: Path, *words: str, prompt: str = "the thing", download: bool = False) -> State:
    """Run download and load (or download alone) of a config, without decoding."""
    config = compose(
        [
            *(literal(word) for word in words),
            "model.chat=raw",
            "model.profile=plain",
            "runtime.kernels=reference",
            f"download.folder={folder}",
        ]
    )
    stages = build_pipeline(config).stages
    state = State(run=RunDir.create(folder / "run"), prompt=prompt)
    for name in ("download",) if download else ("download", "load"):
        stages[name].run(state)
    return state


def file(path: Path) -> tuple[str, str]:
    return "model=file", f"model.path={path}"


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a request that is wrong gets as far as the weights."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(Model, "load", refuse)


@pytest.mark.parametrize("sidecar", [SUPPORT, NEXTN])
def test_two_files_make_a_model_that_can_draft(
    tmp_path: Path, golden_dir: Path, sidecar: str
) -> None:
    words = [*file(golden_dir / TINY), f"model.mtp_path={golden_dir / sidecar}", "mtp.draft=2"]
    state = load(tmp_path, *words)
    assert state.model.mtp is not None
    assert state.cache.draft_max == 2
    assert state.tokens[0] == state.tokenizer.bos
    digest = hashlib.sha256((golden_dir / TINY).read_bytes()).hexdigest()
    assert state.run.facts["files"]["main"]["sha256"] == digest
    assert state.run.facts["kernels"] == "reference"


@pytest.mark.parametrize("words", [["mtp.draft=0"], ["draft=off"], ["runtime.no_gpu=true"]])
def test_a_run_that_will_not_draft_loads_no_mtp_block(
    tmp_path: Path, golden_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [*file(golden_dir / TINY), f"model.mtp_path={golden_dir / SUPPORT}"]
    state = load(tmp_path, *files, *words)
    assert state.model.mtp is None
    told = "no_gpu" in words[0]
    assert ("MTP is off: DS4_NO_GPU" in capsys.readouterr().err) == told
    assert ("mtp_off" in state.run.facts) == told


def test_checksums_are_compared(tmp_path: Path, golden_dir: Path) -> None:
    path = golden_dir / TINY
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4flow.model_files._HASHED_BELOW", 1)  # as if the file were large
        state = load(tmp_path / "a", *file(path), f"model.sha256={digest.upper()}", download=True)
        assert state.run.facts["files"]["main"]["sha256"] == digest
        state = load(tmp_path / "none", *file(path), download=True)
        assert state.run.facts["files"]["main"]["sha256"] is None
    with pytest.raises(Ds4FlowError, match=r"but model\.sha256 is 00"):
        load(tmp_path / "b", *file(path), "model.sha256=00", download=True)


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize(
    "content", [None, b"<!DOCTYPE html><html>404</html>", b"not a model at all", b""]
)
def test_files_that_are_no_models(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, *file(path))
    assert str(path) in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("weightless")
def test_a_hub_model_that_is_not_here_names_file_repository_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, "model=flash-q2", "download=local")
    text = caught.value.what + caught.value.fix
    for word in ("OutQ8-chat-v2.gguf", "antirez/deepseek-v4-gguf", str(tmp_path)):
        assert word in text


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize(
    ("words", "prompt", "what"),
    [
        (["model.path=null"], "x", "model.path is not set"),
        (["model.path=pkg://no_such_package/x.gguf"], "x", "no package no_such_package"),
        (["runtime.context=999999999"], "x", r"runtime\.context=999999999 \(.* GiB\) exceed"),
        (["runtime.memory=0.0001"], "x", r"the weights \(.* exceed the 0\.1 MiB of memory"),
        (["runtime.context=16"], "a b c d e f g h i j k l m n", "leaves no room"),
        (["system=be brief"], "x", "no place for a system text"),
    ],
)
def test_requests_that_cannot_be_met(
    tmp_path: Path, golden_dir: Path, words: list[str], prompt: str, what: str
) -> None:
    with pytest.raises((Ds4FlowError, UsageError), match=what):
        load(tmp_path, *file(golden_dir / TINY), *words, prompt=prompt)


def test_a_support_file_of_another_model_is_refused(tmp_path: Path, golden_dir: Path) -> None:
    files = [*file(golden_dir / "tiny-f32.gguf"), f"model.mtp_path={tmp_path / 'other.gguf'}"]
    (tmp_path / "other.gguf").write_bytes((golden_dir / TINY).read_bytes())
    with pytest.raises(ModelFileError, match="no MTP block"):
        load(tmp_path, *files)
