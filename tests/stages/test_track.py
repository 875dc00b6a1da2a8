"""Tracking observers: they mirror a run in batches and never hold it up, lose it or change it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ds4flow.stages import track
from ds4flow.stages.track import Cycle, Mlflow, TensorBoard, Tracker

from ds4flow.config import compose, validate
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run
from ds4flow.wiring import build_pipeline
from tests.fakes import Result, chaotic, decode, fake


@dataclass
class Sink(Tracker):
    """Remembers what it was told; `trouble` is called before each step with its name."""

    trouble: Callable[[str], None] = lambda step: None
    steps: list[str] = field(default_factory=list)
    batches: list[list[Cycle]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    ended: list[dict[str, Any]] = field(default_factory=list)

    tool = "sink"

    def _step(self, name: str) -> None:
        self.trouble(name)
        self.steps.append(name)
        self.threads.add(threading.current_thread().name)

    def open(self, run: Run) -> None:
        self._step("open")
        self.facts = {"place": "memory"}

    def write(self, cycles: Sequence[Cycle]) -> None:
        self._step("write")
        self.batches.append(list(cycles))

    def end(self, run: Run) -> None:
        self._step("end")
        self.ended.append({**run.facts, "summary": run.summary})


def sink(**options: Any) -> Sink:
    return Sink(**{"seconds": 3600.0, "patience": 30.0, **options})


def watched(folder: Path, tracker: Tracker, **options: Any) -> Result:
    return decode(folder, fake(chaotic(1)), depth=2, observe={"sink": tracker}, **options)


def recorded(result: Result) -> dict[str, Any]:
    return json.loads((result.run.path / "run.json").read_text())["tracking"]["sink"]


def test_cycles_travel_in_batches_by_a_thread_of_their_own(tmp_path: Path) -> None:
    tracker = sink()
    result = watched(tmp_path / "run", tracker)
    assert tracker.steps == ["open", "write", "end"]
    assert tracker.threads == {"sink"}
    (batch,) = tracker.batches
    cycles = result.cycles
    assert [one.number for one in batch] == [cycle["cycle"] for cycle in cycles]
    assert [one.committed for one in batch] == [len(cycle["tokens"]) for cycle in cycles]
    assert [one.drafted for one in batch] == [cycle["drafted"] for cycle in cycles]
    metrics = dict(batch[0].metrics())
    assert metrics["cycle/accepted"] == cycles[0]["accepted"]
    assert metrics["cycle/verify_ms"] == batch[0].micros["verify"] / 1000
    assert recorded(result) == {"place": "memory", "complete": True, "error": None}


def test_batches_follow_the_clock(tmp_path: Path) -> None:
    tracker = sink(seconds=0.0)
    result = watched(tmp_path / "run", tracker)
    assert [len(batch) for batch in tracker.batches] == [1] * len(result.cycles)


def test_the_end_is_told_after_it_is_recorded(tmp_path: Path) -> None:
    tracker = sink()
    result = watched(tmp_path / "run", tracker)
    (facts,) = tracker.ended
    assert facts["status"] == "complete"
    assert facts["summary"]["cycles"] == len(result.cycles)


@pytest.mark.parametrize("where", ["open", "write", "end"])
def test_a_tracker_that_fails_is_a_note_and_a_fact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def trouble(step: str) -> None:
        if step == where:
            raise ConnectionError("https://me:secret@server/x is not reachable\nfor reasons")

    expected = decode(tmp_path / "plain", fake(chaotic(1)), depth=2)
    tracker = sink(trouble=trouble)
    result = watched(tmp_path / "run", tracker)
    assert result.state.output == expected.state.output
    assert len(result.cycles) == len(expected.cycles)
    facts = json.loads((result.run.path / "run.json").read_text())
    assert facts["status"] == "complete"
    assert facts["tracking"]["sink"]["complete"] is False
    error = facts["tracking"]["sink"]["error"]
    assert error == "ConnectionError: https://server/x is not reachable for reasons"
    said = capsys.readouterr().err
    assert "note: sink" in said
    assert "secret" not in said
    assert where in ("write", "end") or "the run goes on without it" in said
    assert tracker.steps == {"open": [], "write": ["open"], "end": ["open", "write"]}[where]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path) -> None:
    release = threading.Event()
    tracker = sink(patience=0.05, trouble=lambda step: release.wait(30) and None)
    try:
        start = time.monotonic()
        result = watched(tmp_path / "run", tracker)
        assert time.monotonic() - start < 20
        assert recorded(result)["error"] == "not done after 0.05 seconds"
        assert len(result.state.output) == 24
    finally:
        release.set()


def test_a_run_that_breaks_is_mirrored_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: tuple[int, ...]) -> int:
        if len(context) > 12:
            raise ZeroDivisionError("a bug in a kernel")
        return chaotic(1)(context)

    runs: list[RunDir] = []
    create = RunDir.create
    monkeypatch.setattr(RunDir, "create", lambda path: runs.append(create(path)) or runs[-1])
    tracker = sink()
    with pytest.raises(ZeroDivisionError):
        decode(tmp_path / "run", fake(broken), depth=0, observe={"sink": tracker})
    runs[0].finish("failed", "ZeroDivisionError")
    assert tracker.steps == ["open", "write", "end"]
    assert tracker.ended[0]["status"] == "failed"


def test_naming_it_in_the_pipeline_is_enough() -> None:
    words, _ = validate(["pipeline.observe=[log,mlflow,tensorboard]", "mlflow.uri=sqlite:///x.db"])
    config = compose(words)
    assert config.mlflow._target_ == "ds4flow.stages.track.Mlflow"
    assert config.mlflow.uri == "sqlite:///x.db"
    assert config.mlflow.experiment == "demo"
    assert config.tensorboard._target_ == "ds4flow.stages.track.TensorBoard"


@pytest.mark.parametrize("tool", ["mlflow", "tensorboard"])
def test_without_the_package_the_extra_is_named(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(track, "import_module", absent)
    config = compose([f"pipeline.observe=[log,{tool}]", f"+{tool}=default"])
    with pytest.raises(Ds4FlowError, match=rf"pip install 'ds4flow\[{tool}\]'"):
        build_pipeline(config)


@pytest.mark.parametrize("value", [-1, "soon", True, float("nan")])
def test_seconds_are_checked(value: Any) -> None:
    with pytest.raises(UsageError, match=r"sink\.seconds"):
        sink(seconds=value)


# --- the real tools


def made(folder: Path, tracker: Tracker) -> Result:
    result = decode(folder, fake(chaotic(2)), depth=2, observe={tracker.tool: tracker})
    found = json.loads((folder / "run.json").read_text())["tracking"][tracker.tool]
    assert found["complete"], found
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # artifacts lie beside the store
    uri = f"sqlite:///{tmp_path}/store.db"
    tracker = Mlflow(seconds=0.0, patience=120.0, uri=uri, experiment="tests", artifacts=True)
    facts = {
        "config": {
            "mtp.draft": {"value": 2, "source": "cli"},
            "prompt": {"value": "x" * 20_000, "source": "default"},
            **{f"k.{i}": {"value": i, "source": "default"} for i in range(250)},
        }
    }
    create = RunDir.create
    monkeypatch.setattr(RunDir, "create", lambda path: create(path, facts))
    result = made(tmp_path / "run", tracker)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["mtp.draft"] == "2"
    assert run.data.params["k.249"] == "249"
    assert run.data.params["prompt"].endswith("(20000 characters)")
    assert run.data.tags["origin.mtp.draft"] == "cli"
    assert run.data.tags["ds4flow.identity"] == "exact"
    assert run.data.metrics["summary/cycles"] == len(result.cycles)
    history = client.get_metric_history(run.info.run_id, "cycle/accepted")
    found = {metric.step: metric.value for metric in history}
    assert found == {cycle["cycle"]: cycle["accepted"] for cycle in result.cycles}
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"run.json", "cycles.jsonl", "summary.json", "output.txt", "tokens.json"} <= names
    copy = Path(client.download_artifacts(run.info.run_id, "run.json"))
    assert json.loads(copy.read_text())["status"] == "complete"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tracking_server_that_is_gone_costs_nothing_but_the_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    tracker = Mlflow(
        seconds=0.0, patience=60.0, uri="http://127.0.0.1:9", experiment="tests", artifacts=True
    )
    result = decode(tmp_path / "run", fake(chaotic(2)), depth=2, observe={"mlflow": tracker})
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "complete"
    assert facts["tracking"]["mlflow"]["complete"] is False
    assert len(result.state.output) == 24
    assert "the run goes on without it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(seconds=0.0, patience=60.0, folder="tensorboard")
    result = made(tmp_path / "run", tracker)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("cycle/accepted")}
    assert found == {cycle["cycle"]: cycle["accepted"] for cycle in result.cycles}
    assert events.Scalars("summary/cycles")[0].value == len(result.cycles)
    (text,) = events.Tensors("output/text_summary")
    assert result.state.text in text.tensor_proto.string_val[0].decode()
