"""A DeepSeek-V4 file while it is being examined: its role, and what has been found so far.

Promise: the role follows from the tensors that are there, not from what the metadata claim.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from ds4flow.doctor.report import Drafter, Fit, Layout, Problem, Role
from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ARCHITECTURE, SUPPORT_ARCHITECTURE, ModelConfig
from ds4flow.model.mtp_weights import find_mtp_layout
from ds4flow.tokenizer import Tokenizer

DSPARK = re.compile(r"mtp\.0\.main_proj\.|mtp\.[12]\.|dspark\.|.*markov_head")

T = TypeVar("T")


@dataclass
class Subject:
    """One file while it is being examined."""

    file: GgufFile
    role: Role
    drafter: Drafter
    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    whole: bool = False  # every tensor of the trunk is there
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """The result of `action`, or None after noting why it failed."""
        try:
            return action()
        except ModelFileError as error:
            self.problems.append(Problem(error.what, error.fix))
            return None


def subject_of(file: GgufFile) -> Subject:
    """What the names of a file's tensors say about it."""
    sign = next((name for name in file.tensors if DSPARK.match(name)), None)
    layout = cast("Layout | None", find_mtp_layout(file))
    drafter = Drafter(_claimed(file), layout, sign, None)
    return Subject(file, _role(file, drafter), drafter)


def _claimed(file: GgufFile) -> int:
    """Number of MTP layers that the metadata speak of."""
    values = [
        file.metadata.get(f"{ARCHITECTURE}.{key}")
        for key in ("nextn_predict_layers", "mtp_layer_count")
    ]
    return max((v for v in values if isinstance(v, int)), default=0)


def trunk_blocks(file: GgufFile) -> int:
    """Number of blocks that are not MTP blocks."""
    numbers = {int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,6})\.", name))}
    return sum(f"blk.{n}.nextn.eh_proj.weight" not in file.tensors for n in numbers)


def _role(file: GgufFile, drafter: Drafter) -> Role:
    if trunk_blocks(file):
        return "main"
    if drafter.layout is not None:
        return "mtp"
    if drafter.dspark is not None:
        return "dspark"
    support = file.metadata.get("general.architecture") == SUPPORT_ARCHITECTURE
    return "mtp" if support else "main"
