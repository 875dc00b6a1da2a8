"""Weights to a device: everything arrives, as stored, and nothing that does not fit is begun."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ds4flow.errors import Ds4FlowError
from ds4flow.gguf import GgufFile
from ds4flow.model import trunk
from ds4flow.model.config import ModelConfig
from ds4flow.model.mtp_weights import load_mtp
from ds4flow.model.transfer import on_device, report_progress
from ds4flow.model.trunk import Model
from ds4flow.model.weights import load_trunk
from ds4flow.quants import QTensor


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, QTensor):
        return [value.data]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value):
        return [leaf for item in fields(value) for leaf in leaves(getattr(value, item.name))]
    return []


@pytest.fixture
def files(golden_dir: Path) -> tuple[GgufFile, GgufFile]:
    main, mtp = ("tiny-q4k.gguf", "tiny-q4k.mtp-support.gguf")
    return GgufFile.open(golden_dir / main), GgufFile.open(golden_dir / mtp)


def test_all_weights_arrive_as_stored_with_progress(files: tuple[GgufFile, GgufFile]) -> None:
    main, mtp = files
    config = ModelConfig.from_gguf(main)
    weights = (load_trunk(main, config), load_mtp(mtp, config, main))
    steps: list[tuple[int, int]] = []
    moved = on_device(
        weights, torch.device("meta"), lambda done, total: steps.append((done, total))
    )
    before, after = leaves(weights), leaves(moved)
    assert len(before) == len(after) == len(steps)
    assert all(tensor.device.type == "meta" for tensor in after)
    assert [(t.shape, t.dtype) for t in before] == [(t.shape, t.dtype) for t in after]
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1] == sum(t.numel() * t.element_size() for t in before)
    assert moved[0].layers[0].q_a.type == weights[0].layers[0].q_a.type


@pytest.mark.parametrize("kernels", ["reference", "static"])
def test_what_does_not_fit_is_refused_with_the_sizes_before_it_is_copied(
    files: tuple[GgufFile, GgufFile], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setattr(trunk, "free_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(trunk, "on_device", None)  # would fail if it were called
    with pytest.raises(Ds4FlowError, match=r"weights and the cache need 3\.0 GiB") as caught:
        Model.load(*files, kernels=kernels, device=torch.device("cuda"), beside=3 << 30)
    assert "the device has 0.0 GiB free" in caught.value.what
    assert "runtime=cpu" in caught.value.fix


def test_progress_is_shown_once_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report_progress(1 << 30, 2 << 30)
    report_progress(2 << 30, 2 << 30)
    assert capsys.readouterr().err == "\rweights to the device: 2.0 of 2.0 GiB\n"
