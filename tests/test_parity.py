"""Promise 1, end to end: speculation gives greedy's tokens, logits bits and cache state."""

from pathlib import Path

import pytest

from ds4flow.config import compose
from ds4flow.errors import UsageError
from ds4flow.overrides import quoted
from ds4flow.verification import Case, parity_of, parse_depths, run_case, verify_command

DEPTHS = range(9)
DEMO = (
    "def parse(line):\n    key, value = line.split('=')\n    return key.strip(), value.strip()\n\n"
)


def golden(name: str, folder: Path) -> list[str]:
    return [
        "model=file",
        f"model.path={quoted(str(folder / f'{name}.gguf'))}",
        f"model.mtp_path={quoted(str(folder / f'{name}.mtp-support.gguf'))}",
        "model.chat=raw",
    ]


def run(
    root: Path,
    words: list[str],
    *,
    depth: int,
    prompt: str,
    drafter: str,
    kernels: str = "reference",
    tokens: int = 12,
) -> Case:
    config = compose(
        [
            *words,
            "pipeline=parity",
            "check=state",
            "log=quiet",
            f"draft={drafter}",
            f"mtp.draft={depth}",
            f"commit.max_tokens={tokens}",
            "commit.ignore_eos=true",
            f"runtime.kernels={kernels}",
            f"prompt={quoted(prompt)}",
        ]
    )
    return run_case(config, depth, 0, root)


def lengths(depth: int) -> list[int]:
    """Prompt lengths (BOS included) that, over all depths, meet every residue mod 4 and of 128."""
    return [5 + depth % 4, 124 + depth]


@pytest.mark.parametrize(
    ("name", "profile", "kernels", "depth"),
    [
        pytest.param(name, *key, depth, marks=[] if depth in quick else pytest.mark.slow)
        for name, *key, quick in (
            ("tiny-f32", "official", "reference", ()),
            ("tiny-f32", "official", "cpu", (1, 4, 8)),
            ("tiny-q4k", "plain", "reference", (2,)),
            ("tiny-q4k", "plain", "cpu", (4,)),
            ("tiny-q4k", "plain", "cpu-int8", DEPTHS),
            ("tiny-iq2", "official", "cpu-int8", (3, 8)),
        )
        for depth in DEPTHS
    ],
)
def test_golden_models(tmp_path, golden_dir, name, profile, kernels, depth):
    words = [*golden(name, golden_dir), f"model.profile={profile}"]
    for length in lengths(depth):
        prompt = "Q" * (length - 1)
        case = run(tmp_path, words, depth=depth, prompt=prompt, drafter="mtp", kernels=kernels)
        assert case.problem == ""
        assert case.tokens == 12


@pytest.mark.parametrize(
    ("kernels", "depth"),
    [
        ("cpu", 1),
        ("cpu", 8),
        *(pytest.param("reference", depth, marks=pytest.mark.slow) for depth in (1, 2, 4, 8)),
    ],
)
def test_a_drafter_that_always_lies(tmp_path, golden_dir, kernels, depth):
    words = [*golden("tiny-f32", golden_dir), "model.profile=official"]
    for length in lengths(depth):
        prompt = "Q" * (length - 1)
        case = run(tmp_path, words, depth=depth, prompt=prompt, drafter="lying", kernels=kernels)
        assert case.problem == ""
        assert case.accepted == 0.0
        assert case.rollbacks > 0


@pytest.mark.parametrize(
    ("kernels", "depth"),
    [
        *(("cpu-int8", depth) for depth in DEPTHS),
        *(
            pytest.param(kernels, depth, marks=[] if depth == 3 else pytest.mark.slow)
            for kernels in ("cpu", "reference")
            for depth in DEPTHS
        ),
    ],
)
def test_demo_model(tmp_path, kernels, depth):
    prompt, words = (DEMO * 4)[: 200 + depth], ["model=demo"]
    case = run(
        tmp_path, words, depth=depth, prompt=prompt, drafter="mtp", kernels=kernels, tokens=24
    )
    assert case.problem == ""
    assert case.tokens == 24


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "lying"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["tiny-f32", "tiny-q4k", "tiny-iq2"])
def test_every_depth_at_every_length(tmp_path, golden_dir, name, depth, drafter):
    words = [*golden(name, golden_dir), "model.profile=official"]
    for length in (*range(2, 10), *range(124, 134), *range(252, 260)):
        case = run(tmp_path, words, depth=depth, prompt="Q" * (length - 1), drafter=drafter)
        assert case.problem == ""


def test_a_relaxed_margin_differs_and_is_reported(tmp_path, golden_dir):
    words = [*golden("tiny-q4k", golden_dir), "model.profile=plain", "mtp.margin=0.01"]
    case = run(tmp_path, words, depth=4, prompt="hello world", drafter="mtp", tokens=40)
    assert "first difference at position" in case.problem
    assert "top-2 gap" in case.problem


def test_depths_are_parsed():
    assert parse_depths("1-3,7") == [1, 2, 3, 7]


@pytest.mark.usefixtures("alone")
def test_the_graph_can_be_verified(golden_dir, capsys):
    """Without capture, at every depth from 0 to 4: tokens and logits bits."""
    main, mtp = (golden_dir / f"tiny-f32{end}.gguf" for end in ("", ".mtp-support"))
    words = ["model=file", f"model.path={main}", f"model.mtp_path={mtp}", "model.profile=plain"]
    words += ["runtime.context=40", "pipeline=graph", "commit.max_tokens=5", "model.chat=raw"]
    assert verify_command(words, "0-4", ["Q" * 9], "mtp") == 0
    said = capsys.readouterr()
    assert "verifying decode, commit, check: pipeline=graph-parity" in said.err
    assert said.err.count("decoding: eager") == 5
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (str(depth), "5", "equal") for depth in range(5)
    ]


def test_what_is_verified_is_what_would_run():
    assert parity_of([]) == parity_of(["pipeline=speculative"]) == "parity"
    assert parity_of(["pipeline=graph"]) == "graph-parity"
    with pytest.raises(UsageError, match="pipeline=greedy is not what"):
        verify_command(["pipeline=greedy"], "1", [], "mtp")
    with pytest.raises(UsageError, match="verify sets draft itself"):
        verify_command(["draft=off"], "1", [], "mtp")
