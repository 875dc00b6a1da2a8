"""Every measurement gives results of the right shape; a report holds them. No timing here."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ds4flow.bench.command import bench_command
from ds4flow.bench.decoding import GREEDY, Arm, measure_decoding
from ds4flow.bench.engine import Engine
from ds4flow.bench.machine import StartTimes, measure_start, peak_memory, read_bandwidth
from ds4flow.bench.output import csv_text, json_text, show, write_text
from ds4flow.bench.passes import measure_contexts, measure_matmuls, measure_widths
from ds4flow.bench.plan import BenchOptions, numbers
from ds4flow.bench.results import MachineResult, PeerResult, Report, Row, StartResult
from ds4flow.bench.samples import Samples
from ds4flow.bench.settings import Settings, random_tokens
from ds4flow.device import DeviceChoice
from ds4flow.errors import Ds4FlowError, UsageError

QUICK = Settings(repeats=2, warmup=0, tokens=4, chunk=8, fill_cap=30)
BANDWIDTH = Samples((1e9, 1e9))


def test_bandwidth_is_a_rate() -> None:
    found = read_bandwidth(1, repeats=2, nbytes=1 << 20)
    assert len(found.values) == 2
    assert min(found.values) > 0


def test_peak_memory_is_at_least_what_the_interpreter_needs() -> None:
    peak = peak_memory()
    assert peak is None or peak > 10e6


def test_contexts(engine: Engine) -> None:
    found = measure_contexts(engine, [5, 60], QUICK, bandwidth=BANDWIDTH)
    assert [(r.context, r.filled) for r in found] == [
        (5, "prefill"),
        (60, "prefill of 30, rows copied"),
    ]
    for result in found:
        assert len(result.prefill.values) == len(result.decode.values) == 2
        assert min(result.prefill.values + result.decode.values) > 0
        assert result.share == pytest.approx(
            result.decode.median * (result.weight_bytes + result.kv_bytes) / 1e9
        )
    # after 60 tokens the indexer has more rows than it keeps, and more cache rows are read
    assert found[1].weight_bytes > found[0].weight_bytes
    assert found[1].kv_bytes > found[0].kv_bytes


def test_contexts_beyond_the_model_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="the model has 8192"):
        measure_contexts(engine, [8190], QUICK)


def test_widths_are_compared_with_one_row(engine: Engine) -> None:
    found = measure_widths(engine, [3, 2], QUICK, context=20)
    assert [r.width for r in found] == [1, 2, 3]
    assert found[0].ratio.values == (1.0, 1.0)
    assert found[0].byte_ratio == 1.0
    assert 1.0 < found[1].byte_ratio < found[2].byte_ratio < 3.0
    for result in found:
        expected = [
            a / b for a, b in zip(result.seconds.values, found[0].seconds.values, strict=True)
        ]
        assert list(result.ratio.values) == pytest.approx(expected)
        assert result.excess == pytest.approx(result.ratio.median / result.byte_ratio)


def test_products_cover_the_experts(engine: Engine) -> None:
    found = measure_matmuls(engine, replace(QUICK, repeats=1), rows=2, bandwidth=BANDWIDTH)
    assert "experts" in [r.what for r in found]
    for result in found:
        assert result.width == 2
        assert result.nbytes >= 1 << 26
        assert math.isfinite(result.rate.median)
        assert result.share == pytest.approx(result.rate.median / 1e9)


def test_decoding_arms(engine: Engine) -> None:
    prompts = [random_tokens(engine, 9, seed) for seed in (0, 1)]
    arms = [GREEDY, Arm(1), Arm(None), Arm(2, (1.0, 1.0)), Arm(2, (1.0, 1.0))]
    found = measure_decoding(engine, prompts, arms, QUICK)
    assert [r.arm for r in found] == [
        "greedy",
        "mtp 1",
        "mtp auto",
        "oracle 2 at 1,1",
    ]
    plain, own, auto, oracle = found
    assert plain.ratio is None
    assert (plain.tokens, plain.drafted) == (8, 0)
    for result in (own, auto, oracle):
        assert result.identity == "same bits"
        assert result.tokens >= 8
        assert result.ratio is not None
        assert list(result.ratio.values) == pytest.approx(
            [a / b for a, b in zip(result.rate.values, plain.rate.values, strict=True)]
        )
    assert oracle.synthetic
    assert not own.synthetic
    assert oracle.acceptance == 1.0
    assert oracle.mean_length == 3.0
    assert own.byte_cost is not None
    assert oracle.byte_cost is not None
    assert 1.0 < own.byte_cost < oracle.byte_cost
    assert auto.byte_cost is None


def test_a_start_is_measured_in_a_process_of_its_own(files: tuple[Path, Path]) -> None:
    start = measure_start(*files, kernels="reference", profile="official", threads=1)
    assert min(start.imports, start.load, start.first, start.second) > 0
    assert start.total == start.imports + start.load + start.first
    assert not start.cold


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho the file is damaged >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(Ds4FlowError, match="start failed: the file is damaged"):
        measure_start(tmp_path, None, kernels="reference", profile="official", threads=1)


# --- reports -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(engine: Engine) -> Report:
    prompts = [random_tokens(engine, 9, 0)]
    start = StartTimes(1.0, 2.0, 0.25, 0.125, None, cold=False)
    ours, theirs = Samples((4.0, 6.0)), Samples((2.0, 2.0))
    pair = (ours, theirs, ours.over(theirs))
    return Report(
        {"model": "small"},
        [
            MachineResult(1, BANDWIDTH),
            StartResult(1, "cpu", (start, replace(start, cold=True, peak_bytes=5_000_000))),
            *measure_contexts(engine, [5], QUICK, bandwidth=BANDWIDTH),
            *measure_widths(engine, [2], QUICK, context=5),
            *measure_matmuls(engine, replace(QUICK, repeats=1)),
            *measure_decoding(engine, prompts, [Arm(1), Arm(1, (0.5,))], QUICK, check=False),
            PeerResult(1, "llama.cpp", "1.2", 9, 6, *pair, *pair, same_prefix=4),
        ],
    )


def test_json_holds_every_sample(report: Report) -> None:
    plain = json.loads(json_text(report))
    assert plain["model"] == "small"
    kinds = {result["kind"] for result in plain["results"]}
    assert len(kinds) == 7
    machine = plain["results"][0]
    assert machine["bandwidth"]["values"] == [1e9, 1e9]
    starts = next(r for r in plain["results"] if r["kind"] == "StartResult")["starts"]
    assert [s["cold"] for s in starts] == [False, True]
    oracle = next(r for r in plain["results"] if r.get("synthetic"))
    assert oracle["rates"] == [0.5]


def test_csv_has_one_line_a_figure(report: Report) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert len(lines) == len(report.rows())
    assert set(lines[0]) == set(Row._fields)
    peer = next(line for line in lines if line["what"] == "decode, ours over theirs")
    assert (float(peer["median"]), peer["note"]) == (2.5, "pairs 2.00 3.00")
    synthetic = [line for line in lines if "SYNTHETIC" in line["note"]]
    assert {line["what"] for line in synthetic} == {"oracle 1 at 0.5"}


def test_tables_show_what_matters(report: Report) -> None:
    text = io.StringIO()
    show(report, Console(file=text, width=200))
    for part in (
        *("to compile", "over greedy", "SYNTHETIC", "1 thread"),
        *("not compared", "pair by pair", "2.00 3.00", "cost/bytes", "unknown"),
    ):
        assert part in text.getvalue()


def test_differences_from_greedy_are_named(report: Report) -> None:
    own = next(r for r in report.results if getattr(r, "arm", "") == "mtp 1")
    assert own.identity == "not compared"
    same = replace(own, same_tokens=True, same_logits=True, same_state=True)
    assert same.identity == "same bits"
    assert replace(same, same_logits=False, same_state=False).identity == "OTHER logits and cache"


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "{}")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["{}"]
    with pytest.raises(Ds4FlowError, match="cannot write"):
        write_text(tmp_path / "no" / "a.json", "{}")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def options(files: tuple[Path, Path]) -> BenchOptions:
    return BenchOptions(
        model=str(files[0]),
        mtp=str(files[1]),
        kernels="reference",
        contexts="5",
        widths="1-2",
        width_context=5,
        drafts="1",
        oracle=("0.5",),
        settings=replace(QUICK, repeats=1),
    )


def test_command_measures_and_writes(
    options: BenchOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = replace(
        options,
        only="speed,verify,decoding",
        prompts=("some text", "more of it"),
        json=str(tmp_path / "a.json"),
        csv=str(tmp_path / "a.csv"),
    )
    assert bench_command(wanted) == 0
    assert "decoding, same prompts" in capsys.readouterr().out
    plain = json.loads((tmp_path / "a.json").read_text())
    kinds = [r["kind"] for r in plain["results"]]
    assert kinds == ["ContextResult", *["WidthResult"] * 2, *["SpeculationResult"] * 3]
    assert plain["kernels"] == "reference"
    assert plain["settings"]["tokens"] == 4
    assert {r["prompts"] for r in plain["results"] if "prompts" in r} == {2}
    assert (tmp_path / "a.csv").read_text().startswith("section,")


def test_every_number_of_threads_is_measured(options: BenchOptions, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    wanted = replace(options, threads="1,2", only="verify", widths="1", json=str(path))
    before = torch.get_num_threads()
    try:
        assert bench_command(wanted) == 0
    finally:
        torch.set_num_threads(before)
    assert [r["threads"] for r in json.loads(path.read_text())["results"]] == [1, 2]


def test_without_mtp_only_greedy_is_measured(options: BenchOptions, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert bench_command(replace(options, mtp=None, only="decoding", json=str(path))) == 0
    assert [r["arm"] for r in json.loads(path.read_text())["results"]] == ["greedy"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"only": "speeds"}, "not a section"),
        ({"threads": "0"}, "out of range"),
        ({"widths": "a"}, "not a number"),
        ({"contexts": ""}, "empty"),
        ({"drafts": "17"}, "no depth"),
        ({"oracle": ("2",)}, "acceptance rates"),
        ({"kernels": "cuda"}, "not a kernel backend"),
        ({"peer": "llama"}, "not a known engine"),
        ({"threads": "1,2", "settings": replace(QUICK, clock="cpu")}, "measures one thread"),
    ],
)
def test_wrong_options_name_themselves(
    changes: dict[str, object], said: str, options: BenchOptions
) -> None:
    with pytest.raises(UsageError, match=said):
        bench_command(replace(options, **changes))


@pytest.mark.parametrize("name", ["repeats", "tokens", "chunk"])
def test_wrong_settings_name_themselves(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=0"):
        Settings(**{name: 0})


def test_cpu_time_is_said_to_be_that(
    options: BenchOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(QUICK, repeats=1, clock="cpu")
    assert bench_command(replace(options, only="verify", widths="1", settings=settings)) == 0
    assert capsys.readouterr().out.startswith("CPU time of one thread")
    with pytest.raises(UsageError, match="clock=sun"):
        replace(QUICK, clock="sun")


def test_lists_of_numbers() -> None:
    assert numbers("widths", "1-3,8,2", low=1) == (1, 2, 3, 8)


def test_auto_takes_the_fastest_backend_there_is(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = DeviceChoice("cpu", "reference", "the best here")
    monkeypatch.setattr("ds4flow.device.choose_device", lambda runtime: found)
    path = tmp_path / "a.json"
    wanted = replace(options, kernels="auto", only="verify", json=str(path))
    assert bench_command(wanted) == 0
    report = json.loads(path.read_text())
    assert (report["kernels"], report["device_why"]) == ("reference", "the best here")
