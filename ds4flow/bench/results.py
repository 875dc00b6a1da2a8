"""Typed results of every measurement, each also as flat rows for tables and CSV.

Promise: JSON holds every sample; a row holds their median and quartiles, and a note where a
figure is synthetic or was not measured under full conditions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, NamedTuple

from ds4flow.bench.machine import StartTimes
from ds4flow.bench.samples import Samples


class Row(NamedTuple):
    """One figure: `median` with its quartiles, over `repeats` samples."""

    section: str
    what: str
    threads: int
    context: int | None
    metric: str
    unit: str
    median: float
    low: float
    high: float
    repeats: int
    note: str = ""


@dataclass(frozen=True)
class MachineResult:
    """Measured read bandwidth in bytes per second."""

    threads: int
    bandwidth: Samples

    def rows(self) -> list[Row]:
        """Flat rows."""
        scaled = scale(self.bandwidth, 1e-9)
        return [_row("machine", "read", self.threads, None, "bandwidth", "GB/s", scaled)]


@dataclass(frozen=True)
class StartResult:
    """Starts in processes of their own."""

    threads: int
    kernels: str
    starts: tuple[StartTimes, ...]

    def rows(self) -> list[Row]:
        """Flat rows, starts with an empty cache of compiled kernels apart."""
        rows = []
        for cold in (False, True):
            starts = [start for start in self.starts if start.cold == cold]
            if not starts:
                continue
            what = "empty kernel cache" if cold else "warm kernel cache"
            for metric in ("imports", "load", "first", "second", "total"):
                values = Samples(tuple(float(getattr(start, metric)) for start in starts))
                rows.append(_row("start", what, self.threads, None, metric, "s", values))
            peaks = [start.peak_bytes for start in starts if start.peak_bytes is not None]
            if peaks:
                values = Samples(tuple(peak / 1e6 for peak in peaks))
                note = "resident, mapped file included"
                rows.append(
                    _row("start", what, self.threads, None, "peak memory", "MB", values, note)
                )
        return rows


@dataclass(frozen=True)
class ContextResult:
    """Speed at one context: `prefill` and `decode` in tokens per second.

    `prefill` is of one pass of `chunk` rows at this depth. `weight_bytes` and `kv_bytes` are what
    one decoded token reads; `share` is the part of the measured bandwidth that this amounts to,
    None without one.
    """

    threads: int
    context: int
    filled: str
    fill_seconds: float
    chunk: int
    prefill: Samples
    decode: Samples
    weight_bytes: float
    kv_bytes: float
    cache_bytes: int
    share: float | None

    def rows(self) -> list[Row]:
        """Flat rows."""
        note = "" if self.filled == "prefill" else self.filled
        place = (self.threads, self.context)
        rows = [
            _row("speed", f"prefill of {self.chunk}", *place, "rate", "tok/s", self.prefill, note),
            _row("speed", "decode", *place, "rate", "tok/s", self.decode, note),
            _single("speed", "cache", *place, "memory", "MB", self.cache_bytes / 1e6),
        ]
        if self.share is not None:
            note = "weights and cache rows, of the measured read bandwidth"
            rows.append(
                _single("speed", "decode", *place, "bandwidth", "%", 100 * self.share, note)
            )
        return rows


@dataclass(frozen=True)
class WidthResult:
    """A verify pass of `width` rows: seconds, and the ratio to one row, round by round.

    `byte_ratio` is the ratio of the weight bytes that the passes read, with the expected number
    of distinct experts: what a pass would cost if only reading counted.
    """

    threads: int
    context: int
    width: int
    seconds: Samples
    ratio: Samples
    byte_ratio: float

    @property
    def excess(self) -> float:
        """Cost ratio over byte ratio."""
        return self.ratio.median / self.byte_ratio

    def rows(self) -> list[Row]:
        """Flat rows."""
        place = (f"{self.width} rows", self.threads, self.context)
        note = f"bytes {self.byte_ratio:.3f}, excess {self.excess:.3f}"
        return [
            _row("verify", *place, "time", "ms", scale(self.seconds, 1e3)),
            _row("verify", *place, "cost over 1 row", "x", self.ratio, note),
        ]


@dataclass(frozen=True)
class GraphResult:
    """Cycles of the decode graph: seconds each, with `drafts` drafts, and the ratio to none.

    `mode` is graph or eager. `hoped` are tokens a second if every draft were accepted with the
    synthetic rate `acceptance`. `weight_bytes` are what one token reads; `share` is the part of the
    device's copy bandwidth that greedy decoding amounts to, None without one.
    """

    threads: int
    context: int
    drafts: int
    mode: str
    seconds: Samples
    ratio: Samples
    weight_bytes: float
    acceptance: float
    share: float | None

    @property
    def hoped(self) -> Samples:
        """Tokens a second."""
        tokens = sum(self.acceptance**depth for depth in range(self.drafts + 1))
        return Samples(tuple(tokens / value for value in self.seconds.values))

    def rows(self) -> list[Row]:
        """Flat rows."""
        what, place = f"{self.drafts} drafts, {self.mode}", (self.threads, self.context)
        note = f"synthetic acceptance of {self.acceptance}" if self.drafts else ""
        rows = [
            _row("graph", what, *place, "cycle", "ms", scale(self.seconds, 1e3)),
            _row("graph", what, *place, "cost", "x", self.ratio),
            _row("graph", what, *place, "rate", "tok/s", self.hoped, note),
        ]
        if self.share is not None:
            note = "weights, of the device's copy bandwidth"
            rows.append(_single("graph", what, *place, "bandwidth", "%", 100 * self.share, note))
        return rows


@dataclass(frozen=True)
class MatmulResult:
    """Weight bytes per second of one kind of product; `share` of the measured bandwidth."""

    threads: int
    what: str
    width: int  # rows of the activations
    nbytes: int
    rate: Samples
    share: float | None

    def rows(self) -> list[Row]:
        """Flat rows."""
        note = "" if self.share is None else f"{100 * self.share:.0f}% of the read bandwidth"
        what = f"{self.what}, {self.width} row{'s' if self.width > 1 else ''}"
        rate = scale(self.rate, 1e-9)
        return [_row("products", what, self.threads, None, "weights", "GB/s", rate, note)]


@dataclass(frozen=True)
class SpeculationResult:
    """One arm on the same prompts as greedy decoding.

    `synthetic`: acceptance was imposed (oracle). `ratio` is to greedy, round by round, None for
    greedy itself. `byte_cost` is the weight bytes of a cycle over those of a greedy step, None
    with a varying depth. The `same_*` flags compare with greedy bit by bit; None where it was not
    checked.
    """

    threads: int
    arm: str
    depth: str
    rates: tuple[float, ...]
    synthetic: bool
    prompts: int
    tokens: int
    distinct: int
    rate: Samples
    ratio: Samples | None
    drafted: int
    accepted: int
    acceptance: float
    mean_length: float
    byte_cost: float | None
    same_tokens: bool | None
    same_logits: bool | None
    same_state: bool | None

    @property
    def identity(self) -> str:
        """What the comparison with greedy found."""
        flags = {
            "tokens": self.same_tokens,
            "logits": self.same_logits,
            "cache": self.same_state,
        }
        if None in flags.values():
            return "not compared"
        wrong = [name for name, same in flags.items() if not same]
        return f"OTHER {' and '.join(wrong)}" if wrong else "same bits"

    def rows(self) -> list[Row]:
        """Flat rows."""
        note = f"{self.distinct} distinct of {self.tokens} tokens" if self.ratio is None else ""
        rows = [_row("decoding", self.arm, self.threads, None, "rate", "tok/s", self.rate, note)]
        if self.ratio is None:
            return rows
        notes = [
            f"accepted {self.accepted} of {self.drafted} ({100 * self.acceptance:.0f}%)",
            f"{self.mean_length:.2f} tokens a cycle",
        ]
        if self.synthetic:
            notes.insert(0, "SYNTHETIC acceptance")
        notes.append(f"bits: {self.identity}")
        rows.append(
            _row(
                *("decoding", self.arm, self.threads, None, "over greedy", "x"),
                self.ratio,
                "; ".join(notes),
            )
        )
        return rows


@dataclass(frozen=True)
class PeerResult:
    """Ours against another engine on the same file, prompt and threads, round by round.

    `same_prefix` counts the leading tokens on which both agree.
    """

    threads: int
    peer: str
    version: str
    prompt: int
    tokens: int
    ours: Samples
    theirs: Samples
    ratio: Samples
    prefill_ours: Samples
    prefill_theirs: Samples
    prefill_ratio: Samples
    same_prefix: int
    note: str = ""  # how the peer had to be run

    def rows(self) -> list[Row]:
        """Flat rows; the note of a ratio lists it pair by pair."""
        name = f"{self.peer} {self.version}"
        remark = self.note
        agree = f"the first {self.same_prefix} of {self.tokens} tokens agree"
        threads = self.threads
        rows = []
        for what, ours, theirs, ratio in (
            ("decode", self.ours, self.theirs, self.ratio),
            ("prefill", self.prefill_ours, self.prefill_theirs, self.prefill_ratio),
        ):
            pairs = "pairs " + " ".join(f"{value:.2f}" for value in ratio.values)
            note = agree if what == "decode" else f"prompt of {self.prompt}"
            rows += [
                _row("peer", f"{what}, ds4flow", threads, None, "rate", "tok/s", ours, note),
                _row("peer", f"{what}, {name}", threads, None, "rate", "tok/s", theirs, remark),
                _row(
                    "peer", f"{what}, ours over theirs", threads, None, "ratio", "x", ratio, pairs
                ),
            ]
        return rows


Result = (
    MachineResult
    | StartResult
    | ContextResult
    | WidthResult
    | GraphResult
    | MatmulResult
    | SpeculationResult
    | PeerResult
)


@dataclass
class Report:
    """Everything that one `ds4flow bench` measured, with what it ran on."""

    facts: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """All flat rows, in the order of the measurements."""
        return [row for result in self.results for row in result.rows()]

    def to_plain(self) -> dict[str, Any]:
        """The report as JSON values; every result names its kind."""
        results = [{"kind": type(result).__name__, **_plain(result)} for result in self.results]
        return {**self.facts, "results": results}


def scale(values: Samples, factor: float) -> Samples:
    """Samples in another unit."""
    return Samples(tuple(value * factor for value in values.values))


def _plain(value: Any) -> Any:
    if isinstance(value, Samples):
        return {
            "median": value.median,
            "low": value.low,
            "high": value.high,
            "values": list(value.values),
        }
    if is_dataclass(value) and not isinstance(value, type):
        names = asdict(value)  # for the names only: nested samples keep their figures
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _row(
    section: str,
    what: str,
    threads: int,
    context: int | None,
    metric: str,
    unit: str,
    values: Samples,
    note: str = "",
) -> Row:
    figures = (values.median, values.low, values.high, len(values.values))
    return Row(section, what, threads, context, metric, unit, *figures, note)


def _single(
    section: str,
    what: str,
    threads: int,
    context: int | None,
    metric: str,
    unit: str,
    value: float,
    note: str = "",
) -> Row:
    return Row(section, what, threads, context, metric, unit, value, value, value, 1, note)
