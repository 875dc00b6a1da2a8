"""Which device a run computes on, and whether its weights fit there.

Promise: a device that was asked for by name is used or refused, never replaced silently.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from typing import NamedTuple

import torch

from ds4flow.errors import Ds4FlowError, UsageError

INSTEAD = "use runtime=cpu, or runtime=auto to take what is there"
ON_THE_CPU = ("cpu", "cpu-int8")
"""Kernel backends that compute nowhere else."""
FIXED_SHAPES = ("static", "gpu")
"""Kernel backends that take positions from the device, as pipeline=graph needs them to."""


class DeviceChoice(NamedTuple):
    """A torch device name (`cuda`, `mps` or `cpu`), the kernel backend for it, and why."""

    name: str
    kernels: str
    why: str


def choose(
    device: str, kernels: str, *, no_gpu: bool = False, graph: bool = False, processes: int = 1
) -> DeviceChoice:
    """Device and kernels for `runtime.device` and `runtime.kernels`, each possibly `auto`.

    `no_gpu` keeps auto on the CPU; with `graph` the kernels must take positions from the device,
    with several `processes` they must be able to share heads and experts.
    Raises UsageError for a pair that contradicts itself, Ds4FlowError for what is not there.
    """
    if no_gpu and device not in ("auto", "cpu"):
        raise UsageError(
            f"runtime={device} asks for a GPU, and runtime.no_gpu (DS4_NO_GPU) forbids one",
            "unset DS4_NO_GPU, or use runtime=cpu",
        )
    if no_gpu and device == "auto" and kernels != "gpu":
        choice = _cpu("runtime.no_gpu (DS4_NO_GPU) asks for no GPU")
    elif kernels == "gpu":
        choice = _triton(device, no_gpu)
    elif kernels == "auto":
        choice = choose_device(device)
    elif kernels in ON_THE_CPU and device not in ("auto", "cpu"):
        raise UsageError(
            f"runtime.kernels={kernels} computes on the CPU, and runtime={device} asks for another "
            "device",
            "leave runtime.kernels at auto, or use runtime=cpu",
        )
    elif device == "auto":
        choice = DeviceChoice("cpu", kernels, f"runtime.kernels={kernels} and no device named")
    else:
        choice = choose_device(device)
    if kernels != "auto":
        choice = choice._replace(kernels=kernels)
    if graph:
        choice = _fixed(choice, explicit=kernels != "auto")
    if processes > 1 and choice.kernels in ON_THE_CPU:
        if kernels != "auto":
            raise UsageError(
                f"runtime.kernels={kernels} cannot share a model between {processes} processes",
                "leave runtime.kernels at auto, or use one process, which has all cores",
            )
        choice = choice._replace(kernels="reference")
    return choice


def _triton(device: str, no_gpu: bool) -> DeviceChoice:
    """The device of runtime.kernels=gpu."""
    if importlib.util.find_spec("triton") is not None:
        triton = importlib.import_module("triton")
        if triton.knobs.runtime.interpret:
            return DeviceChoice("cpu", "gpu", "Triton's interpreter (TRITON_INTERPRET) is on")
    if no_gpu or device in ("cpu", "mps"):
        asked = "runtime.no_gpu" if no_gpu else f"runtime={device}"
        raise UsageError(
            f"runtime.kernels=gpu needs CUDA or ROCm, and {asked} asks for none",
            "leave runtime.kernels at auto",
        )
    if device != "auto":
        return choose_device(device)
    if missing("cuda") and missing("rocm"):
        raise Ds4FlowError(
            f"runtime.kernels=gpu cannot be used: {_no_gpu()}", "leave runtime.kernels at auto"
        )
    return DeviceChoice("cuda", "gpu", f"runtime.kernels=gpu asks for it: {_gpu_name()}")


def _fixed(choice: DeviceChoice, *, explicit: bool) -> DeviceChoice:
    """The choice with kernels that pipeline=graph can use, if it needs others."""
    if choice.name == "mps":
        raise UsageError(
            "pipeline=graph cannot run on Metal, which has no float64", "use pipeline=speculative"
        )
    if choice.kernels in FIXED_SHAPES:
        return choice
    if explicit:
        raise UsageError(
            f"pipeline=graph needs kernels of fixed shapes, and runtime.kernels={choice.kernels} "
            "has none",
            f"use runtime.kernels={' or '.join(FIXED_SHAPES)}, or pipeline=speculative",
        )
    return choice._replace(kernels="static")


def graph_obstacle(choice: DeviceChoice, processes: int = 1) -> str:
    """Why a cycle that runs so cannot be captured as a graph; empty when it can."""
    if processes > 1:
        return "the exchange between processes is not captured"
    if choice.name != "cuda":
        return f"graphs are captured on CUDA devices, and the cache lies on {choice.name}"
    if choice.kernels != "gpu":
        return "torch operations are not captured; runtime.kernels=gpu is"
    return ""


def _cpu(why: str) -> DeviceChoice:
    """The CPU with its faster kernels: where it multiplies bytes, those that round activations.

    Both are as exact: a pass of many rows has the bits of its rows alone. What they compute differs
    by the rounding of activations to 8 bits, which the native engines do as well.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX"):
        return DeviceChoice("cpu", "cpu-int8", why)
    return DeviceChoice("cpu", "cpu", f"{why}; {capability} has no fast products of bytes")


