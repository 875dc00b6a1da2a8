"""Random words and variables through the config layer: a config or a clear error, never a crash."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow import env
from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError
from ds4flow.overrides import assemble
from ds4flow.schema import GROUPS, KEYS

PIECES = st.sampled_from(
    ["", "0", "1", "-1", "2.5", "1e999", "nan", "null", "true", "auto", "[a,b]", "[", "{a:1}",
     "a,b", "${mtp.draft}", "${", "${x:y}", "'", '"', "\\", "???", "choice(1,2)", "range(3)", "~",
     "+", "=", "file", "off", "greedy", "parity", "mtp", "[draft,verify]", "ü🦜", " "]
)  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
VALUES = PIECES | TEXTS | st.tuples(PIECES, TEXTS).map("".join)
KEY_NAMES = st.sampled_from([*KEYS, *GROUPS, "hydra.run.dir", "experiment", "no.such", ""]) | TEXTS
WORDS = (
    st.tuples(st.sampled_from(["", "+", "++", "~"]), KEY_NAMES, st.just("="), VALUES).map("".join)
    | TEXTS
)
VARIABLES = st.dictionaries(
    st.sampled_from([*env.VARIABLES, "DS4_MTP_DRAFTS", "DS4_OTHER"]), VALUES, max_size=3
)


def through(words: list[str], variables: dict[str, str]) -> None:
    """Compose; the only errors are those with two lines."""
    try:
        compose(assemble(words, [], env.read(variables)).words)
    except Ds4FlowError as error:
        lines = [error.what.strip(), error.fix.strip()]
    else:
        return
    assert all(lines)


CASES = {"words": st.lists(WORDS, max_size=3), "variables": VARIABLES}
QUIET = list(HealthCheck)


@settings(deadline=None, max_examples=40, suppress_health_check=QUIET)
@given(**CASES)
def test_words_and_variables(words: list[str], variables: dict[str, str]) -> None:
    through(words, variables)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000, suppress_health_check=QUIET)
@given(**CASES)
def test_many_words_and_variables(words: list[str], variables: dict[str, str]) -> None:
    through(words, variables)
