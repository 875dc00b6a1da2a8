"""Prompt sets as a user runs them: one load, a directory a prompt, results by category."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ds4flow import rundir
from ds4flow.config import compose
from ds4flow.depth import Decision, DepthPolicy
from ds4flow.device import choose_device
from ds4flow.metrics import Counts
from ds4flow.model.trunk import Model
from ds4flow.overrides import literal
from ds4flow.prompt_run import SOURCE, perform
from ds4flow.prompt_set import read
from ds4flow.prompt_summary import Figures, SetResult
from ds4flow.recorded import recorded
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run
from tests import fakes
from tests.command import ds4flow

CONF = str(Path(__file__).parent / "data" / "conf")
DEMO = ("name=t", "log=quiet", "commit.max_tokens=12", "commit.ignore_eos=true")
FAKE = ("--config-dir", CONF, "pipeline=fake", "+fakeload=default", "draft=lying")


pytestmark = pytest.mark.usefixtures("alone")


def run(*words: str) -> Run:
    """Run without the command line, which costs more time than the run."""
    folder = rundir.allocate("runs/x/NNNN")
    config = compose([literal(word) for word in (*DEMO, *words)])
    directory = RunDir.create(folder)
    with recorded(directory):
        perform(config, directory)
    return Run.open(folder)


def write(rows: Iterable[dict[str, Any]], name: str = "set.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"prompts={name}"


def rows(*texts: str, category: str = "code") -> list[dict[str, Any]]:
    return [{"id": text[:9], "category": category, "prompt": text} for text in texts]


def parts(run: str | Path) -> dict[str, Run]:
    """The prompts of a set by id."""
    found = [Run.open(path) for path in sorted(Path(run).glob("prompt-*"))]
    return {one.facts["prompt_id"]: one for one in found}


def traces(run: Run) -> tuple[Any, ...]:
    """Everything that a run left and that does not depend on how fast it was."""
    cycles = []
    for cycle in run.cycles():
        cycles.append({key: value for key, value in cycle.items() if key != "micros"})
    logits = [path.read_bytes() for path in sorted(run.path.glob("logits/*"))]
    return run.prompt_tokens, run.tokens, run.text, cycles, logits


TEXTS = ("def a(x):", "QQQQ", "for i in range(10):\n    print(i)\n", "z")


@pytest.mark.parametrize(
    "words",
    [
        ("mtp.draft=3", "mtp.full_logits=true"),
        ("mtp.draft=2", "mtp.margin=0.2"),
        ("pipeline=greedy", "mtp.full_logits=true"),
        ("pipeline=parity", "mtp.draft=2"),
        ("pipeline=graph", "mtp.draft=2"),
        ("mtp.draft=2", "check=state", "mtp.keep_accepted=true"),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_prompt_of_a_set_is_a_run_of_its_own(words: tuple[str, ...]) -> None:
    found = parts(run(*words, write(rows(*TEXTS))).path)
    for text in TEXTS[1:3] if "mtp.draft=3" in words else TEXTS[-1:]:
        assert traces(found[text[:9]]) == traces(run(*words, f"prompt={text}"))
    if "pipeline=graph" in words:  # each width is made ready once for the whole set
        first, *others = (one.facts["graphs"] for one in found.values())
        assert (first["built"], first["kept"]) == ([0, 1, 2], [])
        assert [(graphs["built"], graphs["kept"]) for graphs in others] == [([], [0, 1, 2])] * 3
    for one in found.values():
        graphs = one.facts.get("graphs")
        assert graphs is None or sum(graphs["replays"].values()) == len(list(one.cycles()))


@pytest.mark.parametrize(
    "words",
    [
        ("mtp.draft=3",),
        ("mtp.draft=2", "sampling.temperature=1", "sampling.lossless=true", "sampling.seed=4"),
    ],
    ids=lambda words: " ".join(words),
)
def test_the_order_of_prompts_changes_nothing(words: tuple[str, ...]) -> None:
    found = []
    for texts in (TEXTS, TEXTS[::-1], (TEXTS[2], TEXTS[0])):
        folder = run(*words, write(rows(*texts))).path
        found.append({name: traces(part) for name, part in parts(folder).items()})
    assert found[0] == found[1]
    assert found[2].items() <= found[0].items()


def test_a_seed_of_its_own_reproduces_a_prompt() -> None:
    words = ("mtp.draft=2", "sampling.temperature=1", "sampling.lossless=true")
    assert ds4flow("run", *DEMO, *words, "sampling.seed=4", write(rows(*TEXTS))).exit_code == 0
    part = parts("runs/t/0001")["QQQQ"]
    seed = part.config["sampling.seed"]
    assert seed == read("set.jsonl").prompts[1].seed(4) == part.facts["seed"]
    assert part.origins["sampling.seed"] == SOURCE
    again = run(*words, "prompt=QQQQ", f"sampling.seed={seed}")
    assert again.tokens == part.tokens
    assert Run.open("runs/t/0001").facts["identity"] == "sampled"


def test_the_model_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    load: Callable[..., Model] = Model.load
    monkeypatch.setattr(Model, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    run("mtp.draft=2", write(rows(*TEXTS)))
    assert len(loads) == 1


def test_what_the_directory_of_a_set_holds() -> None:
    data = [*rows("aaa", "bbb", category="one"), *rows("ccc", category="two")]
    assert ds4flow("run", *DEMO, "mtp.draft=2", write(data)).exit_code == 0
    whole = Run.open("runs/t/0001")
    source = Path("set.jsonl").read_bytes()
    assert (whole.path / "prompts.jsonl").read_bytes() == source
    assert whole.facts["prompt_set"] == read("set.jsonl").sha256
    assert whole.facts["prompt_set_file"]["name"] == "set.jsonl"
    assert whole.facts["files"]["main"]["sha256"]
    assert whole.facts["kernels"] == choose_device("cpu").kernels
    assert whole.facts["chat"] == "raw"
    assert len(whole.facts["chat_template"] or "x" * 64) == 64
    assert "prompt_id" not in whole.facts
    assert whole.status == "complete"
    names = [f"prompt-00{index}-{row['id']}" for index, row in enumerate(data)]
    assert sorted(path.name for path in whole.path.glob("prompt-*")) == names
    for name, row in zip(names, data, strict=True):
        there = {path.name for path in (whole.path / name).iterdir()}
        usual = {"prompt.txt", "output.txt", "tokens.json", "cycles.jsonl", "summary.json"}
        assert usual | {"run.json"} <= there
        part = Run.open(whole.path / name)
        assert part.prompt == part.config["prompt"] == row["prompt"]
        assert part.config["prompts"] is None
        assert part.status == "complete"
    assert list(whole.summary["categories"]) == ["one", "two"]
    assert [row["id"] for row in whole.summary["prompts"]] == ["aaa", "bbb", "ccc"]
    assert [row["directory"] for row in whole.summary["prompts"]] == names
    table = ds4flow("run", *DEMO[:1], *DEMO[2:], "log.stream=false", write(data))
    for word in ("category", "one", "two", "total", "tokens/s", "accepted", "identity", "exact"):
        assert word in table.stderr


def test_totals_are_taken_from_counts() -> None:
    data = rows("aaa", "bbb", category="one") + rows("ccc", category="two")
    data[0]["max_tokens"] = 40  # so that an average of ratios would be another number
    whole = run("mtp.draft=3", write(data))
    for name, ids in (("one", ["aaa", "bbb"]), ("two", ["ccc"]), (None, ["aaa", "bbb", "ccc"])):
        figures = whole.summary if name is None else whole.summary["categories"][name]
        of = [parts(whole.path)[one] for one in ids]
        cycles = [cycle for part in of for cycle in part.cycles()]
        drafted = sum(cycle["drafted"] for cycle in cycles)
        accepted = sum(cycle["accepted"] for cycle in cycles)
        output = sum(len(part.tokens) for part in of)
        assert figures["num_draft_tokens"] == drafted
        assert figures["draft_acceptance_rate"] == accepted / drafted
        assert figures["mean_acceptance_length"] == output / len(cycles)
        seconds = sum(part.summary["decode_seconds"] for part in of)
        assert figures["tokens_per_second"] == output / seconds
        histogram = figures["acceptance_histogram"]
        assert sum((k + 1) * count for k, count in enumerate(histogram)) == output
        for depth, share in enumerate(figures["accepted_per_position"], 1):
            reached = [cycle["accepted"] >= depth for cycle in cycles if cycle["drafted"] >= depth]
            assert share == sum(reached) / len(reached)


def test_totals_need_no_trace() -> None:
    words = ("mtp.draft=3", write(rows(*TEXTS)))
    traced, untraced = run(*words).summary, run(*words, "trace=off").summary
    for name in ("cycles", "num_draft_tokens", "skipped", "accepted_per_position"):
        assert untraced[name] == traced[name] != []


def test_values_of_a_prompt_replace_those_of_the_run() -> None:
    data = rows("aaa", "bbb", "ccc")
    data[1] |= {"max_tokens": 5}
    data[2] |= {"system": "Say ${nothing} \\${x} 'y'."}
    words = ("model.chat=nothink", "mtp.draft=4", "system=Be brief.")
    assert ds4flow("run", *DEMO, *words, write(data)).exit_code == 0
    found = parts("runs/t/0001")
    assert [len(run.tokens) for run in found.values()] == [12, 5, 12]
    assert found["bbb"].config["commit.max_tokens"] == 5
    assert found["bbb"].origins["commit.max_tokens"] == SOURCE
    assert found["aaa"].config["system"] == "Be brief."
    assert found["ccc"].config["system"] == data[2]["system"]
    for name, row in (("aaa", data[0]), ("ccc", data[2])):
        system = f"system={row.get('system', 'Be brief.')}"
        single = run(*words[:2], f"prompt={row['prompt']}", system)
        assert single.prompt_tokens == found[name].prompt_tokens


def test_a_conversation_goes_through_the_chat_format() -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning": "Hm"},
        {"role": "user", "content": "Three"},
    ]
    data = [{"id": "talk", "category": "chat", "messages": talk[:2]}]
    data.append({"id": "long", "category": "chat", "messages": talk})
    words = ("model.chat=think", "mtp.draft=2")
    assert ds4flow("run", *DEMO, *words, write(data)).exit_code == 0
    found = parts("runs/t/0001")
    single = run(*words, "prompt=One", "system=Be brief.")
    assert found["talk"].tokens == single.tokens
    assert found["talk"].prompt_tokens == single.prompt_tokens
    assert len(found["long"].prompt_tokens) > len(found["talk"].prompt_tokens)
    assert [json.loads(line) for line in found["long"].prompt.splitlines()] == talk
    replayed = ds4flow("replay", "t/0001/prompt-001-long")
    assert replayed.exit_code == 2
    assert "is a conversation" in replayed.stderr
    result = ds4flow("run", *DEMO, write(data))
    assert result.exit_code == 1
    assert "set.jsonl, line 1: there are messages, but model.chat=raw" in result.stderr


def test_a_prompt_that_fails_does_not_stop_the_others() -> None:
    data = rows("aaa", "x " * 200, "ccc", category="one")
    data += rows("y " * 300, category="two")
    result = ds4flow("run", *DEMO, "mtp.draft=2", "runtime.context=64", write(data))
    assert result.exit_code == 1
    assert "2 of 4 prompts failed: x x x x x and 1 more: " in result.stderr
    assert "leaves no room" in result.stderr
    assert "Traceback" not in result.stderr
    whole = Run.open("runs/t/0001")
    assert whole.status == "failed"
    assert "2 of 4 prompts failed" in whole.facts["error"]
    listed = whole.summary["prompts"]
    assert [row["status"] for row in listed] == ["complete", "failed", "complete", "failed"]
    assert "leaves no room" in listed[1]["error"]
    assert whole.summary["output_tokens"] == 24
    assert whole.summary["prompts_complete"] == 2
    assert whole.summary["categories"]["two"]["tokens_per_second"] is None
    assert "the figures are of 2 of 4 prompts" in whole.summary["warnings"][0]
    assert whole.summary["prompt_statuses"] == {"complete": 2, "failed": 2}


def test_a_bug_met_by_one_prompt_is_recorded_with_its_traceback() -> None:
    data = rows("short", "l" * 60, "last")
    result = ds4flow("run", *FAKE, "fakeload.fail_at=50", "commit.max_tokens=9", write(data))
    assert result.exit_code == 1
    whole = Run.open("runs/demo/0001")
    assert [row["status"] for row in whole.summary["prompts"]] == ["complete", "failed", "complete"]
    assert whole.summary["prompts"][1]["error"] == "ZeroDivisionError: a bug in a kernel"
    assert "Traceback" in (whole.path / "run.log").read_text()


def test_a_stop_keeps_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    start = fakes.Start.run

    def interrupted(self: fakes.Start, state: Any) -> None:
        start(self, state)
        if state.prompt == "bbb":
            raise KeyboardInterrupt

    monkeypatch.setattr(fakes.Start, "run", interrupted)
    result = ds4flow("run", *FAKE, "commit.max_tokens=9", write(rows("aaa", "bbb", "ccc")))
    assert result.exit_code == 130
    whole = Run.open("runs/demo/0001")
    assert whole.status == "interrupted"
    statuses = [row["status"] for row in whole.summary["prompts"]]
    assert statuses == ["complete", "interrupted", "not run"]
    assert whole.summary["output_tokens"] == 9
    assert sorted(parts(whole.path)) == ["aaa", "bbb"]


def test_a_model_that_cannot_be_loaded_ends_the_set_at_once() -> None:
    words = ("model=file", "model.path=nowhere.gguf", "model.chat=raw")
    result = ds4flow("run", *words, write(rows("aaa", "bbb")))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 2
    assert not list(Path("runs/file/0001").glob("prompt-*"))


def test_texts_are_separate_on_stdout() -> None:
    words = ("commit.max_tokens=9", write(rows("aaa", "bbb")))
    result = ds4flow("run", *FAKE, *words)
    assert result.exit_code == 0
    texts = [run.text for run in parts("runs/demo/0001").values()]
    assert result.stdout == "".join(f"{text}\n" for text in texts)
    quiet = ds4flow("run", *FAKE, *words, "log=quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")


@pytest.mark.parametrize(
    "words",
    [
        ("prompts=demo", "prompt=x"),
        ("prompts=demo", "prompt_file=x.txt"),
        ("prompts=demo", "-p", "x=null"),
    ],
)
def test_one_way_to_say_what_to_continue(words: tuple[str, ...]) -> None:
    result = ds4flow("run", *words)
    assert result.exit_code == 2
    assert "are both given" in result.stderr
    assert not Path("runs").exists()


def test_a_preset_with_a_set_and_a_typed_prompt_are_two(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    preset = tmp_path / "conf" / "experiment" / "mine.yaml"
    preset.write_text("# @package _global_\nprompts: demo\n")
    words = ("--config-dir", "conf", "experiment=mine")
    result = ds4flow("run", *words, "prompt=x")
    assert result.exit_code == 2
    assert "prompt and prompts are both given" in result.stderr
    result = ds4flow("run", *words, "prompt_file=x.txt")
    assert result.exit_code == 2
    assert "prompt_file and prompts are both given" in result.stderr


@pytest.mark.slow
def test_a_sweep_runs_the_set_in_every_job() -> None:
    words = ("-m", "mtp.draft=0,2", "commit.max_tokens=9", write(rows("aaa", "bbb")))
    assert ds4flow("run", *FAKE, *words).exit_code == 0
    tokens = []
    for job in ("0", "1"):
        whole = Run.open(f"runs/demo/0001/{job}")
        assert whole.status == "complete"
        assert whole.facts["prompt_set"] == read("set.jsonl").sha256
        tokens.append([part.tokens for part in parts(whole.path).values()])
    assert tokens[0] == tokens[1]


def test_parity_is_listed_for_every_prompt() -> None:
    words = ("pipeline=parity", "mtp.draft=2", write(rows("aaa", "bbb")))
    listed = run(*words).summary["prompts"]
    assert [row["parity"]["equal"] for row in listed] == [True, True]


def test_a_greedy_set_says_once_that_mtp_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("mtp.draft=2", "runtime.no_gpu=true", write(rows("aaa", "bbb")))
    found = parts(run(*words).path)
    assert capsys.readouterr().err.count("MTP is off") == 1
    assert all(part.facts["mtp_off"] for part in found.values())


# --- bug report 69: the benchmark's prompt makes the drafter look perfect


def test_report_69_figures_by_category_and_warnings() -> None:
    """Acceptance on loops is shown apart from that on text, and said to mean little."""
    words = ("mtp.draft=2", "commit.max_tokens=60")
    data = [
        {"id": "loop", "category": "counting", "prompt": "x"},
        {"id": "text", "category": "prose", "prompt": "yy", "max_tokens": 20},
    ]
    result = ds4flow(
        "run", *FAKE, *words, "fakeload=looping", "draft=mtp", write(data), "log.stream=false"
    )
    assert result.exit_code == 0
    summary = Run.open("runs/demo/0001").summary
    loop, prose = summary["categories"]["counting"], summary["categories"]["prose"]
    assert loop["draft_acceptance_rate"] > prose["draft_acceptance_rate"] + 0.2
    assert loop["repeated_tokens"] > 40
    assert prose["repeated_tokens"] == 0
    told = " ".join(summary["warnings"])
    assert "60 of 80 tokens are of the prompt loop" in told
    assert f"{loop['repeated_tokens']} of 80 tokens repeat earlier text" in told
    for warning in summary["warnings"]:
        assert f"note: {warning}" in result.stderr
    result = ds4flow("run", *FAKE, *words, "fakeload=looping", "draft=mtp", "prompt=x")
    assert "tokens repeat earlier text" in result.stderr


def test_report_69_one_prompt_speaks_for_itself_only() -> None:
    warnings = run(write(rows("aaa"))).summary["warnings"]
    assert warnings == ["one prompt only: the figures speak for that prompt"]


def test_report_69_a_run_records_set_template_and_thinking_mode() -> None:
    words = ("model.chat=nothink", "mtp.draft=2", write(rows("aaa")))
    facts = run(*words).facts
    assert len(facts["prompt_set"]) == 64
    assert facts["chat"] == "nothink"
    assert "chat_template" in facts


def test_report_69_what_is_shown_of_a_set_is_by_category() -> None:
    data = rows("aaa", "bbb", category="one") + rows("ccc", category="two")
    run("mtp.draft=2", write(data))
    run("mtp.draft=3", write([*data[1:], *rows("ddd", category="two")]))
    shown = ds4flow("runs", "show", "x/0001")
    assert shown.exit_code == 0
    table = [line.split() for line in shown.stdout.splitlines()]
    assert ["category", "prompts", "tokens", "tokens/s"] in [line[:4] for line in table]
    assert ["one", "2", "24"] in [line[:3] for line in table]
    assert ["total", "3", "36"] in [line[:3] for line in table]
    compared = ds4flow("runs", "compare", "x/0001", "x/0002").stdout
    assert "not the same prompt" in compared
    assert "x/0002: 2 prompts are in one of the sets only" in compared
    assert "the same output tokens as x/0001 in 2 of 2 prompts" in compared
    assert ds4flow("report", "x/0001").exit_code == 0
    page = Path("runs/x/0001/report.html").read_text()
    assert 'data-category="one"' in page
    assert 'data-category="two"' in page


# --- the same faults in sets: reports 33, 35, 39 and 41


def test_report_33_acceptance_of_a_set_never_exceeds_one() -> None:
    words = ("fakeload=looping", "draft=mtp", "mtp.draft=3", "commit.max_tokens=40", "log=quiet")
    data = [{"id": name, "category": "loop", "prompt": name} for name in "xyz"]
    assert ds4flow("run", *FAKE, *words, write(data)).exit_code == 0
    summary = Run.open("runs/demo/0001").summary
    for figures in (summary, summary["categories"]["loop"]):
        assert figures["draft_acceptance_rate"] == 1.0
        assert figures["mean_acceptance_length"] == 4.0


def test_report_35_a_set_that_hardly_drafts_says_so() -> None:
    counts = Counts()
    for cycle in range(10):
        drafted = int(cycle == 3)
        counts.add(drafted=drafted, committed=1 + drafted, relaxed=0, draft_end="gate")
    result = SetResult([], {}, Figures(prompts=0, counts=counts))
    assert any("only 1 of 10 cycles had a draft" in one for one in result.warnings())
    assert result.summary()["skipped"] == {"gate": 9}


def test_report_41_one_unlucky_prompt_does_not_stop_drafting_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acceptance is learned anew for each prompt; what passes cost is known from those before."""
    seen: list[tuple[DepthPolicy, int]] = []
    choose = DepthPolicy.choose

    def choosing(policy: DepthPolicy, room: int) -> Decision:
        if not any(policy is one for one, _ in seen):
            seen.append((policy, policy.cycle))
        return choose(policy, room)

    monkeypatch.setattr(DepthPolicy, "choose", choosing)
    words = ("fakeload=looping", "draft=mtp", "mtp.draft=auto", "commit.max_tokens=30", "log=quiet")
    data = [{"id": name, "category": "c", "prompt": name} for name in ("unlucky", "y", "z")]
    assert ds4flow("run", *FAKE, *words, write(data)).exit_code == 0
    assert [cycles for _, cycles in seen] == [0, 0, 0]
    assert seen[0][0].cycle > 0
    begins = [run.facts["draft_auto"] for run in parts("runs/demo/0001").values()]
    assert begins == [{"costs_from": "weight bytes"}] * 3  # every prompt of this fake has a model
