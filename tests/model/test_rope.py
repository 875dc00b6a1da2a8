"""Rotary tables: published frequencies, block independence, and that rotation is relative."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds4flow.model.config import ModelConfig
from ds4flow.model.rope import BLOCK, Rope, frequencies, rotate


def shipped() -> ModelConfig:
    values: dict[str, Any] = {
        "rope_dim": 64,
        "rope_base": 10000.0,
        "rope_base_compress": 160000.0,
        "yarn_factor": 16.0,
        "yarn_original": 65536,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    return cast(ModelConfig, SimpleNamespace(**values))


def test_frequencies_of_compressed_layers():
    f = frequencies(shipped(), compressed=True)
    wanted = {
        0: 1.0,
        1: 6.8765602193e-01,
        8: 5.0e-02,
        15: 3.6355385836e-03,
        16: 2.2656250000e-03,
        17: 1.3968012946e-03,
        20: 2.9697777826e-04,
        24: 1.9531250000e-05,
        25: 5.3723126714e-06,
        31: 5.6805290369e-07,
    }
    for index, value in wanted.items():
        assert float(f[index]) == pytest.approx(value, rel=1e-9)


def test_frequencies_of_plain_layers_know_no_yarn():
    f = frequencies(shipped(), compressed=False)
    for index, value in {1: 7.4989420933e-01, 16: 1.0e-02, 31: 1.3335214322e-04}.items():
        assert float(f[index]) == pytest.approx(value, rel=1e-9)


def test_rows_across_a_block_boundary_equal_single_rows():
    rope = Rope(shipped(), compressed=True, exact=True)
    cos, sin = rope.rows(BLOCK - 3, 6)
    for i in range(6):
        one_cos, one_sin = Rope(shipped(), compressed=True, exact=True).rows(BLOCK - 3 + i, 1)
        assert torch.equal(cos[i], one_cos[0])
        assert torch.equal(sin[i], one_sin[0])


def test_steps_take_every_nth_position():
    rope = Rope(shipped(), compressed=True, exact=True)
    cos, _ = rope.rows(8, 3, step=4)
    assert torch.equal(cos[2], rope.rows(16, 1)[0][0])


def test_rotation_touches_only_the_last_channels_and_inverts():
    rope = Rope(shipped(), compressed=False, exact=True)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    cos, sin = rope.rows(1000, 3)
    y = rotate(x, cos, sin)
    assert torch.equal(y[:, :32], x[:, :32])
    assert not torch.equal(y[:, 32:], x[:, 32:])
    torch.testing.assert_close(rotate(y, cos, -sin), x, rtol=0, atol=1e-6)


def test_dot_products_depend_on_the_distance_only():
    rope = Rope(shipped(), compressed=True, exact=True)
    q, k = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).double()

    def dot(a: int, b: int) -> float:
        (ca, sa), (cb, sb) = rope.rows(a, 1), rope.rows(b, 1)
        return float(rotate(q[None], ca, sa)[0] @ rotate(k[None], cb, sb)[0])

    assert dot(7, 3) == pytest.approx(dot(1004, 1000), abs=1e-4)
    assert dot(7, 3) != pytest.approx(dot(8, 3), abs=1e-4)


def test_float32_angles_differ_from_exact_ones_only_far_out():
    exact = Rope(shipped(), compressed=True, exact=True)
    single = Rope(shipped(), compressed=True, exact=False)
    near = (exact.rows(10, 1)[0] - single.rows(10, 1)[0]).abs().max()
    far = (exact.rows(1_000_000, 1)[0] - single.rows(1_000_000, 1)[0]).abs().max()
    assert near < 1e-6 < far < 0.1