def choose_device(runtime: str) -> DeviceChoice:
    """The device for `runtime=cuda|rocm|mps|cpu|auto`.

    Raises Ds4FlowError saying what is missing when the device is not there. CUDA and ROCm go
    through the Triton kernels, MPS through the reference kernels.
    """
    if runtime == "cpu":
        return _cpu("runtime=cpu asks for it")
    if runtime == "auto":
        return _best()
    lacks = missing(runtime)
    if lacks:
        raise Ds4FlowError(f"runtime={runtime} cannot be used: {lacks}", INSTEAD)
    if runtime == "mps":
        return DeviceChoice("mps", "reference", "runtime=mps asks for it")
    return DeviceChoice("cuda", "gpu", f"runtime={runtime} asks for it: {_gpu_name()}")


def _best() -> DeviceChoice:
    for runtime in ("cuda", "rocm"):
        if not missing(runtime):
            return DeviceChoice("cuda", "gpu", f"{_gpu_name()} is there")
    if not missing("mps"):
        return DeviceChoice("mps", "reference", "no CUDA or ROCm device, but Metal is there")
    return _cpu(f"no GPU: {_no_gpu()}")


def _no_gpu() -> str:
    """Why neither CUDA nor ROCm can be used."""
    if torch.version.cuda or torch.version.hip:
        return missing("cuda" if torch.version.cuda else "rocm")
    return "torch is built without CUDA and ROCm"


def missing(runtime: str) -> str:
    """What `runtime` lacks on this machine, empty when nothing."""
    if runtime == "mps":
        return "" if torch.backends.mps.is_available() else "this torch sees no Metal device"
    built_for = torch.version.hip if runtime == "rocm" else torch.version.cuda
    title = "ROCm" if runtime == "rocm" else "CUDA"
    if built_for is None:
        return f"the installed torch {torch.__version__} was built without {title}"
    if not torch.cuda.is_available():
        return f"torch finds no {title} device or driver"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install 'ds4flow[gpu]')"
    if not any(shutil.which(compiler) for compiler in ("gcc", "clang")):
        return "Triton needs gcc or clang to start kernels, and there is neither"
    return ""


def _gpu_name() -> str:
    return torch.cuda.get_device_name(0)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None for the CPU, which reads weights from the file as it goes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return None


def check_fits(needed: int, free: int | None, what: str, fix: str = "") -> None:
    """Raise Ds4FlowError with both sizes when `needed` bytes exceed the `free` ones of a device.

    None means that there is no limit to check.
    """
    if free is not None and needed > free:
        raise Ds4FlowError(
            f"{what} need {needed / 2**30:.1f} GiB, but the device has {free / 2**30:.1f} GiB free",
            fix or "use a file with a smaller quantisation, free the device, or use runtime=cpu",
        )
