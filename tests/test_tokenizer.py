"""Tokenizer: ids of the reference engine, lossless round trips, unbroken streams, stop strings."""

# ruff: noqa: RUF001 - the special tokens are spelt with U+FF5C
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4flow.errors import ModelFileError, UsageError
from ds4flow.text_stream import StopMatch, StopStrings, TextStream
from ds4flow.tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    Tokenizer,
)

GOLDEN = Path(__file__).parent / "data" / "golden" / "tokenizer.json"

# The vocabulary of the golden models: BOS, EOS, 256 bytes, merges, special tokens.
# fmt: off
MERGES = [
    "1 2", "12 3", "123 4", "3 4", "Ġ Ġ", "ĠĠ Ġ", "Ċ Ċ", ". Ċ", "! !", "Ġ .", "( a", "a 1", "a .",
    "' s", "Ġ 1", "a Ġ", "Ġ (", "ä ½", "ä½ ł", "å ¥", "ä½ł å", "Ã ©", "Ġ t", "Ġt h", "Ġth e",
    "t h", "th e", "Ġ a", "Ġa n", "Ġan d", "a n", "an d", "Ġ i", "Ġi n", "Ġin g", "i n", "in g",
    "Ġi o", "Ġio n", "i o", "io n", "Ġt o", "t o", "Ġ o", "Ġo f", "o f", "Ġi s", "i s", "Ġth a",
    "Ġtha t", "th a", "tha t", "Ġi t", "i t", "Ġ h", "Ġh e",
]
# fmt: on
SPECIALS = (USER, ASSISTANT, THINK, END_THINK, DSML, "<｜▁pad▁｜>")


