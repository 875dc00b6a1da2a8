"""Processes that share one model: joining them, and exchanging rows in a fixed order.

Promise: nothing is added up between processes. Each hands out what it computed, and every process
then sums in the order that one process alone would.
"""

from __future__ import annotations

import atexit
from typing import Protocol

import torch
import torch.distributed as dist

from ds4flow.errors import Ds4FlowError, UsageError

START = "torchrun --nproc-per-node {} -m ds4flow run ..."


class Group(Protocol):
    """The processes of a run; `rank` is this one's number below `world`."""

    rank: int
    world: int

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` of every process in the order of the ranks; all have the same shape."""


class Processes:
    """The group that torchrun started."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` of every process in the order of the ranks; all have the same shape."""
        x = x.contiguous()
        everyone = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(everyone, x)
        return everyone


def join(world: int, device: str) -> Processes:
    """Meet the other processes: NCCL between GPUs, gloo on the CPU. Until the process ends.

    Raises UsageError when torchrun has not started `world` processes, Ds4FlowError when they do
    not meet.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        except ValueError as error:  # its variables are not set
            raise UsageError(
                f"runtime.tensor_parallel={world} needs {world} processes, and this is one alone",
                f"start it with: {START.format(world)}",
            ) from error
        except (RuntimeError, OSError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise Ds4FlowError(
                f"the {world} processes do not meet: {first}", "start them anew with torchrun"
            ) from error
        atexit.register(dist.destroy_process_group)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    if dist.get_world_size() != world:
        raise UsageError(
            f"runtime.tensor_parallel={world}, but torchrun started {dist.get_world_size()}",
            f"start it with: {START.format(world)}",
        )
    return Processes(dist.get_rank(), world)
