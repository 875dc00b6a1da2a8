"""A byte-level vocabulary of any size: prompt markers, the 256 bytes, and merges of letters.

Promise: every text encodes, and every id decodes; a merged token is plain ASCII.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds4flow.tokenizer import MARKERS

PAD = "<\uff5c\u2581pad\u2581\uff5c>"  # spelt like the model's other markers
_NORMAL, _CONTROL = 1, 3
_SPACE = "\u0120"  # the byte of a space in the byte alphabet
_LONGEST_START, _LONGEST_END = 6, 4  # characters of the two parts of a merge
SMALLEST_VOCABULARY = len(MARKERS) + 1 + 256 + 1  # a file's list of merges must not be empty


class Vocabulary(NamedTuple):
    """Tokens with their types and the merges that make them, as GGUF metadata hold them.

    Ids 0 and 1 are the begin and end of a sequence.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pad: int


def make_vocabulary(size: int, rng: np.random.Generator) -> Vocabulary:
    """A vocabulary of `size` tokens, at least SMALLEST_VOCABULARY."""
    specials = [*MARKERS, PAD]
    tokens = specials + [_character(byte) for byte in range(256)]
    types = [_CONTROL] * len(specials) + [_NORMAL] * 256
    known = set(tokens)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    starts, ends = [_SPACE, *letters], list(letters)
    merges: list[str] = []
    while len(tokens) < size:
        left = starts[int(rng.integers(len(starts)))]
        right = ends[int(rng.integers(len(ends)))]
        made = left + right
        if made in known:
            continue
        known.add(made)
        tokens.append(made)
        types.append(_NORMAL)
        merges.append(f"{left} {right}")
        if len(made) <= _LONGEST_START:
            starts.append(made)
        if len(made) <= _LONGEST_END and not made.startswith(_SPACE):
            ends.append(made)
    return Vocabulary(tokens, types, merges, specials.index(PAD))


def _character(byte: int) -> str:
    """The stand-in of a byte: itself where it is printable, else the next free one from U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in plain:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in plain))
