"""Rounded activations: what is rounded, what is exact, and that rows stay independent."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import types

from ds4flow.cache import KVCache
from ds4flow.errors import UsageError
from ds4flow.gguf import GgufFile
from ds4flow.kernels.cpu import CpuKernels, lanes, products
from ds4flow.kernels.cpu.emit import Target
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import find_profile
from ds4flow.model.trunk import Model
from tests.stored import stored_weight

ROUNDED = ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4")
SMALL_BLOCKS = ("Q8_0", "MXFP4")
ARRAYS = Path(__file__).parent.parent / "data" / "golden"


def inputs(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The activations that the products see: blocks of 32 with their largest magnitude at 127."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, torch.round(blocks * (127.0 / largest)), 0.0)
    return (codes * (largest / 127.0)).flatten(-2)


@pytest.fixture(scope="module")
def config(golden_dir: Path) -> ModelConfig:
    return ModelConfig.from_gguf(GgufFile.open(golden_dir / "tiny-f32.gguf"))


@pytest.fixture(scope="module")
def kernels(config: ModelConfig) -> CpuKernels:
    return CpuKernels(config, find_profile("plain"), threads=1, activations="int8")


def widths(type_name: str) -> tuple[int, ...]:
    return (32, 96, 608) if type_name in SMALL_BLOCKS else (256, 1024)


@pytest.mark.parametrize("type_name", ROUNDED)
def test_only_the_activations_are_rounded(kernels, type_name):
    for columns in widths(type_name):
        weight = stored_weight(type_name, 37, columns)
        x = inputs(5, columns)
        x[3, :32] = 0.0
        exact = rounded(x).double() @ weight.float().double().T
        error = (kernels.linear(x, weight).double() - exact).abs().max()
        assert float(error) <= 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_float_weights_meet_float_activations(kernels, config, type_name):
    weight = stored_weight(type_name, 9, 96)
    plain = CpuKernels(config, find_profile("plain"), threads=1)
    x = inputs(3, 96)
    assert torch.equal(kernels.linear(x, weight), plain.linear(x, weight))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    type_name=st.sampled_from(ROUNDED),
    m=st.integers(1, 11),
    place=st.integers(0, 10),
    seed=st.integers(0, 2**31),
)
def test_a_row_ignores_its_place_and_its_neighbours(kernels, type_name, m, place, seed):
    weight = stored_weight(type_name, 13, widths(type_name)[-1], seed)
    x = inputs(m, weight.shape[1], seed)
    place %= m
    alone = kernels.linear(x[place : place + 1], weight)[0]
    assert torch.equal(kernels.linear(x, weight)[place], alone)


@pytest.mark.parametrize("type_name", ROUNDED)
def test_a_value_that_is_not_finite_is_not_hidden(kernels, type_name):
    weight = stored_weight(type_name, 4, 256)
    for bad in (float("nan"), float("inf")):
        x = inputs(2, 256)
        x[1, 200] = bad
        got = kernels.linear(x, weight)
        assert bool(torch.isfinite(got[0]).all())
        assert not bool(torch.isfinite(got[1]).any())


PLAIN = Target(native_half=False, vnni=False, wide=False)
LESSER = {
    "plain": PLAIN,
    "AVX2": replace(PLAIN, native_half=True, pairs=True),
    "AVX-512": replace(PLAIN, native_half=True, pairs=True, wide=True),
    "AVX512-VNNI": replace(PLAIN, native_half=True, pairs=True, wide=True, vnni=True),
}
"""Targets with instructions that a newer x86-64 CPU has as well."""


def compiled_for(
    target: Target, function: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Address of a product kernel compiled with the instructions of another CPU."""
    monkeypatch.setattr(lanes, "target_of", lambda context: target)
    made = numba.cfunc(types.int64(*[types.int64] * 12), error_model="numpy")(function)
    KEPT.append(made)
    return made.address


def native() -> Any:
    """Numba's context for this CPU."""
    return numba.core.registry.cpu_target.target_context


KEPT: list[object] = []  # machine code lives as long as the object


@pytest.mark.parametrize(
    ("type_name", "mode", "lesser"),
    [
        *((name, "f32", "plain") for name in ("F16", "Q8_0", "Q2_K")),
        ("IQ2_XXS", "f32", "AVX-512"),
        *((name, "int8", "plain") for name in ("Q8_0", "Q2_K")),
        *((name, "int8", "AVX2") for name in ROUNDED),
        ("IQ2_XXS", "int8", "AVX512-VNNI"),
    ],
)
def test_other_instructions_give_the_same_bits(config, type_name, mode, lesser, monkeypatch):
    """Other code for other CPUs, equal results; what this CPU cannot run is skipped."""
    target, columns = LESSER[lesser], 768
    own = lanes.target_of(native())
    if any(getattr(target, field.name) > getattr(own, field.name) for field in fields(target)):
        pytest.skip(f"this CPU has no {lesser}")
    weight = stored_weight(type_name, 21, columns)
    x = inputs(3, columns)
    x[2] = 1.0  # codes of 127 beside the largest that weights have
    if type_name == "Q8_0":
        weight = replace(weight, data=weight.data.clone())
        weight.data[0, 2:34] = weight.data[1, 36:68] = 128  # -128 as stored
    usual = CpuKernels(config, find_profile("plain"), threads=1, activations=mode)
    wanted = usual.linear(x, weight)
    kernels_by_type = products.PRODUCTS if mode == "f32" else products.ROUNDED_PRODUCTS
    records = usual._context.records.matrices(weight)
    records[0] = compiled_for(target, kernels_by_type[type_name], monkeypatch)
    assert torch.equal(usual.linear(x, weight), wanted)


def test_unknown_mode_names_the_known_ones(config):
    with pytest.raises(UsageError, match="int4"):
        CpuKernels(config, find_profile("plain"), activations="int4")


@pytest.mark.parametrize(("name", "most"), [("tiny-iq2", 0.54), ("tiny-q4k", 0.062)])
def test_whole_models_are_as_close_as_the_native_engine(name, most, golden_dir):
    """Median over positions of the largest logit difference, against llama.cpp's own rounding."""
    model = Model.load(
        GgufFile.open(golden_dir / f"{name}.gguf"), profile="plain", kernels="cpu-int8"
    )
    with np.load(ARRAYS / f"{name}.npz") as data:
        tokens, wanted = data["tokens_200"].tolist(), data["ref_logits_200"]
    cache = KVCache(model.config, context=200, draft_max=0, chunk=200)
    logits = model.logits(model.forward(tokens, cache)).numpy()
    assert np.median(np.abs(logits - wanted).max(-1)) <= most
