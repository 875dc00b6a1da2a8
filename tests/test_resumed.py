"""Going on where a run stopped: the drafter's state is rebuilt whole, so nothing has to warm up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo_runs import Demo

KEYS = {"mtp__draft": 4, "mtp__probe": True}  # drafts from every place of the text


@pytest.mark.parametrize("done", [1, 7, 20])
def test_a_resumed_run_drafts_and_continues_as_the_whole_one_did(tmp_path: Path, done: int) -> None:
    """Report 17: a restored text without draft state would accept less for a while.

    Text is all that is ever restored here. The prefill makes the drafter's rows from the target's
    streams, like a run that never stopped, so its very first drafts are those of the whole run.
    """
    demo = Demo(tmp_path)
    whole = demo.run(commit__max_tokens=32, **KEYS)
    text = whole.prompt + whole.decode(whole.tokens[:done])
    resumed = demo.run(prompt=text, commit__max_tokens=32 - done, **KEYS)
    assert resumed.prompt_tokens == whole.prompt_tokens + whole.tokens[:done]
    assert resumed.tokens == whole.tokens[done:]
    old, new = list(whole.cycles())[done:], list(resumed.cycles())
    assert len(old) == len(new) == 32 - done
    for a, b in zip(old, new, strict=True):
        for key in ("position", "tokens", "drafts", "draft_gaps", "draft_end", "gaps"):
            assert a[key] == b[key], (a["position"], key)
