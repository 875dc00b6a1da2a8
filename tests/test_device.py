"""Choosing a device: what was asked for, or an error that says what is missing."""

import pytest
import torch

from ds4flow import device
from ds4flow.device import check_fits, choose_device
from ds4flow.errors import Ds4FlowError, UsageError


@pytest.fixture
def bare(monkeypatch):
    """A machine whose torch was built without CUDA, ROCm and Metal."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def nvidia(bare, monkeypatch):
    """A machine with one NVIDIA GPU and Triton."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.parametrize("runtime", ["cuda", "rocm"])
def test_a_gpu_that_is_not_there_is_an_error_with_a_way_out(bare, runtime):
    with pytest.raises(Ds4FlowError) as caught:
        choose_device(runtime)
    assert f"runtime={runtime} cannot be used" in caught.value.what
    assert "built without" in caught.value.what
    assert "runtime=cpu" in caught.value.fix
    assert caught.value.exit_code == 1


def test_what_triton_lacks_is_named(nvidia, monkeypatch):
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    with pytest.raises(Ds4FlowError, match="needs gcc or clang"):
        choose_device("cuda")


def test_a_driver_or_triton_that_is_missing_is_named(nvidia, monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Ds4FlowError, match="triton is not installed"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Ds4FlowError, match="no CUDA device or driver"):
        choose_device("cuda")


def test_metal_that_is_missing_is_named(bare):
    with pytest.raises(Ds4FlowError, match="no Metal device"):
        choose_device("mps")


def test_auto_takes_the_best_and_says_why(bare):
    choice = choose_device("auto")
    assert choice[:2] == ("cpu", "cpu")
    assert "no GPU to use" in choice.why


def test_auto_takes_a_gpu_that_is_there(nvidia):
    assert choose_device("auto") == ("cuda", "gpu", "H200 is there")
    assert choose_device("cuda").kernels == "gpu"
    assert choose_device("cpu").name == "cpu"


def test_rocm_goes_through_the_same_kernels(nvidia, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_device("rocm")[:2] == ("cuda", "gpu")
    assert choose_device("auto")[:2] == ("cuda", "gpu")
    with pytest.raises(Ds4FlowError, match="built without CUDA"):
        choose_device("cuda")


def test_metal_uses_the_reference_kernels(bare, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps")[:2] == ("mps", "reference")
    assert choose_device("auto")[:2] == ("mps", "reference")


def test_another_name_is_a_usage_error_with_the_near_one():
    with pytest.raises(UsageError, match="did you mean cuda"):
        choose_device("coda")


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    check_fits(100, 100, "the weights")
    with pytest.raises(Ds4FlowError, match=r"need 81\.0 GiB, but the device has 24\.0 GiB"):
        check_fits(81 << 30, 24 << 30, "the weights")
