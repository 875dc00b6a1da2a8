"""One target pass over the certain token and its drafts, and the verdict on each draft."""

from __future__ import annotations

from dataclasses import dataclass

from ds4flow import speculate
from ds4flow.errors import NumericsError
from ds4flow.pipeline import Stage, State
from ds4flow.sampling import Sampling, certain, verify_sampled


@dataclass
class Verify(Stage):
    """Accepts the longest prefix of the drafts that the target agrees with.

    With `probe` the drafts stay out of the pass; they are only counted.
    """

    margin: float
    strict: bool
    probe: bool

    reads = ("model", "cache", "next_token", "drafts")
    writes = ("rows", "streams", "logits", "verdict", "identity")

    def run(self, state: State) -> None:
        """Run the pass; the cache rows are written, the cursor stays."""
        drafts = [] if self.probe else [draft.token for draft in state.drafts]
        state.rows = (state.next_token, *drafts)
        try:
            state.streams, state.logits = state.model.decide(state.rows, state.cache)
        except NumericsError as error:
            raise _placed(error, state) from None
        if state.sampling is not None:
            state.verdict = self._sampled(state, drafts, state.sampling)
            return
        state.verdict = speculate.verify(
            state.logits, drafts, margin=self.margin, strict=self.strict
        )
        if drafts and self.margin < 1.0 and not self.strict:
            state.mark_relaxed()

    def _sampled(self, state: State, drafts: list[int], sampling: Sampling) -> speculate.Verdict:
        """Lossless rejection sampling; a drafter that keeps no distribution was certain."""
        vocab = state.logits.shape[-1]
        drawn = state.draft_from or tuple(certain(draft, vocab) for draft in drafts)
        first = state.cache.length + 1  # where the first draft stands
        return verify_sampled(state.logits, drafts, drawn[: len(drafts)], first, sampling)


def _placed(error: NumericsError, state: State) -> NumericsError:
    """The error with the cycle, and with the position of the row where the row is known."""
    place = f"cycle {state.cycle}"
    if error.row is not None:
        place += f", row {error.row}, position {state.cache.length + error.row}"
    return NumericsError(f"{error.what} ({place})", error.fix, row=error.row)
