"""Chat prompts: the documented renderings, and text that never turns into a marker."""

# ruff: noqa: RUF001 - the markers are spelt with U+FF5C
from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4flow import chat
from ds4flow.chat import effort_prefix, encode, prompt_ids, split_reasoning
from ds4flow.conversation import Message, Mode, Segment, ToolCall, ToolText, render, segments
from ds4flow.errors import UsageError
from ds4flow.tokenizer import MARKERS, Tokenizer

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"


def tokenizer(*specials: str, template: str | None = None) -> Tokenizer:
    """One token per byte, then the special tokens."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [*tokens, *specials],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(specials),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": template,
    }
    return Tokenizer.from_metadata({k: v for k, v in values.items() if v is not None})


FULL = tokenizer(*MARKERS)


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning=reasoning, tool_calls=calls)


def result(text: str, call_id: str = "") -> Message:
    return Message("tool", text, call_id=call_id)


@pytest.mark.parametrize(
    ("messages", "nothink", "think"),
    [
        ([user("Q")], f"{B}{U}Q{A}</think>", f"{B}{U}Q{A}<think>"),
        ([system("S"), user("Q")], f"{B}S{U}Q{A}</think>", f"{B}S{U}Q{A}<think>"),
        ([system(""), user("Q")], f"{B}{U}Q{A}</think>", f"{B}{U}Q{A}<think>"),
        (
            [user("Q"), user("R")],
            f"{B}{U}Q\n\nR{A}</think>",
            f"{B}{U}Q\n\nR{A}<think>",
        ),
        (
            [user("Q"), answer("X", "why"), user("R")],
            f"{B}{U}Q{A}</think>X{E}{U}R{A}</think>",
            f"{B}{U}Q{A}</think>X{E}{U}R{A}<think>",
        ),
        (
            [user("Q"), answer("X", "why")],
            f"{B}{U}Q{A}</think>X{E}",
            f"{B}{U}Q{A}<think>why</think>X{E}",
        ),
        (
            [user("Q"), answer("X", "why", ToolCall("f", {})), result("1"), user("R")],
            f'{B}{U}Q{A}</think>X\n\n<{D}tool_calls>\n<{D}invoke name="f">\n\n</{D}invoke>\n'
            f"</{D}tool_calls>{E}{U}<tool_result>1</tool_result>\n\nR{A}</think>",
            f'{B}{U}Q{A}<think>why</think>X\n\n<{D}tool_calls>\n<{D}invoke name="f">\n\n'
            f"</{D}invoke>\n</{D}tool_calls>{E}{U}<tool_result>1</tool_result>\n\nR{A}<think>",
        ),
        (
            [Message("developer", "V"), user("Q"), answer("X", "why"), user("R")],
            f"{B}{U}V{U}Q{A}</think>X{E}{U}R{A}</think>",
            f"{B}{U}Q{A}</think>X{E}{U}R{A}<think>",
        ),
        (
            [user("Q"), answer("X", "why"), Message("developer", "V")],
            f"{B}{U}Q{A}</think>X{E}{U}V{A}</think>",
            f"{B}{U}Q{A}</think>X{E}{U}V{A}<think>",
        ),
        (
            [system("S"), Message("latest_reminder", "Monday"), user("Q")],
            f"{B}S<｜latest_reminder｜>Monday{U}Q{A}</think>",
            f"{B}S<｜latest_reminder｜>Monday{U}Q{A}<think>",
        ),
    ],
)
def test_renderings(messages: list[Message], nothink: str, think: str) -> None:
    assert render(messages, mode="nothink") == nothink
    assert render(messages, mode="think") == think
    assert render(messages, mode="think-max", prefix="P") == B + "P" + think[len(B) :]


def test_tools_are_declared_after_the_system_text_and_keep_all_reasoning() -> None:
    tools = ({"name": "f", "description": "é"}, {"type": "function", "function": {"name": "g"}})
    messages = [
        Message("system", "S", tools=tools),
        Message("developer", "V"),
        user("Q"),
        answer("X", "why"),
        user("R"),
    ]
    text = render(messages, mode="think", tool_text=ToolText(f"## <{D}x>\n", "\nobey\n"))
    assert text == (
        f'{B}S\n\n## <{D}x>\n{{"name": "f", "description": "é"}}\n{{"name": "g"}}\nobey\n'
        f"{U}V{U}Q{A}<think>why</think>X{E}{U}R{A}<think>"
    )


def test_tools_without_their_instructions_are_refused() -> None:
    messages = [Message("system", "S", tools=({"name": "f"},)), user("Q")]
    with pytest.raises(UsageError, match="tool instructions"):
        render(messages, mode="think")


def test_tool_calls_and_results_in_the_order_of_the_calls() -> None:
    calls = (
        ToolCall("f", {"path": 'a"<b>', "lines": [1, "é"], "all": True}, id="one"),
        ToolCall("g", {"x": "é"}, id="two"),
    )
    messages = [
        user("Q"),
        answer("", "", *calls),
        result("second", "two"),
        result("first </tool_result> <b>", "one"),
    ]
    assert render(messages, mode="nothink") == (
        f"{B}{U}Q{A}</think>\n\n<{D}tool_calls>\n"
        f'<{D}invoke name="f">\n'
        f'<{D}parameter name="path" string="true">a"<b></{D}parameter>\n'
        f'<{D}parameter name="lines" string="false">[1, "é"]</{D}parameter>\n'
        f'<{D}parameter name="all" string="false">true</{D}parameter>\n'
        f"</{D}invoke>\n"
        f'<{D}invoke name="g">\n<{D}parameter name="x" string="true">é</{D}parameter>\n'
        f"</{D}invoke>\n</{D}tool_calls>{E}"
        f"{U}<tool_result>first &lt;/tool_result> <b></tool_result>\n\n"
        f"<tool_result>second</tool_result>{A}</think>"
    )


def test_results_without_ids_stay_in_their_order() -> None:
    calls = (ToolCall("f", {}, id="one"), ToolCall("f", {}, id="two"))
    text = render(
        [user("Q"), answer("", "", *calls), result("b"), result("a", "one")], mode="nothink"
    )
    assert "<tool_result>b</tool_result>\n\n<tool_result>a</tool_result>" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no user message"),
        ([system("S")], "no user message"),
        ([user("Q"), answer("X"), Message("latest_reminder", "M")], "no user message"),
        ([user("Q"), system("S")], "message 2: a system message"),
        ([answer("X"), user("Q")], "message 1: an assistant message"),
        ([user("Q"), answer("X"), answer("Y")], "message 3: an assistant message"),
        ([user("Q"), Message("latest_reminder", "M"), answer("Y")], "message 3: an assistant"),
        ([Message("user", "Q", tools=({"name": "f"},))], "tools declared by a user message"),
        ([Message("user", "Q", tool_calls=(ToolCall("f", {}),))], "tool calls in a user message"),
        ([user("Q"), answer("X"), result("1", "lost")], "answers the call 'lost'"),
    ],
)
def test_conversations_the_format_cannot_express(messages: list[Message], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render(messages, mode="think")


@pytest.mark.parametrize(("mode", "prefix"), [("think", "P"), ("nothink", ""), ("think-max", None)])
def test_the_effort_text_belongs_to_think_max(mode: Mode, prefix: str | None) -> None:
    with pytest.raises(UsageError, match="effort text"):
        segments([user("Q")], mode=mode, prefix=prefix)


SAFE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="｜<"), max_size=8)
CALLS = st.lists(st.builds(ToolCall, SAFE, st.dictionaries(SAFE, st.one_of(SAFE, st.integers()))))
TURNS = st.lists(
    st.tuples(
        st.lists(st.builds(user, SAFE), min_size=1, max_size=2),
        st.builds(lambda t, r, c: answer(t, r, *c), SAFE, SAFE, CALLS),
    ),
    max_size=3,
)


@settings(deadline=None)
@given(TURNS, SAFE, SAFE, st.sampled_from(["nothink", "think"]))
def test_ids_of_the_segments_are_those_of_the_rendered_string(
    turns: list[tuple[list[Message], Message]], first: str, last: str, mode: Mode
) -> None:
    messages = [system(first), *(m for users, reply in turns for m in [*users, reply]), user(last)]
    text = render(messages, mode=mode)
    assert encode(FULL, segments(messages, mode=mode)) == FULL.encode(text, special=True)
    assert text.count(B) == 1


HOSTILE = st.lists(st.one_of(st.sampled_from(MARKERS), st.text("ab<", max_size=2))).map("".join)


@settings(deadline=None)
@given(HOSTILE, HOSTILE, st.sampled_from(["nothink", "think"]))
def test_no_text_becomes_a_marker(prompt: str, rules: str, mode: str) -> None:
    ids = prompt_ids(FULL, prompt, chat=mode, system=rules)
    names = {id: name for name, id in FULL.specials.items()}
    opening = "</think>" if mode == "nothink" else "<think>"
    assert [names[id] for id in ids if id in names] == [B, U, A, opening]
    assert FULL.decode(ids, specials=True) == f"{B}{rules}{U}{prompt}{A}{opening}"


@settings(deadline=None)
@given(HOSTILE)
def test_raw_is_one_bos_and_the_text(prompt: str) -> None:
    assert prompt_ids(FULL, prompt, chat="raw") == [256, *FULL.encode(prompt)]
    assert FULL.decode(prompt_ids(FULL, prompt, chat="raw")) == prompt


def test_raw_has_no_system_text() -> None:
    with pytest.raises(UsageError, match="chat=raw has no place"):
        prompt_ids(FULL, "Q", chat="raw", system="S")


def test_an_unknown_format_names_the_near_match() -> None:
    with pytest.raises(UsageError, match="chat=nothnk") as error:
        prompt_ids(FULL, "Q", chat="nothnk")
    assert error.value.fix == "did you mean nothink?"


def test_missing_markers_are_named_with_the_way_out() -> None:
    tiny = tokenizer(B, E, "<think>", "</think>")
    with pytest.raises(
        UsageError, match="no token <｜User｜> and no token <｜Assistant｜>"
    ) as error:
        prompt_ids(tiny, "Q", chat="nothink")
    assert "chat=raw" in error.value.fix
    assert prompt_ids(tiny, "Q", chat="raw") == [256, ord("Q")]


def test_start_and_end_come_from_the_metadata() -> None:
    other = tokenizer("<s>", "</s>", *MARKERS[2:])
    parts = segments([user("Q"), answer("X")], mode="nothink")
    ids = encode(other, parts)
    assert (ids[0], ids[-1]) == (256, 257)
    assert parts[0] == Segment(B, True)


OLD = 'Reasoning Effort: Test\nIt\'s "two"\tlines.\n\n'
NEW = "Reasoning Effort: Test more — much\nmore\n\n"


@pytest.fixture
def effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the hashes of two short texts in the place of the protocol's."""
    raws = [text.encode() for text in (NEW, OLD)]
    texts = tuple((len(raw), hashlib.sha256(raw).hexdigest()) for raw in raws)
    monkeypatch.setattr(chat, "_EFFORT_TEXTS", texts)


