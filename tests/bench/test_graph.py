"""The decode graph measured: on a file, and on Flash's dimensions scaled down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ds4flow.bench.command import bench_command
from ds4flow.bench.graph import measure_graph
from ds4flow.bench.output import tables
from ds4flow.bench.plan import BenchOptions
from ds4flow.bench.results import Report
from ds4flow.bench.settings import Settings
from ds4flow.device import DeviceChoice
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.model.transfer import stored_bytes
from ds4flow.synth import unwritten
from ds4flow.synth.presets import SYNTH_FLASH, changed
from ds4flow.synth.rehearsal import Synthesis
from ds4flow.synth.unwritten import Unwritten, made_model, planned
from ds4flow.synth.weights import mtp_plan

SCALED = {
    **{"layers": "4", "dim": "256", "vocab": "640", "heads": "4", "head_dim": "128"},
    **{"q_rank": "64", "groups": "2", "o_rank": "32", "experts": "8", "experts_used": "2"},
    **{"expert_dim": "256", "index_heads": "4", "top_k": "16"},
}
CPU = DeviceChoice("cpu", "static", "a test")
QUICK = Settings(repeats=2, warmup=0, tokens=2)


def test_full_size_is_refused_with_the_sizes_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unwritten, "available_bytes", lambda: 24 << 30)
    monkeypatch.setattr(unwritten, "Synthesis", None)  # would fail if it were called
    with pytest.raises(Ds4FlowError, match=r"synth-flash need 85\.4 GiB") as caught:
        bench_command(BenchOptions(model="model=synth-flash"))
    assert "the device has 24.0 GiB free" in caught.value.what
    assert "--synth layers=4" in caught.value.fix


def test_the_weights_made_are_those_planned() -> None:
    """Every tensor of the plan and no other, at full size, on a device without memory; position
    biases are float32 in memory and halves in a file."""
    meta = torch.device("meta")
    made = Synthesis(SYNTH_FLASH.config, SYNTH_FLASH.types, meta)
    infos = planned(SYNTH_FLASH)
    wider = sum(info.nbytes for info in infos if "_ape" in info.name)
    assert stored_bytes(made.trunk()) == sum(info.nbytes for info in infos) + wider
    block = sum(plan.info.nbytes for plan in mtp_plan(SYNTH_FLASH))
    assert stored_bytes(made.mtp()) == block


def test_cycles_of_a_scaled_flash(tmp_path: Path) -> None:
    words = tuple(f"{key}={value}" for key, value in SCALED.items())
    options = BenchOptions(
        **{"model": "model=synth-flash", "synth": words, "contexts": "40", "widths": "1,3"},
        json=str(tmp_path / "x.json"),
        settings=QUICK,
    )
    assert bench_command(options) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert (report["kernels"], report["device"]) == ("static", "cpu")
    first, second = report["results"]
    assert (first["drafts"], second["drafts"]) == (0, 2)
    assert first["mode"] == "eager"
    assert first["ratio"]["values"] == [1.0, 1.0]
    assert first["share"] is None


def test_rates_assume_an_acceptance_and_say_so() -> None:
    recipe = changed(SYNTH_FLASH, SCALED)
    model = made_model(Unwritten(recipe, seed=0), CPU, "plain", fix="")
    results = measure_graph(model, planned(recipe), [20], [2], QUICK)
    (result,) = results
    assert result.hoped.values[0] == pytest.approx((1 + 0.8 + 0.64) / result.seconds.values[0])
    assert any("synthetic acceptance of 0.8" in row.note for row in result.rows())
    (table,) = tables(Report({}, results))
    assert "SYNTHETIC" in str(table.title)


def test_other_types_and_wrong_keys() -> None:
    assert changed(SYNTH_FLASH, {"down": "MXFP4"}).types["down"] == "MXFP4"
    with pytest.raises(UsageError, match="layrs is not a key"):
        bench_command(BenchOptions(model="synth-flash", synth=("layrs=4",)))
    with pytest.raises(UsageError, match="fixed shapes"):
        bench_command(BenchOptions(model="synth-flash", kernels="cpu"))
    with pytest.raises(UsageError, match="changes synth-flash only"):
        bench_command(BenchOptions(model="x.gguf", synth=("layers=4",)))


def test_the_graph_of_a_file_needs_fixed_shapes(golden_dir: Path, tmp_path: Path) -> None:
    model = str(golden_dir / "tiny-f32.gguf")
    with pytest.raises(UsageError, match="fixed shapes"):
        bench_command(BenchOptions(model=model, only="graph", kernels="reference"))
    options = BenchOptions(
        **{"model": model, "mtp": str(golden_dir / "tiny-f32.mtp-support.gguf")},
        **{"only": "graph", "contexts": "20", "widths": "1-2", "profile": "plain"},
        csv=str(tmp_path / "x.csv"),
        settings=QUICK,
    )
    assert bench_command(options) == 0
    assert (tmp_path / "x.csv").read_text().count("graph,") == 6
