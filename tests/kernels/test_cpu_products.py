"""Products on stored weights: exact values, one fixed order, bits that ignore the other rows."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow.errors import UsageError
from ds4flow.gguf import GgufFile
from ds4flow.kernels.cpu import CpuKernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import find_profile
from ds4flow.quants import QTensor
from tests.stored import stored_weight

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4")


def inputs(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def config(golden_dir: Path) -> ModelConfig:
    return ModelConfig.from_gguf(GgufFile.open(golden_dir / "tiny-f32.gguf"))


@pytest.fixture(scope="module")
def kernels(config: ModelConfig) -> CpuKernels:
    return CpuKernels(config, find_profile("plain"), threads=1)


def columns_of(type_name: str) -> int:
    return 1024 if type_name in ("Q4_K", "Q2_K", "IQ2_XXS") else 608


@pytest.mark.parametrize("type_name", TYPES)
def test_stored_weights_give_the_bits_of_dequantised_ones(kernels, type_name):
    stored = stored_weight(type_name, 37, columns_of(type_name))
    plain = QTensor("w", "F32", stored.shape, stored.float())
    for m in (1, 2, 3, 4, 5, 9):
        x = inputs(m, stored.shape[1])
        assert torch.equal(kernels.linear(x, stored), kernels.linear(x, plain))


@pytest.mark.parametrize("type_name", TYPES)
def test_products_agree_with_float64(kernels, type_name):
    stored = stored_weight(type_name, 33, columns_of(type_name))
    x = inputs(6, stored.shape[1])
    exact = x.double() @ stored.float().double().T
    error = (kernels.linear(x, stored).double() - exact).abs().max()
    assert float(error) <= 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_looked_up_with_exact_values(kernels, type_name):
    stored = stored_weight(type_name, 20, columns_of(type_name))
    ids = [3, 19, 0, 3]
    assert torch.equal(kernels.embed(stored, ids), stored.float()[ids])
    with pytest.raises(IndexError):
        kernels.embed(stored, [20])


@pytest.mark.parametrize("columns", [16, 32, 48, 80, 2064])
def test_odd_numbers_of_vectors(kernels, columns):
    for type_name in ("F32", "F16", "BF16"):
        stored = stored_weight(type_name, 5, columns)
        x = inputs(7, columns)
        exact = x.double() @ stored.float().double().T
        error = (kernels.linear(x, stored).double() - exact).abs().max()
        assert float(error) <= 1e-6 * float(exact.abs().max())


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    type_name=st.sampled_from(TYPES),
    m=st.integers(1, 19),
    rows=st.integers(1, 40),
    place=st.integers(0, 18),
    seed=st.integers(0, 2**31),
)
def test_a_row_ignores_its_place_and_its_neighbours(kernels, type_name, m, rows, place, seed):
    stored = stored_weight(type_name, rows, columns_of(type_name) // 2 * 2, seed)
    x = inputs(m, stored.shape[1], seed)
    place %= m
    assert torch.equal(
        kernels.linear(x, stored)[place], kernels.linear(x[place : place + 1], stored)[0]
    )


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_K"])
def test_a_strided_view_of_blocks_is_read_in_place(kernels, type_name):
    """Half of the columns of a wider matrix, as the joint projection of an MTP file is split."""
    wide = stored_weight(type_name, 9, 1024)
    half = wide.data.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        view = QTensor("v", type_name, (9, 512), wide.data[:, part])
        packed = QTensor("p", type_name, (9, 512), wide.data[:, part].contiguous())
        x = inputs(3, 512)
        assert torch.equal(kernels.linear(x, view), kernels.linear(x, packed))


def test_unknown_types_are_kept_as_float32_and_said_so(kernels, caplog):
    rng = np.random.default_rng(0)
    data = gguf.quants.quantize(
        rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q5_0
    )
    stored = QTensor("odd.weight", "Q5_0", (4, 64), torch.from_numpy(data))
    x = inputs(2, 64)
    got = kernels.linear(x, stored)
    assert "odd.weight" in caplog.text
    assert torch.allclose(got, x @ stored.float().T, atol=1e-5)


def test_widths_that_do_not_fit_are_refused(kernels):
    with pytest.raises(UsageError, match="multiple of 16"):
        kernels.linear(inputs(1, 24), stored_weight("F32", 3, 24))


def test_subnormal_and_signed_halves_are_exact(kernels):
    """Every finite half, by look-up."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    halves = halves[np.isfinite(halves)]
    halves = halves[: len(halves) // 16 * 16].reshape(-1, 16)
    stored = QTensor("h", "F16", halves.shape, torch.from_numpy(halves.copy()))
    got = kernels.embed(stored, range(len(halves)))
    assert np.array_equal(got.numpy().view(np.uint32), halves.astype(np.float32).view(np.uint32))
