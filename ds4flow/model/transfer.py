"""Weights to a device as they are stored, one after another, with progress.

Promise: a weight is read from the mapping once, and nothing is re-quantised on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from ds4flow.quants import QTensor

T = TypeVar("T")


def on_device(
    weights: T, device: torch.device, progress: Callable[[int, int], None] | None = None
) -> T:
    """A copy of a structure of weights (dataclasses, tuples) whose tensors lie on `device`.

    `progress` is told the bytes copied so far and in all, after each tensor.
    """
    total = stored_bytes(weights)
    done = 0

    def copied(value: Any) -> Any:
        nonlocal done
        if isinstance(value, torch.Tensor):
            there = value.to(device)
            done += value.numel() * value.element_size()
            if progress is not None:
                progress(done, total)
            return there
        if isinstance(value, QTensor):
            return replace(value, data=copied(value.data))
        if isinstance(value, tuple):
            return tuple(copied(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{item.name: copied(getattr(value, item.name)) for item in fields(value)}
            )
        return value

    moved: T = copied(weights)
    return moved


def stored_bytes(weights: Any) -> int:
    """Bytes of all tensors of a structure of weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(weights))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


def report_progress(done: int, total: int) -> None:
    """Show on stderr how much of the weights lies on the device; off a terminal only the end."""
    if done == total or sys.stderr.isatty():
        sizes = f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB"
        print(f"\rweights to the device: {sizes}", end="\n" if done == total else "",
              file=sys.stderr, flush=True)  # fmt: skip
