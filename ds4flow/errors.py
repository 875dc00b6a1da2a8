"""Errors that a user can cause: what happened and what to type instead, never a traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

NOT_FINITE = "the weights or the kernels are at fault; check the file with its published digest"
"""What to do about a value that is not finite."""


class Ds4FlowError(Exception):
    """An error that the user can fix; shown as two lines on stderr.

    `what` says what happened and names the key or file; `fix` says what to type or do instead.
    `exit_code` is what the command line exits with.
    """

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what if not fix else f"{what}\n{fix}")
        self.what = what
        self.fix = fix

    @property
    def lines(self) -> list[str]:
        """How a user sees it: what happened, and indented below what to do."""
        shown = [f"error: {self.what}", *([f"  {self.fix}"] if self.fix else [])]
        return [line.replace("\n", "\\n") for line in shown]

    def show(self) -> None:
        """Print its lines on stderr."""
        print("\n".join(self.lines), file=sys.stderr)


class UsageError(Ds4FlowError):
    """A wrong key, flag, variable or value: exit code 2."""

    exit_code = 2


class ModelFileError(Ds4FlowError):
    """A model file that cannot be read or does not hold what the architecture needs."""


class TruncatedFileError(ModelFileError):
    """A model file that ends before its own header says it does: exit code 3.

    It has to be fetched again; what lacks a tensor is complete, and fetching it again is in vain.
    """

    exit_code = 3


class NumericsError(Ds4FlowError):
    """NaN or Inf where a finite number must be; `what` names the place, `row` the row of the pass.

    `row` is None where the rows of a pass are not told apart.
    """

    def __init__(self, what: str, fix: str = "", *, row: int | None = None) -> None:
        super().__init__(what, fix)
        self.row = row


def near_match(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X?` for the known name closest to `name`, or an empty string."""
    hits = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {hits[0]}?" if hits else ""
