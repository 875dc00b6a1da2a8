"""Comparing two configs: arms, the order of runs, ratios, texts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ds4flow.ab import result
from ds4flow.ab.arms import words_of_file
from ds4flow.bench.samples import Samples
from ds4flow.errors import UsageError
from ds4flow.model.trunk import Model
from ds4flow.runs.record import Run, find_runs
from tests import fakes
from tests.command import ds4flow

CONF = str(Path(__file__).parent / "data" / "conf")
FAKE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default", "draft=lying")
SHORT = ("prompt=hello", "commit.max_tokens=9")


pytestmark = pytest.mark.usefixtures("alone")


def ab(*arguments: str) -> Result:
    return ds4flow("ab", *arguments)


def record(folder: str | Path = "runs/demo/0001") -> dict[str, Any]:
    return json.loads((Path(folder) / "ab.json").read_text())


def write_set(name: str = "set.jsonl", **changes: str) -> str:
    rows = [
        {"id": "one", "category": "code", "prompt": "abc"},
        {"id": "two", "category": "text", "prompt": "def", **changes},
    ]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"prompts={name}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A comparison of no drafts with two, in five pairs, and its directory."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        found = ab(*FAKE, *SHORT, "--json", "--", "mtp.draft=0", "--", "mtp.draft=2")
    return place / "runs/demo/0001", found


def test_the_arms_run_in_turn_and_every_run_is_kept(made: tuple[Path, Result]) -> None:
    folder, found = made
    assert found.exit_code == 0, found.stderr
    facts = record(folder)
    assert facts["status"] == "complete"
    assert "".join(run["arm"] for run in facts["order"]) == "BA" + "ABBAABBAAB"
    assert [run["warmup"] for run in facts["order"]] == [True] * 2 + [False] * 10
    names = [run["directory"] for run in facts["order"]]
    assert names == sorted(path.name for path in folder.glob("0*"))
    assert [path.name for path in find_runs(folder)] == names
    for entry in facts["order"]:
        run = Run.open(folder / entry["directory"])
        assert run.status == "complete"
        assert run.facts["arm"] == entry["arm"]
        assert run.config["mtp.draft"] == {"A": 0, "B": 2}[entry["arm"]]
        assert run.origins["mtp.draft"] == f"arm {entry['arm']}: {run.facts['arm_title']}"
        assert run.origins["commit.max_tokens"] == "cli"
        assert len(run.tokens) == 9
    assert facts["differences"] == {"mtp.draft": [0, 2]}
    assert not facts["same_config"]
    assert facts["text"] == {"equal": True, "compared_tokens": 9, "must_be_equal": True}
    assert "1 before are discarded" in found.stderr


def test_ratios_are_those_of_the_pairs_that_ran_together(made: tuple[Path, Result]) -> None:
    facts = record(made[0])
    rates: dict[str, list[float]] = {"A": [], "B": []}
    for entry in facts["order"]:
        if not entry["warmup"]:
            run = Run.open(made[0] / entry["directory"])
            rates[entry["arm"]].append(run.summary["tokens_per_second"])
    assert facts["figures"]["A"]["tokens_per_second"]["values"] == rates["A"]
    pairs = [b / a for a, b in zip(rates["A"], rates["B"], strict=True)]
    assert facts["ratio"]["values"] == pairs
    assert len(pairs) == facts["repeats"] == 5
    assert facts["ratio"]["median"] == sorted(pairs)[2]
    interval = facts["ratio"]["interval"]
    assert (interval["low"], interval["high"]) == (min(pairs), max(pairs))
    assert interval["coverage"] == 0.9375
    assert "order statistics" in interval["method"]


def test_json_is_what_ab_json_holds(made: tuple[Path, Result]) -> None:
    assert json.loads(made[1].stdout) == record(made[0])


def test_the_same_config_twice_is_called_an_a_a_run() -> None:
    found = ab(*FAKE, *SHORT, "--repeats", "2", "--", "mtp.draft=1", "--", "mtp.draft=1")
    assert found.exit_code == 0
    assert record()["same_config"]
    assert record()["loads"] == 1
    assert "A/A: the arms are the same config" in found.stderr
    assert "verdict: A/A: this is noise alone" in found.stdout
    assert "one load for both arms" in found.stdout
    for word in ("A: mtp.draft=1", "B: mtp.draft=1", "order statistics", "note: one prompt only"):
        assert word in found.stdout
    assert "the same 9 tokens in every run of both arms" in found.stdout


def test_arms_from_yaml_files() -> None:
    Path("A.yaml").write_text("mtp.draft: 0\nprompt: 'a, ${b}: \"c\"'\n")
    Path("B.yaml").write_text("mtp:\n  draft: 2\n  gate: 0.5\nprompt: 'a, ${b}: \"c\"'\n")
    found = ab(*FAKE, SHORT[1], "--repeats", "1", "A.yaml", "B.yaml")
    assert found.exit_code == 0, found.stderr
    assert record()["differences"] == {"mtp.draft": [0, 2], "mtp.gate": [0.0, 0.5]}
    assert Run.open("runs/demo/0001/003-a").prompt == 'a, ${b}: "c"'
    assert "A: A.yaml" in found.stdout


def test_every_kind_of_value_in_yaml() -> None:
    Path("a.yaml").write_text(
        "model: demo\nmtp: {strict: true, margin: 0.5, draft: auto}\nruntime.context: null\n"
        "commit.stop: ['a,b', \"it's\"]\nprompt: '[x]'\nexperiment: relaxed\n"
    )
    assert words_of_file("a.yaml") == [
        *("model=demo", "mtp.strict=true", "mtp.margin=0.5", "mtp.draft='auto'"),
        *("runtime.context=null", "commit.stop=['a,b','it\\'s']", "prompt=[x]"),
        "experiment=relaxed",
    ]
    Path("empty.yaml").write_text("")
    assert words_of_file("empty.yaml") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [\n", "line 2"),
        ("- a\n", "holds a list"),
        ("mtp: {draft: [1, 2]}\n", "mtp.draft is a list"),
        ("defaults: [x]\n", "no defaults list"),
        ("prompt: 2020-01-01\n", "prompt is a date"),
        ("mtp.drfat: 2\n", "arm A (a.yaml): there is no key mtp.drfat"),
        ("mtp.draft: 99\n", "arm A (a.yaml): mtp.draft=99 is too large"),
    ],
)
def test_a_wrong_file_is_two_lines_and_makes_no_directory(text: str, says: str) -> None:
    Path("a.yaml").write_text(text)
    Path("b.yaml").write_text("mtp.draft: 2\n")
    found = ab("a.yaml", "b.yaml")
    assert found.exit_code == 2
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 2
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "0 YAML files were given"),
        (("a.yaml",), "1 YAML files were given"),
        (("--", "mtp.draft=0"), "there are 1"),
        (("--", "a=1", "--", "a=2", "--", "a=3"), "there are 3"),
        (("x.yaml", "--", "mtp.draft=0", "--", "mtp.draft=1"), "'x.yaml' stands before --"),
        (("no.yaml", "none.yaml"), "no.yaml cannot be read"),
        (("--", "mtp.draft=0", "--", "mtp.drafts=1"), "arm B (mtp.drafts=1): there is no key"),
        (("--", "mtp.draft=0", "--", "mtp.draft=0,1"), "arm B"),
        (("--allow", "weight", "--", "--"), "--allow weight: there is no such condition"),
        (("prompt=x", "prompts=demo", "--", "--"), "prompt and prompts are both given"),
    ],
)
def test_what_does_not_make_two_arms(arguments: tuple[str, ...], says: str) -> None:
    found = ab(*arguments)
    assert found.exit_code == 2
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 2
    assert not Path("runs").exists()


def test_a_variable_may_not_override_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_MTP_DRAFT", "3")
    found = ab(*FAKE, *SHORT, "--", "mtp.draft=0", "--", "mtp.draft=2")
    assert found.exit_code == 2
    assert "DS4_MTP_DRAFT=3 would override mtp.draft of the arms" in found.stderr
    arms = ("--", "mtp.gate=0", "--", "mtp.gate=1")
    assert ab(*FAKE, *SHORT, "--repeats", "1", *arms).exit_code == 0
    assert Run.open("runs/demo/0001/003-a").config["mtp.draft"] == 3


def test_a_common_word_gives_way_to_an_arms_own() -> None:
    arms = ("--", "mtp.draft=0", "--")
    assert ab(*FAKE, *SHORT, "mtp.draft=2", "--repeats", "1", *arms).exit_code == 0
    assert record()["differences"] == {"mtp.draft": [0, 2]}


def test_flags_hold_for_both_arms_and_give_way_to_an_arms_own() -> None:
    common = ("-p", "hello", "-n", "9", "--ctx", "77", "--repeats", "1", "--warmup", "0")
    found = ab(*FAKE, *common, "--", "mtp.draft=0", "--", "mtp.draft=2", "runtime.context=99")
    assert found.exit_code == 0, found.stderr
    assert record()["differences"] == {"mtp.draft": [0, 2], "runtime.context": [77, 99]}
    for name in ("001-a", "002-b"):
        run = Run.open(f"runs/demo/0001/{name}")
        assert (run.prompt, run.config["commit.max_tokens"]) == ("hello", 9)
        assert run.origins["commit.max_tokens"] == "flag --max-tokens"
    twice = ab(*FAKE, *SHORT, "-n", "9", "--", "--")
    assert twice.exit_code == 2
    assert "commit.max_tokens is given twice" in twice.stderr


def test_sets_are_compared_by_category() -> None:
    arms = ("--", "mtp.draft=0", "--", "mtp.draft=2")
    found = ab(*FAKE, SHORT[1], write_set(), "--repeats", "2", *arms)
    assert found.exit_code == 0, found.stderr
    facts = record()
    assert list(facts["categories"]) == ["code", "text"]
    assert all(len(one["values"]) == 2 for one in facts["categories"].values())
    assert facts["text"] == {"equal": True, "compared_tokens": 18, "must_be_equal": True}
    assert (Path("runs/demo/0001/003-a/prompt-001-two") / "output.txt").is_file()
    assert "  code" in found.stdout
    assert "one prompt only" not in found.stdout


# --- what must be the same ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arms",
    [
        ("--", "prompt=one", "--", "prompt=two"),
        ("--", "prompts=set.jsonl", "--", "prompts=other.jsonl"),
        ("--", "prompts=set.jsonl", "--", "prompt=abc"),
    ],
)
def test_report_69_other_prompts_are_refused(arms: tuple[str, ...]) -> None:
    write_set()
    write_set("other.jsonl", prompt="xyz")
    found = ab(*FAKE, *arms)
    assert found.exit_code == 2
    assert "the arms have different prompts" in found.stderr
    assert "--allow prompts" in found.stderr
    assert not Path("runs").exists()  # nothing was loaded


def test_report_69_other_prompts_can_be_allowed_and_are_said() -> None:
    words = (*FAKE, SHORT[1], "--repeats", "1", "--warmup", "0", "--allow", "prompts")
    found = ab(*words, "--", "prompt=one", "--", "prompt=two")
    assert found.exit_code == 0, found.stderr
    assert "note: allowed to differ: prompts" in found.stdout
    assert record()["text"]["equal"] is None


@pytest.mark.slow
def test_report_69_another_chat_format_makes_another_prompt() -> None:
    words = ("name=t", "commit.max_tokens=4", "--repeats", "1")
    found = ab(*words, "--", "model.chat=raw", "--", "model.chat=nothink")
    assert found.exit_code == 2
    assert "the arms have different prompts" in found.stderr
    facts = record("runs/t/0001")
    assert facts["status"] == "failed"
    assert len(facts["order"]) == 2  # stopped after one run of each


@pytest.mark.slow
def test_other_weights_can_be_allowed_and_are_loaded_each() -> None:
    path = Path(str(resources.files("ds4flow.demo") / "ds4flow-demo.gguf"))
    data = bytearray(path.read_bytes())
    data[-64] ^= 1
    Path("other.gguf").write_bytes(data)
    words = ("name=t", "commit.max_tokens=4", "--repeats", "1", "--warmup", "0")
    arms = ("--", "mtp.draft=1", "--", "model.path=other.gguf", "model.sha256=null")
    found = ab(*words, "--allow", "weights", *arms)
    assert found.exit_code == 0, found.stderr
    assert "text: not compared: the arms have different weights" in found.stdout
    assert record("runs/t/0001")["loads"] == 2


def facts_of(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": "here",
        "machine": {"processor": "p", "cores": 2},
        "files": {"main": {"sha256": "aa"}, "mtp": {"sha256": "bb"}},
        "identity": "exact",
    }
    return facts | changes


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"files": {"main": {"sha256": "cc"}, "mtp": {"sha256": "bb"}}}, ["weights"]),
        ({"files": {"main": {"sha256": "aa"}, "mtp": {"sha256": "cc"}}}, ["weights"]),
        ({"files": {"main": {"sha256": "aa"}, "mtp": None}}, []),
        ({"files": {"main": {"sha256": None, "bytes": 1}}}, ["weights"]),
        ({"host": "there"}, ["machine"]),
        ({"machine": {"processor": "p", "cores": 3}}, ["machine"]),
        ({"device": "cuda:0"}, ["machine"]),
        ({"prompt_set": "dd"}, ["prompts"]),
        ({"prompt_set": "dd", "host": "there"}, ["prompts", "machine"]),
    ],
)
def test_what_makes_runs_incomparable(
    tmp_path: Path, changes: dict[str, Any], found: list[str]
) -> None:
    first = Run(tmp_path, facts_of())
    second = Run(tmp_path, facts_of(**changes))
    assert result.unlike(first, second) == found
    if not found:
        return
    with pytest.raises(UsageError, match=f"different {' and '.join(found)},") as caught:
        result.refuse_unlike(first, second, ())
    assert caught.value.fix.endswith(f"--allow {','.join(found)}")
    assert result.refuse_unlike(first, second, found) == found


# --- texts ----------------------------------------------------------------------------------------


def test_texts_that_part_though_both_arms_are_exact_are_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target: Callable[[int], fakes.Target] = fakes.chaotic

    def faulty(seed: int) -> fakes.Target:
        """Chooses another token at position 10 once it has been asked there before."""
        choose, asked = target(seed), []

        def chosen(context: tuple[int, ...]) -> int:
            asked.append(len(context))
            wrong = len(context) == 10 and asked.count(10) > 3
            return fakes.BYTES + ord("Z") if wrong else choose(context)

        return chosen

    monkeypatch.setattr(fakes, "chaotic", faulty)
    arms = ("--", "mtp.draft=0", "--", "mtp.draft=4")
    found = ab(*FAKE, *SHORT, "--repeats", "1", "--warmup", "0", *arms)
    assert found.exit_code == 1
    assert "text: not the same, which is a fault" in found.stdout
    assert "part at output token" in found.stdout
    assert record()["text"]["must_be_equal"]
    assert record()["text"]["first_difference"]["index"] >= 0


def test_texts_of_other_lengths_are_no_fault() -> None:
    arms = ("--", "commit.max_tokens=5", "--", "commit.max_tokens=9")
    found = ab(*FAKE, SHORT[0], "--repeats", "1", *arms)
    assert found.exit_code == 0
    assert "which may be" in found.stdout
    assert "the arms wrote 5 and 9 tokens" in found.stdout


def test_relaxed_arms_may_differ_and_say_so() -> None:
    words = ("name=t", "prompts=demo", "commit.max_tokens=12", "--repeats", "1", "--warmup", "0")
    arms = ("--", "mtp.draft=2", "--", "mtp.draft=2", "mtp.margin=0.01")
    found = ab(*words, *arms)
    assert found.exit_code == 0, found.stderr
    facts = record("runs/t/0001")
    assert facts["loads"] == 1
    assert facts["figures"]["B"]["identity"] == "relaxed"
    assert facts["text"]["equal"] is False
    assert "which may be: exact and relaxed" in found.stdout
    assert " in prompt " in found.stdout


def test_report_39_an_arm_without_drafts_loads_no_block_that_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks: list[bool] = []
    load: Callable[..., Model] = Model.load

    def seen(main: Any, mtp: Any, **options: Any) -> Model:
        blocks.append(mtp is not None)
        return load(main, mtp, **options)

    monkeypatch.setattr(Model, "load", seen)
    words = ("name=t", "commit.max_tokens=5", "--repeats", "2")
    found = ab(*words, "--", "mtp.draft=0", "--", "mtp.draft=2")
    assert found.exit_code == 0, found.stderr
    assert sorted(blocks) == [False, True]
    assert record("runs/t/0001")["loads"] == 2
    assert "each arm loaded once" in found.stdout


# --- endings --------------------------------------------------------------------------------------


def test_a_failure_names_the_arm_and_keeps_what_was_run() -> None:
    arms = ("--", "mtp.draft=0", "--", "model=file", "model.path=nowhere.gguf", "prompt=x")
    found = ab("name=t", "prompt=x", "commit.max_tokens=4", *arms)
    assert found.exit_code == 1
    assert found.stderr.splitlines()[-2].startswith("error: arm B (model=file ")
    facts = record("runs/t/0001")
    assert facts["status"] == "failed"
    assert [Run.open(f"runs/t/0001/{one['directory']}").status for one in facts["order"]]


def test_a_stop_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = fakes.Start.run, []

    def interrupted(self: fakes.Start, state: Any) -> None:
        start(self, state)
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(fakes.Start, "run", interrupted)
    found = ab(*FAKE, *SHORT, "--", "mtp.draft=0", "--", "mtp.draft=2")
    assert found.exit_code == 130
    assert record()["status"] == "interrupted"
    statuses = [Run.open(path).status for path in find_runs("runs")]
    assert statuses == ["complete"] * 3 + ["interrupted"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((1.1, 1.2, 1.3, 1.2, 1.1), "B is faster"),
        ((0.9, 0.8, 0.7, 0.8, 0.9), "B is slower"),
        ((0.9, 1.1, 1.2, 1.1, 1.1), "no difference is shown"),
        ((1.1, 1.2, 1.3), "too few to be sure: --repeats 6"),
    ],
)
def test_verdicts(values: tuple[float, ...], says: str) -> None:
    found = result.ratio(Samples((1.0,) * len(values)), Samples(values))
    assert says in result.verdict(found, same=False)
    assert "noise" in result.verdict(found, same=True)