def metadata(**changes: object) -> dict[str, object]:
    """Metadata of the golden models' tokenizer; a change to None removes the key."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    merged = list(dict.fromkeys(merge.replace(" ", "") for merge in MERGES))
    tokens = [BOS, EOS, *alphabet, *merged, *SPECIALS]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "joyai-llm",
        "tokens": tokens,
        "token_type": [3 if t in (BOS, EOS, *SPECIALS) else 1 for t in tokens],
        "merges": list(MERGES),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": tokens.index("<｜▁pad▁｜>"),
        "add_bos_token": False,
    }
    values |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


TOKENIZER = Tokenizer.from_metadata(metadata())
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"]))
def test_ids_of_the_reference_engine(case: dict[str, Any]) -> None:
    assert TOKENIZER.encode(case["text"]) == case["ids"]
    assert TOKENIZER.encode(case["text"], special=True) == case["ids_parse_special"]


def test_there_are_golden_cases() -> None:
    assert len(CASES) == 72


@pytest.mark.parametrize(
    "pieces",
    [
        ["a\u0301e\u0301x"],
        ["日本かナ語", ",x"],
        ["a", "１２３", "４5"],
        ["。。\n\n", "b"],
        ["\0", "\0ab", " ", "\0"],
        ["x", "=+-\r\n", " y"],
        ["_ab", "_C", " -", "d"],
        [".", "é"],
        ["A", " \n \n", " ", " b"],
        ["한국어", "!!\n"],
        [" \xa0", "\u3000x", "\t", "\ty", " "],
    ],
)
def test_splits_before_merging(pieces: list[str]) -> None:
    # The golden vocabulary has too few merges to show every split in its ids.
    text = "".join(pieces)
    splits = TOKENIZER._bpe.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in splits] == pieces


def test_facts_from_metadata() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.pad) == (320, 0, 1, 319)
    assert TOKENIZER.specials[USER] == 314
    assert set(TOKENIZER.specials) == {BOS, EOS, *SPECIALS}
    assert TOKENIZER.chat_template is None


def test_reads_the_values_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "deepseek4")
    values = metadata()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(values["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    writer.add_token_types(values["tokenizer.ggml.token_type"])  # type: ignore[arg-type]
    writer.add_token_merges(values["tokenizer.ggml.merges"])  # type: ignore[arg-type]
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "t.gguf").fields
    read = Tokenizer.from_metadata({name: field.contents() for name, field in fields.items()})
    assert read.digest == TOKENIZER.digest
    assert read.pad is None
    assert read.chat_template == "{{ messages }}"


@settings(deadline=None)
@given(TEXTS)
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.one_of(TEXTS, st.sampled_from([BOS, EOS, *SPECIALS, "<｜", "<think", "｜"]))))
def test_special_tokens_are_parsed_only_on_request(parts: list[str]) -> None:
    text = "".join(parts)
    special_ids = set(TOKENIZER.specials.values())
    assert not special_ids & set(TOKENIZER.encode(text))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    parsed = TOKENIZER.encode(text, special=True)
    assert TOKENIZER.decode(parsed, specials=True) == text
    assert len(special_ids & set(parsed)) == sum(name in text for name in TOKENIZER.specials)


def test_the_longest_special_token_wins() -> None:
    values = metadata()
    tokens = [*values["tokenizer.ggml.tokens"], "<a", "<a>b", "b<a>"]  # type: ignore[misc]
    types = [*values["tokenizer.ggml.token_type"], 3, 4, 3]  # type: ignore[misc]
    tokenizer = Tokenizer.from_metadata(metadata(tokens=tokens, token_type=types))
    bracket = tokenizer.encode(">")
    assert tokenizer.encode("<a>b<a>", special=True) == [321, 320, *bracket]
    assert tokenizer.encode("<a><a>b", special=True) == [320, *bracket, 321]
    assert tokenizer.encode("b<a>b", special=True) == [322, *tokenizer.encode("b")]


def test_markers_are_special_whatever_their_type() -> None:
    types = [1] * TOKENIZER.vocab_size
    tokenizer = Tokenizer.from_metadata(metadata(token_type=types))
    assert tokenizer.encode(f"{USER}hi{THINK}", special=True)[0] == 314
    assert tokenizer.token_bytes(314) == USER.encode()
    # The padding token is no marker of the format, so nothing says that this one is special.
    assert "<｜▁pad▁｜>" not in tokenizer.specials
    assert tokenizer.token_bytes(319) == "<｜▁pad▁｜>".encode()


def test_decode_leaves_special_tokens_out_unless_asked() -> None:
    ids = TOKENIZER.encode(f"{BOS}a{USER}b{EOS}", special=True)
    assert TOKENIZER.decode(ids) == "ab"
    assert TOKENIZER.decode(ids, specials=True) == f"{BOS}a{USER}b{EOS}"


def test_pieces_are_one_line_each() -> None:
    (newlines,) = TOKENIZER.encode("\n\n")
    assert TOKENIZER.piece(newlines) == r"\n\n"
    assert TOKENIZER.piece(TOKENIZER.encode("😀")[0]) == "<0xF0>"
    assert TOKENIZER.piece(314) == USER


@pytest.mark.parametrize("id", [-1, 320])
def test_an_id_outside_the_vocabulary_is_a_bug(id: int) -> None:
    for call in (TOKENIZER.token_bytes, TOKENIZER.piece):
        with pytest.raises(ValueError, match=str(id)):
            call(id)
    with pytest.raises(ValueError, match=str(id)):
        TOKENIZER.decode([id])


def test_text_that_has_no_utf8_form() -> None:
    with pytest.raises(UsageError, match="surrogate at character 2"):
        TOKENIZER.encode("ab\udc80")


def test_white_space_longer_than_the_regex_engine_takes() -> None:
    with pytest.raises(UsageError, match="4000001 white-space"):
        TOKENIZER.encode("a" + " " * 4_000_001 + "b")


def test_digest_covers_tokens_types_and_merges() -> None:
    values = metadata()
    tokens: list[str] = list(values["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    types: list[int] = list(values["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    others = [
        metadata(tokens=[*tokens[:-1], "<other>"]),
        metadata(token_type=[*types[:-1], 4]),
        metadata(merges=MERGES[:-1]),
        metadata(merges=[MERGES[1], MERGES[0], *MERGES[2:]]),
    ]
    digests = {Tokenizer.from_metadata(other).digest for other in others}
    assert len(digests | {TOKENIZER.digest}) == 5
    assert Tokenizer.from_metadata(metadata(padding_token_id=None)).digest == TOKENIZER.digest


def without(token: str) -> dict[str, object]:
    """Metadata whose vocabulary has a placeholder instead of one token."""
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return metadata(tokens=["[unused]" if t == token else t for t in tokens])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.architecture": "deepseek4_mtp_support"}, "holds no tokenizer"),
        (metadata(pre="llama-bpe"), "tokenizer.ggml.pre is 'llama-bpe'"),
        (metadata(model="llama"), "tokenizer.ggml.model is 'llama'"),
        (metadata(merges=None), "no tokenizer.ggml.merges"),
        (metadata(bos_token_id=None), "no tokenizer.ggml.bos_token_id"),
        (metadata(bos_token_id=True), "bos_token_id is of type bool"),
        (metadata(eos_token_id=320), "eos_token_id is 320"),
        (metadata(padding_token_id=-1), "padding_token_id is -1"),
        (metadata(token_type=[1, 2]), "token_type has 2 entries, tokenizer.ggml.tokens has 320"),
        (metadata(merges=["a b c"]), r"merges\[0\] is 'a b c'"),
        (metadata(merges=["1 2", "ab"]), r"merges\[1\] is 'ab'"),
        (metadata(merges=[1]), "merges holds values that are not of type str"),
        (metadata(merges="1 2"), "merges is of type str, expected list"),
        (without("Ġ"), "first is 0x20"),
        (without("the"), "'th e'"),
        (metadata(token_type=[3] * 320), "no token for 243 of the bytes"),
    ],
)
def test_unusable_metadata_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as error:
        Tokenizer.from_metadata(values)
    assert error.value.fix


def test_a_special_token_occurs_once() -> None:
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    with pytest.raises(ModelFileError, match="special token 319 of the vocabulary is a second"):
        Tokenizer.from_metadata(metadata(tokens=[*tokens[:-1], USER]))


def cuts(ids: Sequence[int]) -> st.SearchStrategy[list[list[int]]]:
    """Every way to hand over `ids` in blocks."""
    places = st.lists(st.integers(0, len(ids)), max_size=6).map(sorted)
    return places.map(
        lambda at: [list(ids[a:b]) for a, b in zip([0, *at], [*at, len(ids)], strict=True)]
    )


def stream(blocks: Sequence[Sequence[int]], *, specials: bool = False) -> list[str]:
    """The pieces of a whole stream; the last one is what finish returns."""
    text = TextStream(TOKENIZER, specials=specials)
    return [*(text.push(block) for block in blocks), text.finish()]


@settings(deadline=None)
@given(TEXTS.map(TOKENIZER.encode).flatmap(lambda ids: st.tuples(st.just(ids), cuts(ids))))
def test_a_stream_equals_the_decoded_text(drawn: tuple[list[int], list[list[int]]]) -> None:
    ids, blocks = drawn
    pieces = stream(blocks)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert pieces[-1] == ""


def test_an_emoji_over_four_tokens_is_never_broken() -> None:
    text = "a😀é你b🏳️‍🌈"
    ids = TOKENIZER.encode(text)
    assert len(TOKENIZER.encode("😀")) == 4
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            pieces = stream([ids[:first], ids[first:second], ids[second:]])
            assert "".join(pieces) == text
            assert "\ufffd" not in "".join(pieces)
    assert stream([[i] for i in TOKENIZER.encode("😀!")]) == ["", "", "", "😀", "!", ""]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 319))
    .flatmap(lambda ids: st.tuples(st.just(ids), cuts(ids)))
    .flatmap(lambda drawn: st.tuples(st.just(drawn), st.booleans()))
)
def test_any_ids_stream_like_they_decode(
    drawn: tuple[tuple[list[int], list[list[int]]], bool],
) -> None:
    (ids, blocks), specials = drawn
    assert "".join(stream(blocks, specials=specials)) == TOKENIZER.decode(ids, specials=specials)


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    ids = TOKENIZER.encode("ok😀")[:-1]
    assert stream([ids]) == ["ok", "\ufffd"]
    assert TOKENIZER.decode(ids) == "ok\ufffd"


def test_a_stop_string_over_several_tokens() -> None:
    stops = StopStrings(["\n\nUser:", "END"])
    shown = [stops.push(piece) for piece in ("Hi.\n", "\n", "Us", "er", ": x", "more")]
    assert "".join(shown) == "Hi."
    assert stops.match == StopMatch("\n\nUser:", characters=3, tokens=5)
    assert stops.finish() == ""


def test_text_that_only_begins_like_a_stop_string_is_released() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.push(piece) for piece in ("a S", "TO", "", "TST", "O")] == [
        "a ",
        "",
        "",
        "STOT",
        "",
    ]
    assert stops.finish() == "STO"
    assert stops.match is None


def test_no_stop_strings_hold_nothing_back() -> None:
    stops = StopStrings([])
    assert [stops.push(piece) for piece in ("a", "b")] == ["a", "b"]
    assert stops.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["x", ""])


SHORT = st.text("ab", max_size=4)


@settings(deadline=None)
@given(st.lists(SHORT), st.lists(SHORT.filter(bool), max_size=3))
def test_stops_do_not_depend_on_the_pieces(pieces: list[str], names: list[str]) -> None:
    text = "".join(pieces)
    ends = [e for e in range(1, len(text) + 1) if any(text[:e].endswith(n) for n in names)]
    stops = StopStrings(names)
    shown = ""
    for piece in pieces:
        shown += stops.push(piece)
        assert text.startswith(shown)
    shown += stops.finish()
    if not ends:
        assert stops.match is None
        assert shown == text
        return
    name = max((n for n in names if text[: ends[0]].endswith(n)), key=len)
    total, tokens = 0, 0
    while total < ends[0]:
        total += len(pieces[tokens])
        tokens += 1
    assert stops.match == StopMatch(name, characters=ends[0] - len(name), tokens=tokens)
    assert shown == text[: ends[0] - len(name)]
