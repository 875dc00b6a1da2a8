"""Text to token ids and back: ids equal the model's own tokenizer.

The vocabulary comes from the GGUF metadata of the model file. Text is never searched for special
tokens unless the caller asks for it, so what a user types cannot open a turn or end one.
"""

# ruff: noqa: RUF001 - the markers are spelt with U+FF5C
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Final, TypeVar

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from ds4flow.errors import ModelFileError, UsageError

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
THINK: Final = "<think>"
END_THINK: Final = "</think>"
DSML: Final = "｜DSML｜"
REMINDER: Final = "<｜latest_reminder｜>"

MARKERS: Final = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER)
"""Special tokens of the prompt format; producers disagree about their token type."""

T = TypeVar("T")

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# Byte-level BPE splits a text three times; each split isolates its matches and leaves the rest.
_DIGITS: Final = r"\p{N}{1,3}"
_CJK: Final = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_WORDS: Final = "|".join(
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2 style token strings."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


_CHAR_OF_BYTE: Final = _byte_alphabet()
_BYTE_OF_CHAR: Final = {char: byte for byte, char in _CHAR_OF_BYTE.items()}
# Bytes that can occur in UTF-8 text: a vocabulary without one of them would drop text silently.
_UTF8_BYTES: Final = (*range(0xC0), *range(0xC2, 0xF5))
# The regex engine gives up after ten million steps back inside one run of white space.
_LONGEST_SPACE: Final = 4_000_000


class Tokenizer:
    """Byte-level BPE over the vocabulary of one model file; immutable, safe to share.

    `specials` maps the string of every atomic token (types control and user-defined, and the
    prompt markers whatever their type) to its id. `chat_template` is the text of the model file.
    """

    vocab_size: int
    bos: int
    eos: int
    pad: int | None
    specials: Mapping[str, int]
    chat_template: str | None

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        *,
        bos: int,
        eos: int,
        pad: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Build the tokenizer; ModelFileError when the lists do not fit together."""
        if len(types) != len(tokens):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(types)} entries, "
                f"tokenizer.ggml.tokens has {len(tokens)}",
                "the model file is inconsistent; convert or download it again",
            )
        for key, value in (("bos", bos), ("eos", eos), ("padding", pad)):
            if value is not None and not 0 <= value < len(tokens):
                raise ModelFileError(
                    f"tokenizer.ggml.{key}_token_id is {value}, the vocabulary ends at "
                    f"{len(tokens) - 1}",
                    "the model file is inconsistent; convert or download it again",
                )
        self.vocab_size = len(tokens)
        self.bos, self.eos, self.pad = bos, eos, pad
        self.chat_template = chat_template
        self._tokens = tuple(tokens)
        self._types = tuple(types)
        self._merges = tuple(merges)
        self.specials = MappingProxyType(self._find_specials())
        self._special_ids = frozenset(self.specials.values())
        self._bpe = self._build_bpe()
        self._first = re.compile("|".join(sorted({re.escape(name[0]) for name in self.specials})))
        self._lengths = sorted({len(name) for name in self.specials}, reverse=True)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build from the `tokenizer.*` keys of a GGUF file, as plain Python values.

        ModelFileError when a key is missing, has another type, contradicts another key, or names
        another kind of tokenizer than the one the architecture uses.
        """
        if not any(key.startswith("tokenizer.ggml.") for key in metadata):
            raise ModelFileError(
                "the file holds no tokenizer (no key starts with tokenizer.ggml.)",
                "give the main model file; separate MTP files take the tokenizer from it",
            )
        for key, known in (("model", "gpt2"), ("pre", "joyai-llm")):
            found = _value(metadata, key, str)
            if found != known:
                raise ModelFileError(
                    f"tokenizer.ggml.{key} is {found!r}; only {known!r} is implemented",
                    "use a GGUF whose tokenizer is the one of DeepSeek-V4",
                )
        template = metadata.get("tokenizer.chat_template")
        return cls(
            _values(metadata, "tokens", str),
            _values(metadata, "token_type", int),
            _values(metadata, "merges", str),
            bos=_value(metadata, "bos_token_id", int),
            eos=_value(metadata, "eos_token_id", int),
            pad=(
                _value(metadata, "padding_token_id", int)
                if "tokenizer.ggml.padding_token_id" in metadata
                else None
            ),
            chat_template=template if isinstance(template, str) else None,
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, without BOS.

        special: cut the text at special tokens first (a rendered prompt). Otherwise their strings
        are ordinary text. UsageError for text with lone surrogates, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}",
                "give the text as UTF-8",
            ) from None
        if not special:
            return self._encode_span(text)
        ids: list[int] = []
        for span, name in self._cut(text):
            ids.extend(self._encode_span(span))
            if name is not None:
                ids.append(self.specials[name])
        return ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        specials: write special tokens as their strings; otherwise they are left out.
        """
        return self.shown_bytes(ids, specials=specials).decode(errors="replace")

    def shown_bytes(self, ids: Iterable[int], *, specials: bool = False) -> bytes:
        """The bytes of all ids, which may end inside a character; specials: as in `decode`."""
        shown = (id for id in ids if specials or id not in self._special_ids)
        return b"".join(map(self.token_bytes, shown))

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes one token stands for (a special token: its string in UTF-8)."""
        text = self._token(id)
        if id not in self._special_ids:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in text])
            except KeyError:  # a placeholder entry outside the byte alphabet is literal text
                pass
        return text.encode()

    def piece(self, id: int) -> str:
        """Return one token in a form for logs: one line, invisible and partial bytes escaped."""
        raw = self.token_bytes(id)
        try:
            return repr(raw.decode())[1:-1]
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in raw)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over tokens, types and merges: equal digests mean interchangeable ids."""
        state = hashlib.sha256()
        for values in (self._tokens, map(str, self._types), self._merges):
            for value in values:
                raw = value.encode(errors="surrogatepass")
                state.update(len(raw).to_bytes(4, "little") + raw)
            state.update(b"\xff\xff\xff\xff")
        return state.hexdigest()

    def _token(self, id: int) -> str:
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self._tokens[id]

    def _encode_span(self, text: str) -> list[int]:
        if len(text) > _LONGEST_SPACE:
            longest = max(map(len, re.split(r"\S+", text)))
            if longest > _LONGEST_SPACE:
                raise UsageError(
                    f"the text has {longest} white-space characters in a row; the tokenizer takes "
                    f"at most {_LONGEST_SPACE}",
                    "shorten the run of white space",
                )
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def _cut(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield (ordinary text, special token after it); the last one has no special token.

        At each character the longest special token wins. A table look-up per length, because a
        pattern of more than a thousand alternatives is slow on text full of angle brackets.
        """
        start = at = 0
        while self.specials and (found := self._first.search(text, at)):
            at = found.start()
            tails = (text[at : at + size] for size in self._lengths)
            name = next((tail for tail in tails if tail in self.specials), None)
            if name is None:
                at += 1
            else:
                yield text[start:at], name
                start = at = at + len(name)
        yield text[start:], None

    def _find_specials(self) -> dict[str, int]:
        specials: dict[str, int] = {}
        for id, (token, type) in enumerate(zip(self._tokens, self._types, strict=True)):
            if type in (_CONTROL, _USER_DEFINED) or token in MARKERS:
                if not token or token in specials:
                    raise ModelFileError(
                        f"special token {id} of the vocabulary is "
                        + (f"a second {token!r}" if token else "empty"),
                        "the model file is inconsistent; convert or download it again",
                    )
                specials[token] = id
        return specials

    def _build_bpe(self) -> BpeTokenizer:
        # Special tokens stay out of this vocabulary, so that no merge can produce one.
        vocab: dict[str, int] = {}
        for id, token in enumerate(self._tokens):
            if id not in self._special_ids:
                vocab.setdefault(token, id)
        missing = [byte for byte in _UTF8_BYTES if _CHAR_OF_BYTE[byte] not in vocab]
        if missing:
            raise ModelFileError(
                f"tokenizer.ggml.tokens has no token for {len(missing)} of the bytes of UTF-8, "
                f"the first is 0x{missing[0]:02X}",
                "use a GGUF with a complete byte-level vocabulary",
            )
        pairs: list[tuple[str, str]] = []
        for rank, merge in enumerate(self._merges):
            left, _, right = merge.partition(" ")
            if not (left in vocab and right in vocab and left + right in vocab):
                raise ModelFileError(
                    f"tokenizer.ggml.merges[{rank}] is {merge!r}; its parts or its result are "
                    "not normal tokens of the vocabulary",
                    "the model file is inconsistent; convert or download it again",
                )
            pairs.append((left, right))
        bpe = BpeTokenizer(models.BPE(vocab=vocab, merges=pairs))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(r), "isolated") for r in (_DIGITS, _CJK, _WORDS)),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return bpe


def _value(metadata: Mapping[str, object], key: str, kind: type[T]) -> T:
    name = f"tokenizer.ggml.{key}"
    if name not in metadata:
        raise ModelFileError(f"the file has no {name}", "use a GGUF that carries its tokenizer")
    value = metadata[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelFileError(
            f"{name} is of type {type(value).__name__}, expected {kind.__name__}",
            "the model file is inconsistent; convert or download it again",
        )
    return value


def _values(metadata: Mapping[str, object], key: str, kind: type[T]) -> list[T]:
    values = _value(metadata, key, list)
    if not all(isinstance(value, kind) for value in values):
        raise ModelFileError(
            f"tokenizer.ggml.{key} holds values that are not of type {kind.__name__}",
            "the model file is inconsistent; convert or download it again",
        )
    return values