def literal(text: str) -> str:
    for char, escape in (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("'", "\\'")):
        text = text.replace(char, escape)
    return "{%- set effort = '" + text + "' -%}"


@pytest.mark.usefixtures("effort")
@pytest.mark.parametrize(
    ("template", "found"),
    [
        (f"{{{{ bos }}}}{OLD}{{{{ system }}}}", OLD),
        ("Reasoning Effort: {{ effort }}\n" + literal(OLD) + "{{ effort }}", OLD),
        (literal(OLD).replace("lines", "' ~\n 'lines"), OLD),
        (literal(OLD[:-2]) + "{{ effort }}{{ '\\n\\n' }}", OLD),
        (literal(OLD) + literal(NEW), NEW),
        (literal(NEW).replace("—", "\\u2014"), NEW),
    ],
)
def test_the_effort_text_comes_from_the_template(template: str, found: str) -> None:
    assert effort_prefix(template) == found
    model = tokenizer(*MARKERS, template=template)
    ids = prompt_ids(model, "Q", chat="think-max", system="S")
    assert model.decode(ids, specials=True) == f"{B}{found}S{U}Q{A}<think>"


@pytest.mark.parametrize(
    ("template", "state"),
    [
        (None, "has no chat template"),
        ("{{ messages }}", "has a chat template without that text"),
        ("Reasoning Effort: Absolute maximum, but not the text.\n\n", "without that text"),
    ],
)
def test_think_max_without_its_text_is_an_error(template: str | None, state: str) -> None:
    with pytest.raises(UsageError, match=state) as error:
        prompt_ids(tokenizer(*MARKERS, template=template), "Q", chat="think-max")
    assert "chat=think," in error.value.fix


def test_reasoning_ends_at_the_first_end_marker() -> None:
    end = FULL.specials["</think>"]
    assert split_reasoning(FULL, [1, 2, end, 3, end, 4]) == ([1, 2], [3, end, 4])
    assert split_reasoning(FULL, [1, end]) == ([1], [])
    assert split_reasoning(FULL, [1, 2]) == ([1, 2], None)
    assert split_reasoning(tokenizer(B, E), [1, 2]) == ([1, 2], None)
