"""pipeline=graph: what the ordinary pipeline does, cycle by cycle, with one step for two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ds4flow.config import compose
from ds4flow.errors import UsageError
from ds4flow.model.trunk import Model
from ds4flow.overrides import quoted
from ds4flow.pipeline import State
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline, read_prompt

COMMON = ("runtime.device=cpu", "runtime.kernels=static", "log=quiet", "mtp.full_logits=true")


def slow(value: object) -> Any:
    """A case that only -m slow runs."""
    return pytest.param(value, marks=pytest.mark.slow)


class Ran(NamedTuple):
    """A finished run and its records."""

    state: State
    cycles: list[dict[str, Any]]
    logits: list[dict[str, np.ndarray]]
    facts: dict[str, Any]
    summary: dict[str, Any]


MODELS: dict[str, Model] = {}  # by file, so that runs share decoded weights


def run(folder: Path, words: list[str]) -> Ran:
    config = compose([*COMMON, *words])
    directory = RunDir.create(folder)
    file = f"{config.model.path} {config.model.mtp_path}"
    state = State(run=directory, prompt=read_prompt(config), model=MODELS.get(file))
    build_pipeline(config).run(state)
    directory.finish("complete")
    if state.model.mtp is not None or config.model.mtp_path is None:
        MODELS[file] = state.model
    lines = (folder / "cycles.jsonl").read_text().splitlines()
    arrays = [dict(np.load(path)) for path in sorted((folder / "logits").glob("*.npz"))]
    facts, summary = (
        json.loads((folder / name).read_text()) for name in ("run.json", "summary.json")
    )
    return Ran(state, [json.loads(line) for line in lines], arrays, facts, summary)


def both(tmp_path: Path, words: list[str]) -> tuple[Ran, Ran]:
    ordinary = run(tmp_path / "ordinary", ["pipeline=speculative", *words])
    return ordinary, run(tmp_path / "graph", ["pipeline=graph", *words])


def assert_same(ordinary: Ran, graph: Ran) -> None:
    """Tokens, text, every record but times, the bits of all logits and the cache."""
    assert graph.state.tokens == ordinary.state.tokens
    assert graph.state.text == ordinary.state.text
    assert graph.state.done == ordinary.state.done
    assert graph.state.identity == ordinary.state.identity
    assert len(graph.cycles) == len(ordinary.cycles)
    for ours, theirs in zip(graph.cycles, ordinary.cycles, strict=True):
        # exp of one library and of another may differ in the last bit
        assert ours.pop("ratios") == pytest.approx(theirs.pop("ratios"), rel=1e-12)
        for record in (ours, theirs):
            record.pop("micros")
        assert ours == theirs
    for left, right in zip(graph.logits, ordinary.logits, strict=True):
        assert left["verify"].tobytes() == right["verify"].tobytes()
        assert left["draft"].tobytes() == right["draft"].tobytes()
    assert graph.state.cache.state_hash(mtp=False) == ordinary.state.cache.state_hash(mtp=False)


def golden(golden_dir: Path, name: str = "tiny-q4k") -> list[str]:
    path, mtp = (golden_dir / f"{name}{end}.gguf" for end in ("", ".mtp-support"))
    return [
        "model=file",
        f"model.path={quoted(str(path))}",
        f"model.mtp_path={quoted(str(mtp))}",
        "model.profile=plain",
        "model.chat=raw",
        "runtime.context=80",
        "commit.max_tokens=14",
        "prompt='The quick brown fox'",
    ]


@pytest.mark.parametrize("depth", [slow(0), slow(1), 2, slow(3), 4])
def test_the_golden_model_at_every_depth(tmp_path: Path, golden_dir: Path, depth: int) -> None:
    ordinary, graph = both(tmp_path, [*golden(golden_dir), f"mtp.draft={depth}"])
    assert_same(ordinary, graph)
    assert len(graph.state.output) == 14
    assert graph.state.done == "limit"
    assert "decode" in graph.summary["micros_by_stage"]
    assert graph.facts["decode"]["mode"] == "eager"
    assert (graph.facts["device"], graph.facts["kernels"]) == ("cpu", "static")


@pytest.mark.parametrize("depth", [slow(0), slow(1), slow(2), 3, slow(4)])
def test_the_demo_model_at_every_depth(tmp_path: Path, depth: int) -> None:
    words = [f"mtp.draft={depth}", "commit.max_tokens=12", "runtime.context=60"]
    ordinary, graph = both(tmp_path, words)
    assert_same(ordinary, graph)
    assert bool(graph.summary["num_accepted_draft_tokens"]) == bool(depth)


@pytest.mark.parametrize(
    "words",
    [
        ["mtp.margin=0.05"],
        slow(["mtp.margin=0.05", "mtp.strict=true"]),
        ["mtp.gate=0.4"],
        slow(["mtp.keep_accepted=true"]),
        slow(["mtp.probe=true"]),
        ["commit.stop=['e']"],
        slow(["commit.max_tokens=4"]),
        slow(["draft=off"]),
        slow(["runtime.context=32"]),
    ],
    ids=" ".join,
)
def test_every_knob_means_the_same(tmp_path: Path, words: list[str]) -> None:
    """On the demo model, whose drafts are sometimes right."""
    base = ["mtp.draft=3", "commit.max_tokens=16", "runtime.context=60"]
    ordinary, graph = both(tmp_path, [*base, *words])
    assert_same(ordinary, graph)
    if "gate" in words[0]:
        assert {"gate", "depth"} <= {cycle["draft_end"] for cycle in graph.cycles}
    if words == ["mtp.margin=0.05"]:
        assert graph.summary["relaxed_accepts"] > 0
    if "stop" in words[0]:
        assert graph.state.done == "stop"


def test_the_end_of_the_text_is_seen_on_the_device(tmp_path: Path, golden_dir: Path) -> None:
    """A token of the text is declared its end: nothing behind it is committed, and the drafter
    stops before it."""
    words = [*golden(golden_dir), "mtp.draft=3", "commit.max_tokens=24"]
    text = run(tmp_path / "first", ["pipeline=graph", *words]).state.output
    end = next(token for at, token in enumerate(text) if at >= 6 and token not in text[:at])

    def ending(name: str) -> Ran:
        config = compose([*COMMON, *words, f"pipeline={name}"])
        directory = RunDir.create(tmp_path / name)
        state = State(run=directory, prompt=read_prompt(config))
        pipeline = build_pipeline(config)
        load = pipeline.stages["load"]
        plain = load.run

        def loaded(state: State) -> None:
            plain(state)
            state.tokenizer.eos = end

        load.run = loaded  # type: ignore[method-assign]
        pipeline.run(state)
        lines = (tmp_path / name / "cycles.jsonl").read_text().splitlines()
        arrays = [dict(np.load(path)) for path in sorted((tmp_path / name).glob("logits/*.npz"))]
        return Ran(state, [json.loads(line) for line in lines], arrays, {}, {})

    ordinary, graph = ending("speculative"), ending("graph")
    assert_same(ordinary, graph)
    assert graph.state.done == "eos"
    assert graph.state.output == text[: text.index(end)]


def test_auto_depth_learns_from_whole_cycles(tmp_path: Path) -> None:
    words = ["mtp.draft=auto", "commit.max_tokens=24", "runtime.context=80"]
    plain = run(tmp_path / "plain", ["mtp.draft=0", *words[1:]])
    graph = run(tmp_path / "graph", ["pipeline=graph", *words])
    assert graph.state.tokens == plain.state.tokens
    assert any(cycle["drafts"] for cycle in graph.cycles)
    assert all("depth_choice" in cycle for cycle in graph.cycles)


@pytest.mark.parametrize("lossless", [slow(False), True])
def test_sampling_draws_what_the_ordinary_pipeline_draws(tmp_path: Path, lossless: bool) -> None:
    words = ["sampling.temperature=0.8", "sampling.seed=5", "commit.max_tokens=10"]
    words += ["runtime.context=60"]
    ordinary = run(tmp_path / "ordinary", words)
    graph = run(
        tmp_path / "graph", ["pipeline=graph", *words, f"sampling.lossless={str(lossless).lower()}"]
    )
    assert_same(ordinary, graph)
    assert graph.state.identity == "sampled"
    assert ("pipeline=speculative" in graph.state.mtp_off) == lossless


def test_the_parity_pipeline_of_the_graph(tmp_path: Path) -> None:
    words = ["pipeline=graph-parity", "check=state", "mtp.draft=4", "commit.max_tokens=14"]
    ran = run(tmp_path / "run", [*words, "runtime.context=60"])
    assert ran.facts["parity"]["equal"]
    assert ran.facts["parity"]["positions"] == 14
    assert ran.facts["parity"]["rollbacks"] > 0
    assert ran.facts["check"]["different"] == []


def test_without_mtp_weights_it_decodes_greedily_and_says_why(
    tmp_path: Path, golden_dir: Path
) -> None:
    words = [word for word in golden(golden_dir) if "mtp_path" not in word]
    ran = run(tmp_path / "run", ["pipeline=graph", *words, "mtp.draft=2", "commit.max_tokens=3"])
    assert len(ran.state.output) == 3
    assert "no MTP weights" in ran.facts["mtp_off"]


def test_another_drafter_is_refused() -> None:
    with pytest.raises(UsageError, match="the model's own MTP block"):
        build_pipeline(compose(["pipeline=graph", "draft=lying"]))


def test_eager_is_said_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pipeline=graph", "runtime.eager=true", "commit.max_tokens=2", "runtime.context=60"]
    ran = run(tmp_path / "run", words)
    assert ran.facts["decode"] == {"mode": "eager", "why": "runtime.eager=true asks for it"}
    assert "decoding: eager (runtime.eager=true asks for it)" in capsys.readouterr().err
    assert ran.state.runs_on.endswith("decoding: eager")
