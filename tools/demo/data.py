"""Corpus, tokenizer and batches: the Python standard library as token streams.

Promise: everything is a function of the interpreter's library and the seed; held-out files are
chosen by a hash of their relative path and never reach the tokenizer trainer or the batches.
"""

# ruff: noqa: RUF001  (the special tokens contain U+FF5C)
from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
TAIL_SPECIALS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")

# Three successive splits of the DeepSeek-V4 pre-tokenizer ("joyai-llm").
SPLITS = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)

SKIP_PARTS = {"site-packages", "__pycache__", "pydoc_data", "encodings"}
SKIP_FILES = {"_sysconfigdata", "stringprep.py", "_pydoc_topics", "test_unicodedata"}
TEST_PARTS = {"test", "tests", "idle_test"}
MAX_BYTES = 200_000
HELD_OUT_OF = 28


@dataclass(frozen=True)
class Document:
    """One source file: path relative to the library, text, whether it is a test, held out."""

    path: str
    text: str
    is_test: bool
    held_out: bool


def is_held_out(path: str) -> bool:
    """Whether the relative path belongs to the held-out set (one in 28 by SHA-256)."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % HELD_OUT_OF == 0


def read_corpus(root: Path | None = None) -> list[Document]:
    """Library sources in path order, generated tables and non-UTF-8 files left out."""
    base = root or Path(sysconfig.get_path("stdlib"))
    docs: list[Document] = []
    for folder, names, files in os.walk(base):
        names[:] = sorted(n for n in names if n not in SKIP_PARTS and not n.startswith("config-"))
        for file in sorted(files):
            full = Path(folder, file)
            path = full.relative_to(base).as_posix()
            if not file.endswith(".py") or any(s in file for s in SKIP_FILES):
                continue
            if not 200 <= full.stat().st_size <= MAX_BYTES:
                continue
            try:
                text = full.read_bytes().decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            # Tables of numbers or escapes teach nothing about Python.
            digits = sum(text.count(c) for c in "0123456789\\")
            if digits > 0.2 * len(text):
                continue
            is_test = bool(TEST_PARTS & set(path.split("/")[:-1]))
            docs.append(Document(path, text, is_test, is_held_out(path)))
    return sorted(docs, key=lambda d: d.path)


def corpus_hash(docs: list[Document]) -> str:
    """SHA-256 over the sorted paths and contents."""
    digest = hashlib.sha256()
    for doc in docs:
        digest.update(f"{doc.path}\0{hashlib.sha256(doc.text.encode()).hexdigest()}\n".encode())
    return digest.hexdigest()


def new_tokenizer(model: models.BPE) -> Tokenizer:
    """A tokenizer with the exact pre-tokenisation around a BPE model."""
    tok = Tokenizer(model)
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(s), "isolated") for s in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def train_tokenizer(docs: list[Document], vocab: int) -> Tokenizer:
    """Byte-level BPE with BOS 0, EOS 1, pad 2 and the chat specials at the end."""
    tok = new_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(TAIL_SPECIALS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(
        (d.text for d in docs if not d.held_out and not d.is_test), trainer, length=len(docs)
    )
    tok.add_special_tokens(list(TAIL_SPECIALS))
    if tok.get_vocab_size() != vocab:
        raise ValueError(f"tokenizer has {tok.get_vocab_size()} entries, wanted {vocab}")
    return tok


@dataclass
class TokenStream:
    """Flat documents (BOS text EOS) with their start offsets and top-level line starts."""

    tokens: np.ndarray
    tops: np.ndarray
    starts: np.ndarray
    paths: list[str]


def _stream(tok: Tokenizer, docs: list[Document], rng: np.random.Generator) -> TokenStream:
    pieces: list[np.ndarray] = []
    tops: list[np.ndarray] = []
    starts: list[int] = []
    paths: list[str] = []
    newline = np.array([t.endswith("Ċ") for t in _strings(tok)])
    heads = np.zeros(tok.get_vocab_size(), dtype=bool)
    for text in ("def", "class", "import", "from", "async", "@", "if"):
        ids = tok.encode(text, add_special_tokens=False).ids
        if len(ids) == 1:
            heads[ids[0]] = True
    offset = 0
    for index in rng.permutation(len(docs)).tolist():
        ids = tok.encode(docs[index].text, add_special_tokens=False).ids
        arr = np.array([0, *ids, 1], dtype=np.uint16)
        pieces.append(arr)
        starts.append(offset)
        paths.append(docs[index].path)
        here = np.flatnonzero(newline[arr[:-1]] & heads[arr[1:]]) + 1
        tops.append(here + offset)
        offset += len(arr)
    return TokenStream(np.concatenate(pieces), np.concatenate(tops), np.array(starts), paths)


def _strings(tok: Tokenizer) -> list[str]:
    vocab = tok.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


@dataclass
class Corpus:
    """Training streams (library, tests) and the held-out documents."""

    library: TokenStream
    tests: TokenStream
    held_out: list[tuple[str, np.ndarray]]
    test_share: float = 0.15
    start_share: float = 0.2
    top_share: float = 0.4

    def batch(self, rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
        """Token ids (rows, length + 1), int64: file heads, top-level lines and random crops."""
        out = np.zeros((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            stream = self.tests if rng.random() < self.test_share else self.library
            kind = rng.random()
            last = len(stream.tokens) - length - 1
            if kind < self.start_share:
                begin = int(rng.choice(stream.starts))
                fixed = 0
            elif kind < self.start_share + self.top_share:
                begin = int(rng.choice(stream.tops))
                fixed = 1
            else:
                begin = int(rng.integers(0, last))
                fixed = 0
            begin = min(begin, last)
            # fixed = 1 leaves id 0 (BOS) in front of a top-level line.
            out[row, fixed:] = stream.tokens[begin : begin + length + 1 - fixed]
        return torch.from_numpy(out)

    def held_out_batch(self, rows: int, length: int, seed: int = 7) -> torch.Tensor:
        """Fixed crops (rows, length + 1) from the held-out documents, library files first."""
        rng = np.random.default_rng(seed)
        flat = np.concatenate([ids for _, ids in self.held_out]).astype(np.int64)
        begins = rng.integers(0, len(flat) - length - 1, rows)
        return torch.from_numpy(np.stack([flat[b : b + length + 1] for b in begins]))

    def counts(self, vocab: int) -> torch.Tensor:
        """Token frequencies of the training mixture, float64 (vocab)."""
        lib = np.bincount(self.library.tokens, minlength=vocab) / len(self.library.tokens)
        test = np.bincount(self.tests.tokens, minlength=vocab) / len(self.tests.tokens)
        return torch.from_numpy(1e6 * ((1 - self.test_share) * lib + self.test_share * test))


def build_corpus(tok: Tokenizer, docs: list[Document], seed: int) -> Corpus:
    """Tokenise the documents; library held-out files are used for evaluation, tests' are not."""
    rng = np.random.default_rng(seed)
    train = [d for d in docs if not d.held_out]
    held = [
        (d.path, np.array([0, *tok.encode(d.text, add_special_tokens=False).ids, 1], np.uint16))
        for d in docs
        if d.held_out and not d.is_test
    ]
    return Corpus(
        _stream(tok, [d for d in train if not d.is_test], rng),
        _stream(tok, [d for d in train if d.is_test], rng),
        held,
    )
