"""Choosing a device: what was asked for, or an error that says what is missing."""

import pytest
import torch
from click.testing import CliRunner

from ds4flow import device
from ds4flow.cli import main
from ds4flow.config import compose
from ds4flow.device import check_fits, choose, choose_device, free_bytes
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.wiring import Wiring, build_pipeline


@pytest.fixture
def bare(monkeypatch):
    """A machine with AVX2 whose torch was built without CUDA, ROCm and Metal."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
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
    assert choice[:2] == ("cpu", "cpu-int8")
    assert choice.why == "no GPU: torch is built without CUDA and ROCm"


def test_activations_are_rounded_where_the_cpu_multiplies_bytes(bare, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    choice = choose_device("cpu")
    assert choice[:2] == ("cpu", "cpu")
    assert choice.why == "runtime=cpu asks for it; DEFAULT has no fast products of bytes"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_device("cpu") == ("cpu", "cpu-int8", "runtime=cpu asks for it")


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


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (("auto", "auto"), ("cpu", "cpu-int8")),
        (("cpu", "auto"), ("cpu", "cpu-int8")),
        (("cpu", "cpu"), ("cpu", "cpu")),
        (("auto", "reference"), ("cpu", "reference")),
        (("cpu", "cpu-int8"), ("cpu", "cpu-int8")),
    ],
)
def test_kernels_and_device_together(bare, asked, chosen):
    assert choose(*asked)[:2] == chosen


def test_a_gpu_may_run_any_kernels_but_those_of_the_cpu(nvidia):
    assert choose("auto", "auto")[:2] == ("cuda", "gpu")
    assert choose("cuda", "reference")[:2] == ("cuda", "reference")
    assert choose("auto", "reference")[:2] == ("cpu", "reference")
    assert choose("auto", "gpu")[:2] == ("cuda", "gpu")
    with pytest.raises(UsageError, match="computes on the CPU"):
        choose("cuda", "cpu")
    with pytest.raises(UsageError, match="needs CUDA or ROCm, and runtime=cpu asks for none"):
        choose("cpu", "gpu")


def test_no_gpu_keeps_auto_on_the_cpu_and_contradicts_a_named_one(nvidia):
    choice = choose("auto", "auto", no_gpu=True)
    assert choice[:2] == ("cpu", "cpu-int8")
    assert "DS4_NO_GPU" in choice.why
    with pytest.raises(UsageError, match="DS4_NO_GPU"):
        choose("cuda", "auto", no_gpu=True)
    with pytest.raises(UsageError, match=r"runtime\.no_gpu asks for none"):
        choose("auto", "gpu", no_gpu=True)


def test_the_gpu_kernels_without_a_gpu_say_what_is_missing(bare):
    with pytest.raises(Ds4FlowError, match="built without CUDA and ROCm"):
        choose("auto", "gpu")


def test_a_graph_needs_kernels_of_fixed_shapes(bare, monkeypatch):
    assert choose("auto", "auto", graph=True)[:2] == ("cpu", "static")
    assert choose("cpu", "static", graph=True).kernels == "static"
    with pytest.raises(UsageError, match="fixed shapes"):
        choose("auto", "cpu", graph=True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UsageError, match="Metal"):
        choose("mps", "auto", graph=True)


def test_a_graph_on_a_gpu_uses_triton(nvidia):
    assert choose("cuda", "auto", graph=True)[:2] == ("cuda", "gpu")


def test_free_memory_is_asked_of_the_device(monkeypatch):
    assert free_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    assert free_bytes(torch.device("cuda")) == 5


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    check_fits(100, 100, "the weights")
    check_fits(100, None, "the weights")
    with pytest.raises(Ds4FlowError, match=r"need 81\.0 GiB, but the device has 24\.0 GiB"):
        check_fits(81 << 30, 24 << 30, "the weights")


@pytest.mark.parametrize("runtime", ["cuda", "rocm", "mps"])
def test_a_run_says_in_two_lines_what_is_missing(bare, runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["run", f"runtime={runtime}", "-n", "2"])
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: runtime={runtime} cannot be used: ")
    assert second == "  use runtime=cpu, or runtime=auto to take what is there"


def wired(*words: str) -> tuple[list[str], str]:
    """The cycle that would run, and what is said of it."""
    made = Wiring.of(compose(list(words)))
    return made.roles["cycle"], made.note


GRAPH = ["decode", "commit", "check"]
STAGES = ["draft", "check", "verify", "commit", "check"]


def test_auto_takes_the_graph_where_it_can_be_captured(nvidia):
    assert wired() == wired("pipeline=greedy") == wired("runtime=cuda") == (GRAPH, "")
    assert wired("sampling.temperature=0.8") == (GRAPH, "")
    assert wired("runtime.eager=true") == (GRAPH, "")  # its uncaptured twin
    assert build_pipeline(compose([])).stages["load"].choice[:2] == ("cuda", "gpu")
    assert wired("runtime=cpu") == wired("runtime.no_gpu=true") == (STAGES, "")
    assert wired("pipeline=speculative") == (STAGES, "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["draft=lying"], "the graph drafts with the MTP block, and this run with LyingDrafter"),
        (
            ["sampling.temperature=0.8", "sampling.lossless=true"],
            "the graph drafts greedily, and this run while sampling",
        ),
        (["runtime.tensor_parallel=2"], "the exchange between processes is not captured"),
        (
            ["runtime.device=cuda", "runtime.kernels=reference"],
            "torch operations are not captured; runtime.kernels=gpu is",
        ),
    ],
)
def test_auto_says_why_it_does_not_take_the_graph(nvidia, words, why):
    assert wired(*words) == (STAGES, why)


def test_auto_runs_stage_by_stage_without_a_gpu(bare, monkeypatch):
    assert wired() == (STAGES, "")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert wired() == (STAGES, "")
