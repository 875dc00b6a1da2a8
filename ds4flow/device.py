"""Which device a run computes on, and whether its weights fit there.

Promise: a device that was asked for by name is used or refused, never replaced silently.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import NamedTuple

import torch

from ds4flow.errors import Ds4FlowError, UsageError, near_match

RUNTIMES = ("auto", "cuda", "rocm", "mps", "cpu")
INSTEAD = "use runtime=cpu, or runtime=auto to take what is there"


class DeviceChoice(NamedTuple):
    """A torch device name (`cuda`, `mps` or `cpu`), the kernel backend for it, and why."""

    name: str
    kernels: str
    why: str


def choose_device(runtime: str) -> DeviceChoice:
    """The device for `runtime=cuda|rocm|mps|cpu|auto`.

    Raises UsageError for another name, Ds4FlowError saying what is missing when the device is not
    there. CUDA and ROCm go through the Triton kernels, MPS through the reference kernels.
    """
    if runtime not in RUNTIMES:
        raise UsageError(
            f"runtime={runtime} is not a device",
            f"use one of: {', '.join(RUNTIMES)} {near_match(runtime, RUNTIMES)}".rstrip(),
        )
    if runtime == "cpu":
        return DeviceChoice("cpu", "cpu", "runtime=cpu asks for it")
    if runtime == "auto":
        return _best()
    lacks = missing(runtime)
    if lacks:
        raise Ds4FlowError(f"runtime={runtime} cannot be used: {lacks}", INSTEAD)
    if runtime == "mps":
        return DeviceChoice("mps", "reference", "runtime=mps asks for it")
    return DeviceChoice("cuda", "gpu", f"runtime={runtime} asks for it: {_gpu_name()}")


def _best() -> DeviceChoice:
    reasons = []
    for runtime in ("cuda", "rocm"):
        lacks = missing(runtime)
        if not lacks:
            return DeviceChoice("cuda", "gpu", f"{_gpu_name()} is there")
        reasons.append(f"{runtime}: {lacks}")
    if not missing("mps"):
        return DeviceChoice("mps", "reference", "no CUDA or ROCm device, but Metal is there")
    return DeviceChoice("cpu", "cpu", f"no GPU to use ({'; '.join(reasons)})")


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


def check_fits(needed: int, free: int, what: str) -> None:
    """Raise Ds4FlowError with both sizes when `needed` bytes exceed the `free` ones of a device."""
    if needed > free:
        raise Ds4FlowError(
            f"{what} need {needed / 2**30:.1f} GiB, but the device has {free / 2**30:.1f} GiB free",
            "use a file with a smaller quantisation, free the device, or use runtime=cpu",
        )
