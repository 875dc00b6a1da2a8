"""model=synth-flash: the path of a full-size rehearsal, small enough for this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4flow import rundir
from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.prompt_run import perform
from ds4flow.recorded import recorded
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run
from ds4flow.synth import unwritten
from ds4flow.synth.presets import FLASH
from ds4flow.synth.unwritten import Unwritten
from ds4flow.synth.write import synthesize
from ds4flow.wiring import build_pipeline

SMALL: dict[str, Any] = {
    **{"layers": 4, "dim": 256, "vocab": 640, "heads": 4, "head_dim": 128, "q_rank": 64},
    **{"groups": 2, "o_rank": 32, "experts": 8, "experts_used": 2, "expert_dim": 256},
    **{"index_heads": 4, "top_k": 16},
}
MEANINGLESS = "the weights are random (model=synth-flash), so the text means nothing"

pytestmark = pytest.mark.usefixtures("alone")


def run(*words: str, sizes: dict[str, Any] = SMALL) -> Run:
    changes = [f"model.synth.{key}={value}" for key, value in sizes.items()]
    common = ["model=synth-flash", "log=quiet", "runtime.context=64", "commit.max_tokens=6"]
    config = compose([*common, *changes, *words])
    folder = rundir.allocate("runs/x/NNNN")
    directory = RunDir.create(folder)
    with recorded(directory):
        perform(config, directory)
    return Run.open(folder)


def test_a_small_flash_runs_through_the_graph_and_stage_by_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["mtp.draft=2", "commit.ignore_eos=true", "mtp.full_logits=true"]
    graph = run("pipeline=graph", *words)
    assert f"; {MEANINGLESS}\n" in capsys.readouterr().err
    stages = run("runtime.kernels=static", *words)
    assert graph.tokens == stages.tokens
    assert len(graph.tokens) == 6
    left, right = (sorted(one.path.glob("logits/*")) for one in (graph, stages))
    assert [path.read_bytes() for path in left] == [path.read_bytes() for path in right] != []
    assert graph.summary["num_draft_tokens"] > 0
    assert MEANINGLESS in graph.summary["warnings"]
    made = graph.facts["synth"]
    assert (made["name"], made["seed"], made["config"]["layers"]) == ("synth-flash", 0, 4)
    assert (made["types"]["gate_up"], made["types"]["down"]) == ("IQ2_XXS", "Q2_K")
    assert graph.facts["files"] == stages.facts["files"]
    assert graph.facts["files"]["main"]["bytes"] == 4802004


def test_every_prompt_of_a_set_and_the_set_say_it() -> None:
    rows = [{"id": name, "category": "c", "prompt": name} for name in ("ab", "cd")]
    Path("set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = run("prompts=set.jsonl", "mtp.draft=0", "runtime.kernels=reference")
    assert ran.summary["prompt_statuses"] == {"complete": 2}
    assert ran.summary["warnings"][0] == MEANINGLESS
    assert ran.facts["synth"]["seed"] == 0


def test_full_size_is_refused_with_the_sizes_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unwritten, "Synthesis", None)  # would fail if it were called
    with pytest.raises(Ds4FlowError, match=r"weights and the cache .* need 84\.\d GiB") as caught:
        run("runtime.memory=24", sizes={"vocab": 640})
    assert caught.value.what.endswith("but the device has 24.0 GiB free")
    assert "model.synth.layers=4" in caught.value.fix


def test_the_headers_are_those_of_files(tmp_path: Path) -> None:
    made = Unwritten.flash(SMALL | {"mix": "q4", "seed": 7})
    main, mtp = made.headers()
    assert ModelConfig.from_gguf(main) == made.recipe.config
    synthesize(made.recipe, tmp_path / "a.gguf", mtp_path=tmp_path / "b.gguf", seed=7)
    for ours, name in ((main, "a.gguf"), (mtp, "b.gguf")):
        file = GgufFile.open(tmp_path / name)
        for key in ("general.architecture", "general.name", "tokenizer.ggml.tokens"):
            assert ours.metadata.get(key) == file.metadata.get(key)
        assert {(t.name, t.type, t.shape, t.nbytes) for t in ours.tensors.values()} == {
            (t.name, t.type, t.shape, t.nbytes) for t in file.tensors.values()
        }


def test_what_it_is_depends_on_recipe_and_seed() -> None:
    plain = Unwritten.flash({"layers": None})
    assert plain.recipe.config == FLASH
    digests = {
        Unwritten.flash(changes).sha256()
        for changes in ({}, {"seed": 1}, {"mix": "q4"}, {"layers": 4}, {"down": "Q4_K"})
    }
    assert plain.sha256() in digests
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=synth-flash", "+model.synth.layrs=2"], "layrs is not a key"),
        (["model=synth-flash", "model.synth.mix=q3"], "mix=q3 is not a mix"),
        (["model=synth-flash", "model.synth.seed=x"], "seed=x is not a number"),
        (["model=synth-flash", "model.synth.dim=100"], "not whole Q8_0 blocks"),
        (["model=synth-flash", "runtime.tensor_parallel=2"], "made in one process"),
        (["load=synth"], "load=synth makes no model up"),
        (["download=synth"], "download=synth makes no files up"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_pipeline(compose(words))
